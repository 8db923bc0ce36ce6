"""The search for the highest load that keeps a limit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shmserve.tools.load.measure import best, keeps, next_load
from shmserve.tools.load.one_load import settings_of
from shmserve.tools.load.plan import ClosedLoop, LatencyLimit, LoadPlan, MeasureSettings
from tests.support.cases import cases
from tests.support.hypothesis_profiles import examples
from tests.unit.tools.load.points import point, window


def searched(limit: LatencyLimit, highest: float, whole: bool) -> dict[float, bool]:
    """The loads that the search tries on a server that keeps the limit up to `highest`."""
    tried: dict[float, bool] = {}
    while (load := next_load(tried, limit, whole)) is not None:
        assert load not in tried
        tried[load] = load <= highest
        assert len(tried) < 60
    return tried


@pytest.mark.parametrize(
    ("low", "high", "highest", "tried", "found"),
    [(1, 64, 11, [1, 2, 4, 8, 16, 12, 10, 11], 11), (1, 6, 100, [1, 2, 4, 6], 6), (4, 64, 3, [4], None)],
)
def test_the_load_is_doubled_and_then_bisected(
    low: float, high: float, highest: float, tried: list[float], found: float | None
) -> None:
    loads = searched(LatencyLimit(99.0, 1, low, high), highest, whole=True)
    assert (list(loads), best(loads)) == (tried, found)
    assert best({1: True, 2: True, 4: False, 8: True}) == 2, "a pass above a failed load is ignored"


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
