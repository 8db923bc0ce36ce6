"""Ensembles with a decoupled step: order of responses, memory, and how far the model runs ahead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import shmserve
from shmserve.testing import Server
from tests.process.pipelines.test_ensembles import arena
from tests.support.broker.metrics import Seen
from tests.support.clients.client_faces import connect
from tests.support.ensemble_models import BATCHES, ensemble, model, numbers
from tests.support.living import pids, until
from tests.support.model_files import python_model
from tests.support.shared_server import SharedServer

pytestmark = pytest.mark.process

COUNT = """
import json
import os
import threading
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        sender, wishes = request.get_response_sender(), json.loads(request.parameters())
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        sent = 0
        while sent < wishes["count"] and not sender.is_cancelled():
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + sent)]))
            sent += 1
            if sent == wishes.get("dies"):
                os.abort()
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        if "report" in wishes:
            with open(wishes["report"], "w") as file:
                file.write(f"{sent}.")
"""
ADD = python_model(
    """
    r = pb_utils.get_input_tensor_by_name(request, "r").as_numpy()
    if (x == 666).any():
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("666 is refused"))
    return self.respond(x + r)
    """
)
DECOUPLED = "model_transaction_policy { decoupled: true }"


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("models")
    model(root, "count", COUNT, DECOUPLED)
    model(root, "pass", more=BATCHES)
    model(root, "add", ADD, f"{BATCHES} input {{ name: 'r' data_type: TYPE_FP32 dims: [-1] }}")
    ensemble(root, "flow", "x", "z", "count(x:x)->(y:t)", "pass(x:t)->(y:z)")
    ensemble(root, "sums", "x", "z s", "count(x:x)->(y:t)", "pass(x:x)->(y:s)", "add(x:t,r:s)->(y:z)")
    ensemble(root, "outer", "x", "z", "flow(x:x)->(z:t)", "pass(x:t)->(y:z)")
    with shared_server.serving(root) as running:
        yield running


@pytest.mark.parametrize("way", ["sync lane", "sync frames", "asyncio lane"])
@pytest.mark.parametrize("size", [3, 100_000])
def test_responses_come_in_order(server: Server, way: str, size: int) -> None:
    with connect(server, way) as client:
        x = numbers(size)
        for name, term in (("flow", 0), ("outer", 0), ("sums", x)):
            found = [part["z"].copy() for part in client.stream(name, {"x": x}, parameters={"count": 25}, window=4)]
            assert len(found) == 25
            assert all((z == x + term + number).all() for number, z in enumerate(found)), name
        assert list(client.stream("flow", {"x": x}, parameters={"count": 0})) == []
        assert way == "sync frames" or arena(client) == 0
    with server.client() as client:
        until(client, lambda: Seen(client.metrics())("shmserve_held_bytes") == 0)


@pytest.mark.parametrize("name", ["flow", "outer"])
def test_a_slow_reader_slows_the_model_down(server: Server, tmp_path: Path, name: str) -> None:
    """The client takes three of a thousand responses, with a window of four; each stage adds another window."""
    report = tmp_path / "report"
    with server.client() as client:
        parameters = {"count": 1000, "report": str(report)}
        with client.stream(name, {"x": numbers(10)}, parameters=parameters, window=4) as parts:
            for _ in range(3):
                next(parts)
        until(client, lambda: report.exists() and report.read_text().endswith("."))
        assert 3 <= int(report.read_text()[:-1]) <= 3 + 4 + 4 * (1 + (name == "outer")) + 1


def test_a_crash_of_the_model_ends_the_stream(server: Server) -> None:
    with server.client() as client:
        before = pids(client, "count")
        with pytest.raises(shmserve.ModelFailed, match=r"in ensemble 'flow', .*ended"):
            list(client.stream("flow", {"x": numbers(5)}, parameters={"count": 20, "dies": 7}))
        until(client, lambda: client.ready("flow") and pids(client, "count") not in (before, {}))
        assert len(list(client.stream("flow", {"x": numbers(5)}, parameters={"count": 2}))) == 2
