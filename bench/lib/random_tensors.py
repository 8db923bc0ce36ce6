"""Creates and compares random tensors of every dtype, including NaN patterns, empty strings and empty tensors.

Invariant: tensors are compared bytewise, never by value, so a NaN or a negative zero must come back unchanged.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from shmserve.dtypes import ITEM_BYTES, to_numpy

DTYPES = tuple(ITEM_BYTES)
POOL_BYTES = 8 << 20


class Maker:
    """Takes tensors from a pool of random bytes, which is faster than generating new random data."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._pool = np.random.default_rng(seed).integers(0, 256, POOL_BYTES, np.uint8)

    def size(self, largest: int) -> int:
        """A random size in bytes (approximate for strings): about half of them small enough to be sent inline, 2 % of
        them 0, and few of them large.
        """
        roll = self._random.random()
        if roll < 0.02:
            return 0
        if roll < 0.5:
            return self._random.randint(1, 4096)
        if roll < 0.55:
            return min(largest, self._random.choice([4096, 4097, 65536, 65537]))
        return int(4096 * (largest / 4096) ** (self._random.random() ** 2))

    def shape(self, dtype: str, size: int, max_rows: int) -> tuple[int, ...]:
        """The shape of a batch of about `size` bytes, without a batch dimension if `max_rows` is 0. Widths are often
        rounded down to a power of two, so that requests often share a shape.
        """
        rows = self._random.randint(1, max_rows) if max_rows else 0
        width = max(0, size) // (ITEM_BYTES[dtype] or 24) // max(1, rows)
        if self._random.random() < 0.6 and width > 8:
            width = 1 << (width.bit_length() - 1)
        return (rows, width) if max_rows else (width,)

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> Any:
        count = int(np.prod(shape))
        if dtype == "BYTES":
            return self._strings(count).reshape(shape)
        size = count * ITEM_BYTES[dtype]
        start = self._random.randrange(0, POOL_BYTES - size) // 8 * 8
        raw = self._pool[start : start + size]
        if dtype == "BOOL":
            return (raw & 1).astype(bool).reshape(shape)
        return raw.view(to_numpy(dtype)).reshape(shape)

    def _strings(self, count: int) -> Any:
        result = np.empty(count, object)
        for number in range(count):
            length = self._random.randrange(0, 60)
            start = self._random.randrange(0, POOL_BYTES - length)
            result[number] = self._pool[start : start + length].tobytes()
        return result


def same(one: Any, other: Any) -> bool:
    """Whether dtype, shape and all bytes are equal."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype == object:
        return bool(one.tolist() == other.tolist())
    return bool(np.array_equal(_bits(one), _bits(other)))


def _bits(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def to_bytes(array: Any) -> bytes:
    """The bytes sent on the wire. Each string is preceded by its length, as 4 bytes, little-endian."""
    if array.dtype == object:
        return b"".join(len(item).to_bytes(4, "little") + item for item in array.reshape(-1).tolist())
    result: bytes = array.tobytes()
    return result
