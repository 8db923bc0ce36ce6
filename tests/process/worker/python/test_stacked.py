"""Python models that get one array for each input of a whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.protocol.messages import Options, Tensor, Wanted
from shmserve.protocol.worker_messages import Row
from shmserve.repo.config.schema import BatchInput, ModelParameter
from tests.support.workers.models.worker_models import python_model
from tests.support.workers.worker_harness import WorkerProcess, assert_failed, config, work

pytestmark = pytest.mark.process

MODEL = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, inputs):
        x = inputs["x"]
        assert not x.flags.writeable
        first = x.flat[0]
        if first == 1001:
            raise ValueError("not this one")
        if first == 1002:
            return [x]
        if first == 1003:
            return {"z": x}
        if first == 1004:
            return {"y": x[1:]}
        if first == 1005:
            return {}
        if first == 1006:
            return self.soon(x)
        if first == 1007:
            return {"y": x, "rows": np.full((len(x), 1), 1 << 40)}
        more = inputs.get("more", 0)
        rows = np.full((len(x), 1), len(x))
        return {"y": pb_utils.Tensor("y", x * 2 + more), "rows": rows}

    async def soon(self, x):
        return {"y": x + 1, "rows": np.zeros((len(x), 1), np.int32)}
"""
IN = {"x": ("FP32", (-1,)), "more": ("FP32", (1,))}
STRICT = {"stacked": "true", "strict_outputs": "true"}
OUT = {"y": ("FP32", (-1,)), "rows": ("INT32", (1,))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("models")
    python_model(folder, MODEL)
    settings = config("python", IN, OUT, max_batch=8, parameters=STRICT, optional=["more"])
    with WorkerProcess(settings, folder) as process:
        process.loaded()
        process.run(work(99, process.tensor("x", np.zeros((4, 5000), np.float32))))  # makes all memory that is needed
        yield process


def inputs(model: WorkerProcess, rows: int, first: float, length: int = 3) -> Tensor:
    return model.tensor("x", np.full((rows, length), first, np.float32))


def test_a_batch_is_one_array(model: WorkerProcess) -> None:
    rows = model.run(work(1, inputs(model, 1, 1)), work(2, inputs(model, 2, 2)), work(3, inputs(model, 1, 3)))
    for row, count, first in zip(rows, (1, 2, 1), (1, 2, 3), strict=True):
        assert row.error is None
        y, together = row.outputs
        assert (model.array(y, np.float32) == np.full((count, 3), 2 * first)).all()
        assert (model.array(together, np.int32) == np.full((count, 1), 4)).all()


def test_requests_that_cannot_be_stacked_run_separately(model: WorkerProcess) -> None:
    more = model.tensor("more", np.full((1, 1), 100, np.float32))
    rows = model.run(
        work(1, inputs(model, 1, 1)), work(2, inputs(model, 1, 2, length=4)), work(3, inputs(model, 1, 3), more)
    )
    arrays = [model.array(row.outputs[0], np.float32) for row in rows]
    assert [array.tolist() for array in arrays] == [[[2] * 3], [[4] * 4], [[106] * 3]]


def test_a_batch_of_one_request(model: WorkerProcess) -> None:
    (row,) = model.run(work(1, inputs(model, 4, 5, length=5000)))
    assert (model.array(row.outputs[0], np.float32) == 10).all()


def test_only_requested_outputs_are_returned(model: WorkerProcess) -> None:
    (row,) = model.run(work(1, inputs(model, 1, 5), outputs=[Wanted("rows")]))
    assert [tensor.name for tensor in row.outputs] == ["rows"]


def test_execute_can_be_a_coroutine(model: WorkerProcess) -> None:
    (row,) = model.run(work(1, inputs(model, 1, 1006)))
    assert model.array(row.outputs[0], np.float32).tolist() == [[1007] * 3]


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (1001, "ValueError: not this one"),
        (1002, "expected a dict of arrays by name from execute, it returned list"),
        (1003, "unexpected output 'z': the outputs are y, rows"),
        (1004, "output 'y' of model 'm' has the wrong shape: expected [2, -1], found [1, 3]"),
        (1007, "output 'rows' of model 'm' has the wrong data type: expected INT32, found INT64"),
        (1005, "the model did not produce output 'y'"),
    ],
)
def test_invalid_results_fail_the_batch(model: WorkerProcess, first: float, text: str) -> None:
    rows: list[Row] = model.run(work(1, inputs(model, 1, first)), work(2, inputs(model, 1, first), options=Options()))
    for row in rows:
        assert_failed(row, "MODEL_FAILED", text)


def test_outputs_that_differ_from_the_configuration(tmp_path: Path) -> None:
    python_model(tmp_path, MODEL)
    settings = config("python", IN, OUT, max_batch=8, parameters={"stacked": "true"}, optional=["more"])
    with WorkerProcess(settings, tmp_path) as process:
        process.loaded()
        for row in process.run(work(1, inputs(process, 1, 1007)), work(2, inputs(process, 2, 1007))):
            y, rows = row.outputs
            assert (y.dtype, rows.dtype) == ("FP32", "INT64")
            assert (process.array(rows, np.int64) == 1 << 40).all()
        for row in process.run(work(1, inputs(process, 1, 1005)), work(2, inputs(process, 1, 1005))):
            assert (row.error, row.outputs) == (None, ())
        named, other = process.run(
            work(1, inputs(process, 1, 1005), outputs=[Wanted("rows")]), work(2, inputs(process, 1, 1005))
        )
        assert_failed(named, "MODEL_FAILED", "did not produce output 'rows'")
        assert (other.error, other.outputs) == (None, ())
        (row, _) = process.run(work(1, inputs(process, 1, 1004)), work(2, inputs(process, 1, 1004)))
        assert_failed(row, "MODEL_FAILED", "wrong shape: expected [2, -1], found [1, 3]")  # cannot be split


@pytest.mark.parametrize(
    ("value", "text"), [("maybe", "parameter 'stacked' of model 'm' is 'maybe', not true or false"), ("true", "")]
)
def test_invalid_stacked_models_do_not_load(tmp_path: Path, value: str, text: str) -> None:
    python_model(tmp_path, "class TritonPythonModel: pass\n")
    with WorkerProcess(config("python", IN, OUT, parameters={"stacked": value}), tmp_path) as process:
        assert (text or "has no execute method") in process.failed().text
        assert process.ended() != 0


RAGGED = """\
import numpy as np


class TritonPythonModel:
    def execute(self, inputs):
        assert inputs["x"].ndim == 1
        return {"y": np.add.reduceat(inputs["x"], inputs["starts"].astype(int)[:-1])[:, None]}
"""


def test_ragged_inputs_are_concatenated(tmp_path: Path) -> None:
    python_model(tmp_path, RAGGED)
    settings = config("python", {"x": ("FP32", (-1,))}, {"y": ("FP32", (1,))}, max_batch=8)
    starts = BatchInput(
        kind="BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
        target_name=("starts",),
        data_type="TYPE_INT32",
        source_input=("x",),
    )
    (x,) = settings.input
    settings = replace(
        settings,
        input=(replace(x, allow_ragged_batch=True),),
        batch_input=(starts,),
        parameters={"stacked": ModelParameter(string_value="true")},
    )
    with WorkerProcess(settings, tmp_path) as process:
        process.loaded()
        rows = process.run(*[work(number, inputs(process, 1, 1, length=number)) for number in (3, 1, 5)])
        assert [process.array(row.outputs[0], np.float32).tolist() for row in rows] == [[[3]], [[1]], [[5]]]
