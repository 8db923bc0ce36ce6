"""Converts Python numbers, strings and lists to arrays of a model's data type.

Invariant: a value is never changed, except that a float is rounded to the model's precision. What does not fit is an
error, which names the value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shmserve.dtypes import to_numpy
from shmserve.errors import InvalidRequest

Array = np.ndarray[Any, np.dtype[Any]]
_SHOWN = 60
_PLAIN = (bool, int, float, str, bytes)


def is_python_value(value: Any) -> bool:
    """Whether the value is a number, a text, or a list of them, so that its data type is that of the model. Arrays, and
    lists of arrays, have a type of their own."""
    while isinstance(value, (list, tuple)):
        if not value:
            return True
        value = value[0]
    return isinstance(value, _PLAIN) and not hasattr(value, "dtype")


def to_array(value: Any, dtype: str) -> Array:
    """The array of this wire data type; BF16 as its bits unless numpy has the type. Raises InvalidRequest."""
    if dtype == "BYTES":
        return _texts(value)
    try:
        array = np.array(value)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(_uneven(value) or f"not a tensor: {error}") from None
    if array.dtype.kind not in "biuf":
        odd = [item for item in _leaves(value) if type(item) not in (bool, int, float)]
        if odd:
            raise InvalidRequest(f"{_shown(odd[0])} is not a number, as {dtype} needs")
        raise InvalidRequest(f"{_shown(max(_leaves(value), key=abs))} does not fit in {dtype}")  # beyond 64 bits
    if dtype == "BOOL":
        if not array.size:
            return array.astype(np.bool_)
        if array.dtype.kind == "f" or not np.isin(array, (0, 1)).all():
            raise InvalidRequest(f"{_shown(_first(array, ~np.isin(array, (0, 1))))} is not true or false")
        return array.astype(np.bool_)
    if array.dtype.kind == "b":
        raise InvalidRequest(f"{array.flat[0]} is not a number, as {dtype} needs")
    if dtype == "BF16":
        return _bfloat16(array)
    return _numbers(array, dtype)


def _numbers(array: Array, dtype: str) -> Array:
    wanted = to_numpy(dtype)
    if wanted.kind == "f":
        return _floats(array, wanted, dtype)
    if array.size and array.dtype.kind == "f":
        raise InvalidRequest(f"{_shown(_first(array, np.ones(array.shape, bool)))} is not an integer, as {dtype} needs")
    info = np.iinfo(wanted)
    wrong = (array < info.min) | (array > info.max)
    if wrong.any():
        raise InvalidRequest(
            f"{_shown(_first(array, wrong))} is not within {info.min} ... {info.max}, as {dtype} needs"
        )
    return array.astype(wanted)


def _floats(array: Array, wanted: np.dtype[Any], dtype: str) -> Array:
    """Floats are rounded; integers must be exact."""
    with np.errstate(over="ignore"):
        converted = array.astype(wanted)
    wrong = np.isinf(converted) & np.isfinite(array)
    if wrong.any():
        raise InvalidRequest(f"{_shown(_first(array, wrong))} is beyond the range of {dtype}")
    if array.dtype.kind != "f":
        # Compared as integers: a comparison of both would convert them to floats.
        limit = 1 << (np.finfo(wanted).nmant + 1)
        large = (array > limit) | (array < -limit)
        wrong = np.array([item != int(there) for item, there in zip(array[large], converted[large], strict=True)], bool)
        if wrong.any():
            raise InvalidRequest(f"{_shown(array[large][wrong][0].item())} is not exact as {dtype}; write a float")
    return converted


def _bfloat16(array: Array) -> Array:
    wanted = to_numpy("BF16")
    if wanted.kind != "u":
        return _floats(array, wanted, "BF16") if array.dtype.kind == "f" else _exact_bfloat16(array, wanted)
    single = _floats(array, np.dtype(np.float32), "BF16")
    return bfloat16_bits(single)


def _exact_bfloat16(array: Array, wanted: np.dtype[Any]) -> Array:
    converted = array.astype(wanted)
    wrong = converted.astype(np.float64) != array
    if wrong.any():
        raise InvalidRequest(f"{_shown(_first(array, wrong))} is not exact as BF16; write a float")
    return converted


def bfloat16_bits(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The upper half of each float, rounded to nearest, ties to even."""
    wide = values.view(np.uint32).astype(np.uint64)
    rounded = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _texts(value: Any) -> Array:
    shape = _shape(value)
    items = list(_leaves(value))
    for item in items:
        if not isinstance(item, (str, bytes)):
            raise InvalidRequest(f"{_shown(item)} is not str or bytes, as BYTES needs")
    array = np.empty(len(items), object)
    array[:] = items
    return array.reshape(shape)


def _leaves(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _shape(value: Any) -> tuple[int, ...]:
    """Raises InvalidRequest for lists of different lengths."""
    if not isinstance(value, (list, tuple)):
        return ()
    uneven = _uneven(value)
    if uneven:
        raise InvalidRequest(uneven)
    return (len(value), *(_shape(value[0]) if value else ()))


def _uneven(value: Any, place: str = "") -> str:
    """Describes the first two lists of different lengths; "" if there are none."""
    if not isinstance(value, (list, tuple)) or not value:
        return ""
    lengths = [len(item) if isinstance(item, (list, tuple)) else -1 for item in value]
    for index, length in enumerate(lengths):
        if length != lengths[0]:
            first, other = (f"{n} items" if n >= 0 else "no list" for n in (lengths[0], length))
            return f"its lists have different lengths: {first} at {place}[0], {other} at {place}[{index}]"
    return next((found for index, item in enumerate(value) if (found := _uneven(item, f"{place}[{index}]"))), "")


def _first(array: Array, wrong: Array) -> Any:
    return array[wrong][0].item()


def _shown(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
