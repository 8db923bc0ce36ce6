"""The outgoing messages of a session, and the packets made of them.

Invariant: segments are announced before all other messages, and a message that cannot be encoded fails only its own
ticket.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.protocol import codec
from shmserve.protocol.messages import PACKET_BYTES, PACKET_MESSAGES, Infer, Return, Unmap
from shmserve.session.columns import in_batches
from shmserve.session.memory import SessionMemory
from shmserve.session.tickets import Tickets

MAPS = 64
"""Maximum number of segments announced in one packet: each takes a descriptor, and the kernel passes at most 253."""
HANDLES = 4096
"""Maximum number of handles in one Return."""
UNWRITABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""Errors of the codec for a message that cannot be encoded."""


class Packet(Struct, frozen=True, gc=False):
    """One packet to send: bytes, the descriptors of its nameless Maps, and the frames that follow it (ZeroMQ only)."""

    data: bytes
    descriptors: tuple[int, ...] = ()
    frames: tuple[bytes, ...] = ()
    lease: int = 0
    """The lease over whose socket to send it, if not 0."""


Incoming = tuple[Any, "list[int]", "list[Any]"]
"""One received packet: its bytes (valid until the next receive), its descriptors, and the frames that follow it."""


class SessionOutbox:
    __slots__ = ("_announcements", "_framed", "_memory", "_tickets", "batch_requests", "messages", "size")

    def __init__(self, memory: SessionMemory, tickets: Tickets) -> None:
        self._announcements = memory.announcements
        self._memory = memory
        self._tickets = tickets
        self.messages: list[Any] = []
        self.size = 0
        """Approximate encoded size of `messages`."""
        self._framed = False
        """Whether one of `messages` has frames."""
        self.batch_requests = 0
        """Maximum number of requests in an InferBatch; 0: the server does not accept InferBatch."""

    def expect_frames(self) -> None:
        """One of the next `messages` has frames."""
        self._framed = True

    def queue(self, message: Any) -> None:
        self.messages.append(message)
        self.size += 64

    def put_first(self, messages: list[Any]) -> None:
        self.messages[:0] = messages
        self.size += 64 * len(messages)

    def clear(self) -> None:
        self.messages = []
        self.size = 0
        self._framed = False

    def take(self) -> list[Packet]:
        announcements, memory = self._announcements, self._memory
        batch, self.messages = self.messages, []
        self.size = 0
        packets: list[Packet] = []
        if announcements.maps:
            packets += self._maps()
        if announcements.unmaps:
            batch = [*map(Unmap, announcements.unmaps), *batch]
            announcements.unmaps.clear()
        while memory.drops:
            batch.insert(0, Return(memory.drops.take(HANDLES)))
        if self._framed:
            self._framed = False
            return packets + self._with_frames(batch)
        if batch:
            try:
                batched = in_batches(batch, self.batch_requests) if self.batch_requests else batch
                data = codec.encode(batched)
                batch = batched
            except UNWRITABLE:
                batch = self._writable(batch)
                data = codec.encode(batch)
            if len(data) <= PACKET_BYTES and len(batch) <= PACKET_MESSAGES:
                packets.append(Packet(data))
            else:
                packets += [Packet(part) for part in codec.pack(batch)]
        return packets

    def _maps(self) -> list[Packet]:
        segments = self._announcements.maps
        groups = [segments[start : start + MAPS] for start in range(0, len(segments), MAPS)]
        segments.clear()
        return [
            Packet(
                codec.encode([segment.map() for segment in group]),
                tuple([segment.fd for segment in group if segment.name is None]),
            )
            for group in groups
        ]

    def _with_frames(self, batch: list[Any]) -> list[Packet]:
        """Sends each message in a separate packet, because frame numbers count from the start of the packet."""
        packets: list[Packet] = []
        for message in self._writable(batch):
            ticket = self._tickets.pending.get(message.request) if type(message) is Infer else None
            kept = ticket.kept if ticket is not None else None
            packets.append(Packet(codec.encode([message]), (), tuple(kept.frames) if kept is not None else ()))
        return packets

    def _writable(self, batch: list[Any]) -> list[Any]:
        good = []
        for message in batch:
            try:
                codec.encode([message])
            except UNWRITABLE as error:
                ticket = self._tickets.pending.get(getattr(message, "request", 0))
                if ticket is None:
                    raise
                self._tickets.remove(ticket)
                ticket.fail(InvalidRequest(f"the request cannot be sent: {error}"))
            else:
                good.append(message)
        return good
