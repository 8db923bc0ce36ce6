"""Converts text and JSON to values of a model's inputs, and adapts arrays to the model's shape.

Invariant: dtype and shape come from the model's metadata; a value that does not fit is an error, never converted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmserve.dtypes import from_bfloat16, to_numpy
from shmserve.protocol.messages import DIMS
from shmserve.python_values import bfloat16_bits
from shmserve.terminal.errors import Misuse
from shmserve.terminal.tables import shape_text

Spec = Mapping[str, Any]
"""A tensor's entry in the metadata: name, datatype, shape."""
FLOATS = ("FP16", "FP32", "FP64", "BF16")
SHOWN = 60
"""Maximum number of characters shown of an invalid value."""


def from_text(text: str, spec: Spec) -> Any:
    """Parses a JSON literal, or values separated by commas or spaces. For BYTES, text that is not JSON is the value."""
    try:
        value = json.loads(text, parse_float=number)
    except (ValueError, RecursionError):
        value = (
            text if spec["datatype"] == "BYTES" else [_word(word, spec) for word in re.split(r"[,\s]+", text.strip())]
        )
    else:
        if spec["datatype"] == "BYTES" and not isinstance(value, (str, list)):
            value = text  # 42 is a valid string
    return from_value(value, spec)


def _word(word: str, spec: Spec) -> int | float | bool:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for convert in (int, number):
        try:
            return convert(word)
        except ValueError:
            continue
    raise Misuse(f"input '{spec['name']}' ({spec['datatype']}): '{_short(word)}' is not a number")


def number(text: str) -> float:
    """Parses a float. Raises ValueError if a finite number overflows to infinity."""
    value = float(text)
    if math.isinf(value) and "inf" not in text.lower():
        raise ValueError(f"{_short(text)} is too large for a number")
    return value


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def from_value(value: Any, spec: Spec, shape: Sequence[int] | None = None) -> Any:
    """Converts numbers, strings or nested lists of them to a tensor of the model's dtype and shape."""
    flat: list[Any] = []
    dims = _flatten(value, flat, spec["name"], DIMS)
    if shape is not None:
        if not isinstance(shape, list) or not all(type(dim) is int and dim >= 0 for dim in shape):
            raise Misuse(f"input '{spec['name']}': shape {shape} is not a list of sizes")
        if math.prod(shape) != len(flat):
            raise Misuse(f"input '{spec['name']}': {len(flat)} values do not fill shape {shape_text(shape)}")
        dims = tuple(shape)
    dtype = spec["datatype"]
    if dtype == "BYTES":
        _all_are(flat, (str,), "a string", spec)
        array = objects(flat, dims)
    elif dtype == "BOOL":
        for item in flat:
            if item not in (0, 1):
                raise _unfit(item, "true or false", spec)
        array = np.array(flat, np.bool_).reshape(dims)
    elif dtype in FLOATS:
        _all_are(flat, (int, float), "a number", spec)
        try:
            array = np.array(flat, np.float64).reshape(dims)
        except OverflowError:
            raise _unfit(max(flat, key=abs), f"within the range of {dtype}", spec) from None
    else:
        array = _integers(flat, spec).reshape(dims)
    array = fit(array, spec)
    return rounded(array, spec) if dtype in FLOATS else array


def _flatten(value: Any, flat: list[Any], name: str, dims: int) -> tuple[int, ...]:
    """Appends the leaves to `flat` and returns the shape. Raises Misuse if lists have different lengths."""
    if not isinstance(value, list):
        flat.append(value)
        return ()
    if not dims:
        raise Misuse(f"input '{name}': a tensor has at most {DIMS} dims")
    shapes = {_flatten(item, flat, name, dims - 1) for item in value}
    if len(shapes) > 1:
        raise Misuse(f"input '{name}': the lists in it have different lengths")
    return (len(value), *(shapes.pop() if shapes else ()))


def _all_are(flat: list[Any], kinds: tuple[type, ...], what: str, spec: Spec) -> None:
    for item in flat:
        if type(item) not in kinds:
            raise _unfit(item, what, spec)


def _unfit(item: Any, what: str, spec: Spec) -> Misuse:
    return Misuse(f"input '{spec['name']}' ({spec['datatype']}): {_short(json.dumps(item))} is not {what}")


def _integers(flat: list[Any], spec: Spec) -> NDArray[Any]:
    info = np.iinfo(to_numpy(spec["datatype"]))
    _all_are(flat, (int,), "an integer", spec)
    for item in flat:
        if not info.min <= item <= info.max:
            raise _unfit(item, f"within {info.min} ... {info.max}", spec)
    return np.array(flat, info.dtype)


def rounded(values: NDArray[np.float64], spec: Spec) -> Any:
    """Converts to the model's precision. Raises Misuse if a finite number overflows."""
    dtype = spec["datatype"]
    single = np.dtype(np.float32) if dtype == "BF16" else to_numpy(dtype)
    with np.errstate(over="ignore"):
        narrow = values.astype(single)
    if dtype == "BF16":
        bits = bfloat16_bits(narrow)
        narrow = from_bfloat16(bits)
    lost = np.isinf(narrow) & np.isfinite(values)
    if lost.any():
        raise _unfit(values[lost].flat[0].item(), f"within the range of {dtype}", spec)
    return bits if dtype == "BF16" else narrow


def objects(items: Sequence[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    array = np.empty(len(items), object)
    array[:] = items
    return array.reshape(shape)


def matches(shape: Sequence[int], pattern: Sequence[int]) -> bool:
    return len(shape) == len(pattern) and all(
        free < 0 or size == free for size, free in zip(shape, pattern, strict=True)
    )


def fit(array: NDArray[Any], spec: Spec) -> NDArray[Any]:
    """Adapts the array to the model's shape: unchanged, as a batch of one, or, if flat, reshaped to the only possible
    shape (with a first dim of 1 if that resolves it)."""
    pattern = spec["shape"]
    if matches(array.shape, pattern):
        return array
    if pattern and pattern[0] < 0 and matches(array.shape, pattern[1:]):
        return array[None]
    if array.ndim <= 1:
        for shape in (pattern, [1, *pattern[1:]] if pattern and pattern[0] < 0 else pattern):
            if sum(dim < 0 for dim in shape) <= 1 and 0 not in shape:
                known = math.prod(dim for dim in shape if dim >= 0)
                if (array.size == known) if min(shape, default=0) >= 0 else (array.size and array.size % known == 0):
                    return array.reshape(shape)
    raise Misuse(
        f"input '{spec['name']}' ({spec['datatype']}): a value of shape {shape_text(array.shape)} does not fit "
        f"{shape_text(pattern)}"
    )
