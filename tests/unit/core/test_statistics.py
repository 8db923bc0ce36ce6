"""The core's statistics, compared with numpy: durations in buckets, sums, failures by reason, loads, refusals,
and callers."""

from __future__ import annotations

import re
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shmserve import histogram
from shmserve.core.limits import NAMED
from shmserve.core.stats.callers import KEPT, Callers
from shmserve.core.stats.statistics import Statistics, limit_in
from tests.support.core.policies import plain
from tests.support.core.world import World

NS = st.integers(0, 2**40)


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


def test_every_limit_is_recognised_in_an_error_text() -> None:
    for row in NAMED:
        assert limit_in(f"there are 7 of them, the limit ({row.name}); try again later") == row.name
    assert limit_in("no room for 5 bytes (broker-arena-bytes)") == ""
    assert not re.search("connection", limit_in("this connection (connections of others)"))


def test_the_idle_callers_whose_requests_took_least_are_forgotten() -> None:
    callers = Callers("uid:1", True, count(-1, -1))
    large, small, active = callers["large"], callers["small"], callers["active"]
    active.enter()
    large.finished_ns = 5
    for number in range(3 * KEPT):
        callers[f"user {number}"].finished_ns = 1
        assert len(callers) <= KEPT + 1, "the active one, too"
    assert callers["large"] is large
    assert callers["active"] is active
    assert callers["small"].number != small.number


def test_the_times_of_all_requests_of_a_batch_are_counted_for_their_caller() -> None:
    world = World()
    world.deploy(plain())
    client = world.connect("c")
    world.now += 5
    world.turn([(client.peer, replace(client.infer(number)[1], payer="caller")) for number in (1, 2)])
    world.now += 3
    world.finish()
    caller = world.core.state.clients[client.peer].callers["caller"]
    assert (caller.finished, caller.finished_ns) == (2, 6)
