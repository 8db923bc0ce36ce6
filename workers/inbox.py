"""Handles incoming orders: reads packets, assigns descriptors to messages, maps segments and calls the handlers.

Invariant: each received descriptor is closed exactly once, whatever else its packet contains.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shmserve.errors import ProtocolError, ServeError
from shmserve.protocol.codec import Refused
from shmserve.protocol.messages import OWNER_SHIFT, Map, Unmap
from shmserve.protocol.worker_messages import Lend, Trim
from shmserve.workers.link import carries_descriptor
from shmserve.workers.process.log import log_message

if TYPE_CHECKING:
    from shmserve.shm.mapped import Mapped
    from shmserve.workers.link import BrokerLink
    from shmserve.workers.outbox import Outbox
    from shmserve.workers.output_arenas import Arenas


class WorkerInbox:
    """Reads orders from the link and dispatches them by type. The link may be read while the model is loading; orders
    that have no handler yet are kept for the loop."""

    def __init__(self, owner: int, link: BrokerLink, outbox: Outbox, mapped: Mapped, arenas: Arenas) -> None:
        self._owner = owner
        self._link = link
        self._outbox = outbox
        self._mapped = mapped
        self._arenas = arenas
        self._handlers: dict[type, Callable[[Any], None]] = {
            Unmap: self._unmap,
            Trim: lambda order: arenas.trim(),
        }
        self._lend: Callable[[Lend, list[int]], None] | None = None
        self._kept: list[Any] | None = []  # None: the model is loaded

    def add(self, handlers: dict[type, Callable[[Any], None]]) -> None:
        self._handlers |= handlers

    def add_lend(self, handler: Callable[[Lend, list[int]], None]) -> None:
        """The handler owns the two descriptors of the order."""
        self._lend = handler

    def take_kept(self) -> list[Any]:
        """Returns the orders that were kept. From now on an order without a handler is a protocol error."""
        kept, self._kept = self._kept or [], None
        return kept

    def drain(self) -> None:
        drain = self._link.drain
        while (packet := drain()) is not None:
            self.handle(*packet)

    def read(self) -> None:
        """Used as the reader of the link while the model runs."""
        self.drain()
        self._outbox.flush()

    def handle(self, orders: list[Any], descriptors: list[int]) -> None:
        """Takes ownership of the descriptors."""
        handlers = self._handlers
        try:
            for order in orders:
                handler = handlers.get(order.__class__)
                if handler is None:
                    self._rare(order, descriptors)
                else:
                    handler(order)
            if descriptors:
                raise ProtocolError(f"{len(descriptors)} descriptor(s) belong to no message")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _rare(self, order: Any, descriptors: list[int]) -> None:
        """Handles orders that carry descriptors, which it removes, and orders that have no handler."""
        if isinstance(order, Lend) and self._lend is not None and len(descriptors) >= 2:
            self._lend(order, [descriptors.pop(0), descriptors.pop(0)])
            return
        descriptor = descriptors.pop(0) if descriptors and carries_descriptor(order) else None
        if isinstance(order, Map):
            self._map(order, descriptor)
            return
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(order, Refused):
            raise ProtocolError(order.text)
        if self._kept is None:
            raise ProtocolError(f"{type(order).__name__} is not accepted after loading")
        self._kept.append(order)

    def _map(self, order: Map, descriptor: int | None) -> None:
        """Logs a segment that cannot be mapped; the requests that use it fail on their own."""
        if order.segment >> OWNER_SHIFT == self._owner and self._arenas.owns(order.segment):
            if descriptor is not None:
                os.close(descriptor)
            return
        if descriptor is None and order.name is None:
            raise ProtocolError(f"Map of segment {order.segment} has neither a descriptor nor a name")
        try:
            self._mapped.add(order.segment, order.size, fd=descriptor, name=order.name)
            self._arenas.audiences[order.segment] = order.audience
        except ServeError as error:
            log_message(f"segment {order.segment} cannot be mapped: {error}")

    def _unmap(self, order: Unmap) -> None:
        if order.segment in self._mapped and not self._arenas.owns(order.segment):
            self._mapped.remove(order.segment)
            self._arenas.audiences.pop(order.segment, None)
