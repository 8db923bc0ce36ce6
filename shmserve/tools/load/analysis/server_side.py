"""The server's counts between two readings of its statistics, in Triton's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmserve.tools.load.record import ServerSide

Statistics = Mapping[str, Any]
PARTS = {"queue": "queue", "gather": "compute_input", "compute": "compute_infer", "scatter": "compute_output"}
"""Part of a request -> its name in Triton's statistics."""


def between(before: Statistics, after: Statistics) -> ServerSide | None:
    """None if the server has no statistics."""
    if not after.get("inference_stats"):
        return None
    good = _delta(before, after, "success", "count")
    parts = {part: _delta(before, after, name, "ns") / good if good else 0.0 for part, name in PARTS.items()}
    return ServerSide(
        requests=good,
        failed=_delta(before, after, "fail", "count"),
        batches=_number(after, "execution_count") - _number(before, "execution_count"),
        rows=_number(after, "inference_count") - _number(before, "inference_count"),
        parts=parts,
        batch_sizes=_differences(_sizes(before), _sizes(after)),
        reasons=_differences(_reasons(before), _reasons(after)),
    )


def _number(entry: Statistics, name: str) -> int:
    return int(entry.get(name, 0))


def _delta(before: Statistics, after: Statistics, kind: str, unit: str) -> int:
    """Counters are integers, or text in the JSON form of protobuf."""
    now, then = (entry.get("inference_stats", {}).get(kind, {}).get(unit, 0) for entry in (after, before))
    return int(now) - int(then)


def _sizes(entry: Statistics) -> dict[str, int]:
    return {
        str(batch.get("batch_size", 0)): int(batch.get("compute_infer", {}).get("count", 0))
        for batch in entry.get("batch_stats", ())
    }


def _reasons(entry: Statistics) -> dict[str, int]:
    return {str(reason): int(count) for reason, count in entry.get("batch_reasons", {}).items()}


def _differences(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: more for name, count in after.items() if (more := count - before.get(name, 0)) > 0}
