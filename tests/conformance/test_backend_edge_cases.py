"""Special cases that each backend must handle: optional inputs, missing outputs, long runs, crashes, unloading, and
requests of different lengths in one batch.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import Tensor, Wanted
from shmserve.protocol.worker_messages import Row
from shmserve.repo.config.schema import ModelParameter
from shmserve.workers.process.exit_codes import Exit
from tests.conformance.models import ADDING, REFUSING, Make
from tests.conformance.test_backends import Echo, arrays_of
from tests.support.cases import cases
from tests.support.workers.in_process import loaded
from tests.support.workers.models.worker_models import KINDS, TENSORRT, Kind, needs
from tests.support.workers.worker_harness import WorkerProcess, assert_failed, config, work

pytestmark = pytest.mark.process
BY_NAME = {kind.name: kind for kind in KINDS}


def kinds(table: dict[str, Make]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", [BY_NAME[name] for name in table], ids=list(table))


def flat(name: str, *values: float) -> Tensor:
    return Tensor(name, "FP32", (len(values),), np.array(values, np.float32).tobytes())


def tensor(name: str, *values: float) -> Tensor:
    return replace(flat(name, *values), shape=(1, len(values)))


def values(worker: WorkerProcess, row: Row) -> list[Any]:
    assert row.error is None, row.error
    return [worker.array(output, np.float32).tolist() for output in row.outputs]


def test_every_backend_has_or_refuses_optional_inputs() -> None:
    assert set(BY_NAME) - set(ADDING) == {"dali", "fil", "identity", *REFUSING}


@kinds(ADDING)
def test_an_optional_input(kind: Kind, tmp_path: Path) -> None:
    """Requests with and without the input in one batch, and a stop while batches wait."""
    needs(kind)
    with WorkerProcess(ADDING[kind.name](tmp_path), tmp_path) as worker:
        worker.loaded()
        a, b = tensor("a", 1, 2), tensor("b", 5, 5)
        rows = worker.run(work(1, a), work(2, a, b), work(3, a))
        assert [values(worker, row) for row in rows] == [[[[101, 102]]], [[[6, 7]]], [[[101, 102]]]]
        for number in (4, 5):
            worker.execute(work(number, a, b))
        assert worker.stop() == Exit.STOPPED
        rows, _ = worker.done()
        assert [values(worker, row) for row in rows] == [[[[6, 7]]]]
        rows, _ = worker.done()
        assert [row.request for row in rows] == [5]


def test_identity_omits_outputs_of_missing_inputs(tmp_path: Path) -> None:
    tensors = {"a": ("FP32", (2,)), "b": ("FP32", (-1,))}
    with WorkerProcess(config("identity", tensors, tensors, max_batch=8, optional=["b"]), tmp_path) as worker:
        worker.loaded()
        rows = worker.run(work(1, tensor("a", 1, 2)), work(2, tensor("a", 1, 2), tensor("b", 3, 4)))
        assert [values(worker, row) for row in rows] == [[[[1, 2]]], [[[1, 2]], [[3, 4]]]]


@kinds(REFUSING)
def test_engines_that_need_all_inputs_refuse_optional_ones(kind: Kind, tmp_path: Path) -> None:
    needs(kind)
    with WorkerProcess(REFUSING[kind.name](tmp_path), tmp_path) as worker:
        failed = worker.failed()
        assert worker.ended() == Exit.LOAD_FAILED
    assert failed.code == "INVALID_ARG"
    assert re.search(
        r"input 'b' is optional, and a model of (OpenVINO|LiteRT|PaddlePaddle) needs all inputs", failed.text
    )


@pytest.mark.parametrize("kind", KINDS, ids=list(BY_NAME))
def test_a_model_without_an_output_of_the_configuration(kind: Kind, tmp_path: Path) -> None:
    """The load fails if the engine knows its outputs, else each request fails. A Python model may omit outputs."""
    needs(kind)
    echo = kind.echo(tmp_path, ("FP32",), (-1,), 0)
    try:
        with loaded(replace(echo, output=(*echo.output, replace(echo.output[0], name="z"))), tmp_path) as model:
            for number in (1, 2):
                (row,), _, _ = model.runner.run([work(number, flat("xFP32", 1, 2), rows=0)])
                if kind.name == "python":
                    assert row.error is None
                    assert [output.name for output in row.outputs] == ["yFP32"]
                elif kind.name == "pytorch":  # the text of Triton
                    assert_failed(row, "INTERNAL", "output index which doesn't exist. This model has 1 outputs")
                else:
                    assert_failed(row, "MODEL_FAILED", "expected 2 output(s), found 1")
    except InvalidRequest as error:
        assert "'z'" in str(error)  # noqa: PT017 (one or the other)


@pytest.mark.parametrize("kind", KINDS, ids=list(BY_NAME))
def test_batches_run_in_order_and_a_crash_ends_the_worker(kind: Kind, tmp_path: Path) -> None:
    """The batches wait until the stopped worker continues."""
    needs(kind)
    with WorkerProcess(kind.echo(tmp_path, ("FP32",), (-1,), 0), tmp_path, packages=kind.packages) as worker:
        worker.loaded()
        place = worker.place(16)
        worker.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, worker.process.pid, os.WSTOPPED)
        worker.execute(work(1, flat("xFP32", 1, 2, 3, 4), rows=0))
        worker.execute(work(2, flat("xFP32", 5, 6, 7, 8), rows=0, outputs=[Wanted("yFP32", place)]))
        worker.process.send_signal(signal.SIGCONT)
        rows, first = worker.done()
        assert [values(worker, row) for row in rows] == [[[1, 2, 3, 4]]]
        rows, second = worker.done()
        assert [values(worker, row) for row in rows] == [[[5, 6, 7, 8]]]
        assert rows[0].outputs[0].data == (place,)
        assert first.times[-1] <= second.times[0]
        worker.process.send_signal(signal.SIGSEGV)
        assert worker.ended() == -signal.SIGSEGV
        assert "Segmentation fault" in worker.said()


LENGTHS = [(3, 1), (5, 2), (3, 1), (0, 1), (8, 3)]
LARGE = [(1500, 1), (900, 2), (1200, 1)]
BACKENDS = [pytest.param(kind, id=kind.name) for kind in (*KINDS, TENSORRT) if not kind.width]


@pytest.fixture(scope="module", params=BACKENDS)
def echo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Echo]:
    kind = request.param
    needs(kind)
    folder = tmp_path_factory.mktemp("model")
    found = kind.echo(folder, kind.dtypes[0], (-1,), 16)
    names = " ".join(entry.name for entry in found.input)
    found = replace(found, parameters={**found.parameters, "padding": ModelParameter(string_value=names)})
    with WorkerProcess(found, folder, packages=kind.packages) as worker:
        worker.loaded()
        made = Echo(worker, KINDS[0], kind.dtypes[0])
        made.grow((1, 40_000), 1)
        yield made


@cases((LENGTHS, False), (LENGTHS, True), (LENGTHS[:1], True), (LARGE, True))
def test_each_request_gets_its_own_length_back(lengths: list[tuple[int, int]], shared: bool, echo: Echo) -> None:
    given = [arrays_of(echo.dtypes, (rows, length), seed) for seed, (length, rows) in enumerate(lengths)]
    echo.round_trip(*given, shared=shared)
