"""Tensors between the steps of an ensemble, whose models are in different processes on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from tests.gpu.gpu_models import ADD, FACTS, WHERE, chain, gpu_model, numbers
from tests.support import living

pytestmark = [pytest.mark.gpu, pytest.mark.process]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, cupy: Any) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("steps")
    for name in ("one", "two", "three"):
        gpu_model(repository, name, ADD)
    gpu_model(repository, "where", WHERE, out=FACTS)
    chain(repository, "chain", "one", "two", "three")
    chain(repository, "seen", "one", "two", "where", out=FACTS)
    options = ("--exit-on-error", "true", "--model-control-mode", "explicit", "--load-model", "*")
    with Server(repository, *options, start_timeout=120) as server:
        yield server


def test_a_step_reads_the_output_of_another_process_on_the_gpu(client: shmserve.Client) -> None:
    own = set(living.pids(client, "where").values())
    makers = set(living.pids(client, "two").values())
    found = [client.infer("seen", {"x": numbers()})["y"][0] for _ in range(4)]
    assert {int(pid) for pid, _, _ in found} == own != makers
    assert [int(on_host) for _, on_host, _ in found] == [0, 0, 0, 0]
    assert all(int(address) for _, _, address in found)


def test_every_request_gets_its_own_values(client: shmserve.Client) -> None:
    """A step that reads too early, or memory that is reused too early, gives values of another request."""
    given = [numbers(1 + seed % 2, seed) for seed in range(40)]
    futures = [client.submit("chain", {"x": x}) for x in given]
    for x, future in zip(given, futures, strict=True):
        np.testing.assert_array_equal(future.result()["y"], x + 3)


def test_a_step_is_unloaded_and_loaded_between_requests(client: shmserve.Client) -> None:
    """The new process opens the memory of the others, and they that of the new one."""
    for name in ("three", "one", "two"):
        before = living.pids(client, name)
        client.unload(name)
        client.load(name)
        client.wait_ready("chain", timeout=60)
        assert living.pids(client, name) != before
        given = numbers(1, 7)
        np.testing.assert_array_equal(client.infer("chain", {"x": given})["y"], given + 3)
