"""zlib in slices, for HTTP bodies and gRPC messages."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.turns import SLICE_BYTES, SlicedWork

GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
"""`wbits` for which zlib detects the format, gzip or zlib."""
WBITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""Encoding -> `wbits`. HTTP and gRPC call the zlib format `deflate`."""
FAST = 4
"""How many times faster zlib is per byte of inflated output, and per byte of input at level 1, than otherwise."""


class Overflow(Exception):
    """The output would exceed the limit. `args[0]`: its size so far."""


class Incomplete(Exception):
    """The input is not one complete stream."""


def inflate(wbits: int, data: Buffer, limit: int, hold: Callable[[int], None]) -> SlicedWork[bytearray]:
    """Calls `hold` with the number of bytes produced. Raises zlib.error, Overflow, Incomplete, and what `hold`
    raises."""
    machine = zlib.decompressobj(wbits)
    step = FAST * SLICE_BYTES
    inflated, at, full = bytearray(), 0, False
    remaining: Buffer = b""
    while not machine.eof and (remaining or full or at < len(data)):
        if not remaining and not full:
            remaining, at = data[at : at + SLICE_BYTES], at + SLICE_BYTES
        piece = machine.decompress(remaining, step)
        if len(inflated) + len(piece) > limit:
            raise Overflow(len(inflated) + len(piece))
        hold(len(piece))
        inflated += piece
        remaining, full = machine.unconsumed_tail, len(piece) == step
        if remaining or full or at < len(data):
            yield
    if not machine.eof or machine.unused_data or at < len(data):
        raise Incomplete
    return inflated


def deflate(encoding: str, level: int, parts: Sequence[Buffer], slice_bytes: int) -> SlicedWork[bytes]:
    """`slice_bytes`: maximum bytes of input per slice."""
    machine = zlib.compressobj(level, zlib.DEFLATED, WBITS[encoding])
    pieces = []
    room = slice_bytes
    for part in parts:
        for at in range(0, len(part), slice_bytes):
            piece = memoryview(part)[at : at + slice_bytes]
            if len(piece) > room:
                room = slice_bytes
                yield
            room -= len(piece)
            pieces.append(machine.compress(piece))
    return b"".join([*pieces, machine.flush()])
