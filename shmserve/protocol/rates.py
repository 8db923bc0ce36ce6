"""Rates and percentiles between two answers to the query `activity`.

In a row, None means that there is no value: nothing was measured in the interval, or it is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmserve import histogram

Document = Mapping[str, Any]
Row = dict[str, Any]
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
MEMORY_STEP = 1 << 20
"""Live views round resident memory down to this, because it changes constantly."""
_MONOTONIC = ("success", "failed", "batches", "rows")


def rates(before: Document | None, after: Document, seconds: float, ready: int) -> Row:
    """Rates between two states of a version with `ready` instances. Without `before`, or if counters were reset in
    between (the version was unloaded and loaded again), all values are None."""
    row: Row = dict.fromkeys(
        (
            "requests_per_s",
            "failed_per_s",
            "rows_per_s",
            "batches_per_s",
            "mean_batch",
            "queue_seconds",
            "compute_seconds",
            "input_seconds",
            "infer_seconds",
            "output_seconds",
            "busy",
            "cache_hits",
            *SHARES,
        )
    )
    row["reasons"], row["request_times"] = {}, {}
    old, new = before.get("counters") if before else None, after.get("counters")
    if not before or not old or not new or seconds <= 0 or any(new.get(one, 0) < old.get(one, 0) for one in _MONOTONIC):
        return row
    more = {name: value - old.get(name, 0) for name, value in new.items() if isinstance(value, (int, float))}
    done, batches = more["success"], more.get("batches", 0)
    row["requests_per_s"] = (done + more["failed"]) / seconds
    row["failed_per_s"] = more["failed"] / seconds
    row["rows_per_s"] = more["rows"] / seconds
    row["batches_per_s"] = batches / seconds
    if batches:
        row["mean_batch"] = more["rows"] / batches
    if done:
        for part in ("queue", "input", "infer", "output"):
            row[f"{part}_seconds"] = more[f"{part}_ns"] / done / 1e9
        row["compute_seconds"] = row["input_seconds"] + row["infer_seconds"] + row["output_seconds"]
    looked_up = more.get("cache_hits", 0) + more.get("cache_misses", 0)
    if looked_up:
        row["cache_hits"] = more["cache_hits"] / looked_up
    if ready:
        row["busy"] = min(1.0, max(0.0, (_busy_seconds(after) - _busy_seconds(before)) / seconds / ready))
    row["reasons"] = _more(old.get("reasons"), new.get("reasons"))
    times = _more(old.get("request_times"), new.get("request_times"))
    row["request_times"] = {int(bucket): count for bucket, count in times.items()}
    return row | percentiles(row["request_times"])


def _busy_seconds(entry: Document) -> float:
    """How long the version's instances have run batches, including the current ones."""
    done: float = entry["counters"].get("batch_ns", 0) / 1e9
    running: float = sum(one.get("batch_seconds") or 0.0 for one in entry.get("instances", ()))
    return done + running


def _more(before: Mapping[Any, int] | None, after: Mapping[Any, int] | None) -> dict[Any, int]:
    """The increases of the counts that have grown."""
    old, new = before or {}, after or {}
    return {key: count - old.get(key, 0) for key, count in new.items() if count > old.get(key, 0)}


def percentiles(times: Mapping[int, int]) -> Row:
    """Percentiles in seconds, from the counts of a histogram with power-of-two buckets: off by less than a factor of
    two."""
    counts = histogram.empty()
    for bucket, count in times.items():
        counts[bucket] += count
    known = any(counts)
    return {name: histogram.quantile(counts, share) / 1e9 if known else None for name, share in SHARES.items()}
