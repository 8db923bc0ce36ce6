"""Models whose number of instances follows the load. Their instances wait for a byte per request, so the tests decide
when a request is answered."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve.clients.future import Future
from shmserve.testing import Server
from tests.support.living import ONE, PYTHON, group, index, pids, until
from tests.support.model_files import parameters, python_model, write_model

pytestmark = pytest.mark.process

LOAD = """
self.gate = os.open({gate!r}, os.O_RDWR)
if os.path.exists({broken!r}):
    raise RuntimeError("no memory is left")
"""
RUN = """
os.read(self.gate, 1)
return self.respond(x)
"""


def scaled(**given: str) -> str:
    return PYTHON + group(1) + parameters(**{"scale_up_queue_ms": "5", "scale_down_secs": "0.3"} | given)


class Gated:
    """A model, and a client that releases its requests."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "models"
        self.broken, gate = folder / "broken", folder / "gate"
        os.mkfifo(gate)
        self._gate = os.open(gate, os.O_RDWR)
        self._futures: list[Future] = []
        self.client: Any = None
        source = python_model(RUN, LOAD.format(gate=str(gate), broken=str(self.broken)))
        self.config = write_model(self.root, "m", scaled(max_instances="3"), source) / "config.pbtxt"

    def ask(self, count: int) -> None:
        """Sends requests, which wait."""
        self._futures += [self.client.submit("m", {"x": ONE}) for _ in range(count)]

    def answer(self) -> None:
        """Releases all requests and checks the answers."""
        os.write(self._gate, b"." * len(self._futures))
        for future in self._futures:
            assert (future.result()["y"] == ONE).all()
        self._futures.clear()

    def entry(self) -> dict[str, Any]:
        return index(self.client, "m")["m/1"]

    def await_size(self, count: int) -> dict[str, int]:
        """Waits until this many processes exist and all others have ended. Returns the pids of the instances."""
        until(self.client, lambda: [one["state"] for one in self.entry()["instances"]] == ["ready"] * count)
        return pids(self.client, "m")

    def scales(self) -> dict[str, float]:
        lines = [line for line in self.client.metrics().splitlines() if line.startswith("shmserve_model_scale_total")]
        return {line.split('direction="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def close(self) -> None:
        os.close(self._gate)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Gated]]:
    folder = tmp_path_factory.mktemp("scaled")
    gated = Gated(folder)
    with Server(gated.root, "--model-control-mode", "explicit", "--load-model", "*") as running:
        yield running, gated
    gated.close()


@pytest.fixture
def gated(server: tuple[Server, Gated]) -> Iterator[Gated]:
    running, gated = server
    with running.client() as client:
        gated.client = client
        yield gated
        gated.answer()


def test_instances_are_added_for_a_queue_and_removed_without_one(server: tuple[Server, Gated], gated: Gated) -> None:
    before = gated.scales()
    for _ in range(2):
        (first,) = gated.await_size(1).items()
        gated.ask(20)
        there = gated.await_size(3)
        assert sorted(there) == ["1 m_0_0", "1 m_0_1", "1 m_0_2"]
        assert first in there.items(), "the first one was not restarted"
        assert gated.entry()["scaled"] == [1, 3]
        gated.answer()
    gated.await_size(1)
    after = gated.scales()
    assert {name: after[name] - before[name] for name in after} == {"up": 4, "down": 4}
    log = server[0].log
    assert "gets one more instance, 'm_0_2' (3 of at most 3): requests waited" in log
    assert "needs one instance less, so 'm_0_2' leaves (2 remain, of at least 1): fewer were enough for" in log


def test_no_request_is_lost_when_an_added_instance_is_killed(gated: Gated) -> None:
    """The added instance crashes with a request, which another instance runs again."""
    gated.await_size(1)
    gated.ask(20)
    there = gated.await_size(3)
    os.kill(there["1 m_0_1"], signal.SIGKILL)
    until(gated.client, lambda: there.items() - pids(gated.client, "m").items())
    assert there["1 m_0_1"] not in gated.await_size(3).values()
    gated.answer()
