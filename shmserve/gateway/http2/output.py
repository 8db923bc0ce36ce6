"""The output of an HTTP/2 connection: responses are compressed, cut into frames, and queued under flow control."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Protocol

from shmserve.errors import Unavailable
from shmserve.gateway import gzip_stream
from shmserve.gateway.http2 import heads, limits
from shmserve.gateway.http2.interface import Http2Host
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.body_budget import BudgetAccount
from shmserve.gateway.limits.turns import SLICE_BYTES, SlicedJob
from shmserve.http2 import frames
from shmserve.protocol.grpc.codes import Code, RpcError

_ANSWER = Struct(f">HBBBI{len(heads.ANSWER)}sHBBBIBI")
"""The response headers, and the DATA header and prefix of the first message."""
_DATA = Struct(">HBBBIBI")
_LAST = Struct(f">HBBBI{len(heads.TRAILERS_OK)}s")
_ANSWER_SIZE, _LAST_SIZE = len(heads.ANSWER), len(heads.TRAILERS_OK)
_LAST_FLAGS = frames.END_HEADERS | frames.END_STREAM
COMPRESSED_BYTES = 1024
"""Messages below this size are not compressed."""


class Http2Output:
    """The output of one connection, and its flow control. `wake` is called when `out` has data for the owner of the
    socket."""

    def __init__(self, listener: Http2Host, wake: Callable[[], None]) -> None:
        self.listener = listener
        self.wake = wake
        self.out: list[Buffer] = []
        self.bytes = 0
        """Bytes of responses in `out`."""
        self.accepts = True
        """The socket is writable."""
        self.window = frames.DEFAULT_WINDOW
        """Flow-control window of all streams together."""
        self.frame_bytes = frames.DEFAULT_FRAME
        self.compression = listener.limits.compression
        """The level; 0: none."""
        self.unsent: dict[Sender, None] = {}
        """Streams with queued output."""

    @property
    def writable(self) -> bool:
        return self.accepts and self.bytes < limits.AHEAD_BYTES

    def pause(self) -> None:
        """The socket is full."""
        self.accepts = False

    def resume(self) -> None:
        """The socket is writable again."""
        self.accepts = True
        self.pump()

    def write(self, *control: bytes) -> None:
        self.out += control
        self.wake()

    def push(self, sender: Sender) -> None:
        """Queues the stream, and sends as much as the windows allow."""
        self.unsent[sender] = None
        while self.writable and sender.pump(resume=False):
            pass
        if not sender.queued:
            self.unsent.pop(sender, None)
        self.wake()

    def pump(self) -> None:
        """Sends queued data of the streams, round robin."""
        moved = True
        while moved and self.window > 0 and self.unsent:
            moved = False
            for sender in list(self.unsent):
                if not self.writable:
                    return
                if not sender.queued:
                    self.unsent.pop(sender, None)
                elif sender.pump():
                    moved = True
                    self.wake()


class Responding(Protocol):
    """The call whose responses a Sender sends."""

    @property
    def over(self) -> bool: ...

    def stall(self) -> None:
        """Progress now depends on the client, which must read the responses."""

    def resume(self) -> None:
        """The stream is writable again."""

    def fail(self, error: RpcError) -> None: ...

    def fail_internally(self) -> None: ...

    def end_sent(self) -> None:
        """The client has the whole response."""


class _Over:
    """Stands in for a call that is over."""

    over = True

    def stall(self) -> None: ...
    def resume(self) -> None: ...
    def fail(self, error: RpcError) -> None: ...
    def fail_internally(self) -> None: ...
    def end_sent(self) -> None: ...


_OVER = _Over()


class Sender:
    """The responses of one call. `account` counts those that are queued."""

    __slots__ = (
        "_account",
        "_begun",
        "_call",
        "_compression",
        "_deflating",
        "_end",
        "_head",
        "_number",
        "_output",
        "_queue",
        "_undeflated",
        "_window",
        "ending",
        "moved",
        "queued",
    )

    def __init__(
        self,
        output: Http2Output,
        account: BudgetAccount,
        call: Responding,
        number: int,
        head: heads.Http2Head,
        window: int,
    ) -> None:
        self._output = output
        self._account = account
        self._call = call
        self._number = number
        self._head = head
        self._window = window
        """Flow-control window of this stream."""
        self.moved = 0
        """Bytes sent since `moved` was last reset."""
        self._begun = False
        self._compression = head.accepts if output.compression else ""
        self._deflating: SlicedJob | None = None
        self._undeflated: deque[Sequence[Buffer]] = deque()
        """Messages queued behind the one that is being compressed."""
        self._queue: deque[Buffer] = deque()
        self.queued = 0
        self.ending = False
        """The last response has been queued."""
        self._end = b""

    def widen(self, size: int) -> int:
        """Changes the window. Returns the new one, which may be too large."""
        self._window += size
        return self._window

    @property
    def writable(self) -> bool:
        return not self._queue and self._deflating is None and self._output.writable

    def send(self, parts: Sequence[Buffer]) -> None:
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
        output = self._output
        work = gzip_stream.deflate(self._compression, output.compression, parts, SLICE_BYTES)
        job = output.listener.turns.run(work, self._deflated, lambda error: self._call.fail_internally())
        if job.running:
            self._headers()
            self._deflating = job

    def _deflated(self, data: bytes) -> None:
        waited, self._deflating = self._deflating is not None, None
        self._send_message(1, len(data), [data])
        while self._undeflated and self._deflating is None:
            self._send(self._undeflated.popleft())
        if waited and not self._call.over and not self._queue:
            self._sent_all()

    def _send_message(self, flag: int, size: int, parts: Sequence[Buffer]) -> None:
        output, number = self._output, self._number
        whole = size + 5
        out = output.out
        if self._queue or whole > min(self._window, output.window, output.frame_bytes) or not output.writable:
            self._queue_message(flag, size, parts)
            return
        self._window -= whole
        output.window -= whole
        if self._begun or self._compression:
            self._headers()
            out.append(_DATA.pack(whole >> 8, whole & 0xFF, 0, 0, number, flag, size))
        else:
            self._begun = True
            out.append(
                _ANSWER.pack(
                    0,
                    _ANSWER_SIZE,
                    frames.HEADERS,
                    frames.END_HEADERS,
                    number,
                    heads.ANSWER,
                    whole >> 8,
                    whole & 0xFF,
                    0,
                    0,
                    number,
                    flag,
                    size,
                )
            )
        out.extend(parts)
        output.bytes += whole
        output.wake()

    def _headers(self) -> None:
        if not self._begun:
            self._begun = True
            block = heads.answer(self._compression)
            self._output.out.append(frames.frame(frames.HEADERS, frames.END_HEADERS, self._number, block))

    def _queue_message(self, flag: int, size: int, parts: Sequence[Buffer]) -> None:
        try:
            self._account.take(size + 5)
        except Unavailable as error:
            self._call.fail(RpcError(Code.UNAVAILABLE, str(error)))
            return
        self._headers()
        self._queue.append(bytes([flag]) + size.to_bytes(4, "big"))
        self._queue.extend([part for part in parts if len(part)])
        self.queued += size + 5
        self._call.stall()
        self._output.push(self)

    def finish(self, code: int, text: str = "") -> None:
        self.ending = True
        self._output.listener.answered(code)
        if code or text or not self._begun:
            block = heads.trailers(code, text)
            if not self._begun:
                accepted = heads.ACCEPTED if code == Code.UNIMPLEMENTED and self._head.encoding else b""
                block = heads.ANSWER + accepted + block
            self._end = frames.frame(frames.HEADERS, _LAST_FLAGS, self._number, block)
        else:
            self._end = _LAST.pack(0, _LAST_SIZE, frames.HEADERS, _LAST_FLAGS, self._number, heads.TRAILERS_OK)
        if not self._queue and self._deflating is None:
            self._finish()

    def proceed(self) -> None:
        """Called when the connection is writable again."""
        if not self._queue:
            self._call.resume()

    def _sent_all(self, resume: bool = True) -> None:
        """Everything compressed so far has been sent."""
        if self._deflating is not None or self._undeflated:
            return
        if self.ending:
            self._finish()
        elif resume and self._output.writable:
            self._call.resume()

    def _finish(self) -> None:
        output = self._output
        output.out.append(self._end)
        output.bytes += len(self._end)
        self._call.end_sent()
        output.wake()

    def pump(self, resume: bool = True) -> int:
        """Sends queued data for one turn, as far as the windows allow, and returns the number of bytes. `resume`: the
        service has seen that the stream was not writable."""
        output = self._output
        sent = 0
        while self._queue and sent < limits.QUANTUM:
            size = min(self._window, output.window, output.frame_bytes, self.queued)
            if size <= 0:
                break
            output.out.append(frames.FRAME.pack(size >> 8, size & 0xFF, frames.DATA, 0, self._number))
            self._cut(size)
            self._window -= size
            output.window -= size
            self.queued -= size
            self._account.give(size)
            sent += size
        self.moved += sent
        output.bytes += sent
        if sent and not self._queue:
            self._sent_all(resume)
        return sent

    def _cut(self, size: int) -> None:
        queue, out = self._queue, self._output.out
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

    def close(self) -> None:
        """The call is over. It refers to its sender, and such a cycle would keep its memory alive."""
        self.drop()
        self._call = _OVER

    def drop(self) -> None:
        """Drops what is queued."""
        if self._queue:
            self._account.give(self.queued)
            self._output.unsent.pop(self, None)
            self._queue.clear()
            self.queued = 0
        self._undeflated.clear()
        if self._deflating is not None:
            self._deflating.cancel()
            self._deflating = None
