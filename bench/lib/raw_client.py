"""Clients that speak the raw protocol, over the lane or ZeroMQ: they can send messages that the public client never
sends, and count every response.

Invariant: there are no retries, and only `receive_kind` drops messages.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import struct
from abc import ABC, abstractmethod
from array import array
from collections import deque
from time import monotonic
from typing import Any

from shmserve.protocol import codec, messages
from shmserve.protocol.messages import Handle, Hello, Lease, Map, Return, Tensor, Unmap, Welcome

PATIENCE_S = 60.0
"""Timeout for a message that must arrive. Long, because other programs may be using the machine."""
ROOM = messages.PACKET_BYTES + 4096


class ConnectionClosed(ConnectionError):
    """The server closed the connection."""


class Link(ABC):
    """Base class of both clients: receives messages one at a time, with a timeout."""

    owner = 0

    def __init__(self) -> None:
        self.inbox: deque[Any] = deque()
        self._codec = codec.Codec(messages.BrokerMessage)

    @abstractmethod
    def fileno(self) -> int: ...

    @abstractmethod
    def send_bytes(self, packet: bytes) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _fill(self) -> bool:
        """Adds the messages of one packet to `inbox`, without blocking; False if there is none."""

    def send(self, *batch: Any) -> None:
        self.send_bytes(codec.encode(batch))

    def receive(self, seconds: float = PATIENCE_S) -> Any:
        """The next message. Raises TimeoutError if none arrives."""
        end = monotonic() + seconds
        while not self.inbox:
            if not self._fill():
                remaining = end - monotonic()
                if remaining <= 0 or not select.select([self], [], [], remaining)[0]:
                    raise TimeoutError(f"no message within {seconds:g} s")
        return self.inbox.popleft()

    def receive_kind(self, *kinds: type[Any], seconds: float = PATIENCE_S) -> Any:
        """The next message of these types; others are dropped."""
        end = monotonic() + seconds
        while True:
            message = self.receive(max(0.0, end - monotonic()))
            if isinstance(message, kinds):
                return message

    def drain(self) -> list[Any]:
        """All messages that have arrived."""
        while self._fill():
            pass
        result = list(self.inbox)
        self.inbox.clear()
        return result

    def hello(self, outputs: str, protocol: int = messages.PROTOCOL, leases: bool = False) -> Any:
        """Sends Hello; returns the Welcome, or the Goodbye received instead."""
        self.send(Hello(protocol, os.getpid(), "raw", outputs, leases))
        answer = self.receive_kind(Welcome, messages.Goodbye)
        if isinstance(answer, Welcome):
            self.owner = answer.owner
        return answer

    def __exit__(self, *_: object) -> None:
        self.close()


class RawLane(Link):
    """A SEQPACKET connection; segments received as descriptors are mapped into `maps`, and the sockets of leases kept
    in `leases`."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(path)
        self._room = bytearray(ROOM)
        self.maps: dict[int, mmap.mmap] = {}
        self.leases: dict[int, socket.socket] = {}

    def __enter__(self) -> RawLane:
        return self

    def fileno(self) -> int:
        return self._socket.fileno()

    def send_bytes(self, packet: bytes, descriptors: tuple[int, ...] = ()) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        self._socket.sendmsg([packet], ancillary)

    def limit_sends(self, seconds: float) -> None:
        """Makes blocked sends raise BlockingIOError after this time."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _fill(self) -> bool:
        try:
            size, ancillary, flags, _ = self._socket.recvmsg_into([self._room], 4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError as error:
            raise ConnectionClosed("the connection was reset") from error
        if not size:
            raise ConnectionClosed("the connection was closed")
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC), "a packet was cut"
        descriptors: list[int] = []
        for _, kind, data in ancillary:
            assert kind == socket.SCM_RIGHTS
            descriptors += array("i", data[: len(data) - len(data) % 4])
        for message in self._codec.decode(bytes(memoryview(self._room)[:size])):
            self._note(message, descriptors)
            self.inbox.append(message)
        assert not descriptors, "descriptors came that no Map or Lease explains"
        return True

    def _note(self, message: Any, descriptors: list[int]) -> None:
        if isinstance(message, Map) and message.name is None:
            fd = descriptors.pop(0)
            self.maps[message.segment] = mmap.mmap(fd, message.size, prot=mmap.PROT_READ)
            os.close(fd)
        elif isinstance(message, Lease):
            self.leases[message.lease] = socket.socket(fileno=descriptors.pop(0))
        elif isinstance(message, Unmap):
            self.maps.pop(message.segment).close()

    def read(self, tensor: Tensor) -> bytes:
        """Copies a tensor's bytes, and returns its handles to the server."""
        if isinstance(tensor.data, bytes):
            return tensor.data
        assert isinstance(tensor.data, tuple)
        result = b"".join(self.maps[h.segment][h.offset : h.offset + h.size] for h in tensor.data)
        self.send(Return(tensor.data))
        return result

    def close(self) -> None:
        self._socket.close()
        for mapped in self.maps.values():
            mapped.close()
        self.maps.clear()
        for lease in self.leases.values():
            lease.close()
        self.leases.clear()


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class RawSegment:
    """A client's memfd segment. It has no allocator: the caller places data at fixed offsets."""

    def __init__(self, lane: RawLane, size: int, number: int = 1, seals: int = SEALS) -> None:
        self.id = lane.owner << messages.OWNER_SHIFT | number
        self.size = size
        self.fd = os.memfd_create("raw", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        if seals:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self.memory = mmap.mmap(self.fd, size)
        lane.send_bytes(codec.encode([Map(self.id, size)]), (self.fd,))

    def put(self, offset: int, content: bytes) -> tuple[Handle, ...]:
        self.memory[offset : offset + len(content)] = content
        return (Handle(self.id, offset, len(content)),)

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


class Zmq(Link):
    """A DEALER socket. Tensors may be sent as frames after the packet. In received tensors, the index of a frame is
    replaced by its bytes.
    """

    def __init__(self, path: str) -> None:
        import zmq

        super().__init__()
        self._zmq = zmq
        self._context: Any = zmq.Context()
        self._socket: Any = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(f"ipc://{path}")

    def __enter__(self) -> Zmq:
        return self

    def fileno(self) -> int:
        return int(self._socket.fileno())

    def send_bytes(self, packet: bytes, frames: tuple[bytes, ...] = ()) -> None:
        self._socket.send_multipart([packet, *frames])

    def _fill(self) -> bool:
        try:
            parts = self._socket.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return False
        packet, *frames = parts
        used = 0
        for message in self._codec.decode(packet):
            for tensor in getattr(message, "outputs", ()):
                if isinstance(tensor.data, int):
                    tensor.data = frames[tensor.data]
                    used += 1
            self.inbox.append(message)
        assert used == len(frames), "frames came that no tensor names"
        return True

    def receive(self, seconds: float = PATIENCE_S) -> Any:
        # The descriptor of a ZeroMQ socket is edge-triggered, so waiting is only safe with the socket's own poll.
        end = monotonic() + seconds
        while not self.inbox:
            if not self._socket.poll(max(0, int((end - monotonic()) * 1000))):
                raise TimeoutError(f"no message within {seconds:g} s")
            self._fill()
        return self.inbox.popleft()

    def close(self, bye: bool = True) -> None:
        """Closes the socket, by default after sending a Bye, as ZeroMQ does not report closed sockets to the peer.
        Without `bye`, the server notices only when the process exits.
        """
        if bye:
            self._socket.linger = 1000
            self.send(messages.Bye())
        self._socket.close()
        self._context.term()
