"""The sending half of a call over HTTP/2: it compresses responses, cuts them into frames, and queues them under flow
control."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct

from shmserve.errors import Unavailable
from shmserve.gateway.http2 import heads, limits
from shmserve.gateway.http2.host import Http2Host
from shmserve.gateway.http2.interface import Awaits, ServiceCall
from shmserve.gateway.http2.messages import COMPRESSED_BYTES, deflate_message
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.turns import Job
from shmserve.gateway.upstream.receive import Room
from shmserve.http2 import frames
from shmserve.protocol.grpc.codes import Code, RpcError

log = logging.getLogger("shmserve.gateway")

_ANSWER = Struct(f">HBBBI{len(heads.ANSWER)}sHBBBIBI")
"""The response headers, and the DATA header and prefix of the first message."""
_DATA = Struct(">HBBBIBI")
_LAST = Struct(f">HBBBI{len(heads.TRAILERS_OK)}s")
_ANSWER_SIZE, _LAST_SIZE = len(heads.ANSWER), len(heads.TRAILERS_OK)


class _NoCall:
    """Stands in for the call of a stream before it starts and after it ends."""

    awaits = Awaits.NOTHING

    def message(self, data: Buffer) -> None: ...
    def room(self, size: int, first: Buffer) -> Room | None: ...
    def half_closed(self) -> None: ...
    def cancelled(self) -> None: ...
    def resume(self) -> None: ...


NO_CALL = _NoCall()


def notify(service: Callable[[], None]) -> None:
    """Calls a service. Its exceptions are logged and affect no other call."""
    try:
        service()
    except Exception:
        log.exception("a service failed")


class Channel:
    """Output of one connection, and its flow control. `address`: the peer address of its socket. `wake` is called when
    `out` has data for the owner of the socket."""

    def __init__(self, listener: Http2Host, address: str, wake: Callable[[], None]) -> None:
        self.listener = listener
        self.limits = listener.limits
        self.account = listener.budget.account(address)
        self.shares = listener.shares.connect(address)
        self.wake = wake
        self.out: list[Buffer] = []
        self.out_bytes = 0
        """Bytes of responses in `out`."""
        self.accepts = True
        """The socket is writable."""
        self.window = frames.DEFAULT_WINDOW
        """Flow-control window of all streams together."""
        self.frame_bytes = frames.DEFAULT_FRAME

    @property
    def writable(self) -> bool:
        return self.accepts and self.out_bytes < limits.AHEAD_BYTES


class Sending:
    """`stream.Http2Stream` implements the methods that raise NotImplementedError here."""

    __slots__ = (
        "_begun", "_compression", "_core", "_deflating", "_end", "_queue", "_undeflated", "call", "half", "head",
        "moved", "number", "over", "queued", "used", "window",
    )  # fmt: skip

    def __init__(self, core: Channel, number: int, head: heads.Http2Head, window: int) -> None:
        self._core = core
        self.number = number
        self.head = head
        self.window = window
        """Flow-control window of this stream."""
        self.call: ServiceCall = NO_CALL
        self.over = False
        self.half = False
        """The client has half-closed the stream."""
        self.used = core.listener.turn
        """Turn of the slow clock at which the last message was sent or received."""
        self.moved = 0
        self._begun = False
        self._compression = head.accepts if core.limits.compression else ""
        self._deflating: Job | None = None
        self._undeflated: deque[Sequence[Buffer]] = deque()
        """Messages queued behind the one that is being compressed."""
        self._queue: deque[Buffer] = deque()
        self.queued = 0
        self._end: bytes | None = None

    @property
    def writable(self) -> bool:
        return not self._queue and self._deflating is None and self._core.writable

    def send(self, parts: Sequence[Buffer]) -> None:
        if self.over or self._end is not None:
            return
        self.used = self._core.listener.turn
        if self._deflating is None:
            self._send(parts)
        else:
            self._undeflated.append(parts)

    def _send(self, parts: Sequence[Buffer]) -> None:
        size = 0
        for part in parts:
            size += len(part)
        if not self._compression or size < COMPRESSED_BYTES:
            self._send_message(0, size, parts)
            return
        core = self._core
        work = deflate_message(self._compression, core.limits.compression, parts)
        job = core.listener.turns.run(work, self._deflated, lambda error: self.fail_internally())
        if job.running:
            self._headers()
            self._deflating = job

    def _deflated(self, data: bytes) -> None:
        waited, self._deflating = self._deflating is not None, None
        self._send_message(1, len(data), [data])
        while self._undeflated and self._deflating is None:
            self._send(self._undeflated.popleft())
        if waited and not self.over and not self._queue:
            self._sent_all()

    def _send_message(self, flag: int, size: int, parts: Sequence[Buffer]) -> None:
        core, number = self._core, self.number
        whole = size + 5
        out = core.out
        if self._queue or whole > min(self.window, core.window, core.frame_bytes) or not core.writable:
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
        try:
            self._core.account.take(size + 5)
        except Unavailable as error:
            self.fail(RpcError(Code.UNAVAILABLE, str(error)))
            return
        self._headers()
        self._queue.append(bytes([flag]) + size.to_bytes(4, "big"))
        self._queue.extend([part for part in parts if len(part)])
        self.queued += size + 5
        self._push()

    def finish(self, code: int, text: str = "") -> None:
        if self.over or self._end is not None:
            return
        self.call = NO_CALL
        self._core.listener.answered(code)
        if code or text or not self._begun:
            block = heads.trailers(code, text)
            if not self._begun:
                accepted = heads.ACCEPTED if code == Code.UNIMPLEMENTED and self.head.encoding else b""
                block = heads.ANSWER + accepted + block
            self._end = frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, self.number, block)
        else:
            self._end = _LAST.pack(0, _LAST_SIZE, frames.HEADERS, 5, self.number, heads.TRAILERS_OK)
        if not self._queue and self._deflating is None:
            self._finish()

    def go_on(self) -> None:
        """Called when the connection is writable again."""
        if not self._queue:
            notify(self.call.resume)

    def _sent_all(self, resume: bool = True) -> None:
        """Everything compressed so far has been sent."""
        if self._deflating is not None or self._undeflated:
            return
        if self._end is not None:
            self._finish()
        elif resume and self._core.writable:
            notify(self.call.resume)

    def _finish(self) -> None:
        core = self._core
        assert self._end is not None
        core.out.append(self._end)
        core.out_bytes += len(self._end)
        if not self.half:
            core.out.append(frames.reset(self.number, frames.ErrorCode.NO_ERROR))
        self.close()
        core.wake()

    def pump(self, most: int, resume: bool = True) -> int:
        """Sends queued data as far as the windows allow, and returns the number of bytes. `resume`: the service has
        seen that the stream was not writable."""
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
            core.account.give(size)
            sent += size
        self.moved += sent
        core.out_bytes += sent
        if sent and not self._queue:
            self._sent_all(resume)
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

    def _drop_answers(self) -> None:
        self._core.account.give(self.queued)
        self._queue.clear()
        self._undeflated.clear()
        self.queued = 0
        if self._deflating is not None:
            self._deflating.cancel()
            self._deflating = None

    def _push(self) -> None:
        raise NotImplementedError

    def fail(self, error: RpcError) -> None:
        raise NotImplementedError

    def fail_internally(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
