"""A gRPC connection with one call at a time: HTTP/2 as far as a load generator needs it.

grpcio takes 130 us of processor time per call, this a tenth: header blocks are encoded once, and those of responses are
decoded once, because the server is told to use no dynamic table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote

import hpack

from shmserve.errors import (
    ConnectionLost,
    DeadlineExceeded,
    Denied,
    InvalidRequest,
    ModelFailed,
    NotFound,
    ServeError,
    Unavailable,
    Unsupported,
)
from shmserve.http2 import frames
from shmserve.http2.frames import ErrorCode
from shmserve.protocol.grpc.codes import Code
from shmserve.tools.load.targets.connecting import FOREIGN, LOST, close

CODES: dict[Code, type[ServeError]] = {
    Code.INVALID_ARGUMENT: InvalidRequest,
    Code.NOT_FOUND: NotFound,
    Code.UNAVAILABLE: Unavailable,
    Code.UNIMPLEMENTED: Unsupported,
    Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    Code.PERMISSION_DENIED: Denied,
    Code.UNAUTHENTICATED: Denied,
}
WINDOW = frames.LARGEST_WINDOW
REPLENISH = 1 << 30
"""The window of the connection is replenished after this many bytes."""
PREFIX = 5
"""Bytes before a message: whether it is compressed, and its length."""
_SETTINGS = {frames.HEADER_TABLE_SIZE: 0, frames.ENABLE_PUSH: 0, frames.INITIAL_WINDOW_SIZE: WINDOW}
_KNOWN = 1000
"""Number of distinct header blocks that are cached."""
OnMessage = Callable[[bytes], None]


def head_block(scheme: str, authority: str, path: str, headers: Sequence[tuple[str, str]]) -> bytes:
    """The header block of a call, of literals only."""
    fields = [(":method", "POST"), (":scheme", scheme), (":path", path), (":authority", authority)]
    fields += [("te", "trailers"), ("content-type", "application/grpc"), *headers]
    return b"".join(b"\0" + _text(name.lower()) + _text(value) for name, value in fields)


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    length, result = len(data) - 127, bytearray([127])
    while length >= 128:
        result.append(128 | length & 127)
        length >>= 7
    return bytes([*result, length]) + data


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


class GrpcConnection(asyncio.Protocol):
    """`call` starts a call; `end` ends its requests; the future of `call` is done after the last response."""

    def __init__(self) -> None:
        self.closed = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the server's settings are known; to be awaited before the first call."""
        self._transport: Any = None
        self._data = bytearray()
        self._stream = -1
        self._window, self._initial = frames.DEFAULT_WINDOW, frames.DEFAULT_WINDOW
        self._stream_window = 0
        self._frame = frames.DEFAULT_FRAME
        self._unsent = memoryview(b"")
        self._ends = False
        self._received = 0
        self._message = bytearray()
        self._block = b""
        self._block_flags = 0
        self._answer: asyncio.Future[None] | None = None
        self._on_message: OnMessage = lambda message: None
        self._decoder = hpack.Decoder()
        self._known: dict[bytes, dict[str, str]] = {}

    def call(self, head: bytes, messages: bytes, on_message: OnMessage, end: bool = True) -> asyncio.Future[None]:
        """`messages`: framed. Without `end`, the call stays open for requests until `end`."""
        self._answer = answer = asyncio.get_running_loop().create_future()
        if self.closed:
            answer.set_exception(ConnectionLost("the server closed the connection"))
            return answer
        self._on_message = on_message
        self._message.clear()
        self._stream += 2
        self.closed = self._stream + 2 > frames.LARGEST_STREAM  # for further calls
        number, size = self._stream, len(messages)
        first = frames.frame(frames.HEADERS, frames.END_HEADERS, number, head)
        if size <= self._window and size <= self._initial and size <= self._frame:
            self._window -= size
            self._stream_window = self._initial - size
            flags = frames.END_STREAM if end else 0
            self._transport.write(first + frames.frame(frames.DATA, flags, number, messages))
        else:
            self._transport.write(first)
            self._stream_window = self._initial
            self._unsent, self._ends = memoryview(messages), end
            self._send()
        return answer

    def end(self) -> None:
        """Half-closes the call: no more requests follow."""
        if self._answer is not None:
            self._transport.write(frames.frame(frames.DATA, frames.END_STREAM, self._stream))

    def cancel(self) -> None:
        """Ends the call at once."""
        self._answer = None
        self._unsent = memoryview(b"")
        if not self._transport.is_closing():
            self._transport.write(frames.reset(self._stream, ErrorCode.CANCEL))

    def close(self) -> None:
        self.closed = True
        close(self._transport)

    def _send(self) -> None:
        """Sends as much as the windows allow."""
        while self._unsent:
            size = min(len(self._unsent), self._window, self._stream_window, self._frame)
            if size <= 0:
                return
            part, self._unsent = self._unsent[:size], self._unsent[size:]
            self._window -= size
            self._stream_window -= size
            flags = frames.END_STREAM if self._ends and not self._unsent else 0
            self._transport.write(frames.frame(frames.DATA, flags, self._stream, bytes(part)))

    # ------------------------------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.write(
            frames.PREFACE + frames.settings(_SETTINGS) + frames.window_update(0, WINDOW - frames.DEFAULT_WINDOW)
        )

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        lost = ConnectionLost(f"{LOST}: {error or 'closed by the server'}")
        if not self.ready.done():
            self.ready.set_exception(lost)
        self._fail(lost)

    def data_received(self, data: bytes) -> None:
        self._data += data
        buffer, at, size = self._data, 0, len(self._data)
        try:
            while size - at >= frames.FRAME.size:
                high, low, kind, flags, stream = frames.FRAME.unpack_from(buffer, at)
                end = at + frames.FRAME.size + (high << 8 | low)
                if end > size:
                    break
                self._frame_received(kind, flags, stream, bytes(buffer[at + frames.FRAME.size : end]))
                at = end
        except (frames.Http2Error, hpack.HPACKError) as error:
            self._fail(ConnectionLost(f"{FOREIGN} HTTP/2: {error}"))
            self.close()
        del buffer[:at]

    # ------------------------------------------------------------------------------------ frames

    def _frame_received(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == frames.DATA:
            self._data_frame(flags, stream, payload)
        elif kind == frames.HEADERS:
            payload = _unpadded(flags, payload)
            self._block = payload[5:] if flags & frames.WITH_PRIORITY else payload
            self._block_flags = flags
            if flags & frames.END_HEADERS:
                self._headers(stream)
        elif kind == frames.CONTINUATION:
            self._block += payload
            if flags & frames.END_HEADERS:
                self._headers(stream)
        elif kind == frames.WINDOW_UPDATE:
            if stream == 0:
                self._window += frames.number(payload)
            elif stream == self._stream:
                self._stream_window += frames.number(payload)
            self._send()
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            values = frames.settings_of(payload)
            initial = values.get(frames.INITIAL_WINDOW_SIZE, self._initial)
            self._stream_window += initial - self._initial
            self._initial = initial
            self._frame = values.get(frames.MAX_FRAME_SIZE, self._frame)
            if not self.ready.done():
                self.ready.set_result(None)
            self._transport.write(frames.frame(frames.SETTINGS, frames.ACK, 0))
            self._send()
        elif kind == frames.PING and not flags & frames.ACK:
            self._transport.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.RST_STREAM and stream == self._stream:
            self._fail(Unavailable(f"the server has reset the call (HTTP/2 error {frames.number(payload)})"))
        elif kind == frames.GOAWAY:
            self.closed = True  # for further calls; this one may still be answered

    def _data_frame(self, flags: int, stream: int, payload: bytes) -> None:
        self._received += len(payload)
        if self._received >= REPLENISH:
            self._transport.write(frames.window_update(0, self._received))
            self._received = 0
        if stream != self._stream or self._answer is None:
            return
        message = self._message
        message += _unpadded(flags, payload)
        while len(message) >= PREFIX:
            end = PREFIX + int.from_bytes(message[1:PREFIX], "big")
            if len(message) < end:
                break
            result = bytes(message[PREFIX:end])
            del message[:end]
            self._on_message(result)
        if flags & frames.END_STREAM:
            self._fail(ConnectionLost("the server ended the call without a status"))

    def _headers(self, stream: int) -> None:
        fields = self._known.get(self._block)
        if fields is None:
            fields = {str(name): str(value) for name, value in self._decoder.decode(self._block)}
            if not self._decoder.header_table.dynamic_entries and len(self._known) < _KNOWN:
                self._known[self._block] = fields
        if not self._block_flags & frames.END_STREAM or stream != self._stream:
            return
        status = fields.get("grpc-status", "")
        if status == "0":
            answer, self._answer = self._answer, None
            if answer is not None and not answer.done():
                answer.set_result(None)
            return
        if not status.isdecimal():
            self._fail(ModelFailed(f"HTTP {fields.get(':status', '')} instead of a gRPC status"))
            return
        code = Code(int(status)) if int(status) <= max(Code) else Code.UNKNOWN
        text = unquote(fields.get("grpc-message", "")) or "no text"
        self._fail(CODES.get(code, ModelFailed)(f"gRPC {code.name}: {text}"))

    def _fail(self, error: ServeError) -> None:
        answer, self._answer = self._answer, None
        self._unsent = memoryview(b"")
        if answer is not None and not answer.done():
            answer.set_exception(error)


def _unpadded(flags: int, payload: bytes) -> bytes:
    return payload[1 : len(payload) - payload[0]] if flags & frames.PADDED else payload
