"""Ensembles of real processes: memory, mapped, conditional and decoupled steps, loading, and the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve import TopK
from shmserve.clients.cli import main
from shmserve.testing import Server
from tests.support import living
from tests.support.broker.metrics import Seen
from tests.support.clients.client_faces import connect
from tests.support.docs import pages
from tests.support.ensemble_models import ADD, BATCHES, ensemble, model, numbers
from tests.support.launch import descriptors_of, workers_of
from tests.support.living import states, unload_all, until
from tests.support.model_files import python_model
from tests.support.shared_server import SharedServer

pytestmark = pytest.mark.process

PAGE = pages.page("ensembles")

SIGN = python_model(
    """
    flag = np.array([bool(x.sum() > 0)])
    return pb_utils.InferenceResponse([pb_utils.Tensor("flag", flag), pb_utils.Tensor("y", x)])
    """
)
SUM = python_model('return self.respond(x + pb_utils.get_input_tensor_by_name(request, "r").as_numpy())')
COUNT = """
import json
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def stream(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        for number in range(json.loads(request.parameters())["count"]):
            yield pb_utils.InferenceResponse([pb_utils.Tensor("y", x + number)])
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"


def write_models(root: Path) -> None:
    """Some ensembles precede the models that they need in the order of names."""
    for index in range(3):
        model(root, f"pass{index}")
    ensemble(root, "chain", "x", "z", "pass0(x:x)->(y:a)", "pass1(x:a)->(y:b)", "pass2(x:b)->(y:z)")
    for name in ("plus1", "plus20"):
        model(root, name, ADD)
    ensemble(root, "both", "x", "l r", "plus1(x:x)->(y:l)", "plus20(x:x)->(y:r)")
    ensemble(root, "all", "x", "u v", "chain(x:x)->(z:t)", "both(x:t)->(l:u,r:v)")
    model(root, "sign", SIGN, outputs=("y", "flag:BOOL:[1]"))
    ensemble(root, "perhaps", "x", "s z", "sign(x:x)->(y:s,flag:f)", "plus1(x:s)->(y:t)/if:f", "pass0(x:t)->(y:z)")
    ensemble(root, "given", "x f:BOOL:[1]", "z", "plus1(x:x)->(y:z)/if:f")
    model(root, "count", COUNT, DECOUPLED)
    model(root, "pass", more=BATCHES)
    model(root, "add", SUM, f"{BATCHES} input {{ name: 'r' data_type: TYPE_FP32 dims: [-1] }}")
    ensemble(root, "flow", "x", "z", "count(x:x)->(y:t)", "pass(x:t)->(y:z)")
    ensemble(root, "sums", "x", "z s", "count(x:x)->(y:t)", "pass(x:x)->(y:s)", "add(x:t,r:s)->(y:z)")
    ensemble(root, "outer", "x", "z", "flow(x:x)->(z:t)", "pass(x:t)->(y:z)")


@pytest.fixture(scope="module")
def server(server: Server) -> Server:
    """Named segments stay while their workers live: creates all that the tests need before the leak check starts."""
    with shmserve.Client(server.zmq_url) as client:
        x = np.zeros(1 << 20, np.float32)
        for _ in range(2):  # while the previous results are still held
            held = [client.infer("chain", {"x": x}), client.infer("all", {"x": x})]
        assert len(held) == 2
    return server


def used(client: Any, name: str = "broker_arena_used") -> float:
    return Seen(client.metrics())(f"shmserve_{name}_bytes")


@pytest.mark.parametrize("way", ["sync lane", "sync ipc", "asyncio lane"])
def test_the_broker_neither_copies_nor_maps_large_tensors(server: Server, way: str) -> None:
    """Three steps with 4 MiB each."""
    with connect(server, way) as client:
        x = numbers(1 << 20)
        place = client.empty(x.shape, "float32")
        found = client.infer("chain", {"x": x})["z"]
        assert (found == x).all()
        client.infer("chain", {"x": x}, outputs={"z": place})
        assert (place == x).all()
        both = client.infer("all", {"x": x})
        assert (both["u"] == x + 1).all()
        assert (both["v"] == x + 20).all()
        assert used(client) == 0
        again = client.infer("all", {"x": both["u"]}, outputs=["u"])  # an ensemble's output as an ensemble's input
        assert set(again) == {"u"}
        assert (again["u"] == x + 2).all()
    maps = Path(f"/proc/{server.pid}/maps").read_text().splitlines()
    mapped = [line for line in maps if "memfd:shmserve" in line or "/dev/shm/shmserve" in line]
    sizes = [int(end, 16) - int(start, 16) for start, end in (line.split()[0].split("-") for line in mapped)]
    assert all(size < 4 << 20 or " ---p " in line for size, line in zip(sizes, mapped, strict=True)), mapped


def test_all_memory_is_returned(server: Server) -> None:
    for way in ("sync lane", "sync frames"):
        with connect(server, way) as client:
            for _ in range(3):
                x = numbers(100_000)
                both = client.infer("all", {"x": x})
                assert (both["u"] == x + 1).all()
                assert (both["v"] == x + 20).all()
            del both
            client.infer("pass0", {"x": numbers(1)})  # returns the handles of the dropped results
            until(client, lambda client=client: used(client) == used(client, "held") == 0)  # type: ignore[misc]


@pytest.mark.parametrize("size", [3, 50_000])
def test_conditional_steps(client: shmserve.Client, size: int) -> None:
    x = np.ones(size, np.float32)
    found = client.infer("perhaps", {"x": x})
    assert (found["z"] == x + 1).all()
    assert (found["s"] == x).all()
    assert set(client.infer("perhaps", {"x": -x})) == {"s"}
    assert set(client.infer("perhaps", {"x": -x}, outputs=["z"])) == set()
    assert (client.infer("given", {"x": x, "f": np.array([True])})["z"] == x + 1).all()
    assert set(client.infer("given", {"x": x, "f": np.array([False])})) == set()
    outside = client.empty((1,), "bool")
    outside[:] = True
    assert (client.infer("given", {"x": x, "f": outside})["z"] == x + 1).all()


def test_classes_of_ensemble_outputs(client: shmserve.Client) -> None:
    """The step that produces the output computes the classes."""
    x = np.array([3, 9, 5], np.float32)
    best = client.infer("chain", {"x": x}, outputs={"z": TopK(2)})["z"]
    assert best.tolist() == [b"9.000000:1", b"5.000000:2"]
    with pytest.raises(shmserve.Unsupported, match="'s' is read by other steps and cannot be returned as classes"):
        client.infer("perhaps", {"x": x}, outputs={"s": TopK(2), "z": None})


@pytest.mark.parametrize("way", ["sync lane", "sync frames"])
@pytest.mark.parametrize("size", [3, 100_000])
def test_responses_of_a_decoupled_step_come_in_order(server: Server, way: str, size: int) -> None:
    with connect(server, way) as client:
        x = numbers(size)
        for name, term in (("flow", 0), ("outer", 0), ("sums", x)):
            found = [part["z"].copy() for part in client.stream(name, {"x": x}, parameters={"count": 25}, window=4)]
            assert len(found) == 25
            assert all((z == x + term + number).all() for number, z in enumerate(found)), name
        assert list(client.stream("flow", {"x": x}, parameters={"count": 0})) == []
    with server.client() as client:
        until(client, lambda: used(client, "held") == 0)


def test_an_ensemble_computes_and_does_not_queue(client: shmserve.Client) -> None:
    client.infer("both", {"x": numbers(5)})
    (found,) = client.statistics("both")["model_stats"]
    counted = found["inference_stats"]
    assert counted["queue"]["ns"] == 0
    assert 0 < counted["compute_infer"]["ns"] < counted["success"]["ns"]


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server that serves nothing before and after each test."""
    root = tmp_path_factory.mktemp("explicit")
    write_models(root)
    with Server(root, "--model-control-mode", "explicit") as server:
        yield server, root


def own_segments(server: Server, name: str) -> int:
    """The number of segments that a worker has created: only the worker keeps their descriptors."""
    for pid in workers_of(server.pid):
        if f"{name}_0_0" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
            return sum("memfd:shmserve" in target for target in descriptors_of(pid))
    raise AssertionError(f"{name} has no worker")


def test_identity_steps_pass_tensors_on_without_a_copy(explicit: tuple[Server, Path]) -> None:
    """Only the last step allocates memory, for the result."""
    server, _ = explicit
    with server.client() as client:
        client.load("chain")
        x = numbers(1 << 20)
        for _ in range(3):
            assert (client.infer("chain", {"x": x})["z"] == x).all()
        assert [own_segments(server, f"pass{index}") for index in range(3)] == [0, 0, 1]
        unload_all(client)


def test_an_ensemble_is_loaded_and_unloaded_with_its_models(explicit: tuple[Server, Path]) -> None:
    """The ensemble is served only while all of its models are."""
    server, root = explicit
    with server.client() as client:
        client.load("all")
        assert all(map(client.ready, ("all", "chain", "both", "pass0", "plus20")))
        x = numbers(9)
        assert (client.infer("all", {"x": x})["u"] == x + 1).all()
        client.unload("pass1")
        assert states(client, "chain") == states(client, "all") == {"1": "UNAVAILABLE"}
        with pytest.raises(shmserve.NotFound, match="'chain' depends on 'pass1' which has no loaded version"):
            client.infer("all", {"x": x})
        file = root / "pass1" / "config.pbtxt"
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
        unload_all(client)


def write_page(root: Path, old: str = "", new: str = "") -> Path:
    """Writes the repository that the page shows."""
    pages.write_files(PAGE.replace(old, new) if old else PAGE, root)
    (root / "models" / "page" / "1").mkdir()
    return root / "models"


def test_the_example_of_the_page(shared_server: SharedServer, tmp_path: Path) -> None:
    models = write_page(tmp_path)
    assert len(list(models.iterdir())) == 3
    assert main.main(["check", str(models)]) == 0
    (program,) = [block for block in pages.blocks(PAGE) if 'client.infer("page",' in block]
    with shared_server.serving(models) as server:
        printed = pages.run_program(server, program)
    (expected,) = re.findall(r"# (\[\[.*\])", program)
    assert printed.strip() == expected


def test_the_error_output_on_the_page_is_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_page(tmp_path, '"SQUARE" value', '"SQUARES" value')
    monkeypatch.chdir(tmp_path)
    assert main.main(["check", "models"]) == 1
    shown = next(block for block in pages.blocks(PAGE) if block.startswith("page  2 errors"))
    assert shown in capsys.readouterr().out
