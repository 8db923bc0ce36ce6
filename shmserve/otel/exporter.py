"""The process that exports spans: `python -m shmserve.otel.exporter FD SEED SETTINGS`. It exits when the broker closes
the socket."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import msgspec

from shmserve.otel.export_queue import ExportQueue
from shmserve.otel.records import SpanRecord
from shmserve.otel.settings import OtelSettings
from shmserve.otel.spans import SpanMaker
from shmserve.version import version

PACKET_BYTES = 1 << 18
"""Maximum size of a packet from the broker."""
FINAL_EXPORT_S = 1.5
"""Time to export the remaining spans after the broker has stopped."""
STATUS_S = 0.5
"""Interval at which changed counts are sent to the broker."""
NICE = 5
"""Lowers the priority, so that requests take precedence."""


class _LastError(logging.Handler):
    """Keeps the last message that the SDK logs: the reason why an export failed."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def exporter(settings: OtelSettings) -> Any:
    """The SDK's exporter, which gets certificates, headers and compression from variables OTEL_EXPORTER_OTLP_*."""
    module = import_module(f"opentelemetry.exporter.otlp.proto.{settings.protocol}.trace_exporter")
    return module.OTLPSpanExporter(**({"endpoint": settings.url} if settings.url else {}))


def main(arguments: Sequence[str]) -> int:
    number, seed, text = arguments
    settings = msgspec.json.decode(text, type=OtelSettings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the broker decides when this process exits
    os.nice(NICE)
    errors = _LastError()
    logging.getLogger("opentelemetry").addHandler(errors)
    logging.getLogger("opentelemetry").propagate = False
    maker = SpanMaker(bytes.fromhex(seed), settings.resource, version(), settings.spans)
    otlp_exporter = exporter(settings)

    def export(records: Sequence[SpanRecord]) -> str:
        errors.text = ""
        offset = time.time_ns() - time.monotonic_ns()
        result = otlp_exporter.export(maker.spans(records, offset))
        return "" if result.name == "SUCCESS" else errors.text or "unknown reason"

    def report(level: str, text: str) -> None:
        print(f"{level}: {text}", file=sys.stderr, flush=True)

    queue = ExportQueue(settings, export, report)
    queue.start()
    with socket.socket(fileno=int(number)) as link:
        _serve(link, queue)
    os._exit(0 if queue.close(FINAL_EXPORT_S) else 1)  # a hanging export must not keep the process alive


def _serve(link: socket.socket, queue: ExportQueue) -> None:
    """Queues the broker's records until it closes the socket."""
    decode = msgspec.msgpack.Decoder(list[SpanRecord]).decode
    last_status = b""
    link.settimeout(STATUS_S)
    while True:
        try:
            packet = link.recv(PACKET_BYTES)
        except TimeoutError:
            packet = None
        if packet:
            queue.put(decode(packet))
        status = msgspec.msgpack.encode(queue.status)
        if status != last_status:
            last_status = status
            with contextlib.suppress(OSError):  # the broker has exited, which the next read detects
                link.send(status)
        if packet == b"":
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
