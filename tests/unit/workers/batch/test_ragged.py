"""Ragged batches without a process: what a model gets for any shapes, and how outputs are cut back. numpy says what is
right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import INLINE_BYTES, Tensor, Wanted, Work
from shmserve.repo.config.schema import BatchInput, BatchOutput, ModelConfig, ModelInput, ModelOutput
from shmserve.workers.backends.base import Context, StackedBackend
from shmserve.workers.batch.gather import Gather, GatherGroup
from shmserve.workers.batch.scatter import Results, Scatter
from shmserve.workers.batch.specs import inputs_of, outputs_of
from shmserve.workers.extended import extension_of
from shmserve.workers.runner import Runner
from tests.unit.workers.batch.test_arrays import Parts, parts_of, tensor

Array = np.ndarray[Any, np.dtype[Any]]

KINDS = (
    "BATCH_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    "BATCH_ITEM_SHAPE",
    "BATCH_ITEM_SHAPE_FLATTEN",
)


def config_of(dtype: str = "TYPE_INT32") -> ModelConfig:
    return ModelConfig(
        name="m",
        max_batch_size=64,
        input=(
            ModelInput(name="x", data_type="TYPE_FP32", dims=(-1, -1), allow_ragged_batch=True),
            ModelInput(name="plain", data_type="TYPE_INT16", dims=(2,)),
        ),
        output=(
            ModelOutput(name="y", data_type="TYPE_FP32", dims=(-1, -1)),
            ModelOutput(name="z", data_type="TYPE_INT16", dims=(2,)),
        ),
        batch_input=tuple(
            BatchInput(kind=kind, target_name=(kind[6:],), data_type=dtype, source_input=("x",))  # type: ignore[arg-type]
            for kind in KINDS
        ),
        batch_output=(BatchOutput(target_name=("y",), source_input=("x",)),),
    )


class Doubling(StackedBackend):
    """y = 2 x, z = plain. `lost`: so many elements of y are missing."""

    def __init__(self, placed: bool, lost: int = 0) -> None:
        super().__init__(Context("m", 1, "m_0", Path(), Path(), {}))
        self.placed = placed
        self.lost = lost
        self.batches: list[list[Array]] = []

    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        arrays = [inputs.array(index) for index in range(2 + len(KINDS))]
        self.batches.append([array.copy() for array in arrays if array is not None])
        x, plain = arrays[:2]
        assert x is not None
        assert plain is not None
        y = (2 * x)[self.lost :]
        if outputs.needed(0):
            if self.placed:
                outputs.place(0, y.shape)[...] = y
            else:
                outputs.put(0, y)
        outputs.put(1, plain)


def run(parts: Parts, config: ModelConfig, backend: StackedBackend, works: Sequence[Work]) -> list[Any]:
    gather = Gather("m", inputs_of(config), parts.mapped)
    scatter = Scatter("m", outputs_of(config), parts.arenas, parts.mapped)
    runner = Runner("m_0", "", backend, gather, scatter, lambda *_: None, extension_of(config, Path(), backend))
    rows, _, _ = runner.run(works)
    return rows


def read(parts: Parts, found: Tensor, dtype: Any = np.float32) -> Array:
    data = found.data
    if isinstance(data, tuple):
        handles = data
        data = b"".join(parts.mapped.memory(part).tobytes() for part in handles)
        parts.arenas.free([part for part in handles if parts.arenas.owns(part.segment)])
    assert isinstance(data, bytes)
    return np.frombuffer(data, dtype).reshape(found.shape)


shapes = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([0, 1, 4]), st.sampled_from([1, 2, 700]), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(batch=shapes, dtype=st.sampled_from(["TYPE_INT32", "TYPE_FP32"]), placed=st.booleans(), some=st.booleans())
def test_any_shapes_share_a_batch(
    batch: list[tuple[int, int, int, bool]], dtype: str, placed: bool, some: bool
) -> None:
    """`some`: the last request wants z alone."""
    config = config_of(dtype)
    with parts_of(config) as parts:
        xs, plains, works = [], [], []
        for number, (rows, height, width, inline) in enumerate(batch):
            x = np.random.default_rng(number).random((rows, height, width), np.float32)
            plain = np.full((rows, 2), number, np.int16)
            inline = inline and x.nbytes <= INLINE_BYTES
            places = [] if inline or not x.size else sorted({0, rows - 1})
            inputs = (
                tensor(parts.client, "x", x, "FP32", places),
                Tensor("plain", "INT16", plain.shape, plain.tobytes()),
            )
            works.append(Work(number, rows, inputs, None, "internal"))
            xs.append(x)
            plains.append(plain)
        if some:
            works[-1].outputs = (Wanted("z"),)
        backend = Doubling(placed)
        found = run(parts, config, backend, works)
        for row, x, plain in zip(found, xs, plains, strict=True):
            assert row.error is None, row.error
            given_back = {out.name: out for out in row.outputs}
            assert read(parts, given_back["z"], np.int16).tolist() == plain.tolist()
            if some and row.request == len(batch) - 1:
                assert list(given_back) == ["z"]
                continue
            assert given_back["y"].shape == x.shape
            assert (read(parts, given_back["y"]) == 2 * x).all()
        assert parts.arenas.used == 0
    (seen,) = backend.batches
    assert seen[0].tolist() == np.concatenate([x.ravel() for x in xs]).tolist()
    assert seen[1].tolist() == np.concatenate(plains).tolist()
    counts = np.array([x.size for x in xs])
    items = [list(x.shape[1:]) for x in xs for _ in range(len(x))]
    wanted = [counts, counts.cumsum(), np.append(0, counts.cumsum()), None, np.array(items), np.ravel(items)]
    for array, expected in zip(seen[2:], wanted, strict=True):
        assert array.dtype == (np.int32 if dtype == "TYPE_INT32" else np.float32)
        if expected is None:
            assert array.shape == (counts.max(),)
        else:
            assert array.tolist() == expected.tolist()


def test_an_output_that_cannot_be_cut() -> None:
    config = config_of()
    with parts_of(config) as parts:
        x = np.ones((1, 2, 2), np.float32)
        plain = Tensor("plain", "INT16", (1, 2), bytes(4))
        works = [Work(n, 1, (tensor(parts.client, "x", x, "FP32", []), plain), None, "internal") for n in range(2)]
        for row in run(parts, config, Doubling(False, lost=1), works):
            assert row.error.code == "MODEL_FAILED"
            assert "has 7 elements; the shapes of input 'x', by which it is cut, have 8" in row.error.text


def test_ragged_inputs_that_are_left_out() -> None:
    config = config_of()
    config = replace(config, input=(replace(config.input[0], optional=True), config.input[1]))

    class Given(StackedBackend):
        seen: list[Any] = []

        def execute(self, inputs: GatherGroup, outputs: Results) -> None:
            counts = inputs.array(2)
            assert counts is not None
            self.seen.append((inputs.shape(0), counts.tolist()))
            outputs.put(0, np.zeros(sum(counts.tolist()), np.float32))
            plain = inputs.array(1)
            assert plain is not None
            outputs.put(1, plain)

    backend = Given(Context("m", 1, "m_0", Path(), Path(), {}))
    with parts_of(config) as parts:
        x = tensor(parts.client, "x", np.ones((1, 1, 3), np.float32), "FP32", [])
        plain = Tensor("plain", "INT16", (1, 2), bytes(4))
        works = [Work(1, 1, (x, plain), None, "internal"), Work(2, 1, (plain,), None, "internal")]
        with_x, without = run(parts, config, backend, works)
    assert [[out.name for out in row.outputs] for row in (with_x, without)] == [["y", "z"], ["z"]]
    assert backend.seen == [((3,), [3]), (None, [0])]


@pytest.mark.parametrize("field", ["batch_input", "batch_output"])
@pytest.mark.parametrize("source", [(), ("x", "plain"), ("unknown",)])
def test_sources_that_are_wrong(field: str, source: tuple[str, ...]) -> None:
    config = config_of()
    wrong = replace(getattr(config, field)[0], source_input=source)
    with pytest.raises(InvalidRequest, match=rf"{field}\[0\] of model 'm' needs one source_input"):
        extension_of(replace(config, **{field: (wrong,)}), Path(), Doubling(False))


@given(batch=shapes, inline=st.sampled_from([True, False, None]))
def test_requests_that_want_nothing_in_the_message(
    batch: list[tuple[int, int, int, bool]], inline: bool | None
) -> None:
    """`inline` None: every other request."""
    config = ModelConfig(
        name="m",
        max_batch_size=64,
        input=(ModelInput(name="x", data_type="TYPE_FP32", dims=(-1,)),),
        output=(ModelOutput(name="x", data_type="TYPE_FP32", dims=(-1,)),),
    )

    class Same(StackedBackend):
        def execute(self, inputs: GatherGroup, outputs: Results) -> None:
            x = inputs.array(0)
            assert x is not None
            if outputs.direct(0, x.shape):
                outputs.place(0, x.shape)[...] = x
            else:
                outputs.put(0, x)

    with parts_of(config) as parts:
        works, xs = [], []
        for number, (rows, _, width, _) in enumerate(batch):
            x = np.random.default_rng(number).random((rows, width), np.float32)
            xs.append(x)
            wanted = number % 2 == 0 if inline is None else inline
            works.append(
                Work(number, rows, (tensor(parts.client, "x", x, "FP32", [0]),), None, "internal", inline=wanted)
            )
        found = run(parts, config, Same(Context("m", 1, "m_0", Path(), Path(), {})), works)
        for row, work, x in zip(found, works, xs, strict=True):
            assert isinstance(row.outputs[0].data, bytes) == (work.inline and x.nbytes <= INLINE_BYTES)
            assert (read(parts, row.outputs[0]) == x).all()
        assert parts.arenas.used == 0
