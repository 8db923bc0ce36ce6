"""A collector that speaks OTLP over HTTP, with the messages of opentelemetry-proto. It can refuse, hang, or be down."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PATIENCE_S = 60.0


class Collector:
    """`spans`: all received spans, in order. While `gate` is clear, exports hang. `status`: status of its responses."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.status = 200
        self.hanging = threading.Event()
        """Set when an export hangs."""
        self._changed = threading.Condition()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"

    def listen(self) -> None:
        """Listens on the same port as before."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if not collector.gate.is_set():
                    collector.hanging.set()
                    collector.gate.wait(PATIENCE_S)
                collector.take(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(collector.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = False
        self._server.block_on_close = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        """Closes the socket: from now on connections are refused."""
        if self._server is not None:
            self.gate.set()
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self._server = None

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
    """The attributes of a span, resource or event."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in holder.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    collector.listen()
    try:
        yield collector
    finally:
        collector.close()
