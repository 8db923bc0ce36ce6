"""Ragged batches without a process: inputs of any shapes, outputs cut back. Expected values come from numpy."""

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
from shmserve.protocol.messages import INLINE_BYTES, Tensor, Wanted
from shmserve.protocol.worker_messages import Work
from shmserve.repo.config.schema import BatchInput, BatchOutput, ModelConfig
from shmserve.workers.backends.base import StackedModel
from shmserve.workers.batch.output_checks import OutputChecks
from shmserve.workers.batch.results import Results
from shmserve.workers.batch.specs import outputs_of
from shmserve.workers.hidden_tensors import hidden_tensors_of
from tests.support.workers.batch_parts import Array, Parts
from tests.support.workers.worker_harness import assert_failed, config

KINDS = (
    "BATCH_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    "BATCH_ITEM_SHAPE",
    "BATCH_ITEM_SHAPE_FLATTEN",
)


def ragged(dtype: str = "TYPE_INT32") -> ModelConfig:
    x, z = ("FP32", (-1, -1)), ("INT16", (2,))
    plain = config("identity", {"x": x, "plain": z}, {"y": x, "z": z}, max_batch=64)
    return replace(
        plain,
        input=(replace(plain.input[0], allow_ragged_batch=True), plain.input[1]),
        batch_input=tuple(
            BatchInput(kind=kind, target_name=(kind[6:],), data_type=dtype, source_input=("x",))  # type: ignore[arg-type]
            for kind in KINDS
        ),
        batch_output=(BatchOutput(target_name=("y",), source_input=("x",)),),
    )


class Doubling(StackedModel):
    """y = 2 x, z = plain. `lost`: the number of elements of y that are missing."""

    def __init__(self, placed: bool, lost: int = 0) -> None:
        self.placed = placed
        self.lost = lost
        self.batches: list[list[Array]] = []

    def execute(self, inputs: Any, outputs: Results) -> None:
        arrays = [inputs.array(index) for index in range(2 + len(KINDS))]
        self.batches.append([array.copy() for array in arrays])
        x, plain = arrays[:2]
        y = (2 * x)[self.lost :]
        if outputs.needed(0):
            if self.placed:
                outputs.place(0, y.shape)[...] = y
            else:
                outputs.put(0, y)
        outputs.put(1, plain)


def run(parts: Parts, backend: StackedModel, work_items: Sequence[Work]) -> list[Any]:
    rows, _, _ = parts.runner(backend).run(work_items)
    return rows


def read(parts: Parts, found: Tensor) -> Array:
    array = parts.read(found)
    parts.free(found)
    return array


shapes = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([0, 1, 4]), st.sampled_from([1, 2, 700]), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(batch=shapes, dtype=st.sampled_from(["TYPE_INT32", "TYPE_FP32"]), placed=st.booleans(), some=st.booleans())
def test_shapes_share_a_batch(batch: list[tuple[int, int, int, bool]], dtype: str, placed: bool, some: bool) -> None:
    """`some`: the last request asks only for z."""
    with Parts(ragged(dtype)) as parts:
        xs, plains, work_items = [], [], []
        for number, (rows, height, width, inline) in enumerate(batch):
            x = np.random.default_rng(number).random((rows, height, width), np.float32)
            plain = np.full((rows, 2), number, np.int16)
            inline = inline and x.nbytes <= INLINE_BYTES
            places = [] if inline or not x.size else sorted({0, rows - 1})
            inputs = (parts.tensor("x", x, places), Tensor("plain", "INT16", plain.shape, plain.tobytes()))
            work_items.append(Work(number, rows, inputs, None, "internal"))
            xs.append(x)
            plains.append(plain)
        if some:
            work_items[-1].outputs = (Wanted("z"),)
        backend = Doubling(placed)
        found = run(parts, backend, work_items)
        for row, x, plain in zip(found, xs, plains, strict=True):
            assert row.error is None, row.error
            outputs = {out.name: out for out in row.outputs}
            assert read(parts, outputs["z"]).tolist() == plain.tolist()
            if some and row.request == len(batch) - 1:
                assert list(outputs) == ["z"]
                continue
            assert outputs["y"].shape == x.shape
            assert (read(parts, outputs["y"]) == 2 * x).all()
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


def test_an_output_of_a_wrong_size_cannot_be_cut() -> None:
    with Parts(ragged()) as parts:
        x = np.ones((1, 2, 2), np.float32)
        plain = Tensor("plain", "INT16", (1, 2), bytes(4))
        work_items = [Work(n, 1, (parts.tensor("x", x), plain), None, "internal") for n in range(2)]
        for row in run(parts, Doubling(False, lost=1), work_items):
            text = "has 7 elements; the shapes of input 'x', by which it is cut, have 8"
            assert_failed(row, "MODEL_FAILED", text)


def test_a_ragged_input_may_be_left_out() -> None:
    plain_config = ragged()
    optional = replace(plain_config.input[0], optional=True)

    class Recording(StackedModel):
        seen: list[Any] = []

        def execute(self, inputs: Any, outputs: Results) -> None:
            counts = inputs.array(2)
            self.seen.append((inputs.shape(0), counts.tolist()))
            outputs.put(0, np.zeros(sum(counts.tolist()), np.float32))
            outputs.put(1, inputs.array(1))

    backend = Recording()
    with Parts(replace(plain_config, input=(optional, plain_config.input[1]))) as parts:
        x = parts.tensor("x", np.ones((1, 1, 3), np.float32))
        plain = Tensor("plain", "INT16", (1, 2), bytes(4))
        work_items = [Work(1, 1, (x, plain), None, "internal"), Work(2, 1, (plain,), None, "internal")]
        with_x, without = run(parts, backend, work_items)
    assert [[out.name for out in row.outputs] for row in (with_x, without)] == [["y", "z"], ["z"]]
    assert backend.seen == [((3,), [3]), (None, [0])]


def test_a_cut_output_of_another_type_is_logged(capfd: pytest.CaptureFixture[str]) -> None:
    checks, spec = OutputChecks("m", strict=False), outputs_of(ragged())[0]
    assert checks.check_flat(spec, np.zeros(3)).dtype == "FP64"
    text = "output 'y' of model 'm' is FP64 and is passed on as it is; the configuration says FP32 (the parameter"
    assert text in capfd.readouterr().err


@pytest.mark.parametrize("field", ["batch_input", "batch_output"])
@pytest.mark.parametrize("source", [(), ("x", "plain"), ("unknown",)])
def test_a_batch_tensor_needs_one_existing_source(field: str, source: tuple[str, ...]) -> None:
    wrong = replace(getattr(ragged(), field)[0], source_input=source)
    with pytest.raises(InvalidRequest, match=rf"{field}\[0\] of model 'm' needs one source_input"):
        hidden_tensors_of(replace(ragged(), **{field: (wrong,)}), Path(), Doubling(False))
