"""Scales replicas by the time that requests wait in the servers' queues, not by the number of requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shmserve import AsyncClient
from shmserve.tools.top.http_source import samples

QUEUE_MS, BUSY = "queue_ms", "busy"
"""Names of what a replica reports: the mean queue time of the requests taken from its queues, and the fraction of time
for which its instances were busy."""
ENOUGH = 0.8
"""Maximum fraction of time for which the remaining replicas may be busy after one is removed."""
_FINISHED = ("success", "failed")


class QueueTimes:
    """Measures a server between two calls of `measured`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._before: dict[str, float] = {}

    async def measured(self) -> dict[str, float]:
        now = totals(await self._client.activity())
        before, self._before = self._before, now
        return between(before, now) if before else {QUEUE_MS: 0.0, BUSY: 0.0}


def totals(activity: Mapping[str, Any]) -> dict[str, float]:
    """Sums over all models of a document of `Client.activity`. Ensembles are left out: their steps would count
    twice."""
    result = dict.fromkeys(("finished", "queue_ns", "batch_ns", "queued", "instances"), 0.0)
    for entry in activity["models"]:
        counters = entry.get("counters")
        if counters and not entry.get("ensemble"):
            result["finished"] += sum(counters[name] for name in _FINISHED)
            result["queue_ns"] += counters["queue_ns"]
            result["batch_ns"] += counters["batch_ns"]
            result["queued"] += entry["queued"]
            result["instances"] += len(entry["instances"])
    return result | {"time_ns": activity["time_ns"]}


def between(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Requests that are still queued count with the time in which those before them were finished (Little's law)."""
    passed_ns = max(1.0, now["time_ns"] - before["time_ns"])
    finished = now["finished"] - before["finished"]
    if finished <= 0:
        waited_ns = passed_ns if now["queued"] else 0.0
    else:
        waited_ns = max((now["queue_ns"] - before["queue_ns"]) / finished, now["queued"] * passed_ns / finished)
    used = (now["batch_ns"] - before["batch_ns"]) / (passed_ns * max(1.0, now["instances"]))
    return {QUEUE_MS: max(0.0, waited_ns) / 1e6, BUSY: min(1.0, max(0.0, used))}


def free_bytes(metrics: str) -> float:
    """The free part of the memory budget of the host, or of the GPU with the least left; infinite without a budget."""
    budgets: dict[str, float] = {}
    used: dict[str, float] = {}
    for name, labels, value in samples(metrics, ("shmserve_memory_budget_bytes", "shmserve_model_memory_bytes")):
        place = labels.get("place", "")
        if name == "shmserve_memory_budget_bytes":
            budgets[place] = value
        else:
            used[place] = used.get(place, 0.0) + value
    return min((budget - used.get(place, 0.0) for place, budget in budgets.items()), default=math.inf)


class QueueTimePolicy:
    """An autoscaling policy of Ray Serve. Adds a replica while requests wait longer than `queue_ms` on average. Removes
    one if they wait at most half of that, and the remaining replicas would be busy for at most 80 % of the time. Ray
    applies the bounds and delays of the autoscaling configuration.
    """

    def __init__(self, queue_ms: float = 50.0) -> None:
        self._queue_ms = queue_ms

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        queues, busy = metrics.get(QUEUE_MS) or {}, metrics.get(BUSY) or {}
        return decide(context.target_num_replicas, list(queues.values()), list(busy.values()), self._queue_ms), {}


def decide(replicas: int, queues_ms: list[float], busy: list[float], limit_ms: float) -> int:
    """The target number of replicas, at most one more or less than now."""
    if not queues_ms or not busy:
        return replicas
    wait = sum(queues_ms) / len(queues_ms)
    if wait > limit_ms:
        return replicas + 1
    if replicas > 1 and wait <= limit_ms / 2 and sum(busy) / (replicas - 1) <= ENOUGH:
        return replicas - 1
    return replicas
