"""LiteRT, formerly TensorFlow Lite: `model.tflite`.

Invariant: an input is copied once, from the client's memory to that of the engine, and an output once, from there to
where it will be read. No array over the engine's memory is kept while the engine runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ai_edge_litert.interpreter import Interpreter

from shmserve.errors import InvalidRequest, ModelFailed, Unsupported
from shmserve.repo.config.complete import TensorFacts, with_scalars
from shmserve.workers.backends.base import Backend, Context, StackedModel
from shmserve.workers.backends.model_facts import completed, match, none_missing, none_optional
from shmserve.workers.backends.parameters import Parameters
from shmserve.workers.batch.specs import model_inputs_of, model_outputs_of
from shmserve.workers.process.device import require_cpu

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.results import Results

Array = np.ndarray[Any, np.dtype[Any]]
NAME = "tflite"
SIGNATURE, THREADS = "tflite_signature", "tflite_num_threads"
DTYPES = {
    **{np.dtype(name.lower()): name for name in ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64")},
    **{np.dtype(name.lower()): name for name in ("INT8", "INT16", "INT32", "INT64")},
    **{np.dtype(f"float{bits}"): f"FP{bits}" for bits in (16, 32, 64)},
    np.dtype(np.bytes_): "BYTES",
}


class TflitePort(NamedTuple):
    """A tensor of the model and its index there. A dim of -1 is dynamic."""

    place: int
    dtype: str
    dims: tuple[int, ...]


Ports = Mapping[str, TflitePort]


class OpenTfLite(NamedTuple):
    """The engine with the model, and its inputs and outputs by the names of its signature if it has one."""

    engine: Any
    inputs: Ports
    outputs: Ports


class TfLite(Backend):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._opened: OpenTfLite | None = None

    def complete(self, config: ModelConfig) -> ModelConfig:
        if config.input and config.output:
            return config
        default = self.context.default_max_batch(NAME)
        _, inputs, outputs = self._open(config)
        return completed(config, _facts(inputs), _facts(outputs), default)

    def fitted(self, config: ModelConfig) -> ModelConfig:
        _, inputs, outputs = self._open(config)
        return with_scalars(config, _facts(inputs), _facts(outputs))

    def load(self, config: ModelConfig) -> TfLiteModel:
        engine, inputs, outputs = self._open(config)
        sources, targets = model_inputs_of(config), model_outputs_of(config)
        none_optional(config.name, sources, "a model of LiteRT")
        none_missing(config.name, sources, _facts(inputs))
        if config.max_batch_size > 0 and any(port.dims[:1] == (1,) for port in inputs.values()):
            batched = {spec.name for spec in sources if spec.batched and not spec.flat}
            _check_batched(config, engine, batched, inputs, outputs)
            inputs, outputs = _dynamic(inputs), _dynamic(outputs)
        match(config.name, "input", sources, _facts(inputs), flat=(-1,))
        match(config.name, "output", targets, _facts(outputs))
        return TfLiteModel(
            engine,
            [(inputs[spec.name].place, spec.item > 0) for spec in sources],
            [(outputs[spec.name].place, spec.item > 0) for spec in targets],
        )

    def _open(self, config: ModelConfig) -> OpenTfLite:
        if self._opened is None:
            require_cpu(config, self.context.instance, "models of LiteRT")
            parameters = Parameters(config)
            path = self.context.model_file(config, "model.tflite")
            threads = parameters.whole(THREADS, 0) or self.context.engine_threads
            try:
                engine = Interpreter(model_path=os.fspath(path), num_threads=threads)
            except (RuntimeError, ValueError) as error:
                raise InvalidRequest(f"{path.name} is not a model that LiteRT can run: {_text(error)}") from error
            self._opened = OpenTfLite(engine, *_ports_of(engine, parameters))
        return self._opened


class TfLiteModel(StackedModel):
    """`inputs`, `outputs`: for each tensor, its index in the model and whether its elements have a fixed size."""

    def __init__(self, engine: Any, inputs: list[tuple[int, bool]], outputs: list[tuple[int, bool]]) -> None:
        self._engine = engine
        self._inputs = inputs
        self._outputs = outputs
        self._shapes: list[tuple[int, ...]] = []
        """The shapes for which the engine has allocated memory. Empty: for none."""

    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        engine = self._engine
        shapes = [inputs.shape(index) or () for index in range(len(self._inputs))]
        try:
            if shapes != self._shapes:
                self._shapes = []
                _resize(engine, {place: shape for (place, _), shape in zip(self._inputs, shapes, strict=True)})
                self._shapes = shapes
            for index, (place, fixed) in enumerate(self._inputs):
                if fixed:
                    inputs.copy(index, engine.tensor(place)())
                else:
                    engine.set_tensor(place, inputs.array(index))
            inputs.computing()
            engine.invoke()
        except (RuntimeError, ValueError) as error:
            self._shapes = []
            raise ModelFailed(_text(error)) from error
        for index, (place, fixed) in enumerate(self._outputs):
            if outputs.needed(index):
                outputs.put(index, engine.tensor(place)() if fixed else engine.get_tensor(place))


def _resize(engine: Any, shapes: Mapping[int, tuple[int, ...]]) -> None:
    for place, shape in shapes.items():
        engine.resize_tensor_input(place, shape)
    engine.allocate_tensors()


def _check_batched(config: ModelConfig, engine: Any, batched: Set[str], inputs: Ports, outputs: Ports) -> None:
    """Checks that a first dimension of 1, which most models have, can be the batch dimension: all outputs grow with
    it."""
    rows = max(2, config.max_batch_size)
    shapes = {
        port.place: tuple(max(1, dim) for dim in ((rows, *port.dims[1:]) if name in batched else port.dims))
        for name, port in inputs.items()
    }
    failed = (
        f"unable to load model '{config.name}': max_batch_size is {config.max_batch_size}, and the first dimension "
        "of the model is 1 and cannot be changed"
    )
    try:
        _resize(engine, shapes)
    except (RuntimeError, ValueError) as error:
        raise InvalidRequest(f"{failed}: {_text(error)}. Set max_batch_size: 0") from error
    now = {port["index"]: tuple(port["shape"]) for port in engine.get_output_details()}
    for name, port in outputs.items():
        if port.dims[:1] == (1,) and now.get(port.place, ())[:1] != (rows,):
            raise InvalidRequest(f"{failed}: output '{name}' does not grow with the inputs. Set max_batch_size: 0")


def _text(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _ports_of(engine: Any, parameters: Parameters) -> tuple[Ports, Ports]:
    wanted = parameters.text(SIGNATURE)
    signatures = engine.get_signature_list()
    plain = {detail["name"]: detail for detail in engine.get_input_details()}
    computed = {detail["name"]: detail for detail in engine.get_output_details()}
    if wanted and wanted not in signatures:
        known = ", ".join(sorted(signatures)) or "it has none"
        raise parameters.wrong(SIGNATURE, f"a signature of the model ({known})")
    if not signatures:
        return _ports(plain), _ports(computed)
    chosen = wanted or ("serving_default" if "serving_default" in signatures else min(signatures))
    runner = engine.get_signature_runner(chosen)
    if runner._subgraph_index != 0:
        raise Unsupported(
            f"signature '{chosen}' belongs to a graph other than the first one of the model, which is not supported; "
            "convert it to a file of its own"
        )
    inputs, outputs = runner.get_input_details(), runner.get_output_details()
    return _ports(inputs), _ports(outputs)


def _ports(details: Mapping[str, Any]) -> Ports:
    ports = {}
    for name in sorted(details):
        detail = details[name]
        dtype = DTYPES.get(np.dtype(detail["dtype"]))
        if dtype is None:
            kind = np.dtype(detail["dtype"]).name
            raise Unsupported(f"tensor '{name}' of the model is of type {kind}, which is not supported")
        # Models from older converters have no shape signature.
        dims = detail["shape_signature"] if len(detail["shape_signature"]) else detail["shape"]
        ports[name] = TflitePort(int(detail["index"]), dtype, tuple(int(dim) for dim in dims))
    return ports


def _dynamic(ports: Ports) -> Ports:
    return {name: port._replace(dims=(-1, *port.dims[1:])) if port.dims else port for name, port in ports.items()}


def _facts(ports: Ports) -> list[TensorFacts]:
    return [TensorFacts(name, port.dtype, port.dims) for name, port in ports.items()]
