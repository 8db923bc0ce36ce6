"""The worker's end of its link to the broker: a SEQPACKET socket that carries packets and descriptors.

Invariant: the caller that receives a packet owns its descriptors, and only it closes them.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any, TypeVar

from shmserve.errors import ConnectionLost, ProtocolError
from shmserve.protocol import codec
from shmserve.protocol.descriptors import ANCILLARY_BYTES, DESCRIPTORS, LOST, received
from shmserve.protocol.messages import PACKET_BYTES, Map
from shmserve.protocol.worker_messages import Counted, Load, Loaded, WorkerOrder
from shmserve.system.polling import PollBudget, core_is_free

T = TypeVar("T")
SEND_BUFFER = 4 * 1024 * 1024

AT_ONCE_NS = 5_000
"""A packet that is received within this time had already arrived."""

_WAIT = int(socket.MSG_CMSG_CLOEXEC)
_NO_WAIT = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_CUT = int(socket.MSG_TRUNC)
_CTRUNC = int(socket.MSG_CTRUNC)
_decode = codec.Codec(WorkerOrder).decode


class BrokerLink:
    """Blocking sends and receives. The messages of one `send` arrive in order, in as few packets as they fit."""

    def __init__(self, sock: socket.socket, busy_poll_ns: int = 0) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._sock = sock
        # Unlike a bytearray, it is not filled with zeros, so it only has the pages that packets have reached.
        self._buffer = mmap.mmap(-1, PACKET_BYTES + 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._buffer)
        self._into = [self._view]
        self._polling = PollBudget(busy_poll_ns) if busy_poll_ns else None

    def fileno(self) -> int:
        """The descriptor, for callers that poll several."""
        return self._sock.fileno()

    def receive(self) -> tuple[list[Any], list[int]]:
        """Waits for a packet and returns its messages and descriptors. Raises ConnectionLost at the end of the link."""
        return self.wait(self.drain, lambda: self._take(_WAIT))

    def wait(self, attempt: Callable[[], T | None], block: Callable[[], T]) -> T:
        """Polls `attempt`, which returns None while there is no result, for as long as polling pays off. Then returns
        the result of `block`."""
        polling = self._polling
        if polling is None:
            return block()
        since = monotonic_ns()
        result = self._poll(polling, since + polling.ns, attempt) if polling.ns else None
        if result is None:
            result = block()
        now = monotonic_ns()
        polling.waited(now - since, now, now - since > AT_ONCE_NS)
        return result

    def _poll(self, polling: PollBudget, until: int, attempt: Callable[[], T | None]) -> T | None:
        taken = False
        while True:
            result = attempt()
            if result is not None:
                return result
            now = monotonic_ns()
            if taken:
                polling.preempted(now)
            if taken or now >= until:
                return None
            taken = not core_is_free(now)

    def drain(self) -> tuple[list[Any], list[int]] | None:
        """Returns a packet that has already arrived, or None."""
        try:
            return self._take(_NO_WAIT)
        except BlockingIOError:
            return None

    def _take(self, flags: int) -> tuple[list[Any], list[int]]:
        try:
            size, ancillary, what, _ = self._sock.recvmsg_into(self._into, ANCILLARY_BYTES, flags)
        except ConnectionError as error:
            raise ConnectionLost(f"the link to the broker broke: {error.strerror}") from None
        descriptors = received(ancillary) if ancillary else []
        try:
            if what & _CTRUNC:
                raise ConnectionLost(LOST)
            if what & _CUT:
                raise ProtocolError(f"a packet was cut off; the limit is {PACKET_BYTES} bytes")
            if size == 0:
                raise ConnectionLost("the broker closed the link")
            return _decode(self._view[:size]), descriptors  # type: ignore[arg-type]  # it accepts any buffer
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            raise

    def send(self, messages: list[Any], descriptors: Sequence[int] = ()) -> None:
        """Sends messages; the n-th descriptor goes with the n-th message that needs one (`carries_descriptor`)."""
        packet = codec.encode_of_model(messages)
        if len(packet) <= PACKET_BYTES and len(descriptors) <= DESCRIPTORS:
            self.send_packet(packet, descriptors)
            return
        if len(messages) == 1:
            codec.pack(messages)  # raises: this message alone is too large
        half = len(messages) // 2
        split = sum(carries_descriptor(message) for message in messages[:half])
        self.send(messages[:half], descriptors[:split])
        self.send(messages[half:], descriptors[split:])

    def send_packet(self, packet: bytes, descriptors: Sequence[int]) -> None:
        try:
            if descriptors:
                socket.send_fds(self._sock, [packet], list(descriptors))
            else:
                self._sock.send(packet)
        except ConnectionError as error:
            raise ConnectionLost(f"the link to the broker broke: {error.strerror}") from None

    def close(self) -> None:
        self._view.release()
        self._sock.close()


def carries_descriptor(message: Any) -> bool:
    """Whether a message comes with a descriptor: a Map without a name, Load and Loaded (the configuration), and Counted
    (a page of counters)."""
    return isinstance(message, (Load, Loaded, Counted)) or (isinstance(message, Map) and message.name is None)
