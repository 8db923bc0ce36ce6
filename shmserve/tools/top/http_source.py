"""A server over HTTP: the index, the statistics and the metrics of the KServe endpoints, put together as a document.

Works with any server that has the statistics of KServe v2, such as Triton. Values that its metrics do not contain are
left out, and `unknown` names their columns.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from shmserve import histogram
from shmserve.errors import Internal, ServeError
from shmserve.repo.gpus import SHOWN_METRICS
from shmserve.tools.top.sources import Curves, Record, Step, curves_of, recent_of, steps_of
from shmserve.transport.http_link import HttpLink, parts_of

_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n"}

Sample = tuple[str, dict[str, str], float]


def samples(text: str, wanted: Collection[str]) -> Iterator[Sample]:
    """The samples with these names. All other lines, including invalid ones, are skipped."""
    for line in text.splitlines():
        end = line.find("{")
        name = line[:end] if end >= 0 else line.partition(" ")[0]
        if name not in wanted:
            continue
        inside, closing, rest = line[end + 1 :].rpartition("}") if end >= 0 else ("", "}", line[len(name) :])
        try:
            value = float(rest.split()[0])
        except (ValueError, IndexError):
            continue
        if closing:
            yield name, {key: _ESCAPED.sub(_unescape, raw) for key, raw in _LABEL.findall(inside)}, value


def _unescape(match: re.Match[str]) -> str:
    return _ESCAPES.get(match[1], match[1])


Document = dict[str, Any]

METRICS_PORT = 8002

_UNKNOWN = (
    "batch_rows",
    "busy_seconds",
    "waiting_rows",
    "running",
    "device",
    "pid",
    "user",
    "plane",
    "segments",
    "segment_bytes",
    "gpu_memory_bytes",
    "sequences",
    "max_batch",
    "loading_seconds",
)
"""Columns without values from any HTTP endpoint."""
_OF_INSTANCES = {
    "shmserve_instance_memory_bytes": "memory_bytes",
    "shmserve_instance_cpu_seconds_total": "cpu_seconds",
    "shmserve_instance_restarts_total": "restarts",
    "shmserve_instance_busy_seconds": "busy_seconds",
}
_OF_MODELS = {
    "shmserve_model_requests_in_flight": "in_flight",
    "nv_inference_pending_request_count": "queued",
    "shmserve_model_share_percent": "share",
}
_OF_SERVER = {
    "process_cpu_seconds_total": "cpu_seconds",
    "process_resident_memory_bytes": "memory_bytes",
    "shmserve_requests_in_flight": "in_flight",
    "shmserve_out_of_service": "out_of_service",
    "shmserve_held_bytes": "held_bytes",
    "nv_cpu_utilization": "machine_utilization",
    "nv_cpu_memory_total_bytes": "machine_memory_bytes",
    "nv_cpu_memory_used_bytes": "machine_memory_used_bytes",
}
_THROTTLED, _GPU_OUT = "shmserve_gpu_throttled", "shmserve_gpu_out_of_service"
_OF_CLIENTS = {"shmserve_client_held_bytes": "held_bytes", "shmserve_client_requests": "in_flight"}
_TIMES = "shmserve_request_duration_seconds_bucket"
_STATE = "shmserve_instance_state"
_WANTED = frozenset(
    (
        *_OF_INSTANCES,
        *_OF_MODELS,
        *_OF_SERVER,
        *SHOWN_METRICS,
        *_OF_CLIENTS,
        _TIMES,
        _STATE,
        _THROTTLED,
        _GPU_OUT,
        "shmserve_clients",
        "shmserve_requests_refused_total",
        "shmserve_segment_bytes",
        "shmserve_segments",
        "process_start_time_seconds",
    )
)


class HttpSource:
    """`metrics_url`: url of the metrics endpoint; "": port 8002 of the same host. `token` is sent as a bearer token."""

    operations = ("load", "unload")

    def __init__(self, url: str, metrics_url: str = "", token: str = "") -> None:
        parts = parts_of(url)
        self._path = parts.path.rstrip("/")
        self._api = HttpLink(parts.scheme, parts.netloc, token)
        host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else str(parts.hostname)
        result = parts_of(metrics_url) if metrics_url else urlsplit(f"{parts.scheme}://{host}:{METRICS_PORT}/metrics")
        self._metrics_url = result.geturl()
        self._metrics_path = result.path if result.path not in ("", "/") else "/metrics"
        self._metrics = HttpLink(result.scheme, result.netloc, token)
        self._operating = [self._api, self._metrics]
        self.where = url

    def read(self) -> Mapping[str, Any]:
        name = _object(self._api.call("GET", f"{self._path}/v2"))
        ready = self._api.status("GET", f"{self._path}/v2/health/ready") == 200
        index = self._api.call("POST", f"{self._path}/v2/repository/index", "{}")
        statistics = _object(self._api.call("GET", f"{self._path}/v2/models/stats"))
        notes = []
        metrics: str | None = None
        try:
            metrics = self._metrics.text("GET", self._metrics_path)
        except ServeError as error:
            notes = [f"no metrics from {self._metrics_url} ({error}): select them by --metrics-url"]
        try:
            document = document_of(name, ready, index, statistics, metrics)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Internal(f"the answers of {self.where} do not have the form of KServe v2: {error!r}") from error
        document["notes"] = notes
        return document

    def operate(self, what: str, model: str, version: int | None, instance: str) -> list[str]:
        connection = self._api.another(timeout=None)  # reads continue during operations
        self._operating.append(connection)
        try:
            path = f"{self._path}/v2/repository/models/{quote(model, safe='')}/{what}"
            connection.text("POST", path, "{}")
        finally:
            self._operating.remove(connection)
            connection.close()
        return []

    def log(self, model: str) -> Sequence[Record]:
        """Only gateways of shmserve have this."""
        path = f"{self._path}/shmserve/logs/models/{quote(model, safe='')}"
        records: Sequence[Record] = _object(self._api.call("GET", path))["records"]
        return records

    def history(self, model: str, version: int | None) -> Curves:
        return curves_of(self._api, self._path, model, version)

    def recent(self) -> Sequence[Mapping[str, Any]]:
        return recent_of(self._api, self._path)

    def steps(self, model: str, version: int | None) -> Sequence[Step]:
        """Only gateways of shmserve have this."""
        path = f"{self._path}/page/model/{quote(model, safe='')}" + (f"/versions/{version}" if version else "")
        return steps_of(_object(self._api.call("GET", path)))

    def close(self) -> None:
        for connection in list(self._operating):
            connection.close()


def _object(answer: Any) -> Document:
    if not isinstance(answer, dict):
        raise Internal("the server's answer is not a JSON object")
    return answer


# ------------------------------------------------------------------------------------------ documents


def document_of(
    server: Mapping[str, Any], ready: bool, index: Any, statistics: Mapping[str, Any], metrics: str | None
) -> Document:
    """The document. `metrics`: None if there is no metrics endpoint."""
    models: dict[tuple[str, str], Document] = {}
    for entry in index:
        name, version = str(entry["name"]), str(entry.get("version", ""))
        models[name, version] = {
            "name": name,
            "version": version,
            "state": str(entry.get("state", "")),
            "reason": str(entry.get("reason", "")),
            "instances": [],
        }
    for counted in statistics.get("model_stats", ()):
        key = str(counted["name"]), str(counted["version"])
        entry = models.setdefault(
            key, {"name": key[0], "version": key[1], "state": "READY", "reason": "", "instances": []}
        )
        entry["counters"] = _counters(counted)
        memory = sum(int(used.get("byte_size", 0)) for used in counted.get("memory_usage", ()))
        entry |= {"memory_bytes": memory} | {
            name: counted[name] for name in ("queued", "in_flight", "language") if name in counted
        }
    facts: Document = {"name": server.get("name"), "version": server.get("version"), "ready": ready}
    document: Document = {
        "time_ns": time.monotonic_ns(),
        "server": facts,
        "models": list(models.values()),
        "clients": [],
        "gpus": [],
    }
    seen = _add_metrics(document, models, metrics) if metrics is not None else set()
    provided = {name for entry in models.values() for name in ("queued", "in_flight") if name in entry}
    document["unknown"] = sorted(_unknown(seen) | ({"queued", "in_flight"} - provided))
    return document


def _counters(counted: Mapping[str, Any]) -> Document:
    times = counted["inference_stats"]

    def part(name: str, what: str) -> int:
        return int(times.get(name, {}).get(what, 0))

    batches = counted.get("batch_stats", ())
    parts = ("compute_input", "compute_infer", "compute_output")
    spent = sum(int(batch[name]["ns"]) for batch in batches for name in parts)
    return {
        "success": part("success", "count"),
        "failed": part("fail", "count"),
        "rows": int(counted["inference_count"]),
        "batches": int(counted["execution_count"]),
        "request_ns": part("success", "ns"),
        "queue_ns": part("queue", "ns"),
        "input_ns": part("compute_input", "ns"),
        "infer_ns": part("compute_infer", "ns"),
        "output_ns": part("compute_output", "ns"),
        "batch_ns": spent,
        "cache_hits": part("cache_hit", "count"),
        "cache_misses": part("cache_miss", "count"),
        "reasons": counted.get("batch_reasons", {}),
        "batch_rows": {batch["batch_size"]: int(batch["compute_infer"]["count"]) for batch in batches},
    }


def _add_metrics(document: Document, models: Mapping[tuple[str, str], Document], text: str) -> set[str]:
    """Adds the values of the metrics and returns the names of the metrics."""
    server = document["server"]
    seen: set[str] = set()
    instances: dict[tuple[str, str, str], Document] = {}
    clients: dict[str, Document] = {}
    gpus: dict[str, Document] = {}
    below: dict[tuple[str, str], dict[int, int]] = {}
    for name, labels, value in samples(text, _WANTED):
        seen.add(name)
        key = labels.get("model", ""), labels.get("version", "")
        if name in _OF_SERVER and not labels:
            server[_OF_SERVER[name]] = value
        elif name == "process_start_time_seconds":
            server["uptime_seconds"] = max(0.0, time.time() - value)
            server["pid"] = value  # distinguishes one server process from the next
        elif name == _TIMES and labels.get("le") != "+Inf":
            below.setdefault(key, {})[round(float(labels["le"]) * 1e9).bit_length()] = int(value)
        elif name in _OF_MODELS and key in models:
            models[key][_OF_MODELS[name]] = int(value)
        elif name == _STATE or name in _OF_INSTANCES:
            one = instances.setdefault((*key, labels.get("model_instance", "")), {})
            one |= {"state": labels["state"]} if name == _STATE else {_OF_INSTANCES[name]: value}
        elif name in _OF_CLIENTS and labels.get("client") != "other":
            number = labels.get("client", "")
            client = clients.setdefault(number, {"number": number, "name": labels.get("name", "")})
            client[_OF_CLIENTS[name]] = int(value)
        elif "gpu_uuid" in labels:
            uuid = labels["gpu_uuid"]
            gpu = gpus.setdefault(uuid, {"number": len(gpus), "uuid": uuid, "throttled": [], "out_of_service": ""})
            if name in SHOWN_METRICS:
                gpu[SHOWN_METRICS[name]] = value
            elif name == _THROTTLED and value:
                gpu["throttled"].append(labels.get("reason", ""))
            elif name == _GPU_OUT and value:
                gpu["out_of_service"] = "see shmserve doctor"
        elif name == "shmserve_requests_refused_total":
            server.setdefault("refused", {})[labels.get("reason", "")] = int(value)
        elif name in ("shmserve_clients", "shmserve_segment_bytes", "shmserve_segments"):
            total = {"shmserve_clients": "connections"}.get(name, name.removeprefix("shmserve_"))
            server[total] = server.get(total, 0) + int(value)
    if "out_of_service" in server:
        server["out_of_service"] = bool(server["out_of_service"])
    for (model, version, instance), one in instances.items():
        if (model, version) in models and "state" in one:
            entry = models[model, version]
            entry["instances"].append({"name": instance, **one})
            if "counters" in entry and "restarts" in one:
                entry["counters"]["restarts"] = entry["counters"].get("restarts", 0) + int(one["restarts"])
    for key, counts in below.items():
        if key in models and "counters" in models[key]:
            models[key]["counters"]["request_times"] = _separate(counts)
    document["clients"] = list(clients.values())
    document["gpus"] = [{"name": None, **dict.fromkeys(SHOWN_METRICS.values()), **gpu} for gpu in gpus.values()]
    return seen


def _separate(below: Mapping[int, int]) -> dict[int, int]:
    """Counts of the buckets from cumulative counts."""
    counts, last = {}, 0
    for bucket, count in sorted(below.items()):
        if bucket < histogram.BUCKETS and count > last:
            counts[bucket] = count - last
        last = max(last, count)
    return counts


def _unknown(seen: set[str]) -> set[str]:
    """Columns without values over HTTP."""
    unknown = set(_UNKNOWN)
    if _TIMES not in seen:
        unknown |= {"p50", "p95", "p99"}
    if _STATE not in seen:
        unknown |= {"instances", "cpu", "memory_bytes", "restarts", "busy"}
    return unknown
