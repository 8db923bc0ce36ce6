"""The answer to the query `activity`: current activity and all counters that live views need, in one compact document.
A caller that queries it every second gets only the models that have changed since its last document.

Invariant: the document is computed on demand from the core's tables and /proc; no state is kept per request for it. Its
size does not depend on the load, as it lists only the SHOWN_CLIENTS clients with the most requests in flight.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterable, Sequence
from heapq import nlargest
from itertools import groupby
from typing import Any

from msgspec import Struct

from shmserve.broker.models.traffic import traffic_document
from shmserve.core.owners import activity
from shmserve.core.records import ClientState, Version
from shmserve.core.state import State
from shmserve.core.stats.statistics import Statistics
from shmserve.core.traffic import UNSET
from shmserve.llm.figures import with_queue
from shmserve.protocol.bodies import decode_body
from shmserve.system import procfs

SHOWN_CLIENTS = 100
COMPARED_S = 10.0
"""Minimum interval in seconds between comparisons with the files on disk."""

Document = dict[str, Any]


class ActivityBody(Struct):
    """`since`: `time_ns` of the caller's last document. The new one lists only the models that have changed since,
    whose names are in `changed`. 0: all."""

    since: int = 0


class ModelChanges:
    """When models changed. Times are those of the documents in which the changes were noticed."""

    def __init__(self) -> None:
        self._marks: dict[str, object] = {}
        self._changed_at: dict[str, int] = {}
        self._complete_at = time.monotonic_ns()
        """A caller without a document since then needs all models: others have gone."""

    def since(self, time_ns: int, marks: Iterable[tuple[str, object]], now: int) -> list[str] | None:
        """The models that changed after that time; None: any may have. `marks`: those of all models, now. None is that
        of a model that is changing."""
        names = []
        for name, mark in marks:
            names.append(name)
            if mark is None or mark != self._marks.get(name):  # an equal mark is dropped at once: no work for the GC
                self._marks[name] = mark
                self._changed_at[name] = now
        if len(names) < len(self._marks):
            for name in self._marks.keys() - names:
                del self._marks[name], self._changed_at[name]
            self._complete_at = now
        if time_ns < self._complete_at:
            return None
        return [name for name, at in self._changed_at.items() if at > time_ns]


class ActivityReport:
    """`models(chosen)`: the index of these models, or of all. `marks(gpu_bytes)`: of all models. `about()`: facts about
    the server. `gpus()`: one entry per GPU. `gpu_bytes(pid)`: a process's memory on all GPUs. `language()`: what
    engines of language models have counted, by model and version. `compare()` starts to compare the loaded versions
    with the files on disk; a later document contains the result."""

    def __init__(
        self,
        state: State,
        models: Callable[[Container[str] | None], list[Document]],
        marks: Callable[[Callable[[int], int]], Iterable[tuple[str, object]]],
        about: Callable[[], Document],
        gpus: Callable[[], list[Document]],
        gpu_bytes: Callable[[int], int],
        language: Callable[[], dict[tuple[str, str], Document]],
        compare: Callable[[], None],
    ) -> None:
        self._state = state
        self._models = models
        self._marks = marks
        self._changes = ModelChanges()
        self._about = about
        self._gpus = gpus
        self._gpu_bytes = gpu_bytes
        self._language = language
        self._compare = compare
        self._compared_at = -COMPARED_S
        self._cores = procfs.Cores()
        self._started = procfs.usage(os.getpid()).started

    def answer(self, body: bytes) -> Document:
        since: int = decode_body(body, ActivityBody, "'activity'").since
        began, spent = time.monotonic_ns(), time.thread_time_ns()
        if began / 1e9 >= self._compared_at + COMPARED_S:
            self._compared_at = began / 1e9
            self._compare()
        language = self._language()
        changed = self._changed(since, began, language) if since else None
        index = self._models(changed)
        for entry in index:
            if entry["version"]:
                version = self._state.models[entry["name"]].versions[int(entry["version"])]
                entry["counters"] = counters(version.statistics, activity.streaming_ns(version, began))
                entry["max_batch"] = version.policy.max_batch if version.policy is not None else 0
                entry["sequences"] = _sequences(version)
                entry["ensemble"] = version.service.graph is not None
                if counts := language.get((entry["name"], entry["version"])):
                    entry["language"] = with_queue(counts, entry["queued"], version.service.prompt_tokens)
            for instance in entry.get("instances", ()):
                del instance["last_words"]  # many lines; the query `models` returns them
                on_gpu = instance["kind"] == "KIND_GPU" and instance["pid"]
                instance["gpu_memory_bytes"] = self._gpu_bytes(instance["pid"]) if on_gpu else 0
        self._add_traffic(index)
        answer = {
            "time_ns": began,
            "server": self._server(),
            "models": index,
            "clients": self._clients(),
            "gpus": self._gpus(),
        }
        if changed is not None:
            answer["changed"] = sorted(changed)
        return answer | {"took_ns": time.thread_time_ns() - spent}

    def _changed(self, since: int, now: int, language: Iterable[tuple[str, str]]) -> set[str] | None:
        """The models that changed; None: any may have. Counts of language models change outside the core's tables."""
        changed = self._changes.since(since, self._marks(self._gpu_bytes), now)
        return {*changed, *(name for name, _ in language)} if changed is not None else None

    def _add_traffic(self, index: list[Document]) -> None:
        """Adds a model's shares, aliases and shadow, if any are set, to the entry of its first version."""
        for name, entries in groupby(index, key=lambda entry: entry["name"]):
            first, model = next(entries), self._state.models.get(name)
            if first["version"] and model is not None and (model.traffic != UNSET or model.comparisons):
                first["traffic"] = traffic_document(model, model.traffic)

    def _server(self) -> Document:
        own = procfs.usage(os.getpid())
        total, used = procfs.memory()
        ledger = self._state.ledger
        return self._about() | {
            "pid": os.getpid(),
            "uptime_seconds": round(max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self._started), 1),
            "cpu_seconds": own.cpu_seconds,
            "memory_bytes": own.resident_bytes,
            "in_flight": len(self._state.requests),
            "refused": dict(self._state.observers.refusals),
            "connections": len(self._state.clients),
            "held_bytes": ledger.held_bytes,
            "segments": len(ledger.segments),
            "segment_bytes": sum(segment.size for segment in ledger.segments.values()),
            "cores": os.cpu_count() or 1,
            "machine_utilization": round(self._cores.share(), 4),
            "machine_memory_bytes": total,
            "machine_memory_used_bytes": used,
        }

    def _clients(self) -> list[Document]:
        """The clients, and the callers for whom gateways speak, with the most requests in flight."""
        known = self._state.clients.values()
        clients = nlargest(SHOWN_CLIENTS, known, key=lambda one: (len(one.requests), one.held_bytes))
        callers = activity.callers(self._state.requests.values(), self._state.known_callers())
        return [self._client(client) for client in clients] + [_caller(one) for one in callers]

    def _client(self, client: ClientState) -> Document:
        segments = self._state.ledger.segments
        sizes = [segments[number].size for number in client.segments if number in segments]
        return {
            "number": client.number,
            "name": client.name,
            "user": client.user,
            "plane": client.plane,
            "in_flight": len(client.requests),
            "held_bytes": client.held_bytes,
            "segments": len(sizes),
            "segment_bytes": sum(sizes),
        }


def _caller(entry: activity.CallerActivity) -> Document:
    caller = entry.caller
    return {
        "number": -caller.number,
        "name": "caller",
        "user": caller.label,
        "plane": "",
        "in_flight": entry.in_flight,
        "queued": entry.queued,
        "requests": caller.finished,
        "request_ns": caller.finished_ns,
        "held_bytes": 0,
        "segments": 0,
        "segment_bytes": 0,
    }


def counters(counted: Statistics, streaming_ns: int) -> Document:
    """Counts and sums since the version was loaded. `request_times` maps each non-empty bucket to its count.
    `streaming_ns`: how long instances have had open streams."""
    return {
        "success": counted.success_count,
        "failed": counted.fail_count,
        "rejected": counted.rejected,
        "cancelled": counted.cancelled,
        "rows": counted.inference_count,
        "batches": counted.execution_count,
        "request_ns": counted.success_ns,
        "queue_ns": counted.queue_ns,
        "input_ns": counted.input_ns,
        "infer_ns": counted.infer_ns,
        "output_ns": counted.output_ns,
        "batch_ns": counted.busy_ns + streaming_ns,
        "cache_hits": counted.cache_hits,
        "cache_misses": counted.cache_misses,
        "restarts": sum(counted.restarts.values()),
        "reasons": {reason.value: count for reason, count in counted.reasons.items()},
        "request_times": _buckets(counted.request_times),
        "batch_rows": {rows: batch.count for rows, batch in sorted(counted.batches.items())},
    } | _streams(counted)


def _streams(counted: Statistics) -> Document:
    """Times to the first response and between responses of a decoupled model, in the format of `request_times`."""
    if counted.streams is None:
        return {}
    first, between = counted.streams.first, counted.streams.between
    return {
        "first_response_ns": first.sum_ns,
        "first_response_times": _buckets(first.counts),
        "between_responses_ns": between.sum_ns,
        "between_responses_times": _buckets(between.counts),
    }


def _buckets(counts: Sequence[int]) -> dict[int, int]:
    return {bucket: count for bucket, count in enumerate(counts) if count}


def _sequences(version: Version) -> int:
    service = version.service
    return service.sequence_slots.count if service.sequence_slots is not None else 0
