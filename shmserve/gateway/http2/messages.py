"""Compressed gRPC messages. Invariant: a message is never inflated beyond the limit."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from shmserve.gateway import gzip_stream
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.turns import SLICE_BYTES, SlicedWork
from shmserve.protocol.grpc.codes import Code, RpcError

COMPRESSED_BYTES = 1024
"""Messages below this size are not compressed."""


def message_size_error(size: int, limit: int) -> RpcError:
    return RpcError(
        Code.RESOURCE_EXHAUSTED,
        f"Received message larger than max ({size} vs. {limit}); raise --grpc-max-input-size of the gateway",
    )


def inflate_message(encoding: str, data: Buffer, limit: int, hold: Callable[[int], None]) -> SlicedWork[Buffer]:
    """Inflates a message. Calls `hold` with the number of bytes produced."""
    try:
        found = yield from gzip_stream.inflate(gzip_stream.WBITS[encoding], data, limit, hold)
    except zlib.error:
        raise RpcError(Code.INTERNAL, f"the message is not valid {encoding}") from None
    except gzip_stream.Overflow as error:
        raise message_size_error(error.args[0], limit) from None
    except gzip_stream.Incomplete:
        raise RpcError(Code.INTERNAL, f"the message is not one complete {encoding} stream") from None
    return bytes(found) if len(found) < SLICE_BYTES else memoryview(found)


def deflate_message(encoding: str, level: int, parts: Sequence[Buffer]) -> SlicedWork[bytes]:
    return gzip_stream.deflate(encoding, level, parts, SLICE_BYTES)
