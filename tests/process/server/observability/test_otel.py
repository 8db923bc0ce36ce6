"""Traces for OpenTelemetry: from the callers' contexts to a collector, which may be down, slow or restarted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

import shmserve
from shmserve.testing import Server
from tests.support.ensemble_models import ADD, BATCHES, model, numbers
from tests.support.launch import children_of
from tests.support.living import until
from tests.support.observability.otlp import Collector
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("otel")]

SPAN = 0x00F067AA0BA902B7


def parent_of(number: int) -> tuple[str, str]:
    """A trace id that only one test uses, and a sampled traceparent with it."""
    found = f"{number:032x}"
    return found, f"00-{found}-{SPAN:016x}-01"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    model(root, "add1", ADD, BATCHES, dims="[4]")
    return root


def options(collector: Collector, *more: str) -> list[str]:
    given = ("mode=opentelemetry", f"opentelemetry,url={collector.url}", "opentelemetry,bsp_schedule_delay=20", *more)
    return [word for text in given for word in ("--trace-config", text)]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


@pytest.fixture(scope="module")
def server(repository: Path, collector: Collector) -> Iterator[Server]:
    """A server that traces requests with a context, and hardly any others."""
    with Server(repository, *options(collector, "rate=1000000"), "--exit-on-error", "true") as server:
        yield server


def of_trace(collector: Collector, trace_id: str, count: int) -> dict[str, Any]:
    return {span.name: span for span in collector.wait(count, trace_id)}


def counted(client: shmserve.Client, result: str) -> int:
    (found,) = re.findall(rf'shmserve_trace_spans_total{{result="{result}"}} (\d+)', client.metrics())
    return int(found)


def test_the_trace_context_of_the_native_client(server: Server, collector: Collector) -> None:
    """The context is that of the application's current span, if it is sampled."""
    with server.client() as client:
        for number, flags in ((2, 1), (3, 0)):
            context = SpanContext(number, SPAN, False, TraceFlags(flags), TraceState([("b", "2")]))
            with trace.use_span(NonRecordingSpan(context)):
                client.submit("add1", {"x": numbers(1, 4)}).result()
        client.infer("add1", {"x": numbers(1, 4)}, parameters={"traceparent": parent_of(4)[1]})
    of_trace(collector, parent_of(4)[0], 3)
    spans = of_trace(collector, parent_of(2)[0], 3)
    assert spans.keys() == {"infer add1", "queue", "batch"}
    assert spans["infer add1"].parent_span_id.hex() == f"{SPAN:016x}"
    assert spans["infer add1"].trace_state == "b=2"
    assert not collector.spans_of(parent_of(3)[0]), "it is not sampled"


def test_requests_do_not_depend_on_the_collector(repository: Path) -> None:
    """Requests are answered regardless, and lost spans are counted."""
    with Collector() as collector:
        more = ("rate=1", "opentelemetry,bsp_max_queue_size=30", "opentelemetry,bsp_max_export_batch_size=3")
        with Server(repository, *options(collector, *more)) as server, server.client(timeout=PATIENCE_S) as client:
            client.infer("add1", {"x": numbers(1, 4)})
            collector.wait(3)
            collector.gate.clear()
            client.infer("add1", {"x": numbers(1, 4)})
            assert collector.hanging.wait(PATIENCE_S)
            for _ in range(30):
                client.infer("add1", {"x": numbers(1, 4)})
            until(client, lambda: counted(client, "dropped") > 0, "a drop")
            collector.gate.set()
            until(client, lambda: counted(client, "exported") + counted(client, "dropped") == 96, "the queue's end")


def test_a_killed_exporter_is_restarted_and_flushed_at_shutdown(repository: Path) -> None:
    with Collector() as collector:
        with Server(repository, *options(collector, "rate=1")) as server, server.client() as client:
            client.infer("add1", {"x": numbers(1, 4)})
            collector.wait(3)
            (pid,) = (
                one for one in children_of(server.pid) if "shmserve.otel" in Path(f"/proc/{one}/cmdline").read_text()
            )
            os.kill(pid, signal.SIGKILL)
            until(client, lambda: "the process that exports traces ended" in server.log, "its end")
            collector.clear()
            until(client, lambda: client.infer("add1", {"x": numbers(1, 4)}) and len(collector.spans) >= 3, "a span")
        received = len(collector.spans)
        assert received % 3 == 0, "the last ones were exported when the server stopped"
        assert "the process that exports traces ended (signal SIGKILL); starting it again in" in server.log


class Service:
    def __init__(self, collector: Collector) -> None:
        self.collector = collector

    def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:
        self.collector.take("/v1/traces", {"content-type": "application/x-protobuf"}, request.SerializeToString())
        return ExportTraceServiceResponse()


def test_a_collector_over_grpc(repository: Path) -> None:
    collector = Collector()
    service = grpc.server(futures.ThreadPoolExecutor(1))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(Service(collector), service)
    collector.port = service.add_insecure_port("127.0.0.1:0")
    service.start()
    try:
        url = f"opentelemetry,url=http://127.0.0.1:{collector.port}"
        words = options(collector, "rate=1", "opentelemetry,protocol=grpc", url)
        with Server(repository, *words) as server, server.client() as client:
            client.infer("add1", {"x": numbers(1, 4)})
            assert [span.name for span in collector.wait(3)] == ["infer add1", "queue", "batch"]
    finally:
        service.stop(None).wait()


def test_a_missing_package_is_named(repository: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['opentelemetry'] = None; from shmserve.broker.main import main; sys.exit(main())"
    words = ["--model-repository", str(repository), "--runtime-dir", str(tmp_path / "run"), "--no-gateway"]
    command = [sys.executable, "-c", code, *words, "--trace-config", "mode=opentelemetry"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert found.returncode == 1
    assert "mode=opentelemetry needs the package opentelemetry-exporter-otlp-proto-http: " in found.stderr
    assert "[otel]'" in found.stderr
