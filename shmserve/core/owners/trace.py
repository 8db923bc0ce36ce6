"""Traces of single requests: one log entry for each request that has the parameter `trace_id`, and one `Traced` effect
for each request that is sampled by the operator's trace settings. A request may have both.

Invariant: while `active` and `samples` are empty, the core calls nothing in this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from shmserve.core.effects import Log, Traced
from shmserve.core.limits import SECOND
from shmserve.core.records import Lease, Request, Version
from shmserve.core.service.form import Reason
from shmserve.core.states import RequestState
from shmserve.protocol.messages import Tensor
from shmserve.protocol.trace_context import TRACE_PARENT, TRACE_STATE, TraceContext, parsed
from shmserve.protocol.worker_messages import LeasedBatch

PARAMETER = "trace_id"
ID_LENGTH = 128
PER_SECOND = 100
"""Limit of traces by `trace_id`: clients with the role infer must not be able to fill the disk with logs."""


class Sample(Struct):
    """The sampling of a model: every `rate`-th request is traced; 0: only those with a sampled trace context.
    `remaining` is the number of traces that may still be taken, negative without a limit."""

    rate: int
    remaining: int = -1
    seen: int = 0
    timestamps: bool = True
    tensors: bool = False

    def take(self, count: int) -> range:
        """Counts the next `count` requests. Returns the indices of those to trace."""
        if not self.rate:
            return range(0)
        due = range(max(0, self.rate - self.seen - 1), count if self.remaining else 0, self.rate)
        if self.remaining > 0:
            due = due[: self.remaining]
            self.remaining -= len(due)
        self.seen = count - 1 - due[-1] if due else self.seen + count
        return due

    def take_now(self) -> bool:
        """Takes a request regardless of the rate. False: no traces are left."""
        if self.remaining > 0:
            self.remaining -= 1
            return True
        return self.remaining < 0


class PerSecond(Struct):
    """Counts events for a limit per second."""

    _until: int = 0
    """When the current second ends."""
    _count: int = 0

    def count(self, now: int) -> int:
        """Counts an event. Returns how many there were in this second."""
        if now >= self._until:
            self._until, self._count = now + SECOND, 0
        self._count += 1
        return self._count


class _ActiveTrace(Struct):
    """The trace of an unanswered request. `id`: its `trace_id`, or "". `sample`: None if it is not sampled; the fields
    below are then unused. They are those of `effects.Traced`."""

    id: str
    sample: Sample | None
    model: str = ""
    number: int = 0
    parent: int = 0
    root: int = 0
    context: TraceContext | None = None
    outputs: tuple[Tensor, ...] = ()


class Traces:
    def __init__(self, contexts_per_second: int = 0) -> None:
        self.active: dict[int, _ActiveTrace] = {}
        """Request number -> its trace, until the request is answered."""
        self.samples: dict[str, Sample] = {}
        """Model -> its sample; "" is the default for the others. Empty: sampling is off. Always the same table."""
        self.contexts_per_second = contexts_per_second
        self.contexts_over_limit = 0
        """How many requests with such a context exceeded the limit."""
        self._contexts = PerSecond()
        self._by_id = PerSecond()
        self._numbers = 0

    def change_sampling(self, samples: Mapping[str, Sample]) -> None:
        """Samples like this from now on. A sample that is already in the table continues."""
        self.samples.clear()
        self.samples.update(samples)

    @property
    def with_tensors(self) -> bool:
        return any(sample.tensors for sample in self.samples.values())

    def sample_due(self, version: Version, requests: Sequence[Request]) -> None:
        """Traces those of the requests that are due for sampling. Called for all client requests while `samples` is
        not empty."""
        sample = self._sample_of(version)
        if sample is None:
            return
        if self.contexts_per_second and len(requests) == 1 and requests[0].options is not None:
            context = self._sampled_context(requests[0])
            if context is not None and sample.take_now():
                self._begin_sampled(requests[0], sample, context)
                return
        for index in sample.take(len(requests)):
            self._begin_sampled(requests[index], sample)

    def _sampled_context(self, request: Request) -> TraceContext | None:
        """The request's trace context, if it is sampled and the limit permits."""
        assert request.options is not None
        parameters = request.options.parameters
        if TRACE_PARENT not in parameters:
            return None
        context = parsed(parameters[TRACE_PARENT], parameters.get(TRACE_STATE, ""))
        if context is None or not context.sampled:
            return None
        if self._contexts.count(request.arrived) > self.contexts_per_second:
            self.contexts_over_limit += 1
            return None
        return context

    def _begin_sampled(self, request: Request, sample: Sample, context: TraceContext | None = None) -> None:
        number = self._next_number()
        trace = _ActiveTrace("", sample, request.version.model, number, root=number, context=context)
        self._begin(request, trace)

    def sample_leased(self, lease: Lease, batches: Sequence[LeasedBatch], reason: Reason) -> list[Traced]:
        """Like `sample_due`, for leased requests that have been answered."""
        sample = self._sample_of(lease.version)
        if sample is None:
            return []
        requests = [(batch, number) for batch in batches for number in range(batch[-1])]
        return [self._of_leased(lease, *requests[index], sample, reason) for index in sample.take(len(requests))]

    def _of_leased(self, lease: Lease, batch: LeasedBatch, number: int, sample: Sample, reason: Reason) -> Traced:
        """`number`: which request of the batch; the log counts those that failed, and these are taken as the first."""
        arrived, taken, ready, computed, placed, rows, failed, count = batch
        version = lease.version
        fields: dict[str, Any] = {
            "trace_id": "",
            "model": version.model,
            "version": version.number,
            "client": lease.client.number,
            "rows": rows,
            "code": "INTERNAL" if number < failed else "OK",
            "answered_us": (placed - arrived) // 1000,
            "lease": lease.number,
            "instance": lease.instance.spec.name,
            "batch_rows": max(rows, 1) * count,
            "reason": reason.value,
        }
        times = (taken, ready, computed, placed)
        fields |= _durations(arrived, times)
        root = self._next_number()
        return Traced(
            fields,
            arrived,
            times,
            placed,
            None,
            timestamps=sample.timestamps,
            number=root,
            model=version.model,
            root=root,
        )

    def _sample_of(self, version: Version) -> Sample | None:
        return self.samples.get(version.model) or self.samples.get("")

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _begin(self, request: Request, trace: _ActiveTrace) -> None:
        self.active[request.number] = trace
        request.special = True  # so that its response takes the path that ends the trace

    def sample_child(self, request: Request, parent: Request) -> None:
        """Traces `request`, a step of the ensemble `parent` or a call that a model makes for `parent`, if `parent` is
        sampled. The trace settings of its own model do not matter."""
        trace = self.active.get(parent.number)
        if trace is not None and trace.sample is not None:
            number = self._next_number()
            child = _ActiveTrace("", trace.sample, trace.model, number, trace.number, trace.root, trace.context)
            self._begin(request, child)

    def begin_by_id(self, request: Request, now: int) -> Log | None:
        """Traces a request with the parameter `trace_id`. Returns a warning for the first one over the limit."""
        assert request.options is not None
        count = self._by_id.count(now)
        if count <= PER_SECOND:
            trace_id = str(request.options.parameters[PARAMETER])[:ID_LENGTH]
            sampled = self.active.get(request.number)
            if sampled is not None:
                sampled.id = trace_id
            else:
                self._begin(request, _ActiveTrace(trace_id, None))
        elif count == PER_SECOND + 1:
            return Log(
                "warning", f"more than {PER_SECOND} requests in a second have a {PARAMETER}; the rest are not traced"
            )
        return None

    def record_outputs(self, request: Request, outputs: tuple[Tensor, ...]) -> None:
        """Records the outputs of a response, if the sample includes tensors. A client may free the shared memory of
        earlier responses at any time, so only their inline data is kept."""
        trace = self.active.get(request.number)
        if trace is not None and trace.sample is not None and trace.sample.tensors:
            trace.outputs = (*_inline(trace.outputs), *outputs)

    def forget(self, request: Request) -> None:
        """The request ends without a response."""
        self.active.pop(request.number, None)

    def end(self, request: Request, code: str, now: int) -> Log | Traced | None:
        """Ends the trace and returns its effect, or None if the request is not traced. `code` "": it succeeded."""
        trace = self.active.pop(request.number, None)
        if trace is None:
            return None
        version = request.version
        fields: dict[str, Any] = {
            "trace_id": trace.id,
            "model": version.model,
            "version": version.number,
            "client": request.client.number,
            "request": request.client_number,
            "rows": request.rows,
            "code": code or "OK",
            "answered_us": (now - request.arrived) // 1000,
        }
        if request.options is not None and request.options.id:
            fields["id"] = request.options.id
        if trace.parent:
            fields["kind"] = request.requester.kind
        fields |= _at_worker(request)
        log, sample = None, trace.sample
        if trace.id or sample is None:
            shown = ", ".join(f"{name} {value}" for name, value in fields.items() if name not in ("trace_id", "code"))
            log = Log("info", f"trace {trace.id}: {fields['code']}, {shown}", fields)
        if sample is None:
            return log
        times = request.batch.times if request.batch is not None else ()
        traced = Traced(
            fields,
            request.arrived,
            times,
            now,
            log,
            timestamps=sample.timestamps,
            number=trace.number,
            parent=trace.parent,
            model=trace.model,
            root=trace.root,
            context=trace.context,
        )
        if sample.tensors:
            # A request whose response waits for earlier ones (preserve_ordering) has already released its inputs.
            inputs = _inline(request.inputs) if request.state is RequestState.DONE else request.inputs
            traced.tensors = inputs, trace.outputs
        return traced


def _inline(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors without handles: data in shared memory is left out."""
    return tuple(tensor if isinstance(tensor.data, bytes) else replace(tensor, data=()) for tensor in tensors)


def _at_worker(request: Request) -> dict[str, Any]:
    """The fields about instance and batch. Times are known only if the batch had completed before the response."""
    instance, batch = request.instance, request.batch
    if instance is None or batch is None:
        return {}
    number = batch.number or next(iter(batch.numbers), 0)
    fields: dict[str, Any] = {
        "instance": instance.spec.name,
        "batch": number,
        "batch_rows": batch.rows,
        "reason": batch.reason.value,
    }
    if batch.times:
        fields |= _durations(request.arrived, batch.times)
    return fields


def _durations(arrived: int, times: tuple[int, ...]) -> dict[str, int]:
    taken, ready, computed, placed = times
    return {
        "queued_us": max(0, taken - arrived) // 1000,
        "input_us": (ready - taken) // 1000,
        "infer_us": (computed - ready) // 1000,
        "output_us": (placed - computed) // 1000,
    }
