"""The session's leases: model instances to which it may send requests directly, one while it has no other request in
flight, or all requests of the model, a packet at a time. Questions, such as the one that the gateway asks every second
for its page, do not count as requests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from msgspec import Struct

from shmserve.protocol import codec
from shmserve.protocol.messages import BATCH_REQUESTS, PACKET_BYTES, Ask, Infer, Lease
from shmserve.session.memory import SessionMemory
from shmserve.session.outbox import UNWRITABLE, Packet, SessionOutbox
from shmserve.session.queries import SessionQueries
from shmserve.session.tickets import Tickets


class LeaseSockets(Protocol):
    """Interface to the sockets of leases, which the link owns."""

    offers: bool
    """Whether the link takes offers of leases, and calls `SessionLeases.answered`."""

    def open_lease(self, lease: int, fd: int) -> None:
        """Takes ownership of the descriptor."""

    def close_lease(self, lease: int) -> list[bytes]:
        """Returns the packets that have arrived."""


class _Leased(Struct, eq=False):
    message: Lease
    sent: list[int] = []
    """Numbers of the last requests sent over the lease."""
    waiting: list[Infer] = []
    """Requests that will be sent over the lease: it is only offered, or has not answered its last packet."""


class SessionLeases:
    __slots__ = ("_answering", "_by_number", "_memory", "_queries", "_tickets", "_unanswered", "by_model", "sockets")

    def __init__(
        self, tickets: Tickets, queries: SessionQueries, memory: SessionMemory, sockets: LeaseSockets | None
    ) -> None:
        self._tickets = tickets
        self._queries = queries
        self._memory = memory
        self.sockets = sockets
        """None: the link does not support leases."""
        self.by_model: dict[tuple[str, int], _Leased] = {}
        """Leases by model and version as in a request; version 0: the default version."""
        self._by_number: dict[int, _Leased] = {}
        """Leases by number, until LeaseEnd, which may arrive after the next Lease of the same model."""
        self._answering: _Leased | None = None
        """The lease with several requests in flight whose worker has a packet. There is one at most."""
        self._unanswered: Collection[int] = ()
        """The last requests that a lease left unanswered. The broker decides where they are run again."""

    def add(self, message: Lease, fd: int | None) -> None:
        """`fd`: its socket, None: the lease is only offered."""
        assert self.sockets is not None, "the server lends only to clients that accept leases"
        leased = self._by_number.get(message.lease)
        if leased is not None:
            leased.message = message
        else:
            self._by_number[message.lease] = leased = _Leased(message)
            keys = [(message.model, message.version)]
            if message.default:
                keys.append((message.model, 0))
            self.by_model.update(dict.fromkeys(keys, leased))
        if fd is not None:
            self.sockets.open_lease(message.lease, fd)

    @property
    def waiting(self) -> bool:
        """Whether a lease can take requests that wait for it."""
        return self._ready() is not None

    def answered(self) -> None:
        """The worker has answered the last packet, or closed the socket."""
        self._answering = None

    def packet(self, outbox: SessionOutbox, grace_s: float) -> Packet | None:
        """Takes the requests out of the outbox that go over leases, and returns a packet of those that can go now.
        `grace_s`: how much later than the server the client enforces a deadline. Over a lease, only the client enforces
        it."""
        requests = [one for one in outbox.messages if type(one) is Infer]
        if requests:
            leases = [self._lease_of(request) for request in requests]
            if len(requests) == 1 and leases[0] is not None and self._may_send_alone(leases[0], requests[0].request):
                return self._alone(leases[0], requests[0], outbox, grace_s)
            if any(leased is not None and leased.message.batch for leased in leases):
                if self._queries.operating:  # it changes what a request means
                    self._give_back(outbox)
                    return None
                self._take_over(outbox, {one.request: of for one, of in zip(requests, leases, strict=True) if of})
        leased = self._ready()
        return self._next(leased, outbox, grace_s) if leased is not None else None

    def _ready(self) -> _Leased | None:
        """A lease that can take requests that wait for it."""
        if self._answering is not None:
            return None
        return next((one for one in self._by_number.values() if one.waiting and not one.message.offer), None)

    def _lease_of(self, message: Infer) -> _Leased | None:
        leased = self.by_model.get((message.model, message.version))
        if leased is None or message.request in self._unanswered or not leased.message.allows(message):
            return None
        if not message.inputs:  # the broker knows which are missing
            return None
        for tensor in message.inputs:
            if type(tensor.data) is tuple and not self._memory.is_known(tensor.data[0].segment):
                return None
        return leased

    def _may_send_alone(self, leased: _Leased, number: int) -> bool:
        if leased.message.offer or leased.waiting or self._answering is not None:
            return False
        return len(self._tickets.pending) == 1 or self._is_alone(number)

    def _alone(self, leased: _Leased, message: Infer, outbox: SessionOutbox, grace_s: float) -> Packet | None:
        data = _encoded([message])
        if data is None:
            return None
        _keep(outbox, [one for one in outbox.messages if one is not message])
        return self._sent(leased, [message], data, grace_s)

    def _take_over(self, outbox: SessionOutbox, leases: dict[int, _Leased]) -> None:
        kept = []
        for message in outbox.messages:
            leased = leases.get(message.request) if type(message) is Infer else None
            if leased is not None and leased.message.batch and self._answering in (None, leased):
                leased.waiting.append(message)
            else:
                kept.append(message)
        _keep(outbox, kept)

    def _give_back(self, outbox: SessionOutbox) -> None:
        waiting = [message for leased in self._by_number.values() for message in leased.waiting]
        for leased in self._by_number.values():
            leased.waiting = []
        outbox.put_first(waiting)

    def _next(self, leased: _Leased, outbox: SessionOutbox, grace_s: float) -> Packet | None:
        """A packet of waiting requests that can be a batch. Those that cannot be sent go to the broker."""
        chosen = self._choose(leased)
        data = _encoded(chosen) if chosen else None
        while data is None and len(chosen) > 1:
            half = len(chosen) // 2
            leased.waiting[:0] = chosen[half:]
            del chosen[half:]
            data = _encoded(chosen)
        if data is None:
            outbox.put_first(chosen)
            return None
        return self._sent(leased, chosen, data, grace_s)

    def _choose(self, leased: _Leased) -> list[Infer]:
        """Takes the first of the waiting requests, and those after it that have inputs of the same form. Cancelled
        requests end here."""
        chosen: list[Infer] = []
        form, limit = None, 0
        for index, message in enumerate(leased.waiting):
            if not self._is_wanted(message):
                continue
            own = [(tensor.name, tensor.dtype, tensor.shape) for tensor in message.inputs]
            if form is None:
                form, limit = own, min(BATCH_REQUESTS, leased.message.batch // max(own[0][2][0], 1))
            if own != form or len(chosen) >= limit:
                leased.waiting = leased.waiting[index:]
                return chosen
            chosen.append(message)
        leased.waiting = []
        return chosen

    def _sent(self, leased: _Leased, requests: list[Infer], data: bytes, grace_s: float) -> Packet:
        leased.sent = [request.request for request in requests]
        if leased.message.batch:
            self._answering = leased
        for number in leased.sent:
            ticket = self._tickets.pending[number]
            if ticket.deadline is not None:
                ticket.deadline -= grace_s
                self._tickets.add_deadline(ticket.deadline, number)
        return Packet(data, lease=leased.message.lease)

    def _is_alone(self, number: int) -> bool:
        """True if only questions are in flight beside the request. An operation changes what the request means, and a
        ticket without a message may be a cancelled request."""
        if self._queries.operating:
            return False
        tickets = self._tickets.pending.values()
        return all(type(ticket.message) is Ask for ticket in tickets if ticket.number != number)

    def remove(self, lease: int) -> tuple[list[int], list[Infer]]:
        """Returns the last requests sent over the lease, and those that have waited for it. If unanswered, the former
        may be sent again, but not over a lease."""
        ended = self._by_number.pop(lease, None)
        if ended is None:
            return [], []
        for key, leased in list(self.by_model.items()):
            if leased is ended:
                del self.by_model[key]
        if self._answering is ended:
            self._answering = None
        self._unanswered = frozenset(ended.sent)
        return ended.sent, [message for message in ended.waiting if self._is_wanted(message)]

    def _is_wanted(self, message: Infer) -> bool:
        """False: the request was cancelled, and ends here."""
        ticket = self._tickets.pending.get(message.request)
        if ticket is not None and ticket.message is None:
            self._tickets.remove(ticket)
        return ticket is not None and ticket.message is not None

    def clear(self) -> None:
        self._answering = None
        self.by_model.clear()
        self._by_number.clear()


def _encoded(requests: list[Infer]) -> bytes | None:
    """None: they cannot be one packet."""
    try:
        data = codec.encode(requests)
    except UNWRITABLE:
        return None
    return data if len(data) <= PACKET_BYTES else None


def _keep(outbox: SessionOutbox, messages: list[Any]) -> None:
    outbox.clear()
    for message in messages:
        outbox.queue(message)
