"""A collector that speaks OTLP over HTTP, with the messages of opentelemetry-proto. It can refuse, hang, or be down."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.support.http_endpoint import Endpoint
from tests.support.patience import PATIENCE_S


class Collector(Endpoint):
    """`spans`: all received spans, in order. While `gate` is clear, exports hang. `status`: status of its responses."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.hanging = threading.Event()
        """Set when an export hangs."""
        self._changed = threading.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        if not self.gate.is_set():
            self.hanging.set()
            self.gate.wait(PATIENCE_S)
        self.take(request.path, {name.lower(): value for name, value in request.headers.items()}, body)
        answer = ExportTraceServiceResponse().SerializeToString()
        request.send_response(self.status)
        request.send_header("Content-Type", "application/x-protobuf")
        request.send_header("Content-Length", str(len(answer)))
        request.end_headers()
        request.wfile.write(answer)

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        assert path == "/v1/traces"
        assert headers["content-type"] == "application/x-protobuf"
        if self.status != 200:
            return
        with self._changed:
            self.headers.append(headers)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(attributes(resource.resource))
                for scope in resource.scope_spans:
                    assert scope.scope.name == "shmserve"
                    self.spans += scope.spans
            self._changed.notify_all()

    def spans_of(self, trace_id: str) -> list[Any]:
        return [span for span in self.spans if trace_id in ("", span.trace_id.hex())]

    def wait(self, count: int, trace_id: str = "") -> list[Any]:
        """Waits until this many spans have been received, of all traces or of one."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.spans_of(trace_id)) >= count, PATIENCE_S), self.spans
            return self.spans_of(trace_id)

    def clear(self) -> None:
        with self._changed:
            self.spans.clear()


def attributes(holder: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in holder.attributes}
