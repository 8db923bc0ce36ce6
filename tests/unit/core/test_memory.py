"""The core keeps nothing of finished requests. The garbage collector does not track its structs, so a cycle would
leak."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from shmserve.core import events
from shmserve.core.policy import BatchPolicy, ModelPolicy, QueuePolicy, TensorSpec, TimeoutAction
from shmserve.protocol.messages import Cancel, Handle, Infer, Map, Options, Return, Tensor
from tests.support.core.fakes.client import FakeClient
from tests.support.core.scenarios.scenario import Scenario
from tests.support.core.world import World

MS = 10**6
ROUNDS = 60
LIMIT = 8_000
SLOWLY = 25_000
"""Allowed growth of objects that still fill caches after a few rounds."""
SPECS = (TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),)
POLICIES: dict[str, BatchPolicy | None] = {
    "plain": BatchPolicy(),
    "levels": BatchPolicy((), 0, False, 3, 2, QueuePolicy(TimeoutAction.DELAY, 4 * MS)),
    "expiring": BatchPolicy(default_policy=QueuePolicy(TimeoutAction.REJECT, 2 * MS, False, 50)),
    "ordered": BatchPolicy(preserve_ordering=True),
    "single": None,
}


class Busy:
    def __init__(self, name: str, large: str) -> None:
        self.world = World(checks=False)
        self.world.deploy(ModelPolicy("m", 1, 8, *SPECS, POLICIES[name]), 2, large)
        self.world.turn([(0, events.OwnSegment(Map(1, 1 << 40)))])
        self.name, self.numbers = name, 0
        self.client: FakeClient = self.world.connect("a")

    def infer(self, where: object = None) -> tuple[int, Infer]:
        self.numbers += 1
        self.client.sends(self.numbers)
        data = (where,) if isinstance(where, Handle) else bytes(4)
        options = Options(priority=self.numbers % 4)
        tensor = Tensor("x", "FP32", (1, 1), data)
        return self.client.peer, Infer(self.numbers, "m", 0, (tensor,), None, 3000, options)

    def round(self) -> None:
        """Requests that are served, cancelled in every state, expired or crossed, with own and held memory, and from a
        client that disconnects."""
        world, client = self.world, self.client
        segment = world.own_segment(client, 4096)
        world.turn([(client.peer, segment)] + [self.infer() for _ in range(9)])
        held = next(iter(client.holds), None)
        world.turn([self.infer(Handle(segment.segment, 0, 4)), self.infer(held), self.infer()])
        for worker in world.workers.values():
            if worker.running is not None:
                worker.finish(world.now)
        world.turn([self.infer() for _ in range(5)])
        world.turn([(client.peer, Cancel(number)) for number in sorted(client.open)[::3]])
        world.turn([(client.peer, Return(tuple(client.holds)))])
        client.holds.clear()
        world.advance(world.now + 5 * MS)
        for _ in range(8):
            for worker in world.workers.values():
                if worker.running is not None:
                    worker.finish(world.now)
            world.settle()
        if self.numbers % 4 == 0:
            world.turn([self.infer() for _ in range(12)])
        world.gone(client)
        for worker in world.workers.values():
            worker.started.clear()
        world.forgotten.clear()
        self.client = world.connect("a")

    def crash(self) -> None:
        self.world.turn([self.infer() for _ in range(6)])
        self.world.crash(next(iter(self.world.workers.values())))
        self.world.advance(self.world.now + 60 * 1000 * MS)
        self.round()


def grown(step: Callable[[], None], first: int, rounds: int) -> int:
    """Memory growth in bytes after the first rounds."""
    tracemalloc.start()
    try:
        for _ in range(first):
            step()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(rounds):
            step()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "large"),
    [("plain", ""), ("plain", "y"), ("levels", "y"), ("expiring", ""), ("ordered", "y"), ("single", "")],
)
def test_memory_does_not_grow_with_the_number_of_requests(name: str, large: str) -> None:
    assert grown(Busy(name, large).round, ROUNDS, ROUNDS) < LIMIT, "a request left behind is 500 bytes and more"


def test_memory_does_not_grow_when_workers_crash() -> None:
    assert grown(Busy("plain", "y").crash, 15, 45) < SLOWLY


@pytest.mark.parametrize("end", ["pass_on m_0 y {0} ; done m_0 ; give_back m_0 {0} ; return a {0}", "crash m_0"])
def test_memory_does_not_grow_when_models_call_others(end: str) -> None:
    world = Scenario()
    world.checks = False
    for line in ("model n large=y", "model m large=y", "client a"):
        world.run(line)
    numbers = iter(range(1, 1000))

    def call() -> None:
        number = next(numbers)
        lines = f"infer a {number} ; call m_0 {number} n parent=a{number} ; done n_0 ; {end.format(number)} ; after 60s"
        for line in lines.split(" ; "):
            world.run(line)
        for kept in (world.lines, world.labels, world.forgotten, world.named["a"].answers, world.named["a"].order):
            kept.clear()
        for worker in world.workers.values():
            worker.started.clear()
            worker.waits_for.clear()
            if worker.caller is not None:
                worker.caller.answers.clear()
                worker.caller.order.clear()

    assert grown(call, 20, 60) < SLOWLY
