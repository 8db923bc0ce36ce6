"""Batches in columns give the same rows as the same batches one by one, and as their requests alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from shmserve.dtypes import from_numpy
from shmserve.errors import ModelFailed
from shmserve.protocol import codec
from shmserve.protocol.messages import INLINE_BYTES, PACKET_MESSAGES, Columns, Failure, Tensor, TensorForm
from shmserve.protocol.work_items import WorkColumns
from shmserve.protocol.worker_messages import Done, Work, WorkerReport, rows_of
from shmserve.repo.config.schema import BatchOutput, ModelConfig, ModelTensorReshape
from shmserve.shm.strings import encode_bytes
from shmserve.workers.backends.base import StackedModel
from shmserve.workers.batch.gather import GatherGroup
from shmserve.workers.batch.results import Results
from tests.support.cases import cases
from tests.support.workers.batch_parts import Parts
from tests.support.workers.worker_harness import config

Function = Callable[[list[Any]], Sequence[Any]]


class Applied(StackedModel):
    """Outputs are a function of the inputs. `placed`: written to the memory that the runner provides."""

    def __init__(self, function: Function, placed: bool, config: ModelConfig) -> None:
        self.function = function
        self.count = len(config.input)
        self.placed = placed

    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        arrays = [inputs.array(index) for index in range(self.count)]
        for index, array in enumerate(self.function(arrays)):
            if array is None:
                outputs.omit(index)
            elif self.placed and not array.dtype.hasobject:
                outputs.place(index, array.shape)[...] = array
            else:
                outputs.put(index, array)


FLOATS = ("FP32", (-1,))
PAIRS = ("INT16", (2,))


class Case(Struct):
    config: ModelConfig
    inputs: dict[str, tuple[Any, tuple[int, ...]]]
    """Data type, and shape without the batch dimension; -1 is the width of the batch."""
    function: Function
    columnar: bool | None
    """Whether the results of several requests are in columns; None: it depends on the width."""


def identity(arrays: list[Any]) -> Sequence[Any]:
    return arrays


def add(arrays: list[Any]) -> Sequence[Any]:
    a, b = arrays
    return a + b[:, :1], a - b[:, 1:]


def padded_length(arrays: list[Any]) -> Sequence[Any]:
    a, b = arrays
    return a, np.full_like(b, a.shape[1])


def wide(arrays: list[Any]) -> Sequence[Any]:
    (a,) = arrays
    return np.repeat(a, 2000, axis=1), a


def refuse(arrays: list[Any]) -> Sequence[Any]:
    raise ModelFailed("not today")


def longer(arrays: list[Any]) -> Sequence[Any]:
    (a,) = arrays
    return [np.concatenate([a, a])]


def ragged() -> ModelConfig:
    plain = config("identity", {"a": FLOATS, "b": PAIRS}, {"y": FLOATS, "z": PAIRS}, max_batch=64)
    return replace(
        plain,
        input=(replace(plain.input[0], allow_ragged_batch=True), plain.input[1]),
        batch_output=(BatchOutput(target_name=("y",), source_input=("a",)),),
    )


def reshaped() -> ModelConfig:
    tensors = {"a": ("FP32", (4,)), "b": ("INT16", (1,))}
    plain = config("identity", tensors, {"y": ("FP32", (4,)), "z": ("INT16", (1,))}, max_batch=64)
    square, scalar = ModelTensorReshape(shape=(2, 2)), ModelTensorReshape(shape=())
    return replace(
        plain,
        input=(replace(plain.input[0], reshape=square), replace(plain.input[1], reshape=scalar)),
        output=(replace(plain.output[0], reshape=square), replace(plain.output[1], reshape=scalar)),
    )


BOTH = config("identity", {"a": FLOATS, "b": PAIRS}, {"y": FLOATS, "z": PAIRS}, max_batch=64)
SUMS = config("identity", {"a": FLOATS, "b": ("FP32", (2,))}, {"y": FLOATS, "z": FLOATS}, max_batch=64)
ONE = config("identity", {"a": FLOATS}, {"y": FLOATS}, max_batch=64)
A, B = (np.float32, (-1,)), (np.int16, (2,))
CASES = {
    "identity": Case(BOTH, {"a": A, "b": B}, identity, True),
    "add": Case(SUMS, {"a": A, "b": (np.float32, (2,))}, add, True),
    "ragged": Case(ragged(), {"a": (np.float32, (-1, 2)), "b": B}, identity, False),
    "padded": Case(
        config(
            "identity", {"a": FLOATS, "b": PAIRS}, {"a": FLOATS, "b": PAIRS}, max_batch=64,
            parameters={"padding": "a=-1.5", "padding_outputs": "a", "padding_multiple": "8"},
        ),
        {"a": A, "b": B}, padded_length, None,
    ),
    "reshape": Case(reshaped(), {"a": (np.float32, (4,)), "b": (np.int16, (1,))}, identity, True),
    "strings": Case(
        config("identity", {"s": ("STRING", (2,)), "b": PAIRS}, {"s": ("STRING", (2,)), "z": PAIRS}, max_batch=64),
        {"s": (object, (2,)), "b": B}, identity, False,
    ),
    "an optional input absent": Case(
        config("identity", {"a": FLOATS, "b": PAIRS}, {"y": FLOATS, "z": PAIRS}, max_batch=64, optional=["b"]),
        {"a": A}, identity, False,
    ),
    "a required input absent": Case(BOTH, {"b": B}, identity, False),
    "an unknown input": Case(BOTH, {"a": A, "c": B}, identity, False),
    "another data type": Case(BOTH, {"a": (np.int32, (-1,)), "b": B}, identity, False),
    "outputs above the inline limit": Case(
        config("identity", {"a": FLOATS}, {"y": FLOATS, "z": FLOATS}, max_batch=64), {"a": A}, wide, False
    ),
    "a model that fails": Case(ONE, {"a": A}, refuse, False),
    "an output of the wrong length": Case(ONE, {"a": A}, longer, False),
}  # fmt: skip
INDEPENDENT = [name for name in CASES if name not in ("a model that fails", "an output of the wrong length")]
"""Cases whose errors do not depend on the other requests of the batch."""


def batch_of(case: Case, names: Sequence[str], shares: Sequence[int], width: int) -> tuple[Columns, tuple[str, ...]]:
    random = np.random.default_rng(len(shares))
    forms, blobs = [], []
    for name in names:
        kind, tail = case.inputs[name]
        dims = tuple(width if dim < 0 else dim for dim in tail)
        column = []
        for rows in shares:
            if kind is object:
                words = np.array([b"%d" % word for word in random.integers(0, 999, rows * 2)], object)
                column.append(encode_bytes(words.reshape(rows, 2)))
            else:
                column.append(random.integers(-99, 99, (rows, *dims)).astype(kind).tobytes())
        forms.append(TensorForm(name, "BYTES" if kind is object else from_numpy(np.dtype(kind)), dims))
        blobs.append(column)
    requests = tuple(range(11, 11 + len(shares)))
    columns = Columns(tuple(forms), requests, tuple(shares), tuple(zip(*blobs, strict=True)))
    return columns, tuple("uid:5" for _ in shares)


def work_items_of(columns: Columns, audiences: Sequence[str]) -> list[Work]:
    each = zip(columns.requests, columns.rows, columns.data, audiences, strict=True)
    return [
        Work(
            request,
            rows,
            tuple(
                Tensor(form.name, form.dtype, (rows, *form.dims), blob)
                for form, blob in zip(columns.forms, data, strict=True)
            ),
            None,
            audience,
        )
        for request, rows, data, audience in each
    ]


Outcome = tuple[int, list[tuple[str, str, tuple[int, ...], Any]], Failure | None]


def outcomes(case: Case, placed: bool, *batches: Sequence[Work]) -> tuple[list[Outcome], Any]:
    """The outcomes of the requests of these batches, and the results of the last batch."""
    with Parts(case.config) as parts:
        runner = parts.runner(Applied(case.function, placed, case.config))
        found: list[Outcome] = []
        results: Any = None
        for work_items in batches:
            results, _, again = runner.run_batch(work_items)
            assert again == ()
            for row in rows_of(results):
                found.append(
                    (
                        row.request,
                        [(one.name, one.dtype, one.shape, parts.read(one).tolist()) for one in row.outputs],
                        row.error,
                    )
                )
                parts.free(*row.outputs)
        assert parts.arenas.used == 0
        return found, results


batches = st.tuples(
    st.sampled_from(list(CASES)),
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.sampled_from([1, 3, 8]),
    st.booleans(),
    st.booleans(),
)


@given(batches)
def test_columns_give_the_rows_of_work_items_and_single_requests(batch: tuple[str, list[int], int, bool, bool]) -> None:
    name, shares, width, turned, placed = batch
    case = CASES[name]
    columns, audiences = batch_of(case, list(case.inputs)[:: -1 if turned else 1], shares, width)
    work_items = work_items_of(columns, audiences)
    found, results = outcomes(case, placed, WorkColumns(columns, audiences))
    expected, _ = outcomes(case, placed, work_items)
    assert found == expected
    assert [request for request, _, _ in found] == list(columns.requests)
    if case.columnar is not None:
        assert isinstance(results, Columns) == (case.columnar and len(shares) > 1)
    if name in INDEPENDENT:
        alone, _ = outcomes(case, placed, *[[work] for work in work_items])
        assert found == alone
        failing = name in ("a required input absent", "an unknown input", "another data type")
        assert all((error is not None) == failing for _, _, error in found)


@given(st.lists(st.integers(1, 3), min_size=2, max_size=5), st.data())
def test_a_request_with_too_few_bytes_fails_alone(shares: list[int], data: st.DataObject) -> None:
    case = CASES["identity"]
    columns, audiences = batch_of(case, ["b", "a"], shares, 3)
    bad = data.draw(st.integers(0, len(shares) - 1))
    place = data.draw(st.integers(0, 1))
    blobs = [list(blob) for blob in columns.data]
    blobs[bad][place] = blobs[bad][place][: data.draw(st.integers(0, len(blobs[bad][place]) - 1))]
    columns.data = tuple(map(tuple, blobs))
    found, _ = outcomes(case, False, WorkColumns(columns, audiences))
    assert found == outcomes(case, False, *[[work] for work in work_items_of(columns, audiences)])[0]
    assert [error is not None for _, _, error in found] == [index == bad for index in range(len(shares))]


def test_bytes_that_match_only_in_total_fail() -> None:
    """One request has the bytes of two rows and claims one; the other has too few."""
    case = CASES["identity"]
    columns, audiences = batch_of(case, ["a", "b"], [1, 1], 3)
    (one, b), (other, _) = columns.data
    columns.data = ((one + other, b), (b"", b))
    found, _ = outcomes(case, False, WorkColumns(columns, audiences))
    assert [error is not None for _, _, error in found] == [True, True]


def test_forms_may_change_from_batch_to_batch() -> None:
    case = CASES["add"]
    work_items: list[Sequence[Work]] = []
    expected: list[Outcome] = []
    for names, width in (
        (["a", "b"], 3),
        (["b", "a"], 2),
        (["a", "b"], 2),
        (["b", "a"], 1),
        (["b"], 1),
        (["a", "b"], 2),
    ):
        columns, audiences = batch_of(case, names, [1, 2], width)
        work_items.append(WorkColumns(columns, audiences))
        expected += outcomes(case, False, work_items_of(columns, audiences))[0]
    assert outcomes(case, False, *work_items)[0] == expected


def test_a_request_of_no_rows_gets_empty_outputs_or_the_same_error() -> None:
    case = CASES["identity"]
    columns, audiences = batch_of(case, ["a", "b"], [0, 2], 3)
    found, _ = outcomes(case, False, WorkColumns(columns, audiences))
    assert found == outcomes(case, False, work_items_of(columns, audiences))[0]


@pytest.mark.parametrize("width", [1, 3])
def test_large_outputs_of_several_audiences_are_not_shared(width: int) -> None:
    case = CASES["outputs above the inline limit"]
    columns, _ = batch_of(case, ["a"], [1, 2, 1], width)
    audiences = ("uid:5", "uid:6", "uid:5")
    with Parts(case.config) as parts:
        results, _, _ = parts.runner(Applied(wide, True, case.config)).run_batch(WorkColumns(columns, audiences))
        handles = [row.outputs[0].data[0] for row in rows_of(results)]  # type: ignore[index]
        announced = {message.segment: message.audience for message in parts.maps}
        assert [announced[handle.segment] for handle in handles] == list(audiences)  # type: ignore[union-attr]


@cases(
    ([1, 1], INLINE_BYTES // 4, True),
    ([1, 1], INLINE_BYTES // 4 + 1, False),
    ([1, 3], INLINE_BYTES // 8, False),
    ids=["at the limit", "larger", "several rows"],
)
def test_shares_above_the_inline_limit_are_not_in_columns(shares: list[int], width: int, columnar: bool) -> None:
    case = Case(ONE, {"a": A}, lambda arrays: [np.zeros((sum(shares), width), np.float32)], True)
    columns, audiences = batch_of(case, ["a"], shares, 1)
    found, results = outcomes(case, False, WorkColumns(columns, audiences))
    assert isinstance(results, Columns) == columnar
    assert columnar or type(results[-1].outputs[0].data) is tuple
    assert [outputs[0][2] for _, outputs, _ in found] == [(rows, width) for rows in shares]


@pytest.mark.parametrize("count", [PACKET_MESSAGES, PACKET_MESSAGES + 1, 3000])
def test_the_broker_can_read_the_results_of_a_batch_of_any_size(count: int) -> None:
    shares = [1] * count
    case = replace(CASES["identity"], config=replace(BOTH, max_batch_size=4096))
    columns, audiences = batch_of(case, ["a", "b"], shares, 1)
    work_items = WorkColumns(columns, audiences)
    _, results = outcomes(case, False, work_items)
    report = (
        Done(7, (), (1, 2, 3, 4), columns=results)
        if isinstance(results, Columns)
        else Done(7, tuple(results), (1, 2, 3, 4))
    )
    (found,) = codec.Codec(WorkerReport).decode(codec.encode([report]))
    assert isinstance(found, Done), found
    assert [row.request for row in rows_of(found.columns or found.rows)] == list(columns.requests)
