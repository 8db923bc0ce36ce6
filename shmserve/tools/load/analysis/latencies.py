"""Latencies in an HDR histogram: three significant digits from 1 ns to an hour."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hdrh.histogram import HdrHistogram
from numpy.typing import NDArray

from shmserve.tools.load.plan import PERCENTILES, percentile_name

HIGHEST = 3600 * 10**9
DIGITS = 3
_BITS = 11
"""Values below 2048 have separate buckets; above, a bucket spans 1/1024 to 1/2048 of its values."""
FEW = 10
"""A percentile needs this many values above it."""


def needed(percentile: float) -> int:
    """Number of values from which a percentile can be determined."""
    return 1 if percentile <= 50 else math.ceil(round(FEW * 100 / (100 - percentile), 6))


def is_decided(percentile: float, count: int, above: int) -> bool:
    """Whether `count` values, `above` of which exceed a limit, determine if the percentile is above that limit."""
    return count >= needed(percentile) or above >= FEW


class LatencyHistogram:
    """Counts latencies in ns."""

    def __init__(self) -> None:
        self._counts: Any = HdrHistogram(1, HIGHEST, DIGITS)
        self._total = 0

    def add(self, values: NDArray[np.int64]) -> None:
        """Records many values with one call per bucket."""
        if not len(values):
            return
        limited = np.clip(values, 1, HIGHEST)
        self._total += int(limited.sum())
        shift = np.maximum(np.frexp(limited.astype(np.float64))[1] - _BITS, 0)
        for value, count in zip(*np.unique((limited >> shift) << shift, return_counts=True), strict=True):
            self._counts.record_value(int(value), int(count))

    @property
    def count(self) -> int:
        return int(self._counts.total_count)

    @property
    def mean(self) -> float:
        return self._total / self.count if self.count else 0.0

    @property
    def extremes(self) -> tuple[float, float]:
        return (float(self._counts.get_min_value()), float(self._counts.get_max_value())) if self.count else (0.0, 0.0)

    def percentiles(self) -> dict[str, float]:
        """Percentiles in ns, without those that too few values exceed."""
        return {
            percentile_name(share): float(self._counts.get_value_at_percentile(share))
            for share in PERCENTILES
            if self.count >= needed(share)
        }

    def encoded(self) -> str:
        return bytes(self._counts.encode()).decode()


def buckets(encoded: str) -> list[tuple[float, int]]:
    """The recorded values of an encoded histogram, ascending, and how often each occurred."""
    result: Any = HdrHistogram.decode(encoded)
    return [
        (float(item.value_iterated_to), int(item.count_added_in_this_iter_step))
        for item in result.get_recorded_iterator()
    ]


def percentile_of(encoded: str, percentile: float) -> float:
    """Any percentile of an encoded histogram."""
    return float(HdrHistogram.decode(encoded).get_value_at_percentile(percentile))


def count_above(encoded: str, limit: float) -> int:
    """How many values of an encoded histogram are above the limit."""
    return sum(count for value, count in buckets(encoded) if value > limit)


def window_percentiles(values: NDArray[np.int64]) -> dict[str, float]:
    """Exact percentiles of one window, without those that too few values exceed."""
    shares = [share for share in PERCENTILES if share <= 50 or len(values) * (100 - share) / 100 >= 1]
    if not len(values):
        return {}
    result = np.percentile(values, shares, method="inverted_cdf")
    return {percentile_name(share): float(value) for share, value in zip(shares, result, strict=True)}
