"""One call over HTTP/2: messages of the caller are put together, answers are cut into frames. The rule of the file:
what a caller announces is checked and counted before memory is taken for it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING

import numpy as np

from shmserve.clients.gateway.http2 import frames, heads
from shmserve.clients.gateway.http2 import limits as most
from shmserve.clients.gateway.http2.codes import Code, RpcError
from shmserve.clients.gateway.http2.messages import COMPRESSED_BYTES, deflated, inflated, too_large
from shmserve.clients.gateway.http2.seam import Call
from shmserve.clients.gateway.kserve.answers import Buffer
from shmserve.errors import Unavailable

if TYPE_CHECKING:
    from shmserve.clients.gateway.http2.protocol import Http2

log = logging.getLogger("shmserve.gateway")

LARGE = 64 * 1024
"""A message from this size on is not copied here."""
_ANSWER = Struct(f">HBBBI{len(heads.ANSWER)}sHBBBIBI")
"""The headers of an answer, and what stands before its first message."""
_DATA = Struct(">HBBBIBI")
_LAST = Struct(f">HBBBI{len(heads.TRAILERS_OK)}s")
_ANSWER_SIZE, _LAST_SIZE = len(heads.ANSWER), len(heads.TRAILERS_OK)


class _Nobody:
    """What a stream calls before it has a call, and after."""

    def message(self, data: Buffer) -> None: ...
    def room(self, size: int, first: Buffer) -> memoryview | None: ...
    def half_closed(self) -> None: ...
    def cancelled(self) -> None: ...
    def resume(self) -> None: ...


_nobody = _Nobody()


def _tell(service: Callable[[], None]) -> None:
    """What a service gets wrong there harms no other call."""
    try:
        service()
    except Exception:
        log.exception("a service failed")


class Stream:
    __slots__ = (
        "_begun", "_buffer", "_compression", "_core", "_end", "_end_waits", "_filled", "_flag", "_held", "_path",
        "_prefix", "_queue", "_waiting", "call", "expires", "half", "head", "moved", "number", "over", "queued",
        "taken", "turn", "window",
    )  # fmt: skip

    def __init__(self, core: Http2, number: int, head: heads.Head, window: int, expires: float | None) -> None:
        self._core = core
        self.number = number
        self.head = head
        self.window = window
        """What the caller takes on this stream."""
        self.expires = expires
        self.call: Call = _nobody
        self.over = False
        self.half = False
        """The caller sends no more."""
        self.taken = 0
        """Bytes of the caller's that he was not granted again."""
        self.turn = 0
        self.moved = 0
        self._prefix = b""
        self._buffer: memoryview | None = None
        self._filled = 0
        self._flag = 0
        self._held = 0
        self._waiting: deque[bytes] | None = None
        """Paused: what has come while the service wants no more messages."""
        self._end_waits = False
        self._begun = False
        self._compression = head.accepts if core.limits.compression else ""
        self._queue: deque[Buffer] = deque()
        self.queued = 0
        self._end: bytes | None = None

    # ------------------------------------------------------------------------------------ what services see

    @property
    def path(self) -> str:
        return self.head.path

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.head.metadata

    @property
    def peer(self) -> str:
        return self._core.peer

    @property
    def writable(self) -> bool:
        return not self._queue and self._core.writable

    @property
    def stuck(self) -> bool:
        """Somebody waits for the caller to go on."""
        return bool(self._queue) or ((self._buffer is not None or bool(self._prefix)) and self._waiting is None)

    def pause(self) -> None:
        if self._waiting is None and not self.over:
            self._waiting = deque()

    def unpause(self) -> None:
        waiting = self._waiting
        if waiting is None or self.over:
            return
        self._waiting = None
        while waiting:
            data = waiting.popleft()
            self._let_go(len(data))
            self.receive(data, 0, len(data))
            if self._stopped(waiting):
                return
        if self._end_waits:
            self._end_waits = False
            self.ended()
        else:
            self._core.grant(self)

    @property
    def paused(self) -> bool:
        return self._waiting is not None

    def _stopped(self, more: deque[bytes]) -> bool:
        """Over, or paused again: then what is left waits on."""
        if self._waiting is not None:
            self._waiting.extend(more)
            return True
        return self.over

    def serve(self, call: Call) -> None:
        """`call` is told what comes, unless it has ended already."""
        if not self.over and self._end is None:
            self.call = call

    def go_on(self) -> None:
        """The connection takes more again."""
        if not self._queue:
            _tell(self.call.resume)

    # ------------------------------------------------------------------------------------ what comes

    def receive(self, data: bytes, at: int, end: int) -> None:
        """Bytes of messages."""
        while at < end and not self.over:
            if self._waiting is not None:
                self._wait(data[at:end])
                return
            if self._buffer is not None:
                size = min(end - at, len(self._buffer) - self._filled)
                self._buffer[self._filled : self._filled + size] = memoryview(data)[at : at + size]
                at += size
                self.fill(size)
            elif self._prefix or end - at < 5:
                size = min(end - at, 5 - len(self._prefix))
                self._prefix += data[at : at + size]
                at += size
                if len(self._prefix) == 5:
                    prefix, self._prefix = self._prefix, b""
                    self._begin(prefix[0], int.from_bytes(prefix[1:], "big"), b"")
                else:
                    self._core.watch(self)
            else:
                size, flag = int.from_bytes(data[at + 1 : at + 5], "big"), data[at]
                at += 5
                if size <= end - at:
                    self._core.large = False
                    if size > self._core.limits.message_bytes:
                        self.fail(too_large(size, self._core.limits.message_bytes))
                        return
                    self._deliver(flag, data[at : at + size] if size < LARGE else memoryview(data)[at : at + size])
                    at += size
                else:
                    self._begin(flag, size, memoryview(data)[at:end])

    def _begin(self, flag: int, size: int, first: Buffer) -> None:
        """Of a message of which only `first` is here yet."""
        if size > self._core.limits.message_bytes:
            self.fail(too_large(size, self._core.limits.message_bytes))
            return
        if not size:
            self._deliver(flag, b"")
            return
        if not self._hold(size):
            return
        self._flag, self._filled = flag, 0
        self._core.large = size >= most.QUANTUM
        try:
            room = self.call.room(size, first) if size >= LARGE and not flag else None
        except Exception:
            self.faulty()
            return
        self._buffer = np.empty(size, np.uint8).data if room is None else room
        self._core.watch(self)

    def space(self, most: int) -> memoryview | None:
        """Where the next bytes of a message belong, so that they can be read there at once."""
        if self._buffer is None or self._waiting is not None or self.over:
            return None
        return self._buffer[self._filled : self._filled + most]

    def fill(self, size: int) -> None:
        """So many bytes of the message stand in their place."""
        self._filled += size
        self.moved += size
        buffer = self._buffer
        if buffer is not None and self._filled == len(buffer):
            self._buffer = None
            self._deliver(self._flag, buffer)
            self._let_go(len(buffer))

    def _deliver(self, flag: int, data: Buffer) -> None:
        try:
            if flag:
                if flag != 1:
                    raise RpcError(Code.INTERNAL, "a message does not begin as gRPC says")
                data = inflated(self.head.encoding, data, self._core.limits.message_bytes)
            self.call.message(data)
        except RpcError as error:
            self.fail(error)
        except Exception:
            self.faulty()

    def ended(self) -> None:
        """The caller sends no more."""
        if self._waiting is not None:
            self._end_waits = True
            return
        if self._buffer is not None or self._prefix:
            self.fail(RpcError(Code.INTERNAL, "the last message of the call is not complete"))
            return
        try:
            self.call.half_closed()
        except RpcError as error:
            self.fail(error)
        except Exception:
            self.faulty()

    def faulty(self) -> None:
        """Of an exception that nobody expected: the call ends, and the connection goes on."""
        log.exception("a service failed")
        self.fail(RpcError(Code.INTERNAL, "the gateway failed; its log says more"))

    def _wait(self, data: bytes) -> None:
        assert self._waiting is not None
        if self._hold(len(data)):
            self._waiting.append(data)

    def _hold(self, size: int) -> bool:
        try:
            self._core.door.hold(size)
        except Unavailable as error:
            self.fail(RpcError(Code.UNAVAILABLE, str(error)))
            return False
        self._held += size
        return True

    def _let_go(self, size: int) -> None:
        size = min(size, self._held)
        if size:
            self._held -= size
            self._core.door.hold(-size)

    # ------------------------------------------------------------------------------------ what is sent

    def send(self, parts: Sequence[Buffer]) -> None:
        if self.over or self._end is not None:
            return
        core, flag = self._core, 0
        size = 0
        for part in parts:
            size += len(part)
        if self._compression and size >= COMPRESSED_BYTES:
            parts, flag = [deflated(self._compression, parts, core.limits.compression)], 1
            size = len(parts[0])
        whole = size + 5
        out, number = core.out, self.number
        if self._queue or whole > self.window or whole > core.window or whole > core.frame_bytes:
            self._queue_message(flag, size, parts)
            return
        self.window -= whole
        core.window -= whole
        if self._begun or self._compression:
            self._headers()
            out.append(_DATA.pack(whole >> 8, whole & 0xFF, 0, 0, number, flag, size))
        else:
            self._begun = True
            out.append(
                _ANSWER.pack(0, _ANSWER_SIZE, frames.HEADERS, frames.END_HEADERS, number, heads.ANSWER,
                             whole >> 8, whole & 0xFF, 0, 0, number, flag, size)
            )  # fmt: skip
        out.extend(parts)
        core.out_bytes += whole
        core.wake()

    def _headers(self) -> None:
        if not self._begun:
            self._begun = True
            block = heads.answer(self._compression)
            self._core.out.append(frames.frame(frames.HEADERS, frames.END_HEADERS, self.number, block))

    def _queue_message(self, flag: int, size: int, parts: Sequence[Buffer]) -> None:
        self._headers()
        self._queue.append(bytes([flag]) + size.to_bytes(4, "big"))
        self._queue.extend([part for part in parts if len(part)])
        self.queued += size + 5
        self._core.watch(self)
        self._core.push(self)

    def finish(self, code: int, text: str = "") -> None:
        if self.over or self._end is not None:
            return
        self.call = _nobody
        self._core.door.answered(code)
        if code or text or not self._begun:
            block = heads.trailers(code, text)
            if not self._begun:
                accepted = heads.ACCEPTED if code == Code.UNIMPLEMENTED and self.head.encoding else b""
                block = heads.ANSWER + accepted + block
            self._end = frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, self.number, block)
        else:
            self._end = _LAST.pack(0, _LAST_SIZE, frames.HEADERS, 5, self.number, heads.TRAILERS_OK)
        if not self._queue:
            self._finish()

    def _finish(self) -> None:
        core = self._core
        assert self._end is not None
        core.out.append(self._end)
        core.out_bytes += len(self._end)
        if not self.half:
            core.out.append(frames.reset(self.number, frames.Reason.NO_ERROR))
        self.close()
        core.wake()

    def fail(self, error: RpcError) -> None:
        """The call ends with what went wrong, whatever of an answer waits."""
        call, self.call = self.call, _nobody
        if not self.over:
            self._queue.clear()
            self.queued = 0
            if self._end is None:
                self.finish(error.code, error.text)
            else:
                self._core.out.append(frames.reset(self.number, frames.Reason.CANCEL))
                self.close()
                self._core.wake()
        _tell(call.cancelled)

    def pump(self, most: int, resume: bool = True) -> int:
        """Sends what is queued, as far as the caller takes it. Gives how much that was. `resume`: whether the service
        has seen that the stream was not writable."""
        core = self._core
        sent = 0
        while self._queue and sent < most:
            size = min(self.window, core.window, core.frame_bytes, self.queued)
            if size <= 0:
                break
            core.out.append(frames.FRAME.pack(size >> 8, size & 0xFF, frames.DATA, 0, self.number))
            self._cut(size)
            self.window -= size
            core.window -= size
            self.queued -= size
            sent += size
        self.moved += sent
        core.out_bytes += sent
        if sent and not self._queue:
            if self._end is not None:
                self._finish()
            elif resume and core.writable:
                _tell(self.call.resume)
        return sent

    def _cut(self, size: int) -> None:
        queue, out = self._queue, self._core.out
        while size:
            part = queue[0]
            if len(part) <= size:
                out.append(part)
                size -= len(part)
                queue.popleft()
            else:
                view = memoryview(part)
                out.append(view[:size])
                queue[0] = view[size:]
                size = 0

    # ------------------------------------------------------------------------------------ the end

    def cancel(self) -> None:
        """The caller is gone, or takes the call back."""
        call, self.call = self.call, _nobody
        if not self.over:
            self.close()
        _tell(call.cancelled)

    def close(self) -> None:
        self.over = True
        self._queue.clear()
        self.queued = 0
        self._buffer = self._waiting = None
        self._let_go(self._held)
        self._core.forget(self)
