"""One HTTP/2 connection as gRPC uses it: bytes in, calls of a service and bytes out. It has no socket, and uses the
clock of its host. Invariant: input never raises; a protocol error ends the connection with GOAWAY.

Flow control: a window is replenished when half of it is used, because messages are passed to the service at once. The
window of a paused stream is not replenished.
"""

from __future__ import annotations

from collections.abc import Callable

from shmserve.gateway.http2 import heads, limits
from shmserve.gateway.http2.interface import Http2Host
from shmserve.gateway.http2.life import Life
from shmserve.gateway.http2.stream import HALF_CLOSED_REMOTE, Http2Stream, Http2Streams
from shmserve.gateway.limits.backlog import REQUEST_WORK
from shmserve.http2 import frames
from shmserve.http2.frames import ErrorCode, Http2Error
from shmserve.protocol.grpc.codes import Code, RpcError

_GREETING = frames.settings(
    {
        frames.MAX_FRAME_SIZE: limits.FRAME_BYTES,
        frames.INITIAL_WINDOW_SIZE: limits.STREAM_WINDOW,
        frames.MAX_HEADER_LIST_SIZE: heads.HEAD_BYTES,
    }
)
_PREFACE_SIZE = len(frames.PREFACE)


class Http2:
    """The parser of a connection. The owner of the socket calls `feed` and sends the output of the streams."""

    def __init__(self, listener: Http2Host, address: str, wake: Callable[[], None]) -> None:
        self.streams = Http2Streams(listener, address, wake)
        self.life = Life(self.streams)
        self.output = self.streams.output
        self.output.out += [
            _GREETING,
            frames.settings({frames.MAX_CONCURRENT_STREAMS: listener.limits.streams}),
            frames.window_update(0, limits.CONNECTION_WINDOW - frames.DEFAULT_WINDOW),
        ]
        self._listener = listener
        self._heads = heads.Http2Heads()
        self._block: heads.HeaderBlock | None = None
        """An incomplete header block; the next frame must be its CONTINUATION."""
        self._rest = b""
        self._set = False
        """The client has sent SETTINGS."""
        self._stream: Http2Stream | None = None
        """Stream of the DATA frame being read. `_remaining`: bytes of its body that have not arrived; `_skip`: bytes of
        padding after them, or of an ignored frame; `_ends`: the frame ends the stream."""
        self._remaining = self._skip = 0
        self._ends = False
        self._taken = 0
        self.large = False
        """The last DATA frame was large."""
        self.spent = 0
        """Set by the backlog."""
        self.more = False
        """Frames wait for the next iteration of the loop: call `feed` again."""

    # ------------------------------------------------------------------------------------ received bytes

    def feed(self, data: bytes) -> None:
        if self.streams.over:
            return
        self.life.received = True
        if self._rest:
            data = self._rest + data
            self._rest = b""
        backlog = self._listener.backlog
        self.streams.work.begin(backlog.allowed)
        self.more = False
        try:
            self._parse(data)
        except Http2Error as error:
            self.streams.end(error.reason, str(error))
        backlog.spend(self, self.streams.work.spent)

    @property
    def estimate(self) -> int:
        """The length of the waiting frame, as an estimate of its fields."""
        return int.from_bytes(self._rest[:3], "big")

    def space(self) -> memoryview | None:
        """Memory for the next bytes if they belong to a large message. If so, the caller calls `fill` instead of
        `feed`."""
        if self._remaining < limits.DIRECT_BYTES or self._stream is None or self.streams.over:
            return None
        return self._stream.space(self._remaining)

    def fill(self, size: int) -> None:
        stream = self._stream
        if stream is None:
            return
        self.life.received = True
        self._remaining -= size
        stream.fill(size)
        if not self._remaining:
            self._data_done()

    def _parse(self, data: bytes) -> None:
        at, size = 0, len(data)
        if not self.streams.greeted:
            if data[:_PREFACE_SIZE] != frames.PREFACE[:size]:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "this is a gRPC port, but the client does not use HTTP/2")
            if size < _PREFACE_SIZE:
                self._rest = data
                return
            self.streams.greeted, at = True, _PREFACE_SIZE
        streams, work, unpack = self.streams, self.streams.work, frames.FRAME.unpack_from
        while at < size:
            if self._remaining or self._skip:
                at = self._go_on(data, at, size)
                continue
            if size - at < 9:
                break
            if work.left <= 0:
                self.more = True
                break
            work.spend(1)
            high, low, kind, flags, number = unpack(data, at)
            length = high << 8 | low
            number &= frames.LARGEST_STREAM
            start = at + 9
            end = start + length
            if not self._set or self._block is not None or length > limits.FRAME_BYTES:
                self._check(kind, number, length)
            if kind == frames.DATA:
                if flags & frames.PADDED and start >= size and length:
                    break
                at = self._data(number, flags, data, start, length, size)
            elif end <= size:
                self._frame(kind, flags, number, data[start:end])
                at = end
            elif kind > frames.CONTINUATION:
                streams.abuse.idle()
                self._skip, at = length, start
            elif length > heads.HEAD_BYTES:
                raise Http2Error(
                    ErrorCode.ENHANCE_YOUR_CALM,
                    f"frame of {length} bytes; the limit for frames other than DATA is {heads.HEAD_BYTES}",
                )
            else:
                break
        self._rest = data[at:]

    def _check(self, kind: int, number: int, length: int) -> None:
        if length > limits.FRAME_BYTES:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} bytes; the limit is {limits.FRAME_BYTES}")
        if not self._set and kind != frames.SETTINGS:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if self._block is not None and (kind != frames.CONTINUATION or number != self._block.number):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "another frame inside a header block")

    # ------------------------------------------------------------------------------------ DATA

    def _data(self, number: int, flags: int, data: bytes, start: int, length: int, size: int) -> int:
        """Starts a DATA frame, and processes it if its body is complete. Returns where to continue in `data`."""
        self._taken += length
        if self._taken > limits.CONNECTION_WINDOW // 2:
            self.streams.grant_bytes(0, self._taken)
            self._taken = 0
        padding = 0
        body = length
        if flags & frames.PADDED:
            if not length or data[start] >= length:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "padding exceeds the frame")
            padding = data[start]
            start += 1
            body = length - 1 - padding
        stream = self.streams.open.get(number)
        if stream is None or stream.state is HALF_CLOSED_REMOTE:
            self._closed_data(number, stream, bool(flags & frames.END_STREAM))
            self._remaining, self._skip = 0, body + padding
            return start
        stream.taken += length
        if stream.taken > limits.STREAM_WINDOW // 2:
            self._replenish(stream)
        if not body and not flags & frames.END_STREAM:
            self.streams.abuse.idle()
        if stream.head.length is not None and not self.streams.fits(stream, body, bool(flags & frames.END_STREAM)):
            self._remaining, self._skip = 0, body + padding
            return start
        end = start + body
        self.large = body >= limits.LARGE_FRAME
        if end <= size:
            self._skip = padding
            stream.receive(data, start, end)
            if flags & frames.END_STREAM:
                stream.end_received()
            return end
        self._stream, self._remaining, self._skip = stream, body, padding
        self._ends = bool(flags & frames.END_STREAM)
        return start

    def _closed_data(self, number: int, stream: Http2Stream | None, ended: bool) -> None:
        if not number & 1 or number > self.streams.last:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "DATA on an idle stream")
        if stream is not None:
            self.streams.reset(stream, ErrorCode.STREAM_CLOSED)
        elif self.streams.closed.ignores(number, ended):
            self.streams.abuse.idle()
        else:
            self.streams.refuse(number, ErrorCode.STREAM_CLOSED)

    def _go_on(self, data: bytes, at: int, size: int) -> int:
        if not self._remaining:
            count = min(self._skip, size - at)
            self._skip -= count
            return at + count
        count = min(self._remaining, size - at)
        self._remaining -= count
        stream = self._stream
        assert stream is not None
        stream.receive(data, at, at + count)
        if not self._remaining:
            self._data_done()
        return at + count

    def _data_done(self) -> None:
        stream, self._stream = self._stream, None
        if self._ends and stream is not None:
            stream.end_received()

    def _replenish(self, stream: Http2Stream) -> None:
        if not stream.paused:
            self.streams.grant(stream)
        elif stream.taken > limits.STREAM_WINDOW:
            self.streams.reset(stream, ErrorCode.FLOW_CONTROL_ERROR)

    # ------------------------------------------------------------------------------------ header blocks

    def _headers(self, number: int, flags: int, payload: bytes) -> None:
        if flags & (frames.PADDED | frames.WITH_PRIORITY):
            payload = heads.unpadded(flags, payload)
        if not number & 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream id that clients may not use")
        if len(payload) > heads.HEAD_BYTES:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"the headers of the call exceed {heads.HEAD_BYTES} bytes")
        if flags & frames.END_HEADERS:
            self._block_done(number, flags, payload)
        else:
            self._block = heads.HeaderBlock(number, flags, payload)

    def _continuation(self, flags: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        block.add(payload)
        if flags & frames.END_HEADERS:
            self._block = None
            self._block_done(block.number, block.flags, b"".join(block.parts))

    def _block_done(self, number: int, flags: int, block: bytes) -> None:
        streams, ended = self.streams, bool(flags & frames.END_STREAM)
        if number > streams.last:
            streams.last = number
            head = self._heads.head(block)
            self._count_fields()
            self._open(number, head, ended)
            return
        malformed = self._heads.trailers(block)
        self._count_fields()
        stream = streams.open.get(number)
        if stream is None:
            self._closed_headers(number, ended)
        elif stream.state is HALF_CLOSED_REMOTE:
            streams.reset(stream, ErrorCode.STREAM_CLOSED)
        elif not ended or malformed:
            streams.reset(stream, ErrorCode.PROTOCOL_ERROR, ended)
        elif stream.head.length is None or streams.fits(stream, 0, True):
            stream.end_received()

    def _count_fields(self) -> None:
        streams, fields = self.streams, self._heads.fields
        streams.work.spend(limits.FIELD_WORK * fields)
        if fields > limits.FIELDS:
            streams.abuse.idle(fields - limits.FIELDS)

    def _closed_headers(self, number: int, ended: bool) -> None:
        streams = self.streams
        if streams.closed.ignores(number, ended):
            streams.abuse.idle()
        elif number in streams.closed:
            raise Http2Error(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")
        else:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "HEADERS of a new stream with an id below the last one")

    def _open(self, number: int, head: heads.Http2Head, ended: bool) -> None:
        streams = self.streams
        if number > self.life.last:
            streams.closed.add(number, ended)
            return
        streams.work.spend(REQUEST_WORK)
        if len(streams.open) >= self._listener.limits.streams:
            streams.closed.add(number, ended)
            streams.abuse.idle()
            streams.output.write(frames.reset(number, ErrorCode.REFUSED_STREAM))
            return
        if head.malformed or (ended and head.length):
            streams.closed.add(number, ended)
            streams.refuse(number, ErrorCode.PROTOCOL_ERROR)
            return
        if head.status != 200:
            streams.closed.add(number, ended)
            streams.abuse.mistake()
            streams.output.write(heads.refused(number, head.status, ended))
            return
        expires = None if head.timeout is None else self._listener.now() + head.timeout
        stream = streams.open[number] = Http2Stream(streams, number, head, expires)
        if expires is not None:
            self._listener.expire(stream)
        if self._heads.bytes > limits.SMALL_HEAD and not stream.hold(self._heads.bytes):
            return
        try:
            if head.wrong:
                raise RpcError(Code.INTERNAL, head.wrong)
            if head.encoding and head.encoding not in heads.ENCODINGS:
                raise RpcError(Code.UNIMPLEMENTED, f"Compression algorithm '{head.encoding[:40]}' is not supported")
            stream.serve(self._listener.application(stream))
        except RpcError as error:
            if ended:
                stream.stop_receiving()
            stream.fail(error)
            streams.abuse.mistake()
            return
        except Exception:
            stream.fail_internally()
            return
        if ended:
            stream.end_received()

    # ------------------------------------------------------------------------------------ other frames

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == frames.HEADERS:
            self._headers(number, flags, payload)
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
            self._continuation(flags, payload)
        elif kind == frames.PUSH_PROMISE:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:
            if (kind == frames.GOAWAY) == bool(number) and kind <= frames.CONTINUATION:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "frame on the wrong stream")
            if kind == frames.GOAWAY and len(payload) < frames.GOAWAY_LENGTH:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "wrong frame length")
            self.streams.abuse.idle()

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream other than 0")
        if flags & frames.ACK and not self._set:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the first frame acknowledges SETTINGS")
        if len(payload) % 6 or (flags & frames.ACK and payload) or len(payload) > limits.SETTINGS_BYTES:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "wrong length of SETTINGS")
        self._set = True
        if flags & frames.ACK:
            self.streams.abuse.idle()
            return
        self.streams.abuse.idle(limits.SETTINGS_WEIGHT)
        values = frames.settings_of(payload)
        self.output.frame_bytes = values.get(frames.MAX_FRAME_SIZE, self.output.frame_bytes)
        if frames.INITIAL_WINDOW_SIZE in values:
            self._initial_window(values[frames.INITIAL_WINDOW_SIZE])
        self._reply(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self._pump()

    def _initial_window(self, value: int) -> None:
        streams = self.streams
        change = value - streams.initial_window
        streams.initial_window = value
        streams.work.spend(len(streams.open) // limits.STREAMS_WORK)
        for stream in streams.open.values():
            if stream.widen(change) > frames.LARGEST_WINDOW:
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "window size above 2^31 - 1")

    def _reply(self, data: bytes) -> None:
        if not self.output.accepts:
            self.streams.abuse.unsent_reply()
        self.output.write(data)

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PING on a stream other than 0")
        if flags & frames.ACK:
            self.life.acknowledged(payload)
            return
        self.streams.abuse.idle()
        self._reply(frames.frame(frames.PING, frames.ACK, 0, payload))
        self.life.ping_received()

    def _rst_stream(self, number: int, payload: bytes) -> None:
        if not number & 1 or number > self.streams.last:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on an idle stream")
        stream = self.streams.open.get(number)
        if stream is None:
            self.streams.closed.ignores(number, True)
            self.streams.abuse.idle()
            return
        early = stream.expires is None or self._listener.now() < stream.expires - limits.EARLY_S
        stream.cancel()
        if early:
            self.streams.abuse.reset()

    def _window_update(self, number: int, payload: bytes) -> None:
        size = frames.number(payload) & frames.LARGEST_WINDOW
        if not number:
            if not size:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            self.output.window += size
            if self.output.window > frames.LARGEST_WINDOW:
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "window size above 2^31 - 1")
            self._pump()
            return
        stream = self.streams.open.get(number)
        if stream is None:
            if not number & 1 or number > self.streams.last:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")
            return
        if stream.widen(size) > frames.LARGEST_WINDOW or not size:
            self.streams.reset(stream, ErrorCode.FLOW_CONTROL_ERROR if size else ErrorCode.PROTOCOL_ERROR)
        elif stream.unsent:
            if size < limits.SMALL_UPDATE:
                self.streams.abuse.idle()
            self._pump()

    def _pump(self) -> None:
        unsent = self.output.unsent
        if unsent:
            self.streams.work.spend(len(unsent) // limits.STREAMS_WORK)
            self.output.pump()

    # ------------------------------------------------------------------------------------ shutdown

    @property
    def done(self) -> bool:
        """All calls have ended, and no more are accepted."""
        return self.streams.over or (self.life.ending and not self.streams.open)
