"""ONNX models in a worker, against bare ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.protocol.messages import Tensor
from shmserve.repo.config.schema import ModelConfig
from tests.support.workers.in_process import completed, inline, loaded, run, value
from tests.support.workers.models.worker_models import Graph
from tests.support.workers.worker_harness import WorkerProcess, assert_failed, config, work

pytestmark = pytest.mark.process


def mlp(folder: Path, width: int, classes: int) -> Path:
    random = np.random.default_rng(3)
    graph = Graph().input("x", "FP32", [-1, width]).output("y", "FP32", [-1, classes])
    graph.weight("w", random.standard_normal((width, classes)).astype(np.float32))
    graph.weight("b", random.standard_normal(classes).astype(np.float32))
    return graph.node("Gemm", ["x", "w", "b"], ["h"]).node("Relu", ["h"], ["y"]).save(folder)


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
    with loaded(given, tmp_path) as model:
        x = Tensor("x", "FP32", (1, 2), np.array([1, 2], np.float32).tobytes())
        w = Tensor("w", "FP32", (1, 2), np.array([5, 5], np.float32).tobytes())
        rows = run(model, work(1, x), work(2, x, w), work(3, x))
        assert [row.error for row in rows] == [None] * 3
        assert [value(row).tolist() for row in rows] == [[[11, 22]], [[6, 7]], [[11, 22]]]


def test_a_string_that_is_not_utf_8_fails_its_request(tmp_path: Path) -> None:
    graph = Graph().input("x", "BYTES", [-1, 1]).output("y", "BYTES", [-1, 1])
    graph.node("Identity", ["x"], ["y"]).save(tmp_path)
    given = config("onnxruntime", {"x": ("STRING", (1,))}, {"y": ("STRING", (1,))}, max_batch=4)
    with loaded(given, tmp_path) as model:
        good, bad = np.array([["é".encode()]], object), np.array([[b"\xff"]], object)
        rows = run(model, work(1, inline("x", good)), work(2, inline("x", bad)))
        assert value(rows[0]).tolist() == good.tolist()
        assert_failed(rows[1], "INVALID_ARG", "not UTF-8")
