"""Requests of different lengths in one batch, through real worker processes of every backend.

The models echo their inputs; each request must get its own length back.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from shmserve.repo.config.schema import ModelConfig, ModelParameter
from tests.conformance.test_backends import Echo, arrays_of
from tests.support.workers.models.worker_models import KINDS, TENSORRT, needs, python_model
from tests.support.workers.worker_harness import WorkerProcess, config

pytestmark = pytest.mark.process

STACKED = """\
import numpy as np


class TritonPythonModel:
    def execute(self, inputs):
        (batch,) = {array.shape for array in inputs.values()}
        return {"y" + name[1:]: np.array(array) for name, array in inputs.items()}
"""

SAME_LENGTH = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "xFP32").as_numpy() for request in requests]
        whole = np.concatenate(given)
        ends = np.cumsum([len(array) for array in given])[:-1]
        parts = np.split(whole, ends)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("yFP32", part)]) for part in parts]
"""

LENGTHS = [(3, 1), (5, 2), (3, 1), (0, 1), (8, 3)]
LARGE = [(1500, 1), (900, 2), (1200, 1)]
BACKENDS = [pytest.param(kind, id=kind.name) for kind in (*KINDS, TENSORRT) if not kind.width]


def padded(found: ModelConfig) -> ModelConfig:
    names = " ".join(entry.name for entry in found.input)
    return replace(found, parameters={**found.parameters, "padding": ModelParameter(string_value=names)})


def serve(found: ModelConfig, folder: Path, dtypes: tuple[str, ...], packages: str = "") -> Iterator[Echo]:
    with WorkerProcess(padded(found), folder, packages=packages) as worker:
        worker.loaded()
        echo = Echo(worker, KINDS[0], dtypes)
        echo.grow((1, 40_000), 1)
        yield echo


@pytest.fixture(scope="module", params=BACKENDS)
def echo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Echo]:
    kind = request.param
    needs(kind)
    folder = tmp_path_factory.mktemp("model")
    yield from serve(kind.echo(folder, kind.dtypes[0], (-1,), 16), folder, kind.dtypes[0], kind.packages)


@pytest.fixture(scope="module", params=["stacked", "one by one"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Echo]:
    """Models that fail if requests differ in length."""
    folder = tmp_path_factory.mktemp("model")
    stacked = request.param == "stacked"
    python_model(folder, STACKED if stacked else SAME_LENGTH)
    tensors = {"xFP32": ("FP32", (-1,))}, {"yFP32": ("FP32", (-1,))}
    parameters = {"stacked": "true"} if stacked else {}
    found = config("python", *tensors, max_batch=16, parameters=parameters)
    yield from serve(found, folder, ("FP32",))


def round_trip(echo: Echo, lengths: list[tuple[int, int]], shared: bool) -> None:
    given = [arrays_of(echo.dtypes, (rows, length), seed) for seed, (length, rows) in enumerate(lengths)]
    echo.round_trip(*given, shared=shared)


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:1]], ids=["many", "one"])
@pytest.mark.parametrize("shared", [False, True], ids=["inline", "shared"])
def test_each_request_gets_its_own_length_back(echo: Echo, lengths: list[tuple[int, int]], shared: bool) -> None:
    round_trip(echo, lengths, shared)


def test_large_outputs(echo: Echo) -> None:
    round_trip(echo, LARGE, True)


def test_python_models_get_one_length(python: Echo) -> None:
    round_trip(python, LENGTHS, False)
    round_trip(python, LARGE, True)
    round_trip(python, LARGE[:1], True)
