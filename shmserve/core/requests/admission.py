"""What connected clients request: infer, cancel, announce memory, return handles, query.

Invariant: every action is checked here against shmserve.protocol.roles, whichever endpoint it came through.
"""

from __future__ import annotations

import re

from shmserve.core import exit
from shmserve.core.batching import leases
from shmserve.core.effects import Forget, Free, Query
from shmserve.core.ensembles.graph import HANDLE_BYTES
from shmserve.core.events import Framed, Garbled, OwnSegment, OwnSegmentGone
from shmserve.core.ledger import INTERNAL
from shmserve.core.records import ClientState, Request, Version
from shmserve.core.requests import enqueue, responses, shadow, waiting
from shmserve.core.requests.connections import Connections
from shmserve.core.requests.queries import QueryQueue
from shmserve.core.requests.quotas import Quotas
from shmserve.core.requests.validation import options_bytes
from shmserve.core.sequences import scheduler
from shmserve.core.state import STOPPING, WORKERS_FROM, State, Timer
from shmserve.core.states import RequestState, VersionState
from shmserve.core.stats.statistics import limit_in
from shmserve.errors import InvalidRequest, ServeError, Unavailable, Unsupported
from shmserve.protocol import roles
from shmserve.protocol.messages import (
    BATCH_REQUESTS,
    DEVICE,
    NAME_LENGTH,
    OWNER_SHIFT,
    Ask,
    Cancel,
    Fail,
    FailBatch,
    Handle,
    Infer,
    InferBatch,
    Map,
    More,
    Reclaim,
    Return,
    Unmap,
)

_DEVICE_NAME = re.compile(rf"{DEVICE}[A-Za-z0-9+/]{{107}}=")
"""base64 of the 64 bytes of a device memory export and the 16 bytes of the device's UUID."""
_SEGMENT_NAME = re.compile(rf"/[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{NAME_LENGTH - 2}}}")
_INFER = roles.INFER
_NOTHING: tuple[tuple[int, ...], tuple[Handle, ...], int] = ((), (), 0)


def count_refused(state: State, model: str, error: ServeError, count: int = 1) -> None:
    """Counts rejected requests, by the limit that they exceeded or else by error code."""
    refused, why = state.refused, limit_in(error.message) or error.code
    refused[why] = refused.get(why, 0) + count
    version = state.ready.get(model)
    if version is not None and isinstance(error, Unavailable):
        version.statistics.refused(error.code, error.message, count, state.now)


class BatchRefusals:
    """The refused requests of an InferBatch. Consecutive requests that are refused for the same reason share an answer.

    Requests that differ only in their numbers and in the values of their inputs are equally invalid, so only the first
    one is checked. Limits are checked for each request."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.known: dict[tuple[int, tuple[int, ...]], ServeError] = {}
        """Rows and sizes of the inputs -> why such requests are invalid."""
        self._numbers: list[int] = []
        self._error: ServeError | None = None
        """The error of `_numbers`, which have not been answered yet."""

    def repeats(self, client: ClientState, message: InferBatch, index: int) -> bool:
        """Refuses a request, whose number is valid, if equal ones are invalid."""
        columns = message.columns
        error = self.known.get((columns.rows[index], tuple(map(len, columns.data[index]))))
        if error is None:
            return False
        self._add(client, message, index, error)
        return True

    def add(self, client: ClientState, message: InferBatch, index: int, error: ServeError) -> None:
        """Refuses a request whose number is valid."""
        if not isinstance(error, Unavailable):
            columns = message.columns
            self.known[columns.rows[index], tuple(map(len, columns.data[index]))] = error
        self._add(client, message, index, error)

    def _add(self, client: ClientState, message: InferBatch, index: int, error: ServeError) -> None:
        last = self._error
        if error is not last and (last is None or (error.code, error.message) != (last.code, last.message)):
            self.answer(client, message)
            self._error = error
        self._numbers.append(message.columns.requests[index])

    def answer(self, client: ClientState, message: InferBatch) -> None:
        """Answers the requests that were refused so far."""
        error, numbers = self._error, self._numbers
        if error is None:
            return
        self._error, self._numbers = None, []
        count_refused(self._state, message.model, error, len(numbers))
        if len(numbers) == 1:
            self._state.send(client.number, Fail(numbers[0], error.code, error.message))
        else:
            self._state.send(client.number, FailBatch(tuple(numbers), error.code, error.message))

    def end(self, client: ClientState, message: InferBatch) -> None:
        """Ends the batch."""
        self.answer(client, message)
        self.known.clear()


class Admission:
    def __init__(self, state: State, quotas: Quotas, queries: QueryQueue, connections: Connections) -> None:
        self._state = state
        self._quotas = quotas
        self._queries = queries
        self._connections = connections
        self._refusals = BatchRefusals(state)
        self._require_hello = connections.require_hello
        self._client_requests = state.limits.client_requests
        self._busy = self._quotas.busy
        self._heavy = self._quotas.heavy

    # ------------------------------------------------------------------------------------ inference

    def infer(self, peer: int, message: Infer, now: int, blocks: tuple[Handle, ...] = ()) -> None:
        client = self._state.clients.get(peer)
        if client is None or not client.outputs:
            self._require_hello(peer)
            if blocks:
                self._state.effects.append(Free(blocks))
            return
        try:
            self._admit(client, message, now, blocks)
        except ServeError as error:
            if blocks:
                self._state.effects.append(Free(blocks))
            self._refuse(client, message.model, message.request, error)

    def _refuse(self, client: ClientState, model: str, number: int, error: ServeError) -> None:
        count_refused(self._state, model, error)
        if number in client.requests:  # that request gets its own response instead of this error
            number = 0
        self._state.send(client.number, Fail(number, error.code, error.message))

    def infer_batch(self, peer: int, message: InferBatch, now: int) -> None:
        """Admits requests of one form. Common properties are checked once, unless they need more than the usual
        checks."""
        columns = message.columns
        if not columns.regular or len(columns.requests) > BATCH_REQUESTS:
            text = (
                f"an InferBatch has {len(columns.requests)} requests, {len(columns.rows)} rows and {len(columns.data)} "
                f"data; expected as many of each, from 1 to {BATCH_REQUESTS}, with one item of data for each form"
            )
            self._connections.garbled(peer, Garbled(0, text), now)
            return
        state, count = self._state, len(columns.requests)
        client, version = state.clients.get(peer), state.ready.get(message.model)
        if client is None or not client.outputs:
            self._require_hello(peer)
            return
        try:
            if (
                client.roles & _INFER and version is not None and not message.version
                and version.plain and not version.decoupled and not state.draining
                and len(client.requests) + count <= self._client_requests and len(state.requests) + count <= self._busy
                and client.held_bytes <= self._heavy and not state.accused and message.model not in state.shadows
            ):  # fmt: skip
                self._admit_all(client, version, message, now)
            else:
                for index in range(count):
                    self._admit_one(client, message, index, now)
        finally:
            self._refusals.end(client, message)

    def _admit_one(self, client: ClientState, message: InferBatch, index: int, now: int) -> None:
        """Admits a request of a batch by the checks of single requests."""
        refusals, number = self._refusals, message.columns.requests[index]
        valid = number > 0 and number not in client.requests
        if refusals.known and valid and refusals.repeats(client, message, index):
            return
        tensors = message.columns.tensors(index)
        single = Infer(number, message.model, message.version, tensors, None, message.timeout_us)
        try:
            self._admit(client, single, now, ())
            refusals.known.clear()  # a limit may have been reached, which is checked first
        except ServeError as error:
            if valid:
                refusals.add(client, message, index, error)
            else:
                refusals.answer(client, message)
                self._refuse(client, message.model, number, error)

    def _admit_all(self, client: ClientState, version: Version, message: InferBatch, now: int) -> None:
        """Invariant: refuses the same requests as `_admit`, with the same errors."""
        state, columns, checker, refusals = self._state, message.columns, version.checker, self._refusals
        assert checker is not None, version.label
        form = checker.form(columns.forms)
        known, requests, mine = form.by_rows, state.requests, client.requests
        deadline = now + message.timeout_us * 1000 if message.timeout_us else 0
        admitted: list[Request] = []
        like: Request | None = None
        sizes: list[int] = []
        inline = 0
        for index, (number, rows, data) in enumerate(zip(columns.requests, columns.rows, columns.data, strict=True)):
            if number == 0 or number in mine:
                self._admit_one(client, message, index, now)
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
                    self._admit_one(client, message, index, now)
                    continue
                sizes, inline = checked.sizes, checked.inline
                like = Request(
                    0, client, client, 0, version, (), None, None, rows, rows or 1, inline,
                    checked.signature, (), (), (), now, 0, 0, deadline,
                    audience=client.audience, length=checked.length, form=form,
                )  # fmt: skip
            if sizes != list(map(len, data)):
                self._admit_one(client, message, index, now)
                continue
            request: Request = like.__copy__()  # type: ignore[attr-defined]  # cheaper than filling in all fields
            request.number = own = state.next_number()
            request.client_number = number
            request.data = data
            mine[number] = own
            requests[own] = request
            client.bytes += inline
            if deadline:
                state.set_timer(deadline, Timer.DEADLINE, request)
            admitted.append(request)
        if admitted:
            state.observers.admitted(version, admitted)
            version.queue.add_all(admitted)
            state.to_dispatch[version] = None

    def framed(self, peer: int, event: Framed, now: int) -> None:
        self.infer(peer, event.infer, now, event.blocks)

    def _admit(
        self,
        client: ClientState,
        message: Infer,
        now: int,
        blocks: tuple[Handle, ...],
        waited: Request | None = None,
    ) -> None:
        """`waited`: the request under which the message has waited for its model to load."""
        state = self._state
        number = message.request
        if not client.roles & _INFER:
            self._connections.check_role(client, "infer")
        if number == 0 or number in client.requests:
            raise InvalidRequest(f"request number {number} is 0 or already in use by a request in flight")
        inputs, outputs, options = message.inputs, message.outputs, message.options
        version = None if message.version else state.ready.get(message.model)
        going_on, waits = None, False
        if options is not None and options.sequence:
            going_on = scheduler.version_of(self._state, client, message.model, message.version, options)
            version = going_on or version
            if version is not None and waited is None:  # an earlier request of the sequence may wait there
                waits = version.unchecked.count > 0
        if state.draining and going_on is None and waited is None:
            raise Unavailable(STOPPING)
        if len(client.requests) >= self._client_requests:
            raise Unavailable(
                f"{len(client.requests)} requests of this client are in flight, its limit (client_requests); wait for "
                "responses first"
            )
        if version is None:
            version = waiting.find(state, message.model, message.version)
            waits = version.state is VersionState.LOADING or (version.unchecked.count > 0 and waited is None)
        if waits:
            self._wait(client, message, version, now, blocks, waited)
            return
        assert version.checker is not None, version.label
        rows, signature, inline, shared, length = version.checker.check(inputs, outputs)
        if options is not None:
            inline += options_bytes(options)
        if shared:
            inline += HANDLE_BYTES * sum([len(tensor.data) for tensor in inputs if type(tensor.data) is tuple])
        busy = waited is None and len(state.requests) >= self._busy
        if busy:
            self._quotas.check_queue(client, version, inline, now)
        if client.held_bytes > self._heavy and waited is None:
            self._check_held(client)
        plain = version.plain and (options is None or not options.sequence)
        level = 0 if plain else enqueue.level(self._state, client, version, message.version, options, rows, now)
        streamed = version.decoupled or (options is not None and bool(options.window))
        if streamed and (options is None or not options.window):
            raise Unsupported(
                f"model '{version.model}' has a decoupled transaction policy: it may send several responses; "
                "call it with stream()"
            )
        if streamed and state.abandoned[client.user] >= self._client_requests:
            raise Unavailable(
                f"{state.abandoned[client.user]} cancelled streams of this user have not been ended by their models, "
                "the limit (client_requests); try again later, and make the models check for cancellation"
            )
        if waited is None:
            segments, pins, size = self._memory(client, message, blocks) if shared else _NOTHING  # no rejections after
            own, arrived = state.next_number(), now
        else:
            segments, pins, own, arrived = waited.segments, waited.pins, waited.number, waited.arrived
            size = waited.input_bytes
            waited.move(RequestState.ENDED)  # its timers end; the new request has its place in the tables
        special = streamed or bool(segments)
        request = Request(
            own, client, client, number, version, inputs, outputs, options, rows, rows or 1, inline,
            signature, segments, pins, blocks, arrived, level, audience=client.audience, special=special, length=length,
        )  # fmt: skip
        client.requests[number] = own
        state.requests[own] = request
        client.bytes += inline
        if size:
            request.input_bytes = size
            client.input_bytes += size
        if busy:
            self._quotas.queued += inline
        if message.timeout_us:
            request.deadline = now + message.timeout_us * 1000
            state.set_timer(request.deadline, Timer.DEADLINE, request)
        if state.shadows and not message.version and message.model in state.shadows:
            shadow.choose(state, request, state.shadows[message.model])
        state.observers.admitted(version, (request,))
        if version.plain:
            if not (state.accused and leases.queue_accused(state, version, request)):
                version.queue.add(request)
            state.to_dispatch[version] = None
        else:
            enqueue.put(self._state, version, message.version, request, now)

    def _wait(
        self,
        client: ClientState,
        message: Infer,
        version: Version,
        now: int,
        blocks: tuple[Handle, ...],
        waited: Request | None,
    ) -> None:
        """Queues the request until the version has loaded."""
        state = self._state
        if waited is not None:
            waiting.wait_again(waited, version)
            return
        inline, shared = waiting.size_of(message)
        busy = len(state.requests) >= self._busy
        if busy:
            self._quotas.check_queue(client, version, inline, now)
        if client.held_bytes > self._heavy:
            self._check_held(client)
        segments, pins, size = self._memory(client, message, blocks) if shared else _NOTHING
        deadline = now + message.timeout_us * 1000 if message.timeout_us else 0
        request = Request(
            state.next_number(), client, client, message.request, version, message.inputs, message.outputs,
            message.options, 0, 1, inline, None, segments, pins, blocks, now, 0, 0, deadline,
            audience=client.audience, special=True, unchecked=message, input_bytes=size,
        )  # fmt: skip
        waiting.add(state, request)
        if busy:
            self._quotas.queued += inline

    def check(self, request: Request, message: Infer, now: int) -> None:
        """Admits a request that has waited for its model to load."""
        try:
            self._admit(request.client, waiting.message_of(request, message, now), now, request.blocks, request)
        except ServeError as error:
            count_refused(self._state, message.model, error)
            raise

    def _memory(
        self, client: ClientState, message: Infer, blocks: tuple[Handle, ...]
    ) -> tuple[tuple[int, ...], tuple[Handle, ...], int]:
        """Returns the segments that a worker must map for this request, the holds that it pins, and the bytes of its
        inputs."""
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
        return used, tuple([ledger.pin(place) for place in places]), size

    def _check_held(self, client: ClientState) -> None:
        text = self._quotas.held(client)
        if not text:
            return
        if not client.reclaiming:
            client.reclaiming = True
            self._state.send(client.number, Reclaim())
        raise Unavailable(text)

    def cancel(self, peer: int, message: Cancel, now: int) -> None:
        client = self._require_hello(peer)
        if client is None:
            return
        request = self._state.request_of(client, message.request)
        if request is None:  # already answered (the messages crossed), or an operation instead of a request
            self._state.effects.append(Query(peer, message))
        else:
            exit.fail_early(self._state, request, "CANCELLED", "the request was cancelled by its caller", now)

    # ------------------------------------------------------------------------------------ memory and queries

    def own_segment(self, peer: int, event: OwnSegment, now: int) -> None:
        self._state.ledger.announce(0, event.announcement, INTERNAL)

    def more(self, peer: int, message: More, now: int) -> None:
        """Extends the response window. Does nothing if the request has already been answered."""
        client = self._require_hello(peer)
        request = self._state.request_of(client, message.request) if client is not None else None
        if request is not None and request.options is not None and request.options.window:
            responses.more(self._state, request, message.count)

    def map(self, peer: int, message: Map, now: int) -> None:
        client = self._require_hello(peer)
        if client is None:
            self._drop_segment(peer, message.segment)
            return
        try:
            self._connections.check_role(client, "map" if message.name is None else "register")
            self._quotas.check_segments(client)
            on_gpu = message.name is not None and message.name.startswith(DEVICE)
            if on_gpu:
                self._check_device_segment(client, message)
            elif message.name is not None:
                self._check_segment_name(client, message.name)
            elif client.plane != "lane":
                raise InvalidRequest("over ZeroMQ a segment must be announced by name")
            self._state.ledger.announce(peer, message, client.audience)
            client.segments.add(message.segment)
        except ServeError as error:
            self._drop_segment(peer, message.segment)
            self._connections.disconnect(client, error)

    def _drop_segment(self, peer: int, number: int) -> None:
        """Closes the descriptor of a segment that was not accepted."""
        if number >> OWNER_SHIFT == peer and number not in self._state.ledger.segments:
            self._state.effects.append(Forget(number))

    def own_segment_gone(self, peer: int, event: OwnSegmentGone, now: int) -> None:
        self._state.ledger.withdraw(0, event.segment)

    def _check_device_segment(self, client: ClientState, message: Map) -> None:
        """Workers open device memory by this name alone, so it must have exactly the expected form."""
        if client.plane != "lane":
            raise InvalidRequest("GPU memory can only be announced over the lane")
        if not _DEVICE_NAME.fullmatch(message.name or "") or not message.size:
            raise InvalidRequest("the name of a segment on a GPU does not contain an exported handle and a device UUID")

    def _check_segment_name(self, client: ClientState, name: str) -> None:
        """A client must not be able to make a worker open memory of the server or of another client."""
        if not _SEGMENT_NAME.fullmatch(name):
            raise InvalidRequest(f"a segment name must be a slash, then up to {NAME_LENGTH - 1} of A-Z a-z 0-9 . _ -")
        for segment in self._state.ledger.segments.values():
            # The same user may announce a name again: a client reconnected before its old connection was found dead.
            if segment.announcement.name == name and (
                segment.owner >= WORKERS_FROM or segment.audience != client.audience
            ):
                raise InvalidRequest("a segment of this name has already been announced")

    def unmap(self, peer: int, message: Unmap, now: int) -> None:
        client = self._require_hello(peer)
        if client is not None:
            try:
                self._state.ledger.withdraw(peer, message.segment)
                client.segments.discard(message.segment)
            except ServeError as error:
                self._connections.refuse(client, 0, error, now)

    def give_back(self, peer: int, message: Return, now: int) -> None:
        client = self._require_hello(peer)
        if client is None:
            return
        client.reclaiming = False
        for handle in message.handles:
            try:
                self._state.ledger.take_back(client, handle)
            except ServeError as error:
                self._connections.refuse(client, 0, error, now)
                if client.disconnecting:
                    return

    def ask(self, peer: int, message: Ask, now: int) -> None:
        client = self._require_hello(peer)
        if client is None:
            return
        try:
            if message.what:  # otherwise it continues the body of an operation that was already allowed
                if message.what not in roles.QUERIES:
                    raise roles.unknown(message.what)
                self._connections.check_role(client, message.what)
            self._queries.put(peer, message)
        except ServeError as error:
            self._connections.refuse(client, message.request, error, now)
