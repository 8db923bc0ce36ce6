"""A SEQPACKET link between the broker and a worker or a client on the lane. It only moves packets; its flow decides
when it is read.

A packet carries the descriptors of its nameless Maps, or of its Load, Lend or Lease, in order. Packets that cannot be
sent at once are queued up to a limit. A peer that exceeds the limit is disconnected with a Goodbye, which it can still
read.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from shmserve.errors import ProtocolError, Unavailable
from shmserve.protocol import codec as wire
from shmserve.protocol.descriptors import ANCILLARY_BYTES, DESCRIPTORS, LOST, received
from shmserve.protocol.messages import PACKET_BYTES, Goodbye, Map

SEND_BUFFER = 1 << 20
"""Requested size; the kernel grants up to net.core.wmem_max, by default twice 208 KiB."""
OUTBOX_BYTES = 64 << 20
"""Limit of unsent bytes for a worker; clients have client_outbox_bytes."""
LINGER_S = 10.0
"""Time that the peer has to read the remaining packets, or the Goodbye, after the link has ended."""
BUSY_MESSAGES = 4
"""After a packet with this many messages, another packet is likely: read again without polling."""

# Plain integers: arithmetic with enums costs microseconds, twice per packet.
_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_TRUNCATED = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_CTRUNC = int(socket.MSG_CTRUNC)
_DONTWAIT = int(socket.MSG_DONTWAIT)
_PEEK = int(socket.MSG_PEEK | socket.MSG_TRUNC | socket.MSG_DONTWAIT)

Deliver = Callable[[int, list[Any], list[int]], None]
"""Called with a peer, its messages and their descriptors."""


class LinkFlow(Protocol):
    """Reads a link, and learns how much its peer has not read."""

    def drain(self) -> None:
        """The peer has closed. Reads what it has sent, to the end, as event loops stop watching such a socket."""

    def stop(self) -> None:
        """The link is not read any more."""

    def descriptors_lost(self) -> None:
        """The descriptors of a packet were lost. Ends the link: without the Maps, every later handle is invalid."""

    def kept(self, size: int) -> None:
        """This many bytes were queued, as the socket is full."""

    def sent(self, size: int) -> None:
        """This many queued bytes were sent."""

    def dropped(self) -> None:
        """The queued bytes will not be sent."""


class PeerLink:
    """`flow` makes the flow of a link. `ended(peer, reason)` is called once, at the end."""

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        codec: wire.Codec,
        flow: Callable[[PeerLink], LinkFlow],
        ended: Callable[[int, str], None],
        loop: Any,
        outbox_bytes: int = OUTBOX_BYTES,
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self.peer = peer
        self.outbox: list[Any] = []
        self.maps = False
        """The outbox contains a Map, which needs its descriptor."""
        self.closing = False
        self.readable = True
        """The link has not ended, and no Goodbye is on its way."""
        self.size = 0
        """Size of the last packet received."""
        self.unsent_bytes = 0
        self._sock: socket.socket | None = sock
        self._fd = sock.fileno()
        self._decode = codec.decode
        self._ended = ended
        self._loop = loop
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._outbox_bytes = outbox_bytes
        self._linger_timer: Any = None
        self.flow = flow(self)

    @property
    def open(self) -> bool:
        return self._sock is not None

    # ------------------------------------------------------------------------------------ input

    def listen(self, readable: Callable[[], None]) -> None:
        """Calls `readable` whenever packets have arrived."""
        self._loop.add_reader(self._fd, readable)

    def ignore(self) -> None:
        """Ends `listen`."""
        self._loop.remove_reader(self._fd)

    def receive(self) -> tuple[list[Any], list[int]] | None:
        """The messages and descriptors of the next packet. None if no packet has arrived or the link has ended."""
        sock = self._sock
        if sock is None:
            return None
        try:
            size, ancillary, flags, _ = sock.recvmsg_into(_shared_buffers, ANCILLARY_BYTES, _FLAGS)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # the kernel reports it before packets that the peer sent earlier: read those
            self.flow.drain()
            return None
        except OSError as error:
            self.close(error.strerror or "connection lost")
            return None
        descriptors = received(ancillary) if ancillary else []
        if size == 0:
            close_all(descriptors)  # an empty packet, which may carry descriptors, counts as end of file
            self.close("")
            return None
        self.size = size
        if flags & _TRUNCATED:
            close_all(descriptors)
            if flags & _CTRUNC:
                self.flow.descriptors_lost()
                return None
            return [wire.Refused(0, f"packet exceeds the limit of {PACKET_BYTES} bytes")], []
        try:
            return self._decode(_shared_view[:size]), descriptors
        except ProtocolError as error:
            return [wire.Refused(0, error.message)], descriptors

    def next_size(self) -> int:
        """Size of the next packet, which is not read; 0 if there is none."""
        try:
            return 0 if self._sock is None else self._sock.recv_into(_one_byte, 1, _PEEK)
        except OSError:
            return 0

    def has_more(self) -> bool:
        """Whether the next `receive` finds a packet, or the end."""
        try:
            if self._sock is not None:
                self._sock.recv_into(_one_byte, 1, _PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True  # the next read reports the error
        return self._sock is not None

    def _stop_reading(self) -> None:
        self.readable = False
        self.ignore()
        self.flow.stop()

    # ------------------------------------------------------------------------------------ output

    def flush(self, descriptor_of: Callable[[int], int | None]) -> None:
        """Sends the outbox in as few packets as possible."""
        if self._sock is None:
            return
        messages, self.outbox = self.outbox, []
        if not messages:
            pass
        elif self.maps:
            self.maps = False
            for packet, numbers in _pack_with_maps(messages, descriptor_of):
                self._send(packet, numbers)
        else:
            for packet in wire.pack(messages):
                self._send(packet, [])
        if self.closing:
            if not self._unsent:
                self.close("")
            elif self._linger_timer is None:
                self._linger("")

    def send_now(self, messages: list[Any], descriptors: list[int]) -> None:
        """Sends messages with their own descriptors (Load, Lend, Lease) ahead of the outbox."""
        self._send(wire.encode(messages), descriptors)

    def _send(self, packet: bytes, descriptors: list[int]) -> None:
        if self._sock is None or self._linger_timer is not None:
            return
        if self._unsent or not self._try(packet, descriptors):
            self._keep(packet, descriptors)

    def _keep(self, packet: bytes, descriptors: list[int]) -> None:
        """Queues a packet. Duplicates its descriptors, as their segments may be forgotten before it is sent."""
        kept: list[int] = []
        try:
            for number in descriptors:
                kept.append(os.dup(number))
        except OSError:
            close_all(kept)
            raise
        self._unsent.append((packet, kept))
        self.unsent_bytes += len(packet)
        if len(self._unsent) == 1:
            self._loop.add_writer(self._fd, self._writable)
        if self.unsent_bytes > self._outbox_bytes:
            self.cut_off(
                f"{self.unsent_bytes} unsent bytes, over the limit of {self._outbox_bytes} (client_outbox_bytes)"
            )
        else:
            self.flow.kept(len(packet))

    def _try(self, packet: bytes, descriptors: list[int]) -> bool:
        """False if the socket is full. On a broken link the packet counts as sent and the queue is dropped; `drain`
        reports the end after the peer's last packets."""
        sock = self._sock
        assert sock is not None
        try:
            if descriptors:
                rights = array.array("i", descriptors)
                sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], _DONTWAIT)
            else:
                sock.send(packet, _DONTWAIT)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            self._drop_unsent()
            self._loop.call_soon(self.flow.drain)
        except OSError as error:
            self.close(error.strerror or "connection lost")
        return True

    def _writable(self) -> None:
        before = self.unsent_bytes
        while self._unsent and self._sock is not None:
            packet, descriptors = self._unsent[0]
            if not self._try(packet, descriptors):
                break
            if self._unsent:  # empty if the link broke and was closed
                self._unsent.popleft()
                self.unsent_bytes -= len(packet)
                close_all(descriptors)
        if not self._unsent and self._sock is not None:
            self._loop.remove_writer(self._fd)
            if self.closing:
                self.close("")
        if self.unsent_bytes < before:
            self.flow.sent(before - self.unsent_bytes)

    def cut_off(self, behind: str) -> None:
        """Replaces unsent packets with a Goodbye that contains the reason, and ends the link, unless it has ended
        already."""
        self._drop_unsent()
        text = f"this client does not read its responses: {behind}; read them, and connect again"
        self._unsent.append((wire.encode([Goodbye(Unavailable.code, text)]), []))
        self.closing = True
        if self._linger_timer is None:
            self._linger(f"it does not read its responses: {behind}")

    def _linger(self, reason: str) -> None:
        """Ends the link for the broker. The peer has LINGER_S to read the unsent packets."""
        assert self._sock is not None
        self._stop_reading()
        _shut_down_reading(self._sock)
        self._linger_timer = self._loop.call_later(LINGER_S, self.close, "")
        self._ended(self.peer, reason)

    def _drop_unsent(self) -> None:
        for _, descriptors in self._unsent:
            close_all(descriptors)
        self._unsent.clear()
        self.unsent_bytes = 0
        self.outbox = []
        self.flow.dropped()

    def close(self, reason: str) -> None:
        """Closes the socket and calls `ended`, once."""
        sock, self._sock = self._sock, None
        if sock is None:
            return
        self._stop_reading()
        self._loop.remove_writer(self._fd)
        if self.closing:
            _shut_down_reading(sock)
        sock.close()
        self._drop_unsent()
        if self._linger_timer is None:
            self._ended(self.peer, reason)
        else:
            self._linger_timer.cancel()


_shared_buffers = [bytearray(PACKET_BYTES + 1)]
"""Shared by all links, because decoding copies each packet before the next one is read."""
_shared_view: Any = memoryview(_shared_buffers[0])
_one_byte = bytearray(1)


class EagerFlow:
    """Reads whatever arrives, and never waits for the peer."""

    def __init__(self, link: PeerLink, deliver: Deliver) -> None:
        self._link = link
        self._deliver = deliver
        link.listen(self._readable)

    def _readable(self) -> None:
        link = self._link
        for _ in range(8):  # then let other links run
            packet = link.receive()
            if packet is None:
                return
            messages, descriptors = packet
            self._deliver(link.peer, messages, descriptors)
            if len(messages) < BUSY_MESSAGES:
                return

    def drain(self) -> None:
        self._readable()
        while self._link.has_more():
            self._readable()

    def descriptors_lost(self) -> None:
        self._link.close(LOST)

    def stop(self) -> None: ...
    def kept(self, size: int) -> None: ...
    def sent(self, size: int) -> None: ...
    def dropped(self) -> None: ...


def close_all(descriptors: list[int]) -> None:
    for number in descriptors:
        os.close(number)


def _shut_down_reading(sock: socket.socket) -> None:
    """Shuts down and empties the receive side. Closing a socket with unread packets resets the connection, and the peer
    would see the reset before the Goodbye."""
    try:
        sock.shutdown(socket.SHUT_RD)
        while sock.recv(1, _DONTWAIT):
            pass
    except OSError:
        return  # nothing left, or the peer has closed


def _pack_with_maps(messages: list[Any], descriptor_of: Callable[[int], int | None]) -> list[tuple[bytes, list[int]]]:
    """Packets, each with the descriptors of its own nameless Maps. Omits a Map whose segment has been forgotten, as no
    later message refers to it."""
    kept: list[Any] = []
    numbers: list[int] = []
    for message in messages:
        if isinstance(message, Map) and message.name is None:
            number = descriptor_of(message.segment)
            if number is None:
                continue
            numbers.append(number)
        kept.append(message)
    if not kept:
        return []
    packet = wire.encode(kept)
    if (len(packet) <= PACKET_BYTES and len(numbers) <= DESCRIPTORS) or len(kept) == 1:
        return [(packet, numbers)]
    half = len(kept) // 2
    return _pack_with_maps(kept[:half], descriptor_of) + _pack_with_maps(kept[half:], descriptor_of)
