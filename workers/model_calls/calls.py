"""Calls from a model to other models and to the server. The worker acts as a client for them, on its own link.

Invariants: calls are accessed only with the turn held (responses.py). A handle from a reply is returned once, when its
last array is freed, in any thread. The inputs of a call are kept until no process reads them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.dtypes import from_numpy, to_numpy
from shmserve.errors import InvalidRequest, ServeError, Unavailable
from shmserve.protocol.bodies import pieces_of
from shmserve.protocol.messages import (
    INLINE_BYTES,
    TENSORS,
    Answer,
    Ask,
    Cancel,
    Fail,
    FailHeld,
    Handle,
    More,
    Part,
    Released,
    Reply,
    Tensor,
    Wanted,
)
from shmserve.protocol.worker_messages import Call, Counted, Row
from shmserve.shm.counters import PAGE_BYTES, Subject, Writer
from shmserve.shm.extents import memfd
from shmserve.shm.strings import decode_bytes, encode_bytes
from shmserve.shm.views import address_of
from shmserve.workers.model_calls.pending import (
    Array,
    CallInput,
    CallResponse,
    HandleReturner,
    Pending,
    check,
    returner_of,
    within,
)
from shmserve.workers.output_arenas import INTERNAL, Arenas

if TYPE_CHECKING:
    from shmserve.protocol.messages import Options
    from shmserve.protocol.worker_messages import Work
    from shmserve.shm.mapped import Mapped
    from shmserve.workers.model_calls.responses import OpenResponses
    from shmserve.workers.outbox import Outbox

WINDOW = 64
"""Maximum number of replies to a call that may arrive before the model takes the first."""
MESSAGE_BYTES = 48 * 1024
"""Maximum bytes of inputs inside one message."""
COUNTER_PAGES = 16
"""Maximum number of counter pages of a model."""


class OutgoingCalls:
    """Created before the model is loaded, with the turn held. `handlers` process the orders that are replies."""

    def __init__(
        self, outbox: Outbox, arenas: Arenas, mapped: Mapped, descriptor: int, read: Callable[[], object]
    ) -> None:
        """`descriptor` is that of the link, `read` handles the orders that have arrived on it."""
        self._descriptor = descriptor
        self._read = read
        self._outbox = outbox
        self._arenas = arenas
        self._mapped = mapped
        self._streams: OpenResponses
        self._returner = HandleReturner(self.defer)
        self._numbers = 0
        self._open: dict[int, Pending] = {}
        self._held: dict[int, Pending] = {}
        """Failed calls whose inputs may still be read."""
        self._passed: dict[Handle, list[Array]] = {}
        """Arrays passed on by handle in rows that have not been sent."""
        self._counters = CounterPages(outbox)
        self._awaited = 0
        self._reader: threading.Thread | None = None
        self.handlers: dict[type, Callable[[Any], None]] = {
            Reply: self._answered,
            Part: self._answered,
            Fail: self._failed,
            FailHeld: self._failed,
            Released: self._released,
            Answer: self._query_answered,
        }

    def connect(self, streams: OpenResponses) -> None:
        self._streams = streams
        streams.listen(self._descriptor, self._read, self._outbox.deferred, self._wake_all)

    # ------------------------------------------------------------------------------------ asking, in any thread

    def call(
        self,
        model: str,
        version: int,
        inputs: Sequence[CallInput],
        names: Sequence[str],
        options: Options | None,
        held: bool,
        running: Sequence[Work],
    ) -> Pending:
        """Sends a call. `running`: the requests that the model is executing; the call is made for one of them."""
        if len(inputs) > TENSORS or len(names) > TENSORS:
            raise InvalidRequest(
                f"the request has {len(inputs)} inputs and {len(names)} outputs; the limit is {TENSORS} of each"
            )
        wanted = tuple([Wanted(name) for name in names]) or None
        with self._streams.turn:
            self._streams.check()
            parent, tensors, pending = self._prepared(inputs, running, options.window if options is not None else 0)
            number = max(parent.request, 0) if parent is not None else 0  # below 0: the broker does not know it
            call = Call(pending.number, number, model, version, tensors, wanted, 0, options, held)
            self._send(pending, [call])
            return pending

    def ask(self, what: str, model: str, version: int = 0, body: bytes = b"") -> Pending:
        with self._streams.turn:
            self._streams.check()
            pending = self._new(0)
            asks = [Ask(pending.number, "", "", 0, piece, True) for piece in pieces_of(body)]
            asks[0].what, asks[0].model, asks[0].version = what, model, version
            asks[-1].more = False
            self._send(pending, asks)
            return pending

    def _send(self, pending: Pending, messages: Sequence[Call | Ask]) -> None:
        try:
            check(messages[0])
            for message in messages:
                self._outbox.add(message)
                self._outbox.flush()
        except ServeError:
            self._free(pending)
            raise
        self._open[pending.number] = pending

    def _new(self, window: int) -> Pending:
        self._numbers += 1
        return Pending(self._numbers, window)

    def _prepared(
        self, inputs: Sequence[CallInput], running: Sequence[Work], window: int
    ) -> tuple[Work | None, tuple[Tensor, ...], Pending]:
        places = [self._place(each.array) for each in inputs]
        parent = self._parent(inputs, places, running)
        pending = self._new(window)
        room = MESSAGE_BYTES
        tensors: list[Tensor] = []
        try:
            for each, place in zip(inputs, places, strict=True):
                tensor = self._tensor(each, place, parent, pending, room)
                room -= len(tensor.data) if isinstance(tensor.data, bytes) else 0
                tensors.append(tensor)
        except BaseException:
            self._free(pending)
            raise
        return parent, tuple(tensors), pending

    def _parent(
        self, inputs: Sequence[CallInput], places: Sequence[Handle | None], running: Sequence[Work]
    ) -> Work | None:
        """Returns the request that the call is made for. None if it is unknown and the reply's audience
        depends on it."""
        parent: Work | None = None
        for tensor, place in zip(inputs, places, strict=True):
            if place is not None and returner_of(tensor.array) is not None:
                continue
            work = tensor.work if tensor.work in running else None
            if work is None and place is not None:
                work = next((one for one in running if within(place, one)), None)
            if work is None or work is parent:
                continue
            if parent is not None and parent.audience != work.audience:
                return None
            parent = parent or work
        if parent is not None:
            return parent
        first = running[0] if running else None
        same = first is not None and all(work.audience == first.audience for work in running)
        return first if same else None

    def _place(self, array: Array) -> Handle | None:
        """Returns the handle of an array's bytes if they are in shared memory that other processes can map."""
        if array.nbytes <= INLINE_BYTES or not array.flags.c_contiguous or array.dtype.hasobject:
            return None
        base = self._mapped.locate_base(array)
        if base is None:
            return None
        return Handle(base.segment, base.offset + address_of(array) - self._mapped.address(base), array.nbytes)

    def _tensor(
        self, tensors: CallInput, place: Handle | None, parent: Work | None, pending: Pending, room: int
    ) -> Tensor:
        array, shape = tensors.array, tensors.array.shape
        try:
            dtype = from_numpy(array.dtype)
        except TypeError as error:
            raise InvalidRequest(f"input '{tensors.name}': {error}") from None
        if dtype == "BYTES":
            array = np.frombuffer(encode_bytes(array, str), np.uint8)
        if array.nbytes <= min(INLINE_BYTES, room):
            return Tensor(tensors.name, dtype, shape, array.tobytes())
        if place is not None and (returner_of(array) is not None or (parent is not None and within(place, parent))):
            pending.kept.append(tensors.array)
            return Tensor(tensors.name, dtype, shape, (place,))
        block = self._arenas.allocate(INTERNAL, array.nbytes)
        handle = Handle(block.segment, block.offset, array.nbytes)
        pending.blocks.append(handle)
        np.copyto(block.array(array.dtype, shape if dtype != "BYTES" else array.shape), array, casting="no")
        return Tensor(tensors.name, dtype, shape, (handle,))

    # ------------------------------------------------------------------------------------ waiting, in any thread

    def wait(self, pending: Pending) -> None:
        """Waits until nothing more will arrive."""
        self._streams.wait_for(lambda: pending.over)

    def next(self, pending: Pending) -> CallResponse | None:
        """Waits for the next reply and returns it; None after the last one."""
        self._streams.wait_for(lambda: pending.ready)
        return self.take(pending)

    def take(self, pending: Pending) -> CallResponse | None:
        """Returns the next reply without waiting; None if there is none."""
        with self._streams.turn:
            if not pending.answers:
                return None
            response, more = pending.take()
            if more:
                self._outbox.add(More(pending.number, more))
                self._outbox.flush()
            return response

    async def wait_soon(self, pending: Pending, ready: Callable[[], bool], coroutines: bool) -> None:
        """Waits until `ready()`. `coroutines`: in the worker's event loop, while the main thread reads the link."""
        loop = asyncio.get_running_loop()
        while True:
            with self._streams.turn:
                if ready():
                    return
                self._streams.check()
                if not coroutines and self._reader is None:
                    reader = threading.Thread(target=self._read_for_others, name="calls", daemon=True)
                    reader.start()  # raises at the limit of threads
                    self._reader = reader
                future = loop.create_future()
                pending.waiters.append(future)
                self._awaited += 1
            try:
                await future
            except asyncio.CancelledError:
                self.cancel(pending)
                raise
            finally:
                with self._streams.turn:
                    self._awaited -= 1

    def _wake_all(self) -> None:
        for pending in self._open.values():
            pending.wake()

    def _read_for_others(self) -> None:
        """Reads the link for coroutines on the model's own event loop: the thread that would read it may be running
        that loop."""
        self._streams.read_while(lambda: self._awaited > 0, self._read_no_more)

    def _read_no_more(self) -> None:
        self._reader = None

    def cancel(self, pending: Pending) -> None:
        """Cancels a call; its remaining replies are dropped."""
        with self._streams.turn:
            if pending.over:
                return
            self._outbox.add(Cancel(pending.number))
            self._outbox.flush()
            pending.cancelled()

    def count(self, subject: Subject) -> memoryview[float]:
        """Returns the memory of a new metric, which the server reads."""
        with self._streams.turn:
            self._streams.check_process()
            return self._counters.add(subject)

    def defer(self, what: Handle | Cancel) -> None:
        """Called by finalizers in any thread; sent with the next messages."""
        self._outbox.deferred.append(what)
        self._streams.wake_reader()

    def forget(self, pending: Pending) -> None:
        """Drops a call whose replies no code will take. Called by finalizers."""
        pending.forgotten()
        if not pending.over:
            self.defer(Cancel(pending.number))

    # ------------------------------------------------------------------------------------ answers, with the turn

    def _answered(self, message: Reply | Part) -> None:
        last = not isinstance(message, Part) or message.last
        pending = self._ended(message.request) if last else self._open.get(message.request)
        if pending is None or pending.abandoned:
            for tensor in message.outputs:
                if isinstance(tensor.data, tuple):
                    self._outbox.deferred.extend(tensor.data)
            return
        pending.answered(self._response(message), last)  # even without outputs: Triton models count the last response

    def _failed(self, message: Fail | FailHeld) -> None:
        pending = self._open.pop(message.request, None)
        if pending is None:
            return
        if isinstance(message, FailHeld):
            self._held[message.request] = pending
        else:
            self._free(pending)
        pending.answered(CallResponse(code=message.code, text=message.text), True)

    def _released(self, message: Released) -> None:
        pending = self._held.pop(message.request, None)
        if pending is not None:
            self._free(pending)

    def _query_answered(self, message: Answer) -> None:
        pending = self._open.get(message.request)
        if pending is None:
            return
        if not message.more:
            self._ended(message.request)
        pending.answered_query(message.body, not message.more)

    def _ended(self, number: int) -> Pending | None:
        pending = self._open.pop(number, None)
        if pending is not None:
            self._free(pending)
        return pending

    def _free(self, pending: Pending) -> None:
        self._arenas.free(pending.release())

    def _response(self, message: Reply | Part) -> CallResponse:
        """Creates all arrays at once, so that no handle is lost if one of them fails."""
        response = CallResponse(parameters=message.parameters)
        for tensor in message.outputs:
            try:
                response.outputs.append((tensor.name, self._array(tensor)))
            except (ServeError, ValueError, TypeError) as error:
                response.code, response.text = InvalidRequest.code, f"output '{tensor.name}' cannot be read: {error}"
        return response

    def _array(self, tensor: Tensor) -> Array:
        data: Any = tensor.data
        if isinstance(data, tuple):
            if len(data) == 1 and tensor.dtype != "BYTES":
                try:
                    return self._mapped.view(
                        data[0], to_numpy(tensor.dtype), tensor.shape, on_drop=self._returner.dropped
                    )
                except BaseException:
                    self._outbox.deferred.append(data[0])
                    raise
            # Rows from several workers, or strings: copied, so the handles are returned at once.
            self._outbox.deferred.extend(data)
            data = b"".join([self._mapped.memory(part) for part in data])
        if tensor.dtype == "BYTES":
            return decode_bytes(data, tensor.shape)
        return np.ndarray(tensor.shape, to_numpy(tensor.dtype), data)

    # ------------------------------------------------------------------------------------ passing on, with the turn

    def passed_on(self, array: Array, audience: str) -> Handle | None:
        """Returns the handle of an output that came from a call, if it goes unchanged to the same audience, to be sent
        in a row. Keeps the array until the row is `sent`."""
        returner = returner_of(array)
        if returner is None:
            return None
        place = self._place(array)
        if place is None or self._arenas.audiences.get(place.segment) != audience:
            return None
        self._passed.setdefault(place, []).append(array)
        return place

    def sent(self, rows: Iterable[Row]) -> None:
        """Releases the arrays of rows that are in the outbox or will never be sent."""
        if self._passed:
            for row in rows:
                for tensor in row.outputs:
                    self.not_passed_on(tensor)

    def not_passed_on(self, tensor: Tensor) -> bool:
        """Releases the array of one tensor. False: it did not come from a call."""
        place = tensor.data[0] if isinstance(tensor.data, tuple) and tensor.data else None
        arrays = self._passed.get(place) if place is not None else None
        if place is None or arrays is None:
            return False
        arrays.pop()
        if not arrays:
            del self._passed[place]
        return True


class CounterPages:
    """The pages of counters that a worker shares with the broker, created on demand and kept as long as the process
    lives. Invariant: a page is announced before it is written."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._extents: list[memfd.MemfdExtent] = []
        self._writer: Writer | None = None

    def add(self, subject: Subject) -> memoryview[float]:
        numbers = self._writer.add(subject) if self._writer is not None else None
        if numbers is not None:
            return numbers
        if len(self._extents) == COUNTER_PAGES:
            raise Unavailable(f"the metrics of this model take more than {COUNTER_PAGES * PAGE_BYTES} bytes")
        extent = memfd.create(PAGE_BYTES, seal_future_write=True)
        self._extents.append(extent)
        self._outbox.add(Counted(PAGE_BYTES), extent.fd)
        self._outbox.flush()
        self._writer = Writer(extent.memory)
        numbers = self._writer.add(subject)
        if numbers is None:
            raise Unavailable(f"metric '{subject.name}' with its labels takes more than {PAGE_BYTES} bytes")
        return numbers
