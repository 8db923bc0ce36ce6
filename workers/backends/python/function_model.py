"""Runs a function or class with `@shmserve.model` as a TritonPythonModel.

Invariant: the function gets values of the types in its hints. A result that differs from its hint is an error, which
names the output and what to write.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from shmserve.dtypes import TO_CONFIG, to_numpy
from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.python_values import to_array
from shmserve.workers.backends.python import pb_utils
from shmserve.workers.backends.python.pb_tensor import Array
from shmserve.workers.backends.python.signature import Signature, Slot, signature_of
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

    signature: ClassVar[Signature]

    @classmethod
    def auto_complete_config(cls, config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        for slot in cls.signature.inputs:
            config.add_input(_declared(slot) | ({"optional": True} if slot.optional else {}))
        for slot in cls.signature.outputs:
            config.add_output(_declared(slot))
        if cls.signature.streams:
            config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        if not config.get("input"):
            text = "the server runs with --disable-auto-complete-config, and type hints need completion"
            raise InvalidRequest(f"{self.signature.label}: {text}")
        target: Any = self.signature.target
        self._call: Any = target() if inspect.isclass(target) else target
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
        return {
            tensor.name(): _decoded(self._inputs[tensor.name()], tensor.as_numpy(), False)
            for tensor in request.inputs()
        }


class _Single(_FunctionModel):
    """Answers one request at a time."""

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> Any:
        (request,) = requests
        result = self._call(**self._arguments(request))
        return self._later(result) if inspect.iscoroutine(result) else [self._response(result)]

    async def _later(self, coroutine: Coroutine[Any, Any, Any]) -> list[pb_utils.InferenceResponse]:
        return [self._response(await coroutine)]


class _Batch(_FunctionModel):
    """Answers a batch at once."""

    def execute(self, inputs: dict[str, Array]) -> Any:
        rows = len(next(iter(inputs.values())))
        result = self._call(**{name: _decoded(self._inputs[name], array, True) for name, array in inputs.items()})
        return self._later(result, rows) if inspect.iscoroutine(result) else dict(self._outputs(result, rows))

    async def _later(self, coroutine: Coroutine[Any, Any, Any], rows: int) -> dict[str, Array]:
        return dict(self._outputs(await coroutine, rows))


class _Stream(_FunctionModel):
    """Sends what the function yields. All plain generators run in one thread: their steps may interleave, but never run
    concurrently."""

    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        self._thread = ThreadPoolExecutor(1, "model")

    def finalize(self) -> None:
        self._thread.shutdown(wait=False)

    async def stream(self, request: pb_utils.InferenceRequest) -> AsyncIterator[pb_utils.InferenceResponse]:
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


# ------------------------------------------------------------------------------------------ values


def _declared(slot: Slot) -> dict[str, Any]:
    return {"name": slot.name, "data_type": TO_CONFIG[slot.dtype], "dims": list(slot.dims)}


def _decoded(slot: Slot, array: Array, batch: bool) -> Any:
    if slot.depth < 0:
        return array
    if slot.text:
        array = np.array([_text(slot, item) for item in array.flat], object).reshape(array.shape)
    if not slot.depth:
        return array.item()
    if batch and slot.depth == 1:
        array = array.reshape(-1)
    return array.tolist()


def _text(slot: Slot, item: bytes) -> str:
    try:
        return item.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input '{slot.name}' is not UTF-8 text: {error}") from None


def _encoded(slot: Slot, value: Any, rows: int | None, label: str) -> Array:
    """The array for an output. `rows`: number of rows of the batch."""
    where = f"{label} returned for output '{slot.name}'"
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
