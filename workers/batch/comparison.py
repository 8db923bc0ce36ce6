"""Compares the outputs of requests with those of another version, for shadows.

Invariant: the outputs of a compared request stay in this process; its row has only the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.dtypes import elements, from_bfloat16, to_numpy
from shmserve.errors import ServeError
from shmserve.protocol.messages import Failure, Tensor
from shmserve.protocol.worker_messages import Expect, Row

if TYPE_CHECKING:
    from shmserve.protocol.messages import Value
    from shmserve.shm.mapped import Mapped

TOLERANCES = {"FP16": 1e-2, "BF16": 1e-2, "FP32": 1e-3, "FP64": 1e-3}
"""Tolerated difference of floats, relative to the largest value of the output."""


class Comparisons:
    """`discard` frees the outputs of a row."""

    def __init__(self, mapped: Mapped, discard: Callable[[Row], None]) -> None:
        self._mapped = mapped
        self._discard = discard
        self.expected: dict[int, tuple[Tensor, ...]] = {}

    def expect(self, order: Expect) -> None:
        self.expected[order.request] = order.outputs

    def forget(self, requests: Iterable[int]) -> None:
        for number in requests:
            self.expected.pop(number, None)

    def compared(self, rows: Iterable[Row]) -> list[Row]:
        return [row if row.request not in self.expected else self._compared(row) for row in rows]

    def _compared(self, row: Row) -> Row:
        expected = self.expected.pop(row.request)
        if row.error is not None:
            return row
        try:
            parameters = self._result(expected, row.outputs)
        except ServeError as error:
            return Row(row.request, (), Failure(error.code, f"cannot compare its outputs: {error}"))
        finally:
            self._discard(row)
        return Row(row.request, (), None, parameters)

    def _result(self, expected: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> dict[str, Value]:
        by_name = {tensor.name: tensor for tensor in outputs}
        for tensor in expected:
            if tensor.name not in by_name:
                return {"equal": False, "output": tensor.name, "difference": "is missing"}
            text = self._difference(tensor, by_name[tensor.name])
            if text:
                return {"equal": False, "output": tensor.name, "difference": text}
        return {"equal": True}

    def _difference(self, expected: Tensor, actual: Tensor) -> str:
        """Describes how the tensors differ; "" if they are equal."""
        if expected.dtype != actual.dtype:
            return f"has data type {actual.dtype}, not {expected.dtype}"
        if expected.shape != actual.shape:
            return f"has shape {list(actual.shape)}, not {list(expected.shape)}"
        expected_bytes, actual_bytes = self._bytes(expected), self._bytes(actual)
        if expected_bytes == actual_bytes:
            return ""
        if expected.dtype == "BYTES":
            return "has other strings"
        dtype = to_numpy(expected.dtype)
        one, other = (np.frombuffer(data, dtype) for data in (expected_bytes, actual_bytes))
        tolerance = TOLERANCES.get(expected.dtype)
        if tolerance is None:
            return f"has {np.count_nonzero(one != other)} of {elements(expected.shape)} elements that differ"
        if expected.dtype == "BF16":  # without ml_dtypes, numpy has only the bits
            one, other = from_bfloat16(one), from_bfloat16(other)
        share = float_difference(one, other)
        return "" if share <= tolerance else f"differs by {100 * share:.3g} % of its largest value"

    def _bytes(self, tensor: Tensor) -> Any:
        """Its bytes, as an object that compares with others by memcmp."""
        data = tensor.data
        if isinstance(data, bytes):
            return data
        assert isinstance(data, tuple)
        parts = [self._mapped.memory(handle) for handle in data]
        return parts[0] if len(parts) == 1 else b"".join(parts)


def float_difference(expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any]) -> float:
    """The largest difference, relative to the largest finite expected value. NaN equals NaN."""
    one, other = (array.astype(np.float64, copy=False) for array in (expected, actual))
    unlike = ~((one == other) | (np.isnan(one) & np.isnan(other)))
    if not unlike.any():
        return 0.0
    finite = np.abs(one[np.isfinite(one)])
    largest = finite.max() if finite.size else 0.0
    with np.errstate(all="ignore"):
        share = np.abs(other[unlike] - one[unlike]).max() / largest
    return float(share) if np.isfinite(share) else float("inf")
