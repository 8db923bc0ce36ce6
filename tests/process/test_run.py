"""`shmserve run` as its user runs it: in a terminal, in a pipe, with a debugger, on models that work and that fail."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shlex
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from shmserve.clients.commands_run import PASSED_ON
from shmserve.repo import samples
from shmserve.workers import solo
from shmserve.workers.solo import Order

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
END_S = 60
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE = ROOT / "docs" / "run.md"
COMMANDS = [line for block in BLOCK.findall(PAGE.read_text()) for line in block.splitlines()]

CONFIG = """
backend: "python" max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
input [ { name: "who" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "greeting" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
IDENTITY = CONFIG.replace("python", "identity").replace('"greeting"', '"z"')
MODEL = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        print("initialize", args["model_name"], args["model_version"])

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        who = pb_utils.get_input_tensor_by_name(request, "who")
        first = x.flat[0]
        if first == 1001:
            secret = 42
            raise LookupError("no luck today")
        if first == 1002:
            breakpoint()
        if first == 1003:
            return pb_utils.InferenceResponse([], pb_utils.TritonError("not for you"))
        if first == 1004:
            sys.exit(7)
        if first == 1005:
            x[:] = 0
        if first == 1006:
            x = x.astype(np.float64)
        names = [[b"nobody"]] * len(x) if who is None else who.as_numpy()
        greetings = np.array([[b"hello " + name[0]] for name in names], object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 2), pb_utils.Tensor("greeting", greetings)])

    def finalize(self):
        print("finalize")
"""
AUTO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "a", "data_type": "TYPE_INT32", "dims": [3]})
        config.add_output({"name": "b", "data_type": "TYPE_INT32", "dims": [3]})
        config.set_max_batch_size(0)
        return config

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("b", pb_utils.get_input_tensor_by_name(r, "a").as_numpy() + 1)])
            for r in requests
        ]
"""


def add_model(root: Path, name: str, source: str, config: str | None = CONFIG, version: int = 1) -> Path:
    folder = root / name
    (folder / str(version)).mkdir(parents=True)
    (folder / str(version) / "model.py").write_text(source)
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    add_model(root, "greeter", MODEL)
    add_model(root, "auto", AUTO, 'backend: "python"')
    add_model(root, "broken", MODEL.replace('print("initialize",', "self.missing("))
    add_model(root, "syntax", "class TritonPythonModel(:\n")
    add_model(root, "last", MODEL.replace('print("finalize")', "raise OSError('no end')"))
    add_model(root, "typo", MODEL, CONFIG.replace("TYPE_FP32", "TYPE_FP23"))
    add_model(root, "names", AUTO.replace("TYPE_INT32", "TYPE_INVALID"), 'backend: "python"')
    add_model(root, "identity", "", IDENTITY)
    add_model(root, "old", "", IDENTITY + "version_policy: { specific { versions: [ 1 ] } }")
    (root / "old" / "2").mkdir()
    (root / "old" / "configs").mkdir()
    (root / "old" / "configs" / "large.pbtxt").write_text(IDENTITY.replace("max_batch_size: 4", "max_batch_size: 64"))
    return root


def environment() -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith(("SHMSERVE", "PYTHON"))}
    return found | {"PYTHONPATH": str(ROOT), "TERM": "dumb"}


def command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "shmserve.clients.cli", "run", *words]


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


# ------------------------------------------------------------------------------------------ models that work


def test_a_python_model_and_its_prints(models: Path) -> None:
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
    assert lines[9] == "finalize"
    assert lines[11] == "y         FP32   [2, 2]  2 4 6 8"
    assert lines[12] == "greeting  BYTES  [2, 1]  'hello you' 'hello me'"
    assert re.fullmatch(r"greeter version 1, [\d.]+ (us|ms|s)", lines[14])
    assert ran.err == ""
    assert sorted(path.name for path in (models / "greeter").rglob("*")) == ["1", "config.pbtxt", "model.py"]


def test_json_is_alone_on_standard_output(models: Path) -> None:
    ran = Ran("greeter/", "-", "--outputs", "y", "--repeat", 5, "--json", cwd=models, text='{"inputs": {"x": [1, 2]}}')
    assert ran.document["outputs"] == {"y": {"dtype": "FP32", "shape": [1, 2], "data": [[2, 4]]}}
    assert (ran.document["model"], ran.document["version"], ran.document["warnings"]) == ("greeter", 1, [])
    assert ran.document["load_seconds"] > 0
    latency = ran.document["latency_us"]
    assert latency["requests"] == 5
    assert 0 < latency["median"] <= latency["p99"]
    assert ran.err.split() == ["initialize", "greeter", "1", "finalize"]


def test_random_inputs_and_files(models: Path, tmp_path: Path) -> None:
    words = ["--random", "--batch", "3", "--seed", "7", "--repeat", "20", "--out", str(tmp_path / "out")]
    ran = Ran("greeter", *words, cwd=models)
    assert re.search(r"20 requests one after another: median .*, p99 ", ran.out)
    first = np.load(tmp_path / "out" / "y.npy")
    assert first.shape == (3, 2)
    np.save(tmp_path / "x.npy", first)
    ran = Ran("greeter", "-i", f"x=@{tmp_path / 'x.npy'}", "--json", cwd=models)
    assert np.array_equal(np.array(ran.document["outputs"]["y"]["data"], np.float32), first * 2)
    Ran("greeter", *words, cwd=models)
    assert np.array_equal(np.load(tmp_path / "out" / "y.npy"), first)


def test_a_model_that_completes_its_own_configuration(models: Path) -> None:
    ran = Ran("auto", "-i", "a=1,2,3", "--json", cwd=models)
    assert ran.document["outputs"] == {"b": {"dtype": "INT32", "shape": [3], "data": [2, 3, 4]}}


def test_the_model_directory_itself_may_be_where_one_is(models: Path) -> None:
    assert "greeter version 1" in Ran(".", "--random", cwd=models / "greeter").out


def onnx_model(folder: Path) -> onnx.ModelProto:
    weights = np.random.default_rng(3).random((2048, 1500), np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Neg", ["y"], ["z"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2048])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1500]) for name in ("y", "z")],
        [helper.make_tensor("w", TensorProto.FLOAT, weights.shape, weights.tobytes(), raw=True)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    return model


def test_an_onnx_model_against_the_bare_engine(tmp_path: Path) -> None:
    """Without a configuration, and with tensors that do not fit into messages."""
    model = onnx_model(tmp_path / "matrix")
    x = np.random.default_rng(5).random((4, 2048), np.float32)
    np.save(tmp_path / "x.npy", x)
    ran = Ran("matrix", "-i", "x=@x.npy", "--out", "out", "--repeat", 3, "--json", cwd=tmp_path)
    assert ran.document["outputs"]["y"] == {"dtype": "FP32", "shape": [4, 1500], "file": "out/y.npy"}
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for name, expected in zip(("y", "z"), session.run(["y", "z"], {"x": x}), strict=True):
        np.testing.assert_allclose(np.load(tmp_path / "out" / f"{name}.npy"), expected, rtol=1e-5)
    np.save(tmp_path / "x.npy", np.concatenate([x, x]))
    refused = Ran("matrix", "-i", "x=@x.npy", cwd=tmp_path, code=2)
    assert "8 rows: the max_batch_size of model 'matrix' is 4" in refused.err
    setting = ["--backend-config", "onnxruntime,default-max-batch-size=8"]
    assert Ran("matrix", "-i", "x=@x.npy", "--json", "--out", "out", *setting, cwd=tmp_path).document["outputs"]


def here(capfd: pytest.CaptureFixture[str], code: int = 0, **order: Any) -> tuple[str, str]:
    """In this process, which only models without code of their own may be in: standard output and error."""
    assert solo.run(Order(**order)) == code
    out, err = capfd.readouterr()
    return out, err


def test_versions_and_configurations_by_name(
    models: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(models)
    assert here(capfd, model_dir="old", random=True)[0].startswith("old version 1 (identity)")
    out, err = here(capfd, model_dir="old", random=True, version=2)
    assert out.startswith("old version 2 (identity)")
    assert err == "warning: version 2 of model 'old' would not be served: its version policy\n"
    _, err = here(capfd, model_dir="old", random=True, version=3, code=1)
    assert err == "shmserve run: model 'old' has no version 3; its versions are: 1\n"
    out, err = here(capfd, model_dir="old", random=True, batch=64, model_config_name="large")
    assert "[64, 2]" in out
    assert "a/b" in here(capfd, model_dir="old", random=True, model_config_name="a/b", code=2)[1]


# ------------------------------------------------------------------------------------------ models that fail


def test_what_the_model_raises_is_shown_from_its_own_first_line(models: Path) -> None:
    ran = Ran("greeter", "-i", "x=1001,2", "--repeat", 3, cwd=models, code=1)
    lines = ran.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert re.fullmatch(r'  File ".*/greeter/1/model.py", line \d+, in execute', lines[1])
    assert lines[-2] == "LookupError: no luck today"
    assert lines[-1].startswith("shmserve run: run 1 of 3: ")
    assert lines[-1].endswith("message: LookupError: no luck today")
    assert ran.out.splitlines()[-1] == "finalize"


@pytest.mark.parametrize(
    ("value", "code", "text"),
    [
        (1003, 1, "shmserve run: not for you\n"),
        (1004, 1, "the model called sys.exit(7); in a server that ends its worker"),
        (1005, 1, "ValueError: assignment destination is read-only"),
        (1006, 1, "output 'y' of model 'greeter' has the wrong data type: expected FP32, found FP64"),
    ],
)
def test_other_ways_to_fail(models: Path, value: int, code: int, text: str) -> None:
    ran = Ran("greeter", "-i", f"x={value},2", cwd=models, code=code)
    assert text in ran.err
    assert ran.out.splitlines()[-1] == "finalize"


@pytest.mark.parametrize(
    ("model", "texts"),
    [
        ("broken", ["in initialize", "AttributeError", "shmserve run: failed to load model 'broken' version 1: "]),
        ("syntax", ["class TritonPythonModel(:", "SyntaxError: invalid syntax", "shmserve run: failed to load model"]),
        ("typo", ["shmserve run: model 'typo' cannot be loaded:\n", "typo/config.pbtxt:3:", "TYPE_FP32"]),
        ("names", ["shmserve run: ", "names", "TYPE_INVALID"]),
    ],
)
def test_models_that_do_not_load(models: Path, model: str, texts: list[str]) -> None:
    ran = Ran(model, "--random", cwd=models, code=1)
    for text in texts:
        assert text in ran.err
    assert "loaded in" not in ran.out


def test_a_model_that_fails_at_its_end(models: Path) -> None:
    ran = Ran("last", "--random", "--json", cwd=models, code=1)
    assert ran.out == ""
    assert "OSError: no end" in ran.err
    assert ran.err.splitlines()[-1] == "shmserve run: model 'last' failed while it was finalized: OSError: no end"


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ({}, "model 'identity' needs x (FP32 [-1, 2]), who (BYTES [-1, 1]): give --input x=VALUE"),
        ({"input": ["who=you"]}, "model 'identity' also needs x (FP32 [-1, 2])"),
        ({"input": ["w=1"]}, "the model has no input 'w'; it has x "),
        ({"input": ["x=1,2,3"]}, "a value of shape [3] does not fit [-1, 2]"),
        ({"input": ["x=one,two"]}, "'one' is not a number"),
        ({"input": ["x=@none.npy"]}, "cannot read none.npy: No such file"),
        ({"file": "none.json"}, "cannot read inputs from none.json: No such file"),
        ({"input": ["x=[[1, 2], [3, 4]]", "who=you"]}, "must have the same number of rows: 'x' 2, 'who' 1"),
        (
            {"input": ["x=[[1, 2], [3, 4], [5, 6], [7, 8], [9, 0]]"]},
            "5 rows: the max_batch_size of model 'identity' is",
        ),
        ({"batch": 2}, "--batch is for random data"),
        ({"random": True, "batch": 5}, "--batch 5: the max_batch_size of model 'identity' is 4"),
        ({"random": True, "outputs": "y,w"}, "the model has no output 'w'; it has y, z"),
        ({"random": True, "backend_config": ["off"]}, "--backend-config off: write BACKEND,KEY=VALUE"),
        ({"model_dir": "nowhere"}, "nowhere is not a directory"),
    ],
)
def test_wrong_use_ends_with_2(
    order: dict[str, Any], text: str, models: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(models)
    _, err = here(capfd, code=2, **{"model_dir": "identity"} | order)
    assert err.startswith("shmserve run: ")
    assert text in err
    assert err.count("\n") == 1


def test_exit_codes_and_the_next_step_come_through_the_command(models: Path) -> None:
    assert "--random for data without a meaning" in Ran("identity", cwd=models, code=2).err
    assert "'0' is not a number from 1 up" in Ran("identity", "--repeat", 0, cwd=models, code=2).err


# ------------------------------------------------------------------------------------------ in a terminal


class Conversation:
    """A command whose terminal is ours, which it has as its own too."""

    def __init__(self, *words: str, cwd: Path, before: Sequence[str] = ()) -> None:
        """`before`: a command that ends by running the words that follow it."""
        self.master, slave = os.openpty()
        self.process = subprocess.Popen(
            [*before, *command(words)],
            cwd=cwd,
            env=environment(),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.text = ""

    def until(self, text: str) -> str:
        """What was shown up to and with this text."""
        while text not in self.text:
            assert self._read(), f"never said {text!r}:\n{self.text}"
        shown, _, self.text = self.text.partition(text)
        return shown + text

    def say(self, line: str) -> None:
        os.write(self.master, f"{line}\n".encode())

    def end(self) -> tuple[str, int]:
        while self._read():
            pass
        return self.text, self.process.wait(END_S)

    def _read(self) -> bool:
        assert select.select([self.master], [], [], END_S)[0], f"nothing was said for {END_S} s:\n{self.text}"
        try:
            data = os.read(self.master, 65536)
        except OSError:  # nobody has the other end any more
            return False
        self.text += data.decode().replace("\r", "")
        return bool(data)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


PROMPT = "(Pdb) "


def test_breakpoints_stop_in_the_model_and_go_on(models: Path) -> None:
    with Conversation("greeter", "-i", "x=1002,2", cwd=models) as terminal:
        assert "greeter/1/model.py(" in terminal.until(PROMPT)
        terminal.say("p first + 1")
        assert "1003.0" in terminal.until(PROMPT)
        terminal.say("c")
        text, code = terminal.end()
        assert code == 0
        assert "2004 4" in text


def test_leaving_the_debugger_ends_the_run(models: Path) -> None:
    with Conversation("greeter", "-i", "x=1002,2", "--pdb", cwd=models) as terminal:
        terminal.until(PROMPT)
        terminal.say("q")
        text, code = terminal.end()
    assert code == 1
    assert "Traceback" not in text
    assert text.splitlines()[-2:] == ["finalize", "shmserve run: the debugger was left in the middle of the model"]


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_pdb_stops_where_the_model_raised(models: Path, more: list[str]) -> None:
    with Conversation("greeter", "-i", "x=1001,2", "--pdb", *more, cwd=models) as terminal:
        shown = terminal.until(PROMPT)
        assert "LookupError: no luck today" in shown
        assert re.search(r"> .*/greeter/1/model.py\(\d+\)one\(\)\n-> raise LookupError", shown)
        terminal.say("p secret")
        assert "42" in terminal.until(PROMPT)
        terminal.say("q")
        text, code = terminal.end()
    assert code == 1
    assert text.splitlines()[-1].endswith("message: LookupError: no luck today")


def test_pdb_stops_where_loading_failed(models: Path) -> None:
    with Conversation("broken", "--random", "--pdb", cwd=models) as terminal:
        assert re.search(r"> .*/broken/1/model.py\(\d+\)initialize\(\)", terminal.until(PROMPT))
        terminal.say("q")
        assert terminal.end()[1] == 1


def test_the_debugger_has_the_terminal_when_inputs_came_from_a_pipe(models: Path, tmp_path: Path) -> None:
    """Like `cat request.json | shmserve run greeter -`: the terminal is there, but it is not standard input."""
    request = tmp_path / "request.json"
    request.write_text('{"inputs": {"x": [1002, 2]}}')
    piped = f"import os, sys; os.dup2(os.open({str(request)!r}, os.O_RDONLY), 0); os.execv(sys.argv[1], sys.argv[1:])"
    with Conversation("greeter", "-", cwd=models, before=[sys.executable, "-c", piped]) as terminal:
        terminal.until(PROMPT)
        terminal.say("p first")
        assert "1002.0" in terminal.until(PROMPT)
        terminal.say("c")
        assert terminal.end()[1] == 0


def test_an_interrupt_finalizes_the_model(models: Path) -> None:
    with Conversation("greeter", "--random", "--repeat", "1000000000", cwd=models) as terminal:
        terminal.until("loaded in")
        os.write(terminal.master, b"\x03")
        text, code = terminal.end()
    assert code == 130
    assert text.endswith("finalize\nshmserve run: interrupted\n")


# ------------------------------------------------------------------------------------------ the two sides, the page


def test_what_the_command_passes_on_is_what_the_process_understands() -> None:
    assert Order.__struct_fields__ == PASSED_ON


@pytest.fixture(scope="module")
def with_samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    samples.build(folder / "build" / "samples", lambda text: None)
    np.save(folder / "x.npy", np.ones((2, 64), np.float32))
    (folder / "request.json").write_text('{"inputs": {"INPUT0": [1, 2, 3, 4], "INPUT1": [1, 1, 1, 1]}}')
    return folder


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_of_the_page(line: str, with_samples: Path) -> None:
    before, _, words = line.rpartition("| ")
    document = (with_samples / "request.json").read_text() if before == "cat request.json " else ""
    name, verb, *rest = shlex.split(words)
    assert (name, verb, bool(before)) == ("shmserve", "run", bool(document))
    Ran(*rest, cwd=with_samples, text=document)
