"""One HTTP/2 connection as gRPC uses it: bytes in, calls of a service and bytes out. It has no socket, and uses the
clock of its host. Invariant: input never raises; a protocol error ends the connection with GOAWAY.

Flow control: a window is replenished when half of it is used, because messages are passed to the service at once. The
window of a paused stream is not replenished.
"""

from __future__ import annotations

from collections.abc import Callable

from shmserve.gateway.http2 import heads
from shmserve.gateway.http2 import limits as most
from shmserve.gateway.http2.blocks import HeaderBlocks
from shmserve.gateway.http2.host import Http2Host
from shmserve.gateway.http2.life import Life
from shmserve.gateway.http2.stream import Http2Stream, Http2Streams
from shmserve.http2 import frames
from shmserve.http2.frames import ErrorCode, Http2Error

_GREETING = frames.settings({
    frames.MAX_FRAME_SIZE: most.FRAME_BYTES,
    frames.INITIAL_WINDOW_SIZE: most.STREAM_WINDOW,
    frames.MAX_HEADER_LIST_SIZE: heads.HEAD_BYTES,
})  # fmt: skip
_PREFACE_SIZE = len(frames.PREFACE)


class Http2(Http2Streams):
    """The parser of a connection. The owner of the socket calls `feed` and sends the contents of `out`."""

    def __init__(self, listener: Http2Host, address: str, wake: Callable[[], None]) -> None:
        super().__init__(listener, address, wake)
        self.out += [_GREETING, frames.settings({frames.MAX_CONCURRENT_STREAMS: listener.limits.streams}),
                     frames.window_update(0, most.CONNECTION_WINDOW - frames.DEFAULT_WINDOW)]  # fmt: skip
        self._rest = b""
        self._set = False
        self._stream: Http2Stream | None = None
        """Stream of the DATA frame being read. `_left`: bytes of its body that have not arrived; `_skip`: bytes of
        padding after them, or of an ignored frame; `_ends`: the frame ends the stream."""
        self._left = self._skip = 0
        self._ends = False
        self._taken = 0
        self.more = False
        """Frames wait for the next iteration of the loop: call `feed` again."""
        self.life = Life(self)
        self._blocks = HeaderBlocks(self, self.life)

    # ------------------------------------------------------------------------------------ received bytes

    def feed(self, data: bytes) -> None:
        if self.over:
            return
        self.life.received = True
        if self._rest:
            data = self._rest + data
            self._rest = b""
        backlog = self.listener.backlog
        self.work = allowed = backlog.allowed
        self.more = False
        try:
            self._parse(data)
        except Http2Error as error:
            self.end(error.reason, str(error))
        backlog.spend(self, allowed - self.work)

    @property
    def estimate(self) -> int:
        """The length of the waiting frame, as an estimate of its fields."""
        return int.from_bytes(self._rest[:3], "big")

    def space(self) -> memoryview | None:
        """Memory for the next bytes if they belong to a large message. If so, the caller calls `fill` instead of
        `feed`."""
        if self._left < most.DIRECT_BYTES or self._stream is None or self.over:
            return None
        return self._stream.space(self._left)

    def fill(self, size: int) -> None:
        stream = self._stream
        if stream is None:
            return
        self.life.received = True
        self._left -= size
        stream.fill(size)
        if not self._left:
            self._data_done()

    def _parse(self, data: bytes) -> None:
        at, size = 0, len(data)
        if not self.greeted:
            if data[:_PREFACE_SIZE] != frames.PREFACE[:size]:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "this is a gRPC port, but the client does not use HTTP/2")
            if size < _PREFACE_SIZE:
                self._rest = data
                return
            self.greeted, at = True, _PREFACE_SIZE
        unpack = frames.FRAME.unpack_from
        while at < size:
            if self._left or self._skip:
                at = self._go_on(data, at, size)
                continue
            if size - at < 9:
                break
            if self.work <= 0:
                self.more = True
                break
            self.work -= 1
            high, low, kind, flags, number = unpack(data, at)
            length = high << 8 | low
            number &= frames.LARGEST_STREAM
            start = at + 9
            end = start + length
            if not self._set or self._blocks.pending is not None or length > most.FRAME_BYTES:
                self._check(kind, number, length)
            if kind == frames.DATA:
                if flags & frames.PADDED and start >= size and length:
                    break
                at = self._data(number, flags, data, start, length, size)
            elif end <= size:
                self._frame(kind, flags, number, data[start:end])
                at = end
            elif kind > frames.CONTINUATION:
                self.abuse.idle()
                self._skip, at = length, start
            elif length > heads.HEAD_BYTES:
                raise Http2Error(
                    ErrorCode.ENHANCE_YOUR_CALM,
                    f"frame of {length} bytes; the limit for frames other than DATA is 32768",
                )
            else:
                break
        self._rest = data[at:]

    def _check(self, kind: int, number: int, length: int) -> None:
        if length > most.FRAME_BYTES:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} bytes; the limit is {most.FRAME_BYTES}")
        if not self._set and kind != frames.SETTINGS:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if self._blocks.pending is not None and (kind != frames.CONTINUATION or number != self._blocks.pending.number):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "another frame inside a header block")

    # ------------------------------------------------------------------------------------ DATA

    def _data(self, number: int, flags: int, data: bytes, start: int, length: int, size: int) -> int:
        """Starts a DATA frame, and processes it if its body is complete. Returns where to continue in `data`."""
        self._taken += length
        if self._taken > most.CONNECTION_WINDOW // 2:
            self.grant_bytes(0, self._taken)
            self._taken = 0
        padding = 0
        body = length
        if flags & frames.PADDED:
            if not length or data[start] >= length:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "padding exceeds the frame")
            padding = data[start]
            start += 1
            body = length - 1 - padding
        stream = self.streams.get(number)
        if stream is None or stream.half:
            self._closed_data(number, stream, bool(flags & frames.END_STREAM))
            self._left, self._skip = 0, body + padding
            return start
        stream.taken += length
        if stream.taken > most.STREAM_WINDOW // 2:
            self._replenish(stream)
        if not body and not flags & frames.END_STREAM:
            self.abuse.idle()
        if stream.head.length is not None and not self.fits(stream, body, bool(flags & frames.END_STREAM)):
            self._left, self._skip = 0, body + padding
            return start
        end = start + body
        self.large = body >= most.LARGE_FRAME
        if end <= size:
            self._skip = padding
            stream.receive(data, start, end)
            if flags & frames.END_STREAM and not stream.over:
                stream.half = True
                stream.ended()
            return end
        self._stream, self._left, self._skip = stream, body, padding
        self._ends = bool(flags & frames.END_STREAM)
        return start

    def _closed_data(self, number: int, stream: Http2Stream | None, ended: bool) -> None:
        if not number & 1 or number > self.last:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "DATA on an idle stream")
        if stream is not None:
            self.reset(stream, ErrorCode.STREAM_CLOSED)
        elif self.closed.ignores(number, ended):
            self.abuse.idle()
        else:
            self.refuse(number, ErrorCode.STREAM_CLOSED)

    def _go_on(self, data: bytes, at: int, size: int) -> int:
        if not self._left:
            count = min(self._skip, size - at)
            self._skip -= count
            return at + count
        count = min(self._left, size - at)
        self._left -= count
        stream = self._stream
        assert stream is not None
        stream.receive(data, at, at + count)
        if not self._left:
            self._data_done()
        return at + count

    def _data_done(self) -> None:
        stream, self._stream = self._stream, None
        if self._ends and stream is not None and not stream.over:
            stream.half = True
            stream.ended()

    def _replenish(self, stream: Http2Stream) -> None:
        if not stream.paused:
            self.grant(stream)
        elif stream.taken > most.STREAM_WINDOW:
            self.reset(stream, ErrorCode.FLOW_CONTROL_ERROR)

    # ------------------------------------------------------------------------------------ other frames

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == frames.HEADERS:
            self._blocks.headers(number, flags, payload)
        elif len(payload) != frames.LENGTHS.get(kind, len(payload)):
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "wrong frame length")
        elif kind == frames.WINDOW_UPDATE:
            self._window_update(number, payload)
        elif kind == frames.PING:
            self._ping(flags, number, payload)
        elif kind == frames.RST_STREAM:
            self._rst_stream(number, payload)
        elif kind == frames.SETTINGS:
            self._settings(flags, number, payload)
        elif kind == frames.CONTINUATION:
            self._blocks.continuation(flags, payload)
        elif kind == frames.PUSH_PROMISE:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:
            if (kind == frames.GOAWAY) == bool(number) and kind <= frames.CONTINUATION:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "frame on the wrong stream")
            if kind == frames.GOAWAY and len(payload) < frames.GOAWAY_LENGTH:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "wrong frame length")
            self.abuse.idle()

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if number or (flags & frames.ACK and not self._set):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream other than 0")
        if len(payload) % 6 or (flags & frames.ACK and payload) or len(payload) > most.SETTINGS_BYTES:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "wrong length of SETTINGS")
        self._set = True
        if flags & frames.ACK:
            self.abuse.idle()
            return
        self.abuse.idle(most.SETTINGS_WEIGHT)
        values = frames.settings_of(payload)
        self.frame_bytes = values.get(frames.MAX_FRAME_SIZE, self.frame_bytes)
        if frames.INITIAL_WINDOW_SIZE in values:
            self._initial_window(values[frames.INITIAL_WINDOW_SIZE])
        self._reply(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self._pump()

    def _initial_window(self, value: int) -> None:
        change = value - self.stream_window
        self.stream_window = value
        self.work -= len(self.streams) // most.STREAMS_WORK
        for stream in self.streams.values():
            stream.window += change
            if stream.window > frames.LARGEST_WINDOW:
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "window size above 2^31 - 1")

    def _reply(self, data: bytes) -> None:
        if not self.accepts:
            self.abuse.unsent_reply()
        self.out.append(data)
        self.wake()

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PING on a stream other than 0")
        if flags & frames.ACK:
            self.life.acknowledged(payload)
            return
        self.abuse.idle()
        self._reply(frames.frame(frames.PING, frames.ACK, 0, payload))
        self.life.ping_received()

    def _rst_stream(self, number: int, payload: bytes) -> None:
        if not number & 1 or number > self.last:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on an idle stream")
        stream = self.streams.get(number)
        if stream is None:
            self.closed.ignores(number, True)
            self.abuse.idle()
            return
        early = stream.expires is None or self.listener.now() < stream.expires - most.EARLY_S
        stream.half = True
        stream.cancel()
        if early:
            self.abuse.reset()

    def _window_update(self, number: int, payload: bytes) -> None:
        size = frames.number(payload) & frames.LARGEST_WINDOW
        if not number:
            if not size:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            self.window += size
            if self.window > frames.LARGEST_WINDOW:
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "window size above 2^31 - 1")
            self._pump()
            return
        stream = self.streams.get(number)
        if stream is None:
            if not number & 1 or number > self.last:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")
            return
        stream.window += size
        if not size or stream.window > frames.LARGEST_WINDOW:
            self.reset(stream, ErrorCode.FLOW_CONTROL_ERROR if size else ErrorCode.PROTOCOL_ERROR)
        elif stream.queued:
            if size < most.SMALL_UPDATE:
                self.abuse.idle()
            self._pump()

    def _pump(self) -> None:
        if self.unsent:
            self.work -= len(self.unsent) // most.STREAMS_WORK
            self.pump()

    # ------------------------------------------------------------------------------------ shutdown

    @property
    def done(self) -> bool:
        """All calls have ended, and no more are accepted."""
        return self.over or (self.life.ending and not self.streams)
