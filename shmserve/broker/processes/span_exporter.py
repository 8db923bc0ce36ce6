"""The broker's side of the process that exports spans for OpenTelemetry: sends it traces, and counts the spans.

Invariant: the broker never waits for the process. Traces that its socket does not accept are dropped and counted.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from shmserve.broker.observability.logs import log_record
from shmserve.broker.observability.metric_definitions import Page
from shmserve.broker.processes.helper_process import HelperKind, HelperProcess
from shmserve.core.effects import Traced
from shmserve.otel.records import ExportStatus, SpanRecord
from shmserve.otel.settings import OtelSettings

FLUSH_S = 0.1
"""How long traces are buffered before they are sent."""
PACKET_RECORDS = 100
"""Maximum number of traces in a packet, so that it fits into 256 KiB."""
BUFFER_BYTES = 1 << 20
END_S = 2.0
"""Time for the process to export the remaining spans when the server stops."""
TEXT = 256
"""Maximum number of characters of a request ID."""
_KIND = HelperKind(
    "shmserve.otel.exporter",
    "traces",
    "exports traces",
    socket.SOCK_SEQPACKET,
    ("OTEL_", "SSL_", "REQUESTS_CA_", "GRPC_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)


class SpanExporter:
    """`over_limit()`: number of requests that were not traced because of the limit on trace contexts. `pids`: see
    `HelperProcess`."""

    def __init__(self, loop: Any, settings: OtelSettings, over_limit: Callable[[], int], pids: set[int]) -> None:
        self._loop = loop
        self._over_limit = over_limit
        self._names = settings.spans
        arguments = secrets.token_hex(32), msgspec.json.encode(settings).decode()
        self._process = HelperProcess(loop, _KIND, pids, arguments, self._started, self._read, self._ended)
        self.start = self._process.start
        self._records: list[SpanRecord] = []
        self._flush_timer: Any = None
        self._counted = ExportStatus()
        """Counts of the processes that have exited, and of spans dropped here."""
        self._status = ExportStatus()
        """Counts of the running process."""

    # ------------------------------------------------------------------------------------ the process

    def _started(self) -> None:
        assert self._process.link is not None
        self._process.link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)

    def _read(self) -> None:
        assert self._process.link is not None
        try:
            packet = self._process.link.recv(256)
        except OSError:
            return
        if packet:
            self._status = msgspec.msgpack.decode(packet, type=ExportStatus)
        else:
            self._process.stop_reading()

    def _ended(self) -> None:
        """Keeps the counts of a process that has exited."""
        for name in ExportStatus.__struct_fields__:
            setattr(self._counted, name, getattr(self._counted, name) + getattr(self._status, name))
        self._status = ExportStatus()

    # ------------------------------------------------------------------------------------ traces

    def write(self, traced: Traced) -> None:
        if traced.log is not None:
            log_record(traced.log.level, traced.log.text, traced.log.fields)
        self._records.append(_record(traced))
        if self._flush_timer is None:
            self._flush_timer = self._loop.call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        records, self._records = self._records, []
        for first in range(0, len(records), PACKET_RECORDS):
            piece = records[first : first + PACKET_RECORDS]
            if not self._send(piece):
                self._counted.dropped += sum(record.spans(self._names) for record in piece)

    def _send(self, records: list[SpanRecord]) -> bool:
        """Returns False if the process is behind or has exited."""
        if self._process.link is None:
            return False
        try:
            self._process.link.send(msgspec.msgpack.encode(records))
        except OSError:
            return False
        return True

    def metrics(self) -> str:
        """Metrics in Prometheus format."""
        page = Page()
        for name in ExportStatus.__struct_fields__:
            count = getattr(self._counted, name) + getattr(self._status, name)
            page.add("shmserve_trace_spans_total", count, f'result="{name}"')
        page.add("shmserve_trace_contexts_over_limit_total", self._over_limit(), "")
        return page.text()

    def close(self) -> None:
        """Sends the remaining traces, and gives the process END_S to export them."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._flush()
        self._process.close(END_S)


def _record(traced: Traced) -> SpanRecord:
    fields, context = traced.fields, traced.context
    return SpanRecord(
        traced.number,
        traced.parent,
        traced.root,
        context.trace if context is not None else "",
        context.span if context is not None else "",
        context.state if context is not None else "",
        fields.get("kind", ""),
        fields["model"],
        fields["version"],
        fields.get("id", "")[:TEXT],
        fields["client"],
        fields["rows"],
        fields["code"],
        traced.arrived,
        traced.answered,
        traced.times,
        fields.get("instance", ""),
        fields.get("batch", 0),
        fields.get("batch_rows", 0),
        fields.get("reason", ""),
        fields.get("lease", 0),
    )
