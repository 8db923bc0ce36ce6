"""The life of a worker after its start: orders in, reports out, one batch at a time.

The rule: every request is answered exactly once, whatever the model does; and whatever has been said is sent before
a model runs, as nobody knows how long it will.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shmserve.errors import ProtocolError, ServeError
from shmserve.messages import (
    OWNER_SHIFT,
    Done,
    EndSequences,
    Execute,
    Map,
    More,
    Ping,
    Pong,
    Return,
    Row,
    Started,
    Stop,
    Streamed,
    Unmap,
    Withdraw,
)
from shmserve.messages import Withdrawn as WithdrawnReport
from shmserve.wire import Refused
from shmserve.workers.link import carries_descriptor
from shmserve.workers.say import say
from shmserve.workers.waiting import Batch, Waiting

if TYPE_CHECKING:
    from shmserve.shm.mapped import Mapped
    from shmserve.workers.arenas import Arenas
    from shmserve.workers.link import Link
    from shmserve.workers.outbox import Outbox
    from shmserve.workers.runner import Runner
    from shmserve.workers.streams import Streams


class Loop:
    """Runs until Stop. ConnectionLost ends it when the broker has gone, ProtocolError when the broker is confused."""

    def __init__(
        self,
        owner: int,
        link: Link,
        outbox: Outbox,
        mapped: Mapped,
        arenas: Arenas,
        runner: Runner,
        streams: Streams | None = None,
    ) -> None:
        self._owner = owner
        self._link = link
        self._outbox = outbox
        self._mapped = mapped
        self._arenas = arenas
        self._runner = runner
        self._waiting = Waiting()
        self._stopping = False
        self._streams = streams
        if streams is not None:
            streams.connect(link.fileno(), self._read, self._tell, runner.row, self._discard)
        self._handlers: dict[type, Callable[[Any], None]] = {
            Execute: self._waiting.add,
            Return: self._return,
            Withdraw: self._withdraw,
            Unmap: self._unmap,
            Ping: self._ping,
            More: self._more,
            EndSequences: self._end_sequences,
            Stop: self._stop,
        }

    def run(self, orders: list[Any], descriptors: list[int]) -> None:
        """`orders` came with the first one, and are next."""
        self._handle(orders, descriptors)
        self._drain()
        while True:
            batch = self._waiting.start(last=self._stopping)
            if batch is None:
                if self._stopping:
                    if self._streams is not None:
                        self._streams.stop(True)
                    self._outbox.flush()
                    return
                self._wait()
                continue
            if batch.open:
                self._outbox.add(Started(batch.number, batch.through))
            while batch is not None:
                batch = self._run(batch)

    def _wait(self) -> None:
        """Returns when orders have come. Of models that may send meanwhile, not before these can."""
        self._outbox.flush()
        if self._streams is not None and self._streams.decoupled:
            self._streams.wait()
            return
        self._handle(*self._link.receive())
        if not self._waiting.complete:
            self._drain()

    def _run(self, batch: Batch) -> Batch | None:
        """Runs a batch, reports it, and returns the one that was announced to follow."""
        self._outbox.flush()
        rows, times, again = self._runner.run(batch.works)
        # What came meanwhile may belong to the next batch, or take requests out of it.
        self._drain()
        if self._streams is not None and self._streams.decoupled:
            self._streams.read()
        following = self._waiting.start(last=self._stopping)
        done = Done(batch.number, tuple(rows), times, again=again)
        if following is not None:
            done.next, done.through = following.number, following.through
        self._outbox.add(done)
        return following

    # ------------------------------------------------------------------------------------ orders

    def _drain(self) -> None:
        drain = self._link.drain
        while (packet := drain()) is not None:
            self._handle(*packet)

    def _read(self) -> None:
        """For those that wait while the model runs."""
        self._drain()
        self._outbox.flush()

    def _handle(self, orders: list[Any], descriptors: list[int]) -> None:
        if descriptors:
            left = deque(descriptors)
            try:
                self._handle_each(orders, left)
            finally:
                for descriptor in left:
                    os.close(descriptor)
            return
        handlers = self._handlers
        for order in orders:
            handler = handlers.get(order.__class__)
            if handler is None:
                self._rare(order, None)
            else:
                handler(order)

    def _handle_each(self, orders: list[Any], descriptors: deque[int]) -> None:
        for order in orders:
            handler = self._handlers.get(order.__class__)
            if handler is not None:
                handler(order)
            elif not carries_descriptor(order):
                self._rare(order, None)
            else:
                self._rare(order, descriptors.popleft() if descriptors else None)
        if descriptors:
            raise ProtocolError(f"{len(descriptors)} descriptor(s) came that belong to no message")

    def _rare(self, order: Any, descriptor: int | None) -> None:
        """Map, and what should not come."""
        if isinstance(order, Map):
            self._map(order, descriptor)
            return
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(order, Refused):
            raise ProtocolError(order.text)
        raise ProtocolError(f"{type(order).__name__} came to a worker whose model is loaded")

    def _map(self, order: Map, descriptor: int | None) -> None:
        """A segment that cannot be mapped is told to the operator; requests that name it will fail by themselves."""
        if order.segment >> OWNER_SHIFT == self._owner and self._arenas.owns(order.segment):
            if descriptor is not None:
                os.close(descriptor)
            return
        if descriptor is None and order.name is None:
            raise ProtocolError(f"Map of segment {order.segment} came with neither a descriptor nor a name")
        try:
            self._mapped.add(order.segment, order.size, fd=descriptor, name=order.name)
        except ServeError as error:
            say(f"segment {order.segment} cannot be mapped: {error}")

    def _unmap(self, order: Unmap) -> None:
        if order.segment in self._mapped and not self._arenas.owns(order.segment):
            self._mapped.remove(order.segment)

    def _return(self, order: Return) -> None:
        self._arenas.free(order.handles)

    def _withdraw(self, order: Withdraw) -> None:
        found = self._waiting.withdraw(order.requests)
        self._outbox.add(WithdrawnReport(found))
        if self._streams is not None and len(found) < len(order.requests):
            self._streams.cancel(request for request in order.requests if request not in found)

    def _ping(self, order: Ping) -> None:
        self._outbox.add(Pong(order.number))

    def _stop(self, order: Stop) -> None:
        self._stopping = True

    def _more(self, order: More) -> None:
        if self._streams is not None and not self._streams.more(order.request, order.count):
            self._waiting.more(order.request, order.count)

    def _end_sequences(self, order: EndSequences) -> None:
        self._runner.forget(order.sequences)

    # ------------------------------------------------------------------------------------ answers of the model's own

    def _tell(self, row: Row) -> None:
        """At once: nobody knows when the model will have the next one."""
        self._outbox.add(Streamed((row,)))
        self._outbox.flush()

    def _discard(self, row: Row) -> None:
        owns = self._arenas.owns
        for tensor in row.outputs:
            if isinstance(tensor.data, tuple):
                self._arenas.free([part for part in tensor.data if owns(part.segment)])
