"""Tables of several servers, computed from the last answer of each.

Rates of a fleet are sums, means are weighted by requests, and percentiles come from the sum of the histograms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from shmserve.llm.figures import FIGURES
from shmserve.protocol.rates import Row, percentiles
from shmserve.tools.top.columns import MODELS, TopColumn, TopTable
from shmserve.tools.top.fleet_poller import ServerSnapshot
from shmserve.tools.top.view import NOT_LOADED, View, sum_known

READY, NOT_READY, DRAINING = "READY", "NOT READY", "DRAINING"
UNREACHABLE, NO_ANSWER, CONNECTING = "UNREACHABLE", "NO ANSWER", "CONNECTING"
PARTLY, VERSIONS_DIFFER, UNAVAILABLE = "PARTLY", "VERSIONS DIFFER", "UNAVAILABLE"
ORDER = (READY, DRAINING, NOT_READY, NO_ANSWER, UNREACHABLE, CONNECTING)
SERVING = frozenset({"READY", "RELOADING", "DEGRADED", "ASLEEP"})
"""States of a version that answers requests."""
SILENT_S = 3.0
"""A server that has not answered for this long, and for longer than an interval, has the state NO ANSWER."""

_SUMMED = tuple(figure for figure in FIGURES if figure.unit in ("count", "rate"))
"""The figures of language models that can be added."""

SERVERS = TopTable(
    "servers",
    "Servers",
    "server",
    ("server",),
    (
        TopColumn("server", "server", "text", 0, "its address", 12),
        TopColumn("state", "state", "text", 1, "state of the server; DRAINING: an operator took it out of service", 11),
        TopColumn("models", "models", "text", 5, "versions that serve, of those that it lists", 6),
        TopColumn("instances", "inst", "text", 6, "instances that serve, of those that should", 5),
        TopColumn("requests_per_s", "req/s", "rate", 2, "answered requests per second, also failed ones"),
        TopColumn("failed_per_s", "fail/s", "rate", 9, "failed requests per second"),
        TopColumn("p50", "p50", "duration", 12, "median time from arrival to answer"),
        TopColumn("p99", "p99", "duration", 3, "99th percentile of this time"),
        TopColumn("queue_seconds", "waits", "duration", 7, "mean time in the queue"),
        TopColumn("queued", "queue", "count", 4, "requests that have not started"),
        TopColumn("in_flight", "run", "count", 13, "requests without an answer"),
        TopColumn("cpu", "cpu", "share", 8, "utilization of the machine's cores"),
        TopColumn("memory_share", "mem", "share", 10, "share of the machine's memory in use"),
        TopColumn("gpu", "gpu", "share", 22, "utilization of the busiest GPU"),
        TopColumn("gpu_memory_share", "gpu mem", "share", 23, "share of the memory in use of the fullest GPU"),
        TopColumn("connections", "clients", "count", 17, "connections of clients"),
        TopColumn("release", "release", "text", 11, "release of shmserve; in colour if most servers have another", 7),
        TopColumn("uptime_seconds", "up", "duration", 14, "time since the server started"),
        TopColumn("reason", "reason", "text", 18, "why it is not READY", 24),
    ),
)
FLEET_MODELS = TopTable(
    "models",
    "Models",
    "model",
    ("model",),
    (
        TopColumn("model", "model", "text", 0, "name of the model", 10),
        TopColumn(
            "versions", "ver", "text", 6, "versions that are served; with the number of servers if that differs", 3
        ),
        TopColumn("state", "state", "text", 1, "READY, or what is wrong; PARTLY: not on all servers that have it", 11),
        TopColumn("servers", "servers", "text", 2, "servers that serve it, of those that have it", 7),
        TopColumn("instances", "inst", "text", 7, "instances that serve, of those that should", 5),
        TopColumn("requests_per_s", "req/s", "rate", 3, "answered requests per second, also failed ones"),
        TopColumn("failed_per_s", "fail/s", "rate", 11, "failed requests per second"),
        TopColumn("p50", "p50", "duration", 8, "median time from arrival to answer"),
        TopColumn("p95", "p95", "duration", 12, "95th percentile of this time"),
        TopColumn("p99", "p99", "duration", 4, "99th percentile of this time"),
        TopColumn("queue_seconds", "waits", "duration", 13, "mean time in the queue"),
        TopColumn("queued", "queue", "count", 5, "requests that have not started"),
        TopColumn("in_flight", "run", "count", 9, "requests that are running"),
        TopColumn("mean_batch", "batch", "rate", 14, "mean rows per batch"),
        TopColumn("busy", "busy", "share", 10, "share of time in which instances ran a batch"),
        TopColumn("memory_bytes", "mem", "bytes", 15, "memory of its processes (PSS)"),
        TopColumn("gpu_memory_bytes", "gpu mem", "bytes", 22, "memory of its processes on GPUs"),
        *(TopColumn(one.key, one.head, one.unit, 16 + one.rank / 100, one.help, rare=True) for one in _SUMMED),
        TopColumn("reason", "reason", "text", 17, "why it is not, or not fully, served, and where", 24),
    ),
)
_OWN = ("model", "version")
BY_SERVER = TopTable(
    "by-server",
    "By server",
    "model",
    ("model", "version", "server"),
    (
        *[column for column in MODELS.columns if column.key in _OWN],
        TopColumn("server", "server", "text", 0, "the server", 12),
        *[column for column in MODELS.without("trend").columns if column.key not in _OWN],
    ),
)
FLEET_TABLES = (SERVERS, FLEET_MODELS, BY_SERVER)


class FleetView(Struct):
    """The rows of FLEET_TABLES, and `total`: of all servers. `unknown`: keys of columns that no server knows."""

    total: Row
    servers: list[Row]
    models: list[Row]
    by_server: list[Row]
    unknown: frozenset[str] = frozenset()

    def table(self, name: str) -> list[Row]:
        return {"servers": self.servers, "models": self.models, "by-server": self.by_server}[name]


Known = tuple[ServerSnapshot, View]
"""A server whose last read was answered, and its view."""


def make_fleet_view(snapshots: Sequence[ServerSnapshot], now: float, interval: float) -> FleetView:
    """`now`: time of the monotonic clock. Unreachable servers have a row but do not count."""
    servers = [_server(snapshot, now, interval) for snapshot in snapshots]
    common = Counter(row["release"] for row in servers if row["release"]).most_common(1)
    for row in servers:
        row["release_differs"] = bool(common and row["release"] and row["release"] != common[0][0])
    known = [(snapshot, snapshot.view) for snapshot in snapshots if snapshot.view is not None and not snapshot.problem]
    by_server = [{**row, "server": snapshot.name} for snapshot, view in known for row in view.models]
    names = sorted({row["model"] for row in by_server})
    models = [_model(name, [row for row in by_server if row["model"] == name], known) for name in names]
    unknown = frozenset.intersection(*[view.unknown for _, view in known]) if known else frozenset()
    return FleetView(_total(servers, known), servers, models, by_server, unknown)


# ------------------------------------------------------------------------------------------ servers


def _server(snapshot: ServerSnapshot, now: float, interval: float) -> Row:
    view = snapshot.view
    row: Row = dict.fromkeys([column.key for column in SERVERS.columns])
    row |= {
        "server": snapshot.name,
        "url": snapshot.where,
        "reason": snapshot.problem,
        "release": str(view.server["version"] or "") or None if view is not None else None,
        "answered_seconds": round(now - snapshot.answered, 3) if snapshot.answered is not None else None,
    }
    if snapshot.problem:
        return row | {"state": UNREACHABLE}
    row["state"] = _state(view) if view is not None else CONNECTING
    silent = now - snapshot.asked if snapshot.asked is not None else 0.0
    if silent > max(SILENT_S, interval):
        row |= {"state": NO_ANSWER, "reason": f"no answer for {silent:.0f} s"}
    elif view is not None and row["state"] == NOT_READY:
        row["reason"] = next((f"{one['model']}: {one['reason']}" for one in view.models if one["reason"]), "")
    return row | _values(snapshot, view) if view is not None else row


def _values(snapshot: ServerSnapshot, view: View) -> Row:
    """The values of the last answer."""
    server = view.server
    used, total = server["machine_memory_used_bytes"], server["machine_memory_bytes"]
    listed = [one for one in view.models if one["state"] != NOT_LOADED]
    return {
        **{
            name: server[name]
            for name in ("uptime_seconds", "requests_per_s", "failed_per_s", "queued", "in_flight", "connections")
        },
        "cpu": server["machine_utilization"],
        "memory_share": used / total if used is not None and total else None,
        "gpu": max((gpu["utilization"] for gpu in view.gpus if gpu["utilization"] is not None), default=None),
        "gpu_memory_share": max(
            (gpu["memory_share"] for gpu in view.gpus if gpu["memory_share"] is not None), default=None
        ),
        "models": f"{sum(one['state'] in SERVING for one in listed)}/{len(listed)}",
        "instances": _instances(listed),
        "queue_seconds": _queue_seconds(view.models),
        **percentiles(_merged(snapshot.times.values())),
    }


def _state(view: View) -> str:
    if view.server["out_of_service"]:
        return DRAINING
    return NOT_READY if view.server["ready"] is False else READY


def _instances(rows: Iterable[Row]) -> str | None:
    rows = list(rows)
    expected = sum(row["expected"] for row in rows)
    return f"{sum(row['ready'] for row in rows)}/{expected}" if expected else None


# ------------------------------------------------------------------------------------------ models


def _model(name: str, rows: list[Row], known: Sequence[Known]) -> Row:
    """`rows`: the model's versions on all servers."""
    loaded = [row for row in rows if row["state"] != NOT_LOADED]
    having = {row["server"] for row in loaded}
    serving = [row for row in loaded if row["state"] in SERVING]
    by_server = {server: _versions(row for row in serving if row["server"] == server) for server in having}
    serves = {server for server, versions in by_server.items() if versions}
    different = len({by_server[server] for server in serves}) > 1
    state = UNAVAILABLE if not serves else PARTLY if serves != having else VERSIONS_DIFFER if different else READY
    if state == READY and any(row["state"] != "READY" for row in serving):
        state = next(row["state"] for row in serving if row["state"] != "READY")
    times = [counts for snapshot, _ in known for (model, _), counts in snapshot.times.items() if model == name]
    batches = sum_known(row["batches_per_s"] for row in rows)
    ready = sum(row["ready"] for row in rows if row["busy"] is not None)
    reasons = {row["reason"]: row["server"] for row in loaded if row["reason"]}
    return {
        "model": name,
        "versions": _versions_text(serving, different),
        "state": state if having else NOT_LOADED,
        "servers": f"{len(serves)}/{len(having)}" if having else None,
        "instances": _instances(rows),
        **{
            key: sum_known(row[key] for row in rows)
            for key in ("requests_per_s", "failed_per_s", "queued", "in_flight", "memory_bytes", "gpu_memory_bytes")
        },
        **{one.key: sum_known(row[one.key] for row in rows) for one in _SUMMED},
        "queue_seconds": _queue_seconds(rows),
        "mean_batch": (sum_known(row["rows_per_s"] for row in rows) or 0.0) / batches if batches else None,
        "busy": sum(row["busy"] * row["ready"] for row in rows if row["busy"] is not None) / ready if ready else None,
        "reason": "; ".join(f"{server}: {reason}" for reason, server in reasons.items()),
        **percentiles(_merged(times)),
    }


def _versions(rows: Iterable[Row]) -> tuple[int, ...]:
    return tuple(sorted({row["version"] or 0 for row in rows}))


def _versions_text(serving: Sequence[Row], different: bool) -> str:
    """`1 2`, or `1 on 3, 2 on 1` if not all servers have the same."""
    result = Counter(row["version"] or 0 for row in serving)
    texts = [f"{version} on {count}" if different else str(version) for version, count in sorted(result.items())]
    return (", " if different else " ").join(texts)


# ------------------------------------------------------------------------------------------ all servers


def _total(servers: Sequence[Row], known: Sequence[Known]) -> Row:
    states = Counter(row["state"] for row in servers)
    models = [row for _, view in known for row in view.models]
    intervals = [view.interval for _, view in known if view.interval is not None]
    return {
        "servers": len(servers),
        "states": {state: states[state] for state in ORDER if states[state]},
        "releases": dict(Counter(row["release"] for row in servers if row["release"]).most_common()),
        "interval": max(intervals, default=None),
        **{
            key: sum_known(row[key] for row in servers)
            for key in ("requests_per_s", "failed_per_s", "queued", "in_flight")
        },
        "generated_tokens_per_s": sum_known(row["generated_tokens_per_s"] for row in models),
        "queue_seconds": _queue_seconds(models),
        **percentiles(_merged(counts for snapshot, _ in known for counts in snapshot.times.values())),
    }


def _queue_seconds(rows: Iterable[Row]) -> float | None:
    """The mean over successful requests."""
    pairs = [
        (row["queue_seconds"], row["requests_per_s"] - row["failed_per_s"])
        for row in rows
        if row["queue_seconds"] is not None and row["requests_per_s"] is not None
    ]
    requests = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / requests if requests else None


def _merged(times: Iterable[dict[int, int]]) -> Counter[int]:
    result: Counter[int] = Counter()
    for counts in times:
        result.update(counts)
    return result
