"""The stand-in for the OpenTelemetry collector of L0_trace: receives traces by OTLP over HTTP, on the port of the
suite's configuration, and writes a line of OTLP's JSON when no more spans have arrived for a moment.
"""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PORT = 10_000
FILE = Path("collected_traces.json")
QUIET_S = 2.0
"""Longer than the time between two exports of the spans of one request."""


class Collector(HTTPServer):
    timeout = QUIET_S

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", PORT), Handler)
        self._received = ExportTraceServiceRequest()

    def receive(self, data: bytes) -> None:
        for sent in ExportTraceServiceRequest.FromString(data).resource_spans:
            same = [known for known in self._received.resource_spans if known.resource == sent.resource]
            if same:
                same[0].scope_spans[0].spans.extend(span for scope in sent.scope_spans for span in scope.spans)
            else:
                self._received.resource_spans.append(sent)

    def handle_timeout(self) -> None:
        """Called when nothing has arrived for a while."""
        if self._received.resource_spans:
            with FILE.open("a") as file:
                file.write(json.dumps(document(self._received)) + "\n")
            self._received.Clear()


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.receive(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


def document(request: ExportTraceServiceRequest) -> Any:
    """OTLP's JSON, which differs from that of protobuf: identifiers are hexadecimal, and never left out."""
    found = MessageToDict(request)
    for resource, entry in zip(request.resource_spans, found["resourceSpans"], strict=True):
        for scope, spans in zip(resource.scope_spans, entry["scopeSpans"], strict=True):
            for span, fields in zip(scope.spans, spans["spans"], strict=True):
                fields["traceId"], fields["spanId"] = span.trace_id.hex(), span.span_id.hex()
                fields["parentSpanId"] = span.parent_span_id.hex()
    return found


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Collector() as collector:
        FILE.write_text("")  # that of the last test
        while True:
            collector.handle_request()


if __name__ == "__main__":
    main()
