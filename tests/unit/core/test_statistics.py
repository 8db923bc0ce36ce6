"""The core's statistics, compared with numpy: durations in buckets, sums, failures by reason, loads, and refusals."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.core import events
from shmserve.core.limits import NAMED, Limits
from shmserve.core.policy import BatchPolicy, QueuePolicy, SequencePolicy
from shmserve.core.stats import histogram
from shmserve.core.stats.statistics import FailureKind, Statistics, limit_in
from shmserve.protocol.messages import Cancel, Fail, Options
from tests.support.core.policies import plain
from tests.support.core.world import World

NS = st.integers(0, 2**40)
LEVELS = BatchPolicy(default_policy=QueuePolicy(max_size=1))


def counts(durations: list[int]) -> list[int]:
    """Counts in buckets that begin at 0, 1, 2, 4, 8, ..."""
    edges = [0, *(1 << bit for bit in range(histogram.BUCKETS - 3)), np.iinfo(np.int64).max]
    found, _ = np.histogram(np.array(durations, np.int64), bins=np.array(edges, np.int64))
    return [*found.tolist(), *[0] * (histogram.BUCKETS - len(found))]


@given(st.lists(NS))
def test_durations_are_counted_in_their_buckets(durations: list[int]) -> None:
    found = histogram.empty()
    for ns in durations:
        found[ns.bit_length()] += 1
    assert found == counts(durations)
    below = histogram.cumulative(found, 3, 20)
    assert below == [int(np.sum(np.array(durations) <= histogram.edge(bucket))) for bucket in range(3, 21)]


@given(st.lists(NS, min_size=1), st.floats(0.01, 1))
def test_quantiles_are_in_the_bucket_of_the_true_one(durations: list[int], share: float) -> None:
    found = histogram.quantile(counts(durations), share)
    true = int(np.quantile(np.array(durations), share, method="inverted_cdf"))
    assert int(found).bit_length() == true.bit_length() or found == pytest.approx(histogram.edge(true.bit_length()))


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(1000, 2000), st.integers(0, 500))
def test_the_requests_of_a_batch_are_added_up(arrivals: list[int], taken: int, took: int) -> None:
    """Even if requests that arrived together are not adjacent in the batch."""
    together, alone = Statistics(), Statistics()
    now = taken + took
    together.answered(arrivals, 2 * len(arrivals), taken, now)
    for arrived in arrivals:
        alone.answered_early(arrived, 2, now)
    alone.queued(arrivals, taken)
    assert together == alone
    came = np.array(arrivals)
    assert together.success_ns == int(np.sum(now - came))
    assert together.queue_ns == int(np.sum(taken - came))
    assert together.request_times == counts((now - came).tolist())
    assert together.queue_times == counts((taken - came).tolist())


# ------------------------------------------------------------------------------------------ in the core


def counted(world: World) -> Statistics:
    return world.core.state.models["m"].versions[1].statistics


def test_failures_by_reason() -> None:
    world = World()
    world.deploy(plain(batching=LEVELS))
    client = world.connect("c")
    world.turn([client.infer(1)])
    world.turn([client.infer(2)])
    world.turn([client.infer(3)])  # one already waits
    assert "Exceeds maximum queue size" in client.answers[3].text
    world.turn([(client.peer, Cancel(2))])
    world.finish(error=("MODEL_FAILED", "no"))
    world.turn([client.infer(4, timeout_us=1000)])
    world.advance(world.now + 2_000_000)
    assert client.answers[4].code == "DEADLINE_EXCEEDED"
    found = counted(world)
    assert {why.name: count for why, count in zip(FailureKind, found.failures, strict=True)} == {
        "REJECTED": 1, "CANCELED": 1, "BACKEND": 1, "OTHER": 1}  # fmt: skip
    assert found.fail_count == sum(found.failures) - found.cancelled
    assert (found.success_count, found.inference_count) == (0, 0)
    assert world.core.state.observers.refusals == {"UNAVAILABLE": 1}


def test_refused_by_a_limit() -> None:
    world = World(Limits(client_requests=1))
    world.deploy(plain())
    client = world.connect("c")
    world.turn([client.infer(1), client.infer(2), client.infer(3, "nobody")])
    assert isinstance(client.answers[2], Fail)
    world.turn([client.infer(4)])
    assert world.core.state.observers.refusals == {"client_requests": 3}
    assert counted(world).failures[FailureKind.REJECTED] == 2, "one was for another model"


def test_every_limit_is_recognised_in_an_error_text() -> None:
    for row in NAMED:
        assert limit_in(f"there are 7 of them, the limit ({row.name}); try again later") == row.name
    assert limit_in("no room for 5 bytes (broker-arena-bytes)") == ""
    assert not re.search("connection", limit_in("this connection (connections of others)"))


def test_counts_outlive_generations_and_changes_are_counted() -> None:
    world = World()
    world.deploy(plain())
    client = world.connect("c")
    number = 0

    def answered() -> int:
        nonlocal number
        number += 1
        world.turn([client.infer(number)])
        world.finish_running()
        return counted(world).success_count

    assert answered() == 1
    target = next(iter(world.targets["m"].values()))
    world.now += 1000
    world.turn([(0, events.Deploy("m", (events.Target(1, 1, target.instances),)))])  # from another source
    assert answered() == 2
    world.turn([(0, events.Unload("m"))])
    assert counted(world).success_count == 2
    world.turn([(0, events.Deploy("m", (events.Target(1, 2, target.instances),)))])
    assert answered() == 1, "as in Triton, they begin again when a model is loaded after an unload"
    loads = world.core.state.models["m"].loads
    assert (loads.done, loads.failed) == (3, 0)
    world.loads_itself["m"] = False
    world.turn([(0, events.Deploy("m", (events.Target(1, 3, target.instances),)))])
    world.crash(list(world.workers.values())[-1], loading_error="no such file")
    world.turn([(0, events.Refuse("m", 2, "it cannot be read"))])
    assert (loads.done, loads.failed) == (3, 2)
    assert answered() == 2


def test_restarts_are_counted_by_instance() -> None:
    world = World()
    world.deploy(plain(), instances=2)
    for _ in range(2):
        world.crash(world.worker("m_1"))
        world.advance(world.now + 10**10)
    assert counted(world).restarts == {"m_1": 2}


def test_a_batch_of_sequences_has_rows_up_to_its_last_slot() -> None:
    """As in Triton, slots whose sequences have no request also count."""
    world = World()
    world.deploy(plain(max_batch=4, batching=None, sequence=SequencePolicy(True, 4, 10**9)))
    client = world.connect("a")
    for turn, sequences in enumerate([(7, 8, 9), (8,), (-9,), (-8,), (7,)]):
        happened: list[tuple[int, object]] = []
        for sequence in sequences:
            options = Options(sequence=abs(sequence), sequence_start=not turn, sequence_end=sequence < 0)
            happened.append(client.infer(10 * turn + abs(sequence), options=options))
        world.turn(happened)
        world.finish()
    statistics = world.core.state.models["m"].versions[1].statistics
    assert {rows: batches.count for rows, batches in statistics.batches.items()} == {3: 3, 2: 1, 1: 1}
    assert statistics.inference_count == 7
