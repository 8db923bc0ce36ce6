"""TensorRT: plans, on the GPU of this process.

Invariants: rows are copied directly from callers' memory to the device, and back to where they will be read. A batch
waits for the device once, at its end, and none of its memory is reused before that.

An instance has a context for each of its optimisation profiles, two sets of buffers for its largest batch, and CUDA
graphs for each set if configured. A batch allocates nothing, except for outputs whose shape is known only after the
run; then, and if shapes depend on values, batches do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.dtypes import elements
from shmserve.errors import InvalidRequest, ModelFailed, Unsupported
from shmserve.workers.backends.base import Backend, Context, OverlappingModel
from shmserve.workers.backends.cuda_graphs import CudaGraph, CudaGraphs, requested_graphs
from shmserve.workers.backends.device_pipeline import DeviceBatch, NoComputation, Pipeline, options_of
from shmserve.workers.backends.model_facts import completed
from shmserve.workers.backends.parameters import Parameters
from shmserve.workers.backends.tensorrt.engine import (
    LoadedEngine,
    ProfileShapes,
    check_batch,
    check_profiles,
    largest_batch,
    logger_of,
    match,
    open_engine,
    profiles_of,
)
from shmserve.workers.backends.tensorrt.profile import HostValues, Profile, allocator_of, no_profile
from shmserve.workers.batch.specs import model_inputs_of, model_outputs_of
from shmserve.workers.gpu import api
from shmserve.workers.gpu.api import tensorrt
from shmserve.workers.process.log import log_message

if TYPE_CHECKING:
    from shmserve.gpu.interface import GpuDevice
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.base import Computation
    from shmserve.workers.backends.device_pipeline import DeviceSlot
    from shmserve.workers.backends.tensorrt.engine import Shape
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.results import Results

Array = np.ndarray[Any, np.dtype[Any]]
STRATEGY = "execution_context_allocation_strategy"
_STRATEGIES = ("STATIC", "ON_PROFILE_CHANGE")


class TensorRT(Backend):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._cuda = api.open_device()
        self._trt = tensorrt()
        self._logger = logger_of(self._trt, log_message)
        self._engine: LoadedEngine | None = None

    def complete(self, config: ModelConfig) -> ModelConfig:
        if config.input and config.output:
            return config
        engine = self._open(config)
        return completed(config, engine.inputs, engine.outputs, largest_batch(config, engine))

    def load(self, config: ModelConfig) -> TensorRTModel:
        engine = self._open(config)
        match(config, engine, model_inputs_of(config), model_outputs_of(config))
        numbers = profiles_of(config, self.context.instance)
        check_profiles(config.name, engine, numbers)
        check_batch(config, engine, numbers)
        return TensorRTModel(self.context, config, engine, numbers, self._cuda, self._logger)

    def _open(self, config: ModelConfig) -> LoadedEngine:
        if self._engine is None:
            self._engine = open_engine(config, self.context, self._trt, self._logger, self._cuda.capability)
        return self._engine


class TensorRTModel(OverlappingModel):
    """`numbers`: those of the optimization profiles that the instance uses."""

    on_device = True

    def __init__(
        self,
        context: Context,
        config: ModelConfig,
        engine: LoadedEngine,
        numbers: Sequence[int],
        cuda: GpuDevice,
        logger: Any,
    ) -> None:
        self._cuda = cuda
        self._trt = tensorrt()
        self._logger = logger
        self._engine = engine
        self._model = config.name
        self._inputs = model_inputs_of(config)
        self._outputs = model_outputs_of(config)
        self._profiles: list[Profile] = []
        self._graphs: dict[int, CudaGraphs] = {}
        """By the number of the slot, as a graph always uses the same buffers."""
        self._allocators: dict[int, Any] = {}
        self._host: dict[int, HostValues] = {}
        self._pipeline = Pipeline(cuda, context.instance, options_of(config, context))
        try:
            self._prepare(config, numbers)
        except BaseException:
            self.close()
            raise

    def _prepare(self, config: ModelConfig, numbers: Sequence[int]) -> None:
        pipeline, strategy = self._pipeline, self._strategy(config)
        self._profiles += [
            Profile(self._engine, number, strategy, pipeline.compute, self._inputs, self._outputs) for number in numbers
        ]
        sizes = self._sizes(config)
        self._bind_allocators()

        def prepare(slot: DeviceSlot) -> None:
            slot.allocate(*sizes)
            self._capture(config, slot)

        prepare(pipeline.slots[0])
        self._cuda.synchronize_stream(pipeline.compute)
        self.overlaps = not self._allocators and not self._host and pipeline.overlaps(prepare)

    def close(self) -> None:
        """Releases resources in the order of their references. Not needed when the process ends."""
        self._pipeline.settle()
        self._profiles.clear()
        for allocator in self._allocators.values():
            allocator.close()
        for graphs in self._graphs.values():
            for graph in graphs.take_all():
                self._cuda.destroy_graph(graph)
        self._pipeline.close()
        self._allocators.clear()

    def _strategy(self, config: ModelConfig) -> Any:
        parameters = Parameters(config)
        name = parameters.text(STRATEGY, _STRATEGIES[0])
        if name not in _STRATEGIES:
            raise parameters.wrong(STRATEGY, f"one of {', '.join(_STRATEGIES)}")
        return self._trt.ExecutionContextAllocationStrategy.__members__[name]

    def _sizes(self, config: ModelConfig) -> tuple[list[int], list[int]]:
        """Returns the bytes of the inputs and outputs of the largest batch of any profile; 0 for those that have no
        buffer. Makes the memory of those."""
        engine = self._engine
        self._host |= {
            index: HostValues(spec, tuple(max(dim, 1) for dim in spec.shape))
            for index, spec in enumerate(self._inputs)
            if spec.name in engine.on_host
        }
        in_bytes = [0] * len(self._inputs)
        out_bytes = [0] * len(self._outputs)
        unknown: set[int] = set()
        for profile in self._profiles:
            for index, values in self._host.items():
                profile.address(self._inputs[index].name, values.address)
            shapes = profile.largest(config.max_batch_size)
            for index, (spec, shape) in enumerate(zip(self._inputs, shapes, strict=True)):
                in_bytes[index] = max(in_bytes[index], elements(shape) * spec.item, 1)
            if self._host:
                unknown.update(range(len(self._outputs)))  # they depend on values that are not known yet
                continue
            for index, shape in enumerate(profile.prepare(shapes)):
                out_bytes[index] = max(out_bytes[index], elements(shape) * self._outputs[index].item, 1)
                if -1 in shape:
                    unknown.add(index)
        for spec in self._outputs:
            if spec.name in engine.on_host:
                raise Unsupported(
                    f"output '{spec.name}' of model '{config.name}' is a shape tensor, which is not supported"
                )
        self._allocators |= {index: allocator_of(self._trt, self._cuda) for index in sorted(unknown)}
        return (
            [0 if index in self._host else size for index, size in enumerate(in_bytes)],
            [0 if index in unknown else size for index, size in enumerate(out_bytes)],
        )

    def _bind_allocators(self) -> None:
        """Provides memory for outputs of unknown shape, and for those that the configuration leaves out, because the
        engine writes them too."""
        configured = {spec.name: index for index, spec in enumerate(self._outputs)}
        for number, fact in enumerate(self._engine.outputs):
            index = configured.get(fact.name)
            if index is None:
                index = -1 - number
                self._allocators[index] = allocator_of(self._trt, self._cuda)
            allocator = self._allocators.get(index)
            for profile in self._profiles if allocator is not None else ():
                if not profile.context.set_output_allocator(fact.name, allocator):
                    raise ModelFailed(f"the engine takes no memory for output '{fact.name}'")

    def _bind(self, profile: Profile, slot: DeviceSlot, inputs: dict[int, int], outputs: dict[int, int]) -> None:
        """Sets the addresses of a run: those given, else the buffers of the slot."""
        for specs, addresses, chosen in (
            (self._inputs, slot.inputs, inputs),
            (self._outputs, slot.outputs, outputs),
        ):
            for index, spec in enumerate(specs):
                address = chosen.get(index) or addresses[index]
                if address:
                    profile.address(spec.name, address)

    def _capture(self, config: ModelConfig, slot: DeviceSlot) -> None:
        """Captures graphs. A run of the same shapes comes first, because the library initialises on first use."""
        cuda, stream = self._cuda, self._pipeline.compute
        graphs = self._graphs[slot.number] = CudaGraphs()
        if config.optimization is None or config.optimization.cuda is None or not config.optimization.cuda.graphs:
            return
        if self._allocators or self._host:
            log_message(f"model '{config.name}': no CUDA graphs, as shapes or memory depend on values", "warning")
            return
        for request in requested_graphs(config, self._inputs, ProfileShapes(self._engine, self._profiles[0].number)):
            profile = self._choose(request.shapes)
            self._bind(profile, slot, {}, {})
            outputs = tuple(profile.prepare(request.shapes))
            if not profile.run(stream):
                raise ModelFailed(f"the engine does not run: {self._logger.last}")
            cuda.synchronize_stream(stream)
            cuda.begin_capture(stream)
            try:
                captured = profile.run(stream)
            except BaseException:
                cuda.give_up_capture(stream)
                raise
            if not captured:
                cuda.give_up_capture(stream)
                log_message(
                    f"model '{config.name}': no CUDA graphs, the engine refuses: {self._logger.last}", "warning"
                )
                return
            graphs.add(CudaGraph(cuda.end_capture(stream), request.shapes, outputs, request.min_rows))

    # ------------------------------------------------------------------------------------ batches

    def begin(self, inputs: GatherGroup, outputs: Results) -> Computation:
        shapes = self._shapes(inputs)
        wanted = [index for index in range(len(self._outputs)) if outputs.needed(index)]
        if not wanted:
            inputs.computing()
            return NoComputation()
        self._choose(shapes)  # raises, with nothing to wait for
        with self._pipeline.batch() as slot:
            staged = self._queue(slot, inputs, outputs, shapes, wanted)
            return DeviceBatch(self._pipeline, slot, outputs, staged, inputs)

    def _shapes(self, inputs: GatherGroup) -> tuple[Shape, ...]:
        shapes = []
        for index, spec in enumerate(self._inputs):
            shape = inputs.shape(index)
            if shape is None:
                raise InvalidRequest(f"input '{spec.name}' is missing: the engine of model '{self._model}' needs it")
            shapes.append(shape)
        return tuple(shapes)

    def _choose(self, shapes: tuple[Shape, ...]) -> Profile:
        """Returns the profile that allows these shapes and is optimised for the most similar ones."""
        profiles = [profile for profile in self._profiles if profile.holds(shapes)]
        if not profiles:
            raise no_profile(self._model, self._profiles, self._inputs, shapes)
        return profiles[0] if len(profiles) == 1 else min(profiles, key=lambda profile: profile.distance(shapes))

    def _queue(
        self,
        slot: DeviceSlot,
        inputs: GatherGroup,
        outputs: Results,
        shapes: tuple[Shape, ...],
        wanted: list[int],
    ) -> list[tuple[int, Array]]:
        """Queues a batch. Returns the outputs that are copied to staging."""
        cuda, pipeline, rows = self._cuda, self._pipeline, inputs.rows
        for index, values in self._host.items():
            value = inputs.array(index)
            if value is None or value.nbytes > values.bytes:
                raise InvalidRequest(f"input '{self._inputs[index].name}' has more values than the model's dims allow")
            values.array(shapes[index])[...] = value
        graph = self._graphs[slot.number].find(shapes, rows)
        if graph is None:
            profile = self._choose(shapes)
            output_shapes = list(profile.prepare(shapes))
        else:
            output_shapes = [(rows, *shape[1:]) if rows else shape for shape in graph.outputs]
        in_place: dict[int, int] = {}
        for index, spec in enumerate(self._inputs):
            if index in self._host:
                continue
            place = slot.feed.address_on_device(inputs, index) if graph is None else 0
            if place:
                in_place[index] = place
            else:
                size = elements(shapes[index]) * spec.item
                slot.feed.put(inputs, index, spec.numpy, shapes[index], size, slot.inputs[index])
        pipeline.inputs_copied(slot)
        inputs.computing()
        targets: dict[int, tuple[Array, bool]] = {}
        near: dict[int, int] = {}
        for index in wanted:
            if -1 in output_shapes[index]:
                continue  # placed when the shape is known, after the run
            address = outputs.near(index, output_shapes[index]) if index not in self._allocators else None
            if address is None:
                targets[index] = slot.target(index, self._outputs[index], output_shapes[index], outputs)
            else:
                near[index] = address
        if graph is not None:
            cuda.launch(graph.handle, pipeline.compute)
        else:
            self._bind(profile, slot, in_place, near)
            if not profile.run(pipeline.compute):
                cuda.synchronize_stream(pipeline.compute)  # raises if the device failed
                raise ModelFailed(f"the engine does not run: {self._logger.last}")
        pipeline.computed(slot)
        for index, address in near.items() if graph is not None else ():  # a graph always writes to the same addresses
            size = elements(output_shapes[index]) * self._outputs[index].item
            cuda.copy(address, slot.outputs[index], size, cuda.within, pipeline.copy_out)
        for index in wanted:
            if index not in near:
                allocator = self._allocators.get(index)
                if index not in targets:
                    assert allocator is not None
                    targets[index] = slot.target(index, self._outputs[index], allocator.shape, outputs)
                pipeline.copy_to_host(
                    targets[index][0], slot.outputs[index] if allocator is None else allocator.address
                )
        pipeline.ended(slot)
        return [(index, array) for index, (array, placed) in targets.items() if not placed]
