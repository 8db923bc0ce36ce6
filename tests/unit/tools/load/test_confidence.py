"""Confidence intervals against the tables of Student's t, and when windows are stable."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from shmserve.tools.load.analysis.confidence import difference, interval, stability, student_t
from shmserve.tools.load.plan import MeasureSettings
from tests.support.cases import cases
from tests.unit.tools.load.points import window

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
    welch = difference([9.0, 10.0, 11.0], [18.0, 20.0, 22.0], 0.95)
    assert welch is not None
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
