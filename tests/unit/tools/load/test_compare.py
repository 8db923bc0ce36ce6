"""The comparison of two saved runs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shmserve.errors import InvalidRequest
from shmserve.tools.load.analysis.compare import BETTER, FAILED, MIXED, SAME, UNKNOWN, WORSE, compare
from shmserve.tools.load.plan import ClosedLoop, OpenLoop
from shmserve.tools.load.record import Interval, Point
from tests.support.cases import cases
from tests.support.hypothesis_profiles import examples
from tests.unit.tools.load.points import point, run, steady, window

OLD = [1000, 1010, 990, 1005]


@cases(
    (OLD, OLD, None, SAME),
    (OLD, [900, 1100, 950, 1080], None, SAME),  # noise
    ([1000, 1000, 1000], [1005, 1005, 1005], None, SAME),  # below the threshold
    ([1000, 1000, 1000], [1005, 1005, 1005], 0.001, BETTER),
    ([1000], [500], None, UNKNOWN),  # one window has no interval
    ([100, 1900, 1000], [100, 1900, 1000], None, UNKNOWN),  # an interval as wide as the value
)
def test_verdicts(old: list[int], new: list[int], min_change: float | None, verdict: str) -> None:
    options = {} if min_change is None else {"min_change": min_change}
    assert compare(run(steady(1, old)), run(steady(1, new)), **options).changes[0].verdict == verdict


def test_more_rows_widen_the_intervals() -> None:
    slower = [value * 975 // 1000 for value in OLD]
    rest = [steady(concurrency, OLD) for concurrency in range(2, 20)]
    one = compare(run(steady(1, OLD)), run(steady(1, slower)))
    many = compare(run(steady(1, OLD), *rest), run(steady(1, slower), *rest))
    assert (one.verdict, many.verdict) == (WORSE, SAME)
    assert one.row_confidence == pytest.approx(1 - 0.05 / 3)
    assert many.row_confidence == pytest.approx(1 - 0.05 / (3 * 19))
    clear = compare(run(steady(1, OLD), *rest), run(steady(1, [700] * 4), *rest))
    assert clear.verdict == WORSE


@cases(
    (0, 20, WORSE),
    (20, 0, BETTER),
    (0, 3, SAME),
    (20, 25, SAME),
    (20, 60, WORSE),
    (900, 600, BETTER),
    (1000, 1020, SAME),
)
def test_the_rate_of_failures_affects_the_verdict(old: int, new: int, verdict: str) -> None:
    """Each run has 2,000 successful responses."""
    found = compare(run(steady(1, OLD, failed=old)), run(steady(1, OLD, failed=new)))
    (failed,) = [change for change in found.changes if change.metric == FAILED]
    assert (failed.old, failed.new) == (old / (2000 + old), new / (2000 + new))
    assert failed.verdict == found.verdict == verdict


def test_what_is_not_compared() -> None:
    few = point(ClosedLoop(1), [window(number, good) for number, good in enumerate(OLD)], [1_000_000] * 100)
    found = compare(run(few), run(steady(1, OLD)))
    assert [change.metric for change in found.changes] == ["throughput", "p50"]
    assert found.notes == ("not compared, as too few responses exceed it: p99 of concurrency 1",)
    with pytest.raises(InvalidRequest, match=r"no load in common \(concurrency 1; concurrency 2\)"):
        compare(run(steady(1, OLD)), run(steady(2, OLD)))
    old = run(steady(1, OLD))
    assert compare(old, replace(old, machine={"cores": "64"})).notes[0].startswith("the machine differs")
    assert not compare(old, old).notes


def test_the_rows_that_are_compared() -> None:
    """Without failures, there is no row for them. The throughput of an open loop is given."""

    def metrics(one: Point) -> list[str]:
        return [change.metric for change in compare(run(one), run(one)).changes]

    assert metrics(steady(1, OLD)) == ["throughput", "p50", "p99"]
    assert "in time/s" in metrics(replace(steady(1, OLD), goodput=Interval(900, 890, 910)))
    assert metrics(point(OpenLoop(1000.0), [window(number, good) for number, good in enumerate(OLD)])) == ["p50", "p99"]
    windows = [window(number, 1000, p99=value) for number, value in enumerate((2e6, 4e6, 3e6))]
    one = point(ClosedLoop(1), windows, [1_000_000] * 1900 + [5_000_000] * 100)
    (_, _, p99) = compare(run(one), run(one)).changes
    assert p99.old == p99.new == one.latency.percentiles["p99"].mean == pytest.approx(5e6, rel=2e-3)


@settings(max_examples=examples(60))
@given(*[st.lists(st.integers(500, 1500), min_size=2, max_size=6) for _ in range(2)])
def test_swapping_the_runs_inverts_the_verdict(first: list[int], second: list[int]) -> None:
    opposite = {BETTER: WORSE, WORSE: BETTER, SAME: SAME, UNKNOWN: UNKNOWN, MIXED: MIXED}
    one, other = run(steady(1, first, failed=first[0] // 10)), run(steady(1, second, failed=second[0] // 10))
    assert compare(other, one, min_change=0).verdict == opposite[compare(one, other, min_change=0).verdict]
