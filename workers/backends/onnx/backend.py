"""ONNX Runtime.

Invariant: the engine reads inputs in place. Outputs that end up in messages come from a plain run, which is the fastest
call; outputs that end up in shared memory are bound there by address, so that the engine writes them once.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnxruntime as ort

from shmserve.errors import ModelFailed, ServeError, Unavailable, Unsupported
from shmserve.repo.config.complete import with_scalars
from shmserve.workers.backends.base import Backend, Context, GpuTensor, StackedModel
from shmserve.workers.backends.model_facts import completed, match, none_missing
from shmserve.workers.backends.onnx.facts import engine_text, facts_of
from shmserve.workers.backends.onnx.graphs import OnnxGraphs
from shmserve.workers.backends.onnx.options import SessionPlan, plan
from shmserve.workers.backends.onnx.providers import not_started
from shmserve.workers.backends.onnx.run import Binding, OutputTarget, needs_own_binding, runner_of
from shmserve.workers.batch.specs import Spec, model_inputs_of, model_outputs_of
from shmserve.workers.process.device import device_of, visible_number
from shmserve.workers.process.log import log_message

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.device_inputs import DeviceInputs
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.results import Results

Array = np.ndarray[Any, np.dtype[Any]]
_FILE = "model.onnx"


class OpenSession(NamedTuple):
    session: Any
    plan: SessionPlan
    run_options: Any


class Onnx(Backend):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._opened: OpenSession | None = None

    def complete(self, config: ModelConfig) -> ModelConfig:
        if config.input and config.output:
            return config
        session = self._open(config).session
        needed = [entry.name for entry in config.output] or None
        inputs, outputs = facts_of(session.get_inputs()), facts_of(session.get_outputs(), needed)
        return completed(config, inputs, outputs, self.context.default_max_batch("onnxruntime"))

    def fitted(self, config: ModelConfig) -> ModelConfig:
        session = self._open(config).session
        return with_scalars(config, facts_of(session.get_inputs()), facts_of(session.get_outputs(), ()))

    def load(self, config: ModelConfig) -> OnnxModel:
        opened = self._open(config)
        session = opened.session
        inputs, outputs = model_inputs_of(config), model_outputs_of(config)
        optional = facts_of(session.get_overridable_initializers(), ())
        needed = facts_of(session.get_inputs())
        match(config.name, "input", inputs, needed, optional=optional, flat=(-1,))
        none_missing(config.name, inputs, needed)
        match(config.name, "output", outputs, facts_of(session.get_outputs(), [spec.name for spec in outputs]))
        plan = opened.plan
        on_gpu = not plan.on_host and not plan.captures and _can_bind(inputs, outputs)
        return OnnxModel(config, opened, device_inputs(self.context, config.name, plan) if on_gpu else None)

    def _setting(self, key: str) -> str:
        return self.context.setting("onnxruntime", key)

    def planned(self, config: ModelConfig) -> SessionPlan:
        kind, device = device_of(config, self.context.instance)
        providers, threads = ort.get_available_providers(), self.context.engine_threads
        return plan(config, f"KIND_{kind}", visible_number(device), providers, threads, self._setting)

    def _open(self, config: ModelConfig) -> OpenSession:
        if self._opened is None:
            path = self.context.model_file(config, _FILE, exists=_is_model)
            path = path / _FILE if path.is_dir() else path
            session_plan = self.planned(config)
            for note in session_plan.notes:
                log_message(f"model '{config.name}': {note}")
            session = _start(config.name, path, session_plan, self.context.operator_libraries(config))
            self._opened = OpenSession(session, session_plan, _run_options(session_plan))
        return self._opened


class OnnxModel(StackedModel):
    text = True
    fresh = True

    def __init__(self, config: ModelConfig, opened: OpenSession, near: DeviceInputs | None) -> None:
        self._session, self._plan, self._options = opened
        self._inputs = model_inputs_of(config)
        self._outputs = model_outputs_of(config)
        self._names = [spec.name for spec in self._outputs]
        self._run = runner_of(self._session).run
        self._must_bind = _must_bind(self._inputs, self._outputs)
        self._can_bind = _can_bind(self._inputs, self._outputs)
        self._binding = Binding(self._session, self._plan.on_host)
        self.on_device = near is not None
        self._near = near
        self._graphs: OnnxGraphs | None = None
        if self._plan.captures:
            device = ("cuda", self._plan.device)
            self._graphs = OnnxGraphs(config.name, self._session, device, self._inputs, self._outputs)

    def close(self) -> None:
        if self._near is not None:
            self._near.close()

    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        if self._near is None:
            arrays: list[Any] = [inputs.array(index) for index in range(len(self._inputs))]
        else:
            with self._near.copies():  # those on the GPU, or copied there, are addresses
                specs = enumerate(self._inputs)
                arrays = [self._near.locate(inputs, index, spec) or inputs.array(index) for index, spec in specs]
        wanted = [index for index in range(len(self._names)) if outputs.needed(index)]
        inputs.computing()
        if not wanted:
            return
        try:
            self._compute(arrays, inputs.rows, wanted, outputs)
        except ServeError:
            raise
        except Exception as error:
            raise ModelFailed(f"{type(error).__name__}: {engine_text(error)}") from error

    def _compute(self, arrays: list[Any], rows: int, wanted: list[int], outputs: Results) -> None:
        if self._graphs is not None and (recorded := self._graphs.of(arrays, rows)) is not None:
            computed = recorded.run([array for array in arrays if array is not None])
            for index in wanted:
                outputs.put(index, computed[index])
            return
        if self._can_bind:
            shapes = [self._known_shape(index, rows) for index in wanted]
            places = [self._place(outputs, index, shape) for index, shape in zip(wanted, shapes, strict=True)]
            near = self._near is not None and any(isinstance(array, GpuTensor) for array in arrays)
            if self._must_bind or near or any(place is not None for place in places):
                self._run_bound(arrays, outputs, wanted, places)
                return
        names = self._names
        feeds = {spec.name: array for spec, array in zip(self._inputs, arrays, strict=True) if array is not None}
        chosen = names if len(wanted) == len(names) else [names[index] for index in wanted]
        for index, value in zip(wanted, self._run(chosen, feeds, self._options), strict=True):
            outputs.put(index, value)

    def _known_shape(self, index: int, rows: int) -> tuple[int, ...] | None:
        """Returns the shape of an output before the run, if only its batch dimension varies."""
        spec = self._outputs[index]
        if not spec.fixed:
            return None
        return (rows, *spec.shape) if spec.batched else spec.shape

    def _run_bound(
        self,
        arrays: list[Any],
        outputs: Results,
        wanted: list[int],
        places: list[Array | GpuTensor | None],
    ) -> None:
        bound_inputs = [(spec, array) for spec, array in zip(self._inputs, arrays, strict=True) if array is not None]
        targets = [OutputTarget(self._outputs[index], place) for index, place in zip(wanted, places, strict=True)]
        binding = self._binding
        if needs_own_binding(targets):
            binding = Binding(self._session, self._plan.on_host, once=True)
        values = iter(binding.run(bound_inputs, targets, self._options))
        for index, target in zip(wanted, targets, strict=True):
            if target.array is None:
                outputs.put(index, next(values))

    def _place(self, outputs: Results, index: int, shape: tuple[int, ...] | None) -> Array | GpuTensor | None:
        """Returns the memory where readers read an output, on the host or on the GPU, if the engine can write there."""
        if shape is None:
            return None
        address = outputs.near(index, shape) if self._near is not None else None
        if address is not None:
            return GpuTensor(address, shape)
        if not outputs.direct(index, shape):
            return None
        array = outputs.place(index, shape)
        if self._near is not None:
            self._near.pin(array)
        return array


def _must_bind(inputs: Sequence[Spec], outputs: Sequence[Spec]) -> bool:
    return any(spec.dtype == "BF16" for spec in (*inputs, *outputs))


def _can_bind(inputs: Sequence[Spec], outputs: Sequence[Spec]) -> bool:
    return _must_bind(inputs, outputs) or all(spec.item for spec in inputs)


def device_inputs(context: Context, model: str, plan: SessionPlan) -> DeviceInputs:
    """Returns the inputs on the GPU. Large ones on the host are copied there too, if this process can do that."""
    # Without a GPU, these modules are not imported.
    from shmserve.workers.backends.device_buffers import pinned_limit
    from shmserve.workers.backends.device_inputs import DeviceInputs
    from shmserve.workers.gpu import api

    if plan.device != 0:
        return DeviceInputs()  # the process sees several GPUs, and uses another than its first one
    try:
        cuda = api.open_device()
    except (Unavailable, Unsupported) as error:  # CuPy is missing, or needs a newer driver than ONNX Runtime
        log_message(f"model '{model}': ONNX Runtime copies the tensors to the GPU: {error}")
        return DeviceInputs()
    return DeviceInputs(cuda, pinned_limit(context.settings))


def _start(model: str, path: Path, session_plan: SessionPlan, libraries: list[Path]) -> Any:
    try:
        options = _session_options(session_plan)
        for library in libraries:
            options.register_custom_ops_library(os.fspath(library))
        data = _unreachable(path.parent)
        if data:
            sizes = [len(mapped) for mapped in data.values()]
            options.add_external_initializers_from_files_in_memory([*data], [*data.values()], sizes)
        # Without this, a provider that does not start is silently replaced by another.
        session = ort.InferenceSession(
            os.fspath(path), options, providers=list(session_plan.providers), enable_fallback=0
        )
    except Exception as error:
        raise ModelFailed(f"unable to load model '{model}': {type(error).__name__}: {engine_text(error)}") from error
    running = session.get_providers()
    for name in session_plan.required:
        if name not in running:
            raise not_started(model, name)
    return session


def _is_model(path: Path) -> bool:
    """Whether the path is a file, or a directory with one."""
    return path.is_file() or (path / _FILE).is_file()


def _unreachable(folder: Path) -> dict[str, mmap.mmap]:
    """Maps files that were replaced in the repository and are kept by descriptor: ONNX Runtime looks for external data
    at the target of the link, which no longer exists."""
    contents = {}
    for directory, _, names in os.walk(folder):
        for path in (Path(directory, name) for name in names if not name.endswith(".onnx")):
            if (
                path.is_symlink()
                and path.is_file()
                and path.stat().st_size
                and not os.path.exists(os.path.realpath(path))
            ):
                with path.open("rb") as file:
                    contents[str(path.relative_to(folder))] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return contents


def _session_options(session_plan: SessionPlan) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    for key, value in session_plan.attributes.items():
        match key:
            case "execution_mode":
                value = getattr(ort.ExecutionMode, str(value))
            case "graph_optimization_level":
                value = getattr(ort.GraphOptimizationLevel, str(value))
            case "enable_cpu_mem_arena" | "enable_mem_pattern" | "use_per_session_threads":
                value = bool(value)
        setattr(options, key, value)
    for key, text in session_plan.entries.items():
        options.add_session_config_entry(key, text)
    if session_plan.pool is not None:
        ort.set_global_thread_pool_sizes(*session_plan.pool)
    if session_plan.arena is not None:
        memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(memory, ort.OrtArenaCfg(session_plan.arena))
    return options


def _run_options(session_plan: SessionPlan) -> Any:
    if not session_plan.run:
        return None
    options = ort.RunOptions()
    for key, text in session_plan.run.items():
        options.add_run_config_entry(key, text)
    return options
