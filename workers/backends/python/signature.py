"""The inputs and outputs of a function with `@shmserve.model`, from its type hints.

    float, int, bool, str, bytes    one value, of type FP64, INT64, BOOL, BYTES, BYTES
    an image, a table, a record     one value of type BYTES (codecs.py)
    list[float], list[list[int]]    a list of them, of any length
    Tensor["FP32", -1, 3]           an array

The fields of a record (records.py) that is the only parameter, or the result, are inputs or outputs. With a batch, a
list has one item per row, and an array has an additional leading axis. Invariant: an error names the function, its
line, and what to write.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import Annotated, Any, NamedTuple

from shmserve.errors import InvalidRequest
from shmserve.functions import Tensor
from shmserve.workers.backends.python.codecs import ValueCodec, codec_of
from shmserve.workers.backends.python.records import RecordField, fields_of

OUTPUT = "output"
"""The name of a function's only output, if its hint does not name it."""
_SCALARS: dict[Any, str] = {float: "FP64", int: "INT64", bool: "BOOL", str: "BYTES", bytes: "BYTES"}
_STREAMS = (AsyncGenerator, AsyncIterable, AsyncIterator, Generator, Iterable, Iterator)
_UNIONS = (typing.Union, types.UnionType)
_FORMS = (
    'shmserve.Tensor["FP32", -1, 3], float, int, bool, str, bytes, a class with fields, dict[str, ...], '
    "PIL.Image.Image, pandas.DataFrame, polars.DataFrame, or a list of these"
)
_BATCH_FORMS = 'shmserve.Tensor["FP32", 3] with the dims of one row, or a list with an item for each row: list[str]'


class ArgumentSlot(NamedTuple):
    """One input or output. `depth`: 0 for a single value, -1 for an array, otherwise the nesting depth of the list.
    `codec`: how a value is read from, and written as, the bytes of an element.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    depth: int
    codec: ValueCodec | None = None
    optional: bool = False


class FunctionSignature(NamedTuple):
    """`target` is the function or class. `by`: how to get an output from the result. `record`: the only parameter, and
    its class, if the inputs are the fields of the class."""

    target: Callable[..., Any]
    label: str
    inputs: tuple[ArgumentSlot, ...]
    outputs: tuple[ArgumentSlot, ...]
    by: str
    """"" if the result is the only output, otherwise "index", "key" or "attribute"."""
    streams: bool
    record: tuple[str, Any] | None


def signature_of(target: Any, file: str, batch: bool) -> FunctionSignature:
    """Raises InvalidRequest."""
    return _Reader(target, file, batch).signature()


class _Reader:
    def __init__(self, target: Any, file: str, batch: bool) -> None:
        self._target = target
        self._batch = batch
        self._function: Any = target.__call__ if inspect.isclass(target) else target
        code = getattr(inspect.unwrap(self._function), "__code__", None)
        line = f", line {code.co_firstlineno}" if code is not None else ""
        self._label = f"'{target.__name__}' in {file}{line}"
        if inspect.isclass(target) and "__call__" not in dir(target):
            raise self._error("the class has no method __call__, which answers requests")

    def signature(self) -> FunctionSignature:
        hints = self._hints()
        if "return" not in hints or hints["return"] in (None, type(None)):
            raise self._error(f"it has no type for its result: write -> followed by {self._forms}")
        result, streams = self._streamed(hints["return"])
        record, fields = self._record(self._parameters(hints))
        what = "parameter" if record is None else "field"
        inputs = tuple(self._input(name, field, f"{what} '{name}'") for name, field in fields.items())
        by, outputs = self._outputs(result)
        return FunctionSignature(self._target, self._label, inputs, tuple(outputs), by, streams, record)

    @property
    def _forms(self) -> str:
        return _BATCH_FORMS if self._batch else _FORMS

    def _error(self, text: str) -> InvalidRequest:
        return InvalidRequest(f"{self._label}: {text}")

    def _hints(self) -> dict[str, Any]:
        try:
            return typing.get_type_hints(self._function, include_extras=True)
        except Exception as error:  # a hint may be any expression
            text = f"its type hints cannot be read: {type(error).__name__}: {error}"
            raise self._error(text) from error

    def _parameters(self, hints: dict[str, Any]) -> dict[str, RecordField]:
        fields: dict[str, RecordField] = {}
        parameters = list(inspect.signature(self._function).parameters.values())
        for parameter in parameters[1:] if inspect.isclass(self._target) else parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise self._error(f"'{parameter}' cannot be an input: inputs have names; list each as a parameter")
            if parameter.name not in hints:
                raise self._error(f"parameter '{parameter.name}' has no type: write {parameter.name}: {self._forms}")
            fields[parameter.name] = RecordField(hints[parameter.name], parameter.default is parameter.empty)
        if not fields:
            raise self._error("a model needs at least one input: add a parameter with a type hint")
        return fields

    def _record(self, parameters: dict[str, RecordField]) -> tuple[tuple[str, Any] | None, dict[str, RecordField]]:
        """The only parameter with its class, and the fields of the class; or None and the parameters, if these are the
        inputs."""
        if len(parameters) == 1:
            ((name, parameter),) = parameters.items()
            if fields := self._fields(parameter.hint):
                return (name, parameter.hint), fields
        return None, parameters

    def _input(self, name: str, field: RecordField, what: str) -> ArgumentSlot:
        return self._slot(name, field.hint, what)._replace(optional=not field.required)

    def _streamed(self, hint: Any) -> tuple[Any, bool]:
        """The hint of one response, and whether there are several."""
        streams = typing.get_origin(hint) in _STREAMS
        function = inspect.unwrap(self._function)
        yields = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        if (streams and not typing.get_args(hint)) or (yields and not streams):
            raise self._error("it yields its results: write -> Iterator[...] with the type of one of them")
        if streams and self._batch:
            raise self._error("a function that yields its results answers one request at a time: remove batch=True")
        return (typing.get_args(hint)[0], True) if streams else (hint, False)

    def _outputs(self, hint: Any) -> tuple[str, list[ArgumentSlot]]:
        if typing.get_origin(hint) is tuple:
            items = typing.get_args(hint)
            if Ellipsis in items or not items:
                raise self._error("a tuple of any length cannot be the result: write the type of each item")
            return "index", [self._result(f"{OUTPUT}_{index}", item) for index, item in enumerate(items)]
        fields = self._fields(hint)
        if fields:
            by = "key" if typing.is_typeddict(hint) else "attribute"
            return by, [self._result(name, field.hint) for name, field in fields.items()]
        return "", [self._result(OUTPUT, hint)]

    def _fields(self, hint: Any) -> dict[str, RecordField]:
        """The fields of a class; empty if the hint is not a class with fields."""
        try:
            fields = fields_of(hint)
        except Exception as error:  # a hint may be any expression
            raise self._error(f"the hints of {hint.__name__} cannot be read: {error}") from error
        if fields is not None and not fields:
            raise self._error(f"{hint.__name__} has no fields with type hints")
        return fields or {}

    def _result(self, name: str, hint: Any) -> ArgumentSlot:
        return self._slot(name, hint, f"output '{name}'" if name != OUTPUT else "its result")

    def _slot(self, name: str, hint: Any, what: str) -> ArgumentSlot:
        hint = _without_none(hint)
        if typing.get_origin(hint) is Annotated:
            tensor = next((item for item in hint.__metadata__ if isinstance(item, Tensor)), None)
            if tensor is not None:
                return self._array(name, tensor, what)
            hint = hint.__origin__
        if isinstance(hint, Tensor):
            return self._array(name, hint, what)
        depth = 0
        while typing.get_origin(hint) is list and typing.get_args(hint):
            hint, depth = typing.get_args(hint)[0], depth + 1
        codec = self._codec(hint, what)
        dtype = "BYTES" if codec is not None else _SCALARS.get(hint) if isinstance(hint, type) else None
        if dtype is None:
            raise self._error(f"{what} has the type {_name(hint)}: write {self._forms}")
        if self._batch and not depth:
            text = f"{what} is one {_name(hint)}, but with batch=True there is one for each row"
            raise self._error(f"{text}: write list[{_name(hint)}]")
        inner = depth - self._batch
        return ArgumentSlot(name, dtype, (-1,) * inner or (1,), depth, codec)

    def _codec(self, hint: Any, what: str) -> ValueCodec | None:
        try:
            return codec_of(hint)
        except Exception as error:  # of a library, about a type that it does not support
            raise self._error(f"{what} has the type {_name(hint)}, which cannot be JSON: {error}") from error

    def _array(self, name: str, tensor: Tensor, what: str) -> ArgumentSlot:
        if not tensor.dims:
            text = f'{what} has no dims: write Tensor["{tensor.dtype}", -1], where -1 is any size'
            raise self._error(text)
        return ArgumentSlot(name, tensor.dtype, tensor.dims, -1)


def _without_none(hint: Any) -> Any:
    """The type of an optional value, without None."""
    if typing.get_origin(hint) in _UNIONS:
        remaining = [item for item in typing.get_args(hint) if item is not type(None)]
        if len(remaining) == 1:
            return remaining[0]
    return hint


def _name(hint: Any) -> str:
    return hint.__name__ if inspect.isclass(hint) and not typing.get_args(hint) else str(hint).replace("typing.", "")
