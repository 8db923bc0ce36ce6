"""Pooling: one vector from those of all tokens of a text, for encoders that do not pool themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shmserve.dtypes import from_bfloat16, to_numpy
from shmserve.errors import ModelFailed
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.turns import COPY_BYTES, SlicedWork

Array = np.ndarray[Any, np.dtype[np.float32]]


def floats(dtype: str, data: Buffer) -> Array:
    if dtype == "BF16":
        return from_bfloat16(np.frombuffer(data, np.uint16))
    return np.frombuffer(data, to_numpy(dtype)).astype(np.float32)


def pooled(pooling: str, dtype: str, shape: tuple[int, ...], data: Buffer, mask: Any) -> SlicedWork[Array]:
    """The vector of one text. `mask`: integers, 0 for the tokens that are padding; None: there are none."""
    if len(shape) < 2 or any(dim != 1 for dim in shape[:-2]) or not len(data):
        raise ModelFailed(f"the output to pool has the shape {list(shape)} for one text; expected [tokens, dimensions]")
    tokens, size = shape[-2], len(data) // shape[-2]
    used = np.arange(tokens) if mask is None else np.flatnonzero(mask)
    if not len(used) or used[-1] >= tokens:
        raise ModelFailed(f"the attention mask has {len(used)} tokens, and the output to pool {tokens}")
    view = memoryview(data)
    if pooling != "mean":
        at = int(used[0 if pooling == "cls" else -1]) * size
        return floats(dtype, view[at : at + size])
    total = np.zeros(shape[-1], np.float32)
    for rows in _slices(used, max(1, COPY_BYTES // size)):
        first, end = int(rows[0]), int(rows[-1]) + 1
        block = floats(dtype, view[first * size : end * size]).reshape(-1, shape[-1])
        total += block[rows - first].sum(axis=0)
        yield
    return total / np.float32(len(used))


def _slices(rows: Any, count: int) -> Iterator[Any]:
    """The rows that lie within `count` rows of each other."""
    while len(rows):
        end = int(np.searchsorted(rows, rows[0] + count))
        yield rows[:end]
        rows = rows[end:]
