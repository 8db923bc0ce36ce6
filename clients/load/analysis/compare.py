"""Compares two saved runs load by load: better, worse or no difference, by confidence intervals.

The intervals say what the windows of these two runs support. They do not know how much the machine itself changes
between runs; `least` is the smallest difference that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from msgspec import Struct

from shmserve.clients.load.analysis.confidence import difference
from shmserve.clients.load.plan import Closed, Load, Open
from shmserve.clients.load.record import Interval, Point, Run, Window
from shmserve.errors import InvalidRequest

BETTER, WORSE, SAME, UNKNOWN = "better", "worse", "no difference", "unknown"
MIXED = "mixed"


class Change(Struct, frozen=True, kw_only=True):
    """One metric of one load."""

    load: str
    metric: str
    old: float
    new: float
    relative: Interval | None
    """The difference, new minus old, as a share of the old value; None if the windows do not suffice."""
    verdict: str


class Comparison(Struct, frozen=True, kw_only=True):
    verdict: str
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    confidence: float = 0.95
    """Of the intervals."""


Metric = Callable[[Window], float | None]


def _percentile(name: str) -> Metric:
    return lambda window: window.percentiles.get(name)


METRICS: dict[str, tuple[Metric, bool]] = {
    "throughput": (lambda window: window.per_s, True),
    "p50": (_percentile("p50"), False),
    "p99": (_percentile("p99"), False),
}
"""Metric -> its value in a window, and whether more is better."""


def compare(old: Run, new: Run, confidence: float = 0.95, least: float = 0.01) -> Comparison:
    """Raises InvalidRequest if the runs have no load in common. `least`: as a share of the old value."""
    after = {_key(point.load): point for point in new.points}
    pairs = [(point, after[_key(point.load)]) for point in old.points if _key(point.load) in after]
    if not pairs:
        loads = "; ".join(", ".join(str(point.load) for point in run.points) or "none" for run in (old, new))
        raise InvalidRequest(
            f"the runs have no load in common ({loads}): measure both with the same --concurrency or --rate"
        )
    changes = tuple(change for pair in pairs for change in _changes(*pair, confidence, least))
    notes = tuple(_notes(old, new, pairs))
    return Comparison(verdict=_overall(changes), changes=changes, notes=notes, confidence=confidence)


def _key(load: Load) -> tuple[str, float]:
    kind = load.arrivals if isinstance(load, Open) else type(load).__name__
    return kind, round(load.value, 6)


def _changes(old: Point, new: Point, confidence: float, least: float) -> list[Change]:
    found = []
    for metric, (value, more_is_better) in METRICS.items():
        if metric == "throughput" and not isinstance(old.load, Closed):
            continue  # an open loop's throughput is its rate
        before, after = _values(old, value), _values(new, value)
        if before and after:
            found.append(_change(str(old.load), metric, before, after, more_is_better, confidence, least))
    return found


def _values(point: Point, value: Metric) -> list[float]:
    found = [value(window) for window in point.windows[slice(*point.used)]]
    return [one for one in found if one is not None]


def _change(
    load: str, metric: str, old: Sequence[float], new: Sequence[float], more_is_better: bool, confidence: float,
    least: float,
) -> Change:  # fmt: skip
    mean, delta = fmean(old), difference(old, new, confidence)
    if delta is None or not mean:
        return Change(load=load, metric=metric, old=mean, new=fmean(new), relative=None, verdict=UNKNOWN)
    relative = Interval(delta.mean / mean, delta.low / mean, delta.high / mean)
    if relative.low <= 0 <= relative.high or abs(relative.mean) < least:
        verdict = SAME
    else:
        verdict = BETTER if (relative.mean > 0) is more_is_better else WORSE
    return Change(load=load, metric=metric, old=mean, new=fmean(new), relative=relative, verdict=verdict)


def _overall(changes: Sequence[Change]) -> str:
    found = {change.verdict for change in changes}
    if {BETTER, WORSE} <= found:
        return MIXED
    return next((verdict for verdict in (WORSE, BETTER, SAME) if verdict in found), UNKNOWN)


def _notes(old: Run, new: Run, pairs: Sequence[tuple[Point, Point]]) -> list[str]:
    notes = [
        f"{name} differs: {before} and {after}"
        for name, before, after in (
            ("the model", old.plan.model, new.plan.model),
            ("the protocol", old.plan.endpoint.kind, new.plan.endpoint.kind),
            ("the machine", old.machine, new.machine),
            ("the rows per request", old.points[0].rows, new.points[0].rows),
        )
        if before != after
    ]
    unstable = [str(point.load) for pair in pairs for point in pair if not point.stable]
    if unstable:
        notes.append(f"not stable: {', '.join(dict.fromkeys(unstable))}")
    failed = [f"{point.load}: {point.failed:,}" for pair in pairs for point in pair if point.failed]
    if failed:
        notes.append(f"failed requests: {'; '.join(failed)}")
    return notes
