"""Processes that are killed while their memory on the GPU is open elsewhere. The others must continue to
serve correct values, and no memory may stay held."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shmserve
from bench.lib.child import Child
from shmserve.testing import Server
from tests.gpu.gpu_models import ADD, DIE, WIDTH, chain, gpu_model, numbers
from tests.support import living
from tests.support.launch import await_end

pytestmark = [pytest.mark.gpu, pytest.mark.process]
SLOW = """
    def one(self, x):
        array = self.on_device(x)
        for _ in range(40):
            array = array + 1
        return pb_utils.Tensor.from_dlpack("y", array)
"""


@pytest.fixture
def server(tmp_path: Any, cupy: Any) -> Iterator[Server]:
    gpu_model(tmp_path, "make", ADD)
    gpu_model(tmp_path, "slow", SLOW)
    gpu_model(tmp_path, "die", DIE)
    chain(tmp_path, "chain", "make", "slow")
    chain(tmp_path, "fatal", "make", "die", "slow")
    with Server(tmp_path, "--exit-on-error", "true", start_timeout=120) as server:
        yield server


def assert_serves(client: shmserve.Client) -> None:
    for name in ("make", "slow", "die"):
        client.wait_ready(name, timeout=60)
    given = numbers(2, 3)
    np.testing.assert_array_equal(client.infer("chain", {"x": given})["y"], given + 41)
    np.testing.assert_array_equal(client.infer("fatal", {"x": given})["y"], given + 42)


def assert_nothing_held(client: shmserve.Client) -> None:
    """The ledger has no response that a client holds, once all have been dropped."""

    def held() -> set[str]:
        return set(re.findall(r"^shmserve_held_bytes (\S+)", client.metrics(), re.MULTILINE))

    living.until(client, lambda: held() == {"0"}, "no bytes are held")


@pytest.mark.parametrize("victim", ["make", "slow"])
def test_a_worker_is_killed_with_requests_in_flight(server: Server, client: shmserve.Client, victim: str) -> None:
    """`make` has exported memory, `slow` has opened it. Each request succeeds with right values or fails."""
    (pid,) = living.pids(client, victim).values()
    given = [numbers(1, seed) for seed in range(30)]
    futures = [client.submit("chain", {"x": x}) for x in given]
    np.testing.assert_array_equal(futures[0].result()["y"], given[0] + 41)
    os.kill(pid, signal.SIGKILL)
    failed = 0
    for x, future in zip(given[1:], futures[1:], strict=True):
        try:
            found = future.result()["y"]
        except shmserve.ServeError:
            failed += 1
            continue
        np.testing.assert_array_equal(found, x + 41)
        del found
    await_end(pid)
    living.until(client, lambda: pid not in living.pids(client, victim).values(), "the end is noticed")
    assert_serves(client)
    del futures, future
    assert_nothing_held(client)
    assert "Traceback" not in server.log, failed


def test_a_worker_dies_with_its_output_on_the_gpu(client: shmserve.Client) -> None:
    """In the middle of a chain: after it has read the memory of the step before."""
    for _ in range(2):
        with pytest.raises(shmserve.ServeError):
            client.infer("fatal", {"x": np.full((1, WIDTH), -5, np.float32)})
        client.wait_ready("die", timeout=60)
    assert_serves(client)
    assert_nothing_held(client)


def test_a_client_is_killed_with_its_memory_open_in_workers(server: Server, client: shmserve.Client) -> None:
    before = set(living.pids(client, "slow").values())
    for _ in range(3):
        with Child("tests.gpu.peers:client", url=server.url, model="slow", width=WIDTH) as peer:
            assert peer.ask(value=1) == {"values": [41]}
            for _ in range(20):
                peer.ask(value=2, submit=True)
            peer.kill()
    assert_serves(client)
    assert_nothing_held(client)
    assert set(living.pids(client, "slow").values()) == before, "a worker has ended with the client"
