"""Compressed messages of gRPC. The rule of the file: what comes is never made larger than the limit."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from shmserve.clients.gateway.http2.codes import Code, RpcError
from shmserve.clients.gateway.kserve.answers import Buffer

COMPRESSED_BYTES = 1024
"""Messages below this size are not worth compressing."""
_WINDOW = {"gzip": 31, "deflate": zlib.MAX_WBITS}


def too_large(size: int, limit: int) -> RpcError:
    return RpcError(
        Code.RESOURCE_EXHAUSTED,
        f"Received message larger than max ({size} vs. {limit}); raise --grpc-max-input-size of the gateway",
    )


def inflated(encoding: str, data: Buffer, limit: int) -> bytes:
    if not encoding:
        raise RpcError(Code.INTERNAL, "a message says that it is compressed, and the call does not say how")
    machine = zlib.decompressobj(_WINDOW[encoding])
    try:
        found = machine.decompress(data, limit + 1)
    except zlib.error:
        raise RpcError(Code.INTERNAL, f"a message is not {encoding}") from None
    if len(found) > limit:
        raise too_large(len(found), limit)
    if not machine.eof or machine.unused_data:
        raise RpcError(Code.INTERNAL, f"a message is not one whole {encoding} stream")
    return found


def deflated(encoding: str, parts: Sequence[Buffer], level: int) -> bytes:
    machine = zlib.compressobj(level, zlib.DEFLATED, _WINDOW[encoding])
    return b"".join([*map(machine.compress, parts), machine.flush()])
