"""ONNX Runtime on the CPU.

The rule: the engine reads inputs where they are. Outputs that end up in messages are taken from a plain run, which is
the fastest call; outputs that end up in shared memory are bound there by pointer, so that the engine writes them once.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from shmserve.dtypes import elements
from shmserve.errors import InvalidRequest, NotFound, Unsupported
from shmserve.repo.complete import TensorFacts, complete_from_model
from shmserve.workers.backends import Context, StackedBackend
from shmserve.workers.specs import Spec, inputs_of, model_inputs_of, model_outputs_of, outputs_of

if TYPE_CHECKING:
    from pathlib import Path

    from shmserve.repo.schema import ModelConfig
    from shmserve.workers.gather import Group
    from shmserve.workers.scatter import Results

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(bfloat16)": "BF16",
    "tensor(string)": "BYTES",
}
_ONNX_BFLOAT16 = 16
"""Numpy has no bfloat16 that the engine knows, so it is bound by the number of the ONNX type."""

_GRAPH_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


class Onnx(StackedBackend):
    text = True
    fresh = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._session: Any = None

    def complete(self, config: ModelConfig) -> ModelConfig:
        if config.input and config.output:
            return config
        session = self._open(config)
        default = self.context.setting("onnxruntime", "default-max-batch-size", "4")
        return complete_from_model(
            config,
            _unknown(_facts(session.get_inputs()), model_inputs_of(config), inputs_of(config)),
            _unknown(_facts(session.get_outputs()), model_outputs_of(config), outputs_of(config)),
            default_max_batch=_integer("default-max-batch-size", default),
        )

    def load(self, config: ModelConfig) -> None:
        session = self._open(config)
        self._inputs = model_inputs_of(config)
        self._outputs = model_outputs_of(config)
        optional = [node.name for node in session.get_overridable_initializers()]
        _match(config.name, "input", self._inputs, _facts(session.get_inputs()), optional)
        _match(config.name, "output", self._outputs, _facts(session.get_outputs()), None)
        self._names = [spec.name for spec in self._outputs]
        self._run = session.run
        self._must_bind = any(spec.dtype == "BF16" for spec in (*self._inputs, *self._outputs))
        self._can_bind = all(spec.item for spec in self._inputs)
        if self._must_bind and not self._can_bind:
            raise Unsupported(f"model '{config.name}' has inputs of BYTES and tensors of BF16, not supported together")

    def close(self) -> None:
        self._session = self._run = None

    def execute(self, inputs: Group, outputs: Results) -> None:
        feeds = {}
        for index, spec in enumerate(self._inputs):
            array = inputs.array(index)
            if array is not None:
                feeds[spec.name] = array
        names = self._names
        wanted = [index for index in range(len(names)) if outputs.needed(index)]
        inputs.computing()
        if not wanted:
            return
        if self._can_bind:
            shapes = [self._known_shape(index, inputs.rows) for index in wanted]
            direct = [
                shape is not None and outputs.direct(index, shape) for index, shape in zip(wanted, shapes, strict=True)
            ]
            if self._must_bind or True in direct:
                self._run_bound(feeds, outputs, wanted, shapes, direct)
                return
        chosen = names if len(wanted) == len(names) else [names[index] for index in wanted]
        for index, value in zip(wanted, self._run(chosen, feeds), strict=True):
            outputs.put(index, value)

    def _known_shape(self, index: int, rows: int) -> tuple[int, ...] | None:
        """The shape of an output before it is computed, where the configuration leaves only the batch open."""
        spec = self._outputs[index]
        if not spec.fixed:
            return None
        return (rows, *spec.shape) if spec.batched else spec.shape

    def _run_bound(
        self,
        feeds: dict[str, Array],
        outputs: Results,
        wanted: list[int],
        shapes: list[tuple[int, ...] | None],
        direct: list[bool],
    ) -> None:
        binding = self._session.io_binding()
        for spec in self._inputs:
            array = feeds.get(spec.name)
            if array is not None:
                array = np.ascontiguousarray(array)
                feeds[spec.name] = array  # what is bound by pointer must stay until the run is over
                binding.bind_input(spec.name, "cpu", 0, _element(spec), array.shape, _address(array))
        copied: list[int] = []
        for index, shape, in_place in zip(wanted, shapes, direct, strict=True):
            spec = self._outputs[index]
            if in_place and shape is not None:
                target = outputs.place(index, shape)
                binding.bind_output(spec.name, "cpu", 0, _element(spec), target.shape, _address(target))
            else:
                binding.bind_output(spec.name, "cpu")
                copied.append(index)
        self._session.run_with_iobinding(binding)
        if copied:
            made = dict(zip(wanted, binding.get_outputs(), strict=True))
            for index in copied:
                outputs.put(index, _value(made[index], self._outputs[index]))

    def _open(self, config: ModelConfig) -> Any:
        if self._session is None:
            path = self._file(config)
            self._session = ort.InferenceSession(
                os.fspath(path), self._options(config), providers=["CPUExecutionProvider"]
            )
        return self._session

    def _file(self, config: ModelConfig) -> Path:
        name = config.default_model_filename or "model.onnx"
        path = self.context.version_folder / name
        if path.is_dir():
            path /= "model.onnx"
        if not path.is_file():
            raise NotFound(f"version {self.context.version} of model '{config.name}' has no file '{name}'")
        return path

    def _options(self, config: ModelConfig) -> Any:
        parameters = {key: value.string_value for key, value in config.parameters.items()}

        def number(key: str, default: int) -> int:
            text = parameters.get(key) or self.context.setting("onnxruntime", key)
            return _integer(key, text) if text else default

        options = ort.SessionOptions()
        options.log_severity_level = 3
        # More threads than this process may use cores only take turns; waiting for work by spinning takes the cores
        # from the other instances, the broker and the clients.
        threads = self.context.threads or len(os.sched_getaffinity(0))
        options.intra_op_num_threads = number("intra_op_thread_count", 0) or threads
        options.inter_op_num_threads = number("inter_op_thread_count", 0)
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        mode = number("execution_mode", 0)
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL if mode == 1 else ort.ExecutionMode.ORT_SEQUENTIAL
        options.enable_cpu_mem_arena = number("enable_mem_arena", 1) != 0
        options.enable_mem_pattern = number("enable_mem_pattern", 1) != 0
        graph = config.optimization.graph if config.optimization is not None else None
        level = graph.level if graph is not None else 0
        if level not in _GRAPH_LEVELS:
            raise InvalidRequest(
                f"optimization.graph.level {level} is none of -1 (basic), 0 (all), 1 (extended), 2 (off)"
            )
        options.graph_optimization_level = _GRAPH_LEVELS[level]
        for key, value in parameters.items():
            if key.startswith("session."):
                options.add_session_config_entry(key, value)
        return options


def _integer(key: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise InvalidRequest(f"parameter {key} must be a whole number from 0 on, not '{text}'")
    return number


def _element(spec: Spec) -> Any:
    return _ONNX_BFLOAT16 if spec.dtype == "BF16" else spec.numpy.type


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _value(value: Any, spec: Spec) -> Array:
    """What the engine has computed, as an array that is valid as long as `value`."""
    if spec.dtype != "BF16":
        array: Array = value.numpy()
        return array
    shape = tuple(value.shape())
    raw = (ctypes.c_uint16 * elements(shape)).from_address(value.data_ptr())
    return np.ndarray(shape, spec.numpy, memoryview(raw))


def _facts(nodes: Iterable[Any]) -> list[TensorFacts]:
    found = []
    for node in nodes:
        dtype = DTYPES.get(node.type)
        if dtype is None:
            raise Unsupported(f"tensor '{node.name}' of the model is a {node.type}, not supported")
        dims = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape or ())
        found.append(TensorFacts(node.name, dtype, dims))
    return found


def _unknown(facts: list[TensorFacts], known: Sequence[Spec], declared: Sequence[Spec]) -> list[TensorFacts]:
    """Without those that callers neither give nor get, unless the configuration says that they do."""
    names = {spec.name for spec in known} - {spec.name for spec in declared}
    return [fact for fact in facts if fact.name not in names]


def _match(model: str, kind: str, specs: Sequence[Spec], facts: list[TensorFacts], optional: list[str] | None) -> None:
    """The configuration must say what the model says. `optional`: names that the model has values for by itself;
    None: these are outputs, of which the configuration may leave some out."""
    by_name = {fact.name: fact for fact in facts}
    given = {spec.name for spec in specs}
    for spec in specs:
        fact = by_name.get(spec.name)
        if fact is None:
            if optional is not None and spec.name in optional:
                continue
            raise InvalidRequest(
                f"unable to load model '{model}': unexpected inference {kind} '{spec.name}', "
                f"allowed {kind}s are: {', '.join(by_name)}"
            )
        if fact.dtype != spec.dtype:
            raise InvalidRequest(
                f"unable to load model '{model}': {kind} '{spec.name}' is {spec.dtype} in the configuration and "
                f"{fact.dtype} in the model"
            )
        if spec.flat and optional is None:
            continue
        expected = (-1,) if spec.flat else ((-1,) if spec.batched else ()) + spec.shape
        if len(expected) != len(fact.dims) or any(
            -1 not in pair and pair[0] != pair[1] for pair in zip(expected, fact.dims, strict=True)
        ):
            raise InvalidRequest(
                f"unable to load model '{model}': {kind} '{spec.name}' has shape {list(expected)} in the "
                f"configuration{' (with the batch dimension)' if spec.batched else ''} and {list(fact.dims)} in the "
                "model"
            )
        if spec.batched and fact.dims[0] != -1:
            raise InvalidRequest(
                f"unable to load model '{model}': max_batch_size is above 0, but the first dimension of {kind} "
                f"'{spec.name}' is {fact.dims[0]} in the model; a batch needs a dynamic one. Set max_batch_size: 0"
            )
    missing = [name for name in by_name if name not in given]
    if missing and optional is not None:
        raise InvalidRequest(
            f"unable to load model '{model}', configuration expects {len(specs)} {kind}s, model provides "
            f"{len(facts)}: it also has {', '.join(missing)}"
        )
