"""Encoding of requests: arrays to tensors, keyword arguments to message fields.

An input is copied at most once, and not at all if it lies in shared memory that the server can map. An input of up to 4
KiB is sent inside its message. A larger one is sent as a handle: to the array itself if it lies in the client's arena
or is a received output that is passed on, else to a block into which it is copied once.

This module refuses only values that the wire format cannot carry. The server, which has the model's configuration,
validates the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

import numpy as np
from msgspec import Struct

from shmserve.dtypes import ITEM_BYTES, from_numpy, to_numpy
from shmserve.errors import InvalidRequest
from shmserve.protocol import codec
from shmserve.protocol.messages import (
    DIMS,
    INLINE_BYTES,
    NAME_LENGTH,
    PACKET_BYTES,
    PARAMETERS,
    TENSORS,
    Handle,
    Infer,
    Options,
    Tensor,
    Wanted,
)
from shmserve.python_values import is_python_value
from shmserve.session.arguments import check_name
from shmserve.session.foreign_memory import RegionPart
from shmserve.session.memory import SessionMemory
from shmserve.session.ticket import KeptInputs
from shmserve.shm import strings
from shmserve.shm.views import Array

MESSAGE_BYTES = 48 * 1024
"""Maximum total size of inline inputs per message. Further inputs are placed in shared memory, whatever their size."""

_DLPACK_GPU = (2, 10, 13)
"""Device types of DLPack whose memory is on a GPU: CUDA, ROCm and CUDA's managed memory."""
_LARGEST = 2**63 - 1
_MAX_CLASSES = 2**31 - 1
_NAMES = {to_numpy(name): name for name in ITEM_BYTES if name != "BYTES" and from_numpy(to_numpy(name)) == name}
"""numpy dtype -> wire name. BF16 has no dtype unless ml_dtypes is installed."""
_ndarray = np.ndarray

# ---------------------------------------------------------------------------------------- inputs


class UntypedInput(InvalidRequest):
    """An input is a Python number, string or list, so its data type is the model's, which is not known here."""


class Raw:
    """A tensor whose wire type cannot be derived from its numpy dtype: `Raw("BF16", bits)` with 16-bit integers."""

    __slots__ = ("array", "dtype")

    def __init__(self, dtype: str, array: Any) -> None:
        self.array = np.asarray(array)
        self.dtype = dtype
        size = ITEM_BYTES.get(dtype)
        if not size:
            known = ", ".join(name for name, width in ITEM_BYTES.items() if width)
            raise InvalidRequest(f"Raw cannot have type {dtype!r}; expected one of {known}")
        if self.array.dtype.hasobject or self.array.dtype.itemsize != size:
            raise InvalidRequest(f"Raw of {dtype} needs elements of {size} bytes, not {self.array.dtype}")


def encode_inputs(
    inputs: Mapping[str, Any], memory: SessionMemory
) -> tuple[tuple[Tensor, ...], KeptInputs | None, int]:
    """The tensors, the objects to keep for them, and the number of inline bytes."""
    tensors: list[Tensor] = []
    kept: KeptInputs | None = None
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
                        tensors.append(Tensor(name, dtype, value.shape, value.tobytes()))
                        continue
            if kept is None:
                kept = KeptInputs()
            tensor = _tensor(memory, name, value, kept, len(tensors), MESSAGE_BYTES - total)
            if type(tensor.data) is bytes:
                total += len(tensor.data)
            tensors.append(tensor)
    except BaseException as error:
        if kept is not None:
            memory.release_inputs(kept)
        if isinstance(error, (AttributeError, TypeError)):
            raise InvalidRequest(f"inputs must be a mapping of names to arrays: {error}") from error
        raise
    if len(tensors) > TENSORS:
        if kept is not None:
            memory.release_inputs(kept)
        raise InvalidRequest(f"the request has {len(tensors)} inputs; the limit is {TENSORS}")
    return tuple(tensors), kept, total


def _tensor(memory: SessionMemory, name: str, value: Any, kept: KeptInputs, index: int, room: int) -> Tensor:
    """Any input that is not a small plain array."""
    if len(name) > NAME_LENGTH:
        raise _too_long(name)
    if isinstance(value, Raw):
        array, dtype = value.array, value.dtype
    elif type(value) is not _ndarray and (interface := interface_of(value)) is not None:
        return _on_device(memory, name, value, interface, kept, index, room)
    elif type(value) is not _ndarray and is_python_value(value):
        raise UntypedInput(f"input '{name}' is a {type(value).__name__}, expected an array")
    else:
        array, dtype = _as_array(name, value)
    array, shape = _sendable(name, array, dtype)
    if array.nbytes <= min(INLINE_BYTES, room):
        return Tensor(name, dtype, shape, array.tobytes())
    if not memory.shared:
        return Tensor(name, dtype, shape, kept.add_frame(name, array, memory.frame_bytes))
    return Tensor(name, dtype, shape, (_handle(memory, array, kept, index),))


def plain_input(name: str, value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Type, shape and bytes of an array or `Raw`."""
    array, dtype = (value.array, value.dtype) if isinstance(value, Raw) else _as_array(name, value)
    array, shape = _sendable(name, array, dtype)
    return dtype, shape, array.tobytes()


def _sendable(name: str, array: Array, dtype: str) -> tuple[Array, tuple[int, ...]]:
    """An array with the bytes to send, and the shape of the tensor."""
    if array.ndim > DIMS:
        raise InvalidRequest(f"input '{name}' has {array.ndim} dims; the limit is {DIMS}")
    return np.frombuffer(_encode_strings(name, array), np.uint8) if dtype == "BYTES" else array, array.shape


def interface_of(value: Any) -> Any:
    """The CUDA array interface of `value`, or None if it is not on a device."""
    try:
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is None and callable(getattr(value, "__dlpack_device__", None)):
            if int(value.__dlpack_device__()[0]) in _DLPACK_GPU:
                from shmserve.session.gpu.tensors import interface_from_dlpack  # without a GPU it is not imported

                interface = interface_from_dlpack(value)
    except Exception as error:  # a library may raise any exception here
        raise InvalidRequest(f"an array on a GPU cannot be used: {error}") from error
    return interface


def _on_device(
    memory: SessionMemory, name: str, value: Any, interface: Any, kept: KeptInputs, index: int, room: int
) -> Tensor:
    """`staging` places a large array later, when the whole request is known."""
    devices = memory.devices
    source = devices.source(name, value, interface)
    dtype = from_numpy(source.dtype)
    if source.nbytes <= min(INLINE_BYTES, room):
        return Tensor(name, dtype, source.shape, devices.fetch(source).tobytes())
    if kept.devices is None:
        kept.devices = {}
    kept.devices[index] = source
    return Tensor(name, dtype, source.shape, ())


def _handle(memory: SessionMemory, array: Array, kept: KeptInputs, index: int) -> Handle:
    """A handle to the array's bytes; they are copied into the arena unless the server can map them already."""
    if array.flags.c_contiguous:
        location = memory.locate(array)
        if location is not None:
            handle, received = location
            kept.arrays.append(array)
            if received:
                kept.received[index] = array
            return handle
    return memory.copy_in(array, kept)


def _place(name: str, array: Any, kept: KeptInputs, memory: SessionMemory) -> Handle | None:
    """The handle to write the output to. None: the output is copied to `array` on arrival."""
    if type(array) is RegionPart:
        return array.handle
    if type(array) is not _ndarray and (interface := interface_of(array)) is not None:
        kept.places[name] = target = memory.devices.source(name, array, interface)
        if kept.devices is None:
            kept.devices = {}
        return memory.devices.locate(target)
    if type(array) is not _ndarray or not array.flags.writeable:
        raise InvalidRequest(f"the array for output '{name}' must be a writable numpy array, preferably from empty()")
    kept.places[name] = array
    if not memory.shared or not array.flags.c_contiguous:
        return None
    location = memory.locate(array)
    return location[0] if location is not None and not location[1] else None


def _as_array(name: str, value: Any) -> tuple[Array, str]:
    try:
        array = np.asarray(value)
        dtype = from_numpy(array.dtype)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"input '{name}' is not a tensor: {error}") from error
    if dtype != "BYTES" and not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array, dtype


def _encode_strings(name: str, array: Array) -> bytes:
    try:
        return strings.encode_bytes(array)
    except (TypeError, ValueError, InvalidRequest) as error:
        raise InvalidRequest(f"input '{name}' has strings: each element must be str or bytes ({error})") from error


def _too_long(name: str) -> InvalidRequest:
    return InvalidRequest(f"name '{name[:40]}...' has {len(name)} characters; the limit is {NAME_LENGTH}")


# ---------------------------------------------------------------------------------------- options and outputs


class TopK(Struct, frozen=True):
    """Requests, instead of an output, its `k` largest values per batch item, as strings b"value:index", or
    b"value:index:label" if the model has labels. `parse_class` parses them.
    """

    k: int

    def __post_init__(self) -> None:
        try:
            good = 0 < index(self.k) <= _MAX_CLASSES and not isinstance(self.k, bool)
        except TypeError:
            good = False
        if not good:
            raise InvalidRequest(f"TopK({self.k!r}): expected a number from 1 to {_MAX_CLASSES}")


def options_of(
    priority: int | None,
    sequence: int | str | None,
    sequence_start: bool,
    sequence_end: bool,
    parameters: Mapping[str, Any] | None,
    request_id: str | None,
    window: int = 0,
    caller: str = "",
) -> Options | None:
    """The Options of a request, or None if nothing is set. The queue timeout, Triton's parameter `timeout`, has its own
    field."""
    if not (priority or sequence or sequence_start or sequence_end or parameters or request_id or window):
        return None
    if request_id is not None:
        check_name("request_id", request_id)
    if isinstance(sequence, str):
        check_name("sequence", sequence)
    elif sequence is not None and not 0 <= sequence < 2**64:
        raise InvalidRequest(f"sequence={sequence} does not fit in 64 bits")
    if (sequence_start or sequence_end) and not sequence:
        raise InvalidRequest("sequence_start and sequence_end need sequence=, the id of the sequence")
    if priority is not None and not 0 <= priority < 2**64:
        raise InvalidRequest(f"priority={priority} is not a number from 0 to 2^64-1")
    wire_parameters = dict(parameters or {})
    if len(wire_parameters) > PARAMETERS:
        raise InvalidRequest(f"the request has {len(wire_parameters)} parameters; the limit is {PARAMETERS}")
    queue_timeout_us = 0
    for name, value in wire_parameters.items():
        check_name("parameter", name)
        if not isinstance(value, (str, int, float, bool)):
            raise InvalidRequest(f"parameter '{name}' must be str, int, float or bool, not {type(value).__name__}")
    if "timeout" in wire_parameters:
        value = wire_parameters.pop("timeout")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
            raise InvalidRequest(f"parameter 'timeout' must be the queue timeout in microseconds, not {value!r}")
        queue_timeout_us = value
    return Options(
        request_id or "",
        priority or 0,
        queue_timeout_us,
        sequence or 0,
        sequence_start,
        sequence_end,
        wire_parameters,
        window,
        caller if sequence else "",
    )


def wanted_of(outputs: Any, kept: KeptInputs, memory: SessionMemory, placed: bool = True) -> tuple[Wanted, ...]:
    """`outputs` is a list of names, or a mapping of names to arrays, TopK, or None (placement is left to the server).
    Arrays are refused unless `placed`.
    """
    try:
        names = None if isinstance(outputs, (str, bytes)) else list(outputs)
    except TypeError:
        names = None
    if names is None:
        raise InvalidRequest(f"outputs must be a list of names or a mapping of names to arrays, not {outputs!r}")
    if len(names) > TENSORS:
        raise InvalidRequest(f"the request has {len(names)} outputs; the limit is {TENSORS}")
    wanted = []
    for name in names:
        check_name("output", name)
        how = outputs[name] if isinstance(outputs, Mapping) else None
        if type(how) is TopK:
            wanted.append(Wanted(name, None, index(how.k)))
        elif how is not None and not placed:
            raise InvalidRequest(f"output '{name}' cannot be written to an array: a stream has several responses")
        else:
            wanted.append(Wanted(name, _place(name, how, kept, memory) if how is not None else None))
    return tuple(wanted)


def check_size(message: Infer) -> None:
    """Refuses a message that is larger than a packet because of its names and parameters."""
    try:
        size = len(codec.encode([message]))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from error
    if size > PACKET_BYTES - 1024:
        raise InvalidRequest(f"names and parameters make a message of {size} bytes; the limit is {PACKET_BYTES - 1024}")
