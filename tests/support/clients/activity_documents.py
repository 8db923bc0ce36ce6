"""Documents like a server's answers to the query `activity`, for tests of live views."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]
SECOND = 1_000_000_000


def counters(success: int = 0, failed: int = 0, **more: Any) -> Document:
    """Counters of requests with one row in a separate batch each, 1 ms in the queue and 3 ms of compute, unless `more`
    says otherwise."""
    found: Document = {
        "success": success, "failed": failed, "rejected": 0, "cancelled": 0, "rows": success, "batches": success,
        "request_ns": success * 4_000_000, "queue_ns": success * 1_000_000, "input_ns": 0,
        "infer_ns": success * 3_000_000, "output_ns": 0, "batch_ns": success * 3_000_000, "cache_hits": 0,
        "cache_misses": 0, "restarts": 0, "reasons": {"idle": success} if success else {},
        "request_times": {"22": success} if success else {}, "batch_rows": {"1": success} if success else {},
    }  # fmt: skip
    return found | more


def instance(name: str, **more: Any) -> Document:
    found: Document = {
        "name": name, "state": "ready", "kind": "KIND_CPU", "device": 0, "passive": False, "pid": 4321,
        "memory_bytes": 50 << 20, "cpu_seconds": 0.0, "restarts": 0, "in_flight": 0, "busy_seconds": 0.0,
        "batch_rows": 0, "batch_seconds": 0.0, "waiting_rows": 0, "quarantined": False, "retry_seconds": 0.0,
        "reason": "", "gpu_memory_bytes": 0,
    }  # fmt: skip
    return found | more


def model(name: str, version: str = "1", counted: Document | None = None, **more: Any) -> Document:
    found: Document = {
        "name": name, "version": version, "state": "READY", "reason": "", "degraded": False, "default": True,
        "loading_seconds": 0.5, "reloading": False, "changed_on_disk": False, "last_failed_change": None, "queued": 0,
        "in_flight": 0, "instances": [instance(f"{name}_0_0")], "counters": counted or counters(), "max_batch": 8,
        "sequences": 0,
    }  # fmt: skip
    return found | more


def absent(name: str) -> Document:
    """A model that was never loaded."""
    return {"name": name, "version": "", "state": "", "reason": ""}


def document(seconds: float, *models: Document, **more: Any) -> Document:
    server: Document = {
        "name": "test", "version": "1.2.3", "ready": True, "pid": 4000, "uptime_seconds": 90_000 + seconds,
        "cpu_seconds": 0.1 * seconds, "memory_bytes": 80 << 20, "in_flight": 0, "refused": {}, "connections": 1,
        "held_bytes": 0, "segments": 0, "segment_bytes": 0, "cores": 4, "machine_utilization": 0.25,
        "machine_memory_bytes": 16 << 30, "machine_memory_used_bytes": 4 << 30,
    }  # fmt: skip
    found: Document = {
        "time_ns": int(seconds * SECOND) + 1,
        "server": server,
        "models": list(models),
        "clients": [client(1, "top")],
        "gpus": [],
    }
    return found | more


def client(number: int, name: str, **more: Any) -> Document:
    found: Document = {
        "number": number, "name": name, "user": "uid:1000", "plane": "lane", "in_flight": 0, "held_bytes": 0,
        "segments": 0, "segment_bytes": 0,
    }  # fmt: skip
    return found | more


def gpu(number: int, **more: Any) -> Document:
    found: Document = {
        "number": number, "uuid": f"GPU-{number}", "name": "Stand-in", "utilization": 0.5, "memory_bytes": 80 << 30,
        "memory_used_bytes": 20 << 30, "power_watts": 300.0, "power_limit_watts": 700.0,
    }  # fmt: skip
    return found | more
