"""Models that call other models: the worker becomes a client on its own link, and its calls are ordinary requests.

The difference is that the calling instance may block until its call is answered. While it is blocked, no work is sent
to it, its execution limit is paused, and its resources are lent to others. A call that would close a cycle of waiting
instances fails (deadlock.py).

Invariant: a worker receives only memory that the parent of its call (the request that it is running) may receive,
because a call has the audience of its parent.
"""

from __future__ import annotations

from shmserve.core.batching import dispatch
from shmserve.core.calls import deadlock
from shmserve.core.effects import Query
from shmserve.core.exit import exit, responses
from shmserve.core.intake import waiting
from shmserve.core.intake.intake import Intake, Memory
from shmserve.core.intake.queries import QueryQueue
from shmserve.core.intake.quotas import Quotas
from shmserve.core.ledger import INTERNAL
from shmserve.core.models import loading
from shmserve.core.records import CallingWorker, Instance, Payer, Request, Version
from shmserve.core.service.graph import handles_of
from shmserve.core.state import STOPPING, State
from shmserve.core.states import InstanceState
from shmserve.core.termination import kill_for_protocol_error
from shmserve.errors import InvalidRequest, ServeError, Unavailable, Unsupported
from shmserve.protocol import roles
from shmserve.protocol.messages import Ask, Cancel, Fail, Handle, More, Return
from shmserve.protocol.worker_messages import Call

USER = "worker"
"""The user of sequences that models start."""


class ModelCalls:
    def __init__(self, state: State, intake: Intake, queries: QueryQueue, quotas: Quotas) -> None:
        self.state = state
        self.quotas = quotas
        self._intake = intake
        self._queries = queries

    # ------------------------------------------------------------------------------------ workers' messages

    def call(self, version: Version, instance: Instance, message: Call, now: int) -> None:
        caller, peer = instance.caller, instance.peer
        if caller is None:
            caller = instance.caller = CallingWorker(
                peer,
                INTERNAL,
                "worker",
                self.state.ledger,
                "memfd",
                instance.spec.name,
                user=USER,
                roles=roles.ALL_ROLES,
                answered=self.state.answered_calls,
            )
        if not message.call or message.call in caller.requests:
            kill_for_protocol_error(self.state, version, instance, f"Call {message.call}")
            return
        try:
            request = self._ask(caller, message, now)
        except ServeError as error:
            self.state.send(peer, Fail(message.call, error.code, error.message))
            return
        if instance.state is InstanceState.STARTING:  # the called model may have to load first
            loading.load_over(self.state, instance)
        if message.held and request.state not in deadlock.ANSWERED:
            stuck = deadlock.closes_cycle(self.state, request)
            if stuck:
                exit.fail_early(self.state, request, "UNAVAILABLE", stuck)

    def cancel(self, version: Version, instance: Instance, message: Cancel, now: int) -> None:
        request = self._of(instance, message.request)
        if request is None:  # already answered (the messages crossed), or an operation instead of a call
            self.state.effects.append(Query(instance.peer, message))
        else:
            exit.fail_early(self.state, request, "CANCELLED", "the call was cancelled by the model that made it")

    def more(self, version: Version, instance: Instance, message: More, now: int) -> None:
        responses.more(self.state, self._of(instance, message.request), message.count)

    def give_back(self, version: Version, instance: Instance, message: Return, now: int) -> None:
        try:
            for handle in message.handles:
                if instance.caller is None:
                    raise InvalidRequest("a handle was returned that is not held")
                self.state.ledger.take_back(instance.caller, handle)
        except InvalidRequest:
            kill_for_protocol_error(self.state, version, instance, "Return of a handle that it does not hold")

    def ask(self, version: Version, instance: Instance, message: Ask, now: int) -> None:
        """A query from a model about the server, or an operation. An instance that waits for another model to load does
        not count as loading."""
        try:
            if message.what and message.what not in roles.QUERIES:
                raise roles.unknown(message.what)
            if instance.state is InstanceState.STARTING and message.what == "load":
                loading.load_over(self.state, instance)
            if message.what not in ("load", "unload"):  # which apply to all models of a name
                message.model = self.state.resolve(message.model, version.model)
            self._queries.put(instance.peer, message)
        except ServeError as error:
            self.state.send(instance.peer, Fail(message.request, error.code, error.message))

    def _of(self, instance: Instance, number: int) -> Request | None:
        caller = instance.caller
        return caller.requests.get(number) if caller is not None else None

    # ------------------------------------------------------------------------------------ admission

    def check(self, request: Request, message: Call, now: int) -> None:
        """Admits a call that has waited for its model to load."""
        caller = request.client
        assert isinstance(caller, CallingWorker)
        self._ask(caller, waiting.message_of(request, message, now), now, request)
        self.state.deadlock_possible = True

    def _ask(self, caller: CallingWorker, message: Call, now: int, waited: Request | None = None) -> Request:
        calling = _Call(self, caller, message, waited)
        try:
            return self._intake.ask(caller, message.call, message, now, waited=waited, calling=calling)
        except ServeError as error:
            self.state.observers.refused(self.state.ready.get(message.model), error)
            text = f"Model {message.model} - Error when running inference: {error.message}"
            raise type(error)(text) from None

    # ------------------------------------------------------------------------------------ waiting instances

    def hold(self, caller: CallingWorker, request: Request) -> None:
        """The instance blocks until its call is answered."""
        caller.blocking.add(request.number)
        caller.waits_for += 1
        if caller.waits_for > 1:
            return
        state = self.state
        version, instance = state.instances[caller.number]
        caller.since = state.now
        state.blocked_instances[instance] = None
        version.calls_others = True
        state.to_dispatch[version] = None
        if state.loading.queue:  # other instances of the version may be needed now
            state.memory.changed = True
        dispatch.release_resources(state, instance)

    def resume_answered(self) -> None:
        """Resumes the instances whose last call has been answered."""
        answered = self.state.answered_calls
        while answered:
            self._resume(answered.pop())

    def _resume(self, caller: CallingWorker) -> None:
        caller.waits_for -= 1
        if caller.gone or caller.waits_for:
            return
        state = self.state
        version, instance = state.instances[caller.number]
        del state.blocked_instances[instance]
        state.to_dispatch[version] = None
        if instance.running is not None:
            instance.running.waited += state.now - caller.since
            if state.limiter is not None:
                state.limiter.take_again(instance)
            if not instance.watched:
                dispatch.check_hang(state, version, instance, state.now)
        elif instance.lease:
            state.leases[instance.lease].resumed = state.now
            instance.leased_since = instance.leased_since and state.now

    def check_deadlocks(self) -> None:
        """Fails the newest call of each cycle of waiting instances."""
        while True:
            request, text = deadlock.newest_in_cycle(self.state)
            if request is None:
                return
            exit.fail_early(self.state, request, "UNAVAILABLE", text)


class _Call:
    """What intake asks of a call. `waited`: the request under which it has waited for its model to load."""

    def __init__(self, calls: ModelCalls, caller: CallingWorker, message: Call, waited: Request | None) -> None:
        self._calls = calls
        self._caller = caller
        self._message = message
        self._waited = waited
        version, self._instance = calls.state.instances[caller.number]
        self.model = version.model
        self.parent = self._parent()

    @property
    def payer(self) -> Payer:
        return self._caller if self.parent is None else self.parent.payer

    def _parent(self) -> Request | None:
        """The request that the call names, if the instance is running it or still answering it."""
        number, instance = self._message.parent, self._instance
        request = self._calls.state.requests.get(number)
        if request is None or request.instance is not instance:
            return None
        if number in instance.streams or (request.batch is not None and request.batch is instance.running):
            return request
        return None

    def check_caller(self) -> None:
        caller, state, quotas = self._caller, self._calls.state, self._calls.quotas
        if state.draining and self.parent is None and not self._instance.lease and self._waited is None:
            raise Unavailable(STOPPING)  # the requests of a lease have no numbers, so its calls name no parent
        if len(caller.requests) >= state.limits.client_requests:
            raise Unavailable(
                f"{len(caller.requests)} calls of this instance are in flight, the limit (client_requests); wait for "
                "responses first"
            )
        text = quotas.held(caller) if caller.held_bytes > quotas.heavy else ""
        if text:
            raise Unavailable(text)

    def find(self, model: str, number: int) -> Version:
        state = self._calls.state
        if self._instance.state is InstanceState.STARTING:  # models that wait for each other never load
            return state.look_up(model, number)
        return waiting.find(state, model, number)

    def check_form(self, version: Version) -> None:
        options = self._message.options
        if version.service.decoupled and not (options is not None and options.window):
            raise Unsupported(
                f"Model {version.model} is using the decoupled. The current BLS request call doesn't support models "
                "using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
                "'async_exec' calls for decoupled models.'"
            )
        for wanted in self._message.outputs or ():
            if wanted.place is not None:
                raise InvalidRequest(f"output '{wanted.name}' of a call cannot be written to memory of the caller")

    def memory(self) -> Memory:
        ledger, parent = self._calls.state.ledger, self.parent
        handles = handles_of(self._message.inputs)
        places = []
        for handle in handles:
            if parent is not None and _has(parent, handle):
                place = ledger.block_of(handle)
            else:
                place = ledger.resolve(self._caller, handle) or ledger.held(self._caller, handle)
            if place is not None:
                places.append(place)
        segments = tuple([handle.segment for handle in handles])
        ledger.use(segments)
        return segments, tuple([ledger.pin(place) for place in places]), 0

    def entered(self, request: Request) -> None:
        if self._message.held and self._waited is None:
            self._calls.hold(self._caller, request)


def _contains(outer: Handle, inner: Handle) -> bool:
    return (
        outer.segment == inner.segment
        and outer.offset <= inner.offset
        and inner.offset + inner.size <= outer.offset + outer.size
    )


def _has(parent: Request, handle: Handle) -> bool:
    """True if these bytes are part of the parent's inputs."""
    return any(
        _contains(part, handle) for tensor in parent.inputs if isinstance(tensor.data, tuple) for part in tensor.data
    )
