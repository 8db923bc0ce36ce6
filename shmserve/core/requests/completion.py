"""Completion of requests: the response is sent, in order or early, and everything the request used is released.

Invariant: the requester (a client, or the run of an ensemble) gets exactly one final response.
"""

from __future__ import annotations

from collections.abc import Iterable

from shmserve.core.effects import Free
from shmserve.core.ensembles.graph import handles_of
from shmserve.core.records import ORDER, Request, Version
from shmserve.core.requests.client import ClientState
from shmserve.core.state import State
from shmserve.core.states import RequestState, VersionState
from shmserve.core.stats.statistics import FailureKind
from shmserve.protocol.messages import Fail, FailHeld, Handle, Part, Released, Reply, Tensor, Value, Withdraw

_QUEUED, _SENT, _LINGERING, _DONE, _ENDED, _CHAINED, _OPEN = RequestState
_GONE = (_LINGERING, _ENDED)


class Completion:
    def __init__(self, state: State) -> None:
        self._state = state

    def answer(self, request: Request, message: Reply | Fail) -> None:
        """Answers a request that no worker has any more: now or, with preserve_ordering, in order."""
        order = request.version.order
        if order is None:
            self.deliver(request, message)
        else:
            request.reply = message
            request.move(_DONE)
            self._release_request(request)
            self.answer_in_order(request.version)

    def deliver(self, request: Request, message: Reply | Fail) -> None:
        client = request.client
        miss = request.miss
        if miss is not None and isinstance(message, Reply):
            cache, version = self._state.cache, request.version
            began = cache.clock()
            if version.state is VersionState.READY:
                cache.add(miss.key, message.outputs, message.parameters, client.number)
            version.statistics.cache_miss(miss.lookup_ns + cache.clock() - began, self._state.now)
        self.send(request, message)
        if isinstance(message, Reply):
            self._made(request, message.outputs)
            self.copied_out(request, message.outputs)
        self.finish(request, message.code if isinstance(message, Fail) else "")

    def part(
        self, request: Request, outputs: tuple[Tensor, ...], parameters: dict[str, Value] | None, last: bool
    ) -> None:
        """Sends one of several responses. After the last one, call `finish`."""
        if outputs:
            self._made(request, outputs)
        request.parts += 1
        self.send(request, Part(request.client_number, request.version.number, outputs, parameters, last))
        self.copied_out(request, outputs)

    def _made(self, request: Request, outputs: tuple[Tensor, ...]) -> None:
        """Records a response for traces and first response times."""
        if self._state.traces.open:
            self._state.traces.made(request, outputs)
        first = request.version.statistics.first
        if first is not None and not request.parts:
            first.add(self._state.now - request.arrived)

    def copied_out(self, request: Request, outputs: tuple[Tensor, ...]) -> None:
        """A client with frames receives copies of the outputs, so it holds nothing."""
        client = request.client
        if not request.step_of and client.outputs == "frames" and not client.gone:
            self.take_back(client, outputs)

    def finish(self, request: Request, code: str) -> None:
        """Ends a request after its (last) response."""
        self._trace(request, code)
        self.end(request)

    def send(self, request: Request, message: Reply | Part | Fail | FailHeld) -> None:
        """Sends the message to the requester."""
        if request.step_of:
            assert not isinstance(message, FailHeld)
            runs = self._state.runs
            run = runs[request.step_of]
            run.responded(request, message, runs.get(request.number))
            self._state.changed_runs[run] = None
        elif not request.client.gone:
            options = request.options
            if isinstance(message, Reply) and request.version.decoupled and options is not None and options.window:
                message = Part(message.request, message.version, message.outputs, message.parameters, True)
            self._state.send(request.client.number, message)

    def tell_failed(self, request: Request, code: str, text: str) -> None:
        """Sends the error now, although a worker may still read the inputs."""
        held = request.on_loan and not request.step_of
        self.send(request, (FailHeld if held else Fail)(request.client_number, code, text))

    def _trace(self, request: Request, code: str) -> None:
        """Ends the trace of a request that is answered now, if there is one."""
        state = self._state
        if state.traces.open:
            record = state.traces.answered(request, code, state.now)
            if record is not None:
                state.effects.append(record)

    def take_back(self, client: ClientState, outputs: Iterable[Tensor]) -> None:
        """Returns outputs that the client was given, or should have been given, to the worker."""
        for handle in _of_others(client, handles_of(outputs)):
            self._state.ledger.take_back(client, handle)

    def drop(self, client: ClientState, handles: Iterable[Handle]) -> None:
        """Unpins outputs that a run kept for this client and that will not be read any more."""
        for handle in _of_others(client, handles):
            self._state.ledger.unpin(handle)

    def answer_in_order(self, version: Version) -> None:
        """Delivers responses from the head of the order, as far as they are complete; removes requests answered
        early."""
        order = version.order
        while order and order[0].state in (_DONE, _LINGERING, _ENDED):
            request = order.popleft()
            if request.state is _DONE:
                assert request.reply is not None
                self.deliver(request, request.reply)
        if order and len(order) > version.order_swept:
            left = [request for request in order if request.state not in _GONE]
            order.clear()
            order.extend(left)
            version.order_swept = max(ORDER, 2 * len(left))

    def drop_done(self, request: Request) -> None:
        """Drops a complete response that was waiting for its turn and has lost its client."""
        self._drop_reply(request)
        self.end(request)

    def _drop_reply(self, request: Request) -> None:
        if not isinstance(request.reply, Reply):
            return
        if request.step_of:
            self.drop(request.client, handles_of(request.reply.outputs))
        elif not request.client.gone:
            self.take_back(request.client, request.reply.outputs)

    def end(self, request: Request) -> None:
        """Removes the request from all tables."""
        state = request.state
        if request.step_of:
            run = self._state.runs[request.step_of]
            run.ended(request)
            request.client.steps -= 1
            request.client.bytes -= request.inline
            self._state.changed_runs[run] = None
        elif state is not _LINGERING:  # a lingering request has left already, and its number may be in use again
            self.leaves(request)
        request.move(_ENDED)
        del self._state.requests[request.number]
        if state is _LINGERING and is_stream(request):
            self._state.abandoned[request.client.user] -= 1
            if not self._state.abandoned[request.client.user]:
                del self._state.abandoned[request.client.user]
        if request.sequence is not None:
            request.sequence.left(request)
            self._state.dirty[request.version] = None
        if self._state.traces.open:  # requests that were not answered
            self._state.traces.open.pop(request.number, None)
        if state is not _DONE:
            self._release_request(request)

    def leaves(self, request: Request) -> None:
        """The client does not wait for it any more."""
        request.client.requests.pop(request.client_number, None)
        if not request.step_of:  # a step counts until it ends
            request.client.bytes -= request.inline
        if request.held:
            self._state.answered_calls.append(request)

    def _release_request(self, request: Request) -> None:
        """Releases the memory that it used."""
        state = self._state
        for handle in request.pins:
            state.ledger.unpin(handle)
        if request.segments:
            state.ledger.done_with(request.segments)
        if request.blocks:
            state.effects.append(Free(request.blocks))

    def end_failed(self, request: Request, code: str, text: str, now: int) -> None:
        """Fails a request that no worker has any more; the error is delivered in order."""
        if request.state is _LINGERING:
            self.released(request)
            return
        request.version.statistics.failed(FailureKind.BACKEND, now - request.arrived)
        self.answer(request, Fail(request.client_number, code, text))

    def end_early(self, request: Request, code: str, text: str, now: int) -> None:
        """Fails a request at once, without waiting for its turn. It has already been removed from the queue."""
        version = request.version
        version.statistics.failed_as(code, now - request.arrived)
        self.send(request, Fail(request.client_number, code, text))
        self.finish(request, code)
        if version.order is not None:
            self.answer_in_order(version)

    def fail_early(self, request: Request, code: str, text: str, now: int) -> None:
        """Fails a request at once, whatever its state. A worker that could still drop it is notified."""
        version = request.version
        if request.state is _QUEUED:
            version.drop(request)
            self.end_early(request, code, text, now)
            self._state.dirty[version] = None
            return
        if request.state is _DONE:  # already counted
            self.send(request, Fail(request.client_number, code, text))
            self._drop_reply(request)
            self.finish(request, code)
            return
        chain = self._state.runs.get(request.number)
        if chain is not None:
            chain.fail(code, text)
            self._state.changed_runs[chain] = None
            return
        version.statistics.failed_as(code, now - request.arrived)
        self.tell_failed(request, code, text)
        self._trace(request, code)
        self.linger(request)

    def linger(self, request: Request) -> None:
        """The request has been answered (or has lost its client) while a worker has it."""
        request.move(_LINGERING)
        if is_stream(request):
            self._state.abandoned[request.client.user] += 1
        if request.sequence is not None:
            text = f"an earlier request of sequence {request.sequence.id!r} was cancelled, which ended the sequence"
            request.sequence.fail("CANCELLED", text)
            request.sequence.mark_changed()
            self._state.dirty[request.version] = None
        if not request.step_of:
            self.leaves(request)
        instance = request.instance
        if instance is not None:  # the worker drops it if it has not started, else notifies the model
            self._state.send(instance.peer, Withdraw((request.number,)))
        if request.version.order is not None:
            self.answer_in_order(request.version)

    def released(self, request: Request) -> None:
        if request.on_loan and not request.step_of and not request.client.gone:
            self._state.send(request.client.number, Released(request.client_number))
        self.end(request)

    def give(self, client: ClientState, handles: Iterable[Handle]) -> None:
        """Gives holds on these handles to the client."""
        for handle in handles:
            if client.outputs != "frames":
                self._state.ledger.show(handle.segment, client.number)
            self._state.ledger.give(client, handle)

    def pass_on(self, request: Request, handles: Iterable[Handle]) -> None:
        """Gives the outputs of an ensemble to its requester: a client, or another run."""
        client = request.client
        made = _of_others(client, handles)
        if request.step_of:
            for handle in made:
                self._state.ledger.keep(handle)
        elif not client.gone:
            self.give(client, made)


def is_stream(request: Request) -> bool:
    """Does only the model decide when it ends? That may be long after its caller has left."""
    return request.version.decoupled and request.version.graph is None


def _of_others(client: ClientState, handles: Iterable[Handle]) -> list[Handle]:
    """Removes handles to the client's own memory, which the ledger does not track."""
    return [handle for handle in handles if not client.has_placed(handle)]
