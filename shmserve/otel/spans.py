"""Creates the spans of a traced request, as objects of OpenTelemetry's SDK.

A request is a span with two children: `queue` while it waits, and `batch` while its batch runs. Steps of ensembles and
calls of models are also requests, and children of the request that caused them. The batch has a link to each other
traced request in it.

IDs are hashes of a seed and the number of the trace. Parts of a trace that arrive at different times, or at another
process after a restart, therefore belong together without a table of open traces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from shmserve.otel.records import SpanRecord

SERVICE = "shmserve"
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)
_REQUEST, _QUEUE, _BATCH, _TRACE, _ROOT = b"r", b"q", b"b", b"t", b"c"
_COMPUTE = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
"""Triton's names of `SpanRecord.times`."""


class SpanMaker:
    """`seed` is the same for all exporter processes of a server. `names`: see `OtelSettings.spans`."""

    def __init__(self, seed: bytes, resource: Mapping[str, str], version: str, names: str = "shmserve") -> None:
        self._seed = seed
        self._names = names
        self._resource = Resource.create({"service.name": SERVICE, "service.version": version, **resource})
        self._scope = InstrumentationScope(SERVICE, version)

    def spans(self, records: Sequence[SpanRecord], offset: int) -> list[ReadableSpan]:
        """The spans of these records. `offset`: from the monotonic clock to the time since 1970, in ns."""
        if self._names == "triton":
            return [span for record in records for span in self._triton_spans(record, offset)]
        batches: dict[tuple[str, int, int], list[SpanRecord]] = defaultdict(list)
        for record in records:
            if record.batch and record.times:
                batches[record.instance, record.batch, record.times[0]].append(record)
        results: list[ReadableSpan] = []
        for record in records:
            others = batches[record.instance, record.batch, record.times[0]] if record.batch and record.times else ()
            results += self._of(record, others, offset)
        return results

    def _of(self, record: SpanRecord, batch: Iterable[SpanRecord], offset: int) -> Iterator[ReadableSpan]:
        own = self._context(record, _REQUEST)
        code = "" if record.code == "OK" else record.code
        status = Status(StatusCode.ERROR, code) if code else _UNSET
        attributes: dict[str, Any] = {
            "shmserve.model": record.model,
            "shmserve.version": record.version,
            "shmserve.rows": record.rows,
        }
        if code:
            attributes["error.type"] = code
        if record.id:
            attributes["shmserve.request.id"] = record.id
        kind = SpanKind.INTERNAL if record.parent else SpanKind.SERVER
        begin, end = record.arrived + offset, record.answered + offset
        name = f"{record.kind or 'infer'} {record.model}"
        yield self._span(name, own, self._parent(record), kind, begin, end, attributes, status)
        if not record.times:
            return
        taken, ready, computed, placed = (time + offset for time in record.times)
        inner, queued = SpanKind.INTERNAL, self._context(record, _QUEUE)
        yield self._span("queue", queued, own, inner, begin, max(begin, taken), {})
        attributes = {
            "shmserve.instance": record.instance,
            "shmserve.batch.rows": record.batch_rows,
            "shmserve.batch.reason": record.reason,
        }
        if record.batch:
            attributes["shmserve.batch"] = record.batch
        if record.lease:
            attributes["shmserve.lease"] = record.lease
        events = (Event("inputs ready", timestamp=ready), Event("outputs computed", timestamp=computed))
        links = [Link(self._context(other, _REQUEST)) for other in batch if other is not record]
        context = self._context(record, _BATCH)
        yield self._span("batch", context, own, inner, taken, placed, attributes, events=events, links=links)

    def _triton_spans(self, record: SpanRecord, offset: int) -> Iterator[ReadableSpan]:
        """Those that Triton makes: `InferRequest` for the request of a client, and in it a span with the name of the
        model, with `compute` if a batch ran. Times are events."""
        begin, end = record.arrived + offset, record.answered + offset
        own, parent, inner = self._context(record, _REQUEST), self._parent(record), SpanKind.INTERNAL
        status = _UNSET if record.code == "OK" else Status(StatusCode.ERROR, record.code)
        if not record.parent:
            done, root = Event("INFER_RESPONSE_COMPLETE", timestamp=end), self._context(record, _ROOT)
            yield self._span("InferRequest", root, parent, SpanKind.SERVER, begin, end, {}, status, [done])
            parent = root
        times = (("REQUEST_START", begin), ("QUEUE_START", begin), ("REQUEST_END", end))
        events = [Event(name, timestamp=at) for name, at in times]
        attributes = {"triton.model_name": record.model, "triton.model_version": record.version}
        if record.id:
            attributes["triton.request_id"] = record.id
        yield self._span(record.model, own, parent, inner, begin, end, attributes, status, events)
        if record.times:
            events = [Event(name, timestamp=at + offset) for name, at in zip(_COMPUTE, record.times, strict=True)]
            context, begin, end = self._context(record, _BATCH), record.times[0] + offset, record.times[-1] + offset
            yield self._span("compute", context, own, inner, begin, end, {}, events=events)

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        begin: int,
        end: int,
        attributes: Mapping[str, Any],
        status: Status = _UNSET,
        events: Sequence[Event] = (),
        links: Sequence[Link] = (),
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            events=events,
            links=links,
            kind=kind,
            status=status,
            start_time=begin,
            end_time=end,
            instrumentation_scope=self._scope,
        )

    def _context(self, record: SpanRecord, part: bytes) -> SpanContext:
        span = self._hash(part, record.number, 8)
        return SpanContext(self._trace(record), span, False, _SAMPLED, _state(record))

    def _parent(self, record: SpanRecord) -> SpanContext | None:
        """The context of the request that caused it, or the one that its client sent."""
        if record.parent:
            span, remote = self._hash(_REQUEST, record.parent, 8), False
        elif record.caller:
            span, remote = int(record.caller, 16), True
        else:
            return None
        return SpanContext(self._trace(record), span, remote, _SAMPLED, _state(record))

    def _trace(self, record: SpanRecord) -> int:
        return int(record.trace, 16) if record.trace else self._hash(_TRACE, record.root, 16)

    def _hash(self, part: bytes, number: int, size: int) -> int:
        """An ID from the hash. Returns 1 instead of 0, which is invalid."""
        result = blake2b(part + number.to_bytes(8, "big"), digest_size=size, key=self._seed).digest()
        return int.from_bytes(result, "big") or 1


def _state(record: SpanRecord) -> TraceState | None:
    return TraceState.from_header([record.state]) if record.state else None
