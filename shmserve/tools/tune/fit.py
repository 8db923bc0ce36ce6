"""Service times of every setting, from the measured times of a few settings.

The time of a batch is affine in its rows (and, for padded inputs, in its elements) where that fits to 10 %, else a
table of the measured times. For a number of instances or threads that was measured at a few sizes only, the curve of
the nearest fully measured setting is scaled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from statistics import median

import numpy as np
from msgspec import Struct

from shmserve.sim.service import Measured

AFFINE_ERROR = 0.10
"""Largest relative error up to which the affine function is used instead of the measured times."""
QUANTILES = 200
IN_FLIGHT = 3
"""Number of batches per instance in flight in a measurement: one runs, one waits at the worker, one is in transit."""

Pair = tuple[int, int]
"""Instances and threads."""


class TimeSample(Struct, frozen=True):
    """A measured time: an instance takes `batch_ns` for each batch of `rows`, with all instances busy."""

    instances: int
    threads: int
    rows: float
    batch_ns: float
    length: int = 1

    @property
    def pair(self) -> Pair:
        return self.instances, self.threads


class Spread(Struct, frozen=True):
    """How single times deviate from the mean: factors, whose mean is 1, for variation that grows with the time, and
    pauses in ns, whose mean is 0, for variation that does not, such as pauses of the machine."""

    factors: tuple[float, ...] = (1.0,)
    pauses: tuple[float, ...] = ()


class Fit(Struct, frozen=True):
    """The service time with some number of instances and threads. `error`: largest relative error of the curve at a
    measured point. `batch_ns`, `row_ns`, `element_ns`: the affine function, also if the table is used instead."""

    pair: Pair
    batch_ns: float
    row_ns: float
    element_ns: float
    error: float
    affine: bool
    entries: tuple[tuple[int, float], ...]
    scaled: bool = False
    """Measured at a few sizes only."""

    def ns(self, rows: int, length: int = 1) -> float:
        return self.service().mean_ns(rows, length)

    def service(self, spread: Spread | None = None) -> Measured:
        result = spread or Spread()
        return Measured(self.entries, self.element_ns, result.factors, result.pauses)

    def rows_per_s(self, rows: int, length: int) -> float:
        """The capacity with batches of this size."""
        return self.pair[0] * rows * 1e9 / self.ns(rows, length)


def fit(samples: Sequence[TimeSample]) -> dict[Pair, Fit]:
    """A fit for each measured number of instances and threads."""
    groups: dict[Pair, list[TimeSample]] = {}
    for sample in samples:
        groups.setdefault(sample.pair, []).append(sample)
    sizes = max(len({(sample.rows, sample.length) for sample in group}) for group in groups.values())
    results: dict[Pair, Fit] = {}
    for pair, group in sorted(groups.items()):
        if len({(sample.rows, sample.length) for sample in group}) == sizes:
            results[pair] = _curve(pair, group)
    for pair, group in groups.items():
        if pair not in results:
            results[pair] = _scaled(pair, group, _nearest(pair, results))
    return results


def _curve(pair: Pair, samples: Sequence[TimeSample]) -> Fit:
    by_length = len({sample.length for sample in samples}) > 1
    columns = [[1.0, s.rows, s.rows * s.length] if by_length else [1.0, s.rows] for s in samples]
    times = np.array([sample.batch_ns for sample in samples])
    solved = _not_negative(np.array(columns), times)
    batch, row, element = [*map(float, solved), 0.0][:3]
    fitted = np.array(columns) @ solved
    error = float(np.max(np.abs(fitted - times) / times))
    sizes = sorted({max(1, round(sample.rows)) for sample in samples})
    affine = by_length or error <= AFFINE_ERROR
    if affine:
        entries = tuple((size, batch + row * size) for size in {1, *sizes, max(sizes) + 1})
    else:
        measured = {max(1, round(sample.rows)): sample.batch_ns for sample in samples}
        entries, error = tuple(measured.items()), 0.0
    return Fit(pair, batch, row, element, error, affine, tuple(sorted(entries)))


def _not_negative(columns: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Least squares of the relative errors, without negative coefficients: a negative one is left out."""
    used = list(range(columns.shape[1]))
    while True:
        solved = np.linalg.lstsq(columns[:, used] / times[:, None], np.ones(len(times)), rcond=None)[0]
        minimum = int(np.argmin(solved))
        if solved[minimum] >= 0 or len(used) == 1:
            break
        del used[minimum]
    result = np.zeros(columns.shape[1])
    result[used] = np.maximum(solved, 0.0)
    return result


def _nearest(pair: Pair, complete: Mapping[Pair, Fit]) -> Fit:
    """The complete curve with the same number of threads, if there is one."""
    return min(complete.values(), key=lambda fit: (fit.pair[1] != pair[1], abs(fit.pair[0] - pair[0])))


def _scaled(pair: Pair, samples: Sequence[TimeSample], base: Fit) -> Fit:
    """The base curve times a factor that is interpolated over the logarithm of the rows."""
    ordered = sorted(samples, key=lambda sample: (sample.rows, sample.length))
    factors = [sample.batch_ns / base.ns(max(1, round(sample.rows)), sample.length) for sample in ordered]
    if base.element_ns:
        factor = median(factors)
        entries = tuple((rows, time * factor) for rows, time in base.entries)
        error = max(abs(factor - each) / each for each in factors)
        parts = base.batch_ns * factor, base.row_ns * factor, base.element_ns * factor
        return Fit(pair, *parts, error, True, entries, scaled=True)
    rows = [log(max(1.0, sample.rows)) for sample in ordered]
    sizes = sorted({size for size, _ in base.entries} | {max(1, round(sample.rows)) for sample in ordered})
    entries = tuple((size, base.ns(size) * float(np.interp(log(size), rows, factors))) for size in sizes)
    curve = _curve(pair, [TimeSample(*pair, size, time) for size, time in entries])
    return Fit(pair, curve.batch_ns, curve.row_ns, 0.0, base.error, curve.affine, entries, scaled=True)


def spread_of(lone: Sequence[float], overhead_ns: float, full: Sequence[float], ratio: float) -> Spread:
    """The spread, from the latencies in ns of lone requests, and of requests in full batches that take `ratio` times as
    long. `overhead_ns` is the part of a lone latency that is not service. Comparing the two shows whether the variation
    grows with the time: the latency in full batches is the time of IN_FLIGHT batches."""
    times = np.maximum(np.array(lone, dtype=float) - overhead_ns, 0.0)
    mean = times.mean() if len(times) else 0.0
    if len(times) < 2 or not mean:
        return Spread()
    apart = np.quantile(times, (np.arange(QUANTILES) + 0.5) / QUANTILES, method="inverted_cdf")
    apart -= apart.mean()
    growing = 0.0
    if len(full) > 1 and ratio > 1 and _range(times):
        growing = min(max((_range(full) / IN_FLIGHT**0.5 / _range(times) - 1) / (ratio - 1), 0.0), 1.0)
    usual = np.minimum(apart, np.quantile(apart, 0.95, method="inverted_cdf"))  # above, they cannot be told from pauses
    usual -= usual.mean()
    factors, pauses = 1 + growing * usual / mean, apart - growing * usual
    return Spread(tuple(map(float, np.maximum(factors, 0.0))), tuple(map(float, pauses)))


def _range(values: Sequence[float] | np.ndarray) -> float:
    low, high = np.quantile(np.asarray(values, dtype=float), (0.05, 0.95))
    return float(high - low)
