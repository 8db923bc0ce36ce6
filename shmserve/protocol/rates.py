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
_MONOTONIC = ("success", "failed", "batches", "rows")


def rates(before: Document | None, after: Document, seconds: float) -> Row:
    """Rates between two states of a version's counters. Without `before`, or if counters were reset in between (the
    version was unloaded and loaded again), all values are None."""
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
    row["reasons"] = {}
    if not before or not after or any(after.get(name, 0) < before.get(name, 0) for name in _MONOTONIC):
        return row
    more = {name: value - before.get(name, 0) for name, value in after.items() if isinstance(value, (int, float))}
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
    row["reasons"] = _more(before.get("reasons"), after.get("reasons"))
    return row | percentiles(request_times(before, after))


def request_times(before: Document, after: Document) -> dict[int, int]:
    """The histogram of the requests between two states of a version's counters, see `percentiles`."""
    times = _more(before.get("request_times"), after.get("request_times"))
    return {int(bucket): count for bucket, count in times.items()}


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
