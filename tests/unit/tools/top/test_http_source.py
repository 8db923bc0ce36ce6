"""Documents from statistics and metrics over HTTP, and values that these do not provide."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme

from shmserve.errors import ConnectionLost, Denied, Internal, InvalidRequest, NotFound
from shmserve.tools.top import plain
from shmserve.tools.top.columns import TABLES
from shmserve.tools.top.http_source import HttpSource, document_of, samples
from shmserve.tools.top.sources import ServerSource
from shmserve.tools.top.view import make_view
from tests.support.cases import cases
from tests.support.http_endpoint import QuietServer
from tests.support.repo.golden import assert_golden

SERVER = {"name": "triton", "version": "2.50.0", "extensions": []}
METRICS = """
# HELP nv_gpu_utilization fraction
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5
nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 100
nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 25
shmserve_gpu_throttled{gpu_uuid="GPU-1",reason="power_cap"} 0.0
shmserve_gpu_throttled{gpu_uuid="GPU-1",reason="sw_thermal"} 1.0
shmserve_gpu_out_of_service{gpu_uuid="GPU-1"} 1.0
nv_inference_pending_request_count{model="m",version="1"} 7
shmserve_model_requests_in_flight{model="m",version="1"} 2
shmserve_instance_state{model="m",version="1",model_instance="m_0_0",state="ready"} 1
shmserve_instance_memory_bytes{model="m",version="1",model_instance="m_0_0"} 1000
shmserve_instance_cpu_seconds_total{model="m",version="1",model_instance="m_0_0"} 2.5
shmserve_instance_restarts_total{model="m",version="1",model_instance="m_0_0"} 3
shmserve_instance_busy_seconds{model="m",version="1",model_instance="m_0_0"} 4.5
shmserve_request_duration_seconds_bucket{model="m",version="1",le="0.004194303"} 10
shmserve_request_duration_seconds_bucket{model="m",version="1",le="0.008388607"} 30
shmserve_request_duration_seconds_bucket{model="m",version="1",le="+Inf"} 30
shmserve_clients{plane="lane"} 2
shmserve_clients{plane="zmq"} 1
shmserve_client_requests{client="4",name="cam\\"era\\n"} 5
shmserve_client_requests{client="other",name=""} 1
shmserve_client_held_bytes{client="4",name="cam\\"era\\n"} 77
shmserve_requests_refused_total{reason="model_queue"} 6
process_resident_memory_bytes 5000
process_cpu_seconds_total 12.5
not a metric
shmserve_held_bytes many
"""


def statistics(success: int, name: str = "m", **more: Any) -> dict[str, Any]:
    def part(ns: int) -> dict[str, int]:
        return {"count": success, "ns": success * ns}

    times = {"success": part(4000), "fail": {"count": 2, "ns": 10}, "queue": part(1000), "compute_input": part(100)}
    times |= {"compute_infer": part(2500), "compute_output": part(400), "cache_hit": part(0), "cache_miss": part(0)}
    batch = {"batch_size": 2, "compute_input": part(50), "compute_infer": part(50), "compute_output": part(50)}
    return {"name": name, "version": "1", "inference_count": 2 * success, "execution_count": success,
            "inference_stats": times, "batch_stats": [batch]} | more  # fmt: skip


INDEX = [{"name": "m", "version": "1", "state": "READY", "reason": ""}, {"name": "absent"}]


def document(success: int, metrics: str | None) -> dict[str, Any]:
    return document_of(SERVER, True, INDEX, {"model_stats": [statistics(success)]}, metrics)


def test_samples_of_prometheus() -> None:
    found = list(samples(METRICS, {"shmserve_client_requests", "process_resident_memory_bytes", "shmserve_held_bytes"}))
    assert found == [
        ("shmserve_client_requests", {"client": "4", "name": 'cam"era\n'}, 5.0),
        ("shmserve_client_requests", {"client": "other", "name": ""}, 1.0),
        ("process_resident_memory_bytes", {}, 5000.0),
    ]


def test_rates_and_percentiles_with_and_without_metrics() -> None:
    """SHMSERVE_REWRITE=1 writes the expected texts."""
    found = []
    more = METRICS.replace('le="0.008388607"} 30', 'le="0.008388607"} 130').replace("total 12.5", "total 13.5")
    for before, after in ((METRICS, more), (None, None)):
        view = make_view(document(10, before) | {"time_ns": 1}, document(110, after) | {"time_ns": 2_000_000_001})
        found += plain.text(view, "http://host:8000", TABLES, "", None, None).splitlines()
        found += [f"batches by rows: {view.models[0]['batch_sizes']}", f"unknown: {', '.join(sorted(view.unknown))}"]
    assert_golden(Path(__file__).with_name("http_source.expected"), found)


@contextmanager
def serving(
    tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", **more: tuple[int, str]
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yields the URL, and the paths and credentials of the requests."""
    answers = {
        "/v2": (200, json.dumps(SERVER)),
        "/v2/health/ready": (400, ""),
        "/v2/repository/index": (200, json.dumps(INDEX)),
        "/v2/models/stats": (200, json.dumps({"model_stats": [statistics(5)]})),
        "/metrics": (200, METRICS),
        "/close/metrics": (200, METRICS),
        "/v2/repository/models/m%2Fx/load": (200, ""),
        "/v2/repository/models/bad/load": (400, '{"error": "load failed for model \'bad\'"}'),
    } | {path.replace("_", "/"): answer for path, answer in more.items()}
    seen: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen.append((self.path, self.headers.get("Authorization", "")))
            status, text = answers.get(self.path, (404, '{"error": "no such path"}'))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            if self.path.startswith("/close"):  # without a header that says so
                self.close_connection = True
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = QuietServer((host, 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def source(url: str, *more: str) -> closing[HttpSource]:
    return closing(HttpSource(url, *more))


def test_reading_and_loading() -> None:
    with serving() as (url, seen), source(f"{url}/", f"{url}/metrics", "secret") as made:
        found = made.read()
        assert (found["server"]["ready"], found["notes"], found["gpus"][0]["uuid"]) == (False, [], "GPU-1")
        assert made.operate("load", "m/x", None, "") == []
        assert {token for _, token in seen} == {"Bearer secret"}
        with pytest.raises(InvalidRequest, match="load failed for model 'bad'"):
            made.operate("load", "bad", None, "")
        with pytest.raises(NotFound, match="no such path"):
            made.operate("unload", "m", None, "")


def test_metrics_that_cannot_be_read_are_a_note() -> None:
    with serving(_metrics=(403, "")) as (url, _), source(url, url) as made:
        found = made.read()
    (note,) = found["notes"]
    assert "GET /metrics: Forbidden (status 403)" in note
    assert "--metrics-url" in note
    assert "p99" in found["unknown"]


FORM = "do not have the form of KServe v2"


@cases(
    ("_v2", 401, '{"error": "this request needs a token"}', Denied, "this request needs a token"),
    ("_v2", 500, "oops", Internal, r"GET /v2: Internal Server Error \(status 500\)"),
    ("_v2", 200, "oops", Internal, "the answer to GET /v2 is not JSON"),
    ("_v2", 200, "[]", Internal, "not a JSON object"),
    ("_v2_models_stats", 200, '{"model_stats": [{"name": "m"}]}', Internal, FORM),
    ("_v2_models_stats", 200, '{"model_stats": 5}', Internal, FORM),
    ("_v2_repository_index", 200, "[7]", Internal, FORM),
    ("_metrics", 200, 'shmserve_request_duration_seconds_bucket{model="m",version="1"} 5', Internal, FORM),
)
def test_errors_and_other_formats(path: str, status: int, text: str, error: type[Exception], words: str) -> None:
    answers = {path: (status, text)}
    with serving(None, "127.0.0.1", **answers) as (url, _), source(url, url) as made, pytest.raises(error, match=words):
        made.read()


def test_connections_that_are_closed_end_or_are_not_trusted() -> None:
    with serving() as (url, seen), source(url, f"{url}/close") as made:
        for _ in range(2):
            made.read()
        assert [path for path, _ in seen].count("/v2") == 2
    with source(url) as made, pytest.raises(ConnectionLost, match=r"no server at http://127\.0\.0\.1:\d+ \("):
        made.read()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    with (
        serving(context) as (url, _),
        source(url.replace("http", "https")) as made,
        pytest.raises(ConnectionLost, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        made.read()


def test_histories_come_from_the_gateway_on_the_machine_of_the_server() -> None:
    trends = [{"name": "m", "version": "1", "requests": [7.0]}]
    with serving(host="127.0.0.2", _page_history=(200, json.dumps({"trends": trends}))) as (url, _):
        about = {"server": {"ports": {"http": int(url.rpartition(":")[2])}}}
        client: Any = SimpleNamespace(url="tcp://127.0.0.2:8790", activity=lambda: about)
        assert ServerSource(client).recent() == trends


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://user@x", "http://x?y=1"])
def test_invalid_urls(url: str) -> None:
    with pytest.raises(InvalidRequest, match="expected http://host:port"):
        HttpSource(url)
