"""Ensembles of real processes: large tensors by handles, places of the caller's, rows, conditions, deaths, the page.

The oracles: numpy, and what the broker says of its own memory.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve import TopK
from shmserve.clients.cli import main
from shmserve.testing import Server
from tests import ROOT
from tests.support import living
from tests.support.client_faces import FACES
from tests.support.living import PATIENCE_S, pids, states, until
from tests.unit.broker.observability.test_metrics import Seen

pytestmark = pytest.mark.process

PAGE = (ROOT / "docs" / "ensembles.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = re.compile(r"^`(models/[^`]+)`[^\n]*:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)

ADD = """
import os
import select
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.term = int("".join(filter(str.isdigit, args["model_name"])) or 1)

    def execute(self, requests):
        return [self.one(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]

    def one(self, x):
        if (x == 666).any():
            error = pb_utils.TritonError("the beast is not for me")
            return pb_utils.InferenceResponse(error=error)
        if self.term == 1 and (x == 777).any():
            select.select([], [], [])
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x + self.term)])
"""
SIGN = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]

    def one(self, x):
        flag = np.array([bool(x.sum() > 0)])
        return pb_utils.InferenceResponse([pb_utils.Tensor("flag", flag), pb_utils.Tensor("y", x)])
"""
SUM = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        first = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        key = request.correlation_id()
        self.sums[key] = x + (0 if first else self.sums[key])
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", self.sums[key])])
"""
TENSOR = '{{ name: "{name}" data_type: TYPE_{kind} dims: {dims} {more} }}'


def tensors(*texts: str) -> str:
    """x or x:BOOL or x:FP32:[-1,3] or x:FP32:[4]:reshape{shape:[2,2]}"""
    found = []
    for text in texts:
        name, kind, dims, more = (*text.split(":", 3), *("", "", "")[text.count(":") :])
        found.append(TENSOR.format(name=name, kind=kind or "FP32", dims=dims or "[-1]", more=more))
    return "[" + ", ".join(found) + "]"


def model(
    root: Path, name: str, source: str = "", more: str = "", outputs: tuple[str, ...] = ("y",), dims: str = ""
) -> None:
    """In Python, or an identity."""
    (root / name / "1").mkdir(parents=True)
    inputs = tensors(f"x:FP32:{dims}")
    config = f'backend: "{"python" if source else "identity"}" input {inputs} output {tensors(*outputs)} {more}'
    (root / name / "config.pbtxt").write_text(config)
    if source:
        (root / name / "1" / "model.py").write_text(source)


def steps(*texts: str) -> str:
    """MODEL(own:tensor,...)->(own:tensor,...)/map:tensor/if:tensor"""
    found, added = [], []
    for index, text in enumerate(texts):
        match = re.fullmatch(r"(\w+)\((.*)\)->\((.*?)\)(.*)", text)
        assert match
        maps = [
            f'{field} {{ key: "{own}" value: "{tensor}" }}'
            for field, pairs in (("input_map", match[2]), ("output_map", match[3]))
            for own, _, tensor in (pair.partition(":") for pair in pairs.split(","))
        ]
        found.append(f'{{ model_name: "{match[1]}" model_version: -1 {" ".join(maps)} }}')
        for what, tensor in re.findall(r"/(\w+):(\w+)", match[4]):
            added.append(f'parameters {{ key: "step[{index}].{what}" value {{ string_value: "{tensor}" }} }}')
    return f"ensemble_scheduling {{ step [ {', '.join(found)} ] }} {' '.join(added)}"


def ensemble(root: Path, name: str, inputs: str, outputs: str, *texts: str, more: str = "") -> None:
    (root / name / "1").mkdir(parents=True, exist_ok=True)
    config = f'platform: "ensemble" {more} input {tensors(*inputs.split())} output {tensors(*outputs.split())} '
    (root / name / "config.pbtxt").write_text(config + steps(*texts))


BATCHES = "max_batch_size: 64 dynamic_batching { }"


def write_chain(root: Path) -> None:
    for index in range(3):
        model(root, f"pass{index}")
    ensemble(root, "chain", "x", "z", "pass0(x:x)->(y:a)", "pass1(x:a)->(y:b)", "pass2(x:b)->(y:z)")


def write(root: Path) -> None:
    """The ensembles come first in the order of names, before the models that they need."""
    write_chain(root)
    for name in ("plus1", "plus20"):
        model(root, name, ADD)
    model(root, "row1", ADD, BATCHES)
    ensemble(root, "both", "x", "l r", "plus1(x:x)->(y:l)", "plus20(x:x)->(y:r)")
    ensemble(root, "all", "x", "u v", "chain(x:x)->(z:t)", "both(x:t)->(l:u,r:v)")
    ensemble(root, "each", "x:FP32:[-1,-1]", "y:FP32:[-1,-1]", "row1(x:x)->(y:y)/map:x")
    ensemble(root, "twice", "x:FP32:[-1,-1]", "y:FP32:[-1,-1]", "row1(x:x)->(y:t)/map:x", "row1(x:t)->(y:y)/map:t")
    model(root, "sign", SIGN, outputs=("y", "flag:BOOL:[1]"))
    ensemble(root, "perhaps", "x", "s z", "sign(x:x)->(y:s,flag:f)", "plus1(x:s)->(y:t)/if:f", "pass0(x:t)->(y:z)")
    ensemble(root, "judged", "x:FP32:[-1,-1]", "s:FP32:[-1,-1] z:FP32:[-1,-1]", "perhaps(x:x)->(s:s,z:z)/map:x")
    model(root, "sum", SUM, "max_batch_size: 8 sequence_batching { }")
    steps_of_sum = "row1(x:x)->(y:t)", "sum(x:t)->(y:s)", "row1(x:s)->(y:y)"
    ensemble(root, "summed", "x", "y", *steps_of_sum, more="max_batch_size: 8")
    ensemble(root, "told", "x f:BOOL:[1]", "z", "plus1(x:x)->(y:z)/if:f")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("models")
    write(root)
    with Server(root, "--exit-on-error", "true") as running:
        with shmserve.Client(running.zmq_url) as client:  # named segments stay: all that tests need are made now
            x = np.zeros(1 << 20, np.float32)
            for _ in range(2):  # while what came before is still held
                held = [client.infer("chain", {"x": x}), client.infer("all", {"x": x})]
            assert len(held) == 2
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.Client]:
    with server.client() as made:
        yield made


def numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).integers(-500, 500, shape).astype(np.float32)


# ------------------------------------------------------------------------------------------------ tensors stay


def arena(client: Any) -> float:
    return Seen(client.metrics())("shmserve_broker_arena_used_bytes")


@pytest.mark.parametrize("way", ["sync lane", "sync ipc", "asyncio lane"])
def test_large_tensors_go_by_handles(server: Server, way: str) -> None:
    """Three steps with 4 MiB each; the broker's own memory has none of it, and it maps none of it."""
    face, link = way.split()
    with FACES[face](server.url if link == "lane" else server.zmq_url) as client:
        x = numbers(1 << 20)
        place = client.empty(x.shape, "float32")
        found = client.infer("chain", {"x": x})["z"]
        assert (found == x).all()
        client.infer("chain", {"x": x}, outputs={"z": place})
        assert (place == x).all()
        both = client.infer("all", {"x": x})
        assert (both["u"] == x + 1).all()
        assert (both["v"] == x + 20).all()
        assert arena(client) == 0
        again = client.infer("all", {"x": both["u"]}, outputs=["u"])  # what an ensemble made is the input of one
        assert set(again) == {"u"}
        assert (again["u"] == x + 2).all()
    maps = Path(f"/proc/{server.pid}/maps").read_text().splitlines()
    mapped = [line for line in maps if "memfd:shmserve" in line or "/dev/shm/shmserve" in line]
    sizes = [int(end, 16) - int(start, 16) for start, end in (line.split()[0].split("-") for line in mapped)]
    assert all(size < 4 << 20 or " ---p " in line for size, line in zip(sizes, mapped, strict=True)), mapped


def test_frames(server: Server) -> None:
    """Tensors inside of the message, for a client that shares no memory."""
    with shmserve.Client(server.zmq_url, memory="frames") as client:
        x = numbers(10_000)
        both = client.infer("all", {"x": x})
        assert (both["u"] == x + 1).all()
        assert (both["v"] == x + 20).all()
        until(client, lambda: arena(client) == 0)


def test_nothing_is_held_in_the_end(client: shmserve.Client) -> None:
    for _ in range(3):
        x = numbers(100_000)
        assert (client.infer("chain", {"x": x})["z"] == x).all()
    client.infer("pass0", {"x": numbers(1)})  # what was dropped is given back with the next request
    until(client, lambda: Seen(client.metrics())("shmserve_held_bytes") == 0)


# ------------------------------------------------------------------------------------------------ rows, conditions


@pytest.mark.parametrize(("rows", "width"), [(500, 7), (500, 2000), (1, 3), (0, 3), (2, 0)])
def test_rows(client: shmserve.Client, rows: int, width: int) -> None:
    x = numbers(rows, width)
    before = counts(client, "row1")
    y = client.infer("each", {"x": x})["y"]
    assert y.shape == (x.shape if rows else (0, 0))
    assert y.tolist() == (x + 1).tolist() or not rows
    after = counts(client, "row1")
    assert after[0] - before[0] == rows
    if rows == 500:
        assert after[1] - before[1] < 50, "rows share batches"


def test_rows_of_rows(client: shmserve.Client) -> None:
    x = numbers(300, 50)
    y = client.infer("twice", {"x": x})["y"]
    assert (y == x + 2).all()
    assert (client.infer("twice", {"x": y[7:9]})["y"] == x[7:9] + 4).all()


def test_as_many_rows_as_there_may_be(client: shmserve.Client) -> None:
    x = numbers(4096, 1)
    assert (client.infer("twice", {"x": x}, timeout=PATIENCE_S)["y"] == x + 2).all()
    with pytest.raises(shmserve.InvalidRequest, match="4097 rows; the limit of a mapped step is 4096"):
        client.infer("each", {"x": numbers(4097, 1)})


def test_a_row_that_fails(client: shmserve.Client) -> None:
    x = numbers(20, 4)
    x[13, 2] = 666
    with pytest.raises(shmserve.ModelFailed, match=r"^in ensemble 'each', row 13 of step 0: .*the beast is not for me"):
        client.infer("each", {"x": x})


def test_rows_have_no_place(client: shmserve.Client) -> None:
    place = client.empty((2, 2), "float32")
    error = client.submit("each", {"x": numbers(2, 2)}, outputs={"y": place}).exception(PATIENCE_S)
    assert isinstance(error, shmserve.Unsupported)
    assert "'y' is produced by a mapped step" in str(error)


@pytest.mark.parametrize("size", [3, 50_000])
def test_conditions(client: shmserve.Client, size: int) -> None:
    x = np.ones(size, np.float32)
    found = client.infer("perhaps", {"x": x})
    assert (found["z"] == x + 1).all()
    assert (found["s"] == x).all()
    assert set(client.infer("perhaps", {"x": -x})) == {"s"}
    assert set(client.infer("perhaps", {"x": -x}, outputs=["z"])) == set()
    assert (client.infer("told", {"x": x, "f": np.array([True])})["z"] == x + 1).all()
    assert set(client.infer("told", {"x": x, "f": np.array([False])})) == set()
    outside = client.empty((1,), "bool")
    outside[:] = True
    assert (client.infer("told", {"x": x, "f": outside})["z"] == x + 1).all()


def test_conditions_in_rows(client: shmserve.Client) -> None:
    x = np.abs(numbers(30, 40)) + 1
    found = client.infer("judged", {"x": x})
    assert (found["z"] == x + 1).all()
    assert (found["s"] == x).all()
    x[20] *= -1
    assert (client.infer("judged", {"x": x}, outputs=["s"])["s"] == x).all()
    assert set(client.infer("judged", {"x": -np.abs(x)})) == {"s"}
    with pytest.raises(shmserve.InvalidRequest, match=r"'z' of step 0 exists for only 29 of 30 rows"):
        client.infer("judged", {"x": x})


def test_classes(client: shmserve.Client) -> None:
    """Computed by the step that makes the output."""
    x = np.array([3, 9, 5], np.float32)
    best = client.infer("chain", {"x": x}, outputs={"z": TopK(2)})["z"]
    assert best.tolist() == [b"9.000000:1", b"5.000000:2"]
    with pytest.raises(shmserve.Unsupported, match="'s' is read by other steps and cannot be returned as classes"):
        client.infer("perhaps", {"x": x}, outputs={"s": TopK(2), "z": None})


def test_sequences(client: shmserve.Client) -> None:
    """Two at a time: each has its own sum, of which every element has gone through two other steps."""
    xs = {7: numbers(5, 1, 3), 8: numbers(5, 1, 3) * 2}
    for at in range(5):
        for key, x in xs.items():
            y = client.infer("summed", {"x": x[at]}, sequence=key, sequence_start=at == 0, sequence_end=at == 4)["y"]
            assert (y == (x[: at + 1] + 1).sum(axis=0) + 1).all()
    with pytest.raises(shmserve.InvalidRequest, match=r"in ensemble 'summed', .*must specify the START flag"):
        client.infer("summed", {"x": xs[7][0]}, sequence=7)


# ------------------------------------------------------------------------------------------------ counts and ends


def counts(client: shmserve.Client, name: str) -> tuple[int, int]:
    """Requests answered well, and batches run."""
    (found,) = client.statistics(name)["model_stats"]
    return found["inference_stats"]["success"]["count"], found["execution_count"]


def test_statistics(client: shmserve.Client) -> None:
    before = {name: counts(client, name) for name in ("all", "chain", "both", "pass1", "plus20")}
    for _ in range(3):
        client.infer("all", {"x": numbers(5)})
    client.infer("all", {"x": numbers(5)}, outputs=["u"])
    gained = {name: counts(client, name)[0] - count[0] for name, count in before.items()}
    assert gained == {"all": 4, "chain": 4, "both": 4, "pass1": 4, "plus20": 3}
    (found,) = client.statistics("all")["model_stats"]
    inside = found["inference_stats"]
    assert inside["queue"]["ns"] == 0
    assert 0 < inside["compute_infer"]["ns"] < inside["success"]["ns"]
    seen = Seen(client.metrics())
    assert seen("nv_inference_request_success", model="all", version="1") == inside["success"]["count"]
    failed = seen("nv_inference_request_failure", model="both", version="1", reason="OTHER")
    with pytest.raises(shmserve.ModelFailed, match=r"^in ensemble 'both', .*beast"):
        client.infer("both", {"x": np.array([666], np.float32)})
    seen = Seen(client.metrics())
    assert seen("nv_inference_request_failure", model="both", version="1", reason="OTHER") == failed + 1


def test_cancel_and_deadline(client: shmserve.Client) -> None:
    """While a step runs, for ever if it is let."""
    before = pids(client, "plus1")
    with pytest.raises(shmserve.DeadlineExceeded):
        client.infer("both", {"x": np.array([777], np.float32)}, timeout=0.2)
    (pid,) = before.values()
    os.kill(pid, signal.SIGKILL)
    until(client, lambda: pids(client, "plus1") and pids(client, "plus1") != before)
    assert client.infer("both", {"x": np.zeros(1, np.float32)})["r"] == 20


def test_a_worker_dies_in_a_step(client: shmserve.Client) -> None:
    future = client.submit("both", {"x": np.array([777], np.float32)})
    (pid,) = pids(client, "plus1").values()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        shmserve.ModelFailed, match=r"^in ensemble 'both', model 'plus1' version 1: the worker process .*SIGKILL"
    ):
        future.result(PATIENCE_S)
    x = numbers(7)
    assert (client.infer("both", {"x": x}, timeout=PATIENCE_S)["l"] == x + 1).all()


def test_a_worker_dies_between_rows(client: shmserve.Client) -> None:
    """Rows that ran with others run again, each alone: nobody notices."""
    before = pids(client, "row1")
    (pid,) = before.values()
    x = numbers(500, 30)
    os.kill(pid, signal.SIGSTOP)  # it has a batch, and another one waits
    future = client.submit("each", {"x": x})
    client.metadata("each")  # answered behind it: the rows are on their way
    os.kill(pid, signal.SIGKILL)
    assert (future.result(PATIENCE_S)["y"] == x + 1).all()
    assert pids(client, "row1") != before


def test_metadata(client: shmserve.Client) -> None:
    found = client.metadata("each")
    assert found["platform"] == "ensemble"
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}]
    assert client.config("each")["parameters"]["step[0].map"]["string_value"] == "x"
    assert client.ready("all")


# ------------------------------------------------------------------------------------------------ modes


def test_explicit_mode(tmp_path: Path) -> None:
    """An ensemble brings the models of its steps, and takes them with it; without them it is not served."""
    write(tmp_path)
    with Server(tmp_path, "--model-control-mode", "explicit") as server, server.client() as client:
        client.load("all")
        assert all(map(client.ready, ("all", "chain", "both", "pass0", "plus20")))
        x = numbers(9)
        assert (client.infer("all", {"x": x})["u"] == x + 1).all()
        client.unload("pass1")
        assert states(client, "chain") == states(client, "all") == {"1": "UNAVAILABLE"}
        with pytest.raises(shmserve.NotFound, match="'chain' depends on 'pass1' which has no loaded version"):
            client.infer("all", {"x": x})
        client.load("pass1")
        assert (client.infer("all", {"x": x})["u"] == x + 1).all()
        file = tmp_path / "pass1" / "config.pbtxt"
        text = file.read_text()
        file.write_text(text.replace("TYPE_FP32", "TYPE_INT32"))
        client.load("pass1")
        entry = living.index(client)["chain/1"]
        path = 'ensemble_scheduling.step[1].input_map["x"]: input "x" of model "pass1" is TYPE_INT32'
        assert entry["state"] == "UNAVAILABLE"
        assert path in entry["reason"]
        assert states(client, "all") == {"1": "UNAVAILABLE"}
        file.write_text(text)
        client.load("pass1")
        assert (client.infer("all", {"x": x})["u"] == x + 1).all()
        client.unload("all", unload_dependents=True)
        until(client, lambda: not any(client.ready(name) for name in ("chain", "both", "pass0", "plus1")))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('model_name: "pass1"', 'model_name: "past1"', 'step[1].model_name: .*"past1".*did you mean "pass1"'),
        ('key: "x" value: "a"', 'key: "X" value: "a"', r'step[1].input_map["X"]: .*no input "X"; did you mean "x"'),
        ('value: "b" } } , {', 'value: "a" } } , {', 'step[1].output_map["y"]: .*"a" is already produced by'),
        ('key: "x" value: "b"', 'key: "x" value: "z"', 'step[2].*"z" waits for itself'),
        ("TYPE_FP32 dims: [-1]", "TYPE_INT32 dims: [-1]", 'step[0].input_map["x"]: .*is TYPE_FP32, but .*TYPE_INT32'),
        ('value: "z"', 'value: "c"', r'output[0]: ensemble output "z" is not produced by any step'),
        ("ensemble_scheduling", 'parameters { key: "step[0].map" value { string_value: "b" } } ensemble_scheduling',
         'parameters["step[0].map"]: step 0 does not read ensemble tensor "b"'),
        ("ensemble_scheduling", 'parameters { key: "step[1].if" value { string_value: "x" } } ensemble_scheduling',
         'parameters["step[1].if"]: expected a TYPE_BOOL'),
        ('version: -1 input_map { key: "x" value: "b"', 'version: 7 input_map { key: "x" value: "b"',
         "step[2].model_version: found 7"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(
    tmp_path: Path, old: str, new: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `check`, with step and field."""
    write(tmp_path)
    file = tmp_path / "chain" / "config.pbtxt"
    text = file.read_text().replace("},", "} ,").replace("  ", " ")
    assert old in text
    file.write_text(text.replace(old, new, 1))
    assert main.main(["check", str(tmp_path)]) == 1
    pattern = re.escape(told).replace(r"\.\*", ".*").replace(r"\[X\]", "[X]")
    assert re.search(pattern, capsys.readouterr().out)


# ------------------------------------------------------------------------------------------------ the page


def test_the_page(tmp_path: Path) -> None:
    """What it shows is a repository that is served, and a program that prints what it says."""
    for name, text in FILES.findall(PAGE):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "models" / "page" / "1").mkdir()
    assert len(list((tmp_path / "models").iterdir())) == 3
    assert main.main(["check", str(tmp_path / "models")]) == 0
    (program,) = [match[2] for match in FENCE.finditer(PAGE) if 'client.infer("page",' in match[2]]
    with Server(tmp_path / "models", "--exit-on-error", "true") as server:
        environment = os.environ | {"SHMSERVE_RUNTIME_DIR": str(server.runtime_dir)}
        ran = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
    (said,) = re.findall(r"# (\[\[.*\])", program)
    assert ran.stdout.strip() == said


def test_what_the_page_says_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FILES.findall(PAGE):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace('"SQUARE" value', '"SQUARES" value'))
    (tmp_path / "models" / "page" / "1").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main.main(["check", "models"]) == 1
    shown = next(match[2] for match in FENCE.finditer(PAGE) if match[2].startswith("page  2 errors"))
    assert shown in capsys.readouterr().out
