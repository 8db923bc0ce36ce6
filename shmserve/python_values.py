"""Converts Python numbers, strings and lists to arrays of a model's data type.

Invariant: values are never changed, except that floats are rounded to the model's precision. A value that does not fit
raises an error that names it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shmserve.dtypes import from_bfloat16, to_numpy
from shmserve.errors import InvalidRequest

Array = np.ndarray[Any, np.dtype[Any]]
_SHOWN = 60
_PLAIN = (bool, int, float, str, bytes)
_NUMBERS = {bool, int, float}
_BOOL = (bool, np.bool_)
_WHOLE = (int, np.integer)
_EXACT = {"FP16": 1 << 11, "FP32": 1 << 24, "FP64": 1 << 53, "BF16": 1 << 8}
"""Float data types -> the limit up to which they represent every integer."""


def is_python_value(value: Any) -> bool:
    """Whether the value is a number, a string, or a list of them, so that it takes the model's data type. Arrays, and
    lists of arrays, have their own data type."""
    while isinstance(value, (list, tuple)):
        if not value:
            return True
        value = value[0]
    return isinstance(value, _PLAIN) and not hasattr(value, "dtype")


def to_array(value: Any, dtype: str) -> Array:
    """Converts to an array of this wire data type; BF16 as its bits unless ml_dtypes is installed. Raises
    InvalidRequest."""
    if dtype == "BYTES":
        return _texts(value)
    try:
        array = np.array(value)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(_uneven(value) or f"not a tensor: {error}") from None
    if array.dtype.kind not in "biuf":
        others = [item for item in _leaves(value) if type(item) not in (bool, int, float)]
        if others:
            raise InvalidRequest(f"{_shown(others[0])} is not a number, as {dtype} needs")
        raise InvalidRequest(f"{_shown(max(_leaves(value), key=abs))} does not fit in {dtype}")  # beyond 64 bits
    types = _types(value)
    if dtype == "BOOL":
        if array.size and (array.dtype.kind == "f" or not np.isin(array, (0, 1)).all()):
            wrong = next(
                item for item in _leaves(value) if not isinstance(item, (*_BOOL, *_WHOLE)) or item not in (0, 1)
            )
            raise InvalidRequest(f"{_shown(wrong)} is not true or false")
        return array.astype(np.bool_)
    if array.dtype.kind == "b" or not types.isdisjoint(_BOOL):
        booleans = [item for item in _leaves(value) if isinstance(item, _BOOL)] or [True]
        raise InvalidRequest(f"{booleans[0]} is not a number, as {dtype} needs")
    if dtype in _EXACT:
        return _floats(array, None if types <= {float} else value, dtype)
    return _integers(array, value, dtype)


def _integers(array: Array, value: Any, dtype: str) -> Array:
    if array.size and array.dtype.kind == "f":
        fractions = [item for item in _leaves(value) if not isinstance(item, _WHOLE)]
        if fractions:
            raise InvalidRequest(f"{_shown(fractions[0])} is not an integer, as {dtype} needs")
        array = np.array(value, object)  # numpy converts mixed integers that need INT64 and UINT64 to floats
    wanted = to_numpy(dtype)
    info = np.iinfo(wanted)
    wrong = (array < info.min) | (array > info.max)
    if wrong.any():
        raise InvalidRequest(
            f"{_shown(_first(array, wrong))} is not within {info.min} ... {info.max}, as {dtype} needs"
        )
    return array.astype(wanted)


def _floats(array: Array, value: Any, dtype: str) -> Array:
    """Rounds floats; integers must be exact. `value`: None if it has no integers."""
    wanted = to_numpy(dtype)
    with np.errstate(over="ignore"):
        if wanted.kind == "u":  # BF16 without ml_dtypes
            converted = bfloat16_bits(array.astype(np.float32))
            rounded = from_bfloat16(converted)
        else:
            converted = rounded = array.astype(wanted)
    wrong = np.isinf(rounded) & np.isfinite(array)
    if wrong.any():
        raise InvalidRequest(f"{_shown(_first(array, wrong))} is beyond the range of {dtype}")
    if value is None:
        return converted
    large = (array >= _EXACT[dtype]) | (array <= -_EXACT[dtype])
    if large.any():
        # numpy converts mixed integers and floats to floats, and does the same to compare them.
        items = np.array(value, object) if array.dtype.kind == "f" else array
        for item, there in zip(items[large], rounded[large], strict=True):
            if isinstance(item, _WHOLE) and int(item) != int(there):
                raise InvalidRequest(f"{_shown(int(item))} is not exact as {dtype}; write a float")
    return converted


def bfloat16_bits(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The upper 16 bits of each float, rounded to nearest, ties to even."""
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


def _types(value: Any) -> set[type]:
    """The types of the numbers in the value."""
    if not isinstance(value, (list, tuple)):
        return {value.dtype.type if isinstance(value, np.ndarray) else type(value)}
    types = set(map(type, value))
    if not types <= _NUMBERS and any(issubclass(kind, (list, tuple, np.ndarray)) for kind in types):
        return set[type]().union(*map(_types, value))
    return types


def _leaves(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of nested lists. Raises InvalidRequest if their lengths differ."""
    if not isinstance(value, (list, tuple)):
        return ()
    uneven = _uneven(value)
    if uneven:
        raise InvalidRequest(uneven)
    return (len(value), *(_shape(value[0]) if value else ()))


def _uneven(value: Any, place: str = "") -> str:
    """Describes the first two lists whose lengths differ; "" if none do."""
    if not isinstance(value, (list, tuple)) or not value:
        return ""
    lengths = [len(item) if isinstance(item, (list, tuple)) else -1 for item in value]
    for index, length in enumerate(lengths):
        if length != lengths[0]:
            first, other = (f"{n} items" if n >= 0 else "no list" for n in (lengths[0], length))
            return f"its lists have different lengths: {first} at {place}[0], {other} at {place}[{index}]"
    return next((text for index, item in enumerate(value) if (text := _uneven(item, f"{place}[{index}]"))), "")


def _first(array: Array, wrong: Array) -> Any:
    return array[wrong].item(0)


def _shown(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
