"""Responses of decoupled models: windows of clients, limits and statistics. The scenario files test the rest."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.core.limits import Limits
from shmserve.core.owners import activity
from shmserve.core.policy import BatchPolicy
from shmserve.core.stats.statistics import RESPONSES, ResponseCount, Statistics
from shmserve.protocol import codec as wire
from shmserve.protocol.messages import Cancel, Infer, More, Options
from shmserve.protocol.worker_messages import Execute, WorkerOrder
from tests.support.core.fakes.client import FakeClient
from tests.support.core.policies import plain
from tests.support.core.world import World
from tests.support.hypothesis_profiles import examples

MS = 10**6
STREAM = plain("stream", 4, BatchPolicy(delay_ns=5 * MS), decoupled=True)
NUMBERS = st.integers(0, 100) | st.integers(2**62, 2**63 - 1)


class Streaming(World):
    """One worker whose model streams, and a client."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(Limits(**limits))
        self.deploy(STREAM)
        self.client, self.streaming = self.connect("a"), self.worker("stream_0")

    def begin(self, windows: dict[int, int]) -> list[int]:
        """Sends requests with these numbers and windows; returns the numbers that the worker knows."""
        self.turn([ask(self.client, number, window) for number, window in windows.items()])
        self.advance(self.now + 5 * MS)
        return list(self.streaming.streams)

    def part(self, request: int, times: tuple[int, int] = (0, 0), **how: Any) -> None:
        self.streaming.part(request, **how).rows[0].times = times
        self.turn(self.heard(self.streaming))

    def counted(self) -> Statistics:
        return self.core.state.models["stream"].versions[1].statistics


def ask(client: FakeClient, number: int, window: int = 1) -> tuple[int, Infer]:
    return client.infer(number, "stream", options=Options(window=window))


@settings(max_examples=examples(50))
@given(window=NUMBERS.filter(bool), before=st.lists(NUMBERS, max_size=3), after=st.lists(NUMBERS, max_size=3))
def test_the_window_sent_to_the_worker_never_overflows(window: int, before: list[int], after: list[int]) -> None:
    world = Streaming(crashes=1)
    client, worker = world.client, world.streaming
    world.slow_to.add(worker.peer)
    world.turn([ask(client, 1, window), *((client.peer, More(1, count)) for count in before)])
    world.advance(world.now + 5 * MS)
    world.turn([(client.peer, More(1, count)) for count in after])
    codec = wire.Codec(WorkerOrder)
    orders = [order for packet in wire.pack(worker.inbox) for order in codec.decode(packet)]
    (execute,) = [order for order in orders if isinstance(order, Execute)]
    options = execute.work_items[0].options
    assert options is not None
    assert options.window == min(window + sum(before), 2**63 - 1)
    assert [order.count for order in orders if isinstance(order, More)] == after


def test_time_to_the_first_of_many_responses() -> None:
    """Each request counts once, when its first part is sent; an empty final part does not count."""
    world = Streaming(first_responses=True)
    first, second = world.begin({1: 5, 2: 5})
    for request, last, empty in ((first, False, False), (first, False, False), (second, True, True)):
        world.now += 20 * MS
        world.part(request, last=last, empty=empty)
    world.now += 1000 * MS
    world.part(first, last=True)
    counted = world.counted()
    assert counted.success_count == 2
    assert counted.first is not None
    assert (counted.first.counts, counted.first.sum_ns) == ([1, 0, 0, 0, 0], 25 * MS)
    assert counted.streams is not None
    first_response, between = counted.streams.first, counted.streams.between
    assert (first_response.count, first_response.sum_ns) == (1, 25 * MS)
    assert (between.count, between.sum_ns) == (2, 1040 * MS)
    assert between.counts[(20 * MS).bit_length()] == between.counts[(1020 * MS).bit_length()] == 1


def test_statistics_of_responses_by_their_index() -> None:
    """A response counts for its index in its request; the end of a cancelled request counts for the next index."""
    world = Streaming()
    first, second, third = world.begin({1: 99, 2: 99, 3: 99})
    part = world.part
    part(first, (3, 1))
    part(second, (5, 2))
    part(first, (30, 10), empty=True, last=True)
    part(second, (50, 0), error=("MODEL_FAILED", "as configured"))
    world.turn([(world.client.peer, Cancel(3))])
    part(third, (700, 0), error=("CANCELLED", "cancelled"))
    assert world.counted().responses == [
        ResponseCount(compute_infer=(2, 8), compute_output=(2, 3), success=(2, 11), cancel=(1, 700)),
        ResponseCount(compute_infer=(2, 80), compute_output=(1, 0), fail=(1, 50), empty_response=(1, 40)),
    ]


def test_streams_after_their_batch_count_as_compute_and_keep_the_instance_busy() -> None:
    world = Streaming()
    world.begin({1: 99, 2: 99})
    world.finish("stream_0")
    version, before, began = world.core.state.models["stream"].versions[1], world.counted().infer_ns, world.now
    first, second = world.streaming.streams
    world.advance(world.now + 30 * MS)
    assert activity.streaming_ns(version, world.now) == 30 * MS
    world.part(first, (7, 2))
    world.part(first, (3, 1), last=True)
    world.part(second, (5, 0), last=True)
    assert (world.counted().infer_ns - before, world.counted().streaming_ns) == (15, world.now - began)
    world.advance(world.now + 30 * MS)
    assert activity.streaming_ns(version, world.now) == world.counted().streaming_ns


def test_statistics_of_responses_are_bounded() -> None:
    world = Streaming()
    (request,) = world.begin({1: 2**40})
    for _ in range(RESPONSES + 3):
        world.streaming.part(request)
    world.part(request, last=True)
    assert [count.success[0] for count in world.counted().responses] == [1] * (RESPONSES - 1) + [5]
