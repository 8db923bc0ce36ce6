"""DALI: pipelines that decode and transform images and other data. `model.dali` contains one, or `dali.py` defines it.

A pipeline takes a list of samples, which may differ in shape, so requests of different shapes share a batch. Invariant:
an error in a sample fails only its request. The error also breaks the pipeline, so the pipeline is created again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from msgspec.structs import replace
from nvidia import dali

from shmserve.errors import InvalidRequest, ModelFailed, NotFound, ServeError, Unsupported
from shmserve.protocol.messages import Failure
from shmserve.repo.config.complete import TensorFacts
from shmserve.repo.files.python_file import import_file
from shmserve.workers.backends.base import Backend, Context, SeparateModel
from shmserve.workers.backends.model_facts import completed, none_missing, none_optional, unexpected
from shmserve.workers.backends.parameters import Parameters
from shmserve.workers.batch.specs import Spec, outputs_of, request_inputs_of
from shmserve.workers.model_calls.answer import Response
from shmserve.workers.process.device import device_of, visible_number

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.model_calls.answer import Request

Array = np.ndarray[Any, np.dtype[Any]]

FILE, SCRIPT = "model.dali", "dali.py"
DTYPES = ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BOOL")
"""The data types by their number in DALI."""
_OPERATOR, _OUTPUT, _MAX_BATCH = 5, 7, 2
_SOURCES = frozenset({"ExternalSource", "_ExternalSource"})
_ON_GPU = frozenset({"gpu", "mixed"})
_SPLIT = "split_along_outer_axis"


class DaliPort(NamedTuple):
    """An input or output of a pipeline, as declared by the pipeline; "" and None: unknown."""

    name: str
    dtype: str
    rank: int | None


class DescribedPipeline(NamedTuple):
    """The description in a serialized pipeline. `on_gpu`: an operator that needs a GPU, or ""."""

    inputs: tuple[DaliPort, ...]
    outputs: tuple[DaliPort, ...]
    max_batch: int
    on_gpu: str


class Dali(Backend):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._serialized = b""

    def complete(self, config: ModelConfig) -> ModelConfig:
        if config.input and config.output:
            return config
        described = self._described(config)
        inputs = [_facts(config.name, "input", port) for port in described.inputs] if not config.input else []
        outputs = [_facts(config.name, "output", port) for port in described.outputs] if not config.output else []
        config = completed(config, inputs, outputs, described.max_batch)
        if not inputs:
            return config
        return replace(config, input=tuple(replace(entry, allow_ragged_batch=True) for entry in config.input))

    def load(self, config: ModelConfig) -> DaliModel:
        parameters = Parameters(config)
        described = self._described(config)
        _match(config.name, described, request_inputs_of(config), outputs_of(config))
        if parameters.text(_SPLIT):
            raise Unsupported(
                f"parameter {_SPLIT} of model '{config.name}' is not supported: an output has as many rows as the "
                "request. Return the frames of a sample in one row"
            )
        device = self._device_of(config)
        if device is None and described.on_gpu:
            raise Unsupported(
                f"operator {described.on_gpu} of model '{config.name}' runs on a GPU, and instance "
                f"'{self.context.instance}' on the CPU: set KIND_GPU in instance_group, or device='cpu' in the pipeline"
            )
        threads = parameters.whole("num_threads", 0) or self.context.engine_threads
        return DaliModel(self.context, config, self._serialized, device, threads)

    def _described(self, config: ModelConfig) -> DescribedPipeline:
        serialized = self._read(config)
        try:
            return described(serialized)
        except (DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRequest(
                f"unable to load model '{config.name}': its file is not a serialized pipeline of DALI: {error}"
            ) from error

    def _read(self, config: ModelConfig) -> bytes:
        if not self._serialized:
            try:
                path = self.context.model_file(config, FILE)
            except NotFound:
                if config.default_model_filename not in ("", FILE):
                    raise
                path = self.context.model_file(config, FILE, SCRIPT)
            self._serialized = self._defined(config, path) if path.suffix == ".py" else path.read_bytes()
        return self._serialized

    def _defined(self, config: ModelConfig, path: Path) -> bytes:
        """Returns the pipeline that the file marks with @autoserialize."""
        module = import_file(path, "shmserve_model_dali", [path.parent], f"'{path.name}' of model '{config.name}'")
        marked = [value for value in vars(module).values() if getattr(value, "_is_autoserialize", False)]
        if len(marked) != 1 or not inspect.isfunction(marked[0]):
            raise InvalidRequest(
                f"unable to load model '{config.name}': {path.name} must have one pipeline with @autoserialize, it has "
                f"{len(marked)}"
            )
        return bytes(marked[0](device_id=self._device_of(config)).serialize())

    def _device_of(self, config: ModelConfig) -> int | None:
        kind, number = device_of(config, self.context.instance)
        return visible_number(number) if kind == "GPU" else None


class DaliModel(SeparateModel):
    """`device`: the number of the GPU; None for the CPU."""

    def __init__(
        self, context: Context, config: ModelConfig, serialized: bytes, device: int | None, threads: int
    ) -> None:
        self._context = context
        self._inputs = request_inputs_of(config)
        self._outputs = outputs_of(config)
        self._batched = config.max_batch_size > 0
        self._batch = max(config.max_batch_size, 1)
        self._serialized = serialized
        self._device = device
        self._threads = threads
        self._pipeline = self._built()

    def close(self) -> None:
        self._pipeline = None

    def execute(self, requests: list[Request]) -> list[Response | None]:
        rows = [request.work.rows if self._batched else 1 for request in requests]
        if len(requests) > 1 and (sum(rows) > self._batch or 0 in rows):  # without a batch dimension, or invalid
            return [self._alone(request) for request in requests]
        if 0 in rows:
            raise InvalidRequest("the request has no rows, and a pipeline of DALI needs at least one")
        try:
            outputs = self._run([list(self._samples(index, requests)) for index in range(len(self._inputs))])
        except ModelFailed:
            raise
        except Exception as error:  # some inputs may have been fed, and would be read by the next run
            self._pipeline = None  # frees its memory first
            self._pipeline = self._built()
            if len(requests) == 1:
                raise ModelFailed(_reason(error)) from error
            return [self._alone(request) for request in requests]
        responses: list[Response | None] = []
        first = 0
        for count in rows:
            responses.append(self._response(outputs, first, first + count))
            first += count
        return responses

    def _alone(self, request: Request) -> Response | None:
        """Runs one request alone. The next run does not overwrite its response."""
        try:
            (response,) = self.execute([request])
        except ServeError as error:
            return Response(error=self._context.failure_of(error))
        if response is not None:
            response.outputs = [(name, array.copy()) for name, array in response.outputs]
        return response

    def _samples(self, index: int, requests: Sequence[Request]) -> Iterator[Array]:
        spec = self._inputs[index]
        for request in requests:
            array = request.arrays[index]
            assert array is not None
            for sample in array if spec.batched else (array,):
                yield sample if spec.item else _encoded(sample)

    def _run(self, samples: list[list[Array]]) -> list[Any]:
        """Runs the pipeline. Its outputs are valid until the next run."""
        results = self._pipeline.run(**{spec.name: sample for spec, sample in zip(self._inputs, samples, strict=True)})
        count = len(samples[0])
        outputs = [output if self._device is None else output.as_cpu() for output in results]
        for spec, output in zip(self._outputs, outputs, strict=True):
            if len(output) != count:
                raise ModelFailed(f"output '{spec.name}' has {len(output)} samples for a batch of {count}")
        return [np.asarray(output.as_tensor()) if output.is_dense_tensor() else output for output in outputs]

    def _response(self, outputs: Sequence[Any], first: int, last: int) -> Response:
        computed = []
        for spec, output in zip(self._outputs, outputs, strict=True):
            if isinstance(output, np.ndarray):
                array = output[first:last]
            else:
                samples = [np.asarray(output[row]) for row in range(first, last)]
                shapes = sorted({sample.shape for sample in samples})
                if len(shapes) > 1:
                    return Response(error=_uneven(spec.name, shapes))
                array = np.stack(samples)
            computed.append((spec.name, array if spec.batched else array[0]))
        return Response(computed)

    def _built(self) -> Any:
        pipeline = dali.Pipeline.deserialize(
            serialized_pipeline=self._serialized,
            batch_size=self._batch,
            num_threads=self._threads,
            device_id=self._device,
            exec_pipelined=False,
            exec_async=False,
        )
        pipeline.build()
        return pipeline


def described(serialized: bytes) -> DescribedPipeline:
    """Reads facts about a serialized pipeline that DALI's own interface does not provide."""
    inputs, outputs, max_batch, on_gpu = [], [], 1, ""
    for number, value in _fields(serialized):
        if number == _OPERATOR:
            fields = [*_fields(value)]
            texts = dict(fields)
            name = texts[1].decode()
            arguments = dict(_argument(text) for key, text in fields if key == 4)
            if name in _SOURCES:
                inputs.append(DaliPort(texts[5].decode(), _dtype(arguments.get("dtype")), arguments.get("ndim")))
            if arguments.get("device") in _ON_GPU:
                on_gpu = on_gpu or name
        elif number == _OUTPUT:
            output = dict(_fields(value))
            rank = _signed(output.get(6, -1))
            outputs.append(
                DaliPort(output[1].decode(), _dtype(_signed(output.get(5, -1))), rank if rank >= 0 else None)
            )
        elif number == _MAX_BATCH:
            max_batch = value
    return DescribedPipeline(tuple(inputs), tuple(outputs), max_batch, on_gpu)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: integers, or bytes."""
    fields: Any = UnknownFieldSet(Empty.FromString(message))
    for field in fields:
        yield field.field_number, field.data


def _argument(message: bytes) -> tuple[str, Any]:
    """The name of an operator's argument, and its value if that is an integer or text."""
    fields = dict(_fields(message))
    value = fields[5].decode() if 5 in fields else _signed(fields[4]) if 4 in fields else None
    return fields[1].decode(), value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _dtype(number: int | None) -> str:
    return DTYPES[number] if number is not None and 0 <= number < len(DTYPES) else ""


def _facts(model: str, what: str, port: DaliPort) -> TensorFacts:
    if not port.dtype or port.rank is None:
        setting = "dtype and ndim of its external_source" if what == "input" else "output_dtype and output_ndim"
        raise InvalidRequest(
            f"autofill failed for model '{model}': the pipeline does not declare the data type or the number of "
            f"dimensions of {what} '{port.name}'. Set {setting}, or configure {what}"
        )
    return TensorFacts(port.name, port.dtype, (-1,) * (port.rank + 1))


def _match(model: str, described: DescribedPipeline, inputs: Sequence[Spec], outputs: Sequence[Spec]) -> None:
    """Raises unless the configuration matches the pipeline: inputs by name, outputs by position."""
    failed = f"unable to load model '{model}'"
    ports = {port.name: port for port in described.inputs}
    for spec in inputs:
        if spec.name not in ports:
            raise unexpected(model, "input", spec, ports)
        _match_port(failed, "input", spec, ports[spec.name])
    none_optional(model, inputs, "a pipeline of DALI")
    none_missing(model, inputs, [TensorFacts(port.name, port.dtype, ()) for port in described.inputs])
    if len(outputs) != len(described.outputs):
        raise InvalidRequest(
            f"{failed}, configuration expects {len(outputs)} outputs ("
            f"{', '.join(repr(spec.name) for spec in outputs)}), model provides {len(described.outputs)}"
        )
    for spec, port in zip(outputs, described.outputs, strict=True):
        _match_port(failed, "output", spec, port)


def _match_port(failed: str, what: str, spec: Spec, port: DaliPort) -> None:
    if what == "input" and spec.dtype == "BYTES":
        if spec.shape != (1,) or port.dtype not in ("", "UINT8") or port.rank not in (None, 1):
            raise InvalidRequest(
                f"{failed}: input '{spec.name}' is BYTES in the configuration, which is for encoded data: it needs "
                "dims: [ 1 ], and dtype UINT8 and ndim 1 in the pipeline"
            )
        return
    if spec.dtype not in DTYPES or port.dtype not in ("", spec.dtype):
        raise InvalidRequest(
            f"{failed}: {what} '{spec.name}' is {spec.dtype} in the configuration and {port.dtype or 'another type'} "
            "in the pipeline"
        )
    if port.rank not in (None, len(spec.shape)):
        raise InvalidRequest(
            f"{failed}: {what} '{spec.name}' has {len(spec.shape)} dims in the configuration, without the batch, and "
            f"{port.rank} in the pipeline"
        )


def _encoded(sample: Array) -> Array:
    (data,) = sample.reshape(-1).tolist()
    return np.frombuffer(data, np.uint8)


def _uneven(name: str, shapes: Sequence[tuple[int, ...]]) -> Failure:
    text = ", ".join(str(list(shape)) for shape in shapes[:3])
    return Failure(
        ModelFailed.code,
        f"output '{name}' has samples of different shapes in one request: {text}. Resize or pad them in the pipeline, "
        "or send one sample with each request",
    )


def _reason(error: Exception) -> str:
    """DALI's description of an error, without the location in the file that defined the pipeline."""
    text = str(error).removeprefix("Critical error in pipeline:\n")
    head, _, rest = text.partition(",\nwhich was used in the pipeline")
    cause = rest.partition("encountered:\n\n")[2] or rest
    lines = [line for line in cause.splitlines() if line and not line.startswith(("C++ context", "Current pipeline"))]
    return ": ".join([head.strip(), *lines[:1]])
