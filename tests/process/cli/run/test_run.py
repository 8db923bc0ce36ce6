"""`shmserve run` from a user's view: from a shell or a script, and in a terminal with breakpoints and the debugger; and
`shmserve dev`, which serves a saved file at once, and prints an error in it while the old code keeps serving.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.clients.cli.commands.base import order_of
from shmserve.clients.cli.parser import parser
from shmserve.repo import samples
from shmserve.workers.foreground import run as foreground
from shmserve.workers.foreground.run import RunOrder
from tests.support.cases import cases
from tests.support.commands import COMMAND
from tests.support.docs import pages
from tests.support.living import until, write
from tests.support.model_files import write_model
from tests.support.system.terminal import Terminal
from tests.support.workers.models.run_models import END_S, build, command, environment
from tests.support.workers.models.worker_models import Graph

pytestmark = pytest.mark.process


class Ran:
    def __init__(self, *words: Any, cwd: Path, text: str = "", code: int = 0) -> None:
        done = subprocess.run(
            command([str(word) for word in words]),
            cwd=cwd,
            env=environment(),
            input=text,
            capture_output=True,
            text=True,
            timeout=END_S,
            check=False,
        )
        self.out, self.err = done.stdout, done.stderr
        assert done.returncode == code, f"exit code {done.returncode}\n{self.out}\n{self.err}"

    @property
    def document(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    build(root)
    return root


def test_a_python_model_runs_and_its_prints_are_shown(models: Path) -> None:
    ran = Ran("greeter", "-i", "x=[[1, 2], [3, 4]]", "-i", 'who=["you", "me"]', cwd=models)
    lines = ran.out.splitlines()
    assert lines[0] == "initialize greeter 1"
    assert re.fullmatch(r"greeter version 1 \(python\), loaded in [\d.]+ (us|ms|s)", lines[1])
    assert [line.split() for line in lines[3:8]] == [
        ["name", "dtype", "shape"],
        ["input", "x", "FP32", "[-1,", "2]"],
        ["input", "who", "BYTES", "[-1,", "1]"],
        ["output", "y", "FP32", "[-1,", "2]"],
        ["output", "greeting", "BYTES", "[-1,", "1]"],
    ]
    assert (lines[9], lines[11]) == ("finalize", "y         FP32   [2, 2]  2 4 6 8")
    assert lines[12] == "greeting  BYTES  [2, 1]  'hello you' 'hello me'"
    assert re.fullmatch(r"greeter version 1, [\d.]+ (us|ms|s)", lines[14])
    assert ran.err == ""
    assert sorted(path.name for path in (models / "greeter").rglob("*")) == ["1", "config.pbtxt", "model.py"]


def test_standard_output_contains_only_json_with_json(models: Path) -> None:
    ran = Ran("greeter/", "-", "--outputs", "y", "--repeat", 5, "--json", cwd=models, text='{"inputs": {"x": [1, 2]}}')
    assert ran.document["outputs"] == {"y": {"dtype": "FP32", "shape": [1, 2], "data": [[2, 4]]}}
    assert (ran.document["model"], ran.document["version"], ran.document["warnings"]) == ("greeter", 1, [])
    assert ran.document["load_seconds"] > 0
    latency = ran.document["latency_us"]
    assert latency["requests"] == 5
    assert 0 < latency["median"] <= latency["p99"]
    assert ran.err.split() == ["initialize", "greeter", "1", "finalize"]


def test_random_inputs_and_files(models: Path, tmp_path: Path) -> None:
    words = ["--random", "--batch", "3", "--seed", "7", "--repeat", "20", "--out", str(tmp_path)]
    ran = Ran("greeter", *words, cwd=models)
    assert re.search(r"20 requests one after another: median .*, p99 ", ran.out)
    first = np.load(tmp_path / "y.npy")
    assert first.shape == (3, 2)
    ran = Ran("greeter", "-i", f"x=@{tmp_path / 'y.npy'}", "--json", cwd=models)
    assert np.array_equal(np.array(ran.document["outputs"]["y"]["data"], np.float32), first * 2)


def test_the_current_directory_is_a_model_that_completes_its_own_configuration(models: Path) -> None:
    ran = Ran(".", "-i", "a=1,2,3", "--json", cwd=models / "auto")
    assert ran.document["model"] == "auto"
    assert ran.document["outputs"] == {"b": {"dtype": "INT32", "shape": [3], "data": [2, 3, 4]}}


def test_a_request_that_runs_again_starts_its_sequence_once(tmp_path: Path) -> None:
    source = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    starts = []

    def execute(self, requests):
        (request,) = requests
        self.starts.append(request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
        if len(self.starts) < 3:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return [None]
        print(self.starts)
        return [pb_utils.InferenceResponse(request.inputs())]
"""
    tensors = " ".join(f'{kind} {{ name: "x" data_type: TYPE_FP32 dims: [1] }}' for kind in ("input", "output"))
    write_model(tmp_path, "m", f'backend: "python" {tensors} sequence_batching {{ iterative_sequence: true }}', source)
    assert "[1, 0, 0]" in Ran("m", "-i", "x=1", cwd=tmp_path).out


def test_an_onnx_model_without_configuration_and_with_large_tensors(tmp_path: Path) -> None:
    graph = Graph().input("x", "FP32", [-1, 9000]).output("y", "FP32", [-1, 9000]).node("Neg", ["x"], ["y"])
    (tmp_path / "negative" / "1").mkdir(parents=True)
    graph.save(tmp_path / "negative")
    x = np.random.default_rng(5).random((4, 9000), np.float32)
    np.save(tmp_path / "x.npy", x)
    ran = Ran("negative", "-i", "x=@x.npy", "--out", "out", "--repeat", 3, "--json", cwd=tmp_path)
    assert ran.document["outputs"]["y"] == {"dtype": "FP32", "shape": [4, 9000], "file": "out/y.npy"}
    surprise = ran.document["warnings"][-1]
    assert "max_batch_size was not given" in surprise
    assert f"warning: {surprise}\n" in ran.err
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "y.npy"), -x)
    np.save(tmp_path / "x.npy", np.concatenate([x, x]))
    setting = ["--backend-config", "onnxruntime,default-max-batch-size=8"]
    assert Ran("negative", "-i", "x=@x.npy", "--json", "--out", "out", *setting, cwd=tmp_path).document["outputs"]


def here(capfd: pytest.CaptureFixture[str], code: int = 0, **order: Any) -> tuple[str, str]:
    """Runs in this process, which is only allowed for models without Python code. Returns standard output and standard
    error."""
    assert foreground.run(RunOrder(**order)) == code
    out, err = capfd.readouterr()
    return out, err


def test_a_version_and_a_configuration_can_be_selected(
    models: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(models)
    assert here(capfd, model_dir="old", random=True)[0].startswith("old version 1 (identity)")
    out, err = here(capfd, model_dir="old", random=True, version=2)
    assert out.startswith("old version 2 (identity)")
    assert err == "warning: version 2 of model 'old' would not be served because of its version_policy\n"
    _, err = here(capfd, model_dir="old", random=True, version=3, code=1)
    assert err == "shmserve run: model 'old' has no version 3; its versions are: 1\n"
    _, err = here(capfd, model_dir="half", random=True, version=2, code=1)
    assert "shmserve run: failed to load model 'half' version 2: has no file 'model.py'" in err
    out, err = here(capfd, model_dir="old", random=True, batch=64, model_config_name="large")
    assert "[64, 2]" in out
    assert "a/b" in here(capfd, model_dir="old", random=True, model_config_name="a/b", code=2)[1]


def test_a_traceback_starts_in_the_code_of_the_model(models: Path) -> None:
    ran = Ran("greeter", "-i", "x=1001,2", "--repeat", 3, cwd=models, code=1)
    lines = ran.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert re.fullmatch(r'  File ".*/greeter/1/model.py", line \d+, in execute', lines[1])
    assert lines[-2] == "LookupError: no luck today"
    assert lines[-1].startswith("shmserve run: run 1 of 3: ")
    assert lines[-1].endswith("message: LookupError: no luck today")
    assert ran.out.splitlines()[-1] == "finalize"


@cases(
    (1003, "shmserve run: not for you\n"),
    (1004, "the model called sys.exit(7); in a server that ends its worker"),
    (1005, "ValueError: assignment destination is read-only"),
)
def test_invalid_results_and_exits_of_the_model_fail_the_run(value: int, text: str, models: Path) -> None:
    ran = Ran("greeter", "-i", f"x={value},2", cwd=models, code=1)
    assert text in ran.err
    assert ran.out.splitlines()[-1] == "finalize"


@cases(
    ("broken", ["in initialize", "AttributeError", "shmserve run: failed to load model 'broken' version 1: "]),
    ("syntax", ["class TritonPythonModel(:", "SyntaxError: invalid syntax", "shmserve run: failed to load model"]),
    ("typo", ["shmserve run: model 'typo' cannot be loaded:\n", "typo/config.pbtxt:3:", "TYPE_FP32"]),
    ("names", ["shmserve run: ", "names", "TYPE_INVALID"]),
)
def test_load_failures_are_reported(model: str, texts: list[str], models: Path) -> None:
    ran = Ran(model, "--random", cwd=models, code=1)
    assert [text for text in texts if text not in ran.err] == []
    assert "loaded in" not in ran.out


def test_an_exception_in_finalize_fails_the_run(models: Path) -> None:
    ran = Ran("last", "--random", "--json", cwd=models, code=1)
    assert ran.out == ""
    assert "OSError: no end" in ran.err
    assert ran.err.splitlines()[-1] == "shmserve run: model 'last' failed while it was finalized: OSError: no end"


@cases(
    ({}, "model 'identity' needs x (FP32 [-1, 2]), who (BYTES [-1, 1]): give --input x=VALUE"),
    ({"input": ["who=you"]}, "model 'identity' also needs x (FP32 [-1, 2])"),
    ({"input": ["w=1"]}, "the model has no input 'w'; it has x "),
    ({"input": ["x=[[1, 2], [3, 4]]", "who=you"]}, "must have the same number of rows: 'x' 2, 'who' 1"),
    ({"input": ["x=[[1, 2], [3, 4], [5, 6], [7, 8], [9, 0]]"]}, "5 rows: the max_batch_size of model 'identity"),
    ({"random": True, "batch": 5}, "--batch 5: the max_batch_size of model 'identity' is 4"),
    ({"random": True, "outputs": "y,w"}, "the model has no output 'w'; it has y, z"),
    ({"random": True, "backend_config": ["off"]}, "--backend-config off: write BACKEND,KEY=VALUE"),
    ({"model_dir": "nowhere"}, "nowhere is not a directory"),
)
def test_invalid_arguments_end_with_exit_code_2(
    order: dict[str, Any], text: str, models: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(models)
    _, err = here(capfd, code=2, **{"model_dir": "identity"} | order)
    assert err.startswith("shmserve run: ")
    assert text in err
    assert err.count("\n") == 1


def test_the_command_passes_on_every_field_of_the_run_order() -> None:
    given = ["request.json", "--seed=1", "--batch=1", "--outputs=y", "--out=o", "--version=1", "--backend-directory=d"]
    order = json.loads(order_of(parser().parse_args(["run", "model", *given])))
    assert set(order) == set(RunOrder.__struct_fields__)


@pytest.fixture(scope="module")
def with_samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    samples.build(folder / "build" / "samples", lambda text: None)
    np.save(folder / "x.npy", np.ones((2, 64), np.float32))
    (folder / "request.json").write_text('{"inputs": {"INPUT0": [1, 2, 3, 4], "INPUT1": [1, 1, 1, 1]}}')
    return folder


@pytest.mark.parametrize("line", pages.commands("run"))
def test_commands_of_the_page(line: str, with_samples: Path) -> None:
    before, _, words = line.rpartition("| ")
    document = (with_samples / "request.json").read_text() if before == "cat request.json " else ""
    name, verb, *rest = shlex.split(words)
    assert (name, verb, bool(before)) == ("shmserve", "run", bool(document))
    Ran(*rest, cwd=with_samples, text=document)


COUNTS = """
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request.get_response_sender(), request)).start()

    def answer(self, sender, request):
        for index in range(int(request.inputs()[0].as_numpy()[0, 0])):
            if index == 5:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("five is too many")))
            else:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full((1, 2000), index, np.float32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNTS_CONFIG = """
backend: "python" max_batch_size: 4 model_transaction_policy { decoupled: true }
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
model_warmup [ { batch_size: 2 inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 1 ] random_data: true } } } ]
"""


def test_each_response_of_a_decoupled_model_is_shown(tmp_path: Path) -> None:
    write_model(tmp_path, "counts", COUNTS_CONFIG, COUNTS)
    shown = Ran("counts", "--input", "x=3", "--repeat", "2", cwd=tmp_path).out
    assert [line for line in shown.splitlines() if line.startswith("part ")] == ["part 1", "part 2", "part 3"]
    assert "counts version 1, 3 parts, 2 requests" in shown
    found = Ran("counts", "--input", "x=2", "--json", "--out", "out", cwd=tmp_path).document
    assert [part["y"]["file"] for part in found["parts"]] == ["out/1/y.npy", "out/2/y.npy"]
    assert (np.load(tmp_path / "out" / "2" / "y.npy") == np.full((1, 2000), 1, np.float32)).all()
    assert Ran("counts", "--input", "x=0", "--json", cwd=tmp_path).document["parts"] == []
    failed = Ran("counts", "--input", "x=6", cwd=tmp_path, code=1)
    assert "five is too many" in failed.err
    config = COUNTS_CONFIG.replace("random_data: true", 'input_data_file: "six"')
    (tmp_path / "counts" / "warmup").mkdir()
    (tmp_path / "counts" / "warmup" / "six").write_bytes(np.float32(6).tobytes())
    (tmp_path / "counts" / "config.pbtxt").write_text(config)
    failed = Ran("counts", "--input", "x=1", cwd=tmp_path, code=1)
    assert "warm-up sample number 0 of model 'counts' failed: five is too many" in failed.err


PROMPT = "(Pdb) "


def conversation(*words: str, cwd: Path, before: Sequence[str] = ()) -> Terminal:
    """`before`: a command that ends by running the words that follow it."""
    return Terminal([*before, *command(words)], 200, 50, environment(), cwd)


def test_a_breakpoint_opens_the_debugger_which_continues_or_ends_the_run(models: Path) -> None:
    with conversation("greeter", "-i", "x=1002,2", cwd=models) as terminal:
        assert "greeter/1/model.py(" in terminal.until(PROMPT)
        terminal.press("p first + 1\n")
        assert "1003.0" in terminal.until(PROMPT)
        terminal.press("c\n")
        text, code = terminal.rest()
        assert code == 0
        assert "2004 4" in text
    with conversation("greeter", "-i", "x=1002,2", "--pdb", cwd=models) as terminal:
        terminal.until(PROMPT)
        terminal.press("q\n")
        text, code = terminal.rest()
    assert code == 1
    assert "Traceback" not in text
    assert text.splitlines()[-2:] == ["finalize", "shmserve run: the debugger was quit while the model was running"]


def test_pdb_stops_where_the_model_raised_or_failed_to_load(models: Path) -> None:
    """With --json, which keeps standard output for the document."""
    with conversation("greeter", "-i", "x=1001,2", "--pdb", "--json", cwd=models) as terminal:
        shown = terminal.until(PROMPT)
        assert "LookupError: no luck today" in shown
        assert re.search(r"> .*/greeter/1/model.py\(\d+\)one\(\)\n-> raise LookupError", shown)
        terminal.press("p secret\n")
        assert "42" in terminal.until(PROMPT)
        terminal.press("q\n")
        text, code = terminal.rest()
    assert code == 1
    assert text.splitlines()[-1].endswith("message: LookupError: no luck today")
    with conversation("broken", "--random", "--pdb", cwd=models) as terminal:
        assert re.search(r"> .*/broken/1/model.py\(\d+\)initialize\(\)", terminal.until(PROMPT))
        terminal.press("q\n")
        assert terminal.rest()[1] == 1


def test_the_debugger_uses_the_terminal_if_standard_input_is_a_pipe(models: Path, tmp_path: Path) -> None:
    """Like `cat request.json | shmserve run greeter -`: there is a terminal, but standard input is a pipe."""
    request = tmp_path / "request.json"
    request.write_text('{"inputs": {"x": [1002, 2]}}')
    piped = f"import os, sys; os.dup2(os.open({str(request)!r}, os.O_RDONLY), 0); os.execv(sys.argv[1], sys.argv[1:])"
    with conversation("greeter", "-", cwd=models, before=[sys.executable, "-c", piped]) as terminal:
        terminal.until(PROMPT)
        terminal.press("p first\n")
        assert "1002.0" in terminal.until(PROMPT)
        terminal.press("c\n")
        assert terminal.rest()[1] == 0


def test_an_interrupt_finalizes_the_model(models: Path) -> None:
    with conversation("greeter", "--random", "--repeat", "1000000000", cwd=models) as terminal:
        terminal.until("loaded in")
        terminal.press("\x03")
        text, code = terminal.rest()
    assert code == 130
    assert text.endswith("finalize\nshmserve run: interrupted\n")


APP = "import shmserve\nfrom words import word\n\n\n@shmserve.model\ndef say(x: int) -> str:\n    return word * x\n"


def test_saved_files_are_served(tmp_path: Path) -> None:
    app, words, run = tmp_path / "app.py", tmp_path / "words.py", tmp_path / "run"
    app.write_text("import shmserve\ndef broken(:\n")
    words.write_text("word = 'a'")
    command = [*COMMAND, "dev", str(app), "--no-gateway", "--runtime-dir", str(run)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "app.py, line 2: invalid syntax" in process.stderr.readline()
            assert "serving" in process.stderr.readline()
            with shmserve.Client(runtime_dir=run) as client:

                def said() -> str:
                    return client.infer("say", {"x": 2})["output"].item().decode()  # type: ignore[no-any-return]

                assert client.models() == []
                write(app, APP)
                until(client, lambda: [model["state"] for model in client.models()] == ["READY"])
                assert said() == "aa"
                write(words, "word = 'b'")
                until(client, lambda: said() == "bb")
                write(app, "def broken(:\n")
                until(client, lambda: "line 1" in str(client.models()[0]["last_failed_change"]))
                assert said() == "bb"
                write(app, APP.replace("word * x", "word"))
                until(client, lambda: said() == "b")
        finally:
            process.terminate()
            _, log = process.communicate()
    assert process.returncode == 0
    assert "app.py, line 1: invalid syntax; the previous version is still served" in log
    assert log.count("serves the change after") == 3
