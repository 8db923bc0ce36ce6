"""Confidence intervals from the means of windows, with Student's t, and the decision whether they are stable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

from msgspec import Struct

from shmserve.tools.load.plan import MeasureSettings, percentile_name
from shmserve.tools.load.record import Interval, LoadWindow


def student_t(confidence: float, freedom: float) -> float:
    """The two-sided quantile of Student's t. Exact for 1 and 2 degrees of freedom; else Hill's approximation
    (algorithm 396), whose error is below 0.1 %.
    """
    tail = 1.0 - confidence
    n = max(1.0, freedom)
    if n < 2:
        return 1.0 / math.tan(tail * math.pi / 2)
    if n < 3:
        return math.sqrt(2.0 / (tail * (2.0 - tail)) - 2.0)
    a = 1.0 / (n - 0.5)
    b = (48.0 / a) / a
    c = ((20700.0 * a / b - 98.0) * a - 16.0) * a + 96.36
    d = ((94.5 / (b + c) - 3.0) / b + 1.0) * math.sqrt(a * math.pi / 2) * n
    y = (d * tail) ** (2.0 / n)
    if y > 0.05 + a:
        x = NormalDist().inv_cdf(tail / 2)
        y = x * x
        if n < 5:
            c += 0.3 * (n - 4.5) * (x + 0.6)
        c += (((0.05 * d * x - 5.0) * x - 7.0) * x - 2.0) * x + b
        y = (((((0.4 * y + 6.3) * y + 36.0) * y + 94.5) / c - y - 3.0) / b + 1.0) * x
        y = math.expm1(a * y * y)
    else:
        y = ((1.0 / (((n + 6.0) / (n * y) - 0.089 * d - 0.822) * (n + 2.0) * 3.0) + 0.5 / (n + 4.0)) * y - 1.0) * (
            n + 1.0
        ) / (n + 2.0) + 1.0 / y
    return math.sqrt(n * y)


def interval(values: Sequence[float], confidence: float) -> Interval:
    """The mean of the values and its interval. For a single value, the interval is from 0 to twice the value."""
    if not values:
        return Interval(0.0, 0.0, 0.0)
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, 0.0, 2 * mean)
    half = student_t(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, max(0.0, mean - half), mean + half)


def difference(old: Sequence[float], new: Sequence[float], confidence: float) -> Interval | None:
    """Welch's interval of the difference of the means, new minus old; None for fewer than two values of either."""
    if min(len(old), len(new)) < 2:
        return None
    first, second = (stdev(values) ** 2 / len(values) for values in (old, new))
    delta = fmean(new) - fmean(old)
    if not first + second:
        return Interval(delta, delta, delta)
    freedom = (first + second) ** 2 / (first**2 / (len(old) - 1) + second**2 / (len(new) - 1))
    half = student_t(confidence, math.floor(freedom)) * math.sqrt(first + second)
    return Interval(delta, delta - half, delta + half)


class Stability(Struct, frozen=True):
    """Whether the windows from `first` on are stable, and the reason if not."""

    stable: bool
    first: int
    note: str


def stability(windows: Sequence[LoadWindow], settings: MeasureSettings, throughput: bool) -> Stability:
    """Takes the longest stable run of windows that ends with the last one; if there is none, all of them. `throughput`:
    whether throughput must also be stable, which is meaningless in an open loop.
    """
    note = f"{len(windows)} of at least {settings.min_windows} windows"
    for first in range(max(0, len(windows) - settings.min_windows + 1)):
        unstable = _unstable(windows[first:], settings, throughput)
        if not unstable:
            return Stability(True, first, "")
        note = unstable if not first else note
    return Stability(False, 0, note)


def _unstable(windows: Sequence[LoadWindow], settings: MeasureSettings, throughput: bool) -> str:
    name = percentile_name(settings.percentile)
    kinds = {"throughput": [window.per_s for window in windows]} if throughput else {}
    if not all(window.good for window in windows):
        return "a window without a successful response"
    if not all(name in window.percentiles for window in windows):
        return f"a window has too few responses for {name}: set a longer --window"
    kinds[f"{name} latency"] = [window.percentiles[name] for window in windows]
    for kind, values in kinds.items():
        result = interval(values, settings.confidence)
        share = result.half / result.mean if result.mean else math.inf
        if share >= 1:
            return f"too few windows to know the {kind}: set more --windows, or a longer --window"
        if share > settings.tolerance:
            return f"{kind} is known to +-{share:.1%}, not to {settings.tolerance:.1%}"
        half = len(values) // 2
        drift = (fmean(values[-half:]) - fmean(values[:half])) / result.mean if half else 0.0
        if abs(drift) > settings.tolerance:
            return f"{kind} drifts by {drift:+.1%}"
    return ""
