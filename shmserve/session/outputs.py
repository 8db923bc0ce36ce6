"""Outputs that did not come inline, to arrays. The rule of the file: an array is a view where it can be, else a copy,
whose handles go back at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from shmserve.dtypes import elements
from shmserve.errors import Internal, InvalidRequest, ServeError
from shmserve.protocol.messages import Part, Reply, Tensor
from shmserve.session.memory import Memory
from shmserve.session.results import NUMPY, Result, check_place, from_bytes, into_place, wrong_place
from shmserve.session.ticket import Array

if TYPE_CHECKING:
    from shmserve.session.gpu.tensors import Source


def result_of(
    reply: Reply | Part, frames: Sequence[Any], places: Mapping[str, Array | Source], memory: Memory
) -> Result:
    """All its arrays, made at once, so that no handle can be lost, also where one of them cannot be made."""
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


def give_back(reply: Reply | Part, memory: Memory) -> None:
    """An answer that nobody wants any more: what it brought goes back."""
    for tensor in reply.outputs:
        if isinstance(tensor.data, tuple):
            for handle in tensor.data:
                if not memory.is_own(handle):
                    memory.drops.dropped(handle)


def output_of(tensor: Tensor, frames: Sequence[Any], place: Array | Source | None, memory: Memory) -> Array:
    """The array of one output. `place` is the array that the caller wants it in."""
    data = tensor.data
    if isinstance(data, tuple):
        if place is not None and len(data) == 1 and memory.is_own(data[0]):
            return _written(tensor, place) if isinstance(place, np.ndarray) else _there(tensor, place)
        found = memory.view(tensor)
    elif isinstance(data, int):
        if not 0 <= data < len(frames):
            raise Internal(f"output '{tensor.name}' is in frame {data} of {len(frames)}")
        found = from_bytes(tensor, frames[data])
    else:
        found = from_bytes(tensor, data)
    if place is None:
        return found
    if isinstance(place, np.ndarray):
        return into_place(tensor, found, place)
    check_place(tensor, found, place)
    memory.devices.store(place, found)
    there: Array = place.owner
    return there


def _written(tensor: Tensor, place: Array) -> Array:
    """The answer is where the caller wanted it."""
    if _is_other(tensor, place):
        raise wrong_place(tensor, place)
    if tensor.shape == place.shape:
        return place
    return place.reshape(-1)[: elements(tensor.shape)].reshape(tensor.shape)


def _is_other(tensor: Tensor, place: Any) -> bool:
    """Whether the output was written in another data type than the place has. BF16 may be read as any 16 bits."""
    return tensor.dtype != "BF16" and NUMPY.get(tensor.dtype, place.dtype) != place.dtype


def _there(tensor: Tensor, place: Source) -> Array:
    """The same on a GPU, where nothing can be cut from it here."""
    if _is_other(tensor, place):
        raise wrong_place(tensor, place)
    if tensor.shape != place.shape:
        raise InvalidRequest(
            f"output '{tensor.name}' is {list(tensor.shape)}, and was written to an array of {list(place.shape)}"
        )
    there: Array = place.owner
    return there


class ClassResult(Struct, frozen=True):
    """One class of an output that was asked for with TopK. `label` is "" where the model has none for it."""

    value: float | int
    index: int
    label: str


def parse_class(text: bytes | str) -> ClassResult:
    """`b"0.9:5:cat"` -> `ClassResult(0.9, 5, "cat")`. A value is an int where the output is of integers."""
    try:
        value, _, rest = (text.decode() if isinstance(text, bytes) else text).partition(":")
        number, _, label = rest.partition(":")
        return ClassResult(int(value) if value.lstrip("-").isdecimal() else float(value), int(number), label)
    except ValueError:
        raise InvalidRequest(f"{text!r} is no class, which is written value:index or value:index:label") from None
