"""The command with closed or full standard streams, and interrupted while it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import cases
from tests.support.commands import COMMAND

END_S = 60
INTERRUPTED = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""
"""Sends the signal of Ctrl-C when this module is imported."""


def run(
    *words: str, buffered: bool = True, command: list[str] = COMMAND, **more: Any
) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SHMSERVE_", "PYTHON"))}
    variables |= {} if buffered else {"PYTHONUNBUFFERED": "1"}
    variables |= more.pop("variables", {})
    more.setdefault("stdout", subprocess.PIPE)
    return subprocess.run(
        [*command, *words], env=variables, stderr=subprocess.PIPE, text=True, check=False, timeout=END_S, **more
    )


@pytest.mark.parametrize(
    ("words", "buffered"),
    [("version", True), ("version", False), ("--help", True), ("infer --help-all", True), ("serve --help-all", True)],
)
def test_a_full_disk_is_reported_in_one_line(words: str, buffered: bool) -> None:
    with Path("/dev/full").open("w") as full:
        ran = run(*words.split(), buffered=buffered, stdout=full)
    name = words.partition(" --")[0].replace("--help", "")
    assert ran.stderr == f"{f'shmserve {name}'.strip()}: cannot write standard output: No space left on device\n"
    assert ran.returncode == 1


@pytest.mark.parametrize("words", ["version", "--help", "serve --help"])
def test_a_closed_pipe_is_not_an_error(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ran = run(*words.split(), stdout=writer)
    os.close(writer)
    assert ran.stderr == ""
    assert ran.returncode in (0, 1)  # from Python 3.11 on, the parser ignores it if nothing is buffered


def test_closed_standard_streams() -> None:
    ran = subprocess.run(
        ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *COMMAND, "version"], capture_output=True, check=False, timeout=END_S
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")
    program = "import os, socket; from shmserve.terminal.streams import prepare; prepare(); "
    program += "import sys; assert socket.socket().fileno() > 2; os.execv(sys.executable, [sys.executable, '-c', "
    program += "'import os, sys; sys.stderr.write(os.readlink(\"/proc/self/fd/1\"))'])"
    other = run(command=["sh", "-c", '"$@" >&-', "sh", sys.executable, "-c", program])
    assert other.stderr.strip() == "/dev/null", "a closed stream does not become a socket"


def test_an_encoding_without_the_characters() -> None:
    program = "from shmserve.terminal.streams import prepare; prepare(); print('caf\\xe9 \\u2192 \\udce9')"
    ran = run(command=[sys.executable, "-c", program], variables={"PYTHONIOENCODING": "latin-1"}, encoding="latin-1")
    assert ran.stdout == "café \\u2192 \\udce9\n"


def test_a_working_directory_that_was_deleted(tmp_path: Path) -> None:
    program = "import os, sys; os.chdir(sys.argv[1]); os.rmdir(sys.argv[1]); sys.argv[1:] = sys.argv[2:]; "
    program += "from shmserve.clients.cli.main import main; sys.exit(main())"
    place = tmp_path / "gone"
    place.mkdir()
    ran = run(str(place), "serve", "m.onnx", command=[sys.executable, "-c", program])
    assert ran.returncode == 1
    assert ran.stderr == "shmserve serve: the current directory has been deleted; change to another\n"


@cases(
    ("shmserve.clients.cli.parser", "from shmserve.clients.cli.start import main; sys.exit(main())"),
    ("shmserve.clients.cli.commands.version", "from shmserve.clients.cli.start import main; sys.exit(main())"),
    ("shmserve.broker.loop", "runpy.run_module('shmserve.broker', run_name='__main__')"),
)
def test_ctrl_c_while_the_program_is_imported(module: str, start: str) -> None:
    words = ["--model-repository", "."] if "broker" in module else ["version"]
    ran = run(*words, command=[sys.executable, "-c", INTERRUPTED.format(module=module) + start])
    assert "Traceback" not in ran.stderr
    assert ran.returncode in (-signal.SIGINT, 130)
    assert ran.stdout == ""


def test_processes_that_are_started_never_receive_ctrl_c() -> None:
    """It arrives in this process after they have been started."""
    child = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    program = f"""
import signal, subprocess, sys
from shmserve.system.interrupts import blocked_in_children
try:
    with blocked_in_children():
        signal.raise_signal(signal.SIGINT)
        process = subprocess.Popen([sys.executable, "-c", {child!r}])
except KeyboardInterrupt:
    sys.exit(process.wait())
"""
    ran = run(command=[sys.executable, "-c", program])
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "True\n", "")


def test_ctrl_c_before_the_server_runs(tmp_path: Path) -> None:
    """At each of these points the runtime directory has files, all of which are removed."""
    for name in ("posix.sweep", "survey", "WorkerSettings"):
        program = f"""
import os, runpy, signal, sys
from shmserve.broker import main
main.{name}  # an error if it has gone
main.{name} = lambda *arguments: os.kill(os.getpid(), signal.SIGINT)
sys.exit(main.main())
"""
        words = ["--model-repository", str(tmp_path), "--runtime-dir", str(tmp_path / "run"), "--no-gateway"]
        ran = run(*words, command=[sys.executable, "-c", program])
        assert (ran.returncode, ran.stderr.splitlines()[-1]) == (130, "shmserve: interrupted"), name
        assert "Traceback" not in ran.stderr
        assert list((tmp_path / "run").iterdir()) == []


def test_a_runtime_directory_that_cannot_be_used_or_has_a_long_path(tmp_path: Path) -> None:
    """Only the path of its lane would be short enough."""
    (tmp_path / "file").touch()
    ran = run("serve", "--model-repository", str(tmp_path), "--runtime-dir", str(tmp_path / "file" / "run"))
    assert ran.returncode == 1
    assert ran.stderr.endswith("/file/run: Not a directory; give another with --runtime-dir\n")
    place = tmp_path / ("d" * (107 - len(f"{tmp_path}//lane.sock")))
    ran = run("serve", "--model-repository", str(tmp_path), "--runtime-dir", str(place))
    assert ran.returncode == 1
    assert "the path of its socket broker.sock has 109 bytes, and that of a Unix socket may have 107; " in ran.stderr
    assert ran.stderr.endswith("give a shorter one with --runtime-dir\n")
    assert not place.exists()


def test_a_runtime_directory_that_is_full(tmp_path: Path) -> None:
    """Simulated by a limit on the size of files."""
    (tmp_path / "app.py").write_text("import shmserve\n\n\n@shmserve.model\ndef f(x: int) -> int:\n    return x\n")
    limited = ["prlimit", "--fsize=0", *COMMAND]
    ran = run("serve", str(tmp_path / "app.py"), "--runtime-dir", str(tmp_path / "run"), command=limited)
    assert ran.returncode == 1
    assert f"cannot write to the runtime directory {tmp_path}/run: File too large; give another with" in ran.stderr
    assert list((tmp_path / "run").iterdir()) == []
