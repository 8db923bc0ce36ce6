"""Shared memory that callers register with the gateway: workers read and write it in place, or the gateway copies
it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest

from shmserve.testing import Server
from tests.support.ensemble_models import ensemble, model
from tests.support.gateway.running_gateway import Gateway
from tests.support.living import pids, until
from tests.support.model_files import python_model

pytestmark = pytest.mark.process

WIDTH = 50_000


def write_models(root: Path) -> None:
    model(root, "add", python_model("return self.respond(x[:-1] + 1)"))
    model(root, "first", "")
    ensemble(root, "both", "x", "y", "first(x:x)->(y:t)", "add(x:t)->(y:y)")


@pytest.fixture(scope="module")
def gateway(server: Server) -> Iterator[Gateway]:
    made = Gateway(server, "--allow-client-shm")
    yield made
    assert b"Traceback" not in made.stop()


class Memory:
    """A registered region: an input at offset 64, followed by space for an output."""

    def __init__(self, gateway: Gateway) -> None:
        self.key = f"/h-{os.getpid()}-{secrets.token_hex(8)}"
        self.size = 4 * WIDTH
        self.file = posix_ipc.SharedMemory(self.key, posix_ipc.O_CREX, size=64 + 3 * self.size)
        self.gateway = gateway
        self.x = np.arange(WIDTH, dtype=np.float32)
        os.pwrite(self.file.fd, self.x.tobytes(), 64)
        region = {"key": self.key, "byte_size": 3 * self.size, "offset": 64}
        assert gateway.ask("POST", "/v2/systemsharedmemory/region/r/register", region) == (200, b"")
        status = json.loads(gateway.ask("GET", "/v2/systemsharedmemory/region/r/status")[1])
        assert status == [region | {"name": "r"}]

    def infer(self, name: str, less: int = 0, offset: int = 4 * WIDTH) -> tuple[int, dict[str, Any]]:
        """`less`: the bytes that the output lacks in its place."""
        size = {"shared_memory_region": "r", "shared_memory_byte_size": self.size}
        output = size | {"shared_memory_offset": offset, "shared_memory_byte_size": self.size - less}
        request = {
            "inputs": [{"name": "x", "shape": [len(self.x)], "datatype": "FP32", "parameters": size}],
            "outputs": [{"name": "y", "parameters": output}],
        }
        status, body = self.gateway.ask("POST", f"/v2/models/{name}/infer", request)
        return status, json.loads(body)

    def check_output(self) -> None:
        """Checks that the model has written x + 1, except for the last element. Clears the output for the next
        request."""
        count = len(self.x) - 1
        found = np.frombuffer(os.pread(self.file.fd, 4 * count, 64 + self.size), np.float32)
        assert np.array_equal(found, self.x[:-1] + 1)
        os.pwrite(self.file.fd, bytes(4 * count), 64 + self.size)

    def close(self) -> None:
        assert self.gateway.ask("POST", "/v2/systemsharedmemory/region/r/unregister") == (200, b"")
        assert self.gateway.ask("GET", "/v2/systemsharedmemory/status") == (200, b"[]")
        self.file.close_fd()
        with contextlib.suppress(posix_ipc.ExistentialError):
            self.file.unlink()


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


def test_workers_read_and_write_a_region_in_place(server: Server, gateway: Gateway) -> None:
    """Outputs are written in place from the second request on: the first one tells the gateway about the model."""
    with registered(gateway) as memory:
        for _ in range(3):
            status, answer = memory.infer("add")
            assert (status, answer["outputs"][0]) == (200, {"name": "y", "datatype": "FP32", "shape": [WIDTH - 1]})
            memory.check_output()
        assert memory.key in maps(server, "add")
        writable = [line for line in maps(server, "add").splitlines() if memory.key in line and " rw-s " in line]
        assert writable, "the output went there without a copy"
        status, answer = memory.infer("add", less=8)
        assert (status, f"{memory.size - 4} bytes" in answer["error"]) == (400, True)
        assert memory.infer("add")[0] == 200
    with server.client() as client:
        until(client, lambda: memory.key not in maps(server, "add"), "the region is unmapped")


def test_outputs_of_ensembles_are_copied(gateway: Gateway) -> None:
    with registered(gateway) as memory:
        for _ in range(2):
            status, answer = memory.infer("both")
            assert status == 200, answer
            memory.check_output()
        status, answer = memory.infer("both", offset=3 * memory.size)
        assert (status, "Invalid offset" in answer["error"]) == (400, True)


def test_a_region_that_workers_cannot_open_is_copied(server: Server, gateway: Gateway) -> None:
    """The region's name is removed after the gateway has opened it. A gateway also copies until it is connected to the
    server."""
    assert gateway.ask("GET", "/v2/health/ready")[0] == 200
    with registered(gateway) as memory:
        memory.file.unlink()
        status, answer = memory.infer("add")
        assert (status, "retry" in answer["error"]) == (503, True)
        assert memory.infer("add")[0] == 200
        memory.check_output()


def test_truncating_a_region_fails_only_the_owners_request(server: Server, gateway: Gateway) -> None:
    with registered(gateway) as memory:
        assert memory.infer("add")[0] == 200
        os.ftruncate(memory.file.fd, 64)
        status, answer = memory.infer("add")  # the request is run again, by a worker that can no longer map the region
        assert status in (500, 503), answer
        with server.client() as client:
            assert np.array_equal(client.infer("add", {"x": memory.x})["y"], memory.x[:-1] + 1)
