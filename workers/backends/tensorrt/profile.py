"""An optimisation profile of an engine, with its execution context and tensor addresses.

Invariant: input shapes are set before output shapes are read, and addresses before a run. Values that have not changed
since the last batch are not set again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.dtypes import elements
from shmserve.errors import InvalidRequest, ModelFailed

if TYPE_CHECKING:
    from shmserve.gpu.interface import GpuDevice
    from shmserve.workers.backends.tensorrt.engine import LoadedEngine, Shape
    from shmserve.workers.batch.specs import Spec

Array = np.ndarray[Any, np.dtype[Any]]


class Profile:
    """A context on one profile. Inputs and outputs are identified by their index in the configuration."""

    def __init__(
        self,
        engine: LoadedEngine,
        number: int,
        strategy: Any,
        stream: int,
        inputs: Sequence[Spec],
        outputs: Sequence[Spec],
    ) -> None:
        self.number = number
        self._engine = engine
        self._inputs = inputs
        self._outputs = outputs
        self.context = engine.engine.create_execution_context(strategy)
        if self.context is None:
            free = "the device may have too little memory left"
            raise ModelFailed(f"an execution context of the engine for profile {number} cannot be made: {free}")
        if not self.context.set_optimization_profile_async(number, stream):
            raise ModelFailed(f"profile {number} of the engine cannot be chosen")
        self._on_device = [index for index, spec in enumerate(inputs) if spec.name not in engine.on_host]
        self.ranges = {index: engine.range_of(inputs[index].name, number) for index in self._on_device}
        self._addresses: dict[str, int] = {}
        self._shapes: tuple[Shape, ...] | None = None
        self._output_shapes: list[Shape] = []

    def holds(self, shapes: Sequence[Shape]) -> bool:
        return all(self.ranges[index].holds(shapes[index]) for index in self._on_device)

    def distance(self, shapes: Sequence[Shape]) -> int:
        """Returns how far these shapes are from the optimum of the profile."""
        return sum(
            abs(dim - best)
            for index in self._on_device
            for dim, best in zip(shapes[index], self.ranges[index].best, strict=True)
        )

    def largest(self, max_batch: int) -> tuple[Shape, ...]:
        shapes = []
        for index, spec in enumerate(self._inputs):
            limits = self.ranges.get(index)
            if limits is None:
                shapes.append(tuple(max(dim, 1) for dim in spec.shape))
            elif spec.batched:
                rows = max(limits.low[0], min(max_batch, limits.high[0]))
                shapes.append((rows, *limits.high[1:]))
            else:
                shapes.append(limits.high)
        return tuple(shapes)

    def address(self, name: str, address: int) -> None:
        """Sets the address of a tensor, from the next run on."""
        if self._addresses.get(name) == address:
            return
        if not self.context.set_tensor_address(name, address):
            raise ModelFailed(f"the engine does not take the address of tensor '{name}'")
        self._addresses[name] = address

    def prepare(self, shapes: tuple[Shape, ...]) -> list[Shape]:
        """Sets the input shapes. Returns the output shapes, with -1 for dims that are known only after the run."""
        context = self.context
        if shapes == self._shapes and not self._engine.on_host:
            return self._output_shapes
        self._shapes = None
        for spec, shape in zip(self._inputs, shapes, strict=True):
            if not context.set_input_shape(spec.name, shape):
                raise InvalidRequest(f"the engine does not take shape {list(shape)} of input '{spec.name}'")
        missing = context.infer_shapes()
        if missing:
            raise ModelFailed(f"the engine does not define the shapes of {', '.join(missing)}")
        self._output_shapes = [tuple(context.get_tensor_shape(spec.name)) for spec in self._outputs]
        self._shapes = shapes
        return self._output_shapes

    def run(self, stream: int) -> bool:
        """Enqueues a run in the stream. False: the engine refused; its logger has the reason."""
        return bool(self.context.execute_async_v3(stream))


def no_profile(
    model: str, profiles: Sequence[Profile], specs: Sequence[Spec], shapes: Sequence[Shape]
) -> InvalidRequest:
    described = ", ".join(f"'{spec.name}' {list(shape)}" for spec, shape in zip(specs, shapes, strict=True))
    allowed = "; ".join(
        f"profile {profile.number}: "
        + ", ".join(f"'{specs[index].name}' {limits}" for index, limits in profile.ranges.items())
        for profile in profiles
    )
    return InvalidRequest(
        f"inputs of model '{model}' are outside of what its engine was built for: {described}; {allowed}"
    )


def allocator_of(trt: Any, cuda: GpuDevice) -> Any:
    """Returns an allocator for one output whose shape is known only after the run. Its memory grows and is reused."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.shape: tuple[int, ...] = ()
            self.address = 0
            self._size = 0

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            if size > self._size or not self.address:
                self.close()
                self.address = cuda.allocate(size)
                self._size = size
            return self.address

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            return self.reallocate_output_async(tensor_name, memory, size, alignment, 0)

        def notify_shape(self, tensor_name: str, shape: Sequence[int]) -> None:
            self.shape = tuple(shape)

        def close(self) -> None:
            address, self.address = self.address, 0
            self._size = 0
            if address:
                cuda.free(address)

    return Allocator()


class HostValues:
    """The values of a tensor that the library reads or writes in host memory."""

    def __init__(self, spec: Spec, shape: Shape) -> None:
        self._dtype = spec.numpy
        self.bytes = max(elements(shape) * spec.item, 1)
        self._memory = (ctypes.c_ubyte * max(self.bytes, 64))()
        self.address = ctypes.addressof(self._memory)

    def array(self, shape: Shape) -> Array:
        return np.ndarray(shape, self._dtype, memoryview(self._memory))
