"""Shadows: a share of the requests that name no version is repeated at one more version, whose responses are compared.

The client's request is answered as usual. Then an internal request with the same inputs is queued for the shadow,
behind all others. The shadow's worker compares its outputs with those of the response (`Expect`) and reports only the
result.

Invariant: the memory that the shadow reads does not change after the request was answered. It is pinned in the ledger,
or the client keeps its inputs (ReplyHeld) until Released. Requests with other inputs are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from msgspec import Struct

from shmserve.core.records import ClientState, CopyRequest, Request, Response, Version
from shmserve.core.service.graph import handles_of
from shmserve.core.state import State
from shmserve.core.traffic import Shadow
from shmserve.errors import ServeError
from shmserve.protocol.messages import OWNER_SHIFT, Fail, FailHeld, Handle, Part, Released, Reply, ReplyHeld, Tensor
from shmserve.protocol.worker_messages import Expect

PENDING_BATCHES = 2
"""Limit of requests at a shadow: this many full batches for each instance."""
PENDING_BYTES = 256 << 20
"""Limit of tensors in shared memory that are kept, for all shadows together."""
LOG_NS = 60_000_000_000
"""Minimum time between two log entries about one shadow."""
EQUAL, OUTPUT, DIFFERENCE = "equal", "output", "difference"
"""Parameters with which a worker reports a comparison."""


class Comparison(Struct, eq=False):
    """The requester of a request at a shadow. `answered_by`: the version that has answered the client. `keeper`: the
    client that keeps the inputs of its request `client_number`, if any of them are in its memory."""

    kind: ClassVar[str] = "shadow"
    state: State
    shadow: Shadow
    answered_by: Version
    expected: tuple[Tensor, ...]
    size: int
    keeper: ClientState | None
    client_number: int
    result: Response | None = None

    def hold(self, handles: Iterable[Handle]) -> None:
        self.state.outputs.pin(handles)

    def drop(self, handles: Iterable[Handle]) -> None:
        self.state.outputs.unpin(handles)

    def deliver(self, request: Request, message: Response) -> None:
        """The shadow has answered. Its worker may still read the inputs."""
        self.result = message
        if isinstance(message, Reply | Part):  # only a worker that has not compared returns outputs
            self.drop(handles_of(message.outputs))

    def fail_early(self, request: Request, code: str, text: str) -> None:
        self.deliver(request, Fail(request.client_number, code, text))

    def detached(self, request: Request) -> None:
        request.client.detached(request)

    def released(self, request: Request) -> None:
        """The client's request was answered long ago; `ended` tells its client."""

    def ended(self, request: Request) -> None:
        request.client.ended(request)
        state, shadow, version, result = self.state, self.shadow, self.answered_by, self.result
        shadow.pending -= 1
        state.compared_bytes -= self.size
        parameters = result.parameters if isinstance(result, Reply | Part) and result.parameters is not None else {}
        if parameters.get(EQUAL) is True:
            _count(state, version, shadow, "equal")
        elif EQUAL in parameters:
            _count(state, version, shadow, "different")
            output, difference = parameters.get(OUTPUT, ""), parameters.get(DIFFERENCE, "")
            text = f"answers differently from version {version.number}: output '{output}' {difference}"
            _log(state, version, shadow, text)
        else:
            reason = result.text if isinstance(result, Fail | FailHeld) else "its outputs were not compared"
            _count(state, version, shadow, "failed")
            _log(state, version, shadow, f"fails a request that version {version.number} answers: {reason}")
        if self.keeper is not None and not self.keeper.gone:
            state.send(self.keeper.number, Released(self.client_number))


def choose(state: State, request: Request, shadow: Shadow, copy: CopyRequest) -> None:
    """Decides whether to repeat at the shadow a request that has just been admitted and names no version."""
    version = request.version
    if (
        version.number == shadow.version
        or version.service.graph is not None
        or version.service.decoupled
        or version.service.sequence_slots is not None
    ):
        return
    if shadow.choose():
        request.special = True
        state.shadowed[request.number] = shadow, copy


def answered(state: State, request: Request, reply: Reply) -> Reply:
    """Called when a chosen request is about to be answered: queues the shadow's request if there is room. Returns the
    message for the client."""
    (shadow, copy), version = state.shadowed.pop(request.number), request.version
    target = state.models[version.model].versions.get(shadow.version)
    inputs = request.tensors()
    size = sum(handle.size for tensors in (inputs, reply.outputs) for handle in handles_of(tensors))
    if target is None or not _has_room(state, shadow, target, size) or not _can_be_kept(state, request, reply):
        _count(state, version, shadow, "skipped")
        return reply
    try:
        checked = target.service.checker.check(inputs, request.outputs)
    except ServeError as error:
        _count(state, version, shadow, "failed")
        _log(state, version, shadow, f"cannot run a request that version {version.number} answers: {error.message}")
        return reply
    segments, pins = _share(state, request, reply)
    in_its_memory = any(segment >> OWNER_SHIFT == request.client.number for segment in request.segments)
    keeper = request.client if in_its_memory else None
    comparison = Comparison(state, shadow, version, reply.outputs, size, keeper, request.client_number)
    state.compared_bytes += size
    shadow.pending += 1
    copy(comparison, request, target, inputs, checked, segments, pins)
    return reply if keeper is None else ReplyHeld(reply.request, reply.version, reply.outputs, reply.parameters)


def _has_room(state: State, shadow: Shadow, target: Version, size: int) -> bool:
    """A shadow must not delay others: no client request is queued at the target, and the shadow's own requests are
    bounded."""
    service = target.service
    if state.draining or not target.healthy or service.sequence_slots is not None or service.order is not None:
        return False
    if service.decoupled or service.graph is not None or target.suspects or target.waits > shadow.pending:
        return False
    usable = sum(instance.usable and not (instance.lease or instance.quarantined) for instance in target.instances)
    rows = target.policy.max_batch if target.policy is not None else 0
    if shadow.pending >= PENDING_BATCHES * max(1, rows) * usable:
        return False
    return state.compared_bytes + size <= PENDING_BYTES and 2 * len(state.requests) < state.limits.requests


def _can_be_kept(state: State, request: Request, reply: Reply) -> bool:
    if any(wanted.place is not None for wanted in request.outputs or ()):
        return False
    client, segments = request.client, state.ledger.segments
    for number in (*request.segments, *(handle.segment for handle in handles_of(reply.outputs))):
        segment = segments[number]
        if segment.on_device:
            return False
        if number >> OWNER_SHIFT == client.number and (segment.announcement.name is not None or not client.keeps):
            return False  # may be overwritten: a region shared with others, or an array of the user
    return True


def _share(state: State, request: Request, reply: Reply) -> tuple[tuple[int, ...], tuple[Handle, ...]]:
    """The segments and pins of the shadow's request: inputs that are not the client's own, and the expected outputs."""
    ledger = state.ledger
    outputs = tuple(handles_of(reply.outputs))
    pins = request.pins + outputs
    state.outputs.pin(pins)
    segments = request.segments + tuple([handle.segment for handle in outputs])
    ledger.use(segments)
    return segments, pins


def send_expected(state: State, peer: int, requests: list[Request]) -> None:
    """Called before a batch is sent: sends the worker the outputs to compare with."""
    for request in requests:
        comparison = request.requester
        if isinstance(comparison, Comparison):
            for handle in handles_of(comparison.expected):
                state.ledger.show(handle.segment, peer)
            state.send(peer, Expect(request.number, comparison.expected))


def not_repeated(state: State, request: Request) -> None:
    """Called when any request has ended: counts it if it was chosen, and has failed."""
    chosen = state.shadowed.pop(request.number, None)
    if chosen is not None:
        _count(state, request.version, chosen[0], "skipped")


def _count(state: State, version: Version, shadow: Shadow, result: str) -> None:
    model = state.models.get(version.model)
    if model is not None:
        counts = model.comparisons.setdefault((version.number, shadow.version), {})
        counts[result] = counts.get(result, 0) + 1


def _log(state: State, version: Version, shadow: Shadow, text: str) -> None:
    """Logs at most one entry per minute."""
    if state.now >= shadow.log_at:
        shadow.log_at = state.now + LOG_NS
        state.log("warning", f"shadow of model '{version.model}': version {shadow.version} {text}", model=version.model)
