"""Chunked and compressed bodies. The rule of the file: a limit is checked before what it limits is made."""

from __future__ import annotations

import zlib

from shmserve.clients.gateway.http.limits import CHUNKS, HEAD_BYTES
from shmserve.errors import InvalidRequest, Unsupported

_LINE = 1024
_EITHER = 32 + zlib.MAX_WBITS
"""gzip and zlib are told apart by what they begin with."""
_LEVEL = 1
_HEX = frozenset(b"0123456789abcdefABCDEF")


class Chunks:
    """A chunked body as it comes. `body` is what has come of it; `done` is set after its end."""

    def __init__(self, limit: int) -> None:
        self.body = bytearray()
        self.done = False
        self._limit = limit
        self._count = 0
        self._left = 0
        """Bytes of this chunk that have not come, with the line end behind it."""
        self._trailer = 0
        self._ending = False

    def feed(self, data: bytes) -> bytes:
        """Takes of `data` what it can and gives back the rest, which has to come again with what follows, or, when it
        is `done`, belongs to the next request. InvalidRequest: the end cannot be found any more."""
        at = 0
        while not self.done:
            if self._left:
                taken = min(self._left, len(data) - at)
                self._chunk(data[at : at + taken])
                at += taken
                if self._left:
                    break
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                if len(data) - at > _LINE:
                    raise InvalidRequest("a chunk of the body begins with a line that is too long")
                break
            self._line(data[at:end])
            at = end + 2
        return data[at:]

    def _chunk(self, piece: bytes) -> None:
        body = max(0, min(len(piece), self._left - 2))
        self.body += piece[:body]
        tail = piece[body:]
        if tail and tail != b"\r\n"[2 - self._left + body :][: len(tail)]:
            raise InvalidRequest("a chunk of the body does not end where it says")
        self._left -= len(piece)

    def _line(self, line: bytes) -> None:
        if self._ending:  # trailers, which nobody here wants
            self._trailer += len(line) + 2
            if self._trailer > HEAD_BYTES:
                raise InvalidRequest(f"what follows the chunks of the body is over {HEAD_BYTES} bytes")
            self.done = not line
            return
        digits = line.partition(b";")[0].rstrip(b" \t")
        if not digits or len(digits) > 16 or not _HEX.issuperset(digits):
            raise InvalidRequest("a chunk of the body does not begin with its size")
        size = int(digits, 16)
        self._count += 1
        if self._count > CHUNKS:
            raise InvalidRequest(f"the body has more than {CHUNKS} chunks")
        if len(self.body) + size > self._limit:
            raise InvalidRequest(too_large(len(self.body) + size, self._limit))
        if size:
            self._left = size + 2
        else:
            self._ending = True


def too_large(size: int, limit: int) -> str:
    return f"the body of {size} bytes is over the limit of {limit}; raise --http-max-input-size of the gateway"


def inflated(encoding: str, body: bytes | bytearray, limit: int) -> bytes:
    """What was compressed."""
    if encoding not in ("gzip", "deflate"):
        raise Unsupported(f"Unsupported compression type '{encoding[:40]}'")
    machine = zlib.decompressobj(_EITHER)
    try:
        found = machine.decompress(body, limit + 1)
    except zlib.error:
        raise InvalidRequest(f"the body is not {encoding}") from None
    if len(found) > limit:
        text = f"the body is over the limit of {limit} bytes when it is decompressed"
        raise InvalidRequest(f"{text}; raise --http-max-input-size of the gateway")
    if not machine.eof or machine.unused_data:
        raise InvalidRequest(f"the body is not one whole {encoding} stream")
    return found


def deflated(encoding: str, parts: list[bytes | bytearray | memoryview]) -> bytes:
    machine = zlib.compressobj(_LEVEL, zlib.DEFLATED, 31 if encoding == "gzip" else zlib.MAX_WBITS)
    return b"".join([*map(machine.compress, parts), machine.flush()])
