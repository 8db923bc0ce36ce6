"""Shared memory that callers register at the gateway: workers read and write it in place, or its bytes are copied."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest

from shmserve.testing import Server
from tests.support.ensemble_models import ensemble, model
from tests.support.gateway.running_gateway import Gateway, wait_in_flight
from tests.support.living import pids, until

pytestmark = pytest.mark.process

WIDTH = 50_000
SIZE = 4 * WIDTH
PYTHON = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]

    def one(self, x):
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x[:-1] + 1)])
"""


HELD = (
    PYTHON.replace("import triton", "import os, time\nimport triton", 1)
    + """
    def execute(self, requests):
        while not os.path.exists("GO"):
            time.sleep(0.01)
        return [self.one(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]
"""
)


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model `held` answers when it exists."""
    return tmp_path_factory.mktemp("held") / "go"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, go: Path) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("models")
    model(root, "add", PYTHON)
    model(root, "first", "")
    model(root, "held", HELD.replace("GO", str(go)))
    ensemble(root, "both", "x", "y", "first(x:x)->(y:t)", "add(x:t)->(y:y)")
    with Server(root, "--exit-on-error", "true") as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: Server) -> Iterator[Gateway]:
    made = Gateway(server, "--allow-client-shm")
    yield made
    assert b"Traceback" not in made.stop()


@pytest.fixture(scope="module")
def copying(server: Server) -> Iterator[Gateway]:
    made = Gateway(server, "--allow-client-shm", "--copy-client-shm")
    yield made
    assert b"Traceback" not in made.stop()


class Memory:
    """Of a caller: an input at 64, an output behind it."""

    def __init__(self, gateway: Gateway) -> None:
        self.key = f"/h-{os.getpid()}-{secrets.token_hex(8)}"
        self.place = posix_ipc.SharedMemory(self.key, posix_ipc.O_CREX, size=64 + 3 * SIZE)
        self.gateway = gateway
        self.x = np.arange(WIDTH, dtype=np.float32)
        os.pwrite(self.place.fd, self.x.tobytes(), 64)
        order = {"key": self.key, "byte_size": 3 * SIZE, "offset": 64}
        assert gateway.ask("POST", "/v2/systemsharedmemory/region/r/register", order) == (200, b"")

    def infer(self, name: str, room: int = SIZE) -> tuple[int, dict[str, Any]]:
        size = {"shared_memory_region": "r", "shared_memory_byte_size": SIZE}
        there = {"shared_memory_region": "r", "shared_memory_byte_size": room, "shared_memory_offset": SIZE}
        asked = {
            "inputs": [{"name": "x", "shape": [WIDTH], "datatype": "FP32", "parameters": size}],
            "outputs": [{"name": "y", "parameters": there}],
        }
        status, body = self.gateway.ask("POST", f"/v2/models/{name}/infer", asked)
        return status, json.loads(body)

    def output(self, count: int) -> Any:
        found = np.frombuffer(os.pread(self.place.fd, 4 * count, 64 + SIZE), np.float32)
        os.pwrite(self.place.fd, bytes(4 * count), 64 + SIZE)
        return found

    def close(self) -> None:
        assert self.gateway.ask("POST", "/v2/systemsharedmemory/region/r/unregister") == (200, b"")
        self.place.close_fd()
        with contextlib.suppress(posix_ipc.ExistentialError):
            self.place.unlink()


@contextlib.contextmanager
def registered(gateway: Gateway) -> Iterator[Memory]:
    made = Memory(gateway)
    try:
        yield made
    finally:
        made.close()


def maps(server: Server, name: str) -> str:
    with server.client() as client:
        return "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids(client, name).values())


def until_unmapped(server: Server, key: str) -> None:
    with server.client() as client:
        until(client, lambda: key not in maps(server, "add"), f"{key} stays mapped")


def test_workers_read_and_write_it_in_place(server: Server, gateway: Gateway) -> None:
    """Outputs from the second request to a model on: with the first one it is learnt what the model is."""
    with registered(gateway) as memory:
        for _ in range(3):
            status, answer = memory.infer("add")
            assert (status, answer["outputs"][0]) == (200, {"name": "y", "datatype": "FP32", "shape": [WIDTH - 1]})
            assert np.array_equal(memory.output(WIDTH - 1), memory.x[:-1] + 1)
        assert memory.key in maps(server, "add")
        writable = [line for line in maps(server, "add").splitlines() if memory.key in line and " rw-s " in line]
        assert writable, "the output went there without a copy"
        status, answer = memory.infer("add", SIZE - 8)
        assert (status, f"{SIZE - 4} bytes" in answer["error"]) == (400, True)
        assert memory.infer("add")[0] == 200
    until_unmapped(server, memory.key)


def test_one_in_use_is_unregistered_after_the_request(server: Server, gateway: Gateway, go: Path) -> None:
    def status() -> list[str]:
        code, body = gateway.ask("GET", "/v2/systemsharedmemory/status")
        assert code == 200
        return [region["name"] for region in json.loads(body)]

    with registered(gateway) as memory, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(memory.infer, "held")
        wait_in_flight(server, 1, 1)
        assert gateway.ask("POST", "/v2/systemsharedmemory/unregister") == (200, b"")
        assert status() == ["r"]
        go.touch()
        assert answer.result(timeout=60)[0] == 200
        assert status() == []
        assert np.array_equal(memory.output(WIDTH - 1), memory.x[:-1] + 1)


def test_its_bytes_are_copied_if_that_is_asked_for(server: Server, copying: Gateway) -> None:
    with registered(copying) as memory:
        for _ in range(2):
            assert memory.infer("add")[0] == 200
            assert np.array_equal(memory.output(WIDTH - 1), memory.x[:-1] + 1)
        assert memory.key not in maps(server, "add")


def test_answers_of_ensembles_are_copied(gateway: Gateway) -> None:
    with registered(gateway) as memory:
        for _ in range(2):
            status, answer = memory.infer("both")
            assert status == 200, answer
            assert np.array_equal(memory.output(WIDTH - 1), memory.x[:-1] + 1)


def test_what_workers_cannot_open_is_copied(server: Server, gateway: Gateway) -> None:
    """Its name has gone; the gateway has it open. Before it is connected it copies everything."""
    assert gateway.ask("GET", "/v2/health/ready")[0] == 200
    with registered(gateway) as memory:
        memory.place.unlink()
        status, answer = memory.infer("add")
        assert (status, "retry" in answer["error"]) == (503, True)
        assert memory.infer("add")[0] == 200
        assert np.array_equal(memory.output(WIDTH - 1), memory.x[:-1] + 1)


def test_who_cuts_it_short_loses_his_own_request(server: Server, gateway: Gateway) -> None:
    with registered(gateway) as memory:
        assert memory.infer("add")[0] == 200
        os.ftruncate(memory.place.fd, 64)
        status, answer = memory.infer("add")  # it is run once more, by a worker that cannot map it any more
        assert status in (500, 503), answer
        with server.client() as client:
            assert np.array_equal(client.infer("add", {"x": memory.x})["y"], memory.x[:-1] + 1)
