"""What a model can get wrong in its outputs. The rule: the text says what was expected, and what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.dtypes import from_numpy
from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.shm.strings import encode_bytes

if TYPE_CHECKING:
    from shmserve.workers.specs import Spec

Array = np.ndarray[Any, np.dtype[Any]]
_BYTE = np.dtype(np.uint8)


def check_type(model: str, spec: Spec, array: Any) -> None:
    if not isinstance(array, np.ndarray):
        raise ModelFailed(f"output '{spec.name}' of model '{model}' is a {type(array).__name__}; expected an array")
    if array.dtype != spec.numpy and not (spec.dtype == "BYTES" and array.dtype.kind in "SU"):
        raise ModelFailed(
            f"output '{spec.name}' of model '{model}' has the wrong data type: expected {spec.dtype}, found "
            f"{_wire_name(array.dtype)}"
        )


def check_shape(model: str, spec: Spec, shape: tuple[int, ...], rows: int) -> None:
    if not spec.fits(shape) or (spec.batched and shape[0] != rows):
        raise ModelFailed(
            f"output '{spec.name}' of model '{model}' has the wrong shape: expected {spec.expected(rows)}, found "
            f"{list(shape)}"
        )


def strings(model: str, spec: Spec, part: Array) -> Array:
    """As they travel."""
    try:
        return np.frombuffer(encode_bytes(part), _BYTE)
    except InvalidRequest as error:
        raise ModelFailed(f"output '{spec.name}' of model '{model}': {error}") from None


def _wire_name(dtype: np.dtype[Any]) -> str:
    try:
        return from_numpy(dtype)
    except TypeError:
        return str(dtype)
