"""Arrays over mapped pages. The rule of the file: an array made here keeps its pages mapped, and the moment when it and
all its views and slices are gone is known.

numpy asks the ArrayHold for its memory once and keeps it as the last base of the array and of everything cut from it. A
read-only array cannot be made writeable again, as its last base offers no writable buffer.
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


class ArrayHold:
    """The life of one array and of all that is cut from it. `on_drop(what)` is called once, when the last is gone.

    Collection can run in any thread, between any two instructions: `on_drop` should append to a deque and no more.
    In a forked child it is not called: what the parent holds is not the child's to give back.
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
    """An array at `address`. That it lies within `pages` is the caller's to check."""
    hold = ArrayHold()
    hold.on_drop = None  # nothing is held until the array exists
    hold.pages = pages
    hold.what = what
    text = _typestr.get(dtype)
    try:
        if text is not None:
            hold.__array_interface__ = {
                "version": 3,
                "data": (address, not writable),
                "shape": shape,
                "typestr": text,
            }
            array = _asarray(hold)
        else:
            array = _make_rare(hold, address, dtype, shape, writable)
    except (ValueError, OverflowError) as error:  # too many dims, or, beside a dim of 0, too large ones
        raise InvalidRequest(f"no array can have the shape {list(shape)}: {error}") from error
    if on_drop is not None:
        hold.pid = _getpid()
        hold.on_drop = on_drop
    return array


def _make_rare(hold: ArrayHold, address: int, dtype: np.dtype[Any], shape: tuple[int, ...], writable: bool) -> Array:
    """A dtype seen for the first time, or one whose type string may not name it (bfloat16)."""
    if dtype.hasobject or not dtype.itemsize:
        raise InvalidRequest(f"numpy dtype {dtype} cannot be read from shared memory: its elements have no fixed size")
    if dtype.isbuiltin == 1 and dtype.kind in "biufc":
        _typestr[dtype] = dtype.str
        hold.__array_interface__ = {
            "version": 3,
            "data": (address, not writable),
            "shape": shape,
            "typestr": dtype.str,
        }
        return _asarray(hold)
    size = byte_count(dtype, shape)
    hold.__array_interface__ = {
        "version": 3,
        "data": (address, not writable),
        "shape": (size,),
        "typestr": _BYTE.str,
    }
    return np.ndarray(shape, dtype, _asarray(hold))  # type: ignore[arg-type, unused-ignore]


def byte_count(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """What such an array takes. Python integers cannot overflow; a negative dim is refused."""
    size = dtype.itemsize
    for dim in shape:
        if dim < 0:
            raise InvalidRequest(f"shape {list(shape)} has a negative dim")
        size *= dim
    return size


def hold_of(array: Array) -> ArrayHold | None:
    """What the array, or the array it was cut from, keeps alive."""
    base: object = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, ArrayHold) else None
