"""The queue in front of a collector: bounded and counted, whatever the collector does."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Queue
from typing import Any

import pytest
from msgspec.structs import replace

from shmserve.otel.export_queue import ExportQueue
from shmserve.otel.records import SpanRecord
from shmserve.otel.settings import OtelSettings
from tests.support.patience import PATIENCE_S
from tests.unit.otel.test_spans import REQUEST

SHORT = replace(REQUEST, times=())
"""One span; `REQUEST` has three."""


class Collecting:
    """An exporter in which each export waits for `answers`."""

    def __init__(self, **settings: Any) -> None:
        self.begun: Queue[list[int]] = Queue()
        """The numbers of the requests of each export."""
        self.answers: Queue[str | Exception] = Queue()
        self.reports: list[tuple[str, str]] = []
        self.queue = ExportQueue(
            OtelSettings(**{"bsp_schedule_delay": 1} | settings), self._export, lambda *said: self.reports.append(said)
        )

    def _export(self, records: Sequence[SpanRecord]) -> str:
        self.begun.put([record.number for record in records])
        answer = self.answers.get(timeout=PATIENCE_S)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def put(self, *numbers: int, like: SpanRecord = SHORT) -> None:
        self.queue.put([replace(like, number=number) for number in numbers])

    def next(self) -> list[int]:
        return self.begun.get(timeout=PATIENCE_S)

    def counts(self) -> tuple[int, int, int]:
        status = self.queue.status
        return status.exported, status.failed, status.dropped


def test_records_are_exported_in_order_and_in_pieces() -> None:
    made = Collecting(bsp_max_export_batch_size=4)
    made.put(1, 2, like=REQUEST)
    made.put(3, 4, 5, 6, 7)
    made.queue.start()
    for expected in ([1], [2, 3], [4, 5, 6, 7]):  # at most 4 spans
        assert made.next() == expected
        made.answers.put("")
    assert made.queue.close(PATIENCE_S)
    assert made.counts() == (11, 0, 0)
    assert made.begun.empty()


def test_a_collector_that_hangs_leads_to_counted_drops() -> None:
    made = Collecting(bsp_max_queue_size=5)
    made.queue.start()
    made.put(1)
    assert made.next() == [1]  # which hangs
    made.put(2, 3, like=REQUEST)  # the second one does not fit
    made.put(4, 5, 6)
    assert made.counts() == (0, 0, 4)
    made.answers.put("")
    assert made.next() == [2, 4, 5]
    made.answers.put("")
    assert made.queue.close(PATIENCE_S)
    assert made.counts() == (6, 0, 4)
    assert made.reports == []


def test_an_outage_is_reported_once_and_so_is_its_end() -> None:
    made = Collecting(bsp_max_export_batch_size=1)
    made.queue.start()
    made.put(1, 2, 3, 4, 5)
    answers: list[str | Exception] = ["", OSError("refused"), "busy", "", ""]
    for number, answer in enumerate(answers, 1):
        assert made.next() == [number]
        made.answers.put(answer)
    assert made.queue.close(PATIENCE_S)
    assert made.counts() == (3, 2, 0)
    assert made.reports == [
        ("warning", "the collector does not accept spans: refused; counting lost spans"),
        ("info", "the collector accepts spans again; 2 were lost"),
    ]


@pytest.mark.parametrize("answers", [True, False])
def test_the_rest_is_exported_at_the_end_unless_the_collector_hangs(answers: bool) -> None:
    made = Collecting(bsp_schedule_delay=10**6)
    made.queue.start()
    made.put(1)
    if answers:
        made.answers.put("")
    assert made.queue.close(PATIENCE_S if answers else 0.01) is answers
    assert made.next() == [1]
    made.answers.put("")
    assert made.queue.close(PATIENCE_S)
    assert made.counts() == (1, 0, 0)
