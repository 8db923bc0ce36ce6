"""Models that call other models: the worker becomes a client on its own link, and its calls are ordinary requests.

The difference is that the calling instance may block until its call is answered. While it is blocked, no work is sent
to it, its execution limit is paused, and its resources are lent to others. A call that would close a cycle of waiting
instances fails (deadlock.py).

Invariant: a worker receives only memory that the parent of its call (the request that it is running) may receive,
because a call has the audience of its parent.
"""

from __future__ import annotations

from shmserve.core import exit
from shmserve.core.batching import dispatch
from shmserve.core.calls import deadlock
from shmserve.core.effects import Query
from shmserve.core.ledger import INTERNAL
from shmserve.core.models import loading
from shmserve.core.models.termination import kill_for_protocol_error
from shmserve.core.records import CallingWorker, Instance, Request, Version
from shmserve.core.requests import enqueue, responses, waiting
from shmserve.core.requests.admission import count_refused
from shmserve.core.requests.queries import QueryQueue
from shmserve.core.requests.quotas import Quotas
from shmserve.core.requests.validation import options_bytes
from shmserve.core.sequences import scheduler
from shmserve.core.state import STOPPING, State, Timer
from shmserve.core.states import InstanceState, RequestState, VersionState
from shmserve.errors import InvalidRequest, ServeError, Unavailable, Unsupported
from shmserve.protocol import roles
from shmserve.protocol.messages import Ask, Cancel, Fail, Handle, More, Return
from shmserve.protocol.worker_messages import Call

USER = "worker"
"""The user of sequences that models start."""

_ANSWERED = (RequestState.LINGERING, RequestState.ENDED)


class ModelCalls:
    def __init__(
        self,
        state: State,
        queries: QueryQueue,
        quotas: Quotas,
    ) -> None:
        self._state = state
        self._queries = queries
        self._quotas = quotas

    # ------------------------------------------------------------------------------------ workers' messages

    def call(self, version: Version, instance: Instance, message: Call, now: int) -> None:
        caller, peer = instance.caller, instance.peer
        if caller is None:
            caller = instance.caller = CallingWorker(
                peer, INTERNAL, "worker", self._state.ledger, "memfd", instance.spec.name, user=USER,
                roles=roles.ALL_ROLES, answered=self._state.answered_calls,
            )  # fmt: skip
        if not message.call or message.call in caller.requests:
            kill_for_protocol_error(self._state, version, instance, f"Call {message.call}")
            return
        try:
            request = self._admit(caller, message, now)
        except ServeError as error:
            count_refused(self._state, message.model, error)
            self._state.send(peer, Fail(message.call, error.code, _failed(message, error)))
            return
        if instance.state is InstanceState.STARTING:  # the called model may have to load first
            loading.load_over(self._state, instance)
        if message.held and request.state not in _ANSWERED:
            stuck = deadlock.closes_cycle(self._state, request)
            if stuck:
                exit.fail_early(self._state, request, "UNAVAILABLE", stuck, now)

    def cancel(self, version: Version, instance: Instance, message: Cancel, now: int) -> None:
        request = self._of(instance, message.request)
        if request is None:  # already answered (the messages crossed), or an operation instead of a call
            self._state.effects.append(Query(instance.peer, message))
        else:
            exit.fail_early(self._state, request, "CANCELLED", "the call was cancelled by the model that made it", now)

    def more(self, version: Version, instance: Instance, message: More, now: int) -> None:
        request = self._of(instance, message.request)
        if request is not None and request.options is not None and request.options.window:
            responses.more(self._state, request, message.count)

    def give_back(self, version: Version, instance: Instance, message: Return, now: int) -> None:
        try:
            for handle in message.handles:
                if instance.caller is None:
                    raise InvalidRequest("a handle was returned that is not held")
                self._state.ledger.take_back(instance.caller, handle)
        except InvalidRequest:
            kill_for_protocol_error(self._state, version, instance, "Return of a handle that it does not hold")

    def ask(self, version: Version, instance: Instance, message: Ask, now: int) -> None:
        """A query from a model about the server, or an operation. An instance that waits for another model to load does
        not count as loading."""
        try:
            if message.what and message.what not in roles.QUERIES:
                raise roles.unknown(message.what)
            if instance.state is InstanceState.STARTING and message.what == "load":
                loading.load_over(self._state, instance)
            self._queries.put(instance.peer, message)
        except ServeError as error:
            self._state.send(instance.peer, Fail(message.request, error.code, error.message))

    def _of(self, instance: Instance, number: int) -> Request | None:
        caller = instance.caller
        return self._state.request_of(caller, number) if caller is not None else None

    # ------------------------------------------------------------------------------------ admission

    def check(self, request: Request, message: Call, now: int) -> None:
        """Admits a call that has waited for its model to load."""
        caller = request.client
        assert isinstance(caller, CallingWorker)
        try:
            self._admit(caller, waiting.message_of(request, message, now), now, request)
        except ServeError as error:
            count_refused(self._state, message.model, error)
            raise type(error)(_failed(message, error)) from None
        self._state.deadlock_possible = True

    def _admit(self, caller: CallingWorker, message: Call, now: int, waited: Request | None = None) -> Request:
        """`waited`: the request under which the call has waited for its model to load."""
        state, options = self._state, message.options
        instance = state.instances[caller.number][1]
        parent = self._parent(instance, message.parent)
        version = None
        if options is not None and options.sequence:
            version = scheduler.version_of(self._state, caller, message.model, message.version, options)
        if state.draining and parent is None and not instance.lease and waited is None:  # a lease has no numbers
            raise Unavailable(STOPPING)
        self._check_room(caller)
        if version is None and instance.state is InstanceState.STARTING:  # models that wait for each other never load
            version = state.look_up(message.model, message.version)
        version = version or waiting.find(state, message.model, message.version)
        if version.state is VersionState.LOADING or (version.unchecked.count and waited is None):
            return self._wait(caller, parent, message, version, now, waited)
        assert version.checker is not None, version.label
        rows, signature, inline, _, length = version.checker.check(message.inputs, message.outputs)
        if options is not None:
            inline += options_bytes(options)
        self._check_form(version, message)
        plain = version.plain and (options is None or not options.sequence)
        level = 0 if plain else enqueue.level(self._state, caller, version, message.version, options, rows, now)
        if waited is None:
            segments, pins = self._memory(caller, parent, message)
            number, arrived = state.next_number(), now
        else:
            segments, pins, number, arrived = waited.segments, waited.pins, waited.number, waited.arrived
            waited.move(RequestState.ENDED)  # its timers end; the new request has its place in the tables
        request = Request(
            number, caller, caller, message.call, version, message.inputs, message.outputs, options, rows, rows or 1,
            inline, signature, segments, pins, (), arrived, level, special=True, length=length,
            deadline=_first_of(now + message.timeout_us * 1000 if message.timeout_us else 0, parent),
            audience=INTERNAL if parent is None else parent.audience,
            parent=0 if parent is None else parent.number,
        )  # fmt: skip
        caller.requests[message.call] = number
        state.requests[number] = request
        caller.bytes += inline
        if request.deadline:
            state.set_timer(request.deadline, Timer.DEADLINE, request)
        state.observers.call_admitted(request, parent)
        if message.held and waited is None:
            self._hold(caller, request)
        enqueue.put(self._state, version, message.version, request, now)
        return request

    def _wait(
        self,
        caller: CallingWorker,
        parent: Request | None,
        message: Call,
        version: Version,
        now: int,
        waited: Request | None,
    ) -> Request:
        """Queues the call until the version has loaded."""
        if waited is not None:
            waiting.wait_again(waited, version)
            return waited
        inline, _ = waiting.size_of(message)
        segments, pins = self._memory(caller, parent, message)
        request = Request(
            self._state.next_number(), caller, caller, message.call, version, message.inputs, message.outputs,
            message.options, 0, 1, inline, None, segments, pins, (), now, special=True, unchecked=message,
            deadline=_first_of(now + message.timeout_us * 1000 if message.timeout_us else 0, parent),
            audience=INTERNAL if parent is None else parent.audience,
            parent=0 if parent is None else parent.number,
        )  # fmt: skip
        waiting.add(self._state, request)
        if message.held:
            self._hold(caller, request)
        return request

    def _parent(self, instance: Instance, number: int) -> Request | None:
        """The request with this number, if the instance is running it or still answering it."""
        request = self._state.requests.get(number)
        if request is None or request.instance is not instance:
            return None
        if number in instance.streams or (request.batch is not None and request.batch is instance.running):
            return request
        return None

    def _check_room(self, caller: CallingWorker) -> None:
        """Checks only the limits of the caller itself. Shared quotas do not apply: the parent request has already been
        admitted, and rejecting its call would only make it hold its resources longer."""
        limit = self._state.limits.client_requests
        if len(caller.requests) >= limit:
            raise Unavailable(
                f"{len(caller.requests)} calls of this instance are in flight, the limit (client_requests); wait for "
                "responses first"
            )
        if caller.held_bytes > self._quotas.heavy:
            text = self._quotas.held(caller)
            if text:
                raise Unavailable(text)

    def _check_form(self, version: Version, message: Call) -> None:
        window = message.options.window if message.options is not None else 0
        if version.decoupled and not window:
            raise Unsupported(
                f"Model {version.model} is using the decoupled. The current BLS request call doesn't support models "
                "using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
                "'async_exec' calls for decoupled models.'"
            )
        for wanted in message.outputs or ():
            if wanted.place is not None:
                raise InvalidRequest(f"output '{wanted.name}' of a call cannot be written to memory of the caller")

    # ------------------------------------------------------------------------------------ memory

    def _memory(
        self, caller: CallingWorker, parent: Request | None, message: Call
    ) -> tuple[tuple[int, ...], tuple[Handle, ...]]:
        """Returns the segments that a worker must map for this call, and the holds that it pins."""
        ledger = self._state.ledger
        handles = [part for tensor in message.inputs if isinstance(tensor.data, tuple) for part in tensor.data]
        places = []
        for handle in handles:
            if parent is not None and _has(parent, handle):
                place = ledger.block_of(handle) or self._of_frame(parent, handle)
            else:
                place = ledger.resolve(caller, handle) or ledger.held(caller, handle)
            if place is not None:
                places.append(place)
        segments = tuple(handle.segment for handle in handles)
        ledger.use(segments)
        return segments, tuple([ledger.pin(place) for place in places])

    def _of_frame(self, parent: Request, handle: Handle) -> tuple[int, int] | None:
        """A frame belongs to a single request. Turns it into a block that several requests can use."""
        while parent.is_step:
            parent = self._state.requests[parent.parent]
        for block in parent.blocks:
            if _contains(block, handle):
                self._state.ledger.keep(block)
                parent.blocks = tuple(other for other in parent.blocks if other is not block)
                parent.pins += (block,)
                return block.segment, block.offset
        return None

    # ------------------------------------------------------------------------------------ waiting instances

    def _hold(self, caller: CallingWorker, request: Request) -> None:
        """The instance blocks until its call is answered."""
        caller.blocking.add(request.number)
        caller.waits_for += 1
        if caller.waits_for > 1:
            return
        state = self._state
        version, instance = state.instances[caller.number]
        caller.since = state.now
        state.blocked_instances[instance] = None
        version.prefetch = False  # batches sent ahead to it would also wait
        state.to_dispatch[version] = None
        if state.load_queue:  # other instances of the version may be needed now
            state.memory_changed = True
        if state.limiter is not None:
            for other in state.limiter.release(instance):
                state.to_dispatch[other] = None

    def resume_answered(self) -> None:
        """Resumes the instances whose last call has been answered."""
        answered = self._state.answered_calls
        while answered:
            self._resume(answered.pop())

    def _resume(self, caller: CallingWorker) -> None:
        caller.waits_for -= 1
        if caller.gone or caller.waits_for:
            return
        state = self._state
        version, instance = state.instances[caller.number]
        del state.blocked_instances[instance]
        state.to_dispatch[version] = None
        if instance.running is not None:
            instance.running.waited += state.now - caller.since
            if state.limiter is not None:
                state.limiter.take_again(instance)
            if not instance.watched:
                dispatch.check_hang(self._state, version, instance, state.now)
        elif instance.lease:
            state.leases[instance.lease].resumed = state.now
            instance.leased_since = instance.leased_since and state.now

    def check_deadlocks(self, now: int) -> None:
        """Fails the newest call of each cycle of waiting instances."""
        while True:
            request, text = deadlock.newest_in_cycle(self._state)
            if request is None:
                return
            exit.fail_early(self._state, request, "UNAVAILABLE", text, now)


def _failed(message: Call, error: ServeError) -> str:
    return f"Model {message.model} - Error when running inference: {error.message}"


def _first_of(deadline: int, parent: Request | None) -> int:
    """The earlier of the call's own deadline and its parent's."""
    if parent is None or not parent.deadline:
        return deadline
    return min(deadline, parent.deadline) if deadline else parent.deadline


def _contains(outer: Handle, inner: Handle) -> bool:
    return (
        outer.segment == inner.segment
        and outer.offset <= inner.offset
        and inner.offset + inner.size <= outer.offset + outer.size
    )


def _has(parent: Request, handle: Handle) -> bool:
    """Are these bytes part of the parent's inputs?"""
    return any(
        _contains(part, handle) for tensor in parent.inputs if isinstance(tensor.data, tuple) for part in tensor.data
    )
