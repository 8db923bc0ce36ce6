"""Outputs of padded batches: each request gets the outputs that it would get alone.

A request's share of an output that is cut back is not contiguous, so a block of the arena cannot be split. The output
is computed in a reused buffer, and each share is copied once from there to where it will be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.errors import ModelFailed
from shmserve.workers.batch.results import Results

if TYPE_CHECKING:
    from shmserve.protocol.messages import Tensor
    from shmserve.protocol.worker_messages import Work
    from shmserve.workers.batch.scatter import Scatter
    from shmserve.workers.batch.specs import Spec

Array = np.ndarray[Any, np.dtype[Any]]


class PaddedResults(Results):
    """`lengths` are the lengths of the requests before padding to `length`. None: requests are answered one by one, and
    their outputs are cut back without checking the uncut length."""

    __slots__ = ("_length", "_lengths", "_short")

    def __init__(
        self, scatter: Scatter, work_items: Sequence[Work], rows: int, lengths: Sequence[int], length: int | None
    ) -> None:
        super().__init__(scatter, work_items, rows)
        self._lengths = lengths
        self._length = length
        self._short = any(own != length for own in lengths)

    def direct(self, index: int, shape: tuple[int, ...]) -> bool:
        return not self._is_cut(index, shape) and super().direct(index, shape)

    def near(self, index: int, shape: tuple[int, ...]) -> int | None:
        return None if self._is_cut(index, shape) else super().near(index, shape)

    def _own_place(self, index: int, spec: Spec, shape: tuple[int, ...]) -> Array | None:
        return None if self._is_cut(index, shape) else super()._own_place(index, spec, shape)

    def alias(self, index: int, source: str, shape: tuple[int, ...]) -> bool:
        # The unpadded input equals the output only if the output is cut back; otherwise they differ.
        if self._short and not self._scatter.specs[index].cut:
            return False
        return super().alias(index, source, shape)

    def _is_cut(self, index: int, shape: tuple[int, ...]) -> bool:
        """Also checks shapes if nothing is cut, so that an error shows before the first batch of different lengths."""
        spec = self._scatter.specs[index]
        for axis in spec.cut:
            if self._length is not None and axis < len(shape) and shape[axis] != self._length:
                raise ModelFailed(
                    f"output '{spec.name}' of model '{self._scatter.model}' has the shape {list(shape)}, and cannot be "
                    f"cut back from length {self._length} along axis {axis}; the model's parameter padding_outputs "
                    f"names those that are"
                )
        return self._short and bool(spec.cut)

    def _split(self, index: int, spec: Spec, array: Array) -> Sequence[Tensor | None]:
        if not self._is_cut(index, array.shape):
            return super()._split(index, spec, array)
        shares: list[Array | None] = []
        start = 0
        for work, own in zip(self._work_items, self._lengths, strict=True):
            end = start + work.rows
            kept = [slice(own) if axis in spec.cut else slice(None) for axis in range(1, array.ndim)]
            shares.append(array[(slice(start, end), *kept)])
            start = end
        return self._shares(index, spec, shares)
