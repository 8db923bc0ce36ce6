"""Traces of single requests: one log entry for each request that has the parameter `trace_id`, and one `Traced` effect
for each request that is sampled by the operator's trace settings. A request may have both.

Invariant: while `active` and `samples` are empty, the core calls nothing in this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from shmserve.core.effects import Log, Traced
from shmserve.core.events import LeasedRequest
from shmserve.core.records import Lease, Request, Version
from shmserve.core.states import RequestState
from shmserve.protocol.messages import Tensor

PARAMETER = "trace_id"
ID_LENGTH = 128
PER_SECOND = 100
"""Limit of traces by `trace_id`: clients with the role infer must not be able to fill the disk with logs."""

_SECOND = 1_000_000_000


class Sample(Struct):
    """The sampling of a model: every `rate`-th request is traced. `left`: traces left, negative without a limit."""

    rate: int
    left: int = -1
    seen: int = 0
    timestamps: bool = True
    tensors: bool = False

    def take(self, count: int) -> range:
        """Counts the next `count` requests. Returns the places of those among them that are to be traced."""
        due = range(max(0, self.rate - self.seen - 1), count if self.left else 0, self.rate)
        if self.left > 0:
            due = due[: self.left]
            self.left -= len(due)
        self.seen = count - 1 - due[-1] if due else self.seen + count
        return due


class _ActiveTrace(Struct):
    """The trace of an unanswered request. `id`: its `trace_id`, or "". `sample`: None if it is not sampled; the fields
    below are then unused. `model`: the model whose trace settings apply. `number`: the number of this trace. `parent`:
    the number of the trace of the request for which this one was made, or 0."""

    id: str
    sample: Sample | None
    model: str = ""
    number: int = 0
    parent: int = 0
    outputs: tuple[Tensor, ...] = ()


class Traces:
    def __init__(self) -> None:
        self.active: dict[int, _ActiveTrace] = {}
        """Request number -> its trace, until the request is answered."""
        self.samples: dict[str, Sample] = {}
        """Model -> its sample; "" is the default for the others. Empty: sampling is off."""
        self._until = 0
        """When the current second of the rate limit ends."""
        self._count = 0
        """Requests with a `trace_id` in this second."""
        self._numbers = 0

    @property
    def with_tensors(self) -> bool:
        """Whether any sample includes tensors."""
        return any(sample.tensors for sample in self.samples.values())

    def sample_due(self, version: Version, requests: Sequence[Request]) -> None:
        """Traces those of the requests that are due for sampling. Called for all client requests while `samples` is
        not empty."""
        sample = self._sample_of(version)
        if sample is not None:
            for index in sample.take(len(requests)):
                self._begin(requests[index], _ActiveTrace("", sample, version.model, self._next_number()))

    def sample_leased(self, lease: Lease, records: Sequence[LeasedRequest]) -> list[Traced]:
        """As `sample_due`, for requests that went over a lease and have been answered."""
        sample = self._sample_of(lease.version)
        if sample is None:
            return []
        return [self._of_leased(lease, records[index], sample) for index in sample.take(len(records))]

    def _of_leased(self, lease: Lease, record: LeasedRequest, sample: Sample) -> Traced:
        arrived, taken, ready, computed, placed, rows, failed = record
        version = lease.version
        fields: dict[str, Any] = {
            "trace_id": "",
            "model": version.model,
            "version": version.number,
            "client": lease.client.number,
            "rows": rows,
            "code": "INTERNAL" if failed else "OK",
            "answered_us": (placed - arrived) // 1000,
            "lease": lease.number,
            "instance": lease.instance.spec.name,
            "batch_rows": max(rows, 1),
        }
        times = (taken, ready, computed, placed)
        fields |= _durations(arrived, times)
        return Traced(
            fields, arrived, times, placed, None, timestamps=sample.timestamps,
            number=self._next_number(), model=version.model,
        )  # fmt: skip

    def _sample_of(self, version: Version) -> Sample | None:
        return self.samples.get(version.model) or self.samples.get("")

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _begin(self, request: Request, trace: _ActiveTrace) -> None:
        self.active[request.number] = trace
        request.special = True  # so that its response takes the path on which its trace ends

    def sample_child(self, request: Request, parent: Request) -> None:
        """Traces `request`, a step of the ensemble `parent` or a call that a model makes for `parent`, if `parent` is
        sampled. The trace settings of its own model do not matter."""
        trace = self.active.get(parent.number)
        if trace is not None and trace.sample is not None:
            child = _ActiveTrace("", trace.sample, trace.model, self._next_number(), trace.number)
            self._begin(request, child)

    def begin_by_id(self, request: Request, now: int) -> Log | None:
        """Traces a request with the parameter `trace_id`. Returns a warning for the first one over the limit."""
        assert request.options is not None
        if now >= self._until:
            self._until, self._count = now + _SECOND, 0
        self._count += 1
        if self._count <= PER_SECOND:
            trace_id = str(request.options.parameters[PARAMETER])[:ID_LENGTH]
            sampled = self.active.get(request.number)
            if sampled is not None:
                sampled.id = trace_id
            else:
                self._begin(request, _ActiveTrace(trace_id, None))
        elif self._count == PER_SECOND + 1:
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
        """The request ends without an answer."""
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
        fields |= _at_worker(request)
        shown = ", ".join(f"{name} {value}" for name, value in fields.items() if name not in ("trace_id", "code"))
        log = Log("info", f"trace {trace.id}: {fields['code']}, {shown}", fields)
        sample = trace.sample
        if sample is None:
            return log
        times = request.batch.times if request.batch is not None else ()
        traced = Traced(
            fields, request.arrived, times, now, log if trace.id else None, timestamps=sample.timestamps,
            number=trace.number, parent=trace.parent, model=trace.model,
        )  # fmt: skip
        if sample.tensors:
            # A request whose response waits for earlier ones (preserve_ordering) has already released its inputs.
            inputs = _inline(request.inputs) if request.state is RequestState.DONE else request.inputs
            traced.tensors = inputs, trace.outputs
        return traced


def _inline(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors without handles: data in shared memory is left out."""
    return tuple(tensor if isinstance(tensor.data, bytes) else replace(tensor, data=()) for tensor in tensors)


def _at_worker(request: Request) -> dict[str, Any]:
    """The fields about instance and batch. Times are known only if the batch had completed before the answer."""
    instance, batch = request.instance, request.batch
    if instance is None or batch is None:
        return {}
    number = batch.number or next(iter(batch.numbers), 0)
    fields: dict[str, Any] = {"instance": instance.spec.name, "batch": number, "batch_rows": batch.rows}
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
