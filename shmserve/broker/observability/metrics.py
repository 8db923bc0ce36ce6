"""The server's metrics in Prometheus format, computed on request.

Invariant: this only reads the core's state and /proc. A version with several generations, or an instance with two
processes, has one sample per metric.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Container
from heapq import nlargest
from itertools import accumulate
from typing import Any

from msgspec import Struct

from shmserve import histogram
from shmserve.broker.observability.metric_definitions import INSTANCE, VERSION, Page, labels
from shmserve.core.models import memory, sizes
from shmserve.core.owners import activity
from shmserve.core.owners.model import Model
from shmserve.core.records import Instance, Version
from shmserve.core.service.scaler import Scaler
from shmserve.core.state import WORKERS_FROM, State
from shmserve.core.states import UNLOADED, InstanceState, VersionState
from shmserve.core.stats.statistics import COUNTERS, FailureKind, Statistics
from shmserve.protocol.messages import OWNER_SHIFT
from shmserve.settings.flag import nearest_name
from shmserve.shm.arena import Arena
from shmserve.system import procfs
from shmserve.version import version as installed

SHOWN_CLIENTS = 20
"""Maximum number of clients with their own series, which exist only while the client holds memory."""
FIRST_BUCKET, LAST_BUCKET = 14, 36
"""Buckets from 16 us to 69 s."""

_EDGES = [f"{histogram.edge(bucket) / 1e9:.12g}" for bucket in range(FIRST_BUCKET, LAST_BUCKET + 1)]
_BETWEEN = range(20, 35)
"""Buckets from 1 ms to 17 s, for the times between responses."""
_BETWEEN_MS = [f"{histogram.edge(bucket) / 1e6:.12g}" for bucket in _BETWEEN]
_VERSION_STATES = [(state, f',state="{state.value}"') for state in VersionState]
_INSTANCE_STATES = {state: f',state="{state.value}"' for state in InstanceState}
_TIMES = (
    ("nv_inference_request_duration_us", "success_ns"),
    ("nv_inference_queue_duration_us", "queue_ns"),
    ("nv_inference_compute_input_duration_us", "input_ns"),
    ("nv_inference_compute_infer_duration_us", "infer_ns"),
    ("nv_inference_compute_output_duration_us", "output_ns"),
)
_REQUESTS = "nv_inference_request_summary_us"
_HITS, _MISSES = "nv_cache_hit_summary_per_model", "nv_cache_miss_summary_per_model"
_SUMMARIES = (
    (_REQUESTS, "request", "success_ns"),
    ("nv_inference_queue_summary_us", "queue", "queue_ns"),
    ("nv_inference_compute_input_summary_us", "input", "input_ns"),
    ("nv_inference_compute_infer_summary_us", "infer", "infer_ns"),
    ("nv_inference_compute_output_summary_us", "output", "output_ns"),
    (_HITS, "hit", "cache_hit_ns"),
    (_MISSES, "miss", "cache_miss_ns"),
)
"""(metric, attribute of Summaries with its window, attribute of Statistics with its sum)"""
_COUNTS = {_HITS: "cache_hits", _MISSES: "cache_misses"}
"""Attributes of Statistics with the counts of these summaries; all others use success_count."""
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
_SWITCHES = ("counter_latencies", "histogram_latencies", "summary_latencies")
_NAMES = (*_SWITCHES, "summary_quantiles")
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)")

SegmentBytes = dict[tuple[int, bool], int]
"""(worker, whether on its GPU) -> bytes of its segments"""


class MetricSettings(Struct, frozen=True):
    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    summary_quantiles: tuple[float, ...] = QUANTILES
    cpu: bool = True
    interval_s: float = 0.0
    """Minimum interval between samples of the machine's CPU usage."""


def metrics_config(text: str) -> tuple[str, Any]:
    """Parses a value of --metrics-config, NAME=VALUE. Raises ValueError."""
    name, equals, value = text.partition("=")
    if not equals or name not in _NAMES:
        close = nearest_name(name, _NAMES)
        more = f"; did you mean {close}?" if close else ""
        raise ValueError(f"unknown metrics setting '{text}'; expected one of {', '.join(_NAMES)}{more}")
    if name == "summary_quantiles":
        return name, _quantiles(value)
    if value.lower() not in ("true", "false"):
        raise ValueError(f"{name}: '{value}' is neither true nor false")
    return name, value.lower() == "true"


def _quantiles(text: str) -> tuple[float, ...]:
    """Parses QUANTILE:ERROR,... As in Triton, the error is accepted, but it is not used: values are always within
    1.6 %."""
    quantiles = []
    for pair in text.split(","):
        quantile, colon, error = pair.partition(":")
        match = _NUMBER.fullmatch(quantile)
        if match is None or not 0 <= float(match[1]) <= 1 or (colon and not _NUMBER.match(error)):
            raise ValueError(f"summary_quantiles: '{pair}' is not QUANTILE:ERROR with numbers from 0 to 1")
        quantiles.append(float(match[1]))
    return tuple(quantiles)


class _InstanceSamples(Struct):
    """The samples of an instance name, which two instances share while one replaces the other.

    `current`: `state` is that of an instance being served. Memory, CPU time, arena and pool are sums.
    """

    state: InstanceState
    current: bool
    memory: int = 0
    cpu: float = 0.0
    arena: int = 0
    pool: int = 0
    restarts: int = 0
    busy_ns: int = 0


class Metrics:
    """`process_of(peer)` returns the pid of a worker, or 0, and `memory_of(pid)` its proportional memory. `ready()`
    returns whether the server is ready."""

    def __init__(
        self,
        state: State,
        arena: Arena,
        arena_limit: int,
        process_of: Callable[[int], int],
        memory_of: Callable[[int], int],
        ready: Callable[[], bool],
        settings: MetricSettings,
    ) -> None:
        self._settings = settings
        self._state = state
        self._arena = arena
        self._arena_limit = arena_limit
        self._process_of = process_of
        self._memory_of = memory_of
        self._ready = ready
        self._cores = procfs.Cores(settings.interval_s)
        self._started = procfs.boot_time() + procfs.usage(os.getpid()).started

    def text(self) -> str:
        page = Page()
        arenas = self._segments(page)
        for model in self._state.models.values():
            self._model(page, model, arenas)
        self._clients(page)
        self._server(page)
        if self._settings.cpu:
            self._machine(page)
        return page.text()

    # ------------------------------------------------------------------------------------ models

    def _model(self, page: Page, model: Model, arenas: SegmentBytes) -> None:
        add = page.add
        named = labels(("model",), (model.name,))
        add("shmserve_model_loads_total", model.loads.done, f'{named},result="done"')
        add("shmserve_model_loads_total", model.loads.failed, f'{named},result="failed"')
        add("shmserve_model_load_seconds_total", model.loads.done_ns / 1e9, named)
        generations = model.generations()
        shares = model.shares_now()
        for (answered_by, shadow), counts in model.comparisons.items():
            pair = labels((*VERSION, "shadow"), (model.name, str(answered_by), str(shadow)))
            for result, count in counts.items():
                add("shmserve_shadow_requests_total", count, f'{pair},result="{result}"')
        for number, version in model.versions.items():
            named = labels(VERSION, (model.name, str(number)))
            add("shmserve_model_share_percent", shares.get(number, 0), named)
            add("nv_model_load_duration_secs", version.took_ns / 1e9, named)
            for state, label in _VERSION_STATES if version.reason != UNLOADED else ():
                add("shmserve_model_state", int(version.state is state), named + label)
            for name, count in _served_by(version).items() if version.service.graph is None else ():
                add("shmserve_model_instances", count, f'{named},state="{name}"')
            if version.service.graph is None:
                _sleep(page, version, named)
                if self._state.memory.limited:
                    _memory(page, version, self._state.memory.holders, named)
            if version.scaler is not None:
                _scaling(page, version, version.scaler, named)
            same = [other for other in generations if other.number == number and other is not version]
            counted = version.statistics
            _counts(page, counted, version.policy.max_batch if version.policy is not None else 0, named)
            for why in FailureKind:  # Triton's tests look for the labels in this order
                failed = labels(("model", "reason", "version"), (model.name, why.name, str(number)))
                add("nv_inference_request_failure", counted.failures[why], failed)
            if version.service.cached:
                add("nv_cache_num_hits_per_model", counted.cache_hits, named)
                add("nv_cache_num_misses_per_model", counted.cache_misses, named)
            self._latencies(page, counted, version.service.cached, named)
            if self._settings.histogram_latencies and counted.streams is not None:
                _between_responses(page, counted.streams.between, named)
            _queue(page, [version, *same], named)
            self._instances(page, [version, *same], arenas)

    def _latencies(self, page: Page, counted: Statistics, cached: bool, named: str) -> None:
        """Adds the latency metrics that --metrics-config selects."""
        if self._settings.counter_latencies:
            for name, attribute in _TIMES:
                page.add(name, getattr(counted, attribute) // 1000, named)
            if cached:
                page.add("nv_cache_hit_duration_per_model", counted.cache_hit_ns // 1000, named)
                page.add("nv_cache_miss_duration_per_model", counted.cache_miss_ns // 1000, named)
        first, summaries = counted.first, counted.summaries
        if first is not None:
            edges = [f"{edge:.12g}" for edge in first.edges_ms]
            *below, count = accumulate(first.counts)
            name = "nv_inference_first_response_histogram_ms"
            page.histogram(name, edges, below, count, first.sum_ns // 1_000_000, named)
        if summaries is None:
            return
        shares = self._settings.summary_quantiles
        for name, window, attribute in _SUMMARIES:
            if (not cached and name in _COUNTS) or (cached and name == _REQUESTS):
                continue
            count = getattr(counted, _COUNTS.get(name, "success_count"))
            values = getattr(summaries, window).quantiles(shares, self._state.now)
            quantiles = [(f"{share:.12g}", value) for share, value in zip(shares, values, strict=True)]
            page.summary(name, quantiles, count, getattr(counted, attribute) // 1000, named)

    def _instances(self, page: Page, generations: list[Version], arenas: SegmentBytes) -> None:
        """Adds the metrics of instances. `generations` are those of one version; the first is the one being served."""
        samples: dict[str, _InstanceSamples] = {}
        served = generations[0]
        for version in generations:
            for instance in version.instances:
                self._gather(samples, version, instance, version is served and not instance.over, arenas)
        for name, restarts in served.statistics.restarts.items():
            if name in samples:
                samples[name].restarts = restarts
        for name, sample in samples.items():
            named = labels(INSTANCE, (served.model, str(served.number), name))
            add = page.add
            add("shmserve_instance_state", 1, named + _INSTANCE_STATES[sample.state])
            add("shmserve_instance_memory_bytes", sample.memory, named)
            add("shmserve_instance_arena_bytes", sample.arena, named)
            if sample.pool:
                add("shmserve_instance_gpu_pool_bytes", sample.pool, named)
            add("shmserve_instance_cpu_seconds_total", sample.cpu, named)
            add("shmserve_instance_restarts_total", sample.restarts, named)
            add("shmserve_instance_busy_seconds", sample.busy_ns / 1e9, named)

    def _gather(
        self,
        samples: dict[str, _InstanceSamples],
        version: Version,
        instance: Instance,
        current: bool,
        arenas: SegmentBytes,
    ) -> None:
        name = instance.spec.name
        sample = samples.get(name)
        if sample is None:
            sample = samples[name] = _InstanceSamples(instance.state, current)
        elif current and not sample.current:
            sample.state, sample.current = instance.state, current
        sample.busy_ns = max(sample.busy_ns, activity.busy_ns(version, instance, time.monotonic_ns()))
        peer = instance.peer
        if peer:
            pid = self._process_of(peer)
            sample.memory += self._memory_of(pid) if pid else 0
            sample.cpu += procfs.usage(pid).cpu_seconds if pid else 0.0
            sample.arena += arenas.get((peer, False), 0)
            sample.pool += arenas.get((peer, True), 0)

    # ------------------------------------------------------------------------------------ memory and clients

    def _segments(self, page: Page) -> SegmentBytes:
        """Adds the metrics of segments. Returns the total size of each worker's segments."""
        worker_bytes: SegmentBytes = {}
        counts = {"client": 0, "worker": 0, "broker": 0}
        totals = dict(counts)
        for number, segment in self._state.ledger.segments.items():
            owner = number >> OWNER_SHIFT
            kind = "worker" if owner >= WORKERS_FROM else "client" if owner else "broker"
            counts[kind] += 1
            totals[kind] += segment.size
            if owner >= WORKERS_FROM:
                place = owner, segment.on_device
                worker_bytes[place] = worker_bytes.get(place, 0) + segment.size
        for kind, count in counts.items():
            page.add("shmserve_segments", count, f'owner="{kind}"')
            page.add("shmserve_segment_bytes", totals[kind], f'owner="{kind}"')
        page.add("shmserve_broker_arena_used_bytes", self._arena.used)
        page.add("shmserve_broker_arena_committed_bytes", self._arena.committed)
        page.add("shmserve_broker_arena_limit_bytes", self._arena_limit)
        return worker_bytes

    def _clients(self, page: Page) -> None:
        clients = self._state.clients.values()
        planes = {"lane": 0, "zmq": 0}
        for client in clients:
            planes[client.plane] = planes.get(client.plane, 0) + 1
        for plane, count in planes.items():
            page.add("shmserve_clients", count, labels(("plane",), (plane,)))
        held = self._state.ledger.held_bytes
        in_flight = sum(len(client.requests) for client in clients)
        page.add("shmserve_held_bytes", held)
        page.add("shmserve_requests_in_flight", len(self._state.requests))
        page.add("shmserve_leases", len(self._state.leases))
        holding = [client for client in clients if client.held_bytes]
        for client in nlargest(SHOWN_CLIENTS, holding, key=lambda client: client.held_bytes):
            named = labels(("client", "name"), (str(client.number), client.name))
            page.add("shmserve_client_held_bytes", client.held_bytes, named)
            page.add("shmserve_client_requests", len(client.requests), named)
            held -= client.held_bytes
            in_flight -= len(client.requests)
        page.add("shmserve_client_held_bytes", held, 'client="other",name=""')
        page.add("shmserve_client_requests", in_flight, 'client="other",name=""')
        for in_flight, queued, caller in activity.callers(self._state.requests.values(), self._state.known_callers()):
            named = labels(("caller",), (str(-caller.number),))
            page.add("shmserve_caller_requests_in_flight", in_flight, named)
            page.add("shmserve_caller_requests_queued", queued, named)
            page.add("shmserve_caller_requests_total", caller.finished, named)
            page.add("shmserve_caller_request_seconds_total", caller.finished_ns / 1e9, named)

    # ------------------------------------------------------------------------------------ the server

    def _server(self, page: Page) -> None:
        add = page.add
        add("shmserve_info", 1, labels(("version",), (installed(),)))
        add("shmserve_ready", int(self._ready()))
        add("shmserve_out_of_service", int(self._state.out_of_service))
        for reason, count in self._state.observers.refusals.items():
            add("shmserve_requests_refused_total", count, labels(("reason",), (reason,)))
        cache = self._state.cache
        if cache.limit:
            add("shmserve_cache_bytes", cache.bytes)
            add("shmserve_cache_entries", len(cache))
            add("shmserve_cache_evictions_total", cache.evictions)
        for place, size in memory.budgets(self._state).items():
            add("shmserve_memory_budget_bytes", size, f'place="{memory.label_of(place)}"')
        used = procfs.usage(os.getpid())
        add("process_cpu_seconds_total", used.cpu_seconds)
        add("process_resident_memory_bytes", used.resident_bytes)
        add("process_open_fds", procfs.descriptors())
        add("process_start_time_seconds", self._started)

    def _machine(self, page: Page) -> None:
        total, used = procfs.memory()
        page.add("nv_cpu_utilization", round(self._cores.share(), 4))
        page.add("nv_cpu_memory_total_bytes", total)
        page.add("nv_cpu_memory_used_bytes", used)


def _counts(page: Page, counted: Statistics, max_batch: int, named: str) -> None:
    add = page.add
    add("nv_inference_request_success", counted.success_count, named)
    for counter in COUNTERS:
        add(counter.metric, getattr(counted, counter.field), named)
    for reason, count in counted.reasons.items():
        add("shmserve_batches_total", count, f'{named},reason="{reason.value}"')
    if counted.elements:
        add("shmserve_batch_elements_total", counted.elements, named)
        add("shmserve_batch_padded_elements_total", counted.padded_elements, named)
    if counted.success_count:
        _times(page, "shmserve_request_duration_seconds", counted.request_times, counted.success_ns, named)
        _times(page, "shmserve_queue_duration_seconds", counted.queue_times, counted.queue_ns, named)
    if counted.execution_count:
        spent = sum(batch.input_ns + batch.infer_ns + batch.output_ns for batch in counted.batches.values())
        _times(page, "shmserve_batch_duration_seconds", counted.batch_times, spent, named)
        _sizes(page, counted, max([1, max_batch, *counted.batches]), named)


def _between_responses(page: Page, times: histogram.Durations, named: str) -> None:
    below = histogram.cumulative(times.counts, _BETWEEN[0], _BETWEEN[-1])
    name = "shmserve_inference_between_responses_histogram_ms"
    page.histogram(name, _BETWEEN_MS, below, times.count, round(times.sum_ns / 1e6, 3), named)


def _times(page: Page, name: str, counts: list[int], ns: int, named: str) -> None:
    below = histogram.cumulative(counts, FIRST_BUCKET, LAST_BUCKET)
    page.histogram(name, _EDGES, below, sum(counts), ns / 1e9, named)


def _sizes(page: Page, counted: Statistics, largest: int, named: str) -> None:
    """Adds the histogram of batch sizes. Bucket limits are powers of two, up to the first one >= `largest`."""
    batches = counted.batches
    count = sum(batch.count for batch in batches.values())
    rows = sum(rows * batch.count for rows, batch in batches.items())
    edges = [1 << bits for bits in range((largest - 1).bit_length() + 1)]
    below = [sum(batch.count for rows, batch in batches.items() if rows <= edge) for edge in edges]
    page.histogram("shmserve_batch_rows", [str(edge) for edge in edges], below, count, rows, named)


def _served_by(version: Version) -> dict[str, int]:
    """Counts instances by state, for shmserve_model_instances."""
    counts = {"ready": 0, "loading": 0, "asleep": 0, "lost": 0, "quarantined": 0}
    for instance in version.instances:
        if not (instance.over or instance.spec.passive or instance.replaces):
            shape = "loading" if not instance.loaded else "lost" if instance.degraded else "ready"
            shape = "asleep" if instance.sleeping and shape == "ready" else shape
            counts["quarantined" if instance.quarantined else shape] += 1
    return counts


def _sleep(page: Page, version: Version, named: str) -> None:
    counted = version.statistics
    page.add("shmserve_model_awake", int(version.state is VersionState.READY and not version.asleep), named)
    if counted.wakes or counted.failed_wakes:
        page.add("shmserve_model_wakes_total", counted.wakes, f'{named},result="done"')
        page.add("shmserve_model_wakes_total", counted.failed_wakes, f'{named},result="failed"')
        _times(page, "shmserve_model_wake_seconds", counted.wake_times, counted.wake_ns, named)


def _memory(page: Page, version: Version, held: Container[Instance], named: str) -> None:
    charged = memory.of_version(version, held)
    for place in sorted(charged.keys() | {memory.HOST}):
        page.add("shmserve_model_memory_bytes", charged[place], f'{named},place="{memory.label_of(place)}"')


def _scaling(page: Page, version: Version, scaler: Scaler, named: str) -> None:
    minimum, maximum = sizes.bounds(version, scaler.policy)
    page.add("shmserve_model_instances_min", minimum, named)
    page.add("shmserve_model_instances_max", maximum, named)
    page.add("shmserve_model_scale_total", version.statistics.scaled_up, f'{named},direction="up"')
    page.add("shmserve_model_scale_total", version.statistics.scaled_down, f'{named},direction="down"')


def _queue(page: Page, generations: list[Version], named: str) -> None:
    page.add("nv_inference_pending_request_count", activity.queued(generations), named)
    page.add("shmserve_model_requests_in_flight", activity.in_flight(generations), named)
    page.add("shmserve_queue_bytes", sum(version.service.queue.bytes for version in generations), named)
    prompts = {version.service.prompts for version in generations} - {None}  # a reload hands the backlog over
    if prompts:
        page.add("shmserve_waiting_tokens", sum(backlog.total for backlog in prompts if backlog is not None), named)
