"""Runs a function or class with `@shmserve.model` as a TritonPythonModel.

Invariant: the function gets values of the types in its hints. A result that differs from its hint is an error, which
names the output and what to write.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from shmserve.dtypes import TO_CONFIG, to_numpy
from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.python_values import to_array
from shmserve.repo.parameters import JSON_SCHEMAS
from shmserve.workers.backends.python import pb_utils
from shmserve.workers.backends.python.codecs import TEXT, ValueCodec, why_invalid
from shmserve.workers.backends.python.pb_tensor import Array
from shmserve.workers.backends.python.records import build, is_pydantic
from shmserve.workers.backends.python.signature import ArgumentSlot, FunctionSignature, signature_of
from shmserve.workers.batch.output_checks import wire_name
from shmserve.workers.batch.specs import matches

_END = object()


def kind_of(module: ModuleType, function: str, file: str, batch: bool) -> type[Any]:
    """The class of a function. Raises InvalidRequest."""
    target = getattr(module, function, None)
    if not callable(target):
        raise InvalidRequest(f"{file} has no function '{function}' any more once it is imported")
    signature = signature_of(target, file, batch)
    base = _Stream if signature.streams else _Batch if batch else _Single
    return type(function, (base,), {"signature": signature})


class _FunctionModel:
    """Base class for all functions."""

    signature: ClassVar[FunctionSignature]

    @classmethod
    def auto_complete_config(cls, config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        for slot in cls.signature.inputs:
            config.add_input(_declared(slot) | ({"optional": True} if slot.optional else {}))
        for slot in cls.signature.outputs:
            config.add_output(_declared(slot))
        if cls.signature.streams:
            config.set_model_transaction_policy({"decoupled": True})
        schemas = schemas_of(cls.signature)
        if schemas:
            text = json.dumps(schemas, separators=(",", ":"))
            config.as_dict().setdefault("parameters", {})[JSON_SCHEMAS.name] = {"string_value": text}
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        if not config.get("input"):
            text = "the server runs with --disable-auto-complete-config, and type hints need completion"
            raise InvalidRequest(f"{self.signature.label}: {text}")
        target: Any = self.signature.target
        self._call: Any = target() if inspect.isclass(target) else target
        self._line_noted = partial(_line_noted, target.__call__ if inspect.isclass(target) else target)
        self._inputs = {slot.name: slot for slot in self.signature.inputs}

    def _outputs(self, result: Any, rows: int | None) -> Iterator[tuple[str, Array]]:
        signature = self.signature
        outputs, label = signature.outputs, signature.label
        if signature.by == "index" and (not isinstance(result, (tuple, list)) or len(result) != len(outputs)):
            raise ModelFailed(f"{label} returned {_kind(result)}, not a tuple of {len(outputs)} items")
        for index, slot in enumerate(outputs):
            try:
                if not signature.by:
                    value = result
                elif signature.by == "attribute":
                    value = getattr(result, slot.name)
                else:
                    value = result[index if signature.by == "index" else slot.name]
            except (KeyError, AttributeError, TypeError):
                raise ModelFailed(f"{label} returned {_kind(result)} without the output '{slot.name}'") from None
            yield slot.name, _encoded(slot, value, rows, label)

    def _response(self, result: Any) -> pb_utils.InferenceResponse:
        return pb_utils.InferenceResponse([pb_utils.Tensor(*output) for output in self._outputs(result, None)])

    def _arguments(self, request: pb_utils.InferenceRequest) -> dict[str, Any]:
        return self._values({tensor.name(): tensor.as_numpy() for tensor in request.inputs()}, False)

    def _run(self, values: dict[str, Any], answer: Callable[[Any], Any]) -> Any:
        """Calls the function, which may be a coroutine, and converts its result."""
        with self._line_noted():
            result = self._call(**values)
        return self._later(result, answer) if inspect.iscoroutine(result) else answer(result)

    async def _later(self, coroutine: Coroutine[Any, Any, Any], answer: Callable[[Any], Any]) -> Any:
        with self._line_noted():
            result = await coroutine
        return answer(result)

    def _values(self, arrays: dict[str, Array], batch: bool) -> dict[str, Any]:
        """The arguments of the function."""
        values = {name: _decoded(self._inputs[name], array, batch) for name, array in arrays.items()}
        if self.signature.record is None:
            return values
        parameter, kind = self.signature.record
        try:
            return {parameter: build(kind, values)}
        except (TypeError, ValueError) as error:  # ValidationError of pydantic is a ValueError
            why = why_invalid(error) if is_pydantic(kind) and hasattr(error, "errors") else f"is not valid: {error}"
            raise InvalidRequest(f"'{kind.__name__}' {why}") from None


class _Single(_FunctionModel):
    """Answers one request at a time."""

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> Any:
        (request,) = requests
        return self._run(self._arguments(request), lambda result: [self._response(result)])


class _Batch(_FunctionModel):
    """Answers a batch at once."""

    def execute(self, inputs: dict[str, Array]) -> Any:
        if not inputs:
            raise InvalidRequest(f"{self.signature.label} runs batches: a request must have at least one of its inputs")
        rows = len(next(iter(inputs.values())))
        return self._run(self._values(inputs, True), lambda result: dict(self._outputs(result, rows)))


class _Stream(_FunctionModel):
    """Sends what the function yields. All plain generators run in one thread: their steps may interleave, but never run
    concurrently."""

    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        self._thread = ThreadPoolExecutor(1, "model")

    def finalize(self) -> None:
        self._thread.shutdown(wait=False)

    async def stream(self, request: pb_utils.InferenceRequest) -> AsyncIterator[pb_utils.InferenceResponse]:
        with self._line_noted():
            loop = asyncio.get_running_loop()
            results = self._call(**self._arguments(request))
            if hasattr(results, "__aiter__"):
                async for result in results:
                    yield self._response(result)
                return
            steps = iter(results)
            try:
                while (result := await loop.run_in_executor(self._thread, next, steps, _END)) is not _END:
                    yield self._response(result)
            finally:
                if hasattr(steps, "close"):
                    await loop.run_in_executor(self._thread, steps.close)


@contextmanager
def _line_noted(function: Any) -> Iterator[None]:
    """Adds a note to exceptions: the line in the function's file that raised them, or that called what did."""
    try:
        yield
    except Exception as error:
        file = inspect.unwrap(function).__code__.co_filename
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
        if lines:
            error.__notes__ = [*getattr(error, "__notes__", ()), f"{os.path.basename(file)}, line {lines[-1]}"]
        raise


# ------------------------------------------------------------------------------------------ values


def schemas_of(signature: FunctionSignature) -> dict[str, Any]:
    """The JSON schemas of the tensors that have one, and those that they refer to, for the gateways; {} if none has."""
    schemas: dict[str, Any] = {"inputs": {}, "outputs": {}, "components": {}}
    for kind, slots in (("inputs", signature.inputs), ("outputs", signature.outputs)):
        for slot in slots:
            if slot.codec is not None and slot.codec.schema is not None:
                schemas[kind][slot.name] = slot.codec.schema
                schemas["components"] |= slot.codec.components
    return schemas if schemas["inputs"] or schemas["outputs"] else {}


def _declared(slot: ArgumentSlot) -> dict[str, Any]:
    return {"name": slot.name, "data_type": TO_CONFIG[slot.dtype], "dims": list(slot.dims)}


def _decoded(slot: ArgumentSlot, array: Array, batch: bool) -> Any:
    if slot.depth < 0:
        return array
    if slot.codec is not None:
        array = _each(array, partial(_read, slot, slot.codec))
    if not slot.depth:
        return array.item()
    if batch and slot.depth == 1:
        array = array.reshape(-1)
    return array.tolist()


def _each(array: Array, convert: Callable[[Any], Any]) -> Array:
    converted = np.empty(array.size, object)
    for index, item in enumerate(array.flat):
        converted[index] = convert(item)
    return converted.reshape(array.shape)


def _read(slot: ArgumentSlot, codec: ValueCodec, item: bytes) -> Any:
    try:
        return codec.decode(item)
    except ValueError as error:
        raise InvalidRequest(f"input '{slot.name}' {error}") from None


def _written(slot: ArgumentSlot, value: Any, depth: int) -> Any:
    """`value`, a list of lists to this depth, with the bytes of each item."""
    assert slot.codec is not None
    if not depth:
        return slot.codec.encode(value)
    if not isinstance(value, (list, tuple)):
        raise TypeError("expected a list")
    return [_written(slot, item, depth - 1) for item in value]


def _encoded(slot: ArgumentSlot, value: Any, rows: int | None, label: str) -> Array:
    """The array for an output. `rows`: number of rows of the batch."""
    where = f"{label} returned for output '{slot.name}'"
    if slot.codec is not None and slot.codec is not TEXT:
        try:
            value = _written(slot, value, slot.depth)
        except (TypeError, ValueError) as error:
            raise ModelFailed(f"{where} {_kind(value)}: {error}") from None
    if hasattr(value, "dtype") or hasattr(value, "__array__"):
        array = np.asarray(value)
    else:
        try:
            array = to_array(value, slot.dtype)
        except InvalidRequest as error:
            raise ModelFailed(f"{where} {_kind(value)}: {error}") from None
    if not slot.depth and rows is None and array.ndim == 0:
        array = array.reshape(1)
    if rows is not None and slot.depth == 1 and array.ndim == 1:
        array = array.reshape(-1, 1)
    declared = to_numpy(slot.dtype)
    if array.dtype != declared and not (slot.dtype == "BYTES" and array.dtype.kind in "SUO"):
        if array.dtype.kind + declared.kind not in ("ii", "iu", "ui", "uu"):  # the backend converts integers that fit
            hint = f"write .astype(np.{declared})" if array.dtype.kind in "fiub" else "return an array of this type"
            raise ModelFailed(f"{where} an array of {wire_name(array.dtype)}, the type hint says {slot.dtype}: {hint}")
    expected = slot.dims if rows is None else (rows, *slot.dims)
    if not matches(array.shape, expected):
        raise ModelFailed(f"{where} the shape {list(array.shape)}, the type hint says {list(expected)}")
    return array


def _kind(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"
