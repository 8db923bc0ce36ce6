"""Shadows: another version also gets a share of the requests, and its answers are compared."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from shmserve.core import events
from shmserve.core.effects import Log
from shmserve.core.limits import Limits
from shmserve.core.policy import TensorSpec
from shmserve.core.requests.shadow import LOG_NS, PENDING_BATCHES
from shmserve.protocol.messages import Fail, Handle, Infer, Reply, ReplyHeld, Return, Tensor
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.policies import plain
from tests.support.core.world import World


class Shadowed(World):
    """Version 1 of `m` answers all requests, and version 2 is the shadow for all of them."""

    def __init__(self, percent: int = 100, large: str = "") -> None:
        super().__init__(Limits(crashes=2))
        for number in (1, 2):
            self.deploy(replace(plain("m", 4), version=number), large=large)
        self.main, self.other = self.workers_of(1)[0], self.workers_of(2)[0]
        self.logged: list[Log] = []
        self.set_traffic({1: 100}, {2: percent})
        self.numbers = 0

    def workers_of(self, number: int) -> list[FakeWorker]:
        instances = self.core.state.instances
        return [worker for worker in self.workers.values() if instances[worker.peer][0].number == number]

    def set_traffic(self, shares: dict[int, int], shadow: dict[int, int]) -> None:
        self.turn([(0, events.SetTraffic("m", shares, shadow=shadow))])

    def tell(self, effect: Any) -> None:
        if isinstance(effect, Log) and "shadow" in effect.text:
            self.logged.append(effect)
        super().tell(effect)

    def ask(self, client: FakeClient, *inputs: Tensor, version: int = 0) -> int:
        self.numbers += 1
        client.sends(self.numbers)
        tensors = inputs or (Tensor("x", "FP32", (1, 1), bytes(4)),)
        self.turn([(client.peer, Infer(self.numbers, "m", version, tensors))])
        return self.numbers

    def run(self, worker: FakeWorker, **how: Any) -> None:
        """Runs the worker's batches."""
        worker.finish(self.now, **how)
        self.turn(self.heard(worker))

    @property
    def counts(self) -> dict[str, int]:
        return self.core.state.models["m"].comparisons.get((1, 2), {})

    def check_idle(self) -> None:
        state = self.core.state
        assert not state.requests
        assert not state.ledger.holds
        assert state.compared_bytes == 0
        assert all(not segment.uses for segment in state.ledger.segments.values())


@pytest.fixture
def world() -> Shadowed:
    return Shadowed()


def busy(worker: FakeWorker) -> bool:
    return worker.running is not None


def test_the_shadow_compares_after_the_answer(world: Shadowed) -> None:
    client = world.connect("c")
    number = world.ask(client)
    assert not busy(world.other), "not before the answer"
    world.run(world.main)
    assert isinstance(client.answers[number], Reply)
    assert client.answers[number].version == 1
    assert busy(world.other)
    ((expected,),) = [order.outputs for order in world.other.expected.values()]
    assert expected == client.answers[number].outputs[0]
    world.run(world.other)
    assert world.counts == {"equal": 1}
    assert not world.logged
    world.check_idle()


def test_differences_are_counted_and_logged_once_a_minute(world: Shadowed) -> None:
    client = world.connect("c")
    world.other.differs = {"y"}
    for _ in range(3):
        world.ask(client)
        world.run(world.main)
        world.run(world.other)
    assert world.counts == {"different": 3}
    assert len(world.logged) == 1
    assert "version 2 answers otherwise than version 1: output 'y' by 7 %" in world.logged[0].text
    world.now += LOG_NS
    world.ask(client)
    world.run(world.main)
    world.run(world.other, error=("MODEL_FAILED", "no idea"))
    assert world.counts == {"different": 3, "failed": 1}
    assert "version 2 fails a request that version 1 answers: no idea" in world.logged[1].text
    assert len(client.answers) == 4
    assert not any(isinstance(answer, Fail) for answer in client.answers.values())
    world.check_idle()


def test_a_share_of_the_requests_that_name_no_version() -> None:
    world = Shadowed(percent=25)
    client = world.connect("c")
    world.turn([(0, events.SetTraffic("m", aliases={"prod": 1}))])
    for _ in range(200):
        world.ask(client)
        world.run(world.main)
        if world.other.running is not None:
            world.run(world.other)
    assert abs(world.counts["equal"] - 50) <= 2
    before = dict(world.counts)
    for _ in range(20):
        world.ask(client, version=1)
        world.run(world.main)
    assert world.counts == before
    world.set_traffic({1: 100}, {})
    for _ in range(20):
        world.ask(client)
        world.run(world.main)
    assert world.counts == before
    world.check_idle()


def test_requests_over_the_pending_limit_of_the_shadow_are_skipped(world: Shadowed) -> None:
    client, most = world.connect("c"), PENDING_BATCHES * 4
    for _ in range(most + 5):
        world.ask(client)
        world.run(world.main)
    assert world.counts == {"skipped": 5}
    assert len(client.answers) == most + 5
    while world.other.running is not None:
        world.run(world.other)
    assert world.counts == {"skipped": 5, "equal": most}
    world.check_idle()


def test_client_requests_run_before_shadow_requests(world: Shadowed) -> None:
    """Requests to version 2 itself run first. While one of them waits, no shadow request is added."""
    client = world.connect("c")
    first = world.ask(client, version=2)
    world.ask(client)
    world.run(world.main)
    second = [world.ask(client, version=2) for _ in range(4)]
    world.ask(client)
    world.run(world.main)
    world.run(world.other)
    assert first in client.answers
    order: list[int] = []
    while world.other.running is not None:
        order += [len(world.other.running.works)]
        world.run(world.other)
    assert all(number in client.answers for number in second)
    assert world.counts.keys() <= {"equal", "skipped"}
    assert sum(world.counts.values()) == 2
    world.check_idle()


def test_a_shadow_that_is_not_served_skips_requests(world: Shadowed) -> None:
    client = world.connect("c")
    world.ask(client)
    world.turn([(0, events.Deploy("m", (world.targets["m"][1],)))])
    world.run(world.main)
    world.ask(client)
    world.run(world.main)
    assert world.counts == {"skipped": 2}
    world.check_idle()


@pytest.mark.parametrize("death", ["crash", "unload"])
def test_the_end_of_a_shadow_fails_no_client_request(death: str) -> None:
    world = Shadowed(large="y")
    client = world.connect("c")
    for _ in range(3):
        world.ask(client)
        world.run(world.main)
    if death == "crash":
        world.crash(world.other)
        world.advance(world.now + 10**9)
        (again,) = world.workers_of(2)
        while again.running is not None:
            world.run(again)
    else:
        world.turn([(0, events.Unload("m", 1, True))])
    for handle in list(client.holds):
        world.turn([(client.peer, give(client, handle))])
    assert len(client.answers) == 3
    assert not any(isinstance(answer, Fail) for answer in client.answers.values())
    if death == "crash":
        assert sum(world.counts.values()) == 3
        world.check_idle()
    assert not world.core.state.comparisons


def give(client: FakeClient, handle: Handle) -> Return:
    client.give_back(handle)
    return Return((handle,))


def test_outputs_stay_until_they_are_compared() -> None:
    """Even if their client has returned them or has disconnected."""
    world = Shadowed(large="y")
    client = world.connect("c")
    number = world.ask(client)
    world.run(world.main)
    (handle,) = client.answers[number].outputs[0].data
    world.turn([(client.peer, give(client, handle))])
    assert world.main.out[handle] == 1
    world.run(world.other)
    assert world.counts == {"equal": 1}
    assert not world.main.out[handle]
    world.ask(client)
    world.run(world.main)
    world.gone(client)
    world.run(world.other)
    assert world.counts == {"equal": 2}
    world.check_idle()


def test_inputs_that_a_client_keeps_are_released_by_the_shadow(world: Shadowed) -> None:
    client = world.connect("c", keeps=True)
    segment = world.own_segment(client, 1 << 20)
    tensor = Tensor("x", "FP32", (1, 1), (Handle(segment.segment, 0, 4),))
    world.turn([(client.peer, segment)])
    number = world.ask(client, tensor)
    world.run(world.main)
    assert isinstance(client.answers[number], ReplyHeld)
    assert client.held_inputs == {number}
    world.run(world.other)
    assert not client.held_inputs
    assert world.counts == {"equal": 1}
    number = world.ask(client, tensor)
    world.run(world.main)
    assert client.held_inputs == {number}
    world.gone(client)
    world.run(world.other)
    assert world.counts == {"equal": 2}
    world.check_idle()


def test_inputs_that_others_may_change_are_skipped(world: Shadowed) -> None:
    for keeps in (False, True):
        client = world.connect("c", keeps=keeps)
        segment = world.own_segment(client, 1 << 20)
        if keeps:
            segment.name = "/shared"
        world.turn([(client.peer, segment)])
        number = world.ask(client, Tensor("x", "FP32", (1, 1), (Handle(segment.segment, 0, 4),)))
        world.run(world.main)
        assert type(client.answers[number]) is Reply
    assert world.counts == {"skipped": 2}
    world.check_idle()


def test_a_request_that_fails_or_is_cancelled_has_no_shadow(world: Shadowed) -> None:
    client = world.connect("c")
    world.ask(client)
    world.run(world.main, error=("MODEL_FAILED", "no"))
    world.ask(client)
    world.gone(client)
    world.run(world.main)
    assert world.other.running is None
    assert world.counts == {"skipped": 2}
    world.check_idle()


def test_inputs_that_the_shadow_does_not_accept(world: Shadowed) -> None:
    client = world.connect("c")
    targets = world.targets["m"]
    world.policies["m", 2] = replace(plain("m", 4), version=2, inputs=(TensorSpec("z", "FP32", (-1,)),))
    world.turn([(0, events.Deploy("m", (targets[1], replace(targets[2], source=7))))])
    world.ask(client)
    world.run(world.main)
    assert world.counts == {"failed": 1}
    assert "cannot run a request that version 1 answers" in world.logged[0].text
    world.check_idle()
