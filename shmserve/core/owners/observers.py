"""What learns of requests without changing any answer: traces, recordings, and the times of responses.

The counters of a version are in its `Statistics`; here is what is kept for single requests. Invariant: while nothing is
traced or recorded, an event costs a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shmserve.core.effects import Effect
from shmserve.core.events import LeasedRequest
from shmserve.core.owners.lease import Lease
from shmserve.core.owners.recording import Recording
from shmserve.core.owners.trace import PARAMETER, Traces
from shmserve.core.records import Instance, Request, Version
from shmserve.core.service.batch import Batch
from shmserve.core.service.form import Reason
from shmserve.protocol.messages import Tensor


class Turn(Protocol):
    """What observers need to know of the core."""

    now: int
    effects: list[Effect]

    def next_number(self) -> int: ...


class Observers:
    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self.traces = Traces()
        self.recording: Recording | None = None

    @property
    def watching(self) -> bool:
        """Whether further requests may be traced or recorded."""
        return bool(self.traces.samples) or self.recording is not None

    def admitted(self, version: Version, requests: Sequence[Request]) -> None:
        """Requests of clients."""
        if self.traces.samples:
            self.traces.sample_due(version, requests)
        for request in requests:
            if request.options is not None and PARAMETER in request.options.parameters:
                self._trace_by_id(request)

    def child_admitted(self, request: Request, parent: Request | None) -> None:
        """A step of the ensemble `parent`, or a call that a model makes for `parent`."""
        if parent is not None and self.traces.active:
            self.traces.sample_child(request, parent)

    def call_admitted(self, request: Request, parent: Request | None) -> None:
        self.child_admitted(request, parent)
        if request.options is not None and PARAMETER in request.options.parameters:
            self._trace_by_id(request)

    def _trace_by_id(self, request: Request) -> None:
        record = self.traces.begin_by_id(request, self._turn.now)
        if record is not None:
            self._turn.effects.append(record)

    def responded(self, request: Request, outputs: tuple[Tensor, ...]) -> None:
        """A response with these outputs was sent."""
        if self.traces.active:
            self.traces.record_outputs(request, outputs)
        statistics, now = request.version.statistics, self._turn.now
        first, streams = statistics.first, statistics.streams
        if first is not None and not request.parts:
            first.add(now - request.arrived)
        if streams is not None:
            if request.responded:
                streams.between.add(now - request.responded)
            else:
                streams.first.add(now - request.arrived)
            request.responded = now

    def ended(self, request: Request, code: str) -> None:
        """The final response was sent. `code` "": the request succeeded."""
        if self.traces.active:
            record = self.traces.end(request, code, self._turn.now)
            if record is not None:
                self._turn.effects.append(record)
        if self.recording is not None:
            self.recording.ended(request, code, self._turn.now)

    def forgotten(self, request: Request) -> None:
        """The request has left the core, with or without a response."""
        if self.traces.active:
            self.traces.forget(request)

    def batch_done(self, version: Version, instance: Instance, batch: Batch[Request], number: int) -> None:
        """A batch has run. Called before its responses are processed."""
        if self.traces.active:
            batch.number = number
        if self.recording is not None:
            self.recording.batch_done(version, instance, batch, number, self._turn.now)

    def leased(self, lease: Lease, requests: Sequence[LeasedRequest], reason: Reason) -> None:
        """Leased requests were answered."""
        if self.recording is not None:
            self.recording.leased(lease, requests, reason, iter(self._turn.next_number, 0))
        if self.traces.samples:
            self._turn.effects += self.traces.sample_leased(lease, requests, reason)
