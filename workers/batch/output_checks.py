"""Checks of a model's outputs. Error texts state what was expected and what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from shmserve.dtypes import ITEM_BYTES, from_numpy, to_numpy
from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.protocol.messages import DIMS
from shmserve.repo.parameters import STRICT_OUTPUTS
from shmserve.shm.strings import encode_bytes
from shmserve.workers.process.log import log_message

if TYPE_CHECKING:
    from shmserve.workers.batch.specs import Spec

Array = np.ndarray[Any, np.dtype[Any]]
_BYTE = np.dtype(np.uint8)


class OutputChecks:
    """Checks the outputs of one model. Without `strict`, as in Triton, outputs may differ from the configuration in
    data type and shape, and may be missing if no request names them. Each output that differs is logged once."""

    def __init__(self, model: str, strict: bool) -> None:
        self._model = model
        self.strict = strict
        self._logged: set[str] = set()

    def check(self, spec: Spec, array: Array, rows: int, requests: int) -> Spec:
        """Returns the spec of an output as the model produced it. Raises ModelFailed if it must not differ from the
        configuration, cannot be sent, or cannot be split between the requests."""
        actual = spec if _has_type(spec, array) else self._typed(spec, array)
        shape = array.shape
        if not (spec.fits(shape) and (not spec.batched or shape[0] == rows)):
            if self.strict or len(shape) > DIMS or (requests > 1 and shape[:1] != (rows,)):
                check_shape(self._model, spec, shape, rows)
            actual = structs.replace(actual, reshaped=False, batched=spec.batched and bool(shape))
        if actual is not spec:
            self._log(spec, f"{actual.dtype} {list(shape)}", f"{spec.dtype} {spec.expected(rows)}")
        return actual

    def check_flat(self, spec: Spec, array: Array) -> Spec:
        """Like `check`, for an output of any shape."""
        actual = spec if _has_type(spec, array) else self._typed(spec, array)
        if actual is not spec:
            self._log(spec, actual.dtype, spec.dtype)
        return actual

    def _typed(self, spec: Spec, array: Array) -> Spec:
        dtype = "" if self.strict or not isinstance(array, np.ndarray) else wire_name(array.dtype)
        if dtype not in ITEM_BYTES:
            check_type(self._model, spec, array)
        if dtype == spec.dtype:  # in another byte order
            return spec
        return structs.replace(spec, dtype=dtype, numpy=to_numpy(dtype), item=ITEM_BYTES[dtype])

    def _log(self, spec: Spec, actual: str, expected: str) -> None:
        if spec.name not in self._logged:
            self._logged.add(spec.name)
            log_message(
                f"output '{spec.name}' of model '{self._model}' is {actual} and is passed on as it is; the "
                f"configuration says {expected} (the parameter {STRICT_OUTPUTS.name} makes this an error)",
                "warning",
            )


def check_type(model: str, spec: Spec, array: Any) -> None:
    if not isinstance(array, np.ndarray):
        raise ModelFailed(f"output '{spec.name}' of model '{model}' is a {type(array).__name__}; expected an array")
    if not _has_type(spec, array):
        raise ModelFailed(
            f"output '{spec.name}' of model '{model}' has the wrong data type: expected {spec.dtype}, found "
            f"{wire_name(array.dtype)}"
        )


def _has_type(spec: Spec, array: Any) -> bool:
    if not isinstance(array, np.ndarray):
        return False
    return bool(array.dtype == spec.numpy) or (not spec.item and array.dtype.kind in "SU")


def check_shape(model: str, spec: Spec, shape: tuple[int, ...], rows: int) -> None:
    if not spec.fits(shape) or (spec.batched and shape[0] != rows):
        raise ModelFailed(
            f"output '{spec.name}' of model '{model}' has the wrong shape: expected {spec.expected(rows)}, found "
            f"{list(shape)}"
        )


def as_state(spec: Spec, array: Array) -> Array:
    """Converts a state of a model without strict outputs to the configured data type, which is that of the state's
    input: floats always, integers if the values fit."""
    kinds = spec.numpy.kind + array.dtype.kind
    if kinds == "ff":
        return array.astype(spec.numpy, copy=False)
    return as_integers(array, spec.numpy) if kinds in ("ii", "iu", "ui", "uu") else array


def as_integers(array: Array, dtype: np.dtype[Any]) -> Array:
    """Converts integers to another type of integers if all values fit."""
    converted = array.astype(dtype, copy=False)
    return converted if (converted == array).all() else array


def strings(model: str, spec: Spec, part: Array) -> Array:
    try:
        return np.frombuffer(encode_bytes(part, str), _BYTE)
    except InvalidRequest as error:
        raise ModelFailed(f"output '{spec.name}' of model '{model}': {error}") from None


def wire_name(dtype: np.dtype[Any]) -> str:
    try:
        return from_numpy(dtype)
    except TypeError:
        return str(dtype)
