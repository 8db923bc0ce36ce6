"""HTTP/2 frames and gRPC messages as bytes, encoded without the code under test."""

from __future__ import annotations

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEAD, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
PROTOCOL, FLOW, CLOSED, SIZE, REFUSED, COMPRESSION, CALM = 1, 3, 5, 6, 7, 9, 11
END, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x4, 0x8, 0x20
HEADERS = [
    (":method", "POST"), (":scheme", "http"), (":path", "/test.Echo/Unary"), (":authority", "here"),
    ("content-type", "application/grpc"), ("te", "trailers"),
]  # fmt: skip


def number(value: int) -> bytes:
    return value.to_bytes(4, "big")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + number(stream) + payload


def block(*more: tuple[str, str]) -> bytes:
    """The header block of a call, with Huffman codes and references to the tables."""
    encoded: bytes = hpack.Encoder().encode([*HEADERS, *more])
    return encoded


def message(data: bytes, flag: int = 0) -> bytes:
    return bytes([flag]) + number(len(data)) + data


def unary(stream: int, data: bytes) -> bytes:
    """A complete unary call."""
    return frame(HEAD, END_HEADERS, stream, block()) + frame(DATA, END, stream, message(data))


HELLO = PREFACE + frame(SETTINGS, 0, 0)
OPEN = frame(HEAD, END_HEADERS, 1, block())
"""Opens stream 1."""
