"""The closed and the open loop, in simulated time, against servers with known latencies; send times, and how processes
share a load."""

from __future__ import annotations

import asyncio
import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice, pairwise, repeat, takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import InvalidRequest, Unavailable
from shmserve.tools.load.generation.schedule import recorded_times, send_times, share, useful_processes
from shmserve.tools.load.generation.sending import LoadSender
from shmserve.tools.load.plan import SECOND, ClosedLoop, Load, OpenLoop, ReplayLoop, Sequences
from shmserve.tools.load.targets.base import RequestSlot, SequencePart
from tests.support.cases import cases
from tests.support.hypothesis_profiles import examples

TURNS = 20
"""Iterations of the loop after which everything that does not need time has happened."""


class Time:
    """A clock that advances when nothing else can happen."""

    def __init__(self) -> None:
        self.now = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()

    def clock(self) -> int:
        return self.now

    async def until(self, at: int) -> None:
        if at > self.now:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (at, next(self._numbers), future))
            await future

    async def run(self, end: int) -> None:
        while True:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if not self._waiting or self._waiting[0][0] >= end:
                self.now = end
                return
            self.now, _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)


class Server:
    """Serves one request after another; `services` has the durations."""

    def __init__(self, time: Time, services: Iterator[int], answers: int = 0) -> None:
        self.time, self.services, self.answers = time, services, answers
        self.free_at = 0
        self.parts: list[SequencePart | None] = []
        self.bodies: list[str] = []
        self.slots = 0

    async def open_slot(self) -> RequestSlot:
        self.slots += 1
        return self

    async def send(self, body: Any, part: SequencePart | None) -> None:
        self.parts.append(part)
        self.bodies.append(body)
        self.free_at = max(self.time.now, self.free_at) + next(self.services)
        await self.time.until(self.free_at)

    async def stream(self, body: Any, part: SequencePart | None, on_answer: Callable[[], None]) -> None:
        for _ in range(self.answers):
            await self.time.until(self.time.now + next(self.services))
            on_answer()


def numbers(data: bytes, kind: str = "q") -> list[int]:
    return array(kind, data).tolist()


def waited(arrivals: Sequence[int], services: Sequence[int]) -> list[int]:
    """Latencies at a single server, by Lindley's recursion."""
    free, found = 0, []
    for at, service in zip(arrivals, services, strict=True):
        free = max(at, free) + service
        found.append(free - at)
    return found


def sender_to(server: Server, bodies: Sequence[str] = ("body",), **options: Any) -> LoadSender:
    chosen = {"stream": False, "sequences": None, "ids": count(1)} | options
    return LoadSender(list(bodies), server.open_slot, server.time.clock, server.time.until, **chosen)


async def stopped(sender: LoadSender, time: Time) -> Any:
    """What the sender has recorded, after those of its requests that are in flight."""
    stopping = asyncio.ensure_future(sender.stop(1))
    await time.run(time.now + 1000)
    await stopping
    return sender.recorder.take(0, 0)


async def in_open_loop(arrivals: Sequence[int], services: Sequence[int], limit: int) -> tuple[list[int], int]:
    time = Time()
    server = Server(time, iter(services))
    sender = sender_to(server)
    sender.start_open(iter(arrivals), 0, limit)
    await time.run(sum(services) + max(arrivals) + 1)
    assert await sender.stop(1) == 0
    return numbers(sender.recorder.take(0, 0).latency), server.slots


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=40), st.integers(1, 5))
def test_latency_counts_from_the_intended_time(requests: list[tuple[int, int]], limit: int) -> None:
    """However few requests may be in flight, the latencies are those of a queue with all of them (no coordinated
    omission).
    """
    arrivals, at = [], 0
    for gap, _ in requests:
        at += gap
        arrivals.append(at)
    services = [service for _, service in requests]
    found, slots = asyncio.run(in_open_loop(arrivals, services, limit))
    assert found == waited(arrivals, services)
    assert slots <= limit


@cases(
    (repeat(0), 2, 15, 3, 2),  # those that wait in the generator do not count
    (iter([0, 10**12]), 1, 100, 1, 0),
    ids=["a rate out of reach does not block the loop", "a load ends before its next send time"],
)
def test_the_end_of_an_open_loop(times: Iterator[int], limit: int, until: int, sent: int, in_flight: int) -> None:
    async def run() -> tuple[int, int]:
        time = Time()
        server = Server(time, repeat(10))
        sender = sender_to(server)
        sender.start_open(times, 0, limit)
        await time.run(until)
        return len(server.bodies), await sender.stop(0 if in_flight else 60)

    assert asyncio.run(run()) == (sent, in_flight)


def test_a_load_uses_the_slots_of_requests_that_were_cancelled_before() -> None:
    async def run() -> int:
        time = Time()
        server = Server(time, repeat(1000))
        sender = sender_to(server)
        for _ in range(3):
            sender.start_open(iter([0, 0]), time.now, 2)
            await time.run(time.now + 10)
            assert await sender.stop(0) == 2
        return server.slots

    assert asyncio.run(run()) == 2


def test_a_closed_loop_keeps_its_callers_busy() -> None:
    async def run() -> tuple[list[int], list[int], list[str], int]:
        time = Time()
        server = Server(time, repeat(10))
        sender = sender_to(server, "abc")
        await sender.start_closed(4, 100)
        await time.run(1100)
        taken = sender.recorder.take(0, 0)
        await stopped(sender, time)
        return numbers(taken.latency), numbers(taken.done), server.bodies, server.slots

    latency, done, bodies, slots = asyncio.run(run())
    assert done == list(range(110, 1100, 10))
    assert latency == [10, 20, 30] + [40] * (len(done) - 3)
    assert bodies[:7] == ["a", "b", "c", "a", "b", "c", "a"]
    assert slots == 4


async def parts_of(length: int, until: int) -> list[SequencePart]:
    time = Time()
    server = Server(time, repeat(10))
    sender = sender_to(server, sequences=Sequences(2, length), ids=count(101))
    await sender.start_closed(2, 0)
    await time.run(until)
    await stopped(sender, time)
    return [part for part in server.parts if part is not None]


@settings(max_examples=examples(40))
@given(st.integers(1, 6), st.integers(5, 400))
def test_sequences_begin_and_end_once(length: int, until: int) -> None:
    found = asyncio.run(parts_of(length, until))
    for sequence in {part.sequence for part in found}:
        flags = [(part.start, part.end) for part in found if part.sequence == sequence]
        assert flags[0][0]
        assert flags[-1][1], "an interrupted sequence is ended"
        assert not any(start for start, _ in flags[1:])
        assert not any(end for _, end in flags[:-1])
        assert len(flags) <= length + 1


def test_streams_record_first_and_later_answers() -> None:
    async def run() -> Any:
        time = Time()
        sender = sender_to(Server(time, iter([5, 1, 2] * 100), answers=3), stream=True)
        sender.start_open(iter([0, 100, 200]), 0, 1)
        await time.run(1000)
        return await stopped(sender, time)

    found = asyncio.run(run())
    assert numbers(found.first) == [5, 5, 5]
    assert numbers(found.gap) == [1, 2] * 3
    assert numbers(found.gap_at) == [6, 8, 106, 108, 206, 208]
    assert numbers(found.latency) == [8, 8, 8]


@pytest.mark.parametrize("error", [Unavailable("full"), ZeroDivisionError()], ids=["a failure", "a bug of the target"])
def test_failures_are_recorded_and_bugs_end_the_load(error: Exception) -> None:
    class Failing(Server):
        async def send(self, body: Any, part: SequencePart | None) -> None:
            await self.time.until(self.time.now + next(self.services))
            raise error

    async def run() -> tuple[Any, BaseException | None]:
        time = Time()
        sender = sender_to(Failing(time, repeat(10)))
        await sender.start_closed(1, 0)
        await time.run(35)
        return await stopped(sender, time), sender.failure

    found, failure = asyncio.run(run())
    if isinstance(error, Unavailable):
        assert (numbers(found.code, "h"), found.errors, failure) == ([1] * 4, ["UNAVAILABLE: full"], None)
    else:
        assert failure is error


def merged(load: Load, processes: int, until: int) -> list[int]:
    times = [takewhile(lambda at: at < until, send_times(load, index, processes)) for index in range(processes)]
    return sorted(at for each in times for at in each)


@pytest.mark.parametrize("processes", [1, 3])
def test_constant_rates_and_recordings(processes: int) -> None:
    assert merged(OpenLoop(250.0, "constant"), processes, SECOND) == [number * 4_000_000 for number in range(250)]
    load = ReplayLoop((5, 6, 9))
    assert list(islice(send_times(load), 7)) == [0, 1, 4, 6, 7, 10, 12]  # a mean gap of 2 follows the last
    assert load.rate == pytest.approx(3 * SECOND / 6)


@pytest.mark.parametrize("processes", [1, 4])
def test_poisson_has_the_rate_and_the_spread(processes: int) -> None:
    """The distances of a Poisson process are exponential: their standard deviation is their mean."""
    times = merged(OpenLoop(1000.0, "poisson", seed=3), processes, 50 * SECOND)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1e6, rel=0.03)
    assert spread == pytest.approx(1e6, rel=0.05)
    assert times == merged(OpenLoop(1000.0, "poisson", seed=3), processes, 50 * SECOND)
    assert times != merged(OpenLoop(1000.0, "poisson", seed=4), processes, 50 * SECOND)


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_every_thousand_random_arrivals_take_the_time_of_the_nominal_rate(seed: int, processes: int) -> None:
    load = OpenLoop(2000.0, "poisson", seed)
    per_process = 3 * (1000 // processes)
    for index in range(processes):
        times = list(islice(send_times(load, index, processes), per_process))
        assert times == sorted(times)
        assert times[-1] == pytest.approx(per_process * processes * SECOND / load.rate, abs=1)
        due = [at * load.rate / processes / SECOND for at in times]
        assert all(0.85 < number / due[number - 1] < 1.15 for number in range(per_process // 3, per_process + 1))


@settings(max_examples=examples(60))
@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=20), st.integers(1, 5))
def test_processes_send_a_recording_once(times: list[int], processes: int) -> None:
    load = ReplayLoop(tuple(sorted(times)))
    count = 3 * len(times)
    alone = list(islice(send_times(load), count))
    each = [list(islice(send_times(load, index, processes), count)) for index in range(processes)]
    assert sorted(at for some in each for at in some)[: count // processes] == alone[: count // processes]
    assert alone == sorted(alone)


@given(st.integers(1, 100), st.integers(1, 16))
def test_callers_are_divided(concurrency: int, wanted: int) -> None:
    load = ClosedLoop(concurrency)
    processes = useful_processes(load, wanted)
    parts = [share(load, index, processes) for index in range(processes)]
    counts = [part.concurrency for part in parts if isinstance(part, ClosedLoop)]
    assert sum(counts) == concurrency
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1


def test_recordings_are_read() -> None:
    text = '{"at": 2, "model": "m", "rows": 3}\n\n{"at": 0.5}\n{"at": 1, "model": "other"}\n0.25\n'
    assert recorded_times(text, "m", "file") == (SECOND // 4, SECOND // 2, 2 * SECOND)


@cases(
    ("1\nnot a time", "file, line 2: expected"),
    ('{"time": 1}', "file, line 1: expected"),
    ("-1\n2", "file, line 1: a time is from 0 to 1,000,000,000 seconds, not -1"),
    ("1e200\n2", r"file, line 1: a time is from 0 to 1,000,000,000 seconds, not 1e\+200"),
    ("2\n2", "file: all times of model 'm' are equal"),
    ('{"at": 1, "model": "other"}\n2', "file has 1 times for model 'm', and at least 2 are needed"),
)
def test_recordings_that_are_not_times(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        recorded_times(text, "m", "file")
