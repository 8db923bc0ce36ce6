"""Requests with several responses: parts are sent as the model produces them, while its batch runs or later.

A request moves from its batch to `Instance.streams` (OPEN) if the batch is done before its last response.

Invariant: the last response ends the request, whatever its state; a response after that is a protocol error of the
worker.
"""

from __future__ import annotations

from msgspec.structs import replace

from shmserve.core.exit import exit
from shmserve.core.records import Batch, Instance, Request, Version
from shmserve.core.state import State, Timer
from shmserve.core.states import RequestState
from shmserve.core.termination import kill_for_protocol_error
from shmserve.protocol.messages import More
from shmserve.protocol.worker_messages import BUFFER_BYTES, Prefilled, Row, Streamed, Unread

_SENT, _OPEN, _LINGERING = RequestState.SENT, RequestState.OPEN, RequestState.LINGERING
MAX_WINDOW = 2**63 - 1
"""The largest number that a message can contain."""


def streamed(state: State, version: Version, instance: Instance, message: Streamed, now: int) -> None:
    if not version.service.decoupled:
        kill_for_protocol_error(state, version, instance, "responses during a batch")
        return
    for row in message.rows:
        _row(state, version, instance, row, now)


def _row(state: State, version: Version, instance: Instance, row: Row, now: int) -> None:
    request = state.requests.get(row.request)
    batch = instance.running
    here = request is not None and (row.request in instance.streams or (batch is not None and request.batch is batch))
    if request is None or not here:
        kill_for_protocol_error(state, version, instance, f"response to request {row.request}")
        return
    if version.service.streams or row.request in instance.streams:
        instance.responded = now
    wanted = request.state is not _LINGERING and row.error is None
    if batch is not None and request in batch.unread:
        exit.continue_batch(state, request, batch)
    taken = wanted and state.outputs.produce(instance, request, row.outputs)
    if not taken:
        state.outputs.refuse(instance, row.outputs)
    state.observers.streamed(request, row, request.state is not _LINGERING)
    if row.more:
        if taken:
            exit.respond_part(state, request, row.outputs, row.parameters, False)
        return
    if instance.streams.pop(request.number, None) is not None:
        if not instance.streams:
            state.observers.streams_ended(version, instance)
    elif batch is not None:
        batch.remaining -= 1
    if request.state is _LINGERING:
        exit.released(state, request)
    elif row.error is not None:
        exit.fail(state, request, row.error.code, row.error.text)
    elif not taken:
        exit.refuse_memory(state, version, instance, request)
    else:
        state.observers.computed(request, 0)
        exit.respond_part(state, request, row.outputs, row.parameters, True)


def unread(state: State, version: Version, instance: Instance, message: Unread, now: int) -> None:
    """The model waits in a batch until the caller of a request accepts more responses."""
    request, batch = state.requests.get(message.request), instance.running
    if request is None or batch is None or request.batch is not batch or request.state is not _SENT:
        return
    batch.stall(request, now)
    state.to_dispatch[version] = None
    check_unread(state, request, now)


def prefilled(state: State, version: Version, instance: Instance, message: Prefilled, now: int) -> None:
    """The engine has computed the prompt of a request, which may have ended meanwhile."""
    request = state.requests.get(message.request)
    if request is not None and request.instance is instance and request.prompt is not None:
        request.prompt.backlog.computed(request.prompt, message.tokens, now)
        request.prompt = None


def check_unread(state: State, request: Request, now: int) -> None:
    """Ends a request whose caller accepts no more responses, if its batch has delayed others by that for too long."""
    version, instance, batch = request.version, request.instance, request.batch
    if instance is None or batch is None or request not in batch.unread:
        return
    limit, waited = state.limits.unread_ns, batch.waited_for_callers(now)
    if waited >= batch.tolerated + limit:
        if version.waits or instance.waiting is not None:
            text = (
                f"other requests waited for {version.label}, whose instance '{instance.spec.name}' could not continue "
                f"for {limit // 1_000_000} ms: the caller of this request had accepted {_count(request)}, and "
                f"{BUFFER_BYTES >> 20} MiB of further ones were queued; a caller should read responses as they arrive"
            )
            exit.fail_early(state, request, "UNAVAILABLE", text)
            return
        batch.tolerated = waited
    state.set_timer(now + batch.tolerated + limit - waited, Timer.UNREAD, request)


def _count(request: Request) -> str:
    return f"{request.parts} response{'' if request.parts == 1 else 's'}"


def batch_done(state: State, instance: Instance, batch: Batch, taken: int) -> None:
    """Requests of the batch that have not had their last response continue outside it."""
    if not instance.streams:
        instance.streaming_since = state.now
    for request in batch.requests():
        if request.state is _SENT:
            request.move(_OPEN)
            state.observers.answered_in_batch(request, taken)
        batch.leave(request)
        instance.streams[request.number] = request


def lost(state: State, version: Version, instance: Instance, reason: str) -> None:
    for request in list(instance.streams.values()):
        text = f"{version.label}: the worker process of instance '{instance.spec.name}' ended after {_count(request)}"
        exit.fail(state, request, "MODEL_FAILED", f"{text} to this request ({reason})")
    if instance.streams:
        instance.streams.clear()
        state.observers.streams_ended(version, instance)


def more(state: State, request: Request | None, count: int) -> None:
    """The caller accepts this many more responses, unless the request (None) has already been answered. The request
    keeps the total in case another worker has to run it."""
    if request is None or request.options is None or not request.options.window:
        return
    run = state.runs.get(request.number)
    if run is not None:
        run.room += count
        state.runs.to_advance[run] = None
        return
    options, instance = request.options, request.instance
    if not (request.version.service.decoupled or request.unchecked is not None):
        return
    if instance is not None and request.state in (_SENT, _OPEN):
        state.send(instance.peer, More(request.number, count))
    window = min(options.window + count, MAX_WINDOW)
    request.options = replace(options, window=window)  # messages already sent keep their options
