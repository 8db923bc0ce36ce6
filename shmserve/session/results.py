"""Replies to arrays. The rule of the file: what a caller gets is read-only, except where he gave the array himself."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmserve.dtypes import ITEM_BYTES, to_numpy
from shmserve.errors import Internal, InvalidRequest
from shmserve.protocol.messages import Reply, Tensor
from shmserve.session.ticket import Array
from shmserve.shm import strings

NUMPY = {name: to_numpy(name) for name in ITEM_BYTES if name != "BYTES"}
"""Wire name -> numpy dtype, of all types whose elements have one size."""

_ndarray = np.ndarray


class Result(dict[str, Array]):
    """The outputs of a request by name: read-only arrays, which keep their memory and give it back when dropped."""

    __slots__ = ("parameters", "version")

    parameters: dict[str, Any]
    version: int
    """The version of the model that answered."""


def inline_result(reply: Reply) -> Result:
    """The result of a reply whose tensors all came as bytes."""
    result = Result()
    result.version = reply.version
    result.parameters = reply.parameters or {}
    for tensor in reply.outputs:
        dtype = NUMPY.get(tensor.dtype)
        if dtype is None:
            result[tensor.name] = from_bytes(tensor, tensor.data)
            continue
        try:
            result[tensor.name] = _ndarray(tensor.shape, dtype, tensor.data)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise _unreadable(tensor, error) from error
    return result


def from_bytes(tensor: Tensor, data: Any) -> Array:
    """A read-only array over bytes; of strings, a new array of bytes objects."""
    try:
        if tensor.dtype == "BYTES":
            return strings.decode_bytes(data, tensor.shape)
        found = _ndarray(tensor.shape, NUMPY[tensor.dtype], data)
    except (KeyError, TypeError, ValueError, InvalidRequest) as error:
        raise _unreadable(tensor, error) from error
    found.flags.writeable = False
    return found


def into_place(tensor: Tensor, source: Array, place: Array) -> Array:
    """Copies an output to where the caller wanted it: it was too small to travel by handle, or came from a batch."""
    check_place(tensor, source, place)
    np.copyto(place, source)
    return place


def check_place(tensor: Tensor, source: Array, place: Any) -> None:
    """`place` is an array here or on a GPU."""
    if source.dtype != place.dtype or source.shape != place.shape:
        raise wrong_place(tensor, place)


def wrong_place(tensor: Tensor, place: Any) -> InvalidRequest:
    return InvalidRequest(
        f"output '{tensor.name}' is {tensor.dtype} {list(tensor.shape)}, but the array given for it is "
        f"{place.dtype} {list(place.shape)}; the answer is lost"
    )


def _unreadable(tensor: Tensor, error: Exception) -> Internal:
    return Internal(f"output '{tensor.name}' ({tensor.dtype} {list(tensor.shape)}) cannot be read: {error}")
