"""A model that hangs: a restart rescues the queued requests, and an unload can be forced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.errors import DeadlineExceeded, ModelFailed, Unavailable
from shmserve.testing import Server
from tests.support.living import until
from tests.support.model_files import python_model, write_model

pytestmark = pytest.mark.process

ONE = {"x": np.ones((1, 1), np.float32)}
REQUESTS = 20
MODEL = """
if os.path.exists("{flag}"):
    os.remove("{flag}")
    while True:
        pass
return self.respond(x)
"""
CONFIG = """
backend: "python" max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
dynamic_batching { }
"""


class Hung:
    def __init__(self, server: Server, flag: Path) -> None:
        self.server = server
        self.flag = flag

    def hang(self, client: shmserve.Client) -> list[shmserve.Future]:
        """Submits requests: the first hangs, the others are queued."""
        self.flag.touch()
        first = client.submit("m", ONE)
        until(client, lambda: not self.flag.exists())
        futures = [first, *(client.submit("m", ONE) for _ in range(REQUESTS - 1))]
        until(client, lambda: self.counts(client) == (REQUESTS - 1, 1))
        return futures

    def counts(self, client: shmserve.Client) -> tuple[int, int]:
        (entry,) = client.models()
        return entry["queued"], entry["in_flight"]


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hung]:
    folder = tmp_path_factory.mktemp("hung")
    write_model(folder / "models", "m", CONFIG, python_model(MODEL.format(flag=folder / "hang")))
    options = ("--model-control-mode", "explicit", "--load-model", "m", "--exit-timeout-secs", "1")
    with Server(folder / "models", *options) as server:
        yield Hung(server, folder / "hang")


def test_a_restart_rescues_queued_requests(hung: Hung) -> None:
    with hung.server.client() as client:
        first, *others = hung.hang(client)
        client.restart("m", instance="m_0_0")
        for future in others:
            assert future.result(60)["y"] == 1
        with pytest.raises(
            ModelFailed, match=r"restarted while it ran .* not finish within 1 s \(--exit-timeout-secs\)"
        ):
            first.result(60)
        until(client, lambda: len(client.models()[0]["instances"]) == 1)
        assert hung.counts(client) == (0, 0)


def test_an_unload_reports_what_it_waits_for_and_can_be_forced(hung: Hung) -> None:
    with hung.server.client() as client:
        futures = hung.hang(client)
        until(client, lambda: client.models()[0]["instances"][0]["busy_seconds"])
        pending = r"1 request\(s\) in flight and 19 queued, instance 'm_0_0' is busy .* unload --force m"
        with pytest.raises(DeadlineExceeded, match=pending):
            client.unload("m", timeout=0.1)
        client.unload("m", force=True)
        for future in futures:
            with pytest.raises(Unavailable, match="unloaded by force"):
                future.result(60)
        client.load("m")
        assert client.infer("m", ONE)["y"] == 1
