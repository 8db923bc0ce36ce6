"""Chunked and compressed bodies. Invariant: a size is checked against its limit before memory is allocated."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.gateway import gzip_stream
from shmserve.gateway.auth.actions import INFER, TO_MODELS
from shmserve.gateway.http.heads import HttpHead
from shmserve.gateway.http.limits import CHUNKS, HEAD_BYTES, HttpLimits
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.json_tensors import json_size_text
from shmserve.gateway.limits.turns import SLICE_BYTES, SlicedWork
from shmserve.gateway.openai.errors import KIND as OPENAI

_LINE = 1024
"""Maximum length of an incomplete line: a chunk header or a trailer."""
_LEVEL = 1
"""Compression level of responses: the fastest."""
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
        self._remaining = 0
        """Bytes of the current chunk that have not arrived, including its CRLF."""
        self._crlf = b""
        """The part of the CRLF after the current chunk that has arrived."""
        self._trailer = 0
        """Bytes of trailers so far."""
        self._ending = False
        """The last chunk (size 0) has arrived; the following lines are trailers."""
        self.lines = 0
        """Number of lines parsed: chunk headers and trailers."""

    def feed(self, data: bytes, lines: int) -> bytes:
        """Parses at most this many lines of `data`, and returns the rest: an incomplete line, to be passed again with
        the data that follows, more lines, or, once `done`, the next request. Raises InvalidRequest for an invalid
        encoding or an exceeded limit. The connection is then unusable, because the end of the body is unknown."""
        at, until = 0, self.lines + lines
        while not self.done:
            if self._remaining:
                taken = min(self._remaining, len(data) - at)
                self._chunk(data[at : at + taken])
                at += taken
                if self._remaining:
                    break
                continue
            if self.lines >= until:
                break
            end = data.find(b"\n", at)
            if (end if end >= 0 else len(data)) - at > _LINE + len("\r"):
                raise InvalidRequest(f"a line of the chunked body exceeds {_LINE} bytes")
            if end < 0:
                break
            if end == at or data[end - 1] != 0x0D:
                raise InvalidRequest("a line of the chunked body ends with a bare LF; CRLF is required")
            self._line(data[at : end - 1])
            at = end + 1
        return data[at:]

    def _chunk(self, piece: bytes) -> None:
        """Adds a piece of the current chunk. The last two of its `_remaining` bytes are CRLF."""
        body = max(0, min(len(piece), self._remaining - 2))
        self.body += piece[:body]
        self._crlf += piece[body:]
        if not b"\r\n".startswith(self._crlf):
            raise InvalidRequest("a chunk of the body does not match its size")
        self._remaining -= len(piece)
        if not self._remaining:
            self._crlf = b""

    def _line(self, line: bytes) -> None:
        """Handles a chunk header or a trailer, without its CRLF."""
        self.lines += 1
        if self._ending:
            self._skip_trailer(line)
            return
        header = _CHUNK.fullmatch(line)
        if header is None:
            raise InvalidRequest("a chunk of the body does not begin with a valid size")
        size = int(header[1], 16)
        self._count += size > 0
        if self._count > CHUNKS:
            raise InvalidRequest(
                f"Chunked request body exceeds maximum of {CHUNKS} non-empty chunks. Send fewer or larger HTTP chunks."
            )
        if len(self.body) + size > self._limit:
            raise _body_size_error(len(self.body) + size, self._limit)
        if size:
            self._remaining = size + 2
        else:
            self._ending = True

    def _skip_trailer(self, line: bytes) -> None:
        self._trailer += len(line) + 2
        if self._trailer > HEAD_BYTES:
            raise InvalidRequest(f"the trailers of the chunked body exceed {HEAD_BYTES} bytes")
        if line and _TRAILER.fullmatch(line) is None:
            raise InvalidRequest("a trailer of the chunked body is not NAME: VALUE in printable ASCII")
        self.done = not line


def content_length_error(head: HttpHead, limits: HttpLimits) -> InvalidRequest:
    """The error for a body whose Content-Length exceeds its limit. The text depends on the kind of body."""
    action = head.route.action
    if head.encoding or head.has_form or (action is INFER and head.json_length is not None):
        return _body_size_error(head.length, limits.input_bytes)
    if action in TO_MODELS:
        is_openai = head.route.kind == OPENAI
        return limits.json_size_error(head.length, "") if is_openai else limits.json_size_error(head.length)
    return InvalidRequest(json_size_text(head.length, limits.input_bytes, "--http-max-input-size"))


def _body_size_error(size: int, limit: int) -> InvalidRequest:
    return InvalidRequest(
        f"the request body of {size} bytes exceeds the maximum allowed value of {limit} bytes; raise "
        "--http-max-input-size of the gateway"
    )


def inflate_body(
    encoding: str, body: Buffer, limit: int, flag: str, hold: Callable[[int], None]
) -> SlicedWork[bytearray]:
    """Decompresses a body to at most `limit` bytes, which the option `flag` sets. `hold` is called with the size of
    each piece before the piece is added, and may raise to abort."""
    if encoding not in ("gzip", "deflate"):
        raise Unsupported(f"Unsupported compression type '{encoding[:40]}'")
    try:
        return (yield from gzip_stream.inflate(gzip_stream.GZIP_OR_ZLIB, body, limit, hold))
    except zlib.error:
        raise InvalidRequest(f"the body is not valid {encoding}") from None
    except gzip_stream.Overflow:
        text = f"the decompressed request body exceeds the maximum allowed value of {limit} bytes"
        raise InvalidRequest(f"{text}; raise {flag} of the gateway") from None
    except gzip_stream.Incomplete:
        raise InvalidRequest(f"the body is not one complete {encoding} stream") from None


def deflate_body(encoding: str, parts: Sequence[Buffer]) -> SlicedWork[bytes]:
    return gzip_stream.deflate(encoding, _LEVEL, parts, gzip_stream.FAST * SLICE_BYTES)
