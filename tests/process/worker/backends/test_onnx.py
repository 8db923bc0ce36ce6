"""ONNX models in a worker, against bare ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from shmserve.protocol.messages import Tensor, Wanted
from shmserve.repo.config.schema import ModelConfig
from tests.support.workers.in_process import completed, loaded
from tests.support.workers.models.worker_models import Graph
from tests.support.workers.worker_harness import WorkerProcess, assert_failed, config, running, work

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
def test_batches_give_the_same_results_as_onnx_runtime(tmp_path: Path, classes: int) -> None:
    """Outputs of 10 elements are sent in messages; those of 3,000 are computed in shared memory."""
    path = mlp(tmp_path, 200, classes)
    given = config("onnxruntime", {"x": ("FP32", (200,))}, {"y": ("FP32", (classes,))}, max_batch=16)
    random = np.random.default_rng(4)
    with running(given, tmp_path) as worker:
        number = 0
        for shares in ((1,), (1,) * 16, (3, 1, 5), (16,)):
            xs = [random.standard_normal((rows, 200)).astype(np.float32) for rows in shares]
            works = [work(number := number + 1, worker.tensor("x", x)) for x in xs]
            (expected,) = bare(path, x=np.concatenate(xs))
            start = 0
            for row, x in zip(worker.run(*works), xs, strict=True):
                found = worker.value(row)
                assert isinstance(row.outputs[0].data, bytes) == (found.nbytes <= 4096)
                np.testing.assert_allclose(found, expected[start : start + len(x)], rtol=1e-4, atol=1e-5)
                start += len(x)
            for given_work, x in zip(works, xs, strict=True):  # the engine did not write to its inputs
                assert (worker.array(given_work.inputs[0], np.float32) == x).all()
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
                np.testing.assert_allclose(worker.value(row), expected, rtol=1e-4, atol=1e-5)


def described(config: ModelConfig) -> tuple[int, list[Any], list[Any]]:
    return (
        config.max_batch_size,
        [(entry.name, entry.data_type, entry.dims) for entry in config.input],
        [(entry.name, entry.data_type, entry.dims) for entry in config.output],
    )


def test_a_configuration_is_completed_from_the_model(tmp_path: Path) -> None:
    mlp(tmp_path, 20, 5)
    expected = [("x", "TYPE_FP32", (20,))], [("y", "TYPE_FP32", (5,))]
    found = completed(config("onnxruntime", {}, {}), tmp_path)
    assert described(found) == (4, *expected)
    assert found.dynamic_batching is not None
    found = completed(config("onnxruntime", {}, {}), tmp_path, {"onnxruntime,default-max-batch-size": "7"})
    assert described(found) == (7, *expected)
    found = completed(config("onnxruntime", {}, {}, max_batch=2), tmp_path)
    assert described(found) == (2, *expected)


def test_a_model_of_fixed_size_is_completed_without_batching(tmp_path: Path) -> None:
    graph = Graph().input("x", "INT64", [3, -1]).output("y", "INT64", [3, -1])
    graph.node("Identity", ["x"], ["y"]).save(tmp_path)
    found = completed(config("onnxruntime", {}, {}), tmp_path)
    assert described(found) == (0, [("x", "TYPE_INT64", (3, -1))], [("y", "TYPE_INT64", (3, -1))])


def test_a_model_with_only_a_batch_dimension(tmp_path: Path) -> None:
    """Callers see dims [1], the model sees none."""
    graph = Graph().input("x", "FP32", [-1]).output("y", "FP32", [-1])
    graph.node("Neg", ["x"], ["y"]).save(tmp_path)
    with WorkerProcess(config("onnxruntime", {}, {}), tmp_path) as worker:
        assert described(worker.loaded())[1] == [("x", "TYPE_FP32", (1,))]
        xs = [np.array([[value]], np.float32) for value in (1, 2, 3)]
        for shared in (False, True):
            works = [work(number, worker.tensor("x", x, shared=shared)) for number, x in enumerate(xs)]
            for row, x in zip(worker.run(*works), xs, strict=True):
                assert row.outputs[0].shape == (1, 1)
                assert worker.value(row) == -x
        many = np.arange(5000, dtype=np.float32)[:, None]
        (row,) = worker.run(work(9, worker.tensor("x", many)))
        assert (worker.value(row) == -many).all()


@pytest.mark.parametrize("dims", [(1,), (1, 1)])
def test_dims_of_1_represent_a_scalar(tmp_path: Path, dims: tuple[int, ...]) -> None:
    Graph().input("x", "FP32", []).output("y", "FP32", []).node("Neg", ["x"], ["y"]).save(tmp_path)
    given = config("onnxruntime", {"x": ("FP32", dims)}, {"y": ("FP32", dims)})
    with loaded(given, tmp_path) as model:
        ((row,), *_) = model.runner.run([work(1, Tensor("x", "FP32", dims, np.float32(7).tobytes()))])
        assert row.error is None, row.error
        assert (row.outputs[0].shape, row.outputs[0].data) == (dims, np.float32(-7).tobytes())


def test_an_input_with_a_default_value_is_optional(tmp_path: Path) -> None:
    """Requests with and without the input are in one batch."""
    graph = Graph().input("x", "FP32", [-1, 2]).input("w", "FP32", [1, 2]).output("y", "FP32", [-1, 2])
    graph.weight("w", np.array([[10, 20]], np.float32)).node("Add", ["x", "w"], ["y"]).save(tmp_path)
    inputs = {"x": ("FP32", (2,)), "w": ("FP32", (2,))}
    given = config("onnxruntime", inputs, {"y": ("FP32", (2,))}, max_batch=8, optional=["w"])
    with running(given, tmp_path) as worker:
        x = Tensor("x", "FP32", (1, 2), np.array([1, 2], np.float32).tobytes())
        w = Tensor("w", "FP32", (1, 2), np.array([5, 5], np.float32).tobytes())
        rows = worker.run(work(1, x), work(2, x, w), work(3, x))
        assert [row.error for row in rows] == [None] * 3
        assert [worker.value(row).tolist() for row in rows] == [[[11, 22]], [[6, 7]], [[11, 22]]]


def test_outputs_of_data_dependent_size(tmp_path: Path) -> None:
    graph = Graph().input("x", "FP32", [-1]).output("where", "INT64", [1, -1]).output("y", "FP32", [-1])
    graph.node("NonZero", ["x"], ["where"]).node("Identity", ["x"], ["y"]).save(tmp_path)
    outputs = {"where": ("INT64", (1, -1)), "y": ("FP32", (-1,))}
    with WorkerProcess(config("onnxruntime", {"x": ("FP32", (-1,))}, outputs), tmp_path) as worker:
        worker.loaded()
        for length in (0, 1, 9, 4000):
            x = np.arange(length, dtype=np.float32)
            (row,) = worker.run(work(1, worker.tensor("x", x), rows=0))
            assert worker.value(row).tolist() == [list(range(1, length))]
            assert worker.value(row, 1).tolist() == x.tolist()


def test_a_string_that_is_not_utf_8_fails_its_request(tmp_path: Path) -> None:
    graph = Graph().input("x", "BYTES", [-1, 1]).output("y", "BYTES", [-1, 1])
    graph.node("Identity", ["x"], ["y"]).save(tmp_path)
    given = config("onnxruntime", {"x": ("STRING", (1,))}, {"y": ("STRING", (1,))}, max_batch=4)
    with running(given, tmp_path) as worker:
        good, bad = np.array([["é".encode()]], object), np.array([[b"\xff"]], object)
        rows = worker.run(work(1, worker.tensor("x", good)), work(2, worker.tensor("x", bad)))
        assert worker.array(rows[0].outputs[0], object).tolist() == good.tolist()
        assert_failed(rows[1], "INVALID_ARG", "not UTF-8")
