"""Python models that get one array for each input of a whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.protocol.messages import Options, Tensor, Wanted
from shmserve.protocol.worker_messages import Row
from shmserve.repo.config.schema import BatchInput, ModelConfig
from shmserve.workers.loading import LoadedModel
from tests.support.cases import cases
from tests.support.workers.in_process import inline, load_failure, loaded, run, value
from tests.support.workers.models.worker_models import python_model
from tests.support.workers.worker_harness import assert_failed, config, work

MODEL = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, inputs):
        x = inputs["x"]
        assert not x.flags.writeable
        made = {
            1001: lambda: 1 / 0,
            1002: lambda: [x],
            1003: lambda: {"z": x},
            1004: lambda: {"y": x[1:]},
            1005: dict,
            1006: lambda: self.soon(x),
            1007: lambda: {"y": x, "rows": np.full((len(x), 1), 1 << 40)},
        }
        return made.get(x.flat[0], lambda: self.double(x, inputs.get("more", 0)))()

    def double(self, x, more):
        return {"y": pb_utils.Tensor("y", x * 2 + more), "rows": np.full((len(x), 1), len(x))}

    async def soon(self, x):
        return {"y": x + 1, "rows": np.zeros((len(x), 1), np.int32)}
"""
IN = {"x": ("FP32", (-1,)), "more": ("FP32", (1,))}
OUT = {"y": ("FP32", (-1,)), "rows": ("INT32", (1,))}


def given(**parameters: str) -> ModelConfig:
    return config("python", IN, OUT, max_batch=8, parameters={"stacked": "true", **parameters}, optional=["more"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder = tmp_path_factory.mktemp("models")
    python_model(folder, MODEL)
    with loaded(given(strict_outputs="true"), folder) as found:
        yield found


def x_of(rows: int, first: float, length: int = 3) -> Tensor:
    return inline("x", np.full((rows, length), first, np.float32))


def arrays(row: Row) -> dict[str, list[list[float]]]:
    assert row.error is None, row.error
    return {output.name: value(row, index).tolist() for index, output in enumerate(row.outputs)}


def test_a_batch_is_one_array(model: LoadedModel) -> None:
    rows = run(model, *[work(number, x_of(count, number)) for number, count in ((1, 1), (2, 2), (3, 1))])
    for row, count, first in zip(rows, (1, 2, 1), (1, 2, 3), strict=True):
        assert arrays(row) == {"y": [[2 * first] * 3] * count, "rows": [[4]] * count}


def test_requests_that_cannot_be_stacked_run_separately(model: LoadedModel) -> None:
    more = inline("more", np.full((1, 1), 100, np.float32))
    work_items = [work(1, x_of(1, 1)), work(2, x_of(1, 2, 4)), work(3, x_of(1, 3), more)]
    assert [arrays(row)["y"] for row in run(model, *work_items)] == [[[2] * 3], [[4] * 4], [[106] * 3]]


def test_only_requested_outputs_are_returned(model: LoadedModel) -> None:
    (row,) = run(model, work(1, x_of(1, 5), outputs=[Wanted("rows")]))
    assert list(arrays(row)) == ["rows"]


def test_execute_can_be_a_coroutine(model: LoadedModel) -> None:
    (row,) = run(model, work(1, x_of(1, 1006)))
    assert arrays(row)["y"] == [[1007] * 3]


@cases(
    (1001, "ZeroDivisionError: division by zero"),
    (1002, "expected a dict of arrays by name from execute, it returned list"),
    (1003, "unexpected output 'z': the outputs are y, rows"),
    (1004, "output 'y' of model 'm' has the wrong shape: expected [2, -1], found [1, 3]"),
    (1007, "output 'rows' of model 'm' has the wrong data type: expected INT32, found INT64"),
    (1005, "the model did not produce output 'y'"),
)
def test_invalid_results_fail_the_batch(first: float, text: str, model: LoadedModel) -> None:
    for row in run(model, work(1, x_of(1, first)), work(2, x_of(1, first), options=Options())):
        assert_failed(row, "MODEL_FAILED", text)


def test_outputs_that_differ_from_the_configuration(tmp_path: Path) -> None:
    python_model(tmp_path, MODEL)
    with loaded(given(), tmp_path) as model:
        for row in run(model, work(1, x_of(1, 1007)), work(2, x_of(1, 1007))):
            assert arrays(row) == {"y": [[1007] * 3], "rows": [[1 << 40]]}
        named, other = run(model, work(1, x_of(1, 1005), outputs=[Wanted("rows")]), work(2, x_of(1, 1005)))
        assert arrays(named) == {}
        assert arrays(other) == {}
        (row, _) = run(model, work(1, x_of(1, 1004)), work(2, x_of(1, 1004)))
        assert_failed(row, "MODEL_FAILED", "wrong shape: expected [2, -1], found [1, 3]")  # cannot be split


def test_a_stacked_model_without_execute_does_not_load(tmp_path: Path) -> None:
    python_model(tmp_path, "class TritonPythonModel: pass\n")
    assert "has no execute method" in load_failure(given(), tmp_path).text


RAGGED = """\
import numpy as np


class TritonPythonModel:
    def execute(self, inputs):
        assert inputs["x"].ndim == 1
        return {"y": np.add.reduceat(inputs["x"], inputs["starts"].astype(int)[:-1])[:, None]}
"""


def test_ragged_inputs_are_concatenated(tmp_path: Path) -> None:
    python_model(tmp_path, RAGGED)
    plain = config("python", {"x": ("FP32", (-1,))}, {"y": ("FP32", (1,))}, max_batch=8, parameters={"stacked": "true"})
    starts = BatchInput("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", ("starts",), "TYPE_INT32", ("x",))
    ragged = replace(plain, input=(replace(plain.input[0], allow_ragged_batch=True),), batch_input=(starts,))
    with loaded(ragged, tmp_path) as model:
        rows = run(model, *[work(number, x_of(1, 1, number)) for number in (3, 1, 5)])
        assert [arrays(row) for row in rows] == [{"y": [[3]]}, {"y": [[1]]}, {"y": [[5]]}]
