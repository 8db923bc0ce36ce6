"""Tensors on this process's GPU that other processes wrote or will read. A segment is opened once, and tensors are
copied on the device; they are copied to or from the host only for models that do not support GPU tensors.

Invariant: a segment stays open until its owner reports that no message will refer to it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shmserve.errors import HandleLost, InvalidRequest
from shmserve.gpu.interface import whole_units
from shmserve.shm.extents import cuda as extents
from shmserve.shm.views import address_of
from shmserve.workers.gpu import api

if TYPE_CHECKING:
    from shmserve.gpu.interface import GpuDevice
    from shmserve.protocol.messages import Handle
    from shmserve.shm.mapped import Mapped

Array = np.ndarray[Any, np.dtype[Any]]


class PieceMemory(Protocol):
    """The memory that a piece is part of."""

    @property
    def cuda(self) -> GpuDevice: ...

    def fetch(self, piece: DevicePiece) -> Array:
        """Copies a piece to the host."""


class DevicePiece:
    """Rows of a tensor on this process's GPU. Attributes with names of numpy's ndarray have the same meaning."""

    __slots__ = ("_memory", "address", "dtype", "nbytes", "shape")

    def __init__(self, memory: PieceMemory, address: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._memory = memory
        self.address = address
        self.dtype = dtype
        self.shape = shape
        self.nbytes = dtype.itemsize
        for dim in shape:
            self.nbytes *= dim

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def cuda(self) -> GpuDevice:
        return self._memory.cuda

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The data is complete: consumers need not wait for a stream."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }

    def reshape(self, *shape: int) -> DevicePiece:
        """Flattens to one dimension, for ragged inputs; other shapes are not supported."""
        return DevicePiece(self._memory, self.address, self.dtype, (self.nbytes // self.dtype.itemsize,))

    def host(self) -> Array:
        return self._memory.fetch(self)


class DeviceMemory:
    """The segments on the GPU that this process uses."""

    def __init__(self, mapped: Mapped) -> None:
        self.cuda = api.open_device()
        self._mapped = mapped
        self._stream = self.cuda.stream()
        self._own: dict[int, int] = {}
        self._opened: dict[int, int] = {}

    def make(self, size: int) -> extents.CudaExtent:
        """Allocates at least `size` bytes, in whole allocation units of the driver, because memory that shares a unit
        is exported together."""
        return extents.create(whole_units(size), self.cuda.allocate, self.cuda.export, self.cuda.free, self.cuda.uuid)

    def own(self, segment: int, address: int) -> None:
        """Registers a segment of this process, whose tensors may come back as inputs."""
        self._own[segment] = address

    def address(self, handle: Handle) -> int:
        """Returns the address of a handle's bytes. Opens the segment on first use."""
        name, size = self._mapped.on_device[handle.segment]
        if handle.offset + handle.size > size:
            raise InvalidRequest(
                f"handle with offset {handle.offset} and size {handle.size} is outside its segment of {size} bytes"
            )
        address = self._own.get(handle.segment) or self._opened.get(handle.segment)
        if address is None:
            address = self._opened[handle.segment] = self._open(name, size)
        return address + handle.offset

    def _open(self, name: str, size: int) -> int:
        """Opens a segment and checks the announced size where the driver can report the real one."""
        exported, device = extents.parts_of(name)
        if device != self.cuda.uuid:
            raise HandleLost("the tensor is on another GPU than the model's instance")
        address = self.cuda.open(exported)
        try:
            room = self.cuda.room(address)
            if room < size:
                raise InvalidRequest(f"memory on the GPU has {room} bytes, and was announced with {size}")
        except BaseException:
            self.cuda.close_opened(address)
            raise
        return address

    def piece(self, handle: Handle, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DevicePiece:
        """Returns a handle's bytes as a tensor, without a copy."""
        piece = DevicePiece(self, self.address(handle), dtype, shape)
        if piece.nbytes != handle.size:
            raise InvalidRequest(
                f"a {dtype} tensor of shape {list(shape)} has {piece.nbytes} bytes, its handle {handle.size}"
            )
        return piece

    def fetch(self, piece: DevicePiece) -> Array:
        array = np.empty(piece.shape, piece.dtype)
        cuda = self.cuda
        if piece.nbytes:
            try:
                cuda.copy(address_of(array), piece.address, piece.nbytes, cuda.to_host, self._stream)
                cuda.synchronize_stream(self._stream)
            except cuda.errors as error:
                raise HandleLost(f"a tensor on the GPU can no longer be read: {error}") from error
        return array

    def store(self, handle: Handle, array: Array) -> None:
        """Copies from the host to a handle. Complete when this returns."""
        target, cuda = self.address(handle), self.cuda
        if array.nbytes:
            source = np.ascontiguousarray(array)
            try:
                cuda.copy(target, address_of(source), source.nbytes, cuda.to_device, self._stream)
                cuda.synchronize_stream(self._stream)
            except cuda.errors as error:
                raise HandleLost(f"memory on the GPU can no longer be written: {error}") from error

    def move(self, target: int, piece: DevicePiece) -> None:
        """Copies on the device. Complete when this returns."""
        self._within([(target, piece.address, piece.nbytes)])

    def spread(self, source: int, handles: Sequence[Handle], sizes: Sequence[int]) -> None:
        """Copies consecutive parts to several handles. Complete when this returns."""
        parts = []
        for handle, size in zip(handles, sizes, strict=True):
            parts.append((self.address(handle), source, size))
            source += size
        self._within(parts)

    def _within(self, parts: Sequence[tuple[int, int, int]]) -> None:
        cuda = self.cuda
        try:
            for target, source, size in parts:
                if size:
                    cuda.copy(target, source, size, cuda.within, self._stream)
            cuda.synchronize_stream(self._stream)
        except cuda.errors as error:
            raise cuda.failure(error) from error

    def forget(self, segment: int) -> None:
        """Closes a segment. Its owner will not refer to it again, but a batch on the device may still read it."""
        self._own.pop(segment, None)
        address = self._opened.pop(segment, None)
        if address is not None:
            self.cuda.settle()
            self.cuda.close_opened(address)

    def close(self) -> None:
        for segment in list(self._opened):
            self.forget(segment)
        self._own.clear()
        self.cuda.destroy_stream(self._stream)


def memory_of(mapped: Mapped) -> DeviceMemory:
    """Returns this process's device memory. Raises HandleLost if its model is not on a GPU."""
    memory = mapped.device()
    assert isinstance(memory, DeviceMemory)
    return memory
