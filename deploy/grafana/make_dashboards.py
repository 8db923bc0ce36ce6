"""The Grafana dashboards: `make dashboards` writes dashboards/*.json from this file.

Positions and ids follow from the order of the panels. docs/alerts.md shows how to install them.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
SERVER = 'job=~"$job",instance=~"$instance"'
MODEL = f'{SERVER},model=~"$model"'
FLEET = 'job=~"$job"'
FLEET_MODEL = f'{FLEET},model=~"$model"'
WIDTH = 24
LETTERS = string.ascii_uppercase
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Query(NamedTuple):
    expr: str
    legend: str = ""


class Panel(NamedTuple):
    title: str
    about: str
    queries: tuple[Query, ...]
    unit: str = "short"
    width: int = 8
    kind: str = "timeseries"
    colors: dict[str, tuple[str, str]] | None = None
    """Value -> text and colour."""
    maximum: float | None = None


class Column(NamedTuple):
    """A column of a table. Its query has a result for each row."""

    name: str
    expr: str
    unit: str = "short"


class Row(NamedTuple):
    title: str
    height: int
    panels: tuple[Panel, ...]


class Dashboard(NamedTuple):
    uid: str
    title: str
    variables: tuple[tuple[str, str], ...]
    """Name, and the query for its values."""
    rows: tuple[Row, ...]


# ------------------------------------------------------------------------------------------ queries


def total(metric: str, by: str = "", select: str = MODEL, more: str = "") -> str:
    grouped = f" by ({by}) " if by else ""
    return f"sum{grouped}({metric}{{{select}{more}}})"


def rate(metric: str, by: str = "", select: str = MODEL, function: str = "rate") -> str:
    grouped = f" by ({by}) " if by else ""
    return f"sum{grouped}({function}({metric}{{{select}}}[$__rate_interval]))"


def quantile(share: float, metric: str, by: str = "model") -> str:
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', f'le, {by}')})"


def mean(metric: str, count: str = "nv_inference_request_success") -> str:
    return f"{rate(metric, 'model')} / {rate(count, 'model')}"


def percentiles(metric: str) -> tuple[Query, ...]:
    return (
        Query(quantile(0.5, metric), "{{model}} p50"),
        Query(quantile(0.99, metric), "{{model}} p99"),
    )


def stat(title: str, about: str, *queries: Query, unit: str = "none", width: int = 4, **more: Any) -> Panel:
    return Panel(title, about, queries, unit, width, "stat", **more)


def graph(title: str, about: str, *queries: Query, unit: str = "short", width: int = 8, **more: Any) -> Panel:
    return Panel(title, about, queries, unit, width, **more)


# ------------------------------------------------------------------------------------------ one or some servers

ONE = Dashboard(
    "shmserve",
    "shmserve",
    (
        ("job", "label_values(shmserve_info, job)"),
        ("instance", f"label_values(shmserve_info{{{FLEET}}}, instance)"),
        ("model", f"label_values(nv_inference_count{{{SERVER}}}, model)"),
    ),
    (
        Row(
            "Overview",
            4,
            (
                stat(
                    "Ready",
                    "Whether all selected servers are ready",
                    Query(f"min(shmserve_ready{{{SERVER}}})"),
                    colors={"0": ("no", "red"), "1": ("yes", "green")},
                ),
                stat(
                    "Requests",
                    "Successful requests per second",
                    Query(rate("nv_inference_request_success")),
                    unit="reqps",
                ),
                stat(
                    "Failures",
                    "Failed requests, and requests refused at admission, per second",
                    Query(rate("nv_inference_request_failure"), "failed"),
                    Query(rate("shmserve_requests_refused_total", select=SERVER), "refused"),
                    unit="reqps",
                ),
                stat("Models", "Versions that are READY", Query(total("shmserve_model_state", more=',state="READY"'))),
                stat("Clients", "Connections of clients", Query(total("shmserve_clients", select=SERVER))),
                stat(
                    "Uptime",
                    "Time since the broker was started",
                    Query(f"time() - max(process_start_time_seconds{{{SERVER}}})"),
                    unit="s",
                ),
            ),
        ),
        Row(
            "Requests",
            8,
            (
                graph(
                    "Rate",
                    "Successful requests per second",
                    Query(rate("nv_inference_request_success", "model, version"), "{{model}} {{version}}"),
                    unit="reqps",
                ),
                graph(
                    "Failures",
                    "Failed requests, by reason: REJECTED by a limit or a policy, CANCELED by the caller, "
                    "BACKEND: failed in the model or with its process, OTHER: a deadline, or the server was stopping",
                    Query(rate("nv_inference_request_failure", "model, reason"), "{{model}} {{reason}}"),
                    unit="reqps",
                ),
                graph(
                    "Refused",
                    "Requests refused at admission, by the limit they would have exceeded or by error code",
                    Query(rate("shmserve_requests_refused_total", "reason", SERVER), "{{reason}}"),
                    unit="reqps",
                ),
                graph(
                    "Latency",
                    "Time from arrival to response, successful requests only: median and p99",
                    *percentiles("shmserve_request_duration_seconds"),
                    unit="s",
                ),
                graph(
                    "In the queue",
                    "Time from arrival until an instance starts the batch: median and p99",
                    *percentiles("shmserve_queue_duration_seconds"),
                    unit="s",
                ),
                graph(
                    "Batches",
                    "Execution time of batches: median and p99",
                    *percentiles("shmserve_batch_duration_seconds"),
                    unit="s",
                ),
                Panel(
                    "Latencies",
                    "Successful requests, by the time from arrival to response",
                    (Query(rate("shmserve_request_duration_seconds_bucket", "le", function="increase"), "{{le}}"),),
                    "s",
                    kind="heatmap",
                ),
                graph(
                    "Where the time goes",
                    "Means over successful requests",
                    Query(mean("nv_inference_queue_duration_us"), "{{model}} queue"),
                    Query(mean("nv_inference_compute_input_duration_us"), "{{model}} input"),
                    Query(mean("nv_inference_compute_infer_duration_us"), "{{model}} infer"),
                    Query(mean("nv_inference_compute_output_duration_us"), "{{model}} output"),
                    Query(mean("nv_inference_request_duration_us"), "{{model}} in all"),
                    unit="µs",
                ),
                graph(
                    "Waiting",
                    "Requests that no instance has started yet, bytes of tensors inside their messages, and "
                    "all requests without a response",
                    Query(total("nv_inference_pending_request_count", "model, version"), "{{model}} {{version}}"),
                    Query(total("shmserve_queue_bytes", "model"), "{{model}} bytes"),
                    Query(total("shmserve_requests_in_flight", select=SERVER), "all in flight"),
                ),
            ),
        ),
        Row(
            "Batches",
            8,
            (
                graph(
                    "Rows and batches",
                    "Rows computed and batches run, per second",
                    Query(rate("nv_inference_count", "model, version"), "{{model}} {{version}} rows"),
                    Query(rate("nv_inference_exec_count", "model, version"), "{{model}} {{version}} batches"),
                ),
                graph(
                    "Mean batch",
                    "Rows per batch",
                    Query(mean("shmserve_batch_rows_sum", "shmserve_batch_rows_count"), "{{model}}"),
                ),
                graph(
                    "Reasons for batches",
                    "Batches run, by the reason each was formed",
                    Query(rate("shmserve_batches_total", "model, reason"), "{{model}} {{reason}}"),
                ),
            ),
        ),
        Row(
            "Language models",
            8,
            (
                graph(
                    "Tokens",
                    "Generated tokens and tokens of prompts, per second",
                    Query(rate("llm_generation_tokens_total", "model"), "{{model}} generated"),
                    Query(rate("llm_prompt_tokens_total", "model"), "{{model}} prompts"),
                ),
                graph(
                    "First token",
                    "Time from the start in the engine to the first token: median and p99",
                    *percentiles("llm_time_to_first_token_seconds"),
                    unit="s",
                ),
                graph(
                    "Between tokens",
                    "Time between tokens of a text: median and p99",
                    *percentiles("llm_inter_token_latency_seconds"),
                    unit="s",
                ),
                graph(
                    "Texts",
                    "Texts that are being generated, how many can be, and requests that wait for a slot",
                    Query(total("llm_num_requests_running", "model"), "{{model}} running"),
                    Query(total("llm_slots", "model"), "{{model}} slots"),
                    Query(
                        f"{total('llm_num_requests_waiting', 'model')} + on (model) "
                        + total("nv_inference_pending_request_count", "model"),
                        "{{model}} waiting",
                    ),
                    unit="none",
                ),
                graph(
                    "KV cache and prefixes",
                    "Shares: of the KV cache that running texts use, and of the tokens of "
                    "prompts that were found in the cache",
                    Query(f"avg by (model) (llm_kv_cache_usage_perc{{{MODEL}}})", "{{model}} KV cache"),
                    Query(mean("llm_prefix_cache_hits_total", "llm_prompt_tokens_total"), "{{model}} prefix hits"),
                    unit="percentunit",
                    maximum=1,
                ),
                graph(
                    "Endings",
                    "Texts that have ended per second, by reason",
                    Query(rate("llm_request_success_total", "model, finished_reason"), "{{model}} {{finished_reason}}"),
                ),
            ),
        ),
        Row(
            "Models and instances",
            8,
            (
                graph(
                    "Instances",
                    "Instances by state, and configured instances of models that do not serve",
                    Query(total("shmserve_instance_state", "state"), "{{state}}"),
                    Query(
                        total("shmserve_model_instances", "model, state", more=',state=~"lost|quarantined"'),
                        "{{model}}: {{state}}",
                    ),
                    unit="none",
                ),
                graph(
                    "Restarts",
                    "Processes that have exited and were restarted",
                    Query(
                        rate("shmserve_instance_restarts_total", "model, version, model_instance", function="increase"),
                        "{{model_instance}}",
                    ),
                ),
                graph(
                    "Loads",
                    "Loads of versions, by result, and how long the last one took",
                    Query(
                        rate("shmserve_model_loads_total", "model, result", function="increase"), "{{model}} {{result}}"
                    ),
                    Query(total("nv_model_load_duration_secs", "model, version"), "{{model}} {{version}} took s"),
                ),
                graph(
                    "Scaling",
                    "Of versions that are scaled: ready instances, and their bounds",
                    Query(
                        total("shmserve_model_instances", "model, version", more=',state="ready"')
                        + " and on (model, version) "
                        + total("shmserve_model_instances_max", "model, version"),
                        "{{model}} {{version}}",
                    ),
                    Query(total("shmserve_model_instances_min", "model, version"), "{{model}} {{version}} min"),
                    Query(total("shmserve_model_instances_max", "model, version"), "{{model}} {{version}} max"),
                    unit="none",
                ),
                graph(
                    "Sleep",
                    "Versions that are awake, and wakes by result",
                    Query(total("shmserve_model_awake"), "awake"),
                    Query(
                        rate("shmserve_model_wakes_total", "model, result", function="increase"), "{{model}} {{result}}"
                    ),
                    unit="none",
                ),
                graph(
                    "Shares and shadows",
                    "Percentage of the requests that each version gets, and the rate of the "
                    "comparisons with shadows by result",
                    Query(
                        f"avg by (model, version) (shmserve_model_share_percent{{{MODEL}}})", "{{model}} {{version}} %"
                    ),
                    Query(
                        rate("shmserve_shadow_requests_total", "model, shadow, result"),
                        "{{model}} shadow {{shadow}} {{result}}",
                    ),
                ),
                graph(
                    "Processor time",
                    "CPU time of instances and of the broker per second: 1 is one core",
                    Query(
                        rate("shmserve_instance_cpu_seconds_total", "model, version, model_instance"),
                        "{{model_instance}}",
                    ),
                    Query(f"rate(process_cpu_seconds_total{{{SERVER}}}[$__rate_interval])", "broker {{instance}}"),
                    unit="none",
                ),
                graph(
                    "Resident memory",
                    "Resident memory of instances and of the broker, including shared pages",
                    Query(
                        total("shmserve_instance_memory_bytes", "model, version, model_instance"), "{{model_instance}}"
                    ),
                    Query(f"process_resident_memory_bytes{{{SERVER}}}", "broker {{instance}}"),
                    unit="bytes",
                ),
                graph(
                    "Memory for outputs",
                    "Shared memory allocated for outputs, by instance",
                    Query(
                        total("shmserve_instance_arena_bytes", "model, version, model_instance"), "{{model_instance}}"
                    ),
                    unit="bytes",
                ),
            ),
        ),
        Row(
            "Shared memory and clients",
            8,
            (
                graph(
                    "Held by clients",
                    "Bytes of responses in shared memory that clients hold: the total, and the clients that hold most",
                    Query(f"shmserve_held_bytes{{{SERVER}}}", "all {{instance}}"),
                    Query(f"shmserve_client_held_bytes{{{SERVER}}}", "{{client}} {{name}}"),
                    unit="bytes",
                ),
                graph(
                    "Segments",
                    "Bytes of shared memory segments, by the kind of process that created them",
                    Query(total("shmserve_segment_bytes", "owner", SERVER), "{{owner}}"),
                    unit="bytes",
                ),
                graph(
                    "Memory for frames",
                    "The broker's arena, for tensors received as frames: in use, allocated, maximum",
                    Query(f"shmserve_broker_arena_used_bytes{{{SERVER}}}", "used {{instance}}"),
                    Query(f"shmserve_broker_arena_committed_bytes{{{SERVER}}}", "taken {{instance}}"),
                    Query(f"shmserve_broker_arena_limit_bytes{{{SERVER}}}", "limit {{instance}}"),
                    unit="bytes",
                ),
                graph(
                    "Connections",
                    "Connections to the broker, by kind",
                    Query(total("shmserve_clients", "plane", SERVER), "{{plane}}"),
                    unit="none",
                    width=6,
                ),
                graph(
                    "Descriptors",
                    "Open file descriptors of the broker, and shared memory segments",
                    Query(f"process_open_fds{{{SERVER}}}", "descriptors {{instance}}"),
                    Query(total("shmserve_segments", select=SERVER), "segments"),
                    unit="none",
                    width=6,
                ),
                graph(
                    "Gateway: connections",
                    "Connections of HTTP and gRPC",
                    Query(total("shmserve_gateway_http_connections", select=SERVER), "http"),
                    Query(total("shmserve_gateway_grpc_connections", select=SERVER), "grpc"),
                    unit="none",
                    width=6,
                ),
                graph(
                    "Gateway: responses",
                    "HTTP responses by status, gRPC calls by code, per second",
                    Query(rate("shmserve_gateway_http_answers_total", "status", SERVER), "http {{status}}"),
                    Query(rate("shmserve_gateway_grpc_answers_total", "code", SERVER), "grpc {{code}}"),
                    unit="reqps",
                    width=6,
                ),
            ),
        ),
        Row(
            "Machine",
            8,
            (
                graph(
                    "Memory",
                    "Memory of the machine: in use and total",
                    Query(f"nv_cpu_memory_used_bytes{{{SERVER}}}", "used {{instance}}"),
                    Query(f"nv_cpu_memory_total_bytes{{{SERVER}}}", "total {{instance}}"),
                    unit="bytes",
                    width=6,
                ),
                graph(
                    "Cores",
                    "Utilization of all cores together, from 0 to 1",
                    Query(f"nv_cpu_utilization{{{SERVER}}}", "busy {{instance}}"),
                    unit="percentunit",
                    width=6,
                    maximum=1,
                ),
                graph(
                    "GPUs",
                    "Share of the time in which anything ran on the GPU, from 0 to 1",
                    Query(f"nv_gpu_utilization{{{SERVER}}}", "{{instance}} {{gpu_uuid}}"),
                    unit="percentunit",
                    width=6,
                    maximum=1,
                ),
                graph(
                    "GPU memory",
                    "Share of the GPU's memory in use, by all processes",
                    Query(
                        f"nv_gpu_memory_used_bytes{{{SERVER}}} / nv_gpu_memory_total_bytes{{{SERVER}}}",
                        "{{instance}} {{gpu_uuid}}",
                    ),
                    unit="percentunit",
                    width=6,
                    maximum=1,
                ),
                graph(
                    "GPU clocks",
                    "Clock of the processors as a share of the highest",
                    Query(
                        f"shmserve_gpu_sm_clock_hertz{{{SERVER}}} / shmserve_gpu_sm_clock_max_hertz{{{SERVER}}}",
                        "{{instance}} {{gpu_uuid}}",
                    ),
                    unit="percentunit",
                    width=6,
                    maximum=1,
                ),
                graph(
                    "GPU throttling",
                    "1 while clocks are reduced, by reason",
                    Query(f"shmserve_gpu_throttled{{{SERVER}}}", "{{instance}} {{gpu_uuid}} {{reason}}"),
                    unit="none",
                    width=6,
                    maximum=1,
                ),
                graph(
                    "GPU temperature",
                    "Temperature of the GPU",
                    Query(f"shmserve_gpu_temperature_celsius{{{SERVER}}}", "{{instance}} {{gpu_uuid}}"),
                    unit="celsius",
                    width=6,
                ),
                graph(
                    "GPU errors",
                    "GPUs out of service, and errors that the driver has reported in 5 minutes, by Xid",
                    Query(f"shmserve_gpu_out_of_service{{{SERVER}}}", "out of service {{instance}} {{gpu_uuid}}"),
                    Query(
                        f"increase(shmserve_gpu_xid_errors_total{{{SERVER}}}[5m])",
                        "Xid {{xid}} {{instance}} {{gpu_uuid}}",
                    ),
                    unit="none",
                    width=6,
                ),
            ),
        ),
    ),
)

# ------------------------------------------------------------------------------------------ many servers

COLUMNS = (
    Column("release", f"max by (instance, version) (shmserve_info{{{FLEET}}})"),
    Column("scraped", f"max by (instance) (up{{{FLEET}}})"),
    Column("ready", f"max by (instance) (shmserve_ready{{{FLEET}}})"),
    Column("drained", f"max by (instance) (shmserve_out_of_service{{{FLEET}}})"),
    Column("req/s", f"max by (instance) (instance:nv_inference_request_success:rate5m{{{FLEET}}})"),
    Column(
        "failed", f"max by (instance) (instance:nv_inference_request_failure:ratio_rate5m{{{FLEET}}})", "percentunit"
    ),
    Column("p99", f"max by (instance) (instance:shmserve_request_duration_seconds:p99_rate5m{{{FLEET}}})", "s"),
    Column("queue p99", f"max by (instance) (instance:shmserve_queue_duration_seconds:p99_rate5m{{{FLEET}}})", "s"),
    Column("queued", f"sum by (instance) (nv_inference_pending_request_count{{{FLEET}}})"),
    Column("cpu", f"max by (instance) (nv_cpu_utilization{{{FLEET}}})", "percentunit"),
    Column(
        "memory",
        f"max by (instance) (nv_cpu_memory_used_bytes{{{FLEET}}} / nv_cpu_memory_total_bytes{{{FLEET}}})",
        "percentunit",
    ),
    Column("gpu", f"max by (instance) (nv_gpu_utilization{{{FLEET}}})", "percentunit"),
    Column(
        "gpu memory",
        f"max by (instance) (nv_gpu_memory_used_bytes{{{FLEET}}} / nv_gpu_memory_total_bytes{{{FLEET}}})",
        "percentunit",
    ),
)
"""Columns of the server table. Grafana merges the results of their queries by `instance`."""


def of_servers(metric: str) -> Query:
    return Query(f"{metric}{{{FLEET}}}", "{{instance}}")


def of_models(metric: str, legend: str = "{{model}}") -> Query:
    return Query(f"{metric}{{{FLEET_MODEL}}}", legend)


MANY = Dashboard(
    "shmserve-fleet",
    "shmserve: all servers",
    (
        ("job", "label_values(shmserve_info, job)"),
        ("model", f"label_values(nv_inference_count{{{FLEET}}}, model)"),
    ),
    (
        Row(
            "All servers",
            4,
            (
                stat(
                    "Servers ready",
                    "Servers that are ready, of those that are configured",
                    Query(f"sum(job:shmserve_ready:sum{{{FLEET}}})", "ready"),
                    Query(f"sum(job:up:count{{{FLEET}}})", "configured"),
                ),
                stat(
                    "Out of service",
                    "Servers that an operator has drained",
                    Query(total("shmserve_out_of_service", select=FLEET)),
                ),
                stat(
                    "Requests",
                    "Successful requests per second",
                    Query(f"sum(instance:nv_inference_request_success:rate5m{{{FLEET}}})"),
                    unit="reqps",
                ),
                stat(
                    "Failures",
                    "Failed requests per second, without cancelled ones",
                    Query(f"sum(instance:nv_inference_request_failure:rate5m{{{FLEET}}})"),
                    unit="reqps",
                ),
                stat(
                    "Queued",
                    "Requests that no instance has started yet",
                    Query(total("nv_inference_pending_request_count", select=FLEET)),
                ),
                stat(
                    "Alerts",
                    "Alerts of shmserve that are firing",
                    Query('count(ALERTS{alertname=~"Shmserve.*",alertstate="firing"}) or vector(0)'),
                    colors={"0": ("none", "green")},
                ),
            ),
        ),
        Row(
            "Servers",
            9,
            (
                Panel(
                    "Servers",
                    "One row for each server, of now",
                    tuple(Query(column.expr) for column in COLUMNS),
                    width=WIDTH,
                    kind="table",
                ),
                graph(
                    "Requests",
                    "Successful requests per second",
                    of_servers("instance:nv_inference_request_success:rate5m"),
                    unit="reqps",
                ),
                graph(
                    "Failures",
                    "Share of requests that failed, without cancelled ones",
                    of_servers("instance:nv_inference_request_failure:ratio_rate5m"),
                    unit="percentunit",
                    maximum=1,
                ),
                graph(
                    "p99",
                    "99th percentile of the time from arrival to response",
                    of_servers("instance:shmserve_request_duration_seconds:p99_rate5m"),
                    unit="s",
                ),
                graph(
                    "Queue p99",
                    "99th percentile of the time from arrival until an instance starts the batch",
                    of_servers("instance:shmserve_queue_duration_seconds:p99_rate5m"),
                    unit="s",
                ),
                graph(
                    "Cores",
                    "Utilization of all cores together",
                    of_servers("nv_cpu_utilization"),
                    unit="percentunit",
                    maximum=1,
                ),
                graph(
                    "Memory",
                    "Share of the machine's memory in use",
                    Query(
                        f"nv_cpu_memory_used_bytes{{{FLEET}}} / nv_cpu_memory_total_bytes{{{FLEET}}}", "{{instance}}"
                    ),
                    unit="percentunit",
                    maximum=1,
                ),
            ),
        ),
        Row(
            "Models, over all servers",
            8,
            (
                graph(
                    "Requests",
                    "Successful requests per second",
                    of_models("job_model:nv_inference_request_success:rate5m"),
                    unit="reqps",
                ),
                graph(
                    "Failures",
                    "Share of requests that failed, without cancelled ones",
                    of_models("job_model:nv_inference_request_failure:ratio_rate5m"),
                    unit="percentunit",
                    maximum=1,
                ),
                graph(
                    "Latency",
                    "Time from arrival to response: median and p99",
                    of_models("job_model:shmserve_request_duration_seconds:p50_rate5m", "{{model}} p50"),
                    of_models("job_model:shmserve_request_duration_seconds:p99_rate5m", "{{model}} p99"),
                    unit="s",
                ),
                graph(
                    "Queue p99",
                    "99th percentile of the time from arrival until an instance starts the batch",
                    of_models("job_model:shmserve_queue_duration_seconds:p99_rate5m"),
                    unit="s",
                ),
                graph(
                    "Busy",
                    "Share of the time in which ready instances ran a batch",
                    of_models("job_model:shmserve_batch_duration_seconds:busy_rate5m"),
                    unit="percentunit",
                ),
                graph("Mean batch", "Rows per batch", of_models("job_model:shmserve_batch_rows:mean_rate5m")),
                graph(
                    "Instances",
                    "Configured instances on all servers, by state",
                    of_models("job_model_state:shmserve_model_instances:sum", "{{model}} {{state}}"),
                    unit="none",
                ),
                graph(
                    "Versions",
                    "Number of servers that serve each version",
                    of_models("job_model_version:shmserve_model_state:ready_servers", "{{model}} {{version}}"),
                    unit="none",
                ),
                graph(
                    "Spread",
                    "Requests per second of each server",
                    of_models("instance_model:nv_inference_request_success:rate5m", "{{model}} {{instance}}"),
                    unit="reqps",
                ),
            ),
        ),
    ),
)
DASHBOARDS = {"server.json": ONE, "fleet.json": MANY}


# ------------------------------------------------------------------------------------------ Grafana's JSON


def document(dashboard: Dashboard) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in dashboard.rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
                "panels": [],
            }
        )
        x, y = 0, y + 1
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + row.height
            place = {"x": x, "y": y, "w": panel.width, "h": row.height}
            panels.append(panel_document(len(panels) + 1, panel, place))
            x += panel.width
        y += row.height
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "title": dashboard.title,
        "uid": dashboard.uid,
        "tags": ["shmserve"],
        "links": [
            {"type": "dashboards", "tags": ["shmserve"], "title": "Dashboards", "includeVars": True, "keepTime": True}
        ],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "templating": {"list": [source, *[variable(name, query) for name, query in dashboard.variables]]},
        "panels": panels,
    }


def variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def panel_document(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.colors is not None:
        options = {value: {"text": text, "color": color} for value, (text, color) in panel.colors.items()}
        defaults["mappings"] = [{"type": "value", "options": options}]
    result = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [target(letter, panel, query) for letter, query in zip(LETTERS, panel.queries, strict=False)],
        "options": OPTIONS[panel.kind],
    }
    if panel.kind == "table":
        result |= table_of_columns()
    return result


def table_of_columns() -> dict[str, Any]:
    """Grafana names the value of query A `Value #A`. The release is always 1; its label is shown instead."""
    values = {f"Value #{letter}": column for letter, column in zip(LETTERS, COLUMNS, strict=False)}
    renamed = {value: column.name for value, column in values.items() if column.name != "release"}
    arranged = {
        "excludeByName": {"Time": True, "Value #A": True},
        "indexByName": {},
        "renameByName": {"version": "release", **renamed},
    }
    units = [
        {"matcher": {"id": "byName", "options": column.name}, "properties": [{"id": "unit", "value": column.unit}]}
        for column in COLUMNS
        if column.unit != "short"
    ]
    return {
        "transformations": [{"id": "merge", "options": {}}, {"id": "organize", "options": arranged}],
        "fieldConfig": {"defaults": {"unit": "short", "decimals": 2}, "overrides": units},
    }


def target(letter: str, panel: Panel, query: Query) -> dict[str, Any]:
    result: dict[str, Any] = {
        "refId": letter,
        "datasource": DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
    }
    if panel.kind == "heatmap":
        result["format"] = "heatmap"
    if panel.kind == "table":
        result |= {"format": "table", "instant": True, "range": False, "legendFormat": ""}
    return result


OPTIONS: dict[str, dict[str, Any]] = {
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value"},
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "heatmap": {
        "calculate": False,
        "yAxis": {"unit": "s"},
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
    },
    "table": {"showHeader": True, "sortBy": [{"displayName": "instance", "desc": False}]},
}


def text(dashboard: Dashboard) -> str:
    return json.dumps(document(dashboard), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name, dashboard in DASHBOARDS.items():
        (HERE / "dashboards" / name).write_text(text(dashboard))
