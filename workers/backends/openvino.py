"""OpenVINO: `model.xml` with its weights in `model.bin`, and the other formats that the engine reads.

Invariant: the engine reads inputs in place, and writes outputs of known shape to where they will be read.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shmserve.dtypes import BY_NAME
from shmserve.errors import InvalidRequest, ModelFailed, Unsupported
from shmserve.repo.config.complete import TensorFacts
from shmserve.shm.views import address_of
from shmserve.workers.backends.base import Backend, Context, StackedModel
from shmserve.workers.backends.model_facts import completed, match, none_missing, none_optional, unexpected
from shmserve.workers.backends.parameters import Parameters
from shmserve.workers.batch.specs import Spec, model_inputs_of, model_outputs_of
from shmserve.workers.process.device import device_of

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.results import Results

Array = np.ndarray[Any, np.dtype[Any]]


def _engine() -> Any:
    """Imports the engine with its telemetry disabled, which would report the import over the network if installed."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


ov = _engine()
DTYPES = {"boolean": "BOOL"} | {
    name.replace("uint", "u").replace("int", "i").replace("float", "f"): dtype for name, dtype in BY_NAME.items()
}
_HINTS = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT", "UNDEFINED")


class OpenNetwork(NamedTuple):
    core: Any
    network: Any


class OpenVino(Backend):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._opened: OpenNetwork | None = None

    def complete(self, config: ModelConfig) -> ModelConfig:
        if config.input and config.output:
            return config
        model = self._open(config, Parameters(config)).network
        default = self.context.default_max_batch("openvino")
        return completed(config, _facts(model.inputs, False), _facts(model.outputs, False), default)

    def load(self, config: ModelConfig) -> OpenVinoModel:
        parameters = Parameters(config)
        inputs, outputs = model_inputs_of(config), model_outputs_of(config)
        core, network = self._open(config, parameters)
        _match_inputs(config.name, inputs, network.inputs)
        if parameters.flag("RESHAPE_IO_LAYERS", False):
            _reshape(config.name, network, {spec.name: [-1] * spec.batched + [*spec.shape] for spec in inputs})
        batch, pads = _batch(config, network, inputs, outputs, parameters)
        match(config.name, "input", inputs, _facts(network.inputs), batch=batch)
        match(config.name, "output", outputs, _facts(network.outputs), batch=batch)
        device = _device(config, self.context.instance, parameters, core.available_devices)
        compiled = core.compile_model(network, device, self._options(parameters))
        ports = _places(inputs, network.inputs), _places(outputs, network.outputs)
        self._opened = None  # frees the network: the compiled one is a copy
        return OpenVinoModel(compiled.create_infer_request(), ports, outputs, batch, pads)

    def _open(self, config: ModelConfig, parameters: Parameters) -> OpenNetwork:
        if self._opened is None:
            path = self.context.model_file(config, "model.xml", exists=Path.exists)  # some formats are directories
            core = ov.Core()
            extension = parameters.text("CPU_EXTENSION_PATH")
            if extension:
                core.add_extension(extension)
            self._opened = OpenNetwork(core, core.read_model(os.fspath(path)))
        return self._opened

    def _options(self, parameters: Parameters) -> dict[str, str]:
        threads = parameters.whole("INFERENCE_NUM_THREADS", 0) or self.context.engine_threads
        options: dict[str, str] = {}
        if parameters.text("TARGET_DEVICE", "CPU").startswith("CPU"):
            options = {
                "INFERENCE_NUM_THREADS": str(threads),
                # With pinning, the threads of several instances would be pinned to the same cores.
                "ENABLE_CPU_PINNING": "NO",
                # Results must not depend on whether this CPU supports the narrower type.
                "INFERENCE_PRECISION_HINT": "bf16" if parameters.flag("HINT_BF16", False) else "f32",
            }
        compiling = parameters.whole("COMPILATION_NUM_THREADS", 0)
        if compiling:
            options["COMPILATION_NUM_THREADS"] = str(compiling)
        hint = parameters.text("PERFORMANCE_HINT").upper()
        if hint and hint not in _HINTS:
            raise parameters.wrong("PERFORMANCE_HINT", f"one of {', '.join(_HINTS)}")
        if hint:
            options["PERFORMANCE_HINT"] = hint
        streams = parameters.text("NUM_STREAMS").upper()
        if streams not in ("", "AUTO", "NUMA"):
            parameters.whole("NUM_STREAMS", 0)
        if streams or not hint:
            options["NUM_STREAMS"] = streams or "1"  # an instance runs one batch at a time
        return options


class OpenVinoModel(StackedModel):
    """`ports`: the index and element type of each input and output in the model. `batch`: the number of rows that the
    model computes; -1: any. `pads`: whether smaller batches are padded to it."""

    def __init__(
        self,
        request: Any,
        ports: tuple[list[tuple[int, Any]], list[tuple[int, Any]]],
        outputs: Sequence[Spec],
        batch: int,
        pads: bool,
    ) -> None:
        self._request = request
        self._input_ports, self._output_ports = ports
        self._outputs = outputs
        self._batch = batch
        self._pads = pads

    def close(self) -> None:
        self._request = None

    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        request = self._request
        rows = self._rows(inputs.rows)
        kept: list[Any] = []  # the engine gets addresses: keep the arrays until the run is over
        for index, (place, element) in enumerate(self._input_ports):
            array = inputs.array(index)
            assert array is not None
            if rows != inputs.rows:
                array = _padded(array, rows)
            memory = _writable(array)
            kept += array, memory
            request.set_input_tensor(place, ov.Tensor(memory, array.shape, element))
        placed: dict[int, Array] = {}
        for index, spec in enumerate(self._outputs):
            if not spec.fixed:
                continue
            shape = (rows, *spec.shape) if spec.batched else spec.shape
            # The engine keeps writing to the last output tensor that was set, so set it for each run.
            if outputs.needed(index) and rows == inputs.rows:
                target = outputs.place(index, shape)
            else:
                target = np.empty(shape, spec.numpy)
            placed[index] = target
            place, element = self._output_ports[index]
            request.set_output_tensor(place, ov.Tensor(_raw(target), shape, element))
        inputs.computing()
        request.infer()
        for index, spec in enumerate(self._outputs):
            self._take(index, spec, placed.get(index), inputs.rows, rows, outputs)

    def _take(self, index: int, spec: Spec, placed: Array | None, rows: int, ran: int, outputs: Results) -> None:
        if not outputs.needed(index):
            return
        tensor = self._request.get_output_tensor(self._output_ports[index][0])
        if placed is None:
            computed = tensor.data.view(spec.numpy) if spec.dtype == "BF16" else tensor.data
            outputs.put(index, computed[:rows] if spec.batched and ran != rows else computed)
            return
        shape = tuple(tensor.shape)
        if shape != placed.shape:
            raise ModelFailed(
                f"output '{spec.name}' has the wrong shape: expected {list(placed.shape)}, found {list(shape)}"
            )
        if ran != rows:
            outputs.put(index, placed[:rows])

    def _rows(self, rows: int) -> int:
        if self._batch < 0 or rows in (0, self._batch):
            return rows
        if not self._pads:
            raise ModelFailed(
                f"the model runs batches of {self._batch} rows, and this one has {rows}: set parameter "
                "ENABLE_BATCH_PADDING to YES, or leave SKIP_OV_DYNAMIC_BATCHSIZE out"
            )
        return self._batch


def _names(port: Any) -> list[str]:
    """The names of a tensor, or of its node if it has none."""
    return sorted(port.get_names()) or [port.get_node().get_friendly_name()]


def _places(specs: Sequence[Spec], ports: Sequence[Any]) -> list[tuple[int, Any]]:
    """Returns the index and element type of each configured tensor in the model."""
    places = {name: place for place, port in enumerate(ports) for name in _names(port)}
    return [(places[spec.name], ports[places[spec.name]].element_type) for spec in specs]


def _match_inputs(model: str, specs: Sequence[Spec], ports: Sequence[Any]) -> None:
    """Raises unless all inputs of the model are configured and none is optional."""
    names = sorted({name for port in ports for name in _names(port)})
    for spec in specs:
        if spec.name not in names:
            raise unexpected(model, "input", spec, names)
    none_optional(model, specs, "a model of OpenVINO")
    configured = {spec.name for spec in specs}
    chosen = [next((name for name in _names(port) if name in configured), _names(port)[0]) for port in ports]
    none_missing(model, specs, [TensorFacts(name, "", ()) for name in chosen])


def _batch(
    config: ModelConfig, model: Any, inputs: Sequence[Spec], outputs: Sequence[Spec], parameters: Parameters
) -> tuple[int, bool]:
    """Returns the only number of rows that the model can run at once (-1: any), and whether smaller batches are padded
    to it. Makes a fixed batch dimension dynamic where possible."""
    if config.max_batch_size == 0:
        return -1, False
    dims = {name: list(shape) for name, shape in _batched(model.inputs, inputs)}
    fixed = {shape[0] for shape in dims.values() if shape} - {-1}
    if not fixed:
        return -1, False
    pads = parameters.flag("ENABLE_BATCH_PADDING", False)
    if not parameters.flag("SKIP_OV_DYNAMIC_BATCHSIZE", False):
        try:
            _reshape(config.name, model, {name: [-1, *shape[1:]] for name, shape in dims.items()})
            if all(shape[:1] == (-1,) for _, shape in _batched(model.outputs, outputs)):
                return -1, False
            # An operator contains the number of rows as a constant, as a Reshape often does.
            _reshape(config.name, model, dims)
            pads = parameters.flag("ENABLE_BATCH_PADDING", True)
        except InvalidRequest as error:
            if not pads:
                raise InvalidRequest(f"{error}. Set parameter SKIP_OV_DYNAMIC_BATCHSIZE to YES") from error
    if len(fixed) > 1 or config.max_batch_size > max(fixed) or (config.max_batch_size != max(fixed) and not pads):
        raise InvalidRequest(
            f"unable to load model '{config.name}': max_batch_size is {config.max_batch_size}, and the first dimension "
            f"of its inputs is {', '.join(map(str, sorted(fixed)))} in the model, which must be the same"
            f"{'' if pads else ', or, with parameter ENABLE_BATCH_PADDING: YES, larger'}"
        )
    return int(max(fixed)), pads


def _batched(ports: Sequence[Any], specs: Sequence[Spec]) -> list[tuple[str, tuple[int, ...]]]:
    """The names of tensors with a batch dimension in the configuration, and their shapes in the model."""
    return [(spec.name, _shape(port)) for port in ports for spec in specs if spec.batched and spec.name in _names(port)]


def _reshape(model: str, network: Any, shapes: dict[str, list[int]]) -> None:
    try:
        network.reshape({name: ov.PartialShape([ov.Dimension(dim) for dim in shape]) for name, shape in shapes.items()})
    except RuntimeError as error:
        raise InvalidRequest(f"unable to load model '{model}': it cannot have inputs of {shapes}: {error}") from error


def _device(config: ModelConfig, instance: str, parameters: Parameters, available: list[str]) -> str:
    target = parameters.text("TARGET_DEVICE")
    kind, number = device_of(config, instance)
    device = target or (f"GPU.{number}" if kind == "GPU" else "CPU")
    plain = device.partition(".")[0]
    if plain.isalnum() and plain not in ("AUTO", "MULTI", "HETERO", "BATCH"):
        if not any(plain == name.partition(".")[0] for name in available):
            raise Unsupported(
                f"instance '{instance}' is to run on device {device}, which OpenVINO does not find; it finds: "
                f"{', '.join(available)}. See TARGET_DEVICE"
            )
    return device


def _shape(port: Any) -> tuple[int, ...]:
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        raise Unsupported(
            f"tensor '{_names(port)[0]}' of the model has no fixed number of dims, which is not supported"
        )
    return tuple(dim.get_length() if dim.is_static else -1 for dim in shape)


def _facts(ports: Sequence[Any], all_names: bool = True) -> list[TensorFacts]:
    facts = []
    for port in ports:
        kind = port.element_type.get_type_name()
        dtype = DTYPES.get(kind)
        if dtype is None:
            raise Unsupported(f"tensor '{_names(port)[0]}' of the model is of type {kind}, which is not supported")
        names = _names(port)
        facts += [TensorFacts(name, dtype, _shape(port)) for name in (names if all_names else names[:1])]
    return facts


def _padded(array: Array, rows: int) -> Array:
    padded = np.zeros((rows, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return padded


def _writable(array: Array) -> Array:
    """Returns the bytes of an array as a writable one: the engine does not write to inputs, but only accepts writable
    arrays. The caller keeps both."""
    if array.flags.writeable or not (array.nbytes and array.flags.c_contiguous):
        return _raw(array)
    memory = (ctypes.c_ubyte * array.nbytes).from_address(address_of(array))
    return np.ndarray((array.nbytes,), np.uint8, memoryview(memory))


def _raw(array: Array) -> Array:
    """Returns the array as bytes: the engine lacks some numpy types, so the element type is passed separately."""
    return array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(array.shape, np.uint8)
