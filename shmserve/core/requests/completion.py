"""Completion of requests: sends the response, in order or early, and releases everything that the request used.

Invariant: the requester (a client, or the run of an ensemble) gets exactly one final response.
"""

from __future__ import annotations

from collections.abc import Iterable

from shmserve.core.effects import Free
from shmserve.core.ensembles.graph import handles_of
from shmserve.core.records import ORDER, Request, Version
from shmserve.core.requests import shadow
from shmserve.core.requests.client import ClientState
from shmserve.core.state import State
from shmserve.core.states import RequestState, VersionState
from shmserve.core.stats.statistics import FailureKind
from shmserve.protocol.messages import Fail, FailHeld, Handle, Part, Released, Reply, Tensor, Value
from shmserve.protocol.worker_messages import Withdraw

_QUEUED, _SENT, _LINGERING, _DONE, _ENDED, _CHAINED, _OPEN = RequestState
_GONE = (_LINGERING, _ENDED)


def answer(state: State, request: Request, message: Reply | Fail) -> None:
    """Answers a request that no worker has any more: now or, with preserve_ordering, in order."""
    if state.shadowed and request.number in state.shadowed and isinstance(message, Reply):
        message = shadow.answered(state, request, message)
    order = request.version.order
    if order is None:
        deliver(state, request, message)
    else:
        request.reply = message
        request.move(_DONE)
        _release_request(state, request)
        answer_in_order(state, request.version)


def answer_step(state: State, request: Request, message: Reply) -> None:
    """`answer` for an untraced ensemble step, at a model whose requests take the fast path."""
    run = state.runs[request.step_of]
    run.responded(request, message, None)
    run.ended(request)
    state.runs_to_advance[run] = None
    client = request.client
    client.steps -= 1
    client.bytes -= request.inline
    request.state = _ENDED  # a legal transition from SENT
    del state.requests[request.number]
    if request.segments:
        state.ledger.done_with(request.segments)


def deliver(state: State, request: Request, message: Reply | Fail) -> None:
    client = request.client
    miss = request.miss
    if miss is not None and isinstance(message, Reply):
        cache, version = state.cache, request.version
        began = cache.clock()
        if version.state is VersionState.READY:
            cache.add(miss.key, message.outputs, message.parameters, client.number)
        version.statistics.cache_miss(miss.lookup_ns + cache.clock() - began, state.now)
    send(state, request, message)
    if isinstance(message, Reply):
        _record_outputs(state, request, message.outputs)
        copied_out(state, request, message.outputs)
    finish(state, request, message.code if isinstance(message, Fail) else "")


def part(
    state: State, request: Request, outputs: tuple[Tensor, ...], parameters: dict[str, Value] | None, last: bool
) -> None:
    """Sends one of several responses. After the last one, call `finish`."""
    if outputs:
        _record_outputs(state, request, outputs)
    request.parts += 1
    send(state, request, Part(request.client_number, request.version.number, outputs, parameters, last))
    copied_out(state, request, outputs)


def _record_outputs(state: State, request: Request, outputs: tuple[Tensor, ...]) -> None:
    """Records a response for traces and response times."""
    if state.traces.active:
        state.traces.record_outputs(request, outputs)
    statistics = request.version.statistics
    first, streams = statistics.first, statistics.streams
    if first is not None and not request.parts:
        first.add(state.now - request.arrived)
    if streams is not None:
        if request.responded:
            streams.between.add(state.now - request.responded)
        else:
            streams.first.add(state.now - request.arrived)
        request.responded = state.now


def copied_out(state: State, request: Request, outputs: tuple[Tensor, ...]) -> None:
    """Returns the outputs to their owners if the client receives copies (frames), so that it holds nothing."""
    client = request.client
    if not request.step_of and client.outputs == "frames" and not client.gone:
        take_back(state, client, outputs)


def finish(state: State, request: Request, code: str) -> None:
    """Ends a request after its (last) response."""
    _trace(state, request, code)
    end(state, request)


def send(state: State, request: Request, message: Reply | Part | Fail | FailHeld) -> None:
    """Sends the message to the requester."""
    if request.step_of:
        assert not isinstance(message, FailHeld)
        runs = state.runs
        run = runs[request.step_of]
        run.responded(request, message, runs.get(request.number))
        state.runs_to_advance[run] = None
    elif not request.client.gone:
        options = request.options
        if isinstance(message, Reply) and request.version.decoupled and options is not None and options.window:
            message = Part(message.request, message.version, message.outputs, message.parameters, True)
        state.send(request.client.number, message)
    elif request.number in state.comparisons:
        shadow.concluded(state, request, message)


def send_failure(state: State, request: Request, code: str, text: str) -> None:
    """Sends the error now, although a worker may still read the inputs."""
    held = request.on_loan and not request.step_of
    send(state, request, (FailHeld if held else Fail)(request.client_number, code, text))


def _trace(state: State, request: Request, code: str) -> None:
    """Ends the trace of a request that is answered now, if it has one."""
    if state.traces.active:
        record = state.traces.end(request, code, state.now)
        if record is not None:
            state.effects.append(record)
    if state.recording is not None:
        state.recording.ended(request, code, state.now)


def take_back(state: State, client: ClientState, outputs: Iterable[Tensor]) -> None:
    """Returns outputs that the client was given, or should have been given, to the worker."""
    for handle in _of_others(client, handles_of(outputs)):
        state.ledger.take_back(client, handle)


def drop(state: State, client: ClientState, handles: Iterable[Handle]) -> None:
    """Unpins outputs that a run kept for this client and that will not be read any more."""
    for handle in _of_others(client, handles):
        state.ledger.unpin(handle)


def answer_in_order(state: State, version: Version) -> None:
    """Delivers responses from the head of the order, as far as they are complete; removes requests answered
    early."""
    order = version.order
    while order and order[0].state in (_DONE, _LINGERING, _ENDED):
        request = order.popleft()
        if request.state is _DONE:
            assert request.reply is not None
            deliver(state, request, request.reply)
    if order and len(order) > version.order_swept:
        left = [request for request in order if request.state not in _GONE]
        order.clear()
        order.extend(left)
        version.order_swept = max(ORDER, 2 * len(left))


def cancel_all(state: State, client: ClientState, now: int) -> None:
    """Cancels all requests of a client that has disconnected."""
    requests = state.requests
    for request in [requests[number] for number in client.requests.values()]:
        if request.state in (_QUEUED, _CHAINED):
            fail_early(state, request, "CANCELLED", "its client has disconnected", now)
        elif request.state in (_SENT, _OPEN):
            linger(state, request)
        elif request.state is _DONE:  # otherwise it was just delivered, because earlier ones were dropped
            drop_done(state, request)


def drop_done(state: State, request: Request) -> None:
    """Drops a complete response that was waiting for earlier ones when its client disconnected."""
    _drop_reply(state, request)
    end(state, request)


def _drop_reply(state: State, request: Request) -> None:
    if not isinstance(request.reply, Reply):
        return
    if request.step_of:
        drop(state, request.client, handles_of(request.reply.outputs))
    elif not request.client.gone:
        take_back(state, request.client, request.reply.outputs)


def end(state: State, request: Request) -> None:
    """Removes the request from all tables."""
    final = request.state
    if request.step_of:
        run = state.runs[request.step_of]
        run.ended(request)
        request.client.steps -= 1
        request.client.bytes -= request.inline
        state.runs_to_advance[run] = None
    elif final is not _LINGERING:  # a lingering request has already left, and its number may be in use again
        client_left(state, request)
    request.move(_ENDED)
    del state.requests[request.number]
    if state.shadowed or state.comparisons:
        shadow.ended(state, request)
    if final is _LINGERING and is_stream(request):
        state.abandoned[request.client.user] -= 1
        if not state.abandoned[request.client.user]:
            del state.abandoned[request.client.user]
    if request.sequence is not None:
        request.sequence.left(request)
        state.to_dispatch[request.version] = None
    if state.traces.active:  # requests that were not answered
        state.traces.forget(request)
    if final is not _DONE:
        _release_request(state, request)


def client_left(state: State, request: Request) -> None:
    """Called when the client no longer waits for the request."""
    request.client.requests.pop(request.client_number, None)
    if not request.step_of:  # a step counts until it ends
        request.client.bytes -= request.inline
    if request.held:
        state.answered_calls.append(request)


def _release_request(state: State, request: Request) -> None:
    """Releases the memory that it used."""
    for handle in request.pins:
        state.ledger.unpin(handle)
    if request.segments:
        state.ledger.done_with(request.segments)
        request.client.input_bytes -= request.input_bytes
    if request.blocks:
        state.effects.append(Free(request.blocks))


def end_failed(state: State, request: Request, code: str, text: str, now: int) -> None:
    """Fails a request that no worker has any more. The error is delivered in order."""
    if request.state is _LINGERING:
        released(state, request)
        return
    statistics = request.version.statistics
    statistics.failed(FailureKind.BACKEND, now - request.arrived)
    statistics.keep_error(code, text, now)
    answer(state, request, Fail(request.client_number, code, text))


def end_early(state: State, request: Request, code: str, text: str, now: int) -> None:
    """Fails a request at once, without waiting for earlier responses. It has already been removed from the queue."""
    version = request.version
    version.statistics.failed_as(code, text, now - request.arrived, now)
    send(state, request, Fail(request.client_number, code, text))
    finish(state, request, code)
    if version.order is not None:
        answer_in_order(state, version)


def fail_early(state: State, request: Request, code: str, text: str, now: int) -> None:
    """Fails a request at once, whatever its state. A worker that could still drop it is notified."""
    version = request.version
    if request.state is _QUEUED:
        version.drop(request)
        end_early(state, request, code, text, now)
        state.to_dispatch[version] = None
        return
    if request.state is _DONE:  # already counted
        send(state, request, Fail(request.client_number, code, text))
        _drop_reply(state, request)
        finish(state, request, code)
        return
    chain = state.runs.get(request.number)
    if chain is not None:
        chain.fail(code, text)
        state.runs_to_advance[chain] = None
        return
    version.statistics.failed_as(code, text, now - request.arrived, now)
    send_failure(state, request, code, text)
    _trace(state, request, code)
    linger(state, request)


def deadline_passed(state: State, request: Request, now: int) -> None:
    """The request's own timeout."""
    if request.state not in _GONE:  # otherwise another timer that expired at the same time has ended it
        text = "Request timeout expired: the request's own timeout passed before it was answered"
        fail_early(state, request, "DEADLINE_EXCEEDED", text, now)


def linger(state: State, request: Request) -> None:
    """The request was answered (or its client disconnected) while a worker still has it."""
    request.move(_LINGERING)
    if is_stream(request):
        state.abandoned[request.client.user] += 1
    if request.sequence is not None:
        text = f"an earlier request of sequence {request.sequence.id!r} was cancelled, which ended the sequence"
        request.sequence.fail("CANCELLED", text)
        request.sequence.mark_changed()
        state.to_dispatch[request.version] = None
    if not request.step_of:
        client_left(state, request)
    instance = request.instance
    if instance is not None:  # the worker drops the request if it has not started, otherwise notifies the model
        state.send(instance.peer, Withdraw((request.number,)))
    if request.version.order is not None:
        answer_in_order(state, request.version)


def released(state: State, request: Request) -> None:
    if request.on_loan and not request.step_of and not request.client.gone:
        state.send(request.client.number, Released(request.client_number))
    end(state, request)


def give(state: State, client: ClientState, handles: Iterable[Handle]) -> None:
    """Gives holds on these handles to the client."""
    for handle in handles:
        if client.outputs != "frames":
            state.ledger.show(handle.segment, client.number)
        state.ledger.give(client, handle)


def pass_on(state: State, request: Request, handles: Iterable[Handle]) -> None:
    """Gives the outputs of an ensemble to its requester: a client, or another run."""
    client = request.client
    made = _of_others(client, handles)
    if request.step_of:
        for handle in made:
            state.ledger.keep(handle)
    elif not client.gone:
        give(state, client, made)


def is_stream(request: Request) -> bool:
    """Does only the model decide when the request ends? That may be long after its client has disconnected."""
    return request.version.decoupled and request.version.graph is None


def _of_others(client: ClientState, handles: Iterable[Handle]) -> list[Handle]:
    """Returns the handles without those to the client's own memory, which the ledger does not track."""
    return [handle for handle in handles if not client.has_placed(handle)]
