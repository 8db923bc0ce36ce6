"""ONNX models in a worker, against bare ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from shmserve.protocol.messages import Tensor, Wanted
from shmserve.repo.config.schema import ModelConfig
from tests.support.workers.worker_harness import WorkerProcess, config, work
from tests.support.workers.worker_models import Graph

pytestmark = pytest.mark.process


def bare(path: Path, **feeds: Any) -> list[Any]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    found: list[Any] = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feeds)
    return found


def mlp(folder: Path, width: int, classes: int) -> Path:
    random = np.random.default_rng(3)
    graph = Graph().input("x", "FP32", [-1, width]).output("y", "FP32", [-1, classes])
    graph.weight("w", random.standard_normal((width, classes)).astype(np.float32))
    graph.weight("b", random.standard_normal(classes).astype(np.float32))
    return graph.node("Gemm", ["x", "w", "b"], ["h"]).node("Relu", ["h"], ["y"]).save(folder)


@pytest.mark.parametrize("classes", [10, 3000])
def test_batches_are_what_the_engine_computes(tmp_path: Path, classes: int) -> None:
    """Outputs of 10 go into messages, those of 3,000 are computed in shared memory."""
    path = mlp(tmp_path, 200, classes)
    given = config("onnxruntime", {"x": ("FP32", (200,))}, {"y": ("FP32", (classes,))}, max_batch=16)
    random = np.random.default_rng(4)
    with WorkerProcess(given, tmp_path) as worker:
        worker.loaded()
        number = 0
        for shares in ((1,), (1,) * 16, (3, 1, 5), (16,)):
            xs = [random.standard_normal((rows, 200)).astype(np.float32) for rows in shares]
            works = [work(number := number + 1, worker.tensor("x", x)) for x in xs]
            (expected,) = bare(path, x=np.concatenate(xs))
            start = 0
            for row, x in zip(worker.run(*works), xs, strict=True):
                assert row.error is None, row.error
                found = worker.array(row.outputs[0], np.float32)
                assert isinstance(row.outputs[0].data, bytes) == (found.nbytes <= 4096)
                np.testing.assert_allclose(found, expected[start : start + len(x)], rtol=1e-4, atol=1e-5)
                start += len(x)
        # Into the caller's own memory, one alone and two together.
        for together in (1, 2):
            places = [worker.place(classes * 4) for _ in range(together)]
            works = [
                work(number := number + 1, worker.tensor("x", xs[0][:1]), outputs=[Wanted("y", place)])
                for place in places
            ]
            (expected,) = bare(path, x=xs[0][:1])
            for row, place in zip(worker.run(*works), places, strict=True):
                assert row.outputs[0].data == (place,)
                np.testing.assert_allclose(worker.array(row.outputs[0], np.float32), expected, rtol=1e-4, atol=1e-5)
        worker.mapped.close()


def completed(folder: Path, given: ModelConfig, settings: dict[str, str] | None = None) -> ModelConfig:
    with WorkerProcess(given, folder, settings=settings) as worker:
        return worker.loaded()


def described(config: ModelConfig) -> tuple[int, list[Any], list[Any]]:
    return (
        config.max_batch_size,
        [(entry.name, entry.data_type, entry.dims) for entry in config.input],
        [(entry.name, entry.data_type, entry.dims) for entry in config.output],
    )


def test_a_model_without_a_configuration(tmp_path: Path) -> None:
    mlp(tmp_path, 20, 5)
    given = config("onnxruntime", {}, {})
    expected = [("x", "TYPE_FP32", (20,))], [("y", "TYPE_FP32", (5,))]
    found = completed(tmp_path, given)
    assert described(found) == (4, *expected)
    assert found.dynamic_batching is not None
    found = completed(tmp_path, given, {"onnxruntime,default-max-batch-size": "7"})
    assert described(found) == (7, *expected)
    found = completed(tmp_path, config("onnxruntime", {}, {}, max_batch=2))
    assert described(found) == (2, *expected)


def test_a_model_without_a_configuration_that_cannot_batch(tmp_path: Path) -> None:
    graph = Graph().input("x", "INT64", [3, -1]).output("y", "INT64", [3, -1])
    graph.node("Identity", ["x"], ["y"]).save(tmp_path)
    found = completed(tmp_path, config("onnxruntime", {}, {}))
    assert described(found) == (0, [("x", "TYPE_INT64", (3, -1))], [("y", "TYPE_INT64", (3, -1))])
    with WorkerProcess(config("onnxruntime", {}, {}, max_batch=4), tmp_path) as worker:
        assert "does not support batching" in worker.failed().text
        worker.ended()


def test_a_model_with_nothing_but_the_batch_dimension(tmp_path: Path) -> None:
    """Callers see dims [1], the model sees none."""
    graph = Graph().input("x", "FP32", [-1]).output("y", "FP32", [-1])
    graph.node("Neg", ["x"], ["y"]).save(tmp_path)
    with WorkerProcess(config("onnxruntime", {}, {}), tmp_path) as worker:
        assert described(worker.loaded())[1] == [("x", "TYPE_FP32", (1,))]
        xs = [np.array([[value]], np.float32) for value in (1, 2, 3)]
        for shared in (False, True):
            works = [work(number, worker.tensor("x", x, shared=shared)) for number, x in enumerate(xs)]
            for row, x in zip(worker.run(*works), xs, strict=True):
                assert row.error is None, row.error
                assert row.outputs[0].shape == (1, 1)
                assert worker.array(row.outputs[0], np.float32) == -x
        many = np.arange(5000, dtype=np.float32)[:, None]
        (row,) = worker.run(work(9, worker.tensor("x", many)))
        assert (worker.array(row.outputs[0], np.float32) == -many).all()
        worker.mapped.close()


@pytest.mark.parametrize("dims", [(1,), (1, 1)])
def test_dims_of_1_stand_for_a_scalar(tmp_path: Path, dims: tuple[int, ...]) -> None:
    Graph().input("x", "FP32", []).output("y", "FP32", []).node("Neg", ["x"], ["y"]).save(tmp_path)
    given = config("onnxruntime", {"x": ("FP32", dims)}, {"y": ("FP32", dims)})
    with WorkerProcess(given, tmp_path) as worker:
        worker.loaded()
        (row,) = worker.run(work(1, Tensor("x", "FP32", dims, np.float32(7).tobytes())))
        assert row.error is None, row.error
        assert row.outputs[0].shape == dims
        assert worker.array(row.outputs[0], np.float32) == -7
        worker.mapped.close()


def test_other_dims_do_not_stand_for_a_scalar(tmp_path: Path) -> None:
    Graph().input("x", "FP32", []).output("y", "FP32", []).node("Neg", ["x"], ["y"]).save(tmp_path)
    given = config("onnxruntime", {"x": ("FP32", (2,))}, {"y": ("FP32", (2,))})
    with WorkerProcess(given, tmp_path) as worker:
        assert "input 'x' has shape [2] in the configuration and [] in the model" in worker.failed().text
        worker.ended()


def test_inputs_that_may_be_left_out(tmp_path: Path) -> None:
    """An input that the model has a value for; requests with it and without it come together."""
    graph = Graph().input("x", "FP32", [-1, 2]).input("w", "FP32", [1, 2]).output("y", "FP32", [-1, 2])
    graph.weight("w", np.array([[10, 20]], np.float32)).node("Add", ["x", "w"], ["y"]).save(tmp_path)
    given = config("onnxruntime", {"x": ("FP32", (2,)), "w": ("FP32", (2,))}, {"y": ("FP32", (2,))}, max_batch=8)
    from msgspec.structs import replace

    given = replace(given, input=(given.input[0], replace(given.input[1], optional=True)))
    with WorkerProcess(given, tmp_path) as worker:
        worker.loaded()
        x = Tensor("x", "FP32", (1, 2), np.array([1, 2], np.float32).tobytes())
        w = Tensor("w", "FP32", (1, 2), np.array([5, 5], np.float32).tobytes())
        rows = worker.run(work(1, x), work(2, x, w), work(3, x))
        assert [row.error for row in rows] == [None] * 3
        assert [worker.array(row.outputs[0], np.float32).tolist() for row in rows] == [[[11, 22]], [[6, 7]], [[11, 22]]]
    given = replace(given, input=(given.input[0], replace(given.input[1], data_type="TYPE_INT32")))
    with WorkerProcess(given, tmp_path) as worker:
        assert "input 'w' is INT32 in the configuration and FP32 in the model" in worker.failed().text
        worker.ended()


def test_outputs_whose_size_nobody_knows_before(tmp_path: Path) -> None:
    graph = Graph().input("x", "FP32", [-1]).output("where", "INT64", [1, -1]).output("y", "FP32", [-1])
    graph.node("NonZero", ["x"], ["where"]).node("Identity", ["x"], ["y"]).save(tmp_path)
    outputs = {"where": ("INT64", (1, -1)), "y": ("FP32", (-1,))}
    with WorkerProcess(config("onnxruntime", {"x": ("FP32", (-1,))}, outputs), tmp_path) as worker:
        worker.loaded()
        for length in (0, 1, 9, 4000):
            x = np.arange(length, dtype=np.float32)
            (row,) = worker.run(work(1, worker.tensor("x", x), rows=0))
            assert row.error is None, row.error
            assert worker.array(row.outputs[0], np.int64).tolist() == [list(range(1, length))]
            assert worker.array(row.outputs[1], np.float32).tolist() == x.tolist()
        worker.mapped.close()


@pytest.mark.parametrize(
    ("dims", "text"),
    [((3,), "wrong shape: expected [2, 3], found [2, 1]"), ((-1, -1), "unable to load")],
    ids=["shape", "rank"],
)
def test_outputs_that_are_not_what_the_configuration_says(tmp_path: Path, dims: Sequence[int], text: str) -> None:
    """The model does not know the second dimension before it runs, so the configuration is believed until then."""
    graph = Graph().input("x", "FP32", [-1, 2]).output("y", "FP32", [-1, -1]).weight("keep", np.array([True, False]))
    graph.node("Compress", ["x", "keep"], ["y"], axis=1).save(tmp_path)
    given = config("onnxruntime", {"x": ("FP32", (2,))}, {"y": ("FP32", dims)}, max_batch=4)
    with WorkerProcess(given, tmp_path) as worker:
        if len(dims) == 2:
            assert text in worker.failed().text
            worker.ended()
            return
        worker.loaded()
        x = Tensor("x", "FP32", (1, 2), np.array([1, 2], np.float32).tobytes())
        for row in worker.run(work(1, x), work(2, x)):
            assert row.error is not None
            assert row.error.code == "MODEL_FAILED"
            assert text in row.error.text
            assert "'y'" in row.error.text


def test_strings_that_are_not_text(tmp_path: Path) -> None:
    graph = Graph().input("x", "BYTES", [-1, 1]).output("y", "BYTES", [-1, 1])
    graph.node("Identity", ["x"], ["y"]).save(tmp_path)
    given = config("onnxruntime", {"x": ("STRING", (1,))}, {"y": ("STRING", (1,))}, max_batch=4)
    with WorkerProcess(given, tmp_path) as worker:
        worker.loaded()
        good, bad = np.array([["é".encode()]], object), np.array([[b"\xff"]], object)
        rows = worker.run(work(1, worker.tensor("x", good)), work(2, worker.tensor("x", bad)))
        assert worker.array(rows[0].outputs[0], object).tolist() == good.tolist()
        assert rows[1].error is not None
        assert rows[1].error.code == "INVALID_ARG"
        assert "not UTF-8" in rows[1].error.text


def test_inputs_are_never_written(tmp_path: Path) -> None:
    """A caller's memory is mapped read-only: what it holds after is what it held before."""
    path = mlp(tmp_path, 2000, 2000)
    given = config("onnxruntime", {"x": ("FP32", (2000,))}, {"y": ("FP32", (2000,))}, max_batch=4)
    x = np.random.default_rng(5).standard_normal((2, 2000)).astype(np.float32)
    with WorkerProcess(given, tmp_path) as worker:
        worker.loaded()
        tensor = worker.tensor("x", x)
        (row,) = worker.run(work(1, tensor))
        assert (worker.array(tensor, np.float32) == x).all()
        np.testing.assert_allclose(worker.array(row.outputs[0], np.float32), bare(path, x=x)[0], rtol=1e-4, atol=1e-4)
        worker.mapped.close()
