"""Requests to arrays and arrays to rows, without a process. numpy says what is right."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.dtypes import to_numpy
from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.protocol.messages import INLINE_BYTES, Handle, Map, Row, Tensor, Wanted, Work
from shmserve.repo.config.schema import ModelConfig, ModelInput, ModelOutput, ModelTensorReshape
from shmserve.shm.arena import Arena, Segment
from shmserve.shm.extents import memfd
from shmserve.shm.mapped import Mapped
from shmserve.workers.batch.gather import Gather, GatherGroup
from shmserve.workers.batch.scatter import Results, Scatter
from shmserve.workers.batch.specs import inputs_of, outputs_of
from shmserve.workers.outbox import Outbox
from shmserve.workers.output_arenas import Arenas

Array = np.ndarray[Any, np.dtype[Any]]
WORKER = 7


class Parts(NamedTuple):
    """What a model of two inputs and two outputs needs around it."""

    gather: Gather
    scatter: Scatter
    arenas: Arenas
    mapped: Mapped
    client: Arena


def model(max_batch: int) -> ModelConfig:
    return ModelConfig(
        name="m",
        max_batch_size=max_batch,
        input=(
            ModelInput(name="a", data_type="TYPE_FP32", dims=(-1,)),
            ModelInput(name="b", data_type="TYPE_INT16", dims=(2,)),
        ),
        output=(
            ModelOutput(name="y", data_type="TYPE_FP32", dims=(-1,)),
            ModelOutput(name="z", data_type="TYPE_INT16", dims=(2,)),
        ),
    )


class Nowhere:
    """A link that nobody reads."""

    def send_packet(self, packet: bytes, descriptors: Sequence[int]) -> None:
        """It is gone."""


@contextmanager
def parts_of(config: ModelConfig) -> Iterator[Parts]:
    mapped = Mapped()

    def announce(segment: Segment) -> None:
        mapped.add(segment.id, segment.size, fd=os.dup(segment.fd))

    outbox = Outbox(Nowhere())  # type: ignore[arg-type]
    client = Arena(1, memfd.create, limit_bytes=1 << 26, announce=announce)
    arenas = Arenas(WORKER, outbox, mapped)
    gather = Gather("m", inputs_of(config), mapped)
    try:
        yield Parts(gather, Scatter("m", outputs_of(config), arenas, mapped), arenas, mapped, client)
    finally:
        outbox.flush()
        arenas.close()
        client.close()
        mapped.close()


@pytest.fixture
def parts() -> Iterator[Parts]:
    with parts_of(model(64)) as made:
        yield made


def tensor(client: Arena, name: str, array: Array, dtype: str, places: Sequence[int]) -> Tensor:
    """`places` empty: inline; else the rows at which a new part begins."""
    if not places:
        return Tensor(name, dtype, array.shape, array.tobytes())
    handles = []
    for start, end in zip(places, [*places[1:], len(array)], strict=True):
        data = array[start:end].tobytes()
        block = client.allocate(len(data))
        block.memory()[: len(data)] = data
        handles.append(Handle(block.segment, block.offset, len(data)))
    return Tensor(name, dtype, array.shape, tuple(handles))


# A request: rows, width of a, whether inline or the rows at which parts begin, and whether b comes first.
shares = st.tuples(st.integers(1, 4), st.sampled_from([0, 1, 3]), st.integers(0, 3), st.booleans())


@given(batch=st.lists(shares, min_size=1, max_size=6))
def test_every_request_gets_its_own_rows(batch: list[tuple[int, int, int, bool]]) -> None:
    with parts_of(model(64)) as made:
        arrays, works = [], []
        for number, (rows, width, cut, swapped) in enumerate(batch):
            a = np.random.default_rng(number).random((rows, width), np.float32)
            b = np.arange(rows * 2, dtype=np.int16).reshape(rows, 2) + 100 * number
            places = [] if cut == 0 else sorted({0, min(cut, rows - 1)})
            inputs = [
                tensor(made.client, "a", a, "FP32", places if width else places[:1]),
                tensor(made.client, "b", b, "INT16", [] if number % 2 else places),
            ]
            works.append(Work(number, rows, tuple(reversed(inputs) if swapped else inputs), None, "internal"))
            arrays.append((a, b))
        groups, failures = made.gather.groups(works)
        assert not failures
        rows_of: dict[int, Row] = {}
        for group in groups:
            echo(group, made.scatter.results(group.works, group.rows), rows_of, made)
        for number, (a, b) in enumerate(arrays):
            row = rows_of[number]
            assert row.error is None
            assert [found.shape for found in row.outputs] == [a.shape, b.shape]
            assert (read(made, row.outputs[0], np.float32) == a).all()
            assert (read(made, row.outputs[1], np.int16) == b).all()
            read_back = made.gather.read(works[number])
            assert read_back[0] is not None
            assert (read_back[0] == a).all()


def echo(group: GatherGroup, results: Results, rows_of: dict[int, Row], made: Parts) -> None:
    for index in range(2):
        array = group.array(index)
        assert array is not None
        copied = np.empty(array.shape, array.dtype)
        group.copy(index, copied)
        assert (copied == array).all()
        if index:
            results.put(index, array)
        else:
            results.place(index, array.shape)[...] = array
    for work, row in zip(group.works, results.rows(), strict=True):
        assert row.request == work.request
        rows_of[row.request] = row


def read(made: Parts, found: Tensor, dtype: Any) -> Array:
    if isinstance(found.data, bytes):
        return np.frombuffer(found.data, dtype).reshape(found.shape)
    assert isinstance(found.data, tuple)
    (handle,) = found.data
    return made.mapped.view(handle, np.dtype(dtype), found.shape).copy()


def test_one_request_is_read_where_it_is(parts: Parts) -> None:
    a = np.arange(4000, dtype=np.float32).reshape(1, 4000)
    b = np.zeros((1, 2), np.int16)
    work = Work(
        1, 1, (tensor(parts.client, "a", a, "FP32", [0]), tensor(parts.client, "b", b, "INT16", [])), None, "internal"
    )
    ((group,), _) = parts.gather.groups([work])
    array = group.array(0)
    assert array is not None
    assert isinstance(work.inputs[0].data, tuple)
    assert array.__array_interface__["data"][0] == parts.mapped.address(work.inputs[0].data[0])
    assert not array.flags.writeable
    assert parts.gather._buffers[0].size == 0


def test_elements_that_are_not_on_their_boundary(parts: Parts) -> None:
    a = np.arange(2000, dtype=np.float32).reshape(1, 2000)
    block = parts.client.allocate(8003)
    block.memory()[3:8003] = a.tobytes()
    inputs = (
        Tensor("a", "FP32", a.shape, (Handle(block.segment, block.offset + 3, 8000),)),
        Tensor("b", "INT16", (1, 2), b"\0" * 4),
    )
    ((group,), failures) = parts.gather.groups([Work(1, 1, inputs, None, "internal")])
    array = group.array(0)
    assert not failures
    assert array is not None
    assert array.flags.aligned
    assert (array == a).all()


def test_a_batch_of_one_audience_is_one_block(parts: Parts) -> None:
    width = INLINE_BYTES
    works = [Work(number, rows, (), None, "internal") for number, rows in enumerate((1, 2, 1))]
    results = parts.scatter.results(works, 4)
    assert results.direct(0, (4, width))
    target = results.place(0, (4, width))
    target[...] = np.arange(4)[:, None]
    results.put(1, np.zeros((4, 2), np.int16))
    rows = results.rows()
    handles: list[Any] = [row.outputs[0].data[0] for row in rows]  # type: ignore[index]
    assert [handle.size for handle in handles] == [width * 4, width * 8, width * 4]
    assert handles[0].offset + width * 4 == handles[1].offset
    assert parts.arenas.used >= width * 16
    for number, row in enumerate(rows):
        assert (read(parts, row.outputs[0], np.float32)[0] == (0, 1, 3)[number]).all()
    parts.arenas.free(handles)
    assert parts.arenas.used == 0


def test_what_is_abandoned_goes_back(parts: Parts) -> None:
    works = [Work(number, 1, (), None, "internal") for number in range(3)]
    results = parts.scatter.results(works, 3)
    results.place(0, (3, 4000))
    results.put(1, np.zeros((3, 2), np.int16))
    assert parts.arenas.used
    results.abandon()
    assert parts.arenas.used == 0


def test_a_missing_output_fails_and_gives_back_the_others(parts: Parts) -> None:
    works = [Work(number, 1, (), None, "internal") for number in range(3)]
    results = parts.scatter.results(works, 3)
    results.place(0, (3, 4000))
    with pytest.raises(ModelFailed, match=r"did not produce output 'z': expected 2 output\(s\), found 1"):
        results.rows()
    assert parts.arenas.used == 0


def test_a_request_that_fails_late_keeps_nothing(parts: Parts) -> None:
    """Its first output is placed before its second turns out to have no room."""
    bad = Wanted("z", Handle(1 << 32, 0, 3))
    works = [
        Work(1, 1, (), (Wanted("y"), bad), "internal"),
        Work(2, 1, (), None, "internal"),
    ]
    results = parts.scatter.results(works, 2)
    results.put(0, np.ones((2, 4000), np.float32))
    results.put(1, np.ones((2, 2), np.int16))
    failed, good = results.rows()
    assert failed.error is not None
    assert failed.error.code == "INVALID_ARG"
    assert "has 4 bytes; the memory given for it has 3" in failed.error.text
    assert good.error is None
    parts.arenas.free(good.outputs[0].data)  # type: ignore[arg-type]
    assert parts.arenas.used == 0


def test_outputs_that_nobody_wants_are_not_needed(parts: Parts) -> None:
    works = [Work(number, 1, (), (Wanted("z"),), "internal") for number in range(2)]
    results = parts.scatter.results(works, 2)
    assert [results.needed(0), results.needed(1)] == [False, True]
    results.put(0, np.ones((2, 4000), np.float32))
    results.put(1, np.ones((2, 2), np.int16))
    assert [[found.name for found in row.outputs] for row in results.rows()] == [["z"], ["z"]]
    assert parts.arenas.used == 0


@pytest.mark.parametrize(
    ("dims", "shape", "outer", "inner"),
    [
        ((1,), (), (5, 1), (5,)),
        ((-1, 4), (-1, 2, 2), (3, 7, 4), (3, 7, 2, 2)),
        ((-1, -1), (1, -1, -1), (2, 3, 4), (2, 1, 3, 4)),
    ],
    ids=str,
)
def test_reshape(dims: tuple[int, ...], shape: tuple[int, ...], outer: tuple[int, ...], inner: tuple[int, ...]) -> None:
    reshape = ModelTensorReshape(shape=shape)
    config = ModelConfig(
        max_batch_size=8,
        input=(ModelInput(name="x", data_type="TYPE_FP32", dims=dims, reshape=reshape),),
        output=(ModelOutput(name="y", data_type="TYPE_FP32", dims=dims, reshape=reshape),),
    )
    for spec in (*inputs_of(config), *outputs_of(config)):
        assert spec.inner(outer) == inner
        assert spec.outer(inner) == outer
        assert spec.fits(inner)
        assert not spec.fits((*inner, 1))
    with pytest.raises(InvalidRequest, match="dims of the configuration"):
        inputs_of(config)[0].inner((*outer, 1))


def test_a_reshape_that_cannot_be() -> None:
    entry = ModelInput(name="x", data_type="TYPE_FP32", dims=(-1, 2), reshape=ModelTensorReshape(shape=(2,)))
    with pytest.raises(InvalidRequest, match="the same number of variable dims"):
        inputs_of(ModelConfig(input=(entry,)))


def test_every_data_type_has_a_spec() -> None:
    for name in ("BOOL", "BF16", "STRING"):
        entry = ModelInput(name="x", data_type=f"TYPE_{name}", dims=(1,))  # type: ignore[arg-type]
        (spec,) = inputs_of(ModelConfig(input=(entry,)))
        assert spec.numpy == to_numpy(spec.dtype)
    with pytest.raises(InvalidRequest, match="TYPE_INVALID"):
        inputs_of(ModelConfig(input=(ModelInput(name="x", dims=(1,)),)))


def test_maps_are_said_before_handles(parts: Parts) -> None:
    parts.arenas.allocate("uid:5", 5000)
    block = parts.arenas.allocate("internal", 5000)
    said = parts.scatter.arenas._outbox._messages
    assert [(type(message), message.audience) for message in said] == [(Map, "uid:5"), (Map, "internal")]
    assert block.segment >> 32 == WORKER
