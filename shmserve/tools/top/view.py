"""The tables of a view, computed from two documents of a server: rates and percentiles between them, and the current
state.

A document has the form of the answer to the query `activity` (docs/wire.md); a source that does not know a value leaves
it out and names its columns in `unknown`. In a row, None means that there is no value: nothing was measured in the
interval, or it is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from shmserve.llm.figures import figures_of
from shmserve.protocol.rates import Document, Row, rates

NOT_LOADED = "not loaded"
_STEP_COUNTERS = ("count", "failed", "queue_ns", "input_ns", "infer_ns", "output_ns")
UNLOADED = "unloaded"
"""Reason of a version that was unloaded on request."""
_SERVER = (
    "name",
    "version",
    "ready",
    "out_of_service",
    "pid",
    "uptime_seconds",
    "memory_bytes",
    "in_flight",
    "connections",
    "held_bytes",
    "segments",
    "segment_bytes",
    "cores",
    "machine_utilization",
    "machine_memory_bytes",
    "machine_memory_used_bytes",
    "refused",
)


class View(Struct):
    """The contents of a view. `interval`: seconds that the rates cover; None: no rates yet. `unknown`: keys of columns
    that the source cannot know. `notes`: messages for the user about the source."""

    server: Row
    models: list[Row]
    instances: list[Row]
    clients: list[Row]
    gpus: list[Row]
    interval: float | None = None
    unknown: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def table(self, name: str) -> list[Row]:
        rows: list[Row] = getattr(self, name)
        return rows


def make_view(before: Document | None, after: Document) -> View:
    """`before`: an earlier document of the same server; ignored if the server was restarted since."""
    if before is not None and before["server"].get("pid") != after["server"].get("pid"):
        before = None
    seconds = (after["time_ns"] - before["time_ns"]) / 1e9 if before is not None else 0.0
    if seconds <= 0:
        before = None
    divided = {entry["name"] for entry in after["models"] if 0 < (entry.get("share") or 0) < 100}
    earlier = {_key(entry): entry for entry in before["models"]} if before is not None else {}
    models, instances = [], []
    for entry in after["models"]:
        previous = earlier.get(_key(entry))
        rows = _instances(entry, previous, seconds)
        share = (entry.get("share") or 0) / 100 if entry["name"] in divided else None
        models.append(_model(entry, previous, rows, seconds) | {"share": share})
        instances += rows
    return View(
        _server(after, before, models, seconds),
        models,
        instances,
        [dict(client) for client in after["clients"]],
        [_gpu(gpu) for gpu in after["gpus"]],
        seconds if before is not None else None,
        frozenset(after.get("unknown", ())),
        tuple(after.get("notes", ())),
    )


def _key(entry: Document) -> tuple[str, str]:
    return entry["name"], entry["version"]


# ------------------------------------------------------------------------------------------ the server


def _server(after: Document, before: Document | None, models: Iterable[Row], seconds: float) -> Row:
    server = {name: after["server"].get(name) for name in _SERVER}
    rows = list(models)
    old, new = (before or {"server": {}})["server"].get("cpu_seconds"), after["server"].get("cpu_seconds")
    server["cpu"] = (new - old) / seconds if old is not None and new is not None and new >= old else None
    server["queued"] = sum_known(row["queued"] for row in rows)
    for name in ("requests_per_s", "failed_per_s"):
        server[name] = sum_known(row[name] for row in rows)
    if server["in_flight"] is None:
        known = [row["queued"] + row["in_flight"] for row in rows if None not in (row["queued"], row["in_flight"])]
        server["in_flight"] = sum(known) if known else None
    return server


def sum_known(values: Iterable[float | None]) -> Any:
    """The sum of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _gpu(gpu: Document) -> Row:
    used, total = gpu.get("memory_used_bytes"), gpu.get("memory_bytes")
    clock, maximum = gpu.get("sm_clock_hertz"), gpu.get("sm_clock_max_hertz")
    return dict(gpu) | {
        "memory_share": used / total if used is not None and total else None,
        "sm_clock_share": clock / maximum if clock is not None and maximum else None,
        "throttled": ", ".join(gpu.get("throttled") or ()),
        "out_of_service": gpu.get("out_of_service") or "",
        "temperature_celsius": gpu.get("temperature_celsius"),
    }


# ------------------------------------------------------------------------------------------ models


def _model(entry: Document, before: Document | None, instances: list[Row], seconds: float) -> Row:
    expected = [row for row in instances if row["state"] not in ("stopping", "stopped")]
    ready = sum(row["state"] == "ready" for row in expected)
    counters = entry.get("counters") or {}
    state = entry["state"] or NOT_LOADED
    if entry["reason"] == UNLOADED:
        state = NOT_LOADED
    elif entry.get("reloading") and state == "READY":
        state = "RELOADING"
    elif entry.get("degraded"):
        state = "DEGRADED"
    elif entry.get("asleep"):
        state = "ASLEEP"
    row: Row = {
        "model": entry["name"],
        "version": int(entry["version"]) if entry["version"].isdecimal() else None,
        "default": bool(entry.get("default")),
        "state": state,
        "instances": f"{ready}/{len(expected)}" if expected else None,
        "scaled": "{}-{}".format(*entry["scaled"]) if entry.get("scaled") else None,
        "ready": ready,
        "expected": len(expected),
        "queued": entry.get("queued"),
        "in_flight": entry.get("in_flight"),
        "memory_bytes": entry.get("memory_bytes") or sum_known(row["memory_bytes"] for row in instances),
        "gpu_memory_bytes": sum_known(row["gpu_memory_bytes"] for row in instances),
        "cpu": sum_known(row["cpu"] for row in instances),
        "restarts": counters.get("restarts"),
        "requests": sum_known((counters.get("success"), counters.get("failed"))),
        "failed": counters.get("failed"),
        "sequences": entry.get("sequences"),
        "max_batch": entry.get("max_batch"),
        "loading_seconds": entry.get("loading_seconds"),
        "reason": _reason(entry),
        "batch_sizes": counters.get("batch_rows") or {},
        "ensemble": entry.get("ensemble"),
        "trend": None,
    }
    row |= figures_of(before and before.get("language"), entry.get("language"), seconds)
    return row | rates(before, entry, seconds, ready)


def step_rows(before: Iterable[Document], after: Iterable[Document], seconds: float) -> list[Row]:
    """Rows of an ensemble's steps, for the table of models. Without a state before, they have no rates."""
    earlier = {step["index"]: step for step in before}
    rows: list[Row] = []
    for step in after:
        old = earlier.get(step["index"])
        known = old is not None and seconds > 0 and step["count"] >= old["count"]
        more = {name: step[name] - old[name] for name in _STEP_COUNTERS} if old is not None and known else {}
        count = more.get("count", 0)
        compute_ns = sum(more.get(name, 0) for name in ("input_ns", "infer_ns", "output_ns"))
        rows.append(
            {
                "model": step["model"],
                "version": int(step["version"]) if step["version"].isdecimal() else None,
                "requests_per_s": count / seconds if more else None,
                "failed_per_s": more["failed"] / seconds if more else None,
                "queue_seconds": more["queue_ns"] / count / 1e9 if count else None,
                "compute_seconds": compute_ns / count / 1e9 if count else None,
            }
        )
    return rows


def _reason(entry: Document) -> str:
    """Why the version is not served, or not in the state of its repository."""
    failed = entry.get("last_failed_change")
    texts = [
        entry.get("reason") if entry["reason"] != UNLOADED else "",
        failed and f"the last change failed: {failed['reason']}",
        "changed on disk" if entry.get("changed_on_disk") else "",
    ]
    return "; ".join(text for text in texts if text)


# ------------------------------------------------------------------------------------------ instances


def _instances(entry: Document, before: Document | None, seconds: float) -> list[Row]:
    earlier = {(one["name"], one.get("pid")): one for one in (before or {}).get("instances", ())}
    return [
        _instance(entry, one, earlier.get((one["name"], one.get("pid"))), seconds)
        for one in entry.get("instances", ())
        if one["state"] != "stopped"
    ]


def _instance(entry: Document, one: Document, before: Document | None, seconds: float) -> Row:
    old, new = (before or {}).get("cpu_seconds"), one.get("cpu_seconds")
    notes = [note for note in ("passive", "quarantined") if one.get(note)]
    rows = one.get("batch_rows")
    return {
        "model": entry["name"],
        "version": int(entry["version"]) if entry["version"].isdecimal() else None,
        "instance": one["name"],
        "state": notes[-1] if notes and one["state"] == "ready" else one["state"],
        "busy_seconds": one.get("batch_seconds", one.get("busy_seconds")) if rows or one.get("busy_seconds") else None,
        "slow": bool(one.get("busy_seconds")),
        "batch_rows": rows,
        "waiting_rows": one.get("waiting_rows"),
        "running": one.get("in_flight"),
        "device": _device(one),
        "pid": one.get("pid") or None,
        "cpu": (new - old) / seconds if old is not None and new is not None and new >= old else None,
        "memory_bytes": one.get("memory_bytes"),
        "gpu_memory_bytes": one.get("gpu_memory_bytes"),
        "restarts": one.get("restarts"),
        "reason": _attempt(one),
    }


def _device(one: Document) -> str | None:
    if "kind" not in one:
        return None
    return f"gpu {one['device']}" if one["kind"] == "KIND_GPU" else "cpu"


def _attempt(one: Document) -> str:
    reason: str = one.get("reason", "")
    seconds = one.get("retry_seconds")
    return f"{reason}; next attempt in {seconds:g} s" if seconds else reason
