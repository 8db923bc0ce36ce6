"""Batches of a PyTorch model on its GPU: inputs are copied directly from callers' memory to buffers of the batch, and
results directly to where they will be read, so that a batch can be queued while another one is on the device.

Invariant: the model runs in one stream. A result is kept until the copy of its bytes has ended, so PyTorch does not
reuse its memory before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from msgspec import Struct

from shmserve.dtypes import elements
from shmserve.errors import ModelFailed, Unavailable, Unsupported
from shmserve.workers.backends.cuda_graphs import CudaGraph, CudaGraphs, GraphRequest, requested_graphs
from shmserve.workers.backends.device_pipeline import DeviceBatch, NoComputation, Pipeline
from shmserve.workers.backends.pytorch import device
from shmserve.workers.backends.pytorch.programs import DTYPES
from shmserve.workers.batch.specs import matches, model_inputs_of, model_outputs_of
from shmserve.workers.process.log import log_message

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.base import Computation
    from shmserve.workers.backends.cuda_graphs import Shape
    from shmserve.workers.backends.device_pipeline import DeviceSlot
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.results import Results
    from shmserve.workers.batch.specs import Spec

Array = np.ndarray[Any, np.dtype[Any]]


class Captured(Struct):
    """A graph: the addresses that it reads and writes, by the index of the tensor."""

    replay: Callable[[], None]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class ConfiguredShapes:
    """The shapes of the configuration, for graphs: a PyTorch model does not name those that it accepts."""

    def __init__(self, config: ModelConfig) -> None:
        self._batched = config.max_batch_size > 0

    def best(self, spec: Spec) -> Shape:
        shape = (1, *spec.shape) if self._batched else spec.shape
        if -1 in spec.shape:
            raise Unsupported(
                f"a graph has fixed shapes, and input '{spec.name}' has the shape {list(spec.shape)}: set its dims in "
                "graph_spec of optimization.cuda"
            )
        return shape

    def refusal(self, spec: Spec, shape: Shape) -> str:
        dims = shape[1:] if self._batched else shape
        fits = matches(dims, spec.shape) and all(dim > 0 for dim in dims)
        return "" if fits else f"does not fit the shape of the configuration, {list(spec.shape)}"


class GpuBatches:
    def __init__(
        self,
        pipeline: Pipeline,
        config: ModelConfig,
        place: torch.device,
        compute: Callable[[list[Any]], list[Any]],
        to_host: Callable[[Spec, Any, int], Array],
        copied: set[int],
    ) -> None:
        """Owns the pipeline. `compute` runs the model on the inputs. `to_host` checks a result and returns it as an
        array. `copied`: the inputs that the model may write to or keep."""
        self._pipeline = pipeline
        self._config = config
        self._place = place
        self._inputs, self._outputs = model_inputs_of(config), model_outputs_of(config)
        self._compute = compute
        self._to_host = to_host
        self._copied = copied
        self._graphs: dict[int, CudaGraphs] = {}
        """By the number of the slot, as a graph always uses the same buffers."""
        try:
            self._stream = device.stream_of(pipeline.compute, place)
            self._pool: Any = None
            self._prepare(pipeline.slots[0])
            self.overlaps = pipeline.overlaps(self._prepare)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._pipeline.settle()
        self._graphs.clear()
        self._pipeline.close()

    # ------------------------------------------------------------------------------------ at load

    def _prepare(self, slot: DeviceSlot) -> None:
        """Allocates the inputs of the largest batch, as far as the configuration says their size; others grow. Results
        are in memory of PyTorch, except for those of graphs."""
        rows = max(self._config.max_batch_size, 1)
        sizes = [
            elements(spec.shape) * spec.item * (rows if spec.batched else 1) if -1 not in spec.shape else 0
            for spec in self._inputs
        ]
        slot.allocate(sizes, [0] * len(self._outputs))
        self._capture(slot)

    def _capture(self, slot: DeviceSlot) -> None:
        """Captures the graphs of a slot, the largest first: the others fit into its memory."""
        graphs = self._graphs[slot.number] = CudaGraphs()
        config = self._config
        try:
            requests = requested_graphs(config, self._inputs, ConfiguredShapes(config))
        except Unsupported as error:
            self._log_uncaptured(str(error))
            return
        requests.sort(key=lambda request: -sum(map(elements, request.shapes)))
        for request in requests:
            try:
                graphs.add(self._captured(slot, request))
            except Exception as error:
                self._pipeline.failed(error)
                shapes = ", ".join(str(list(shape)) for shape in request.shapes)
                self._log_uncaptured(f"inputs {shapes}: {type(error).__name__}: {error}")
                return

    def _log_uncaptured(self, why: str) -> None:
        log_message(f"model '{self._config.name}': batches run without CUDA graphs: {why}", "warning")

    def _captured(self, slot: DeviceSlot, request: GraphRequest) -> CudaGraph:
        addresses = [
            slot.grow(slot.inputs, index, max(elements(shape) * spec.item, 1))
            for index, (spec, shape) in enumerate(zip(self._inputs, request.shapes, strict=True))
        ]
        tensors = [
            device.over(address, shape, spec, self._place)
            for address, shape, spec in zip(addresses, request.shapes, self._inputs, strict=True)
        ]
        if self._pool is None:
            self._pool = device.graph_pool()
        with device.running_in(self._stream):
            for tensor in tensors:
                tensor.zero_()
            shapes = [
                self._shape(spec, value) for spec, value in zip(self._outputs, self._compute(tensors), strict=True)
            ]
        results = [
            device.over(slot.grow(slot.outputs, index, max(elements(shape) * spec.item, 1)), shape, spec, self._place)
            for index, (spec, shape) in enumerate(zip(self._outputs, shapes, strict=True))
        ]
        slot.fix()

        def run() -> None:
            for result, value in zip(results, self._compute(tensors), strict=True):
                result.copy_(value)

        replay = device.capture(run, self._stream, self._pool)
        captured = Captured(replay, tuple(addresses), tuple(slot.outputs))
        return CudaGraph(captured, request.shapes, tuple(shapes), request.min_rows)

    def _shape(self, spec: Spec, value: Any) -> Shape:
        """Returns the shape of a result that a graph can write."""
        if not self._is_here(spec, value):
            kind = f"{value.dtype} on {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ModelFailed(f"output '{spec.name}' is {kind}, not a {spec.dtype} tensor on the GPU")
        return tuple(value.shape)

    def _is_here(self, spec: Spec, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.device.type == self._place.type
            and DTYPES.get(value.dtype) == spec.dtype
        )

    # ------------------------------------------------------------------------------------ batches

    def begin(self, inputs: GatherGroup, outputs: Results) -> Computation:
        wanted = [index for index in range(len(self._outputs)) if outputs.needed(index)]
        if not wanted:
            inputs.computing()
            return NoComputation()
        with self._pipeline.batch() as slot:
            return self._queue(slot, inputs, outputs, wanted)

    def _queue(self, slot: DeviceSlot, inputs: GatherGroup, outputs: Results, wanted: list[int]) -> DeviceBatch:
        pipeline, rows = self._pipeline, inputs.rows
        shapes = [inputs.shape(index) for index in range(len(self._inputs))]
        known = tuple(shape for shape in shapes if shape is not None)
        match = self._graphs[slot.number].find(known, rows) if len(known) == len(shapes) else None
        graph: Captured | None = match.handle if match is not None else None
        tensors = [self._input(slot, graph, inputs, index, shape) for index, shape in enumerate(shapes)]
        pipeline.inputs_copied(slot)
        inputs.computing()
        staged: list[tuple[int, Array]] = []
        copies: list[tuple[Array, int]] = []
        kept: list[Any] = [inputs]
        with device.running_in(self._stream):
            if graph is not None and match is not None:
                graph.replay()
                for index in wanted:
                    shape = match.outputs[index]
                    shape = (rows, *shape[1:]) if rows else shape
                    value = device.over(graph.outputs[index], shape, self._outputs[index], self._place)
                    self._collect(slot, index, value, graph.outputs[index], outputs, staged, copies)
            else:
                values = self._compute([self._own(index, tensor) for index, tensor in enumerate(tensors)])
                for index in wanted:
                    spec, value = self._outputs[index], values[index]
                    if not self._is_here(spec, value):
                        staged.append((index, self._to_host(spec, value, rows)))
                        continue
                    value = value.detach().resolve_conj().resolve_neg().contiguous()
                    kept.append(value)
                    self._collect(slot, index, value, device.address_of(value), outputs, staged, copies)
        pipeline.computed(slot)
        for array, source in copies:
            pipeline.copy_to_host(array, source)
        pipeline.ended(slot)
        return DeviceBatch(pipeline, slot, outputs, staged, kept)

    def _input(
        self, slot: DeviceSlot, graph: Captured | None, inputs: GatherGroup, index: int, shape: Shape | None
    ) -> tuple[Any, bool] | None:
        """Queues the copies of an input. Returns it as a tensor, and whether it is in memory of its sender; None: it is
        absent."""
        spec = self._inputs[index]
        if shape is None:
            return None
        address = slot.feed.address_on_device(inputs, index) if graph is None else 0
        in_place = bool(address)
        if not in_place:
            size = elements(shape) * spec.item
            address = self._buffer(slot, index, max(size, 1)) if graph is None else graph.inputs[index]
            slot.feed.put(inputs, index, spec.numpy, shape, size, address)
        return (device.over(address, shape, spec, self._place) if graph is None else None), in_place

    def _buffer(self, slot: DeviceSlot, index: int, size: int) -> int:
        try:
            return slot.grow(slot.inputs, index, size)
        except Unavailable:
            device.free_cached()
            return slot.grow(slot.inputs, index, size)

    def _own(self, index: int, piece: tuple[Any, bool] | None) -> Any:
        """Returns an input that the model may write to, if it does."""
        if piece is None:
            return None
        tensor, in_place = piece
        return tensor.clone() if in_place and index in self._copied else tensor

    def _collect(
        self,
        slot: DeviceSlot,
        index: int,
        value: Any,
        address: int,
        outputs: Results,
        staged: list[tuple[int, Array]],
        copies: list[tuple[Array, int]],
    ) -> None:
        """Notes where to copy a result, or copies it on the GPU if all its readers are there."""
        spec, shape = self._outputs[index], tuple(value.shape)
        near = outputs.near(index, shape)
        if near is not None:
            device.over(near, shape, spec, self._place).copy_(value)
            return
        array, placed = slot.target(index, spec, shape, outputs)
        copies.append((array, address))
        if not placed:
            staged.append((index, array))
