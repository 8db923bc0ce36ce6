"""Arrays to tensors. The rule of the file: at most one copy of an input is made, and none where it already lies in
shared memory that the server can map.

Up to 4 KiB an input travels inside its message. A larger one goes as a handle: into the caller's own memory where it
already lies there, into a received output that is passed on, else into a block it is copied to once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shmserve.dtypes import ITEM_BYTES, from_numpy
from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import DIMS, INLINE_BYTES, NAME_LENGTH, TENSORS, Handle, Tensor
from shmserve.session.gpu.foreign_memory import RegionPart
from shmserve.session.gpu.tensors import interface_of
from shmserve.session.memory import Memory
from shmserve.session.results import NUMPY
from shmserve.session.ticket import Array, Kept
from shmserve.shm import strings

MESSAGE_BYTES = 48 * 1024
"""The most bytes of inputs inside one message; what comes after them goes to shared memory whatever its size."""

_NAMES = {dtype: name for name, dtype in NUMPY.items() if name != "BF16" or dtype != np.dtype("uint16")}
_ndarray = np.ndarray


class Raw:
    """A tensor whose wire type its numpy dtype does not say: `Raw("BF16", bits)` with 16-bit integers."""

    __slots__ = ("array", "dtype")

    def __init__(self, dtype: str, array: Any) -> None:
        self.array = np.asarray(array)
        self.dtype = dtype
        size = ITEM_BYTES.get(dtype)
        if not size:
            known = ", ".join(name for name, width in ITEM_BYTES.items() if width)
            raise InvalidRequest(f"Raw cannot be of type {dtype!r}; it can be of {known}")
        if self.array.dtype.hasobject or self.array.dtype.itemsize != size:
            raise InvalidRequest(f"Raw of {dtype} needs elements of {size} bytes, not {self.array.dtype}")


class Encoder:
    """Makes tensors of a caller's arrays. What they refer to is noted in the Kept that `tensors` returns."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def tensors(self, inputs: Mapping[str, Any]) -> tuple[tuple[Tensor, ...], Kept | None, int]:
        """Tensors, what must be kept for them, and how many bytes travel inside the message."""
        found: list[Tensor] = []
        kept: Kept | None = None
        total = 0
        try:
            for name, value in inputs.items():
                if type(value) is _ndarray:
                    dtype = _NAMES.get(value.dtype)
                    if dtype is not None:
                        size = value.nbytes
                        if size <= INLINE_BYTES and total + size <= MESSAGE_BYTES and value.ndim <= DIMS:
                            if len(name) > NAME_LENGTH:
                                raise _too_long(name)
                            total += size
                            found.append(Tensor(name, dtype, value.shape, value.tobytes()))
                            continue
                if kept is None:
                    kept = Kept()
                tensor = self._tensor(name, value, kept, len(found), MESSAGE_BYTES - total)
                if type(tensor.data) is bytes:
                    total += len(tensor.data)
                found.append(tensor)
        except BaseException as error:
            if kept is not None:
                self._memory.let_go(kept)
            if isinstance(error, (AttributeError, TypeError)):
                raise InvalidRequest(f"inputs are a mapping of names to arrays: {error}") from error
            raise
        if len(found) > TENSORS:
            if kept is not None:
                self._memory.let_go(kept)
            raise InvalidRequest(f"a request may have {TENSORS} inputs, this one has {len(found)}")
        return tuple(found), kept, total

    def _tensor(self, name: str, value: Any, kept: Kept, index: int, room: int) -> Tensor:
        """All that is not a small plain array."""
        if len(name) > NAME_LENGTH:
            raise _too_long(name)
        if isinstance(value, Raw):
            array, dtype = value.array, value.dtype
        elif type(value) is not _ndarray and (interface := interface_of(value)) is not None:
            return self._on_device(name, value, interface, kept, index, room)
        else:
            array, dtype = _as_array(name, value)
        shape = array.shape
        if len(shape) > DIMS:
            raise InvalidRequest(f"input '{name}' has {len(shape)} dims; a tensor may have {DIMS}")
        if dtype == "BYTES":
            array = np.frombuffer(_encode_strings(name, array), np.uint8)
        if array.nbytes <= min(INLINE_BYTES, room):
            return Tensor(name, dtype, shape, array.tobytes())
        if not self._memory.shared:
            return Tensor(name, dtype, shape, frame(name, array, kept, self._memory.frame_bytes))
        return Tensor(name, dtype, shape, (self._handle(array, kept, index),))

    def _on_device(self, name: str, value: Any, interface: Any, kept: Kept, index: int, room: int) -> Tensor:
        """Where a large one goes is found when it is known what is asked (`staging`)."""
        devices = self._memory.devices
        source = devices.source(name, value, interface)
        dtype = from_numpy(source.dtype)
        if source.nbytes <= min(INLINE_BYTES, room):
            return Tensor(name, dtype, source.shape, devices.fetch(source).tobytes())
        if kept.devices is None:
            kept.devices = {}
        kept.devices[index] = source
        return Tensor(name, dtype, source.shape, ())

    def _handle(self, array: Array, kept: Kept, index: int) -> Handle:
        """Where the bytes are that the server can map; they are copied there if they are nowhere yet."""
        memory = self._memory
        if array.flags.c_contiguous:
            found = memory.locate(array)
            if found is not None:
                handle, received = found
                kept.arrays.append(array)
                if received:
                    kept.received[index] = array
                return handle
        return memory.copy_in(array, kept)

    def place(self, name: str, array: Any, kept: Kept) -> Handle | None:
        """Where an output shall be written. None: it is copied to `array` when it comes."""
        if type(array) is RegionPart:
            return array.handle
        if type(array) is not _ndarray and (interface := interface_of(array)) is not None:
            kept.places[name] = target = self._memory.devices.source(name, array, interface)
            if kept.devices is None:
                kept.devices = {}
            return self._memory.devices.locate(target)
        if type(array) is not _ndarray or not array.flags.writeable:
            raise InvalidRequest(f"the place for output '{name}' must be a writable numpy array, best one of empty()")
        kept.places[name] = array
        if not self._memory.shared or not array.flags.c_contiguous:
            return None
        found = self._memory.locate(array)
        return found[0] if found is not None and not found[1] else None


def _as_array(name: str, value: Any) -> tuple[Array, str]:
    try:
        array = np.asarray(value)
        dtype = from_numpy(array.dtype)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"input '{name}' is no tensor: {error}") from error
    if dtype != "BYTES" and not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array, dtype


def _encode_strings(name: str, array: Array) -> bytes:
    try:
        return bytes(strings.encode_bytes(array))
    except (TypeError, ValueError, InvalidRequest) as error:
        raise InvalidRequest(f"input '{name}' is of strings: each element must be str or bytes ({error})") from error


def frame(name: str, array: Array, kept: Kept, most: int) -> int:
    """Puts the bytes behind the packet; the number of their frame is what the tensor says."""
    total = array.nbytes + sum(map(len, kept.frames))
    if total > most:
        raise InvalidRequest(
            f"inputs of {total} bytes up to '{name}' are over the {most} that one message may carry beside it; "
            "on the same machine use a client with shared memory, Client() or memory='posix'"
        )
    kept.frames.append(array.tobytes())
    return len(kept.frames) - 1


def _too_long(name: str) -> InvalidRequest:
    return InvalidRequest(f"name '{name[:40]}...' has {len(name)} characters; the limit is {NAME_LENGTH}")
