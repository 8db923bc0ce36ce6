"""The session's leases: model instances to which it may send a request directly while it has no other request in
flight. Questions, such as the one that the gateway asks every second for its page, do not count."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from shmserve.protocol import codec
from shmserve.protocol.messages import PACKET_BYTES, Ask, Infer, Lease
from shmserve.protocol.roles import OPERATIONS
from shmserve.session.memory import SessionMemory
from shmserve.session.outbox import UNWRITABLE, Packet, SessionOutbox
from shmserve.session.tickets import Tickets


class LeaseSockets(Protocol):
    """Interface to the sockets of leases, which the link owns."""

    def open_lease(self, lease: int, fd: int) -> None:
        """Takes ownership of the descriptor."""

    def close_lease(self, lease: int) -> list[bytes]:
        """Returns the packets that have arrived."""


class _Leased(Struct):
    message: Lease
    sent: int = 0
    """Number of the last request sent over the lease."""


class SessionLeases:
    __slots__ = ("_by_number", "_memory", "_tickets", "_unanswered", "by_model", "sockets")

    def __init__(self, tickets: Tickets, memory: SessionMemory, sockets: LeaseSockets | None) -> None:
        self._tickets = tickets
        self._memory = memory
        self.sockets = sockets
        """None: the link does not support leases."""
        self.by_model: dict[tuple[str, int], _Leased] = {}
        """Leases by model and version as in a request; version 0: the default version."""
        self._by_number: dict[int, _Leased] = {}
        """Leases by number, until LeaseEnd, which may arrive after the next Lease of the same model."""
        self._unanswered = 0
        """The last request that a lease left unanswered. The broker decides where it is run again."""

    def add(self, message: Lease, fd: int) -> None:
        assert self.sockets is not None, "the server lends only to clients that accept leases"
        keys = [(message.model, message.version)]
        if message.default:
            keys.append((message.model, 0))
        self._by_number[message.lease] = leased = _Leased(message)
        self.by_model.update(dict.fromkeys(keys, leased))
        self.sockets.open_lease(message.lease, fd)

    def packet(self, outbox: SessionOutbox, grace_s: float) -> Packet | None:
        """Takes the only request in flight out of the outbox, if it can be sent over a lease. Questions may be in
        flight beside it. `grace_s`: how much later than the server the client enforces a deadline. Over a lease, only
        the client enforces it."""
        requests = [one for one in outbox.messages if type(one) is Infer]
        if len(requests) != 1:
            return None
        message = requests[0]
        if len(self._tickets.pending) > 1 and not self._is_alone(message.request):
            return None
        leased = self.by_model.get((message.model, message.version))
        if leased is None or message.request == self._unanswered or not leased.message.allows(message):
            return None
        for tensor in message.inputs:
            if type(tensor.data) is tuple and not self._memory.is_known(tensor.data[0].segment):
                return None
        try:
            data = codec.encode([message])
        except UNWRITABLE:
            return None
        if len(data) > PACKET_BYTES:
            return None
        others = [one for one in outbox.messages if one is not message]
        outbox.clear()
        for other in others:
            outbox.queue(other)
        leased.sent = number = message.request
        ticket = self._tickets.pending[number]
        if ticket.deadline is not None:
            ticket.deadline -= grace_s
            self._tickets.add_deadline(ticket.deadline, number)
        return Packet(data, lease=leased.message.lease)

    def _is_alone(self, number: int) -> bool:
        """True if only questions are in flight beside the request. An operation changes what the request means, and a
        ticket without a message may be a cancelled request."""
        for ticket in self._tickets.pending.values():
            message = ticket.message
            if ticket.number != number and (type(message) is not Ask or message.what in OPERATIONS):
                return False
        return True

    def remove(self, lease: int) -> int:
        """Returns the last request sent over the lease, 0 for none. If unanswered, it may be sent again, but not over a
        lease."""
        ended = self._by_number.pop(lease, None)
        if ended is None:
            return 0
        for key, leased in list(self.by_model.items()):
            if leased is ended:
                del self.by_model[key]
        self._unanswered = ended.sent
        return ended.sent

    def clear(self) -> None:
        self.by_model.clear()
        self._by_number.clear()
