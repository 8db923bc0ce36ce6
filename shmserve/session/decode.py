"""Converts replies to results: makes arrays from the output tensors.

An array is a view of shared memory where possible, else a copy, whose handles are returned at once. Arrays are
read-only, unless the caller supplied them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from shmserve.dtypes import ITEM_BYTES, elements, to_numpy
from shmserve.errors import Internal, InvalidRequest, ServeError
from shmserve.protocol.messages import Part, Reply, Tensor
from shmserve.session.columns import RowReply
from shmserve.session.memory import SessionMemory
from shmserve.shm import strings
from shmserve.shm.views import Array

if TYPE_CHECKING:
    from shmserve.session.gpu.tensors import DeviceRef

NUMPY = {name: to_numpy(name) for name in ITEM_BYTES if name != "BYTES"}
"""Wire name -> numpy dtype, for all types with fixed-size elements."""

_ndarray = np.ndarray


class Result(dict[str, Array]):
    """The outputs of a request by name: read-only arrays. Each keeps its memory alive and releases it when it is
    garbage-collected.
    """

    __slots__ = ("parameters", "version")

    parameters: dict[str, Any]
    version: int
    """The model version that answered."""


def inline_result(reply: Reply | RowReply) -> Result:
    """The result of a reply whose tensors are all inline."""
    result = Result()
    result.version = reply.version
    if type(reply) is RowReply:
        result.parameters = {}
        shapes, blobs = reply.shapes, reply.data
        for index, form in enumerate(reply.forms):
            dtype = NUMPY.get(form.dtype)
            if dtype is not None:
                try:
                    result[form.name] = _ndarray(shapes[index], dtype, blobs[index])
                    continue
                except (TypeError, ValueError):
                    dtype = None  # `_from_bytes` names the tensor in its error
            tensor = Tensor(form.name, form.dtype, shapes[index], blobs[index])
            result[form.name] = _from_bytes(tensor, tensor.data)
        return result
    assert isinstance(reply, Reply)
    result.parameters = reply.parameters or {}
    for tensor in reply.outputs:
        dtype = NUMPY.get(tensor.dtype)
        if dtype is None:
            result[tensor.name] = _from_bytes(tensor, tensor.data)
            continue
        try:
            result[tensor.name] = _ndarray(tensor.shape, dtype, tensor.data)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise _unreadable(tensor, error) from error
    return result


def _from_bytes(tensor: Tensor, data: Any) -> Array:
    """A read-only array over the bytes; for strings, a new array of bytes objects."""
    try:
        if tensor.dtype == "BYTES":
            return strings.decode_bytes(data, tensor.shape)
        array = _ndarray(tensor.shape, NUMPY[tensor.dtype], data)
    except (KeyError, TypeError, ValueError, InvalidRequest) as error:
        raise _unreadable(tensor, error) from error
    array.flags.writeable = False
    return array


def _unreadable(tensor: Tensor, error: Exception) -> Internal:
    return Internal(f"output '{tensor.name}' ({tensor.dtype} {list(tensor.shape)}) cannot be read: {error}")


# ---------------------------------------------------------------------------------------- handles, frames and places


def result_of(
    reply: Reply | Part, frames: Sequence[Any], places: Mapping[str, Array | DeviceRef], memory: SessionMemory
) -> Result:
    """The result with all its arrays, which are made at once, so that no handle is lost even if one array cannot be
    made."""
    result = Result()
    result.version = reply.version
    result.parameters = reply.parameters or {}
    failure: ServeError | None = None
    for tensor in reply.outputs:
        try:
            result[tensor.name] = output_of(tensor, frames, places.get(tensor.name), memory)
        except ServeError as error:
            failure = error
    if failure is not None:
        raise failure
    return result


def return_handles(reply: Reply | Part, memory: SessionMemory) -> None:
    """Returns the handles of an answer that is no longer needed."""
    for tensor in reply.outputs:
        if isinstance(tensor.data, tuple):
            for handle in tensor.data:
                if not memory.is_own(handle):
                    memory.drops.dropped(handle)


def output_of(tensor: Tensor, frames: Sequence[Any], place: Array | DeviceRef | None, memory: SessionMemory) -> Array:
    """The array of one output. `place` is the array that the caller supplied for it."""
    data = tensor.data
    if isinstance(data, tuple):
        if place is not None and len(data) == 1 and memory.is_own(data[0]):
            return _written(tensor, place) if isinstance(place, np.ndarray) else _written_on_device(tensor, place)
        array = _view(tensor, memory)
    elif isinstance(data, int):
        if not 0 <= data < len(frames):
            raise Internal(f"output '{tensor.name}' refers to frame {data}, but the message has {len(frames)} frame(s)")
        array = _from_bytes(tensor, frames[data])
    else:
        array = _from_bytes(tensor, data)
    if place is None:
        return array
    if isinstance(place, np.ndarray):
        return _into_place(tensor, array, place)
    _check_place(tensor, array, place)
    memory.devices.store(place, array)
    owner: Array = place.owner
    return owner


def _view(tensor: Tensor, memory: SessionMemory) -> Array:
    """A read-only array over an output received as handles, which are returned when the array is dropped."""
    handles = tensor.data
    assert isinstance(handles, tuple)
    dropped, dtype = memory.drops.dropped, NUMPY.get(tensor.dtype)
    if len(handles) == 1 and dtype is not None:
        handle = handles[0]
        try:
            return memory.mapped.view(handle, dtype, tensor.shape, on_drop=dropped)
        except BaseException:
            dropped(handle)
            raise
    # Rows from several workers, or strings, are copied, so the handles are returned at once.
    try:
        data = b"".join([memory.mapped.memory(handle) for handle in handles])
        return _from_bytes(tensor, data)
    finally:
        for handle in handles:
            dropped(handle)


def _written(tensor: Tensor, place: Array) -> Array:
    """The caller's array, which the output is already in, cut to the output's shape."""
    if _is_other(tensor, place):
        raise _wrong_place(tensor, place)
    if tensor.shape == place.shape:
        return place
    return place.reshape(-1)[: elements(tensor.shape)].reshape(tensor.shape)


def _is_other(tensor: Tensor, place: Any) -> bool:
    """Whether the output was written with a data type other than that of the place. Any 16-bit type may hold BF16."""
    return tensor.dtype != "BF16" and NUMPY.get(tensor.dtype, place.dtype) != place.dtype


def _written_on_device(tensor: Tensor, place: DeviceRef) -> Array:
    """Like `_written`, for an array on a GPU, which cannot be cut to the output's shape here."""
    if _is_other(tensor, place):
        raise _wrong_place(tensor, place)
    if tensor.shape != place.shape:
        raise InvalidRequest(
            f"output '{tensor.name}' has shape {list(tensor.shape)}, but was written to an array of shape "
            f"{list(place.shape)}"
        )
    owner: Array = place.owner
    return owner


def _into_place(tensor: Tensor, source: Array, place: Array) -> Array:
    """Copies an output into the caller's array, if it was too small for a handle or came from a batch."""
    _check_place(tensor, source, place)
    np.copyto(place, source)
    return place


def _check_place(tensor: Tensor, source: Array, place: Any) -> None:
    """`place` is an array in this process or on a GPU."""
    if source.dtype != place.dtype or source.shape != place.shape:
        raise _wrong_place(tensor, place)


def _wrong_place(tensor: Tensor, place: Any) -> InvalidRequest:
    return InvalidRequest(
        f"output '{tensor.name}' is {tensor.dtype} {list(tensor.shape)}, but the array given for it is "
        f"{place.dtype} {list(place.shape)}; the response is lost"
    )


# ---------------------------------------------------------------------------------------- classes


class ClassResult(Struct, frozen=True):
    """One class of an output requested with TopK. `label` is "" where the model has no label for it."""

    value: float | int
    index: int
    label: str


def parse_class(text: bytes | str) -> ClassResult:
    """`b"0.9:5:cat"` -> `ClassResult(0.9, 5, "cat")`. The value is an int for integer outputs."""
    try:
        value, _, rest = (text.decode() if isinstance(text, bytes) else text).partition(":")
        number, _, label = rest.partition(":")
        return ClassResult(int(value) if value.lstrip("-").isdecimal() else float(value), int(number), label)
    except ValueError:
        raise InvalidRequest(f"{text!r} is not a class; expected value:index or value:index:label") from None
