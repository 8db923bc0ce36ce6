"""The server's metrics: names, types, labels and help texts, and the Prometheus text format.

Invariant: each metric is a row of FAMILIES, which includes the COUNTERS of the core. The tables of docs/metrics.md are
generated from it. Metrics that begin with nv_ have Triton's names and meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct

from shmserve.broker.observability.logs import printable
from shmserve.core.stats.statistics import COUNTERS
from shmserve.protocol.namespaces import SEPARATOR, namespace_of, plain

TYPE = "text/plain; version=0.0.4; charset=utf-8"

VERSION = ("model", "version")
INSTANCE = ("model", "version", "model_instance")
"""Not `instance`, which is the label that Prometheus adds for the scraped target."""


class Family(Struct, frozen=True):
    name: str
    kind: str  # counter, gauge, histogram or summary
    labels: tuple[str, ...]
    help: str
    group: str


MODEL, BATCHES, MEMORY, SERVER, MACHINE = "Requests", "Batches", "Memory", "Server and instances", "Machine"
GPU = ("gpu_uuid",)
GROUPS = (MODEL, BATCHES, MEMORY, SERVER, MACHINE)


def _rows(group: str, *rows: tuple[str, str, tuple[str, ...], str]) -> Iterator[Family]:
    for name, kind, labels, text in rows:
        yield Family(name, kind, labels, text, group)


_SUMMARY = "(--metrics-config summary_latencies=true)"
FAMILIES = (
    *_rows(
        MODEL,
        ("nv_inference_request_success", "counter", VERSION, "successful requests"),
        ("nv_inference_request_failure", "counter", ("model", "reason", "version"),
         "failed requests, by reason: REJECTED by a limit or a policy, CANCELED by the caller, BACKEND: failed in the "
         "model or with its process, OTHER: a deadline, or the server was stopping"),
        ("nv_inference_pending_request_count", "gauge", VERSION, "requests that no instance has started yet"),
        ("nv_inference_request_duration_us", "counter", VERSION, "total microseconds from arrival to response"),
        ("nv_inference_queue_duration_us", "counter", VERSION,
         "total microseconds from arrival to the start of the batch"),
        ("nv_inference_compute_input_duration_us", "counter", VERSION, "total microseconds preparing inputs"),
        ("nv_inference_compute_infer_duration_us", "counter", VERSION, "total microseconds in the model"),
        ("nv_inference_compute_output_duration_us", "counter", VERSION, "total microseconds placing outputs"),
        ("nv_inference_first_response_histogram_ms", "histogram", VERSION,
         "milliseconds from arrival to the first response (--metrics-config histogram_latencies=true)"),
        ("shmserve_inference_between_responses_histogram_ms", "histogram", VERSION,
         "for decoupled models: milliseconds between consecutive responses of a request "
         "(--metrics-config histogram_latencies=true)"),
        ("nv_inference_request_summary_us", "summary", VERSION,
         f"microseconds from arrival to response; not for models with a response cache {_SUMMARY}"),
        ("nv_inference_queue_summary_us", "summary", VERSION,
         f"microseconds from arrival to the start of the batch {_SUMMARY}"),
        ("nv_inference_compute_input_summary_us", "summary", VERSION, f"microseconds preparing inputs {_SUMMARY}"),
        ("nv_inference_compute_infer_summary_us", "summary", VERSION, f"microseconds in the model {_SUMMARY}"),
        ("nv_inference_compute_output_summary_us", "summary", VERSION, f"microseconds placing outputs {_SUMMARY}"),
        ("nv_cache_hit_summary_per_model", "summary", VERSION,
         f"microseconds from arrival to response, for cache hits {_SUMMARY}"),
        ("nv_cache_miss_summary_per_model", "summary", VERSION,
         f"microseconds for lookup and for storing the response, for cache misses {_SUMMARY}"),
        ("shmserve_request_duration_seconds", "histogram", VERSION,
         "time from arrival to response, successful requests only"),
        ("shmserve_queue_duration_seconds", "histogram", VERSION,
         "time from arrival until an instance starts the batch"),
        ("nv_cache_num_hits_per_model", "counter", VERSION, "requests answered from the cache"),
        ("nv_cache_num_misses_per_model", "counter", VERSION,
         "requests that were computed and whose answer was to be cached"),
        ("nv_cache_hit_duration_per_model", "counter", VERSION,
         "total microseconds from arrival to response, for cache hits"),
        ("nv_cache_miss_duration_per_model", "counter", VERSION,
         "total microseconds for lookup and for storing the response, for cache misses"),
        ("shmserve_model_requests_in_flight", "gauge", VERSION,
         "requests that an instance has started and not finished"),
        ("shmserve_queue_bytes", "gauge", VERSION, "bytes of tensors inside the messages of queued requests"),
        ("shmserve_waiting_tokens", "gauge", VERSION,
         "for language models: tokens of the prompts that have not been computed, an estimate"),
        ("shmserve_requests_in_flight", "gauge", (), "requests without a response, or whose inputs an "
         "instance still reads"),
        ("shmserve_requests_refused_total", "counter", ("reason",),
         "requests refused at admission, by the limit they would have exceeded or by error code"),
    ),
    *_rows(
        BATCHES,
        *((counter.metric, "counter", VERSION, counter.help) for counter in COUNTERS),
        ("shmserve_batch_duration_seconds", "histogram", VERSION, "execution time of batches"),
        ("shmserve_batch_rows", "histogram", VERSION, "rows per batch"),
        ("shmserve_batches_total", "counter", (*VERSION, "reason"), "batches run, by the reason each was formed"),
        ("shmserve_batch_elements_total", "counter", VERSION,
         "rows x padded length, summed over the batches run, for models with padded inputs"),
        ("shmserve_batch_padded_elements_total", "counter", VERSION, "padding elements in the batches run"),
    ),
    *_rows(
        MEMORY,
        ("shmserve_instance_memory_bytes", "gauge", INSTANCE, "proportional memory (PSS) of the process"),
        ("shmserve_instance_arena_bytes", "gauge", INSTANCE, "shared memory allocated for outputs"),
        ("shmserve_instance_gpu_pool_bytes", "gauge", INSTANCE,
         "GPU memory for outputs that stay on the GPU (--cuda-memory-pool-byte-size); absent if none"),
        ("shmserve_segments", "gauge", ("owner",), "shared memory segments, by the kind of process that created them"),
        ("shmserve_segment_bytes", "gauge", ("owner",), "bytes of the shared memory segments"),
        ("shmserve_broker_arena_used_bytes", "gauge", (), "bytes in use of the broker's arena, the memory for "
         "tensors received as frames"),
        ("shmserve_broker_arena_committed_bytes", "gauge", (),
         "bytes of the broker's arena that are allocated from the operating system"),
        ("shmserve_broker_arena_limit_bytes", "gauge", (), "maximum size of the broker's arena (--broker-arena-bytes)"),
        ("shmserve_held_bytes", "gauge", (), "bytes of responses in shared memory that clients hold"),
        ("shmserve_cache_bytes", "gauge", (), "bytes of cached responses and their keys (--cache-config)"),
        ("shmserve_cache_entries", "gauge", (), "cached responses"),
        ("shmserve_cache_evictions_total", "counter", (), "cached responses evicted to make room"),
        ("shmserve_client_held_bytes", "gauge", ("client", "name"),
         "bytes of responses that a client holds in shared memory, for the clients that hold the most; client 'other' "
         "is the sum of all others"),
        ("shmserve_client_requests", "gauge", ("client", "name"),
         "requests in flight of a client, for the clients that hold the most"),
        ("shmserve_caller_requests_in_flight", "gauge", ("caller",),
         "requests in flight of a caller of a gateway, for those with the most; shmserve stats --callers names them"),
        ("shmserve_caller_requests_queued", "gauge", ("caller",), "requests of a caller that no instance has started"),
        ("shmserve_caller_requests_total", "counter", ("caller",), "requests of a caller that have ended"),
        ("shmserve_caller_request_seconds_total", "counter", ("caller",),
         "total time of the requests of a caller that have ended, from arrival to end"),
    ),
    *_rows(
        SERVER,
        ("shmserve_info", "gauge", ("version",), "always 1"),
        ("shmserve_ready", "gauge", (), "1 if the server is ready"),
        ("shmserve_out_of_service", "gauge", (),
         "1 if an operator has taken the server out of service (shmserve drain)"),
        ("shmserve_clients", "gauge", ("plane",), "connections, by kind"),
        ("shmserve_leases", "gauge", (), "instances lent to clients, which then bypass the broker"),
        ("shmserve_model_state", "gauge", (*VERSION, "state"),
         "1 for the current state, 0 for the others; not for versions that were unloaded"),
        ("shmserve_model_share_percent", "gauge", VERSION,
         "percentage of the requests that name no version which this version gets"),
        ("shmserve_shadow_requests_total", "counter", (*VERSION, "shadow", "result"),
         "requests that a shadow also got, by the version that answered them: its answer was equal or different, it "
         "failed, or they were skipped"),
        ("nv_model_load_duration_secs", "gauge", VERSION,
         "duration of the last load; 0: the version has not been loaded"),
        ("shmserve_model_loads_total", "counter", ("model", "result"), "loads of versions, by result: done or failed"),
        ("shmserve_model_load_seconds_total", "counter", ("model",), "total time of successful loads"),
        ("shmserve_model_instances", "gauge", (*VERSION, "state"),
         "configured instances, by state: ready, loading (for the first time), asleep (or loading again), lost or "
         "quarantined"),
        ("shmserve_model_instances_min", "gauge", VERSION,
         "minimum number of instances of a version that is scaled (min_instances)"),
        ("shmserve_model_instances_max", "gauge", VERSION,
         "maximum number of instances of a version that is scaled (max_instances)"),
        ("shmserve_model_scale_total", "counter", (*VERSION, "direction"),
         "instances added because requests waited (up), or removed because fewer were enough (down), for versions "
         "that are scaled"),
        ("shmserve_model_awake", "gauge", VERSION,
         "1 if the version is READY and has processes, or is starting them; 0 if it is asleep or not READY"),
        ("shmserve_model_memory_bytes", "gauge", (*VERSION, "place"),
         "memory of the version that counts against a budget, on the host or on a GPU; 0 while the version is asleep"),
        ("shmserve_memory_budget_bytes", "gauge", ("place",),
         "--model-memory-budget (host) and --gpu-memory-budget (gpu0, gpu1, ...)"),
        ("shmserve_model_wakes_total", "counter", (*VERSION, "result"),
         "times that requests woke the version, by result: done or failed"),
        ("shmserve_model_wake_seconds", "histogram", VERSION,
         "time from a request that wakes the version until the version is READY"),
        ("shmserve_instance_state", "gauge", (*INSTANCE, "state"), "always 1; the label is the current state"),
        ("shmserve_instance_busy_seconds", "gauge", INSTANCE,
         "time for which the current batch has run, if that is longer than usual; else 0"),
        ("shmserve_instance_restarts_total", "counter", INSTANCE,
         "number of times the process has exited and was restarted"),
        ("shmserve_instance_cpu_seconds_total", "counter", INSTANCE, "CPU time of the process"),
        ("shmserve_gateway_restarts_total", "counter", (), "restarts of gateways of `shmserve serve`"),
        ("shmserve_trace_spans_total", "counter", ("result",),
         "spans for OpenTelemetry: exported, failed (not accepted by the collector), or dropped because too many "
         "waited for it"),
        ("shmserve_trace_contexts_over_limit_total", "counter", (),
         "requests that were not traced for their trace context, because of contexts_per_second"),
        ("process_cpu_seconds_total", "counter", (), "CPU time of the broker"),
        ("process_resident_memory_bytes", "gauge", (), "resident memory of the broker"),
        ("process_open_fds", "gauge", (), "open file descriptors of the broker"),
        ("process_start_time_seconds", "gauge", (), "start time of the broker, in seconds since the epoch"),
    ),
    *_rows(
        MACHINE,
        ("nv_cpu_utilization", "gauge", (), "CPU utilization, from 0 to 1, over --metrics-interval-ms or more"),
        ("nv_cpu_memory_total_bytes", "gauge", (), "memory of the machine"),
        ("nv_cpu_memory_used_bytes", "gauge", (), "memory of the machine that is not available to other programs"),
        ("nv_gpu_utilization", "gauge", GPU, "fraction of time, from 0 to 1, in which anything ran on the GPU"),
        ("nv_gpu_memory_total_bytes", "gauge", GPU, "memory of the GPU"),
        ("nv_gpu_memory_used_bytes", "gauge", GPU, "memory of the GPU in use, by all processes"),
        ("nv_gpu_power_usage", "gauge", GPU, "power draw in watts"),
        ("nv_gpu_power_limit", "gauge", GPU, "enforced power limit in watts"),
        ("nv_energy_consumption", "counter", GPU, "energy used since the driver was loaded, in joules"),
        ("shmserve_gpu_out_of_service", "gauge", GPU,
         "1 if the GPU has failed, so that no instance runs on it, else 0"),
        ("shmserve_gpu_reset_needed", "gauge", GPU,
         "1 if the GPU works but should be reset when convenient: defective memory is remapped only then, or the GPU "
         "runs at reduced capacity; else 0"),
        ("shmserve_gpu_xid_errors_total", "counter", (*GPU, "xid"),
         "errors that the driver has reported, by Xid"),
        ("shmserve_gpu_ecc_errors_total", "counter", (*GPU, "kind"),
         "corrected and uncorrected memory errors since the driver was loaded or the GPU was reset"),
        ("shmserve_gpu_throttled", "gauge", (*GPU, "reason"),
         "1 while the clocks are reduced for this reason, else 0: power_cap, sw_thermal, hw_thermal, hw_power_brake, "
         "hw_slowdown (hw_thermal, hw_power_brake or another cause), sync_boost"),
        ("shmserve_gpu_sm_clock_hertz", "gauge", GPU, "clock of the streaming multiprocessors"),
        ("shmserve_gpu_sm_clock_max_hertz", "gauge", GPU, "maximum clock of the streaming multiprocessors"),
        ("shmserve_gpu_memory_clock_hertz", "gauge", GPU, "clock of the memory"),
        ("shmserve_gpu_memory_clock_max_hertz", "gauge", GPU, "maximum clock of the memory"),
        ("shmserve_gpu_temperature_celsius", "gauge", GPU, "temperature of the GPU"),
        ("shmserve_gpu_pcie_replays_total", "counter", GPU,
         "PCI Express packets that were retransmitted since the GPU was reset"),
    ),
)  # fmt: skip
RESERVED = ("nv_pinned_memory_pool_total_bytes", "nv_pinned_memory_pool_used_bytes")
"""Triton's names of metrics that do not exist here. Models may not use them either."""


def label(text: str) -> str:
    """Escapes a label value, which may be the name of any client or directory."""
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')


def labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """`a="x",b="y"`. With --model-namespacing, a model has a label more."""
    pairs = list(zip(names, values, strict=True))
    if names[:1] == ("model",) and SEPARATOR in values[0]:
        pairs[0] = ("model", plain(values[0]))
        pairs.append(("namespace", namespace_of(values[0])))
    return ",".join(f'{name}="{label(value)}"' for name, value in pairs)


class Page:
    """Collects samples in any order and groups them by metric."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {
            family.name: [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
            for family in FAMILIES
        }

    def add(self, name: str, value: float, labels: str = "") -> None:
        """Adds a sample; `labels` is text without braces."""
        self._lines[name].append(f"{name}{{{labels}}} {value}" if labels else f"{name} {value}")

    def histogram(self, name: str, edges: list[str], counts: list[int], count: int, total: float, labels: str) -> None:
        """`counts` are cumulative, one for each edge. `count` includes values beyond the last edge."""
        lines = self._lines[name]
        lines += [f'{name}_bucket{{{labels},le="{edge}"}} {below}' for edge, below in zip(edges, counts, strict=True)]
        lines.append(f'{name}_bucket{{{labels},le="+Inf"}} {count}')
        lines.append(f"{name}_sum{{{labels}}} {total}")
        lines.append(f"{name}_count{{{labels}}} {count}")

    def summary(self, name: str, quantiles: list[tuple[str, float]], count: int, total: int, labels: str) -> None:
        """`quantiles`: pairs of label value and sample, which may be nan."""
        lines = self._lines[name]
        for quantile, value in quantiles:
            shown = "NaN" if math.isnan(value) else value
            lines.append(f'{name}{{{labels},quantile="{quantile}"}} {shown}')
        lines.append(f"{name}_sum{{{labels}}} {total}")
        lines.append(f"{name}_count{{{labels}}} {count}")

    def text(self) -> str:
        """The page in the text format, without metrics that have no samples."""
        return "".join("\n".join(lines) + "\n" for lines in self._lines.values() if len(lines) > 2)
