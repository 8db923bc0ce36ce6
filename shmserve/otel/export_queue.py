"""The queue of records to export, and the thread that exports them.

Invariant: the queue has at most `bsp_max_queue_size` spans, regardless of how long the collector takes. Spans beyond
that are dropped and counted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from shmserve.otel.records import ExportStatus, SpanRecord
from shmserve.otel.settings import OtelSettings

Export = Callable[[Sequence[SpanRecord]], str]
"""Exports the spans of these records. Returns why the collector did not accept them; "": it did."""


class ExportQueue:
    """`report(level, text)` is called when exports begin to fail, and when they succeed again."""

    def __init__(self, settings: OtelSettings, export: Export, report: Callable[[str, str], None]) -> None:
        self._names = settings.spans
        self._max_spans = settings.bsp_max_queue_size
        self._delay_s = settings.bsp_schedule_delay / 1000
        self._batch_spans = settings.bsp_max_export_batch_size
        self._export = export
        self._report = report
        self._records: deque[SpanRecord] = deque()
        self._spans = 0
        """Number of spans of the queued records."""
        self._changed = threading.Condition()
        self._closing = False
        self._failing_since = 0
        """Number of failed and dropped spans when the current outage began; only valid while `_is_failing`."""
        self._is_failing = False
        self.status = ExportStatus()
        self._thread = threading.Thread(target=self._run, name="export", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, records: Sequence[SpanRecord]) -> None:
        with self._changed:
            for record in records:
                if self._spans + record.spans(self._names) > self._max_spans:
                    self.status.dropped += record.spans(self._names)
                    continue
                self._records.append(record)
                self._spans += record.spans(self._names)
            if self._spans >= self._batch_spans:
                self._changed.notify()

    def close(self, timeout: float) -> bool:
        """Exports the remaining records. False if that takes longer than `timeout`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._spans >= self._batch_spans, self._delay_s)
                records = self._take()
                if not records and self._closing:
                    return
            if records:
                self._send(records)

    def _take(self) -> list[SpanRecord]:
        """Takes the oldest records: at least one, up to the maximum size of an export."""
        taken: list[SpanRecord] = []
        count = 0
        while self._records and (not taken or count + self._records[0].spans(self._names) <= self._batch_spans):
            taken.append(self._records.popleft())
            count += taken[-1].spans(self._names)
        self._spans -= count
        return taken

    def _send(self, records: Sequence[SpanRecord]) -> None:
        count = sum(record.spans(self._names) for record in records)
        status = self.status
        try:
            failure = self._export(records)
        except Exception as error:  # of the SDK: it may be any
            failure = str(error) or type(error).__name__
        if not failure:
            status.exported += count
            if self._is_failing:
                self._is_failing = False
                lost = status.failed + status.dropped - self._failing_since
                self._report("info", f"the collector accepts spans again; {lost:,} were lost")
            return
        if not self._is_failing:
            self._is_failing = True
            self._failing_since = status.failed + status.dropped
            self._report("warning", f"the collector does not accept spans: {failure}; counting lost spans")
        status.failed += count
