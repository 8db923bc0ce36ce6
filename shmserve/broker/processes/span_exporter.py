"""The process that exports spans for OpenTelemetry: sends it the traces, starts it again if it ends, and counts.

Invariant: the broker never waits for it. What its socket does not take is dropped and counted.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
from collections.abc import Callable
from typing import Any

import msgspec

from shmserve.broker.observability.log_throttle import Rate
from shmserve.broker.observability.logs import log_record
from shmserve.broker.observability.metric_definitions import Page
from shmserve.broker.processes import children
from shmserve.core.effects import Traced
from shmserve.core.models.lifecycle import pause_ns
from shmserve.otel.records import ExportStatus, SpanRecord
from shmserve.otel.settings import OtelSettings
from shmserve.paths import python

MODULE = "shmserve.otel.main"
FLUSH_S = 0.1
"""How long traces are collected before they are sent."""
PACKET_RECORDS = 100
"""The most traces in a packet, so that it fits into 256 KiB."""
BUFFER_BYTES = 1 << 20
PAUSES_NS = 1_000_000_000, 60_000_000_000
"""Pause before the second consecutive restart, and the longest pause."""
STEADY_S = 60.0
"""Uptime after which the restart counter is reset."""
END_S = 2.0
"""How long the process may take to export the rest when the server stops."""
TEXT = 256
"""The most characters of a text in a record."""
_LEVELS = {level: level for level in ("info", "warning", "error")}
_PASSED_ON = ("OTEL_", "SSL_", "REQUESTS_CA_", "GRPC_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""Prefixes of environment variables for the process, besides those of every child."""


class SpanExporter:
    """`over_limit()`: how many requests were not traced because of the limit for trace contexts. `pids`: gets the pid
    of the process, which is reaped here."""

    def __init__(
        self, loop: Any, settings: OtelSettings, over_limit: Callable[[], int], pids: set[int], rate: Rate
    ) -> None:
        self._loop = loop
        self._settings = msgspec.json.encode(settings).decode()
        self._over_limit = over_limit
        self._pids = pids
        self._rate = rate
        self._seed = secrets.token_hex(32)
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._output: children.Output | None = None
        self._link: socket.socket | None = None
        self._records: list[SpanRecord] = []
        self._flush_timer: Any = None
        self._start_timer: Any = None
        self._began = 0.0
        self._deaths = 0
        self._counted = ExportStatus()
        """Of the processes that have ended, and what was dropped here."""
        self._status = ExportStatus()
        """Of the process that runs."""

    # ------------------------------------------------------------------------------------ the process

    def start(self) -> None:
        self._start_timer = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = children.Output(self._loop, _LEVELS, self._log, self._rate)
        try:
            ours.setblocking(False)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            process = subprocess.Popen(
                [*python(), "-m", MODULE, str(theirs.fileno()), self._seed, self._settings],
                stdin=subprocess.DEVNULL,
                stdout=output.write_end,
                stderr=output.write_end,
                pass_fds=[theirs.fileno()],
                env=children.environment(*_PASSED_ON),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            output.close()
            self._restart(f"cannot be started: {error.strerror}")
            return
        finally:
            theirs.close()
            os.close(output.write_end)
        self._process, self._link, self._output = process, ours, output
        self._pidfd = os.pidfd_open(process.pid)
        self._pids.add(process.pid)
        self._began = self._loop.time()
        self._loop.add_reader(self._pidfd, self._ended)
        self._loop.add_reader(ours.fileno(), self._read)

    def _log(self, level: str, text: str) -> None:
        log_record(level, f"[traces] {text}", None)

    def _read(self) -> None:
        assert self._link is not None
        try:
            packet = self._link.recv(256)
        except OSError:
            return
        if packet:
            self._status = msgspec.msgpack.decode(packet, type=ExportStatus)
        else:  # it is about to end
            self._loop.remove_reader(self._link.fileno())

    def _ended(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        self._drop()
        if self._loop.time() - self._began > STEADY_S:
            self._deaths = 0
        self._restart(f"ended ({children.ended_with(code)})")

    def _restart(self, why: str) -> None:
        self._deaths += 1
        pause = pause_ns(self._deaths, *PAUSES_NS) / 1e9
        text = f"the process that exports traces {why}; starting it again in {pause:g} s"
        log_record("error", text, None)
        self._start_timer = self._loop.call_later(pause, self.start)

    def _drop(self) -> None:
        """Forgets the process, which has ended, and adds its counts."""
        assert self._process is not None
        assert self._link is not None
        assert self._output is not None
        self._output.finish()
        self._output.close()
        self._loop.remove_reader(self._link.fileno())
        self._link.close()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pids.discard(self._process.pid)
        self._process = self._link = self._output = None
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
            try:
                if self._link is None:
                    raise BlockingIOError
                self._link.send(msgspec.msgpack.encode(piece))
            except OSError:  # it is behind, or has ended
                self._counted.dropped += sum(record.spans for record in piece)

    def metrics(self) -> str:
        """In Prometheus format."""
        page = Page()
        for name in ExportStatus.__struct_fields__:
            count = getattr(self._counted, name) + getattr(self._status, name)
            page.add("shmserve_trace_spans_total", count, f'result="{name}"')
        page.add("shmserve_trace_contexts_over_limit_total", self._over_limit(), "")
        return page.text()

    def close(self) -> None:
        """Sends what is left, and gives the process a moment to export it."""
        for timer in (self._flush_timer, self._start_timer):
            if timer is not None:
                timer.cancel()
        self._flush()
        if self._process is None:
            return
        assert self._link is not None
        self._link.shutdown(socket.SHUT_WR)
        if not select.select([self._pidfd], [], [], END_S)[0]:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._process.wait()
        self._drop()


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
