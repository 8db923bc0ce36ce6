"""How requests end: answered, in their turn or early, and with everything that they used given back.

The rule of the file: whoever has asked (a client, or the run of an ensemble) is told exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable

from shmserve.core.effects import Free
from shmserve.core.ensembles.graph import handles_of
from shmserve.core.records import ORDER, Request, Version
from shmserve.core.requests.client import Client
from shmserve.core.state import State
from shmserve.core.states import RequestState, VersionState
from shmserve.core.stats.statistics import Failure
from shmserve.protocol.messages import Fail, FailHeld, Handle, Part, Released, Reply, Tensor, Value, Withdraw

_QUEUED, _SENT, _LINGERING, _DONE, _ENDED, _CHAINED, _OPEN = RequestState
_GONE = (_LINGERING, _ENDED)


class Ends:
    def __init__(self, state: State) -> None:
        self._state = state

    def answer(self, request: Request, message: Reply | Fail) -> None:
        """The answer to one that no worker has any more: now or, with preserve_ordering, in its turn."""
        order = request.version.order
        if order is None:
            self.deliver(request, message)
        else:
            request.reply = message
            request.move(_DONE)
            self._let_go(request)
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
        self.tell(request, message)
        if isinstance(message, Reply):
            self._made(request, message.outputs)
            self.copied_out(request, message.outputs)
        self.finish(request, message.code if isinstance(message, Fail) else "")

    def part(
        self, request: Request, outputs: tuple[Tensor, ...], parameters: dict[str, Value] | None, last: bool
    ) -> None:
        """One of its answers. After the last one it is to be finished."""
        if outputs:
            self._made(request, outputs)
        request.parts += 1
        self.tell(request, Part(request.client_number, request.version.number, outputs, parameters, last))
        self.copied_out(request, outputs)

    def _made(self, request: Request, outputs: tuple[Tensor, ...]) -> None:
        """A response, for those who look at single ones."""
        if self._state.traces.open:
            self._state.traces.made(request, outputs)
        first = request.version.statistics.first
        if first is not None and not request.parts:
            first.add(self._state.now - request.arrived)

    def copied_out(self, request: Request, outputs: tuple[Tensor, ...]) -> None:
        """In frames a client is sent copies of what it is told: it holds nothing."""
        client = request.client
        if not request.step_of and client.outputs == "frames" and not client.gone:
            self.take_back(client, outputs)

    def finish(self, request: Request, code: str) -> None:
        """It has had its (last) answer."""
        self._trace(request, code)
        self.end(request)

    def tell(self, request: Request, message: Reply | Part | Fail | FailHeld) -> None:
        """Whoever has asked."""
        if request.step_of:
            assert not isinstance(message, FailHeld)
            runs = self._state.runs
            run = runs[request.step_of]
            run.told(request, message, runs.get(request.number))
            self._state.stirred[run] = None
        elif not request.client.gone:
            options = request.options
            if isinstance(message, Reply) and request.version.decoupled and options is not None and options.window:
                message = Part(message.request, message.version, message.outputs, message.parameters, True)
            self._state.send(request.client.number, message)

    def tell_failed(self, request: Request, code: str, text: str) -> None:
        """Now, though a worker may still read its inputs."""
        held = request.on_loan and not request.step_of
        self.tell(request, (FailHeld if held else Fail)(request.client_number, code, text))

    def _trace(self, request: Request, code: str) -> None:
        """Of a request that is answered now, if it is traced."""
        state = self._state
        if state.traces.open:
            told = state.traces.answered(request, code, state.now)
            if told is not None:
                state.effects.append(told)

    def take_back(self, client: Client, outputs: Iterable[Tensor]) -> None:
        """Gives what the client was given, or was to be given, back to the worker."""
        for handle in _of_others(client, handles_of(outputs)):
            self._state.ledger.take_back(client, handle)

    def drop(self, client: Client, handles: Iterable[Handle]) -> None:
        """What a run was given for this client, and nobody will read any more."""
        for handle in _of_others(client, handles):
            self._state.ledger.unpin(handle)

    def answer_in_order(self, version: Version) -> None:
        """Whoever is first may be answered; one that has been answered early makes way."""
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
        """Its turn had not come, and nobody wants the answer any more."""
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
        """Over: nothing of it stays here."""
        state = request.state
        if request.step_of:
            run = self._state.runs[request.step_of]
            run.ended(request)
            request.client.steps -= 1
            request.client.bytes -= request.inline
            self._state.stirred[run] = None
        elif state is not _LINGERING:  # a lingering one has left already; its number may be in use again
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
        if self._state.traces.open:  # nobody was left to answer
            self._state.traces.open.pop(request.number, None)
        if state is not _DONE:
            self._let_go(request)

    def leaves(self, request: Request) -> None:
        """Its client waits for it no more."""
        request.client.requests.pop(request.client_number, None)
        if not request.step_of:  # a step counts until its end
            request.client.bytes -= request.inline
        if request.held:
            self._state.answered_calls.append(request)

    def _let_go(self, request: Request) -> None:
        """The memory that it used."""
        state = self._state
        for handle in request.pins:
            state.ledger.unpin(handle)
        if request.segments:
            state.ledger.done_with(request.segments)
        if request.blocks:
            state.effects.append(Free(request.blocks))

    def end_failed(self, request: Request, code: str, text: str, now: int) -> None:
        """The answer is an error, in its turn, and no worker has the request any more."""
        if request.state is _LINGERING:
            self.released(request)
            return
        request.version.statistics.failed(Failure.BACKEND, now - request.arrived)
        self.answer(request, Fail(request.client_number, code, text))

    def end_early(self, request: Request, code: str, text: str, now: int) -> None:
        """The answer is an error, at once: it does not wait for its turn. The queue has let the request go already."""
        version = request.version
        version.statistics.failed_as(code, now - request.arrived)
        self.tell(request, Fail(request.client_number, code, text))
        self.finish(request, code)
        if version.order is not None:
            self.answer_in_order(version)

    def fail_early(self, request: Request, code: str, text: str, now: int) -> None:
        """The answer is an error, now, wherever the request is. A worker that could still drop it is told to."""
        version = request.version
        if request.state is _QUEUED:
            version.drop(request)
            self.end_early(request, code, text, now)
            self._state.dirty[version] = None
            return
        if request.state is _DONE:  # and has been counted
            self.tell(request, Fail(request.client_number, code, text))
            self._drop_reply(request)
            self.finish(request, code)
            return
        chain = self._state.runs.get(request.number)
        if chain is not None:
            chain.fail(code, text)
            self._state.stirred[chain] = None
            return
        version.statistics.failed_as(code, now - request.arrived)
        self.tell_failed(request, code, text)
        self._trace(request, code)
        self.linger(request)

    def linger(self, request: Request) -> None:
        """Answered (or nobody left to answer) while a worker has it."""
        request.move(_LINGERING)
        if is_stream(request):
            self._state.abandoned[request.client.user] += 1
        if request.sequence is not None:
            text = f"an earlier request of sequence {request.sequence.id!r} was given up, and so is all of it"
            request.sequence.fail("CANCELLED", text)
            request.sequence.stirred()
            self._state.dirty[request.version] = None
        if not request.step_of:
            self.leaves(request)
        instance = request.instance
        if instance is not None:  # which takes it out if it waits, and tells the model if that can still stop
            self._state.send(instance.peer, Withdraw((request.number,)))
        if request.version.order is not None:
            self.answer_in_order(request.version)

    def released(self, request: Request) -> None:
        if request.on_loan and not request.step_of and not request.client.gone:
            self._state.send(request.client.number, Released(request.client_number))
        self.end(request)

    def give(self, client: Client, handles: Iterable[Handle]) -> None:
        """The client holds these from now on."""
        for handle in handles:
            if client.outputs != "frames":
                self._state.ledger.show(handle.segment, client.number)
            self._state.ledger.give(client, handle)

    def pass_on(self, request: Request, handles: Iterable[Handle]) -> None:
        """What the answer to an ensemble's request refers to is held by whoever gets it: its caller, or another run."""
        client = request.client
        made = _of_others(client, handles)
        if request.step_of:
            for handle in made:
                self._state.ledger.keep(handle)
        elif not client.gone:
            self.give(client, made)


def is_stream(request: Request) -> bool:
    """Only the model says when it ends, which may be long after its caller has lost interest."""
    return request.version.decoupled and request.version.graph is None


def _of_others(client: Client, handles: Iterable[Handle]) -> list[Handle]:
    """Its own memory is no matter of the ledger's."""
    return [handle for handle in handles if not client.has_placed(handle)]
