"""The numbers of a recording, for each version of a model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from shmserve.protocol.recorded import RecordedBatch
from shmserve.terminal.tables import duration_text, table
from shmserve.tools.timeline.collected import Collected

HEAD = ("MODEL", "REQUESTS", "FAILED", "BATCHES", "ROWS/BATCH", "QUEUE P50", "P99", "COMPUTE P50", "REASONS")


class _Found:
    def __init__(self) -> None:
        self.batches: list[RecordedBatch] = []
        self.codes: Counter[str] = Counter()
        self.requests: set[int] = set()


def summary(collected: Collected) -> list[dict[str, Any]]:
    models: dict[tuple[str, int], _Found] = defaultdict(_Found)
    for batch in collected.batches:
        found = models[batch.model, batch.version]
        found.batches.append(batch)
        found.requests.update(request.number for request in batch.requests)
    for number, end in collected.ends.items():
        found = models[end.model, end.version]
        found.requests.add(number)
        if end.code:
            found.codes[end.code] += 1
    return [_of(name, version, found) for (name, version), found in sorted(models.items())]


def _of(name: str, version: int, found: _Found) -> dict[str, Any]:
    batches = found.batches
    waits = [max(0, batch.times[0] - request.arrived) / 1000 for batch in batches for request in batch.requests]
    computes = [(batch.times[2] - batch.times[1]) / 1000 for batch in batches]
    return {
        "model": name,
        "version": version,
        "requests": len(found.requests),
        "failed": found.codes.total(),
        "batches": len(batches),
        "rows": sum(batch.rows for batch in batches),
        "queue_p50_us": _percentile(waits, 0.5),
        "queue_p99_us": _percentile(waits, 0.99),
        "compute_p50_us": _percentile(computes, 0.5),
        "reasons": dict(Counter(batch.reason for batch in batches).most_common()),
        "errors": dict(found.codes.most_common()),
    }


def text(models: Sequence[dict[str, Any]]) -> str:
    return table(HEAD, [_row(entry) for entry in models], right=range(1, 8)) if models else ""


def _row(entry: dict[str, Any]) -> list[str]:
    batches = entry["batches"]
    return [
        f"{entry['model']} {entry['version']}",
        f"{entry['requests']:,}",
        f"{entry['failed']:,}",
        f"{batches:,}",
        f"{entry['rows'] / batches:.1f}" if batches else "",
        *(_us(entry[name]) for name in ("queue_p50_us", "queue_p99_us", "compute_p50_us")),
        ", ".join(f"{reason} {100 * number / batches:.0f} %" for reason, number in entry["reasons"].items()),
    ]


def _us(value: float | None) -> str:
    return "" if value is None else duration_text(value / 1e6)


def _percentile(values: list[float], share: float) -> float | None:
    """The nearest rank; None without values."""
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else None
