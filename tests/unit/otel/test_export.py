"""The spans of traced requests, as the exporter of OpenTelemetry's SDK encodes them; and the queue in front of a
collector: bounded and counted, whatever the collector does.
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import Queue
from typing import Any

import pytest
from msgspec.structs import replace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from shmserve.otel.export_queue import ExportQueue
from shmserve.otel.records import SpanRecord
from shmserve.otel.settings import OtelSettings, parsed
from shmserve.otel.spans import SpanMaker
from tests.support.cases import cases
from tests.support.observability.otlp import attributes
from tests.support.patience import PATIENCE_S

SEED = bytes(32)
US, OFFSET = 1000, 10**18
REQUEST = SpanRecord(
    7, 0, 7, "", "", "", "", "mlp", 2, "", 3, 1, "OK", 100 * US, 200 * US, (120 * US, 130 * US, 180 * US, 190 * US),
    "mlp_0_0", 44, 8, "full", 0,
)  # fmt: skip
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
INTERNAL, SERVER, ERROR = 1, 2, 2


def encoded(*records: SpanRecord, seed: bytes = SEED) -> list[Any]:
    """The spans as protobuf messages."""
    request = encode_spans(SpanMaker(seed, {"a": "b"}, "1").spans(records, OFFSET))
    (resource,) = request.resource_spans
    assert (
        attributes(resource.resource).items() >= {"service.name": "shmserve", "service.version": "1", "a": "b"}.items()
    )
    (scope,) = resource.scope_spans
    return list(scope.spans)


def times(span: Any) -> tuple[int, int]:
    return (span.start_time_unix_nano - OFFSET) // US, (span.end_time_unix_nano - OFFSET) // US


def test_a_request_has_the_spans_queue_and_batch() -> None:
    request, queue, batch = encoded(replace(REQUEST, id="mine"))
    assert (request.name, request.kind, times(request)) == ("infer mlp", SERVER, (100, 200))
    assert attributes(request) == {
        "shmserve.model": "mlp",
        "shmserve.version": 2,
        "shmserve.rows": 1,
        "shmserve.request.id": "mine",
    }
    assert (queue.name, queue.kind, times(queue)) == ("queue", INTERNAL, (100, 120))
    assert (batch.name, batch.kind, times(batch)) == ("batch", INTERNAL, (120, 190))
    assert attributes(batch) == {
        "shmserve.instance": "mlp_0_0",
        "shmserve.batch": 44,
        "shmserve.batch.rows": 8,
        "shmserve.batch.reason": "full",
    }
    assert [(event.name, (event.time_unix_nano - OFFSET) // US) for event in batch.events] == [
        ("inputs ready", 130),
        ("outputs computed", 180),
    ]
    assert {one.trace_id for one in (request, queue, batch)} == {request.trace_id}
    assert len(request.trace_id) == 16
    assert not request.parent_span_id
    assert queue.parent_span_id == batch.parent_span_id == request.span_id
    assert len({one.span_id for one in (request, queue, batch)}) == 3
    assert [one.status.code for one in (request, queue, batch)] == [0, 0, 0]
    # The trace of a caller, a failure, and a lease.
    spans = encoded(replace(REQUEST, trace=TRACE, caller=CALLER, state="a=1,b=2"))
    assert {(one.trace_id.hex(), one.trace_state) for one in spans} == {(TRACE, "a=1,b=2")}
    assert spans[0].parent_span_id.hex() == CALLER
    (request,) = encoded(replace(REQUEST, code="DEADLINE_EXCEEDED", times=()))
    assert (request.status.code, request.status.message) == (ERROR, "DEADLINE_EXCEEDED")
    assert attributes(request)["error.type"] == "DEADLINE_EXCEEDED"
    leased = attributes(encoded(replace(REQUEST, lease=5, batch=0))[2])
    assert (leased["shmserve.lease"], "shmserve.batch" in leased) == (5, False)


def test_steps_and_calls_are_children_of_their_request_wherever_they_are_made() -> None:
    """Their records arrive first, and may be exported by another process of the server."""
    step = replace(REQUEST, number=9, parent=8, root=7, kind="step", model="a")
    call = replace(REQUEST, number=10, parent=9, root=7, kind="call", model="b")
    outer = replace(REQUEST, number=8, parent=7, root=7, kind="step", model="e", times=(), instance="", batch=0)
    whole = replace(REQUEST, times=(), instance="", batch=0, reason="")
    made = {record.number: encoded(record)[0] for record in (call, step, outer, whole)}
    assert (made[10].parent_span_id, made[9].parent_span_id) == (made[9].span_id, made[8].span_id)
    assert made[8].parent_span_id == made[7].span_id
    assert not made[7].parent_span_id
    assert len({one.trace_id for one in made.values()}) == 1
    assert (made[10].name, made[9].name, made[9].kind) == ("call b", "step a", INTERNAL)
    assert len(encoded(outer)) == 1, "no batch of its own"
    other = encoded(whole, seed=b"\1" * 32)[0]
    assert other.trace_id != made[7].trace_id, "another server has other ids"


def test_a_batch_has_links_to_the_other_requests_in_it() -> None:
    records = [replace(REQUEST, number=number, root=number) for number in (1, 2, 3)]
    other = replace(REQUEST, number=4, root=4, batch=45)
    spans = encoded(*records, other)
    requests = [one for one in spans if one.name.startswith("infer")]
    batches = [one for one in spans if one.name == "batch"]
    for place, batch in enumerate(batches[:3]):
        linked = {(link.trace_id, link.span_id) for link in batch.links}
        assert linked == {(one.trace_id, one.span_id) for one in requests[:3] if one is not requests[place]}
    assert not batches[3].links


def test_spans_with_the_names_of_triton() -> None:
    step = replace(REQUEST, number=8, parent=7, root=7, kind="step", model="a")
    maker = SpanMaker(SEED, {}, "1", "triton")
    spans = maker.spans([REQUEST, step, replace(step, number=9, times=())], OFFSET)
    assert len(spans) == sum(record.spans("triton") for record in (REQUEST, step, replace(step, times=())))
    found = {span.name: span for span in spans[:3]}
    assert list(found) == ["InferRequest", "mlp", "compute"]
    assert found["InferRequest"].parent is None
    assert found["compute"].parent == found["mlp"].context
    assert found["mlp"].parent == found["InferRequest"].context
    assert [span.name for span in spans[3:]] == ["a", "compute", "a"]
    assert spans[3].parent == spans[5].parent == found["mlp"].context
    events = [(event.name, (event.timestamp - OFFSET) // US) for event in found["compute"].events]
    assert events == [
        ("COMPUTE_START", 120),
        ("COMPUTE_INPUT_END", 130),
        ("COMPUTE_OUTPUT_START", 180),
        ("COMPUTE_END", 190),
    ]


@cases(
    ("file=x", "unknown trace setting 'opentelemetry,file=x'"),
    ("url=ftp://host:4318", "expected a URL"),
    ("resource=a", "expected opentelemetry,resource=NAME=VALUE"),
    ("protocol=zipkin", "expected http or grpc"),
    ("bsp_schedule_delay=0", "expected a number from 1"),
    ("bsp_schedule_delay=1.5", "expected a number from 1"),
    ("contexts_per_second=9999999999", "expected a number from 1"),
)
def test_invalid_settings_are_refused(text: str, error: str) -> None:
    assert parsed("resource=service.name=my,own=x") == ("resource", ("service.name", "my,own=x"))
    assert parsed("protocol=grpc") == ("protocol", "grpc")
    with pytest.raises(ValueError, match=error):
        parsed(text)


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
