"""Compares two saved runs load by load: better, worse or no difference.

Invariant: if the servers do not differ, the probability that the whole comparison finds a difference is at most 1 minus
its confidence, however many rows it has (Bonferroni). The intervals reflect only the windows of these two runs, not how
much the machine itself changes between runs; `min_change` is the smallest difference that counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist

from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.tools.load.analysis.confidence import difference
from shmserve.tools.load.plan import ClosedLoop, Load, OpenLoop
from shmserve.tools.load.record import Interval, Latencies, LoadWindow, Point, SavedRun

BETTER, WORSE, SAME, UNKNOWN = "better", "worse", "no difference", "unknown"
MIXED = "mixed"
FAILED = "failed"
"""The metric of failures. Its values are shares of all responses."""
MAX_EXACT = 500
"""Up to this number of failures, probabilities are exact; above, the normal distribution is used."""


class Change(Struct, frozen=True, kw_only=True):
    """One metric of one load."""

    load: str
    metric: str
    old: float
    new: float
    relative: Interval | None
    """The difference, new minus old, as a share of the old value; None for too few windows, and for failures."""
    verdict: str


class RunComparison(Struct, frozen=True, kw_only=True):
    verdict: str
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    confidence: float = 0.95
    """Confidence of all rows together."""
    row_confidence: float = 0.95
    """Confidence of each interval; the more rows, the higher."""

    @property
    def is_worse(self) -> bool:
        """Whether any metric is worse, even if another is better."""
        return self.verdict in (WORSE, MIXED)


class _Metric(Struct, frozen=True):
    """`value` is that of the whole point, as reports show it."""

    name: str
    value: Callable[[Point], float | None]
    of_window: Callable[[LoadWindow], float | None]
    more_is_better: bool = False


def _mean(result: Interval | None) -> float | None:
    return result.mean if result is not None else None


def _percentile(name: str) -> _Metric:
    def value(point: Point) -> float | None:
        latency: Latencies = point.latency
        return _mean(latency.percentiles.get(name))

    return _Metric(name, value, lambda window: window.percentiles.get(name))


_THROUGHPUT = _Metric("throughput", lambda point: point.throughput.mean, lambda window: window.per_s, True)
_IN_TIME = _Metric("in time/s", lambda point: _mean(point.goodput), lambda window: window.in_time_per_s, True)
PERCENTILES = ("p50", "p99")


class _Row(Struct, frozen=True):
    load: str
    metric: _Metric
    old: float
    new: float
    old_windows: Sequence[float]
    new_windows: Sequence[float]


def compare(old: SavedRun, new: SavedRun, confidence: float = 0.95, min_change: float = 0.01) -> RunComparison:
    """Raises InvalidRequest if the runs have no load in common. `min_change`: as a share of the old value."""
    after = {_key(point.load): point for point in new.points}
    pairs = [(point, after[_key(point.load)]) for point in old.points if _key(point.load) in after]
    if not pairs:
        loads = "; ".join(", ".join(str(point.load) for point in run.points) or "none" for run in (old, new))
        raise InvalidRequest(
            f"the runs have no load in common ({loads}): measure both with the same --concurrency or --rate"
        )
    work = [(pair, list(_rows(*pair)), any(point.failed for point in pair)) for pair in pairs]
    count = sum(len(rows) + fails for _, rows, fails in work)
    each = 1 - (1 - confidence) / max(1, count)
    changes: list[Change] = []
    for pair, rows, fails in work:
        changes += (_change(row, each, min_change) for row in rows)
        if fails:
            changes.append(_failures(*pair, each))
    return RunComparison(
        verdict=_overall(changes),
        changes=tuple(changes),
        notes=tuple(_notes(old, new, pairs)),
        confidence=confidence,
        row_confidence=each,
    )


def _key(load: Load) -> tuple[str, float]:
    kind = load.arrivals if isinstance(load, OpenLoop) else type(load).__name__
    return kind, round(load.value, 6)


def _rows(old: Point, new: Point) -> Iterator[_Row]:
    metrics = [_IN_TIME, *map(_percentile, PERCENTILES)]
    if isinstance(old.load, ClosedLoop):  # an open loop's throughput is its rate
        metrics.insert(0, _THROUGHPUT)
    for metric in metrics:
        before, after = metric.value(old), metric.value(new)
        if before is not None and after is not None:
            yield _Row(str(old.load), metric, before, after, _values(old, metric), _values(new, metric))


def _values(point: Point, metric: _Metric) -> list[float]:
    results = [metric.of_window(window) for window in point.windows[slice(*point.used)]]
    return [one for one in results if one is not None]


def _change(row: _Row, confidence: float, minimum: float) -> Change:
    """The difference between the values that reports show. Its interval follows from the windows."""
    delta = difference(row.old_windows, row.new_windows, confidence)
    if delta is None or not row.old:
        return Change(load=row.load, metric=row.metric.name, old=row.old, new=row.new, relative=None, verdict=UNKNOWN)
    middle, half = row.new - row.old, delta.half
    relative = Interval(middle / row.old, (middle - half) / row.old, (middle + half) / row.old)
    if relative.low <= 0 <= relative.high:
        verdict = UNKNOWN if half >= min(row.old, row.new) else SAME
    elif abs(relative.mean) < minimum:
        verdict = SAME
    else:
        verdict = BETTER if (middle > 0) is row.metric.more_is_better else WORSE
    return Change(load=row.load, metric=row.metric.name, old=row.old, new=row.new, relative=relative, verdict=verdict)


def _failures(old: Point, new: Point, confidence: float) -> Change:
    """Tests failures: if both servers failed equally often, the failures would be divided as the requests are."""
    before, after = (point.latency.count + point.failed for point in (old, new))
    failed = old.failed + new.failed
    chance = _two_sided(new.failed, failed, after / (before + after))
    old_share, new_share = (point.failed / max(1, count) for point, count in ((old, before), (new, after)))
    verdict = SAME
    if not before or not after:
        verdict = UNKNOWN
    elif chance < 1 - confidence:
        verdict = WORSE if new_share > old_share else BETTER
    return Change(load=str(old.load), metric=FAILED, old=old_share, new=new_share, relative=None, verdict=verdict)


def _two_sided(result: int, count: int, share: float) -> float:
    """The probability that a binomial count is at least as far from its mean as this one."""
    if count > MAX_EXACT:
        deviation = math.sqrt(count * share * (1 - share))
        away = max(0.0, abs(result - count * share) - 0.5)
        return 2 * NormalDist().cdf(-away / deviation) if deviation else 1.0
    parts = [math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(count + 1)]
    return min(1.0, 2 * min(sum(parts[: result + 1]), sum(parts[result:])))


def _overall(changes: Sequence[Change]) -> str:
    results = {change.verdict for change in changes}
    if {BETTER, WORSE} <= results:
        return MIXED
    return next((verdict for verdict in (WORSE, BETTER, SAME) if verdict in results), UNKNOWN)


def _notes(old: SavedRun, new: SavedRun, pairs: Sequence[tuple[Point, Point]]) -> list[str]:
    rows = tuple([point.rows for point in points] for points in zip(*pairs, strict=True))
    notes = [
        f"{name} differs: {before} and {after}"
        for name, before, after in (
            ("the model", old.plan.model, new.plan.model),
            ("the protocol", old.plan.endpoint.scheme, new.plan.endpoint.scheme),
            ("the machine", old.machine, new.machine),
            ("the deadline", f"{old.plan.deadline_ns / 1e6:g} ms", f"{new.plan.deadline_ns / 1e6:g} ms"),
        )
        if before != after
    ]
    if rows[0] != rows[1]:
        before, after = next((a, b) for a, b in zip(*rows, strict=True) if a != b)
        notes.append(f"the rows per request differ: {before:g} and {after:g}")
    unstable = [str(point.load) for pair in pairs for point in pair if not point.stable]
    if unstable:
        notes.append(f"not stable: {', '.join(dict.fromkeys(unstable))}")
    unknown = [
        f"{name} of {pair[0].load}"
        for pair in pairs
        for name in PERCENTILES
        if not all(name in point.latency.percentiles for point in pair)
    ]
    if unknown:
        notes.append(f"not compared, as too few responses exceed it: {', '.join(unknown)}")
    return notes
