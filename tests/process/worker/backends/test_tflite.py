"""LiteRT models: batches for models with a fixed batch size, signatures, requests after an error, and refused
models."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.errors import InvalidRequest, NotFound, ServeError, Unsupported
from shmserve.protocol.worker_messages import Row
from shmserve.repo.config.schema import ModelConfig
from tests.support.cases import cases
from tests.support.workers.in_process import AS_GIVEN, assert_refused, floats, loaded, run, value
from tests.support.workers.models.tflite_models import Graph
from tests.support.workers.models.worker_models import on_gpu
from tests.support.workers.worker_harness import assert_failed, config, work

if importlib.util.find_spec("ai_edge_litert") is None:
    pytest.skip("ai_edge_litert is not installed", allow_module_level=True)

X, Y = {"x": ("FP32", (3,))}, {"y": ("FP32", (2,))}
WEIGHTS = np.arange(6, dtype=np.float32).reshape(2, 3)


def dense(folder: Path, batch: int = 1, signatures: bool = False) -> None:
    """y = x @ WEIGHTS.T, and the number of rows."""
    graph = Graph()
    x, y = graph.input("x_tensor", "FP32", [batch, 3]), graph.output("y_tensor", "FP32", [batch, 2])
    count = graph.output("shape_tensor", "INT32", [2])
    bias = graph.weight("bias", np.zeros(2, np.float32))
    graph.node("FULLY_CONNECTED", [x, graph.weight("weights", WEIGHTS), bias], [y], of="FullyConnectedOptions")
    graph.node("SHAPE", [x], [count], of="ShapeOptions", outType=2)
    names = {"train": ({"x": x}, {"y": y}), "serving_default": ({"x": x}, {"y": y, "shape": count})}
    graph.save(folder, names if signatures else {})


def values(row: Row) -> list[Any]:
    return [value(row, index).tolist() for index in range(len(row.outputs))]


def test_a_model_for_one_image_runs_batches(tmp_path: Path) -> None:
    """As converters write most models: the first dimension is 1."""
    dense(tmp_path, signatures=True)
    given = config("tflite", X, Y, max_batch=4, parameters={"tflite_num_threads": "2"})
    with loaded(given, tmp_path) as model:
        for count in (1, 4, 2):
            inputs = [np.full((1, 3), number, np.float32) for number in range(count)]
            rows = run(model, *[work(number, floats(array)) for number, array in enumerate(inputs, 1)])
            assert [values(row) for row in rows] == [[(array @ WEIGHTS.T).tolist()] for array in inputs]


@pytest.mark.parametrize("batch", [1, -1])
def test_inputs_and_outputs_are_read_from_the_model(tmp_path: Path, batch: int) -> None:
    dense(tmp_path, batch, signatures=True)
    with loaded(config("tflite", {}, {}), tmp_path) as model:
        found = model.config
        assert [(entry.name, tuple(entry.dims)) for entry in found.input] == [("x", (batch, 3))]
        assert [(entry.name, tuple(entry.dims)) for entry in found.output] == [("shape", (2,)), ("y", (batch, 2))]
        assert found.max_batch_size == 0, "one output does not have the rows of the batch"
        (row,) = run(model, work(1, floats([[1, 2, 3]]), rows=0))
        assert values(row) == [[1, 3], [[8, 26]]]


def test_a_model_serves_requests_after_an_error(tmp_path: Path) -> None:
    """Errors of the engine, in a run or before it, and an output of the wrong shape."""
    graph = Graph()
    x, shape = graph.input("x", "FP32", [-1]), graph.weight("shape", np.array([2, -1], np.int32))
    table, place = graph.weight("table", np.zeros(4, np.float32)), graph.tensor("place", "INT32", [-1])
    graph.node("CAST", [x], [place], of="CastOptions", inDataType=0, outDataType=2)
    graph.node("GATHER", [table, place], [graph.output("looked", "FP32", [-1])], of="GatherOptions", axis=0)
    graph.node("RESHAPE", [x, shape], [graph.output("y", "FP32", [2, -1])])
    graph.save(tmp_path)
    outputs = {"y": ("FP32", (2, 1)), "looked": ("FP32", (-1,))}
    with loaded(config("tflite", {"x": ("FP32", (-1,))}, outputs), tmp_path) as model:
        cases = [([1, 2, 3], "failed to prepare"), ([77, 1], "GATHER"), ([1, 2, 3, 3], r"output 'y'")]
        for number, (wrong, text) in enumerate(cases):
            (row,) = run(model, work(2 * number + 1, floats(wrong), rows=0))
            assert_failed(row, "MODEL_FAILED", text)
            (row,) = run(model, work(2 * number + 2, floats([1, 2]), rows=0))
            assert values(row) == [[[1], [2]], [0, 0]]


def given(folder: Path, outputs: Any = Y, **parameters: str) -> ModelConfig:
    dense(folder, signatures=True)
    return config("tflite", X, outputs, max_batch=4, parameters=parameters)


def fixed(folder: Path, kind: str) -> ModelConfig:
    graph = Graph()
    x = graph.input("x", "FP32", [1, 3])
    if kind == "reshape":
        y = graph.output("y", "FP32", [1, 3])
        graph.node("RESHAPE", [x, graph.weight("shape", np.array([1, 3], np.int32))], [y])
    else:
        axis = graph.weight("axis", np.zeros(1, np.int32))
        graph.node("SUM", [x, axis], [graph.output("y", "FP32", [1, 3])], of="ReducerOptions", keepDims=True)
    graph.save(folder)
    return config("tflite", X, {"y": ("FP32", (3,))}, max_batch=4)


def nothing(folder: Path) -> ModelConfig:
    (folder / "1").mkdir()
    return config("tflite", X, Y)


def garbage(folder: Path) -> ModelConfig:
    nothing(folder)
    (folder / "1" / "model.tflite").write_bytes(b"garbage" * 10)
    return config("tflite", X, Y)


def complex_numbers(folder: Path) -> ModelConfig:
    graph = Graph()
    graph.node("RELU", [graph.input("x", "COMPLEX64", [3])], [graph.output("y", "COMPLEX64", [3])])
    graph.save(folder)
    return config("tflite", X, Y)


@cases(
    (nothing, NotFound, "version 1 of model 'm' has no file 'model.tflite'"),
    (garbage, InvalidRequest, "model.tflite is not a model that LiteRT can run"),
    (complex_numbers, Unsupported, "tensor 'x' of the model is of type complex64"),
    (lambda f: given(f, {"y": ("FP16", (2,))}), InvalidRequest, "is FP16 in the .* and FP32 in the"),
    (lambda f: given(f, tflite_signature="a"), InvalidRequest, r"\(serving_default, train\), not 'a'"),
    (lambda f: given(f, tflite_num_threads="a"), InvalidRequest, "tflite_num_threads of model 'm'"),
    (lambda f: fixed(f, "reshape"), InvalidRequest, "is 4, and the first .* is 1 and cannot be changed: .*failed"),
    (lambda f: fixed(f, "sum"), InvalidRequest, "output 'y' does not grow with the inputs. Set max_batch_size: 0"),
    (lambda folder: on_gpu(given(folder), 1), Unsupported, "and models of LiteRT run on the CPU only"),
)
def test_unsupported_models_are_refused(make: Any, kind: type[ServeError], text: str, tmp_path: Path) -> None:
    assert_refused(make(tmp_path), tmp_path, kind, text, AS_GIVEN)
