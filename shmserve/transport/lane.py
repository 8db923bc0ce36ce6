"""The client's end of a lane: a unix SEQPACKET socket, with one system call per packet where possible.

`poll` before each `recvmsg` would cost a second system call per packet. Instead, the timeout is set on the socket
(SO_RCVTIMEO), and changed only if it is longer than the requested one or much shorter. `receive` may therefore return
before its timeout; callers check the time and call it again.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import struct

from shmserve.errors import ConnectionLost, InvalidRequest, ProtocolError
from shmserve.paths import SOCKET_PATH_BYTES
from shmserve.protocol.descriptors import ANCILLARY_BYTES, LOST, received
from shmserve.protocol.messages import PACKET_BYTES
from shmserve.session import Incoming, Packet
from shmserve.transport.address import Address, no_server

# Plain integers, because operators of enum flags cost microseconds per call.
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)
_AT_ONCE = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_SEND = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_CTRUNC = int(socket.MSG_CTRUNC)
_TIMEVAL = struct.Struct("ll")
SEND_BUFFER = 1 << 20
_REASONS = {errno.ENOENT: "no such socket", errno.ECONNREFUSED: "connection refused"}
KEPT_LIMIT_S = 0.5
"""A receive timeout of at least this is not made longer: waking up twice a second costs nothing."""
FULL_LIMIT_S = 0.05
"""A receive timeout shorter than this is set unchanged; a longer one is set to half its length."""


def connect(address: Address) -> Lane:
    if len(os.fsencode(address.path)) > SOCKET_PATH_BYTES:
        raise InvalidRequest(f"the path of {address.url} is too long for a socket ({SOCKET_PATH_BYTES} bytes)")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(address.path)
    except OSError as error:
        sock.close()
        if error.errno in (errno.EPERM, errno.EACCES):
            raise no_server(
                address, "permission denied on its socket; the server grants access to a group with --socket-group"
            ) from error
        raise no_server(address, _REASONS.get(error.errno or 0, error.strerror or str(error))) from error
    return Lane(sock)


class LeaseSocket:
    """The socket of a lease. `poll` waits for input on it and on the lane."""

    __slots__ = ("poll", "sock")

    def __init__(self, sock: socket.socket, lane: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)
        self.poll.register(lane, select.POLLIN)

    def send(self, data: bytes) -> None:
        """Sends a packet. If this fails, LeaseEnd arrives over the lane, and the request is sent again."""
        try:
            self.sock.send(data, _SEND)
        except OSError:
            with contextlib.suppress(OSError):  # the worker has already closed its end
                self.sock.shutdown(socket.SHUT_RDWR)  # otherwise the worker ends the lease when it sees this

    def receive(self, buffer: bytearray) -> int:
        """The size of the next packet; 0 at the end, -1 if there is none yet."""
        try:
            return self.sock.recv_into(buffer)
        except BlockingIOError:
            return -1
        except ConnectionResetError:  # reported once, before packets that have arrived
            return self.receive(buffer)
        except OSError:
            return 0


class Lane:
    """A ServerLink over a connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._sock = sock
        self._sock_send = sock.send
        self._recvmsg_into = sock.recvmsg_into
        self._limit: float | None = None
        """The socket's receive timeout in seconds; None: no timeout."""
        self._buffer = bytearray(PACKET_BYTES + 1)
        self._buffers = [self._buffer]
        self._view = memoryview(self._buffer)
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._leases: dict[int, LeaseSocket] = {}
        self._leased: LeaseSocket | None = None
        """The lease over which an answer is expected."""

    # ------------------------------------------------------------------------------------ sending

    def send(self, packet: Packet) -> bool:
        if packet.lease:
            self._leased = leased = self._leases.get(packet.lease)
            if leased is not None:  # otherwise LeaseEnd arrives over the lane
                leased.send(packet.data)
            return True
        try:
            if packet.descriptors:
                rights = array.array("i", packet.descriptors)
                self._sock.sendmsg([packet.data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], _SEND)
            else:
                self._sock_send(packet.data, _SEND)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionLost(f"the connection to the server ended ({error.strerror})") from error
        return True

    def in_use(self) -> bool:
        return False  # always safe to send: no finalizer runs during a system call of the same thread

    def wait_writable(self, wait: float | None) -> None:
        self._poll(select.POLLOUT, wait)

    def _poll(self, events: int, wait: float | None, wakeup: int | None = None) -> None:
        poll = select.poll()
        poll.register(self._sock, events)
        if self._leased is not None:
            poll.register(self._leased.sock, select.POLLIN)
        if wakeup is not None:
            poll.register(wakeup, select.POLLIN)
        poll.poll(None if wait is None else max(0.0, wait) * 1000 + 1)

    # ------------------------------------------------------------------------------------ receiving

    def receive(self, wait: float | None) -> Incoming | None:
        flags = _CLOEXEC
        leased = self._leased
        if leased is not None:
            if wait is None or wait > 0:
                leased.poll.poll(None if wait is None else wait * 1000 + 1)
                wait = 0
            size = leased.receive(self._buffer)
            if size > 0:
                self._leased = None
                return self._view[:size], [], []
            if size == 0:
                self._leased = None  # LeaseEnd arrives over the lane
                return None
        if wait is None:
            if self._limit is not None:
                self._set_limit(None)
        elif wait <= 0:
            flags = _AT_ONCE
        else:
            # Set to half of a long timeout, so that the limit still fits the rest of this wait and slightly shorter
            # ones.
            limit = self._limit
            if limit is None or limit > wait or (limit < KEPT_LIMIT_S and limit < wait * 0.25):
                self._set_limit(wait if wait < FULL_LIMIT_S else wait * 0.5)
        try:
            size, ancillary, received_flags, _ = self._recvmsg_into(self._buffers, ANCILLARY_BYTES, flags)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # reported once; after that, the last packets of the server can be read
            return self.receive(wait)
        except OSError as error:
            raise ConnectionLost(f"the connection to the server ended ({error.strerror})") from error
        descriptors = received(ancillary) if ancillary else []
        if size == 0 or received_flags & _CUT:
            for descriptor in descriptors:
                os.close(descriptor)
            if received_flags & _CTRUNC:
                raise ConnectionLost(f"reconnecting to the server: {LOST}")
            if size:
                raise ProtocolError(f"the server sent a packet over the limit of {PACKET_BYTES} bytes")
            raise ConnectionLost("the connection to the server ended")
        return self._view[:size], descriptors, []

    def _set_limit(self, seconds: float | None) -> None:
        microseconds = 0 if seconds is None else max(1, int(seconds * 1e6))
        value = _TIMEVAL.pack(microseconds // 1_000_000, microseconds % 1_000_000)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._limit = seconds

    def receive_or_event(self, wait: float | None, to_send: bool) -> Incoming | None:
        self._poll(select.POLLIN | (select.POLLOUT if to_send else 0), wait, self._wakeup)
        with contextlib.suppress(BlockingIOError):  # `wake` was not called
            os.eventfd_read(self._wakeup)
        return self.receive(0)

    def wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    # ------------------------------------------------------------------------------------ leases

    @property
    def awaits_lease(self) -> bool:
        return self._leased is not None

    def open_lease(self, lease: int, fd: int) -> None:
        self._leases[lease] = LeaseSocket(socket.socket(fileno=fd), self._sock)

    def close_lease(self, lease: int) -> list[bytes]:
        leased = self._leases.pop(lease, None)
        if leased is None:
            return []
        if self._leased is leased:
            self._leased = None
        packets: list[bytes] = []
        while (size := leased.receive(self._buffer)) > 0:
            packets.append(bytes(self._view[:size]))
        leased.sock.close()
        return packets

    def descriptors(self) -> list[int]:
        return [self._sock.fileno(), *(leased.sock.fileno() for leased in self._leases.values())]

    # ------------------------------------------------------------------------------------ closing

    def interrupt(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already disconnected

    def close(self, linger: bool = False) -> None:  # a Unix socket always delivers what was sent
        self._sock.close()
        for leased in self._leases.values():
            leased.sock.close()
        self._leases.clear()
        self._leased = None
        wakeup, self._wakeup = self._wakeup, -1
        if wakeup >= 0:
            os.close(wakeup)

    def abandon(self) -> None:
        self.close()
