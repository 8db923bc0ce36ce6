"""Chunked and compressed bodies. Invariant: a limit is checked before memory is allocated for what it limits."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.gateway import gzip_stream
from shmserve.gateway.http.heads import Head
from shmserve.gateway.http.limits import CHUNKS, HEAD_BYTES, Limits
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.json_tensors import json_too_large
from shmserve.gateway.limits.turns import SLICE_BYTES, Work

_LINE = 1024
_EITHER = 32 + zlib.MAX_WBITS
"""Detect gzip or zlib from the header of the data."""
_LEVEL = 1
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t -~]*)?")
"""Chunk header: the size, then extensions, which are ignored."""
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~]*")


class Chunks:
    """Parser of a chunked body. `body`: the data received so far. `done`: the last chunk and its trailers have
    arrived."""

    def __init__(self, limit: int) -> None:
        self.body = bytearray()
        self.done = False
        self._limit = limit
        self._count = 0
        self._left = 0
        """Bytes of the current chunk that have not arrived, including its CRLF."""
        self._trailer = 0
        self._ending = False

    def feed(self, data: bytes) -> bytes:
        """Consumes what it can of `data` and returns the rest. Pass the rest again with the data that follows it; once
        `done`, it belongs to the next request. InvalidRequest: the end of the body cannot be found."""
        at = 0
        while not self.done:
            if self._left:
                taken = min(self._left, len(data) - at)
                self._chunk(data[at : at + taken])
                at += taken
                if self._left:
                    break
                continue
            end = data.find(b"\n", at)
            if end < 0:
                if len(data) - at > _LINE:
                    raise InvalidRequest(f"a line of the chunked body exceeds {_LINE} bytes")
                break
            if end == at or data[end - 1] != 0x0D:
                raise InvalidRequest("a line of the chunked body ends with a bare LF; CRLF is required")
            self._line(data[at : end - 1])
            at = end + 1
        return data[at:]

    def _chunk(self, piece: bytes) -> None:
        body = max(0, min(len(piece), self._left - 2))
        self.body += piece[:body]
        tail = piece[body:]
        if tail and tail != b"\r\n"[2 - self._left + body :][: len(tail)]:
            raise InvalidRequest("a chunk of the body does not match its size")
        self._left -= len(piece)

    def _line(self, line: bytes) -> None:
        if self._ending:
            self._skip_trailer(line)
            return
        found = _CHUNK.fullmatch(line)
        if found is None:
            raise InvalidRequest("a chunk of the body does not begin with a valid size")
        size = int(found[1], 16)
        self._count += size > 0
        if self._count > CHUNKS:
            raise InvalidRequest(
                f"Chunked request body exceeds maximum of {CHUNKS} non-empty chunks. Send fewer or larger HTTP chunks."
            )
        if len(self.body) + size > self._limit:
            raise _too_large(len(self.body) + size, self._limit)
        if size:
            self._left = size + 2
        else:
            self._ending = True

    def _skip_trailer(self, line: bytes) -> None:
        self._trailer += len(line) + 2
        if self._trailer > HEAD_BYTES:
            raise InvalidRequest(f"the trailers of the chunked body exceed {HEAD_BYTES} bytes")
        if line and _TRAILER.fullmatch(line) is None:
            raise InvalidRequest("a trailer of the chunked body is not NAME: VALUE in printable ASCII")
        self.done = not line


def too_large(head: Head, limits: Limits) -> InvalidRequest:
    """The error for a body whose Content-Length exceeds the limit for all bodies."""
    action = head.route.action
    if head.encoding or (action == "infer" and head.json_length is not None):
        return _too_large(head.length, limits.input_bytes)
    if action in ("infer", "generate", "generate_stream"):
        return limits.json_too_large(head.length)
    return InvalidRequest(json_too_large(head.length, limits.input_bytes, "--http-max-input-size"))


def _too_large(size: int, limit: int) -> InvalidRequest:
    return InvalidRequest(
        f"the request body of {size} bytes exceeds the maximum allowed value of {limit} bytes; raise "
        "--http-max-input-size of the gateway"
    )


def inflating(encoding: str, body: Buffer, limit: int, flag: str, hold: Callable[[int], None]) -> Work[bytearray]:
    """Decompresses a body. `flag`: the option that sets `limit`. `hold` is called with the number of bytes produced."""
    if encoding not in ("gzip", "deflate"):
        raise Unsupported(f"Unsupported compression type '{encoding[:40]}'")
    try:
        return (yield from gzip_stream.inflating(_EITHER, body, limit, hold))
    except zlib.error:
        raise InvalidRequest(f"the body is not valid {encoding}") from None
    except gzip_stream.Overflow:
        text = f"the decompressed request body exceeds the maximum allowed value of {limit} bytes"
        raise InvalidRequest(f"{text}; raise {flag} of the gateway") from None
    except gzip_stream.Incomplete:
        raise InvalidRequest(f"the body is not one complete {encoding} stream") from None


def deflating(encoding: str, parts: Sequence[Buffer]) -> Work[bytes]:
    machine = zlib.compressobj(_LEVEL, zlib.DEFLATED, 31 if encoding == "gzip" else zlib.MAX_WBITS)
    return gzip_stream.deflating(machine, parts, gzip_stream.FAST * SLICE_BYTES)
