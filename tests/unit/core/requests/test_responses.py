"""Streams in the core, beyond what the scenario files say: what callers may say of their room."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.core.limits import Limits
from shmserve.core.policy import BatchPolicy, ModelPolicy, TensorSpec
from shmserve.core.stats.statistics import RESPONSES, ResponseCount
from shmserve.protocol import codec as wire
from shmserve.protocol.messages import Cancel, Execute, Fail, Infer, More, Options, Part, Tensor, WorkerOrder
from tests.support.core.fakes import FakeClient
from tests.support.core.world import World
from tests.support.hypothesis_profiles import examples

MS = 10**6
X = (TensorSpec("x", "FP32", (1,)),)
Y = (TensorSpec("y", "FP32", (1,)),)
STREAM = ModelPolicy("stream", 1, 4, X, Y, BatchPolicy(delay_ns=5 * MS), decoupled=True)
NUMBERS = st.integers(0, 100) | st.integers(2**62, 2**63 - 1)


def ask(number: int, window: int) -> Infer:
    return Infer(number, "stream", 0, (Tensor("x", "FP32", (1, 1), bytes(4)),), None, 0, Options(window=window))


@settings(max_examples=examples(50))
@given(window=NUMBERS.filter(bool), before=st.lists(NUMBERS, max_size=3), after=st.lists(NUMBERS, max_size=3))
def test_whatever_room_callers_claim_the_worker_can_read(window: int, before: list[int], after: list[int]) -> None:
    world = World(Limits(crashes=1))
    world.deploy(STREAM)
    client, worker = world.connect("a"), world.worker("stream_0")
    client.sends(1, window)
    world.slow_to.add(worker.peer)
    world.turn([(client.peer, ask(1, window)), *((client.peer, More(1, count)) for count in before)])
    world.advance(world.now + 5 * MS)
    world.turn([(client.peer, More(1, count)) for count in after])
    codec = wire.Codec(WorkerOrder)
    read = [order for packet in wire.pack(worker.inbox) for order in codec.decode(packet)]
    (execute,) = [order for order in read if isinstance(order, Execute)]
    options = execute.works[0].options
    assert options is not None
    assert options.window == min(window + sum(before), 2**63 - 1)
    assert [order.count for order in read if isinstance(order, More)] == after


def test_who_says_more_of_what_is_over_or_not_its_own_is_not_heard() -> None:
    world = World()
    world.deploy(STREAM)
    client, other, worker = world.connect("a"), world.connect("b"), world.worker("stream_0")
    client.sends(1, 1)
    world.turn([(client.peer, ask(1, 1)), (other.peer, More(1, 5))])
    world.advance(world.now + 5 * MS)
    (request,) = worker.streams
    assert worker.room[request] == 1
    worker.part(request, last=True)
    world.turn(world.heard(worker))
    assert isinstance(client.answers[1], Part)
    world.turn([(client.peer, More(1, 5)), (client.peer, More(7, 5))])
    assert not world.core.state.requests


def test_streams_that_models_do_not_end_are_limited_by_user() -> None:
    """Cancelled, or left by a client that connects again: the model has them still."""
    world = World(Limits(client_requests=8))
    world.deploy(STREAM)
    worker = world.worker("stream_0")

    def begin(name: str, audience: str, *numbers: int) -> FakeClient:
        client = world.connect(name, audience=audience)
        for number in numbers:
            client.sends(number, 1)
        world.turn([(client.peer, ask(number, 1)) for number in numbers])
        world.advance(world.now + 5 * MS)
        while worker.running is not None:
            worker.finish(world.now)
            world.settle()
        return client

    first = begin("a", "uid:1000", 1, 2, 3, 4)
    world.turn([(first.peer, Cancel(number)) for number in (1, 2, 3, 4)])
    world.gone(begin("a again", "uid:1000", 1, 2, 3, 4))
    assert len(worker.streams) == 8
    refused = begin("a once more", "uid:1000", 1).answers[1]
    assert isinstance(refused, Fail)
    assert "8 cancelled streams of this user" in refused.text
    assert not begin("b", "uid:2000", 1).answers
    worker.part(next(iter(worker.streams)), last=True)
    world.turn(world.heard(worker))
    assert not begin("a at last", "uid:1000", 1).answers


def test_time_to_the_first_of_many_responses() -> None:
    """Each request counts once, when its first part goes out; a final one with nothing in it is none."""
    world = World(Limits(first_responses=True))
    world.deploy(STREAM)
    client, worker = world.connect("a"), world.worker("stream_0")
    for number in (1, 2):
        client.sends(number, 5)
    world.turn([(client.peer, ask(1, 5)), (client.peer, ask(2, 5))])
    world.advance(world.now + 5 * MS)
    first, second = worker.streams
    for request, last, empty in ((first, False, False), (first, False, False), (second, True, True)):
        world.now += 20 * MS
        worker.part(request, last, empty)
        world.turn(world.heard(worker))
    world.now += 1000 * MS
    worker.part(first, last=True)
    world.turn(world.heard(worker))
    counted = world.core.state.models["stream"].versions[1].statistics
    assert counted.success_count == 2
    assert counted.first is not None
    assert counted.first.counts == [1, 0, 0, 0, 0]
    assert counted.first.sum_ns == 25 * MS


def test_statistics_of_responses_by_their_index() -> None:
    """Each counts for the index that it has in its own request; what a cancelled request has left is one more."""
    world = World()
    world.deploy(STREAM)
    client, worker = world.connect("a"), world.worker("stream_0")
    for number in (1, 2, 3):
        client.sends(number, 99)
    world.turn([(client.peer, ask(number, 99)) for number in (1, 2, 3)])
    world.advance(world.now + 5 * MS)
    first, second, third = worker.streams

    def part(request: int, times: tuple[int, int], **how: Any) -> None:
        worker.part(request, **how).rows[0].times = times
        world.turn(world.heard(worker))

    part(first, (3, 1))
    part(second, (5, 2))
    part(first, (30, 10), empty=True, last=True)
    part(second, (50, 0), error=("MODEL_FAILED", "as configured"))
    world.turn([(client.peer, Cancel(3))])
    part(third, (700, 0), error=("CANCELLED", "cancelled"))
    responses = world.core.state.models["stream"].versions[1].statistics.responses
    assert responses == [
        ResponseCount(compute_infer=(2, 8), compute_output=(2, 3), success=(2, 11), cancel=(1, 700)),
        ResponseCount(compute_infer=(2, 80), compute_output=(1, 0), fail=(1, 50), empty_response=(1, 40)),
    ]


def test_statistics_of_responses_are_bounded() -> None:
    world = World()
    world.deploy(STREAM)
    client, worker = world.connect("a"), world.worker("stream_0")
    client.sends(1, 2**40)
    world.turn([(client.peer, ask(1, 2**40))])
    world.advance(world.now + 5 * MS)
    (request,) = worker.streams
    for _ in range(RESPONSES + 3):
        worker.part(request)
    worker.part(request, last=True)
    world.turn(world.heard(worker))
    responses = world.core.state.models["stream"].versions[1].statistics.responses
    assert [count.success[0] for count in responses] == [1] * (RESPONSES - 1) + [5]
