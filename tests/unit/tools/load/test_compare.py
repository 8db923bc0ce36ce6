"""Confidence intervals against the tables of Student's t, stable windows, the comparison of runs, and the search for
the highest load that keeps a limit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shmserve.errors import InvalidRequest
from shmserve.tools.load.analysis.compare import BETTER, FAILED, MIXED, SAME, UNKNOWN, WORSE, compare
from shmserve.tools.load.analysis.confidence import difference, interval, stability, student_t
from shmserve.tools.load.measure import best, keeps, next_load
from shmserve.tools.load.one_load import settings_of
from shmserve.tools.load.plan import ClosedLoop, LatencyLimit, LoadPlan, MeasureSettings, OpenLoop
from shmserve.tools.load.record import Interval, Point
from tests.support.cases import cases
from tests.support.hypothesis_profiles import examples
from tests.unit.tools.load.points import point, run, steady, window

TABLE = {
    (0.95, 1): 12.706, (0.95, 2): 4.303, (0.95, 3): 3.182, (0.95, 4): 2.776, (0.95, 5): 2.571, (0.95, 9): 2.262,
    (0.95, 30): 2.042, (0.95, 120): 1.980, (0.99, 2): 9.925, (0.99, 4): 4.604, (0.99, 9): 3.250, (0.9, 3): 2.353,
    (0.999, 2): 31.599, (0.999, 4): 8.610, (0.999, 9): 4.781,
}  # fmt: skip
"""From the printed tables: confidence, degrees of freedom."""
PLAN = MeasureSettings(min_windows=3, max_windows=8)


@pytest.mark.parametrize(("key", "expected"), TABLE.items())
def test_quantiles_are_those_of_the_tables(key: tuple[float, int], expected: float) -> None:
    assert student_t(*key) == pytest.approx(expected, rel=1e-3)


def test_intervals_by_hand() -> None:
    """Welch: s^2/n is 1/3 and 4/3, degrees of freedom (5/3)^2 / ((1/9 + 16/9) / 2) = 2.94, rounded down."""
    found = interval([9.0, 10.0, 11.0], 0.95)  # the standard deviation is 1
    assert (found.mean, found.half) == pytest.approx((10, 4.303 / 3**0.5), rel=1e-3)
    one = interval([10.0], 0.95)
    assert (one.low, one.high) == (0, 20), "one value gives no interval"
    assert difference([1.0], [1.0, 2.0], 0.95) is None
    welch: Any = difference([9.0, 10.0, 11.0], [18.0, 20.0, 22.0], 0.95)
    assert (welch.mean, welch.half) == pytest.approx((10, 4.303 * (5 / 3) ** 0.5), rel=1e-3)


def test_windows_that_are_stable() -> None:
    windows = [window(number, good) for number, good in enumerate((100, 500, 1000, 1001, 999, 1000))]
    found = stability(windows, PLAN, True)
    assert (found.stable, found.first) == (True, 2)
    slower = [window(number, 1000, p50=1e6 * (1 + 0.02 * number)) for number in range(8)]
    assert stability(slower, MeasureSettings(min_windows=8), True).note.startswith("p50 latency drifts by +")
    windows = [window(number, good) for number, good in enumerate((100, 150, 50))]
    assert stability(windows, PLAN, False).stable, "its rate is given"


RARE = replace(PLAN, percentile=99.9)


@cases(
    ([100, 100], PLAN, "2 of at least 3 windows"),
    ([100, 120, 80], PLAN, "throughput is known to +-"),
    ([100, 150, 50], PLAN, "too few windows to know the throughput: set more --windows, or a longer --window"),
    ([100, 100, 100], RARE, "a window has too few responses for p99.9: set a longer --window"),
    ([9, 0, 9], PLAN, "a window without a successful response"),
)
def test_the_reason_for_an_unstable_result_is_given(goods: list[int], plan: MeasureSettings, note: str) -> None:
    found = stability([window(number, good) for number, good in enumerate(goods)], plan, True)
    assert not found.stable
    assert found.note.startswith(note)


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


def searched(limit: LatencyLimit, highest: float, whole: bool) -> dict[float, bool]:
    """The loads that the search tries on a server that keeps the limit up to `highest`."""
    tried: dict[float, bool] = {}
    while (load := next_load(tried, limit, whole)) is not None:
        assert load not in tried
        tried[load] = load <= highest
        assert len(tried) < 60
    return tried


@cases(
    (99.9, 9_990, 0, None),
    (99.9, 10_000, 0, True),
    (99.9, 9_990, 10, True),
    (99.9, 9_989, 11, False),
    (99.9, 100, 9, None),
    (99.9, 100, 10, False),
    (99.0, 1_000, 0, True),
    (50.0, 3, 1, True),
    (50.0, 1, 3, False),
)
def test_a_limit_is_judged_by_enough_responses(percentile: float, fast: int, slow: int, kept: bool | None) -> None:
    """p99.9 needs 10,000 responses, so that ten exceed it; ten responses over the limit suffice to show that it is
    exceeded."""
    one = point(ClosedLoop(1), [window(0, 1)], [1_000_000] * fast + [9_000_000] * slow)
    assert keeps(one, LatencyLimit(percentile, 5_000_000)) is kept
    assert keeps(replace(one, failed=1), LatencyLimit(percentile, 5_000_000)) is False


def test_windows_of_a_search_have_enough_responses() -> None:
    plan = LoadPlan(model="m", settings=MeasureSettings(max_windows=8, min_responses=30))
    assert settings_of(plan).min_responses == 30
    assert settings_of(replace(plan, limit=LatencyLimit(99.0, 1))).min_responses == 125
    assert settings_of(replace(plan, limit=LatencyLimit(50.0, 1))).min_responses == 30


@settings(max_examples=examples(200))
@given(st.floats(1, 5000), st.floats(0.5, 1e5), st.booleans(), st.floats(0.01, 0.2))
def test_the_search_finds_the_load_to_the_resolution(
    low: float, highest: float, whole: bool, resolution: float
) -> None:
    low = float(int(low)) if whole else low
    limit = LatencyLimit(99.0, 1, low, low * 1000, resolution)
    tried = searched(limit, highest, whole)
    found = best(tried)
    assert best(tried | {limit.high * 2: False, limit.high * 4: True}) == found, "a pass above a failed load is ignored"
    if found is None:
        assert highest < low
        return
    assert found <= highest
    if whole:
        assert all(load == int(load) for load in tried)
    failed = min((load for load, kept in tried.items() if not kept), default=None)
    assert failed is not None or found == limit.high
    if failed is not None:
        assert failed - found <= max(1.0 if whole else 0.0, found * resolution)
    assert all(low <= load <= limit.high for load in tried)
