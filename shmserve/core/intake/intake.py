"""The one way into the core for the requests of clients, models, ensembles and shadows.

`ask` takes the message of a client, or a call of a model: it finds the version, lets the request wait while that is
loading, checks it, and queues it. What differs for a call is asked of its `Calling`. `ask_columns` does the same for
many requests of one form at once. `step` makes the request of a step, which its ensemble has checked, and `copy` the
request of a shadow, which no limit may refuse.

Invariant: `ask_columns` refuses the same requests as `ask`, with the same errors. Once the memory of a request is
pinned, nothing refuses it.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Protocol

from shmserve.core.batching import sequence_scheduler
from shmserve.core.exit import shadow
from shmserve.core.intake import enqueue, waiting
from shmserve.core.intake.connections import Connections
from shmserve.core.intake.quotas import Quotas
from shmserve.core.intake.refusals import BatchRefusals, refuse
from shmserve.core.ledger import INTERNAL
from shmserve.core.records import ClientState, Payer, Request, Requester, Version
from shmserve.core.service.graph import HANDLE_BYTES
from shmserve.core.service.validation import Checked, options_bytes
from shmserve.core.state import STOPPING, State, Timer
from shmserve.core.states import RequestState, VersionState
from shmserve.errors import InvalidRequest, ServeError, Unavailable, Unsupported
from shmserve.protocol import roles
from shmserve.protocol.messages import OWNER_SHIFT, Handle, Infer, InferBatch, Options, Reclaim, Tensor, WantedOutputs
from shmserve.protocol.namespaces import namespace_of
from shmserve.protocol.worker_messages import Call, StepOptions

Memory = tuple[tuple[int, ...], tuple[Handle, ...], int]
"""The segments that a worker must map for a request, the holds that it pins, and the bytes of its inputs."""
_NOTHING: Memory = ((), (), 0)
_INFER = roles.INFER
_LAST_LEVEL = 1 << 30
"""The priority level of the requests of shadows, behind all others."""


class Calling(Protocol):
    """What differs for a call of a model. `model`: the calling model. `parent`: the request that it is running, if the
    call names it."""

    model: str
    parent: Request | None

    @property
    def payer(self) -> Payer:
        """The one of its parent."""

    def check_caller(self) -> None:
        """Raises if the model may not call now. Shared quotas do not apply: the parent request has already been
        admitted, and refusing its call would only make it hold its resources longer."""

    def find(self, model: str, number: int) -> Version:
        """The version that serves the call, or that is loading. Raises if there is none."""

    def check_form(self, version: Version) -> None:
        """Raises if a model cannot get the responses of this version."""

    def memory(self) -> Memory: ...

    def entered(self, request: Request) -> None:
        """The call has been made, and is about to be queued."""


class Intake:
    def __init__(self, state: State, quotas: Quotas, connections: Connections) -> None:
        self._state = state
        self._quotas = quotas
        self._connections = connections
        self._refusals = BatchRefusals(state)
        self._client_requests = state.limits.client_requests
        self._busy = quotas.busy
        self._heavy = quotas.heavy
        self._samples = state.observers.traces.samples

    # ------------------------------------------------------------------------------------ clients and models

    def ask(
        self,
        client: ClientState,
        number: int,
        message: Infer | Call,
        now: int,
        blocks: tuple[Handle, ...] = (),
        waited: Request | None = None,
        calling: Calling | None = None,
    ) -> Request:
        """Raises if the request is refused. `blocks`: its frames, in the broker's own memory. `waited`: the request
        under which the message has waited for its model to load."""
        state, options, inputs, outputs = self._state, message.options, message.inputs, message.outputs
        if state.namesakes:
            near = namespace_of(calling.model) if calling is not None else ""
            message.model = state.full_name(message.model, near)
        version = None if message.version else state.ready.get(message.model)
        continued: Version | None = None
        waits = False
        if options is not None and options.sequence:
            continued = sequence_scheduler.version_of(state, client, message.model, message.version, options)
            version = continued or version
            if version is not None and waited is None:  # an earlier request of the sequence may wait there
                waits = version.unchecked.count > 0
        elif version is not None and state.loaded_versions and waited is None:  # earlier requests still wait there
            waits = version.unchecked.count > 0
        payer: Payer = client
        if calling is not None:
            calling.check_caller()
            payer = calling.payer
        else:
            numbers = client.requests
            if not client.roles & _INFER:
                self._connections.check_role(client, "infer")
            if number == 0 or number in numbers:
                raise InvalidRequest(f"request number {number} is 0 or already in use by a request in flight")
            if state.draining and continued is None and waited is None:
                raise Unavailable(STOPPING)
            if len(numbers) >= self._client_requests:
                raise Unavailable(
                    f"{len(numbers)} requests of this client are in flight, its limit (client_requests); wait for "
                    "responses first"
                )
            if name := message.payer:  # type: ignore[union-attr]  # a Call comes with `calling`
                payer = client.callers[name]
        if version is None:
            find = partial(waiting.find, state) if calling is None else calling.find
            version = find(message.model, message.version)
            waits = version.state is VersionState.LOADING or (version.unchecked.count > 0 and waited is None)
        if waits:
            return self._wait(client, payer, number, message, version, now, blocks, waited, calling)
        service = version.service
        rows, signature, inline, shared, length = service.checker.check(inputs, outputs)
        streamed, plain = service.decoupled, service.plain
        if options is not None:
            inline += options_bytes(options)
            streamed = streamed or options.window > 0
            plain = plain and not options.sequence
        if shared:
            inline += HANDLE_BYTES * sum([len(tensor.data) for tensor in inputs if type(tensor.data) is tuple])
        busy = False
        if calling is not None:
            calling.check_form(version)
        else:
            if waited is None:
                busy = len(state.requests) >= self._busy
                if busy:
                    self._quotas.check_queue(payer, version, inline)
                if client.held_bytes > self._heavy:
                    self._check_held(client)
            if streamed:
                self._check_stream(payer, version, options)
        level = 0 if plain else enqueue.level(state, client, version, message.version, options, rows, now)
        if service.prompts is not None and calling is None:
            enqueue.check_prompt(version, payer, level, inputs, options, message.timeout_us, now)
        if waited is None:
            segments, pins, size = self._memory(client, message, blocks, calling) if shared else _NOTHING
            own, arrived = state.next_number(), now
        else:
            segments, pins, size = waited.segments, waited.pins, waited.input_bytes
            own, arrived = waited.number, waited.arrived
            waited.move(RequestState.ENDED)  # its timers end; the new request has its place in the tables
            payer = waited.payer  # which has entered
        request = Request(
            own,
            client,
            client,
            payer,
            number,
            version,
            inputs,
            outputs,
            options,
            rows,
            rows or 1,
            inline,
            signature,
            segments,
            pins,
            arrived,
            level,
            0,
            client.audience,
            streamed or shared,
            length,
        )
        client.requests[number] = request
        state.requests[own] = request
        client.bytes += inline
        if size:
            request.input_bytes = size
            client.input_bytes += size
        if busy:
            self._quotas.admitted(payer, inline)
        if message.timeout_us:
            request.deadline = now + message.timeout_us * 1000
        if calling is None:
            if payer is not client and waited is None:  # `payer.enter`
                payer.entered += 1  # type: ignore[union-attr]
            if state.shadows and not message.version and message.model in state.shadows:
                shadow.choose(state, request, state.shadows[message.model], self.copy)
            if options is not None or self._samples:
                state.observers.admitted(version, (request,))
        else:
            _belongs(request, calling)
            if waited is None:
                payer.enter()
            state.observers.call_admitted(request, calling.parent)
            calling.entered(request)
        if request.deadline:
            state.set_timer(request.deadline, Timer.DEADLINE, request)
        if service.plain and not state.lease_suspects:  # `enqueue.put` in a straight line
            service.queue.add(request)
            state.to_dispatch[version] = None
        else:
            enqueue.put(state, version, message.version, request, now)
        return request

    def _wait(
        self,
        client: ClientState,
        payer: Payer,
        number: int,
        message: Infer | Call,
        version: Version,
        now: int,
        blocks: tuple[Handle, ...],
        waited: Request | None,
        calling: Calling | None,
    ) -> Request:
        """Queues the request until the version has loaded."""
        if waited is not None:
            waiting.wait_again(waited, version)
            return waited
        state = self._state
        inline, shared = waiting.size_of(message)
        busy = calling is None and len(state.requests) >= self._busy
        if busy:
            self._quotas.check_queue(payer, version, inline)
        if client.held_bytes > self._heavy and calling is None:
            self._check_held(client)
        segments, pins, size = self._memory(client, message, blocks, calling) if shared else _NOTHING
        request = Request(
            number=state.next_number(),
            requester=client,
            client=client,
            payer=payer,
            client_number=number,
            version=version,
            inputs=message.inputs,
            outputs=message.outputs,
            options=message.options,
            rows=0,
            cost=1,
            inline=inline,
            signature=None,
            segments=segments,
            pins=pins,
            arrived=now,
            deadline=now + message.timeout_us * 1000 if message.timeout_us else 0,
            audience=client.audience,
            special=True,
            unchecked=message,
            input_bytes=size,
        )
        if calling is not None:
            _belongs(request, calling)
        waiting.add(state, request)
        payer.enter()
        if busy:
            self._quotas.admitted(payer, inline)
        if calling is not None:
            calling.entered(request)
        return request

    def _check_held(self, client: ClientState) -> None:
        text = self._quotas.held(client)
        if not text:
            return
        if not client.reclaiming:
            client.reclaiming = True
            self._state.send(client.number, Reclaim())
        raise Unavailable(text)

    def _check_stream(self, payer: Payer, version: Version, options: Options | None) -> None:
        if options is None or not options.window:
            raise Unsupported(
                f"model '{version.model}' has a decoupled transaction policy: it may send several responses; "
                "call it with stream()"
            )
        abandoned = self._state.abandoned[payer.user]
        if abandoned >= self._client_requests:
            raise Unavailable(
                f"{abandoned} cancelled streams of this user have not been ended by their models, the limit "
                "(client_requests); try again later, and make the models check for cancellation"
            )

    def _memory(
        self, client: ClientState, message: Infer | Call, blocks: tuple[Handle, ...], calling: Calling | None
    ) -> Memory:
        if calling is not None:
            return calling.memory()
        segments: list[int] = []
        size = 0
        places = []
        ledger = self._state.ledger
        for tensor in message.inputs:
            if not isinstance(tensor.data, tuple):
                continue
            for handle in tensor.data:
                size += handle.size
                if blocks and handle in blocks:
                    segments.append(handle.segment)
                    continue
                place = ledger.resolve(client, handle)
                segments.append(handle.segment)
                if place is not None:
                    places.append(place)
        for wanted in message.outputs or ():
            if wanted.place is not None:
                if wanted.place.segment >> OWNER_SHIFT != client.number:
                    raise InvalidRequest(f"output '{wanted.name}' can only be written to memory that the caller owns")
                ledger.resolve(client, wanted.place)
                segments.append(wanted.place.segment)
        if not segments:
            return _NOTHING
        self._quotas.check_inputs(client, size)
        used = tuple(segments)
        ledger.use(used)
        for block in blocks:
            ledger.keep(block)
        return used, (*blocks, *[ledger.pin(place) for place in places]), size

    # ------------------------------------------------------------------------------------ columns

    def ask_columns(self, client: ClientState, message: InferBatch, now: int) -> None:
        """Admits requests of one form, and answers those that are refused. Common properties are checked once, unless
        they need more than the usual checks."""
        state, count = self._state, len(message.columns.requests)
        if state.namesakes:
            with suppress(InvalidRequest):  # which answers each request
                message.model = state.full_name(message.model)
        version = state.ready.get(message.model)
        try:
            if (
                client.roles & _INFER
                and version is not None
                and not message.version
                and version.service.plain
                and not version.service.decoupled
                and not state.draining
                and len(client.requests) + count <= self._client_requests
                and len(state.requests) + count <= self._busy
                and client.held_bytes <= self._heavy
                and not state.lease_suspects
                and message.model not in state.shadows
                and not state.loaded_versions
            ):
                self._ask_usual(client, version, message, now)
            else:
                for index in range(count):
                    self._ask_one(client, message, index, now)
        finally:
            self._refusals.end(client, message)

    def _ask_one(self, client: ClientState, message: InferBatch, index: int, now: int) -> None:
        """Admits a request of a batch by the checks of single requests."""
        refusals, number = self._refusals, message.columns.requests[index]
        valid = number > 0 and number not in client.requests
        if refusals.known and valid and refusals.repeats(client, message, index):
            return
        tensors = message.columns.tensors(index)
        single = Infer(number, message.model, message.version, tensors, None, message.timeout_us, None, message.payer)
        try:
            self.ask(client, number, single, now)
            refusals.known.clear()  # a limit may have been reached, which is checked first
        except ServeError as error:
            if valid:
                refusals.add(client, message, index, error)
            else:
                refusals.answer(client, message)
                refuse(self._state, client, message.model, number, error)

    def _ask_usual(self, client: ClientState, version: Version, message: InferBatch, now: int) -> None:
        """The straight line for requests that need only the usual checks."""
        service = version.service
        state, columns, checker, refusals = self._state, message.columns, service.checker, self._refusals
        assert version.policy is not None, version.label
        form = checker.form(columns.forms)
        known, requests, numbers = form.by_rows, state.requests, client.requests
        deadline = now + message.timeout_us * 1000 if message.timeout_us else 0
        payer = client.payer(message.payer)
        admitted: list[Request] = []
        like: Request | None = None
        sizes: list[int] = []
        inline = 0
        for index, (number, rows, data) in enumerate(zip(columns.requests, columns.rows, columns.data, strict=True)):
            if number == 0 or number in numbers:
                self._ask_one(client, message, index, now)
                continue
            if like is None or rows != like.rows:
                checked = known.get(rows)
                if checked is None:
                    if refusals.known and refusals.repeats(client, message, index):
                        continue
                    try:
                        checked = checker.check_rows(form, rows, data)
                    except InvalidRequest as error:
                        refusals.add(client, message, index, error)
                        continue
                if checked is None:
                    self._ask_one(client, message, index, now)
                    continue
                sizes, inline = checked.sizes, checked.inline
                like = Request(
                    number=0,
                    requester=client,
                    client=client,
                    payer=payer,
                    client_number=0,
                    version=version,
                    inputs=(),
                    outputs=None,
                    options=None,
                    rows=rows,
                    cost=rows or 1,
                    inline=inline,
                    signature=checked.signature,
                    segments=(),
                    pins=(),
                    arrived=now,
                    deadline=deadline,
                    audience=client.audience,
                    length=checked.length,
                    form=form,
                )
            if sizes != list(map(len, data)):
                self._ask_one(client, message, index, now)
                continue
            request: Request = like.__copy__()  # type: ignore[attr-defined]  # cheaper than filling in all fields
            request.number = own = state.next_number()
            request.client_number = number
            request.data = data
            numbers[number] = request
            requests[own] = request
            client.bytes += inline
            if deadline:
                state.set_timer(deadline, Timer.DEADLINE, request)
            admitted.append(request)
        if admitted:
            payer.enter(len(admitted))
            if self._samples:
                state.observers.admitted(version, admitted)
            service.queue.add_all(admitted)
            state.to_dispatch[version] = None

    # ------------------------------------------------------------------------------------ checked requests

    def step(
        self,
        run: Requester,
        parent: Request,
        version: Version,
        inputs: tuple[Tensor, ...],
        outputs: WantedOutputs | None,
        options: Options | None,
        checked: tuple[int, object, int, int],
        segments: tuple[int, ...],
        level: int,
        now: int,
        audience: str,
        in_shared_memory: bool,
        forwarded: set[Handle] | None,
        step: StepOptions | None,
    ) -> Request:
        """Makes the request of a step of the ensemble request `parent`, which its run then queues with `enqueue.put`.
        `checked`: rows, signature, inline bytes and length."""
        rows, signature, inline, length = checked
        request = Request(
            self._state.next_number(),
            run,
            parent.client,
            parent.payer,
            0,
            version,
            inputs,
            outputs,
            options,
            rows,
            rows or 1,
            inline,
            signature,
            segments,
            (),
            now,
            level,
            parent.deadline,
            audience,
            True,
            length,
            parent.number,
            in_shared_memory,
            forwarded,
            step,
        )
        self._state.requests[request.number] = request
        self._state.observers.child_admitted(request, parent)
        return request

    def copy(
        self,
        requester: Requester,
        original: Request,
        target: Version,
        inputs: tuple[Tensor, ...],
        checked: Checked,
        segments: tuple[int, ...],
        pins: tuple[Handle, ...],
    ) -> None:
        """Makes and queues the request of a shadow. See `CopyRequest`."""
        state = self._state
        number, client = state.next_number(), state.shadow_client
        rows, signature, inline, _, length = checked
        request = Request(
            number,
            requester,
            client,
            client,
            number,
            target,
            inputs,
            original.outputs,
            original.options,
            rows,
            rows or 1,
            inline,
            signature,
            segments,
            pins,
            state.now,
            _LAST_LEVEL,
            0,
            INTERNAL,
            True,
            length,
        )
        state.requests[number] = request
        client.sent(request)
        target.service.queue.add(request)
        state.to_dispatch[target] = None


def _belongs(request: Request, calling: Calling) -> None:
    """A call has its parent's audience, ends with it, and has its deadline if that is earlier."""
    request.special, parent = True, calling.parent
    if parent is not None:
        request.parent, request.audience = parent.number, parent.audience
        if parent.deadline and not 0 < request.deadline < parent.deadline:
            request.deadline = parent.deadline
