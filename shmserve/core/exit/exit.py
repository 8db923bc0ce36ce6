"""The one way out of the core, in two steps for every request.

`respond` hands a response to the requester: directly, or in order of arrival with preserve_ordering. `release` frees
what the request used as soon as no worker reads it: before the response, after it, or long after (LINGERING). Observers
are told of both. Of leased requests, which the core has never seen, they learn from the log of the lease.

Invariant: the requester gets exactly one final response.
"""

from __future__ import annotations

from collections.abc import Iterable

from shmserve.core.effects import Send
from shmserve.core.exit import shadow
from shmserve.core.records import Batch, ClientState, Instance, Request, Version
from shmserve.core.state import State
from shmserve.core.states import RequestState, VersionState, move_all
from shmserve.core.stats.statistics import FailureKind
from shmserve.core.termination import kill_for_protocol_error
from shmserve.protocol.messages import Columns, Fail, Part, Reply, ReplyBatch, Tensor, Value, tensors_of
from shmserve.protocol.worker_messages import Row, Withdraw

_QUEUED, _SENT, _LINGERING, _DONE, _ENDED, _CHAINED, _OPEN = RequestState
_GONE = (_LINGERING, _ENDED)
_COMPLETE = (_DONE, *_GONE)


# ------------------------------------------------------------------------------------ respond


def respond(state: State, request: Request, message: Reply | Fail) -> None:
    """Answers a request that no worker has any more: now or, with preserve_ordering, in order."""
    if state.shadowed and request.number in state.shadowed and isinstance(message, Reply):
        message = shadow.answered(state, request, message)
    order = request.version.service.order
    if order is None:
        deliver(state, request, message)
    else:
        request.reply = message
        request.move(_DONE)
        _release(state, request)
        respond_in_order(state, request.version)


def deliver(state: State, request: Request, message: Reply | Fail) -> None:
    """Hands over the only response, and ends the request."""
    if isinstance(message, Reply):
        if request.miss is not None:
            _store(state, request, message)
        request.requester.deliver(request, message)
        state.observers.responded(request, message.outputs)
        end_answered(state, request)
    else:
        request.requester.deliver(request, message)
        end_answered(state, request, message.code, message.text)


def _store(state: State, request: Request, message: Reply) -> None:
    cache, version, miss = state.cache, request.version, request.miss
    assert miss is not None
    began = cache.clock()
    if version.state is VersionState.READY:
        cache.add(miss.key, message.outputs, message.parameters, request.client.number)
    state.observers.cache_miss(request, miss.lookup_ns + cache.clock() - began)


def respond_part(
    state: State, request: Request, outputs: tuple[Tensor, ...], parameters: dict[str, Value] | None, last: bool
) -> None:
    """Hands over one of several responses. The last one ends the request."""
    if outputs:
        state.observers.responded(request, outputs)
    request.parts += 1
    part = Part(request.client_number, request.version.number, outputs, parameters, last)
    request.requester.deliver(request, part)
    if last:
        end_answered(state, request)


def respond_rows(
    state: State, version: Version, instance: Instance, batch: Batch, rows: Iterable[Row], taken: int
) -> None:
    """`respond_row` for each row. The usual ones, with all outputs inside the message and no earlier request to wait
    for, are ended and counted together."""
    requests, append, order, number = state.requests, state.effects.append, version.service.order, version.number
    usual: list[Request] = []
    try:
        for row in rows:
            request = requests.get(row.request)
            if (
                request is not None
                and request.batch is batch
                and request.state is _SENT
                and row.error is None
                and not request.special
                and (order is None or order[0] is request)
            ):
                for tensor in row.outputs:
                    if not isinstance(tensor.data, bytes):
                        break
                else:
                    reply = Reply(request.client_number, number, row.outputs, row.parameters)
                    append(Send(request.client.number, reply))
                    del requests[row.request]
                    usual.append(request)
                    if order is not None:
                        order.popleft()
                    continue
            respond_row(state, version, instance, batch, row, taken)
    finally:  # after an internal error, too, those that were answered have ended
        _end_together(state, version, batch, usual, taken)
    if order:
        respond_in_order(state, version)


def respond_columns(
    state: State, version: Version, instance: Instance, batch: Batch, columns: Columns, taken: int
) -> None:
    """Like `respond_rows`. Each client gets one message for all of its requests that came in columns."""
    requests, forms, ordered = state.requests, columns.forms, version.service.order is not None
    usual: list[Request] = []
    replies: dict[ClientState, tuple[list[int], list[int], list[tuple[bytes, ...]]]] = {}
    try:
        for index, (own, axis, data) in enumerate(zip(columns.requests, columns.rows, columns.data, strict=True)):
            request = requests.get(own)
            if (
                request is None
                or request.batch is not batch
                or request.state is not _SENT
                or request.special
                or ordered
            ):
                respond_row(state, version, instance, batch, Row(own, columns.tensors(index)), taken)
                continue
            client, number = request.client, request.client_number
            if request.form is None:
                state.send(client.number, Reply(number, version.number, tensors_of(forms, axis, data)))
            else:
                reply = replies.get(client)
                if reply is None:
                    reply = replies[client] = ([], [], [])
                reply[0].append(number)
                reply[1].append(axis)
                reply[2].append(data)
            del requests[own]
            usual.append(request)
    finally:
        for client, (numbers, axes, blobs) in replies.items():
            message = ReplyBatch(version.number, Columns(forms, tuple(numbers), tuple(axes), tuple(blobs)))
            state.send(client.number, message)
        _end_together(state, version, batch, usual, taken)


def respond_row(state: State, version: Version, instance: Instance, batch: Batch, row: Row, taken: int) -> None:
    """Processes the result of one request of a batch."""
    request = state.requests.get(row.request)
    if request is None or request.batch is not batch or request.state is _DONE:
        kill_for_protocol_error(state, version, instance, f"row of request {row.request}")
        return
    batch.remaining -= 1
    if request.state is _LINGERING:
        state.outputs.refuse(instance, row.outputs)
        released(state, request)
    elif row.error is not None:
        state.outputs.refuse(instance, row.outputs)
        fail(state, request, row.error.code, row.error.text)
    elif not _reply(state, version, instance, request, row, taken):
        refuse_memory(state, version, instance, request)


def refuse_memory(state: State, version: Version, instance: Instance, request: Request) -> None:
    """Fails a request whose response refers to memory that the worker may not give, and kills the worker."""
    fail(state, request, "INTERNAL", f"{version.label} sent a response with memory that it does not own")
    kill_for_protocol_error(state, version, instance, "memory in a response")


def _reply(state: State, version: Version, instance: Instance, request: Request, row: Row, taken: int) -> bool:
    """Sends the response. False, without any change: it refers to memory that the worker may not give."""
    if not state.outputs.produce(instance, request, row.outputs):
        return False
    state.observers.computed(request, taken)
    respond(state, request, Reply(request.client_number, version.number, row.outputs, row.parameters))
    return True


def respond_in_order(state: State, version: Version) -> None:
    """Delivers responses from the head of the order, as far as they are complete; removes requests answered
    early."""
    service = version.service
    order = service.order
    while order and order[0].state in _COMPLETE:
        request = order.popleft()
        if request.state is _DONE:
            assert request.reply is not None
            deliver(state, request, request.reply)
    if order and len(order) > service.order_swept:
        service.sweep_order([request for request in order if request.state not in _GONE])


# ------------------------------------------------------------------------------------ failures


def fail(state: State, request: Request, code: str, text: str) -> None:
    """Fails a request that no worker has any more. The error is delivered in order."""
    if request.state is _LINGERING:
        released(state, request)
        return
    state.observers.failed(request.version, request.arrived, code, text, FailureKind.BACKEND)
    respond(state, request, Fail(request.client_number, code, text))


def fail_unsent(state: State, request: Request, code: str, text: str) -> None:
    """Fails a request at once, without waiting for earlier responses. It has already been removed from the queue."""
    version = request.version
    state.observers.failed(version, request.arrived, code, text)
    deliver(state, request, Fail(request.client_number, code, text))
    if version.service.order is not None:
        respond_in_order(state, version)


def fail_early(state: State, request: Request, code: str, text: str) -> None:
    """Fails a request at once, whatever its state. A worker that could still drop it is notified."""
    version = request.version
    if request.state in _GONE:  # it has been answered
        return
    if request.state is _QUEUED:
        version.drop(request)
        fail_unsent(state, request, code, text)
        state.to_dispatch[version] = None
        return
    if request.state is _DONE:  # already counted
        request.requester.deliver(request, Fail(request.client_number, code, text))
        _drop_reply(state, request)
        end_answered(state, request, code, text)
        return
    chain = state.runs.get(request.number)
    if chain is not None:
        chain.fail(code, text)
        state.runs.to_advance[chain] = None
        return
    state.observers.failed(version, request.arrived, code, text)
    request.requester.fail_early(request, code, text)
    state.observers.ended(request, code, text)
    linger(state, request)


def deadline_passed(state: State, request: Request, now: int) -> None:
    """The request's own timeout. Another timer that expired at the same time may have ended it."""
    text = "Request timeout expired: the request's own timeout passed before it was answered"
    fail_early(state, request, "DEADLINE_EXCEEDED", text)


def cancel_all(state: State, client: ClientState) -> None:
    for request in list(client.requests.values()):
        if request.state in (_QUEUED, _CHAINED):
            fail_early(state, request, "CANCELLED", "its client has disconnected")
        elif request.state in (_SENT, _OPEN):
            linger(state, request)
        elif request.state is _DONE:  # otherwise it was just delivered, because earlier ones were dropped
            drop_done(state, request)


def drop_done(state: State, request: Request) -> None:
    """Drops a complete response that was waiting for earlier ones when its requester left."""
    _drop_reply(state, request)
    end(state, request)


def _drop_reply(state: State, request: Request) -> None:
    if isinstance(request.reply, Reply):
        state.outputs.drop(request.requester, request.reply.outputs)


# ------------------------------------------------------------------------------------ release


def linger(state: State, request: Request) -> None:
    """The request was answered (or its requester left) while a worker still has it."""
    request.move(_LINGERING)
    request.drop_prompt()
    if is_stream(request):
        state.abandoned[request.payer.user] += 1
    if request.sequence is not None:
        request.sequence.end_cancelled()
        state.to_dispatch[request.version] = None
    request.requester.detached(request)
    instance, batch = request.instance, request.batch
    if batch is not None and request in batch.unread:
        continue_batch(state, request, batch)
    if instance is not None:  # the worker drops the request if it has not started, otherwise notifies the model
        state.send(instance.peer, Withdraw((request.number,)))
    if request.version.service.order is not None:
        respond_in_order(state, request.version)


def continue_batch(state: State, request: Request, batch: Batch) -> None:
    """The model does not wait for the caller of the request any more, who pays for the time in which it did."""
    version = request.version
    waited = batch.resume(request, state.now)
    version.service.queue.charge(request, batch.rows * waited // (version.service_ns or waited or 1) + 1)
    state.to_dispatch[version] = None


def released(state: State, request: Request) -> None:
    """No worker has a request any more that was answered early."""
    request.requester.released(request)
    end(state, request)


def end_answered(state: State, request: Request, code: str = "", text: str = "") -> None:
    """Ends a request after its (last) response. `code` and `text`: of its error."""
    state.observers.ended(request, code, text)
    end(state, request)


def end(state: State, request: Request) -> None:
    """Removes the request from all tables, and releases what it used."""
    final = request.state
    request.requester.ended(request)
    request.move(_ENDED)
    del state.requests[request.number]
    request.drop_prompt()
    request.payer.leave(1, state.now - request.arrived)
    if state.shadowed:
        shadow.not_repeated(state, request)
    if final is _LINGERING and is_stream(request):
        state.abandoned[request.payer.user] -= 1
        if not state.abandoned[request.payer.user]:
            del state.abandoned[request.payer.user]
    if request.sequence is not None:
        request.sequence.on_left(request)
        state.to_dispatch[request.version] = None
    state.observers.forgotten(request)
    if final is not _DONE:
        _release(state, request)


def _end_together(state: State, version: Version, batch: Batch, requests: list[Request], taken: int) -> None:
    """`end` in one pass for answered requests of a batch, of clients, that use nothing outside their messages and have
    left the table already."""
    if not requests:
        return
    batch.remaining -= len(requests)
    batch.answered += len(requests)
    move_all(requests, _SENT, _ENDED)
    rows, now, several = 0, state.now, False
    payer, arrivals = requests[0].payer, []
    for request in requests:
        client = request.client
        del client.requests[request.client_number]
        client.bytes -= request.inline
        rows += request.cost
        arrivals.append(request.arrived)
        if request.payer is not payer:
            several = True
    if not several:
        if payer is not client:
            payer.leave(len(arrivals), now * len(arrivals) - sum(arrivals))
    elif any(state.callers.values()):
        for request in requests:
            if request.payer is not request.client:
                request.payer.leave(1, now - request.arrived)
    state.observers.answered(version, arrivals, rows, taken, now)


def _release(state: State, request: Request) -> None:
    """Releases the memory that it used as input."""
    ledger = state.ledger
    for handle in request.pins:
        ledger.unpin(handle)
    if request.segments:
        ledger.done_with(request.segments)
        request.client.input_bytes -= request.input_bytes


def is_stream(request: Request) -> bool:
    """True if only the model decides when the request ends. That may be long after its client has disconnected."""
    service = request.version.service
    return service.decoupled and service.graph is None
