"""Type hints of functions with @shmserve.model: inputs, outputs, and the errors, which suggest a correction."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, NamedTuple, TypedDict

import numpy as np
import pytest

import shmserve
from shmserve.errors import InvalidRequest
from shmserve.workers.backends.python.codecs import TEXT
from shmserve.workers.backends.python.signature import ArgumentSlot, signature_of
from tests.support.cases import cases

Image = Annotated[Any, shmserve.Tensor("UINT8", -1, -1, 3)]
Row = Annotated[Any, shmserve.Tensor("FP32", 3)]
Shapeless = Annotated[Any, shmserve.Tensor("FP32")]


class Typed(TypedDict):
    label: str
    scores: list[float]


@dataclasses.dataclass
class Data:
    label: str
    count: int


class Named(NamedTuple):
    a: int
    b: bytes


def every(a: float, b: int, c: bool, d: str, e: bytes, f: list[int], g: list[list[float]], h: Image) -> float:
    return 0.0


def optional(a: float, b: int | None = None, c: str = "") -> Annotated[np.ndarray, shmserve.Tensor("FP16", 2)]:
    return np.zeros(2, np.float16)


def typed(a: int) -> Typed: ...  # type: ignore[empty-body]
def data(a: int) -> Data: ...  # type: ignore[empty-body]
def named(a: int) -> Named: ...  # type: ignore[empty-body]
def pair(a: int) -> tuple[int, list[str]]: ...  # type: ignore[empty-body]


def some(a: int) -> Iterator[str]:
    yield ""


async def later(a: int) -> AsyncIterator[Data]:
    yield Data("", 0)


class State:
    def __call__(self, a: int) -> int:
        return a


def test_annotations_of_arguments_become_inputs() -> None:
    assert signature_of(every, "app.py", False).inputs == (
        ArgumentSlot("a", "FP64", (1,), 0),
        ArgumentSlot("b", "INT64", (1,), 0),
        ArgumentSlot("c", "BOOL", (1,), 0),
        ArgumentSlot("d", "BYTES", (1,), 0, TEXT),
        ArgumentSlot("e", "BYTES", (1,), 0),
        ArgumentSlot("f", "INT64", (-1,), 1),
        ArgumentSlot("g", "FP64", (-1, -1), 2),
        ArgumentSlot("h", "UINT8", (-1, -1, 3), -1),
    )


def test_optional_inputs() -> None:
    signature = signature_of(optional, "app.py", False)
    assert [(slot.name, slot.dtype, slot.optional) for slot in signature.inputs] == [
        ("a", "FP64", False),
        ("b", "INT64", True),
        ("c", "BYTES", True),
    ]
    assert signature.outputs == (ArgumentSlot("output", "FP16", (2,), -1),)


@cases(
    (every, "", ["output"], False),
    (typed, "key", ["label", "scores"], False),
    (data, "attribute", ["label", "count"], False),
    (named, "attribute", ["a", "b"], False),
    (pair, "index", ["output_0", "output_1"], False),
    (some, "", ["output"], True),
    (later, "attribute", ["label", "count"], True),
    (State, "", ["output"], False),
)
def test_annotations_of_the_result_become_outputs(function: Any, by: str, names: list[str], streams: bool) -> None:
    signature = signature_of(function, "app.py", False)
    assert (signature.by, [slot.name for slot in signature.outputs], signature.streams) == (by, names, streams)


def test_annotations_of_a_batched_function() -> None:
    def batched(a: list[str], b: list[list[int]], c: Row) -> list[float]:
        return []

    signature = signature_of(batched, "app.py", True)
    assert [(slot.dtype, slot.dims) for slot in signature.inputs] == [("BYTES", (1,)), ("INT64", (-1,)), ("FP32", (3,))]
    assert signature.outputs[0].dims == (1,)


def bare(x) -> int: ...  # type: ignore[no-untyped-def, empty-body]
def array(x: np.ndarray) -> int: ...  # type: ignore[empty-body]
def silent(x: int): ...  # type: ignore[no-untyped-def]
def nothing(x: int) -> None: ...
def star(*x: int) -> int: ...  # type: ignore[empty-body]
def none() -> int: ...  # type: ignore[empty-body]
def unknown(x: Missing) -> int: ...  # type: ignore[empty-body, name-defined]  # noqa: F821
def wrong(x: Annotated[Any, shmserve.Tensor("FLOAT", 3)]) -> int: ...  # type: ignore[empty-body]
def shapeless(x: Shapeless) -> int: ...  # type: ignore[empty-body]
def endless(x: int) -> tuple[int, ...]: ...  # type: ignore[empty-body]
def empty(x: int) -> typing.Tuple: ...  # type: ignore[empty-body, type-arg]  # noqa: UP006
def untyped(x: int) -> typing.Iterator: ...  # type: ignore[empty-body, type-arg]
def mixed(x: typing.List) -> int: ...  # type: ignore[empty-body, type-arg]  # noqa: UP006
def one(x: float) -> float: ...  # type: ignore[empty-body]


def yielding(x: int) -> int:  # type: ignore[misc]
    yield 1


class Without: ...


@cases(
    (bare, False, "parameter 'x' has no type: write x: shmserve.Tensor[\"FP32\", -1, 3], float, int, bool,"),
    (array, False, "parameter 'x' has the type ndarray: write shmserve.Tensor["),
    (silent, False, "it has no type for its result: write -> followed by"),
    (nothing, False, "it has no type for its result"),
    (star, False, "'*x: 'int'' cannot be an input"),
    (none, False, "a model needs at least one input"),
    (unknown, False, "its type hints cannot be read: NameError: name 'Missing' is not defined"),
    (wrong, False, "Tensor has no data type 'FLOAT'; expected one of BOOL"),
    (shapeless, False, "parameter 'x' has no dims: write Tensor[\"FP32\", -1]"),
    (endless, False, "a tuple of any length cannot be the result"),
    (empty, False, "a tuple of any length cannot be the result"),
    (mixed, False, "parameter 'x' has the type List: write shmserve.Tensor["),
    (yielding, False, "it yields its results: write -> Iterator[...]"),
    (untyped, False, "it yields its results: write -> Iterator[...]"),
    (some, True, "answers one request at a time: remove batch=True"),
    (one, True, "parameter 'x' is one float, but with batch=True there is one for each row: write list[float]"),
    (Without, False, "the class has no method __call__"),
)
def test_unsupported_annotations_are_refused(function: Any, batch: bool, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        signature_of(function, "app.py", batch)
    message = str(caught.value)
    assert text in message
    assert message.startswith(f"'{function.__name__}' in app.py")
    if function is not Without:
        assert f", line {function.__code__.co_firstlineno}: " in message
