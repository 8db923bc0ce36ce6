"""Arrays over mapped pages. Invariant: an array created here keeps its pages mapped, and `on_drop` is called when the
array and all its views and slices have been dropped.

numpy takes the memory from an ArrayHold through the array interface, and keeps the hold as the last `base` of the array
and of all its views. A read-only array cannot be made writable, because its hold does not offer a writable buffer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from shmserve.errors import InvalidRequest
from shmserve.shm.pages import Pages

Array = np.ndarray[Any, np.dtype[Any]]

_asarray = np.asarray
_getpid = os.getpid
_BYTE = np.dtype("uint8")
_typestr: dict[np.dtype[Any], str] = {}
"""Type strings of dtypes that have been used before."""


class ArrayHold:
    """Lives as long as an array or any of its views. `on_drop(what)` is called once, when the last one is dropped.

    This may happen in any thread, between any two instructions, so `on_drop` should only append to a deque. It is not
    called in a forked child, because the parent still holds the memory.
    """

    __slots__ = ("__array_interface__", "on_drop", "pages", "pid", "what")

    __array_interface__: dict[str, Any]
    on_drop: Callable[[Any], object] | None
    pages: Pages
    pid: int
    what: Any

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:
        if self.on_drop is not None and getpid() == self.pid:
            self.on_drop(self.what)


def make(
    pages: Pages,
    address: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    writable: bool,
    what: Any = None,
    on_drop: Callable[[Any], object] | None = None,
) -> Array:
    """Returns an array at `address`. The caller must check that it lies within `pages`."""
    hold = ArrayHold()
    hold.on_drop = None  # do not call it if creating the array fails
    hold.pages = pages
    hold.what = what
    text = _typestr.get(dtype)
    try:
        if text is not None:
            hold.__array_interface__ = {"version": 3, "data": (address, not writable), "shape": shape, "typestr": text}
            array = _asarray(hold)
        else:
            array = _make_rare(hold, address, dtype, shape, writable)
    except (ValueError, OverflowError) as error:  # too many dims, or a dim of 0 and a huge one
        raise InvalidRequest(f"invalid shape {list(shape)}: {error}") from error
    if on_drop is not None:
        hold.pid = _getpid()
        hold.on_drop = on_drop
    return array


def _make_rare(hold: ArrayHold, address: int, dtype: np.dtype[Any], shape: tuple[int, ...], writable: bool) -> Array:
    """Creates an array of a dtype that is used for the first time. If the array interface cannot express the dtype
    (bfloat16), the array is a view of an array of bytes."""
    if dtype.hasobject or not dtype.itemsize:
        raise InvalidRequest(f"numpy dtype {dtype} cannot be read from shared memory: its elements have no fixed size")
    if dtype.isbuiltin == 1 and dtype.kind in "biufc":
        _typestr[dtype] = dtype.str
        hold.__array_interface__ = {"version": 3, "data": (address, not writable), "shape": shape, "typestr": dtype.str}
        return _asarray(hold)
    size = byte_count(dtype, shape)
    hold.__array_interface__ = {"version": 3, "data": (address, not writable), "shape": (size,), "typestr": _BYTE.str}
    return np.ndarray(shape, dtype, _asarray(hold))  # type: ignore[arg-type, unused-ignore]


def byte_count(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Returns the size in bytes of an array of this dtype and shape. Raises InvalidRequest for a negative dim."""
    size = dtype.itemsize
    for dim in shape:
        if dim < 0:
            raise InvalidRequest(f"shape {list(shape)} has a negative dim")
        size *= dim
    return size


def address_of(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def hold_of(array: Array) -> ArrayHold | None:
    """Returns the hold that keeps the memory of this array or view, or None if `make` did not create it."""
    base: object = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, ArrayHold) else None
