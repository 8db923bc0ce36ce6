"""Requirements for every backend, tested through a real worker process. Expected values come from numpy.

Each backend has a model whose outputs are its inputs, with all data types in one model.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.dtypes import to_numpy
from shmserve.protocol.messages import INLINE_BYTES, Handle, Return, Tensor, Wanted
from shmserve.protocol.worker_messages import Row
from tests.support.workers.models.worker_models import KINDS, TENSORRT, Kind, needs
from tests.support.workers.worker_harness import CLIENT, WORKER, WorkerProcess, assert_failed, work

Array = np.ndarray[Any, np.dtype[Any]]

ALL = (*KINDS, TENSORRT)
ECHOES = [pytest.param((kind, dtypes), id=f"{kind.name}-{len(dtypes)}") for kind in ALL for dtypes in kind.dtypes]
AUDIENCES = ("internal", "uid:1000", "uid:1001", "posix:uid:1000")
pytestmark = pytest.mark.process


class Echo:
    """A worker with the echo model of one backend."""

    def __init__(self, worker: WorkerProcess, kind: Kind, dtypes: tuple[str, ...]) -> None:
        self.worker = worker
        self.kind = kind
        self.dtypes = dtypes
        self.numbers = itertools.count(1)

    def arrays(self, shape: tuple[int, ...], seed: int = 0) -> dict[str, Array]:
        """Inputs of this shape, with the model's width if it supports only one."""
        return arrays_of(self.dtypes, (*shape[:-1], self.kind.width or shape[-1]), seed)

    def grow(self, shape: tuple[int, ...], rows: int) -> None:
        """Grows all arenas to their final size, so that the leak check finds no new segments after a test."""
        block = self.worker.arena.allocate(16 << 20)
        self.worker.arena.free(block.segment, block.offset)
        arrays = self.arrays(shape) if rows else arrays_of(self.dtypes, shape)
        for audience in AUDIENCES:
            self.round_trip(arrays, rows=rows, audience=audience)

    def work(self, arrays: dict[str, Array], rows: int | None = None, **how: Any) -> Any:
        shared = how.pop("shared", None)
        tensors = [
            self.worker.tensor(f"x{dtype}", array, dtype=dtype, shared=shared) for dtype, array in arrays.items()
        ]
        return work(next(self.numbers), *tensors, rows=rows, **how)

    def round_trip(self, *given: dict[str, Array], **how: Any) -> None:
        """Sends these requests as one batch; each must get its own arrays back."""
        rows = self.worker.run(*[self.work(arrays, **how) for arrays in given])
        for row, arrays in zip(rows, given, strict=True):
            self.check(row, arrays)

    def check(self, row: Row, arrays: dict[str, Array]) -> None:
        assert row.error is None, row.error
        assert [tensor.name for tensor in row.outputs] == [f"y{dtype}" for dtype in arrays]
        for tensor, (dtype, expected) in zip(row.outputs, arrays.items(), strict=True):
            assert (tensor.dtype, tensor.shape) == (dtype, expected.shape)
            found = self.worker.array(tensor, to_numpy(dtype))
            assert np.array_equal(found, expected), tensor.name
            # Small outputs are in the message; memory of the worker must be returned.
            if isinstance(tensor.data, bytes):
                assert len(tensor.data) <= INLINE_BYTES
            else:
                self.worker.send(Return(tensor.data))  # type: ignore[arg-type]


def arrays_of(dtypes: tuple[str, ...], shape: tuple[int, ...], seed: int = 0) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    found = {}
    for dtype in dtypes:
        if dtype == "BYTES":
            values = np.empty(int(np.prod(shape)), object)
            values[:] = [f"value {number} é".encode() * (number % 3) for number in range(values.size)]
            found[dtype] = values.reshape(shape)
        elif dtype == "BOOL":
            found[dtype] = random.integers(0, 2, shape).astype(bool)
        else:
            found[dtype] = random.integers(0, 100, shape).astype(to_numpy(dtype))
    return found


@pytest.fixture(scope="module", params=ECHOES)
def batched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Echo]:
    kind, dtypes = request.param
    needs(kind)
    folder = tmp_path_factory.mktemp("model")
    with WorkerProcess(kind.echo(folder, dtypes, (-1,), 16), folder, packages=kind.packages) as worker:
        worker.loaded()
        echo = Echo(worker, kind, dtypes)
        echo.grow((1, 40_000), 1)
        yield echo


@pytest.fixture(scope="module", params=ALL, ids=lambda kind: kind.name)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Echo]:
    """A model without a batch dimension."""
    kind = request.param
    dtypes = kind.dtypes[0]
    needs(kind)
    folder = tmp_path_factory.mktemp("model")
    with WorkerProcess(kind.echo(folder, dtypes, (-1, 2), 0), folder, packages=kind.packages) as worker:
        worker.loaded()
        echo = Echo(worker, kind, dtypes)
        echo.grow((20_000, 2), 0)
        yield echo


@pytest.mark.parametrize("width", [0, 1, 5, 1500])
@pytest.mark.parametrize("shares", [(1,), (3,), (1, 1, 1, 1), (3, 1, 2)], ids=str)
def test_each_request_gets_its_rows(batched: Echo, width: int, shares: tuple[int, ...]) -> None:
    batched.round_trip(*[batched.arrays((rows, width), seed) for seed, rows in enumerate(shares)])


def test_shared_and_inline_inputs_in_any_order_in_one_batch(batched: Echo) -> None:
    given = [batched.arrays((1, 7), seed) for seed in range(4)]
    work_items = [
        batched.work(dict(reversed(arrays.items())) if number > 1 else arrays, shared=number % 2 == 0)
        for number, arrays in enumerate(given)
    ]
    for row, arrays in zip(batched.worker.run(*work_items), given, strict=True):
        batched.check(row, arrays)
    (row,) = batched.worker.run(batched.work(dict(reversed(given[0].items()))))
    batched.check(row, given[0])


def test_requests_of_different_shapes_run_separately(batched: Echo) -> None:
    """The broker never batches such requests. If it did, each would still get its own outputs."""
    batched.round_trip(*[batched.arrays((1, width)) for width in (3, 4, 3, 1200)])


def test_rows_of_one_tensor_in_several_places(batched: Echo) -> None:
    arrays = batched.arrays((4, 9))
    given = batched.work(arrays, shared=True)
    parted = []
    for tensor, array in zip(given.inputs, arrays.values(), strict=True):
        if tensor.dtype == "BYTES":
            parted.append(tensor)
            continue
        places = []
        for piece in (array[:1], array[1:3], array[3:]):
            (place,) = batched.worker.tensor("", piece, dtype=tensor.dtype, shared=True).data  # type: ignore[misc]
            places.append(place)
        parted.append(Tensor(tensor.name, tensor.dtype, tensor.shape, tuple(places)))  # type: ignore[arg-type]
    (row,) = batched.worker.run(work(given.request, *parted))
    batched.check(row, arrays)
    whole = batched.work(batched.arrays((1, 9), 5))
    rows = batched.worker.run(whole, work(next(batched.numbers), *parted))
    batched.check(rows[1], arrays)


def test_requested_outputs(batched: Echo) -> None:
    arrays = batched.arrays((1, 3))
    last, first = batched.dtypes[-1], batched.dtypes[0]
    some = [Wanted(f"y{dtype}") for dtype in dict.fromkeys((last, first))]
    rows = batched.worker.run(
        batched.work(arrays, outputs=some), batched.work(arrays), batched.work(arrays, outputs=[])
    )
    batched.check(rows[0], {last: arrays[last], first: arrays[first]})
    batched.check(rows[1], arrays)
    assert rows[2].error is None
    assert rows[2].outputs == ()


@pytest.mark.parametrize("together", [1, 3])
def test_outputs_in_the_callers_memory(batched: Echo, together: int) -> None:
    dtypes = tuple(dtype for dtype in batched.dtypes if dtype != "BYTES")
    work_items, given = [], []
    for seed in range(together):
        arrays = batched.arrays((1, 11), seed)
        wanted = [Wanted(f"y{dtype}", batched.worker.place(arrays[dtype].nbytes)) for dtype in dtypes]
        work_items.append(batched.work(arrays, outputs=wanted))
        given.append((arrays, wanted))
    for row, (arrays, wanted) in zip(batched.worker.run(*work_items), given, strict=True):
        assert row.error is None, row.error
        for tensor, want, dtype in zip(row.outputs, wanted, dtypes, strict=True):
            assert tensor.data == (want.place,)
            assert np.array_equal(batched.worker.array(tensor, to_numpy(dtype)), arrays[dtype])


def test_requests_without_a_batch_dimension(plain: Echo) -> None:
    for length in (0, 1, 3, 2000):
        plain.round_trip(arrays_of(plain.dtypes, (length, 2), length), rows=0)
    plain.round_trip(*[arrays_of(plain.dtypes, (2, 2), seed) for seed in range(3)], rows=0)


def test_outputs_never_alias_inputs(plain: Echo) -> None:
    arrays = arrays_of(plain.dtypes, (1000, 2))
    given = plain.work(arrays, rows=0, shared=True)
    (row,) = plain.worker.run(given)
    places = {handle for tensor in given.inputs for handle in tensor.data}
    for tensor in row.outputs:
        assert not isinstance(tensor.data, tuple) or not places & set(tensor.data)
    plain.check(row, arrays)


def test_each_audience_has_its_own_memory(plain: Echo) -> None:
    arrays = arrays_of(plain.dtypes, (3000, 2))
    seen: dict[str, set[int]] = {}
    for audience in (*AUDIENCES, *AUDIENCES):
        (row,) = plain.worker.run(plain.work(arrays, rows=0, audience=audience))
        used = {handle.segment for t in row.outputs if isinstance(t.data, tuple) for handle in t.data}
        seen.setdefault(audience, set()).update(used)
        plain.check(row, arrays)
    for one, other in itertools.combinations(seen.values(), 2):
        assert not one & other
    audiences = {message.segment: message for message in plain.worker.maps}
    for audience, segments in seen.items():
        for segment in segments:
            assert segment >> 32 == WORKER
            assert audiences[segment].audience == audience
            name = audiences[segment].name
            assert (name is not None) == audience.startswith("posix")
            if name is not None:  # owned by another user, who may read it as a member of the server's group
                found = Path("/dev/shm", name.lstrip("/")).stat()
                assert stat.S_IMODE(found.st_mode) == 0o640
                assert found.st_gid == os.getegid()


def test_a_batch_of_several_audiences(batched: Echo) -> None:
    arrays = [batched.arrays((1, 1500), seed) for seed in range(3)]
    audiences = ("uid:1000", "uid:1001", "uid:1000")
    work_items = [batched.work(a, audience=audience) for a, audience in zip(arrays, audiences, strict=True)]
    rows = batched.worker.run(*work_items)
    by_segment = {message.segment: message.audience for message in batched.worker.maps}
    for row, given, audience in zip(rows, arrays, audiences, strict=True):
        for tensor in row.outputs:
            for handle in tensor.data if isinstance(tensor.data, tuple) else ():
                assert by_segment[handle.segment] == audience
        batched.check(row, given)


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind.failing], ids=lambda kind: kind.name)
def test_a_failing_model_fails_its_batch_only(kind: Kind, tmp_path: Path) -> None:
    needs(kind)
    assert kind.failing is not None
    assert kind.fail is not None
    x = Tensor("x", "FP32", (1, 2), np.array([[1, 2]], np.float32).tobytes())
    bad, options = kind.fail(x)
    with WorkerProcess(kind.failing(tmp_path), tmp_path, packages=kind.packages) as worker:
        worker.loaded()
        rows = worker.run(work(1, x), work(2, *bad, options=options), work(3, x))
        ((last,), said) = worker.run(work(4, x)), worker.said()
    if kind.isolates:
        for row in (rows.pop(0), rows.pop()):
            assert row.error is None
            assert row.outputs[0].data == x.data
    for row in rows:
        assert_failed(row, "MODEL_FAILED")
        assert row.error is not None
        assert row.error.text.startswith("Failed to process the request(s) for model instance 'm_0_0', message: ")
    assert last.error is None
    assert last.outputs[0].data == x.data
    assert "m_0_0" in said


WIDTH = 4


def bad_tensors(dtype: str, size: int, handle: Handle) -> list[tuple[Tensor, str, str]]:
    """Wrong descriptions of an input of shape (1, WIDTH) whose bytes are at a handle."""
    wrong = "FP64" if dtype != "FP64" else "FP32"
    segment, offset = handle.segment, handle.offset

    def bad(data: Any, shape: tuple[int, ...] = (1, WIDTH), name: str = f"x{dtype}", kind: str = dtype) -> Tensor:
        return Tensor(name, kind, shape, data)

    zeros = b"\0" * size
    halves = (Handle(segment, offset, 1), Handle(segment, offset, size - 1))
    return [
        (bad(zeros[1:]), "INVALID_ARG", f"got {size - 1}"),
        (bad(zeros + b"\0"), "INVALID_ARG", f"Expected {size}"),
        (bad(zeros, kind=wrong), "INVALID_ARG", f"'{wrong}'"),
        (bad(zeros, name="nothing"), "INVALID_ARG", "'nothing'"),
        (bad(zeros, (1, -WIDTH)), "INVALID_ARG", "negative dim"),
        (bad(zeros * 2, (2, WIDTH)), "INVALID_ARG", "batch size"),
        (bad(zeros, ()), "INVALID_ARG", "batch size"),
        (bad(0), "INVALID_ARG", "frame"),
        (bad((Handle(segment + 99, 0, size),)), "HANDLE_LOST", ""),
        (bad((Handle(segment, 1 << 40, size),)), "INVALID_ARG", "outside"),
        (bad((Handle(segment, offset, size - 1),)), "INVALID_ARG", "got"),
        (bad(halves), "INVALID_ARG", "rows"),
    ]


def test_a_bad_input_fails_its_request_alone(batched: Echo) -> None:
    dtype = batched.dtypes[-2] if batched.dtypes[-1] == "BYTES" else batched.dtypes[0]
    good = batched.arrays((1, WIDTH))
    size = good[dtype].nbytes
    (handle,) = batched.worker.tensor("", good[dtype], dtype=dtype, shared=True).data  # type: ignore[misc]
    assert isinstance(handle, Handle)
    for tensor, code, text in bad_tensors(dtype, size, handle):
        middle = batched.work(good)
        middle.inputs = tuple(tensor if given.name == f"x{dtype}" else given for given in middle.inputs)
        rows = batched.worker.run(batched.work(good), middle, batched.work(good))
        batched.check(rows[0], good)
        batched.check(rows[2], good)
        assert_failed(rows[1], code, text)


def test_missing_and_repeated_inputs(batched: Echo) -> None:
    good = batched.arrays((1, 2))
    few, twice = batched.work(good), batched.work(good)
    few.inputs = few.inputs[1:]
    twice.inputs = (*twice.inputs, twice.inputs[0])
    rows = batched.worker.run(few, twice, batched.work(good))
    assert_failed(rows[0], "INVALID_ARG", f"x{batched.dtypes[0]}")
    assert_failed(rows[1], "INVALID_ARG", "given twice")
    batched.check(rows[2], good)


def test_a_bad_output_fails_its_request_alone(batched: Echo) -> None:
    arrays = batched.arrays((1, 5))
    dtype = batched.dtypes[0]
    size = arrays[dtype].nbytes
    small = batched.worker.place(size)
    bad_outputs = [
        (Wanted("nothing"), "INVALID_ARG", "'nothing'"),
        (Wanted(f"y{dtype}", Handle(small.segment, small.offset, size - 1)), "INVALID_ARG", f"{size} bytes"),
        (Wanted(f"y{dtype}", Handle((CLIENT << 32) + 77, 0, size)), "HANDLE_LOST", ""),
        (Wanted(f"y{dtype}", Handle(small.segment, 1 << 40, size)), "INVALID_ARG", "outside"),
    ]
    for wanted, code, text in bad_outputs:
        for alone in (True, False):
            bad = batched.work(arrays, outputs=[wanted])
            rows = batched.worker.run(bad) if alone else batched.worker.run(bad, batched.work(arrays))
            assert_failed(rows[0], code, text)
            if not alone:
                batched.check(rows[1], arrays)
