"""`shmserve check` from a user's view: its output, its exit code, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from shmserve.clients.cli.commands import check
from shmserve.repo import samples
from tests.support import commands
from tests.support.commands import COMMAND
from tests.support.docs import pages
from tests.support.ensemble_models import config_text, ensemble
from tests.support.launch import identity
from tests.support.model_files import python_model, write_model
from tests.support.system.terminal import Terminal

pytestmark = pytest.mark.process

END_S = 60

PYTHON = config_text("python", "x:FP32:[3]", "y:FP32:[3]")
ADDS = """class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "a", "data_type": "TYPE_FP64", "dims": [-1]})
        config.add_output({"name": "b", "data_type": "TYPE_FP32", "dims": [-1]})
        return config

    def execute(self, requests):
        return []
"""


def python(root: Path, name: str, initialize: str = "pass") -> None:
    write_model(root, name, PYTHON, python_model("return self.respond(x)", initialize))


def run(*words: str | Path, code: int = 0) -> tuple[str, str]:
    ended, out, err = commands.run("check", *words)
    assert ended == code, out + err
    return out, err


def test_a_repository_is_checked_for_another_machine(tmp_path: Path) -> None:
    group = "instance_group [ { kind: KIND_GPU gpus: [ 1, 9 ] } ]\n"
    accelerator = 'optimization { execution_accelerators { gpu_execution_accelerator { name: "xpu" } } }\n'
    write_model(tmp_path, "net", PYTHON.replace("python", "onnxruntime") + group + accelerator)
    (tmp_path / "net" / "1" / "model.onnx").touch()
    assert "KIND_GPU, but this server runs models only on the CPU" in run(tmp_path, "--target", "cpu", code=1)[0]
    there = run(tmp_path, "--target", "gpu", code=1)[0]
    assert "instance_group[0].gpus[1]: no GPU 9; this machine has [0, 1, 2, 3, 4, 5, 6, 7]" in there
    assert "unknown Execution Accelerator 'xpu'" in there
    assert "no GPU 1; this machine has [0]" in run(tmp_path, "--target", "gpu:1", code=1)[0]
    assert "instance_group" not in run(tmp_path, "--target", "gpu:10", code=1)[0]
    with pytest.raises(SystemExit):
        run(tmp_path, "--target", "gpu:0")
    assert "--load and --target cannot be combined" in run(tmp_path, "--load", "--target", "gpu", code=2)[1]


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository named relative to the current directory, as a user would."""
    root = tmp_path / "models"
    identity(root, "good")
    identity(root, "typo")
    (root / "typo" / "config.pbtxt").write_text('backnd: "identity"\n')
    write_model(root, "lost", PYTHON + "metric_tags { key: 'a' value: 'b' }\nmax_batch_size: -2\n")
    (root / "notes.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    return root


WARNING = "metric_tags: has no effect: metrics do not have model-specific labels yet"


def test_problems_are_printed_below_their_model_or_alone_with_quiet(mixed: Path) -> None:
    assert run("models", code=1) == (
        f"""models/notes.txt: warning: not a directory, ignored
    -> a model is a directory: NAME/config.pbtxt and NAME/1/
good  ok
lost  2 errors, 1 warning
  models/lost/1: has no file 'model.py': the directory is empty
  models/lost/config.pbtxt:2:1: warning: {WARNING}
  models/lost/config.pbtxt:3:1: max_batch_size: found -2, expected 0 or more
typo  1 error
  models/typo/config.pbtxt:1:1: backnd: ModelConfig has no such field; did you mean "backend"?
3 models checked, 3 errors, 2 warnings
""",
        "",
    )
    errors = """models/lost/1: has no file 'model.py': the directory is empty
models/lost/config.pbtxt:3:1: max_batch_size: found -2, expected 0 or more
models/typo/config.pbtxt:1:1: backnd: ModelConfig has no such field; did you mean "backend"?
"""
    assert run("models", "--quiet", code=1) == (errors, "")
    assert f"models/lost/config.pbtxt:2:1: warning: {WARNING}" in run("models", "--quiet", "--strict", code=1)[0]


def test_exit_codes_and_last_lines(tmp_path: Path) -> None:
    identity(tmp_path / "good", "echo")
    assert run(tmp_path / "good") == ("echo  ok\n1 model checked, no problems\n", "")
    assert run(tmp_path / "good", "--quiet") == ("", "")
    (tmp_path / "good" / "stray").write_text("")
    assert run(tmp_path / "good")[0].endswith("1 model checked, 1 warning\n")
    run(tmp_path / "good", "--strict", code=1)
    assert "is not a directory" in run(tmp_path / "nowhere", code=2)[1]
    assert "--model-config-name" in run(tmp_path / "good", "--model-config-name", "../x", code=2)[1]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The temporary folder of the private server, which must be empty in the end."""
    with tempfile.TemporaryDirectory() as name:
        with mock.patch.dict(os.environ, {"TMPDIR": name}), mock.patch("tempfile.tempdir", None):
            yield Path(name)
        assert os.listdir(name) == []


def test_each_model_is_loaded(tmp_path: Path, temporary: Path) -> None:
    root = tmp_path / "models"
    identity(root, "good")
    identity(root, "typo")
    (root / "typo" / "config.pbtxt").write_text('backnd: "identity"\n')
    python(root, "imports", "import nowhere_to_be_found")
    python(root, "crash", 'print("about to crash"); os.abort()')
    write_model(root, "adds", 'backend: "python"', ADDS)
    ensemble(root, "ensemble", "IN", "OUT", "adds(a:IN)->(b:OUT)")
    without = run(root, code=1)[0].splitlines()
    assert [line.split()[:2] for line in without[:3]] == [[name, "ok"] for name in ("adds", "crash", "ensemble")]

    out, err = run(root, "--load", code=1)
    lines = out.splitlines()
    heads = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if not line.startswith(" ")}
    failed = dict.fromkeys(("crash", "ensemble", "imports", "typo"), "1 error")
    assert heads == failed | {"adds": "ok", "good": "ok", "6": "models checked, 4 errors"}
    assert "      | about to crash" in lines
    why = f"  {root}/crash/1: could not be loaded: its worker process ended while loading: signal SIGABRT"
    assert why in lines
    assert f"  {root}/imports/1: could not be loaded: " in out
    assert "      | ModuleNotFoundError: No module named 'nowhere_to_be_found'" in lines
    assert f"  {root}/ensemble/config.pbtxt:1:" in out
    assert 'ensemble_scheduling.step[0].input_map["a"]: input "a" of model "adds" is TYPE_FP64' in out
    told = {tuple(line.split()[1:4]) for line in err.splitlines()}
    assert ("good", "1", "READY") in told
    assert ("crash", "1", "UNAVAILABLE") in told


def test_models_of_two_namespaces_are_loaded(tmp_path: Path, temporary: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_model(one, "adds", 'backend: "python"', ADDS.replace("FP64", "FP32"))
    write_model(two, "adds", 'backend: "python"', ADDS)
    for root in (one, two):
        ensemble(root, "ensemble", "IN", "OUT", "adds(a:IN)->(b:OUT)")
    python(two, "fails", "raise ValueError")
    out = run(one, two, "--load", "--model-namespacing", code=1)[0]
    assert [line.split(maxsplit=1) for line in out.splitlines() if not line.startswith(" ")] == [
        *(["one/adds", "ok"], ["two/adds", "ok"]),
        *(["one/ensemble", "ok"], ["two/ensemble", "1 error"], ["two/fails", "1 error"]),
        ["5", "models checked, 2 errors"],
    ]
    assert re.search(
        rf'{two}/ensemble/config.pbtxt:1:\d+: ensemble_scheduling.step\[0\].input_map\["a"\]: input "a"', out
    )
    assert f"  {two}/fails/1: could not be loaded: " in out
    identity(tmp_path / "more" / "one", "m")
    error = run(one, tmp_path / "more" / "one", "--model-namespacing", code=2)[1]
    assert "--model-namespacing needs repositories in directories with different names" in error


def test_json_reports_a_failed_load_with_its_log(tmp_path: Path, temporary: Path) -> None:
    python(tmp_path / "models", "raises", 'raise ValueError("no weights here")')
    out, err = run(tmp_path / "models", "--load", "--json", code=1)
    assert err == ""
    (problem,) = json.loads(out)["models"][0]["problems"]
    assert problem["file"] == "raises/1"
    assert problem["text"].startswith("could not be loaded: ")
    assert "no weights here" in problem["text"]
    assert problem["log"][-1] == "ValueError: no weights here"


@contextlib.contextmanager
def waits(root: Path, fifo: Path) -> Iterator[int]:
    """A model that loads forever. The descriptor becomes readable once the model is loading."""
    os.mkfifo(fifo)
    python(root, "slow", f'open({str(fifo)!r}, "w").close(); __import__("threading").Event().wait()')
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield reader
    finally:
        os.close(reader)


def test_a_load_over_the_timeout_is_an_error(tmp_path: Path, temporary: Path) -> None:
    with waits(tmp_path / "models", tmp_path / "fifo"):
        out = run(tmp_path / "models", "--load", "--timeout", "0.5", code=1)[0]
    assert f"  {tmp_path}/models/slow/1: not loaded within 0.5 s\n      -> --timeout allows more\n" in out


def test_a_signal_during_a_load_ends_the_server(tmp_path: Path, temporary: Path) -> None:
    """The server and its workers end with it; the leak check would report any that are left."""
    with waits(tmp_path / "models", tmp_path / "fifo") as reader:
        command = [*COMMAND, "check", "--load", str(tmp_path / "models")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        loading = select.select([reader], [], [], END_S)[0]
        process.send_signal(signal.SIGTERM)
        err = process.communicate(timeout=END_S)[1]
    assert loading, err
    assert process.returncode == 143, err
    assert b"Traceback" not in err


AT_ITS_START = """
class Interrupted(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.kill(os.getpid(), {number})

temporary_server.subprocess.Popen = Interrupted
"""
"""The signal arrives before the object that started the server is returned."""
BEFORE_ITS_START = "temporary_server._delayed_signals = lambda: os.kill(os.getpid(), {number})\n"
"""The signal arrives before signals are delayed, and the server is never started."""


@pytest.mark.parametrize(
    ("place", "number", "code"),
    [(AT_ITS_START, signal.SIGTERM, 143), (BEFORE_ITS_START, signal.SIGINT, 130)],
    ids=["at", "before"],
)
def test_a_signal_while_the_server_starts_ends_it(
    place: str, number: signal.Signals, code: int, tmp_path: Path, temporary: Path
) -> None:
    identity(tmp_path / "models", "m")
    program = "import os, subprocess, sys\nfrom shmserve.clients.cli import main, temporary_server\n"
    program += f"{place.format(number=number.value)}sys.exit(main.main())"
    words = [sys.executable, "-c", program, "check", "--load", str(tmp_path / "models")]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=END_S)
    assert (ran.returncode, "Traceback" in ran.stderr) == (code, False), ran.stderr


def test_progress_is_shown_on_one_line_of_a_terminal(tmp_path: Path, temporary: Path) -> None:
    identity(tmp_path / "models", "good")
    with Terminal([*COMMAND, "check", "--load", str(tmp_path / "models")], 80, 24, {}) as terminal:
        assert terminal.ends() == 0
    assert b"\r\x1b[Kloading: 1 of 1, " in terminal.raw
    assert terminal.text.split() == ["good", "ok", "1", "model", "checked,", "no", "problems"]


def test_a_failed_start_of_the_temporary_server_is_reported(tmp_path: Path, temporary: Path) -> None:
    identity(tmp_path / "models", "good")
    with mock.patch.dict(os.environ, {"SHMSERVE_HOST_POLICY": "nonsense"}):
        err = run(tmp_path / "models", "--load", code=1)[1]
    assert "the temporary server exited with code 2" in err
    assert "nonsense" in err


@pytest.mark.parametrize("command", pages.commands("check"))
def test_commands_of_the_page(command: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples are at the page's paths and are valid, so each command succeeds."""
    samples.build(tmp_path / "build" / "samples", lambda text: None)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command, comments=True)
    assert words[:2] == ["shmserve", "check"]
    run(*words[2:])


def test_the_output_on_the_page_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = pages.page("check")
    config = pages.blocks(text, "text")[0]
    shown = next(block for block in pages.blocks(text, "") if block.startswith("digits "))
    write_model(tmp_path / "models", "digits", config)
    monkeypatch.chdir(tmp_path)
    assert run("models", code=1)[0] == shown
    assert check.LOG_LINES == 20
    assert "the last 20 lines" in text
