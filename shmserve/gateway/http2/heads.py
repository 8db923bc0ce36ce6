"""Header blocks of gRPC over HTTP/2, in both directions. Invariant: a decoded block is cached only while the HPACK
table that it refers to does not change.

Decoded blocks are cached because clients repeat them: after the first calls of a connection, the header block of a call
is a few bytes that do not change the HPACK table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

from hpack.exceptions import HPACKError
from hpack.hpack import Decoder
from hpack.table import HeaderTable
from msgspec import Struct

from shmserve.gateway.http2.limits import CONTINUATIONS
from shmserve.gateway.limits.bounded_cache import BoundedCache
from shmserve.http2.frames import END_HEADERS, END_STREAM, PADDED, WITH_PRIORITY, ErrorCode, Http2Error, frame, reset
from shmserve.http2.frames import HEADERS as HEADERS_FRAME

HEAD_BYTES = 32 * 1024
"""Maximum size of one header block, encoded and decoded."""
HEADERS = 128
ENCODINGS = ("gzip", "deflate")
_CACHED_BLOCKS = 64
_CACHED_BYTES = 1024
_TEXT = 2048
"""Maximum number of characters of an error text that are sent."""
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_CONNECTION = {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_PSEUDO_VALUE = re.compile(rb"(?:[^\0\r\n\t ](?:[^\0\r\n]*[^\0\r\n\t ])?)?")
_VALUE = re.compile(rb"[^\0\r\n]*")
"""gRPC permits white space around the values of metadata, unlike RFC 9113; its implementations send and keep it."""
_OF_PROTOCOL = frozenset(
    ("te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding", "grpc-message-type")
)
"""Headers that services do not see."""
_PSEUDO = {b":method", b":scheme", b":path", b":authority"}


class Http2Head(Struct, frozen=True):
    """The headers of one call. Shared by calls with equal blocks."""

    path: str = ""
    metadata: Mapping[str, str] = {}
    timeout: float | None = None
    """In seconds."""
    encoding: str = ""
    """Compression of flagged messages (grpc-encoding); "": none."""
    accepts: str = ""
    """The first of ENCODINGS that the client accepts."""
    length: int | None = None
    """Number of bytes of DATA, according to content-length."""
    status: int = 200
    """HTTP status. If it is not 200, this is not a gRPC request."""
    malformed: str = ""
    """Why the request is malformed HTTP/2, or ""."""
    wrong: str = ""
    """Why the gRPC call is invalid, or ""."""


class _Table(HeaderTable):
    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)


class Http2Heads:
    """Decoder and cache of the header blocks of one connection."""

    def __init__(self) -> None:
        self._decoder = Decoder(HEAD_BYTES)
        self._table = _Table()
        self._decoder.header_table = self._table
        self._cache: BoundedCache[bytes, Http2Head] = BoundedCache(_CACHED_BLOCKS)
        self.fields = 0
        """Fields decoded in the last block; 0 if the block was cached."""
        self.bytes = 0
        """Their size."""

    def head(self, block: bytes) -> Http2Head:
        """Decodes the block of a new call. Http2Error: neither this block nor a later one can be decoded."""
        head = self._cache.get(block)
        if head is not None:
            self.fields = self.bytes = 0
            return head
        fields, table_changed = self._read(block)
        head = _head(fields)
        if not table_changed and len(block) <= _CACHED_BYTES:
            self._cache.put(block, head)
        return head

    def trailers(self, block: bytes) -> str:
        """Decodes trailers, even of a closed stream, since they change the HPACK table. Returns why they are malformed,
        or ""."""
        for name, value in self._read(block)[0]:
            wrong = "pseudo-header in trailers" if name.startswith(b":") else _wrong_field(name, value)
            if wrong:
                return wrong
        return ""

    def _read(self, block: bytes) -> tuple[list[tuple[bytes, bytes]], bool]:
        """The fields, and whether the block changes the HPACK table, which empties the cache."""
        _check_sizes(block)
        if len(block) > HEADERS:
            _check_count(block)
        changes = self._table.changes
        try:
            fields = [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except (HPACKError, IndexError, ValueError) as error:
            raise Http2Error(
                ErrorCode.COMPRESSION_ERROR, f"the headers of the call cannot be decoded: {error}"
            ) from None
        self.fields = len(fields)
        self.bytes = sum([len(name) + len(value) for name, value in fields])
        table_changed = self._table.changes != changes or (bool(block) and block[0] & 0xE0 == 0x20)
        if table_changed:
            self._cache.clear()
        return fields, table_changed


def _check_count(block: bytes) -> None:
    """Counts the fields without decoding them, which would take ten times as long. Leaves truncation to the decoder."""
    at = count = 0
    with suppress(IndexError):
        while at < len(block):
            first = block[at]
            if first & 0x80:
                _, at = _integer(block, at, 0x7F)
            elif first & 0xE0 == 0x20:
                _, at = _integer(block, at, 0x1F)
                continue
            else:
                named, at = _integer(block, at, 0x3F if first & 0x40 else 0x0F)
                for _ in range(1 if named else 2):
                    size, at = _integer(block, at, 0x7F)
                    at += size
            count += 1
            if count > HEADERS:
                raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"the call has more than {HEADERS} headers")


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """An integer (RFC 7541 5.1) and the offset of its end. IndexError: it is truncated or over 2^35."""
    value = block[at] & mask
    at += 1
    if value == mask:
        for shift in range(0, 35, 7):
            byte = block[at]
            at += 1
            value += (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
        raise IndexError
    return value, at


def _check_sizes(block: bytes) -> None:
    """A block may begin with two table size updates. Thousands of them would take long to decode and have no effect."""
    at = count = 0
    while at < len(block) and block[at] & 0xE0 == 0x20:
        count += 1
        if count > 2:
            raise Http2Error(
                ErrorCode.COMPRESSION_ERROR, "the header block begins with more than two table size updates"
            )
        if block[at] & 0x1F == 0x1F:
            at += 1
            while at < len(block) and block[at] & 0x80:
                at += 1
        at += 1


def _head(pairs: list[tuple[bytes, bytes]]) -> Http2Head:
    pseudo: dict[bytes, bytes] = {}
    fields: dict[str, str] = {}
    for name, value in pairs:
        if name.startswith(b":"):
            if name in pseudo or fields or name not in _PSEUDO:
                return Http2Head(malformed="misplaced pseudo-header")
            if not _PSEUDO_VALUE.fullmatch(value):
                return Http2Head(malformed="invalid value of a pseudo-header")
            pseudo[name] = value
        elif wrong := _wrong_field(name, value):
            return Http2Head(malformed=wrong)
        else:
            key, text = name.decode("latin-1"), value.decode("latin-1")
            fields[key] = f"{fields[key]},{text}" if key in fields else text
    if (
        not pseudo.get(b":method")
        or not pseudo.get(b":scheme")
        or not pseudo.get(b":path", b"").startswith((b"/", b"*"))
    ):
        return Http2Head(malformed="missing method, scheme or path")
    length, digits = None, fields.pop("content-length", None)
    if digits is not None:
        if not digits.isascii() or not digits.isdecimal() or len(digits) > 18:
            return Http2Head(malformed="content-length is not a number")
        length = int(digits)
    if pseudo[b":method"] != b"POST":
        return Http2Head(status=405)
    kind = fields.get("content-type", "")
    if kind != "application/grpc" and not kind.startswith(("application/grpc+", "application/grpc;")):
        return Http2Head(status=415)
    return _call(pseudo[b":path"].decode("latin-1"), fields, length)


def _wrong_field(name: bytes, value: bytes) -> str:
    """Why the field makes its message malformed (RFC 9113, 8.2, except for white space in `_VALUE`), or ""."""
    if not _NAME.fullmatch(name):
        return "invalid header name"
    if not _VALUE.fullmatch(value):
        return "invalid header value"
    if name in _CONNECTION or (name == b"te" and value != b"trailers"):
        return "connection-specific header, which HTTP/2 does not allow"
    return ""


def _call(path: str, fields: dict[str, str], length: int | None) -> Http2Head:
    timeout, error = None, ""
    timeout_text = fields.get("grpc-timeout")
    if timeout_text is not None:
        digits, unit = timeout_text[:-1], timeout_text[-1:]
        if unit in _UNITS and digits.isascii() and digits.isdecimal() and len(digits) <= 8:
            timeout = int(digits) * _UNITS[unit]
        else:
            error = f"invalid grpc-timeout {timeout_text[:20]!r}"
    encoding = fields.get("grpc-encoding", "identity")
    accepted = [name.strip() for name in fields.get("grpc-accept-encoding", "").split(",")]
    accepts = next((name for name in ENCODINGS if name in accepted), "")
    metadata = {name: text for name, text in fields.items() if name not in _OF_PROTOCOL}
    return Http2Head(path, metadata, timeout, "" if encoding == "identity" else encoding, accepts, length, wrong=error)


class HeaderBlock:
    """A header block in more than one frame."""

    def __init__(self, number: int, flags: int, payload: bytes) -> None:
        self.number = number
        self.flags = flags
        self.parts = [payload]
        self._size = len(payload)

    def add(self, payload: bytes) -> None:
        self.parts.append(payload)
        self._size += len(payload)
        if len(self.parts) > CONTINUATIONS or self._size > HEAD_BYTES:
            text = f"the headers of the call exceed {HEAD_BYTES} bytes or {CONTINUATIONS} frames"
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, text)


def unpadded(flags: int, payload: bytes) -> bytes:
    """The payload of HEADERS without padding and priority."""
    start = padding = 0
    if flags & PADDED:
        start, padding = 1, payload[0] if payload else 1
    if flags & WITH_PRIORITY:
        start += 5
    if start + padding > len(payload):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "padding exceeds the frame")
    return payload[start : len(payload) - padding]


# ---------------------------------------------------------------------------------------- encoding


def _literal(name: bytes, value: bytes) -> bytes:
    """A literal without indexing: the encoder's table stays empty."""
    return b"\x00" + _sized(name) + _sized(value)


def _sized(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes([size]) + text
    size -= 127
    encoded = bytearray([127])
    while size >= 128:
        encoded.append(size & 0x7F | 0x80)
        size >>= 7
    encoded.append(size)
    return bytes(encoded) + text


ANSWER = b"\x88\x0f\x10\x10application/grpc"
""":status 200 and content-type, both by their index in the static table."""
TRAILERS_OK = _literal(b"grpc-status", b"0")
_KEPT = frozenset(range(0x20, 0x7F)) - {0x25}


def answer(encoding: str) -> bytes:
    return ANSWER + (_literal(b"grpc-encoding", encoding.encode()) if encoding else b"")


def trailers(code: int, text: str) -> bytes:
    if not code and not text:
        return TRAILERS_OK
    encoded = _literal(b"grpc-status", str(int(code)).encode())
    return encoded + _literal(b"grpc-message", percent(text)) if text else encoded


ACCEPTED = _literal(b"grpc-accept-encoding", b"identity,deflate,gzip")


def refused(number: int, status: int, ended: bool) -> bytes:
    """The frames that refuse a request that is not gRPC. `ended`: the client has ended the stream."""
    block = b"\x08\x03%d" % status  # :status, by its name in the static table
    encoded = frame(HEADERS_FRAME, END_HEADERS | END_STREAM, number, block)
    return encoded if ended else encoded + reset(number, ErrorCode.NO_ERROR)


def percent(text: str) -> bytes:
    """Encodes grpc-message: % and everything that is not printable ASCII becomes %XX."""
    data = text[:_TEXT].encode("utf-8", "replace")
    if all(byte in _KEPT for byte in data):
        return data
    return "".join([chr(byte) if byte in _KEPT else f"%{byte:02X}" for byte in data]).encode()
