"""Requests become arrays and arrays become rows, without a process. Expected values come from numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.protocol.messages import FIELD_BYTES, INLINE_BYTES, Handle, Tensor, Wanted
from shmserve.protocol.worker_messages import Row, Work
from shmserve.repo.config.schema import ModelConfig, ModelInput, ModelOutput, ModelTensorReshape
from shmserve.workers.batch.gather import GatherGroup
from shmserve.workers.batch.results import Results
from shmserve.workers.batch.specs import inputs_of, outputs_of
from tests.support.cases import cases
from tests.support.workers.batch_parts import Parts
from tests.support.workers.worker_harness import assert_failed, config, work

CONFIG = config(
    "identity", {"a": ("FP32", (-1,)), "b": ("INT16", (2,))}, {"y": ("FP32", (-1,)), "z": ("INT16", (2,))}, max_batch=64
)


@pytest.fixture
def parts() -> Iterator[Parts]:
    with Parts(CONFIG) as parts:
        yield parts


# A request: rows, width of a, whether inline or the rows at which parts begin, and whether b comes first.
shares = st.tuples(st.integers(1, 4), st.sampled_from([0, 1, 3]), st.integers(0, 3), st.booleans())


@given(batch=st.lists(shares, min_size=1, max_size=6))
def test_every_request_gets_its_own_rows(batch: list[tuple[int, int, int, bool]]) -> None:
    with Parts(CONFIG) as parts:
        arrays, work_items = [], []
        for number, (rows, width, cut, swapped) in enumerate(batch):
            a = np.random.default_rng(number).random((rows, width), np.float32)
            b = np.arange(rows * 2, dtype=np.int16).reshape(rows, 2) + 100 * number
            places = [] if cut == 0 else sorted({0, min(cut, rows - 1)})
            inputs = [
                parts.tensor("a", a, places if width else places[:1]),
                parts.tensor("b", b, [] if number % 2 else places),
            ]
            work_items.append(work(number, *(reversed(inputs) if swapped else inputs), rows=rows))
            arrays.append((a, b))
        groups, failures = parts.gather.groups(work_items)
        assert not failures
        rows_of: dict[int, Row] = {}
        for group in groups:
            echo(group, Results(parts.scatter, group.work_items, group.rows), rows_of)
        for number, (a, b) in enumerate(arrays):
            row = rows_of[number]
            assert row.error is None
            assert [found.shape for found in row.outputs] == [a.shape, b.shape]
            assert (parts.read(row.outputs[0]) == a).all()
            assert (parts.read(row.outputs[1]) == b).all()
            read_back = parts.gather.read(work_items[number])
            assert np.array_equal(read_back[0], a)  # type: ignore[arg-type]


def echo(group: GatherGroup, results: Results, rows_of: dict[int, Row]) -> None:
    for index in range(2):
        array: Any = group.array(index)
        copied = np.empty(array.shape, array.dtype)
        group.copy(index, copied)
        assert (copied == array).all()
        if index:
            results.put(index, array)
        else:
            results.place(index, array.shape)[...] = array
    for each, row in zip(group.work_items, results.rows(), strict=True):
        assert row.request == each.request
        rows_of[row.request] = row


def test_a_single_request_is_read_in_place(parts: Parts) -> None:
    a = parts.tensor("a", np.arange(4000, dtype=np.float32).reshape(1, 4000), [0])
    ((group,), _) = parts.gather.groups([work(1, a, parts.tensor("b", np.zeros((1, 2), np.int16)))])
    array: Any = group.array(0)
    assert isinstance(a.data, tuple)
    assert array.__array_interface__["data"][0] == parts.mapped.address(a.data[0])
    assert not array.flags.writeable


def test_unaligned_elements_are_copied_to_aligned_memory(parts: Parts) -> None:
    a = np.arange(2000, dtype=np.float32).reshape(1, 2000)
    shared = parts.share(b"123" + a.tobytes())
    tensor = Tensor("a", "FP32", a.shape, (Handle(shared.segment, shared.offset + 3, 8000),))
    b = parts.tensor("b", np.zeros((1, 2), np.int16))
    ((group,), failures) = parts.gather.groups([work(1, tensor, b)])
    array: Any = group.array(0)
    assert not failures
    assert array.flags.aligned
    assert (array == a).all()


def lone_work_items(*rows: int, outputs: tuple[Wanted, ...] | None = None) -> list[Work]:
    return [work(number, rows=count, outputs=outputs) for number, count in enumerate(rows)]


def test_a_batch_for_one_audience_is_one_block(parts: Parts) -> None:
    width = INLINE_BYTES
    results = Results(parts.scatter, lone_work_items(1, 2, 1), 4)
    assert results.direct(0, (4, width))
    target = results.place(0, (4, width))
    target[...] = np.arange(4)[:, None]
    results.put(1, np.zeros((4, 2), np.int16))
    rows = results.rows()
    handles: list[Any] = [row.outputs[0].data[0] for row in rows]  # type: ignore[index]
    assert [handle.size for handle in handles] == [width * 4, width * 8, width * 4]
    assert handles[0].offset + width * 4 == handles[1].offset
    assert parts.arenas.used >= width * 16
    for row, first in zip(rows, (0, 1, 3), strict=True):
        assert (parts.read(row.outputs[0])[0] == first).all()
    parts.arenas.free(handles)
    assert parts.arenas.used == 0


def test_abandoned_or_incomplete_results_free_their_memory(parts: Parts) -> None:
    for ending in ("abandon", "rows"):
        results = Results(parts.scatter, lone_work_items(1, 1, 1), 3)
        results.place(0, (3, 4000))
        assert parts.arenas.used
        if ending == "abandon":
            results.abandon()
        else:
            with pytest.raises(ModelFailed, match=r"did not produce output 'z': expected 2 output\(s\), found 1"):
                results.rows()
        assert parts.arenas.used == 0


def test_a_request_that_fails_at_its_second_output_frees_the_first(parts: Parts) -> None:
    small = Wanted("z", Handle(1 << 32, 0, 3))
    work_items = [work(1, rows=1, outputs=[Wanted("y"), small]), work(2, rows=1)]
    results = Results(parts.scatter, work_items, 2)
    results.put(0, np.ones((2, 4000), np.float32))
    results.put(1, np.ones((2, 2), np.int16))
    failed, good = results.rows()
    assert_failed(failed, "INVALID_ARG", "has 4 bytes; the memory given for it has 3")
    assert good.error is None
    parts.free(*good.outputs)
    assert parts.arenas.used == 0


def test_outputs_that_no_request_wants_are_not_needed(parts: Parts) -> None:
    results = Results(parts.scatter, lone_work_items(1, 1, outputs=(Wanted("z"),)), 2)
    assert [results.needed(0), results.needed(1)] == [False, True]
    results.put(0, np.ones((2, 4000), np.float32))
    results.put(1, np.ones((2, 2), np.int16))
    assert [[found.name for found in row.outputs] for row in results.rows()] == [["z"], ["z"]]
    assert parts.arenas.used == 0


@cases(
    ((1,), (), (5, 1), (5,)),
    ((-1, 4), (-1, 2, 2), (3, 7, 4), (3, 7, 2, 2)),
    ((-1, -1), (1, -1, -1), (2, 3, 4), (2, 1, 3, 4)),
    ids=str,
)
def test_shapes_are_converted_by_the_reshape(
    dims: tuple[int, ...], shape: tuple[int, ...], outer: tuple[int, ...], inner: tuple[int, ...]
) -> None:
    reshape = ModelTensorReshape(shape=shape)
    given = ModelConfig(
        max_batch_size=8,
        input=(ModelInput(name="x", data_type="TYPE_FP32", dims=dims, reshape=reshape),),
        output=(ModelOutput(name="y", data_type="TYPE_FP32", dims=dims, reshape=reshape),),
    )
    for spec in (*inputs_of(given), *outputs_of(given)):
        assert spec.inner(outer) == inner
        assert spec.outer(inner) == outer
        assert spec.fits(inner)
        assert not spec.fits((*inner, 1))
    with pytest.raises(InvalidRequest, match="dims of the configuration"):
        inputs_of(given)[0].inner((*outer, 1))


def test_a_reshape_must_keep_the_number_of_variable_dims() -> None:
    entry = ModelInput(name="x", data_type="TYPE_FP32", dims=(-1, 2), reshape=ModelTensorReshape(shape=(2,)))
    with pytest.raises(InvalidRequest, match="the same number of variable dims"):
        inputs_of(ModelConfig(input=(entry,)))


def test_a_tensor_must_have_a_data_type() -> None:
    with pytest.raises(InvalidRequest, match="TYPE_INVALID"):
        inputs_of(ModelConfig(input=(ModelInput(name="x", dims=(1,)),)))


@pytest.mark.parametrize("together", [1, 2])
def test_many_small_outputs_of_one_request_fit_into_a_packet(together: int) -> None:
    """Each output may be in the message, but not all of them together: the rest is placed in shared memory."""
    outputs = {f"y{number}": ("FP32", (-1,)) for number in range(100)}
    array = np.tile(np.arange(1000, dtype=np.float32), (together, 1))
    with Parts(config("identity", {}, outputs, max_batch=4)) as parts:
        results = Results(parts.scatter, lone_work_items(*[1] * together), together)
        for index in range(100):
            results.put(index, array)
        for row in results.rows():
            assert len(row.outputs) == 100
            assert 0 < sum(len(y.data) for y in row.outputs if isinstance(y.data, bytes)) <= FIELD_BYTES
            assert all((parts.read(y) == array[:1]).all() for y in row.outputs)


@pytest.mark.parametrize("way", ["put", "place"])
@pytest.mark.parametrize("inline", [(False,), (True, True), (False, False), (True, False)], ids=str)
def test_requests_without_inline_get_all_outputs_in_shared_memory(
    parts: Parts, inline: tuple[bool, ...], way: str
) -> None:
    count = len(inline)
    array = np.arange(3 * count, dtype=np.float32).reshape(count, 3)
    work_items = [Work(number, 1, (), None, "internal", inline=wanted) for number, wanted in enumerate(inline)]
    results = Results(parts.scatter, work_items, count)
    if way == "put":
        results.put(0, array)
    else:
        results.place(0, array.shape)[...] = array
    results.put(1, np.zeros((count, 2), np.int16))
    outputs = [row.outputs[0] for row in results.rows()]
    assert [isinstance(y.data, bytes) for y in outputs] == list(inline)
    assert [parts.read(y).tolist() for y in outputs] == [[row] for row in array.tolist()]
