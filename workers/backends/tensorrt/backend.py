"""TensorRT: plans, on the GPU of this process.

Invariants: rows are copied directly from callers' memory to the device, and back to where they will be read. A batch
waits for the device once, at its end, and none of its memory is reused before that.

An instance has a context for each of its optimisation profiles, buffers for its largest batch, a stream, and CUDA
graphs if configured. A batch allocates nothing, except for outputs whose shape is known only after the run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.dtypes import elements
from shmserve.errors import InvalidRequest, ModelFailed, ServeError, Unsupported
from shmserve.gpu.choice import open_device
from shmserve.workers.backends.base import Context, StackedBackend
from shmserve.workers.backends.device_buffers import PINNED_BYTES, PINNED_KNOB, Feed, Pinned, Staging, address_of
from shmserve.workers.backends.model_facts import completed
from shmserve.workers.backends.tensorrt.engine import (
    LoadedEngine,
    check_batch,
    check_profiles,
    largest_batch,
    logger_of,
    match,
    open_engine,
    profiles_of,
)
from shmserve.workers.backends.tensorrt.graphs import CudaGraph, CudaGraphs, requested_graphs
from shmserve.workers.backends.tensorrt.profile import HostValues, Profile, allocator_of, no_profile
from shmserve.workers.batch.specs import inputs_of, model_inputs_of, model_outputs_of
from shmserve.workers.gpu.api import PRIORITIES, tensorrt
from shmserve.workers.process.exit_codes import Exit
from shmserve.workers.process.log import log_message

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.tensorrt.engine import Shape
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.results import Results

Array = np.ndarray[Any, np.dtype[Any]]
STRATEGY = "execution_context_allocation_strategy"
_STRATEGIES = ("STATIC", "ON_PROFILE_CHANGE")
end_process = os._exit
"""Called after the device was lost. The broker starts a new process and identifies the request that caused the loss."""


class TensorRT(StackedBackend):
    on_device = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._cuda = open_device()
        self._trt = tensorrt()
        self._logger = logger_of(self._trt, log_message)
        self._engine: LoadedEngine | None = None
        self._profiles: list[Profile] = []
        self._graphs = CudaGraphs()
        self._buffers: list[int] = []
        self._allocators: dict[int, Any] = {}
        self._staging: dict[int, Staging] = {}
        self._streams: list[int] = []
        self._events: list[int] = []
        self._feed: Feed | None = None
        self._pinned: Pinned | None = None

    def complete(self, config: ModelConfig) -> ModelConfig:
        if config.input and config.output:
            return config
        engine = self._open(config)
        return completed(config, engine.inputs, engine.outputs, largest_batch(config, engine))

    def load(self, config: ModelConfig) -> None:
        engine = self._open(config)
        self._inputs = model_inputs_of(config)
        self._outputs = model_outputs_of(config)
        self._names = [spec.name for spec in inputs_of(config)]
        match(config, engine, self._inputs, self._outputs)
        numbers = profiles_of(config, self.context.instance)
        check_profiles(config.name, engine, numbers)
        check_batch(config, engine, numbers)
        self._model = config.name
        self._set_up(config)
        strategy = self._strategy(config)
        self._profiles = [
            Profile(engine, number, strategy, self._stream, self._inputs, self._outputs) for number in numbers
        ]
        self._make_buffers(config)
        self._cuda.synchronize_stream(self._stream)
        self._capture(config)

    def close(self) -> None:
        """Releases resources in the order of their references. Not needed when the process ends."""
        self._profiles = []
        for allocator in self._allocators.values():
            allocator.close()
        for graph in self._graphs.take_all():
            self._cuda.destroy_graph(graph)
        for buffer in self._buffers:
            self._cuda.free(buffer)
        for owner in (*self._staging.values(), self._feed, self._pinned):
            if owner is not None:
                owner.close()
        for event in self._events:
            self._cuda.destroy_event(event)
        for stream in self._streams:
            self._cuda.destroy_stream(stream)
        self._allocators, self._staging = {}, {}
        self._buffers, self._events, self._streams = [], [], []
        self._feed = self._pinned = self._engine = None

    # ------------------------------------------------------------------------------------ at load

    def _open(self, config: ModelConfig) -> LoadedEngine:
        if self._engine is None:
            self._engine = open_engine(config, self.context, self._trt, self._logger, self._cuda.capability)
        return self._engine

    def _strategy(self, config: ModelConfig) -> Any:
        given = config.parameters.get(STRATEGY)
        name = given.string_value if given is not None and given.string_value else _STRATEGIES[0]
        if name not in _STRATEGIES:
            raise InvalidRequest(f"parameter {STRATEGY} is '{name}', expected one of {', '.join(_STRATEGIES)}")
        return self._trt.ExecutionContextAllocationStrategy.__members__[name]

    def _set_up(self, config: ModelConfig) -> None:
        """Creates streams and events, and the objects that copy tensors."""
        cuda, optimization = self._cuda, config.optimization
        hints = optimization.cuda if optimization is not None else None
        priority = PRIORITIES[optimization.priority] if optimization is not None else 0
        self._stream = self._copy_stream = cuda.stream(priority)
        self._streams.append(self._stream)
        self._computed = 0
        if hints is not None and hints.output_copy_stream:
            self._copy_stream = cuda.stream(priority)
            self._streams.append(self._copy_stream)
            self._computed = cuda.event()
            self._events.append(self._computed)
        self._end = cuda.event(spin=hints is not None and hints.busy_wait_events)
        self._events.append(self._end)
        pinned_in = optimization.input_pinned_memory if optimization is not None else None
        pinned_out = optimization.output_pinned_memory if optimization is not None else None
        self._pin_outputs = pinned_out is None or pinned_out.enable
        threshold = optimization.gather_kernel_buffer_threshold if optimization is not None else 0
        self._pinned = Pinned(cuda, int(self.context.settings.get(PINNED_KNOB, PINNED_BYTES)))
        staged = pinned_in is None or pinned_in.enable
        self._feed = Feed(cuda, self._pinned, staged, threshold, self._stream)

    def _make_buffers(self, config: ModelConfig) -> None:
        """Allocates buffers for the largest batch of any profile and binds them in each context."""
        engine = self._engine
        assert engine is not None
        self._host = {
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
                in_bytes[index] = max(in_bytes[index], elements(shape) * spec.item)
            if self._host:
                unknown.update(range(len(self._outputs)))  # they depend on values that are not known yet
                continue
            for index, shape in enumerate(profile.prepare(shapes)):
                out_bytes[index] = max(out_bytes[index], elements(shape) * self._outputs[index].item)
                if -1 in shape:
                    unknown.add(index)
        for spec in self._outputs:
            if spec.name in engine.on_host:
                raise Unsupported(f"output '{spec.name}' of model '{config.name}' is a shape tensor, not supported")
        self._input_at = [0 if index in self._host else self._buffer(size) for index, size in enumerate(in_bytes)]
        self._output_at = [0 if index in unknown else self._buffer(size) for index, size in enumerate(out_bytes)]
        self._allocators = {index: allocator_of(self._trt, self._cuda) for index in sorted(unknown)}
        for profile in self._profiles:
            self._bind(profile)
        self._bind_unused(engine)

    def _bind(self, profile: Profile) -> None:
        for spec, address in zip(self._inputs, self._input_at, strict=True):
            if address:
                profile.address(spec.name, address)
        for index, spec in enumerate(self._outputs):
            allocator = self._allocators.get(index)
            if allocator is None:
                profile.address(spec.name, self._output_at[index])
            elif not profile.context.set_output_allocator(spec.name, allocator):
                raise ModelFailed(f"the engine takes no memory for output '{spec.name}'")

    def _bind_unused(self, engine: LoadedEngine) -> None:
        """Provides memory for outputs that the configuration leaves out, because the engine writes them too."""
        configured = {spec.name for spec in self._outputs}
        for number, fact in enumerate(engine.outputs):
            if fact.name in configured:
                continue
            allocator = self._allocators[-1 - number] = allocator_of(self._trt, self._cuda)
            for profile in self._profiles:
                if not profile.context.set_output_allocator(fact.name, allocator):
                    raise ModelFailed(f"the engine takes no memory for output '{fact.name}'")

    def _buffer(self, size: int) -> int:
        address = self._cuda.allocate(size)
        self._buffers.append(address)
        return address

    def _capture(self, config: ModelConfig) -> None:
        """Captures graphs. A run of the same shapes comes first, because the library initialises on first use."""
        engine, cuda = self._engine, self._cuda
        assert engine is not None
        if config.optimization is None or config.optimization.cuda is None or not config.optimization.cuda.graphs:
            return
        if self._allocators or self._host:
            log_message(f"model '{config.name}': no CUDA graphs, as shapes or memory depend on values", "warning")
            return
        for request in requested_graphs(config, engine, self._inputs, self._profiles[0].number):
            profile = self._choose(request.shapes)
            outputs = tuple(profile.prepare(request.shapes))
            if not profile.run(self._stream):
                raise ModelFailed(f"the engine does not run: {self._logger.last}")
            cuda.synchronize_stream(self._stream)
            cuda.begin_capture(self._stream)
            try:
                captured = profile.run(self._stream)
            except BaseException:
                cuda.give_up_capture(self._stream)
                raise
            if not captured:
                cuda.give_up_capture(self._stream)
                log_message(
                    f"model '{config.name}': no CUDA graphs, the engine refuses: {self._logger.last}", "warning"
                )
                return
            self._graphs.add(CudaGraph(cuda.end_capture(self._stream), request.shapes, outputs, request.least))

    # ------------------------------------------------------------------------------------ batches

    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        shapes = self._shapes(inputs)
        wanted = [index for index in range(len(self._outputs)) if outputs.needed(index)]
        if not wanted:
            inputs.computing()
            return
        cuda = self._cuda
        try:
            self._run(inputs, outputs, shapes, wanted)
        except cuda.errors as error:
            self._wait_after_failure(error)
            raise cuda.failure(error) from error
        except ServeError as error:
            self._wait_after_failure(error)
            raise

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

    def _run(self, inputs: GatherGroup, outputs: Results, shapes: tuple[Shape, ...], wanted: list[int]) -> None:
        cuda, stream, rows = self._cuda, self._stream, inputs.rows
        feed = self._feed
        assert feed is not None
        for index, values in self._host.items():
            given = inputs.array(index)
            if given is None or given.nbytes > values.bytes:
                raise InvalidRequest(f"input '{self._inputs[index].name}' has more values than the model's dims allow")
            values.array(shapes[index])[...] = given
        graph = self._graphs.find(shapes, rows) if len(self._graphs) else None
        if graph is None:
            profile = self._choose(shapes)
            output_shapes = list(profile.prepare(shapes))
        else:
            output_shapes = [(rows, *shape[1:]) if rows else shape for shape in graph.outputs]
        for index, spec in enumerate(self._inputs):
            if index in self._host:
                continue
            there = feed.address_on_device(inputs, index) if graph is None else 0
            if graph is None:
                profile.address(spec.name, there or self._input_at[index])
            if not there:
                size = elements(shapes[index]) * spec.item
                feed.put(inputs, index, spec.numpy, shapes[index], size, self._input_at[index])
        inputs.computing()
        targets: dict[int, tuple[Array, bool]] = {}
        near: dict[int, int] = {}
        for index in wanted:
            if -1 in output_shapes[index]:
                continue  # placed when the shape is known, after the run
            address = outputs.near(index, output_shapes[index]) if index not in self._allocators else None
            if address is None:
                targets[index] = self._target(index, output_shapes[index], outputs)
            else:
                near[index] = address
        if graph is not None:
            cuda.launch(graph.handle, stream)
        elif not self._run_profile(profile, near):
            cuda.synchronize_stream(stream)  # raises if the device failed
            raise ModelFailed(f"the engine does not run: {self._logger.last or 'the library gives no reason'}")
        if self._computed:
            cuda.record(self._computed, stream)
            cuda.wait_for(self._copy_stream, self._computed)
        for index, address in near.items() if graph is not None else ():  # a graph always writes to the same addresses
            size = elements(output_shapes[index]) * self._outputs[index].item
            cuda.copy(address, self._output_at[index], size, cuda.within, self._copy_stream)
        self._collect([index for index in wanted if index not in near], targets, outputs)

    def _run_profile(self, profile: Profile, near: dict[int, int]) -> bool:
        """Runs the profile with outputs that stay on the device written to their final place."""
        for index, spec in enumerate(self._outputs):
            if index not in self._allocators:
                profile.address(spec.name, near.get(index) or self._output_at[index])
        return profile.run(self._stream)

    def _target(self, index: int, shape: Shape, outputs: Results) -> tuple[Array, bool]:
        """Returns where to copy an output: its final place if possible, else staging, which `put` splits."""
        spec = self._outputs[index]
        if outputs.direct(index, shape):
            array = outputs.place(index, shape)
            assert self._pinned is not None
            self._pinned.ensure(array)
            return array, True
        staging = self._staging.get(index)
        if staging is None:
            staging = self._staging[index] = Staging(self._cuda, self._pin_outputs)
        return staging.bytes(elements(shape) * spec.item).view(spec.numpy).reshape(shape), False

    def _collect(self, wanted: list[int], targets: dict[int, tuple[Array, bool]], outputs: Results) -> None:
        cuda, stream = self._cuda, self._copy_stream
        for index in wanted:
            allocator = self._allocators.get(index)
            if index not in targets:
                assert allocator is not None
                targets[index] = self._target(index, allocator.shape, outputs)
            array, _ = targets[index]
            source = self._output_at[index] if allocator is None else allocator.address
            if array.nbytes:
                cuda.copy(address_of(array), source, array.nbytes, cuda.to_host, stream)
        cuda.record(self._end, stream)
        cuda.synchronize(self._end)
        for index in wanted:
            array, placed = targets[index]
            if not placed:
                outputs.put(index, array)

    def _wait_after_failure(self, error: Exception) -> None:
        """Waits for the streams of a failed batch, so that its memory can be reused. Exits if the device is lost."""
        cuda = self._cuda
        lost = cuda.lost(error)
        if not lost:
            try:
                for stream in self._streams:
                    cuda.synchronize_stream(stream)
            except cuda.errors as later:
                lost = cuda.lost(later)
                error = later
        if lost:
            log_message(
                f"model instance '{self.context.instance}': the GPU cannot be used any more by this process: {error}"
            )
            end_process(Exit.DEVICE_LOST)
