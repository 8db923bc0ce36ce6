"""A run in the columns of `perf_analyzer -f FILE --verbose-csv`, for programs that read those files.

Times are in microseconds. The times for sending and receiving inside the client, which perf_analyzer measures, are not
measured: these columns are 0, and all time outside the server is in "Network+Server Send/Recv". Additional columns come
last.
"""

from __future__ import annotations

import csv
import io

from shmserve.tools.load.plan import ClosedLoop
from shmserve.tools.load.record import Point, SavedRun

US = 1000.0
_SERVER = {
    "Server Queue": "queue",
    "Server Compute Input": "gather",
    "Server Compute Infer": "compute",
    "Server Compute Output": "scatter",
}
_THEIRS = ("p50", "p90", "p95", "p99")
_MORE = ("p99.9", "p99.99")


def csv_text(run: SavedRun) -> str:
    written = io.StringIO()
    rows = [_row(point) for point in run.points]
    writer = csv.DictWriter(written, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue()


def _row(point: Point) -> dict[str, object]:
    parts = point.server.parts if point.server is not None else {}
    mean = point.latency.mean
    rest = max(0.0, mean - sum(parts.get(name, 0.0) for name in _SERVER.values()))
    load = "Concurrency" if isinstance(point.load, ClosedLoop) else "Request Rate"
    row: dict[str, object] = {load: f"{point.load.value:g}"}
    row["Inferences/Second"] = f"{point.throughput.mean * point.rows:.6g}"
    row |= {"Client Send": 0, "Network+Server Send/Recv": round(rest / US)}
    row |= {column: round(parts.get(name, 0.0) / US) for column, name in _SERVER.items()}
    row["Client Recv"] = 0
    row |= {f"{name} latency": _percentile(point, name) for name in _THEIRS}
    row |= {"Avg latency": round(mean / US), "request/response": 0, "response wait": round(mean / US)}
    row |= {f"{name} latency": _percentile(point, name) for name in _MORE}
    row |= {"Requests/Second": f"{point.throughput.mean:.6g}", "Failed": point.failed, "Stable": int(point.stable)}
    return row


def _percentile(point: Point, name: str) -> object:
    result = point.latency.percentiles.get(name)
    return round(result.mean / US) if result is not None else ""
