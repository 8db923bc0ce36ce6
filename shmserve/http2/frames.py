"""Encoders of HTTP/2 frames, and the constants of the protocol. This module keeps no state."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME = 16_384
LARGEST_FRAME = (1 << 24) - 1
LARGEST_WINDOW = (1 << 31) - 1
LARGEST_STREAM = (1 << 31) - 1

GOAWAY_LENGTH = 8
"""Minimum length of GOAWAY; it may be followed by debug data."""
LENGTHS = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
FRAME = Struct(">HBBBI")
"""Length (upper 16 bits, lower 8), type, flags, stream."""
_NUMBER = Struct(">I")
_SETTING = Struct(">HI")
_GOAWAY = Struct(">II")


class ErrorCode(IntEnum):
    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11


class Http2Error(Exception):
    """The client violated the protocol; the connection cannot be used again."""

    def __init__(self, reason: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(*pair) for pair in values.items()]))


def window_update(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(size))


def reset(stream: int, reason: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream, _NUMBER.pack(reason))


def goaway(last: int, reason: ErrorCode, text: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last, reason) + text.encode()[:256])


def number(payload: bytes) -> int:
    """The only field of RST_STREAM and WINDOW_UPDATE."""
    value: int = _NUMBER.unpack_from(payload)[0]
    return value


def settings_of(payload: bytes) -> dict[int, int]:
    """Decodes SETTINGS. The last value of a repeated setting counts."""
    values = dict(_SETTING.iter_unpack(payload))
    for name, value in values.items():
        if name == INITIAL_WINDOW_SIZE and value > LARGEST_WINDOW:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "window size above 2^31 - 1")
        if name == MAX_FRAME_SIZE and not DEFAULT_FRAME <= value <= LARGEST_FRAME:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "invalid SETTINGS_MAX_FRAME_SIZE")
        if name == ENABLE_PUSH and value > 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH is neither 0 nor 1")
    return values
