"""A client written from docs/wire.md alone, with `zmq` and `msgpack`.

Invariant: it imports nothing of shmserve, and every number in it is from that page.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import Any

import msgpack
import zmq

MAP, UNMAP, RETURN, PING, PONG = 1, 2, 3, 4, 5
HELLO, INFER, CANCEL, ASK, BYE, MORE, INFER_BATCH = 6, 7, 8, 9, 10, 11, 12
WELCOME, REPLY, FAIL, RELEASED, FAIL_HELD, ANSWER, RECLAIM, GOODBYE, PART = 32, 33, 34, 35, 36, 37, 38, 39, 40
REPLY_BATCH, FAIL_BATCH = 41, 45
SECONDS = 20.0
Message = list[Any]


class WireClient:
    """One DEALER. `frames`: the frames after the last packet; `named`: the segments that the server has announced;
    `batched`: number of ReplyBatches read."""

    def __init__(self, server: Path, outputs: str, *, greet: bool = True) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(f"ipc://{server}/broker.sock")
        self._waiting: list[Message] = []
        self.frames: list[bytes] = []
        self.named: dict[int, tuple[str, int]] = {}
        self.owner = 0
        self.limits: dict[str, int] = {}
        self.batched = 0
        if greet:
            self.send([HELLO, 1, os.getpid(), "independent", outputs])
            tag, protocol, self.owner, version, self.limits = self.read()
            assert (tag, protocol) == (WELCOME, 1)
            assert isinstance(version, str)
            assert self.limits
            assert all(type(value) is int for value in self.limits.values())

    def send(self, *batch: Message, frames: tuple[bytes, ...] = ()) -> None:
        self._socket.send_multipart([msgpack.packb(list(batch)), *frames])

    def read(self) -> Message:
        """The next message; Maps, Unmaps and Pings are processed on the way."""
        while True:
            while not self._waiting:
                assert self._socket.poll(int(SECONDS * 1000)), "the server does not answer"
                packet, *frames = self._socket.recv_multipart()
                self.frames = frames or self.frames
                self._waiting = msgpack.unpackb(packet)
            message = self._waiting.pop(0)
            if message[0] == MAP:
                _, segment, size, name, *_ = message
                self.named[segment] = (name, size)
            elif message[0] == UNMAP:
                del self.named[message[1]]
            elif message[0] == PING:
                self.send([PONG, message[1]])
            else:
                return message

    def infer(
        self, request: int, model: str, inputs: list[Message], *more: Any, frames: tuple[bytes, ...] = ()
    ) -> Message:
        self.send([INFER, request, model, 0, inputs, *more], frames=frames)
        answer = self.read()
        assert answer[1] == request
        return answer

    def bytes_of(self, tensor: Message) -> bytes:
        """The bytes of a tensor: in the message, in a frame, or in a named segment of the server."""
        data = tensor[3]
        if isinstance(data, bytes):
            return data
        if isinstance(data, int):
            return self.frames[data]
        found = b""
        for segment, offset, size in data:
            name, whole = self.named[segment]
            with (
                open(f"/dev/shm/{name.lstrip('/')}", "rb") as file,
                mmap.mmap(file.fileno(), whole, prot=mmap.PROT_READ) as memory,
            ):
                found += memory[offset : offset + size]
        return found

    def close(self) -> None:
        self.send([BYE])
        self._socket.close(linger=1000)
        self._context.term()

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Segment:
    """A named object in /dev/shm that this process owns and has announced."""

    def __init__(self, client: WireClient, content: bytes) -> None:
        self.name = f"independent-{secrets.token_hex(16)}"
        self.number = client.owner << 32 | 1
        descriptor = os.open(f"/dev/shm/{self.name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, content)
        finally:
            os.close(descriptor)
        self.handle = [self.number, 0, len(content)]
        self._client = client
        client.send([MAP, self.number, len(content), "/" + self.name])

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.send([UNMAP, self.number])
        os.unlink(f"/dev/shm/{self.name}")
