"""Models that do not load: the error names the mistake and no path of the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.repo.backends import GROUP
from shmserve.repo.config.schema import ModelConfig
from shmserve.workers.backends import Backend, registry
from shmserve.workers.process.exit_codes import Exit
from tests.support.cases import cases
from tests.support.workers.in_process import load_failure
from tests.support.workers.models.worker_models import Graph, python_model
from tests.support.workers.worker_harness import WorkerProcess, config

Tensors = Mapping[str, tuple[str, Sequence[int]]]
X: Tensors = {"x": ("FP32", (3,))}
Y: Tensors = {"y": ("FP32", (3,))}
EXECUTE = "class TritonPythonModel:\n  def execute(self, r): pass\n"
COMPLETE = EXECUTE + "  @staticmethod\n  def auto_complete_config(c): "
STREAM = "class TritonPythonModel:\n  async def stream(self, r): yield"
RAISES = EXECUTE + "  def initialize(self, args): raise KeyError('k')"


@pytest.mark.process
@cases(
    (
        "nothing",
        "",
        "UNSUPPORTED",
        "unknown backend 'nothing'; known are: dali, fil, identity, llamacpp, onnxruntime, openvino, p",
    ),
    ("python", RAISES, "MODEL_FAILED", "KeyError: 'k'"),
)
def test_a_failed_load_ends_the_worker(backend: str, source: str, code: str, text: str, tmp_path: Path) -> None:
    python_model(tmp_path, source)
    with WorkerProcess(config(backend, X, Y), tmp_path) as worker:
        failed = worker.failed()
        assert worker.ended() == Exit.LOAD_FAILED
    assert (failed.code, text in failed.text) == (code, True), failed.text
    assert str(tmp_path) not in failed.text
    assert "workers/" not in failed.trace


@pytest.mark.parametrize("backend", ["onnxruntime", "python"])
def test_a_missing_model_file_is_reported(tmp_path: Path, backend: str) -> None:
    file = {"onnxruntime": "model.onnx", "python": "model.py"}[backend]
    found = load_failure(config(backend, X, Y), tmp_path)
    assert found.code == "NOT_FOUND"
    assert f"version 1 of model 'm' has no file '{file}'" in found.text


@cases(
    ("class TritonPythonModel(", "MODEL_FAILED", "SyntaxError"),
    ("import nothing_of_that_name", "MODEL_FAILED", "nothing_of_that_name"),
    ("class Model: pass", "INVALID_ARG", "no class TritonPythonModel"),
    ("class TritonPythonModel: pass", "INVALID_ARG", "no execute method"),
    (STREAM, "INVALID_ARG", "has a stream method and no execute: such a model needs model_transaction_policy"),
    (COMPLETE + "return 5", "INVALID_ARG", "auto_complete_config of model 'm' must return"),
    (COMPLETE + "c.add_input({'name': 'z'})", "MODEL_FAILED", "lacks 'data_type'"),
    ids=["syntax", "import", "class", "execute", "stream", "complete returns", "complete raises"],
)
def test_invalid_python_models_are_refused(source: str, code: str, text: str, tmp_path: Path) -> None:
    python_model(tmp_path, source)
    found = load_failure(config("python", X, Y), tmp_path)
    assert (found.code, text in found.text) == (code, True), found


def relu(
    folder: Path, inputs: Tensors = X, outputs: Tensors = Y, *, dims: Sequence[int] = (-1, 3), max_batch: int = 4
) -> ModelConfig:
    """A model with dims `dims`, and a configuration that may not match it."""
    Graph().input("x", "FP32", dims).output("y", "FP32", dims).node("Relu", ["x"], ["y"]).save(folder)
    return config("onnxruntime", inputs, outputs, max_batch=max_batch)


def two_inputs(folder: Path) -> ModelConfig:
    graph = Graph().input("x", "FP32", [-1, 3]).input("w", "FP32", [-1, 3]).output("y", "FP32", [-1, 3])
    graph.node("Add", ["x", "w"], ["y"]).save(folder)
    return config("onnxruntime", X, Y, max_batch=4)


def other_default(folder: Path) -> ModelConfig:
    """An input with a default value of another data type in the model."""
    graph = Graph().input("x", "FP32", [-1, 3]).input("w", "FP32", [1, 3]).output("y", "FP32", [-1, 3])
    graph.weight("w", np.ones((1, 3), np.float32)).node("Add", ["x", "w"], ["y"]).save(folder)
    return config("onnxruntime", {**X, "w": ("INT32", (3,))}, Y, max_batch=4)


def unknown_dim(folder: Path) -> ModelConfig:
    """An output with a different rank in the configuration. Only its rank is known before the model runs."""
    graph = Graph().input("x", "FP32", [-1, 3]).output("y", "FP32", [-1, -1])
    graph.weight("keep", np.array([True, False, True])).node("Compress", ["x", "keep"], ["y"], axis=1).save(folder)
    return config("onnxruntime", X, {"y": ("FP32", (-1, -1))}, max_batch=4)


def no_batches(folder: Path) -> ModelConfig:
    relu(folder, dims=(3, -1))
    return config("onnxruntime", {}, {}, max_batch=4)


@cases(
    (lambda folder: relu(folder, {"z": ("FP32", (3,))}), "unexpected inference input 'z', allowed inputs"),
    (two_inputs, "configuration expects 1 inputs, model provides 2: it also has w"),
    (lambda folder: relu(folder, {"x": ("INT64", (3,))}), "input 'x' is INT64 in the configuration and FP32"),
    (other_default, "input 'w' is INT32 in the configuration and FP32 in the model"),
    (lambda folder: relu(folder, X, {"y": ("FP32", (4,))}), "output 'y' has shape [-1, 4] in the config"),
    (lambda folder: relu(folder, max_batch=0), "input 'x' has shape [3] in the configuration and [-1, 3]"),
    (lambda folder: relu(folder, dims=(), max_batch=0), "has shape [3] in the configuration and [] in the"),
    (unknown_dim, "output 'y' has shape [-1, -1, -1] in the configuration"),
    (lambda folder: relu(folder, dims=(1, 3)), "the first dimension of input 'x' is 1 in the model"),
    (no_batches, "does not support batching"),
)
def test_invalid_onnx_models_are_refused(make: Callable[[Path], ModelConfig], text: str, tmp_path: Path) -> None:
    found = load_failure(make(tmp_path), tmp_path)
    assert (found.code, text in found.text) == ("INVALID_ARG", True), found


@cases(
    ({**Y, "z": ("FP32", (3,))}, {}, "output 'z' has no input to repeat"),
    ({"y": ("INT8", (3,))}, {}, "output 'y' is TYPE_INT8"),
    (Y, {"delay_us": "soon"}, "parameter delay_us of model 'm' must be a number"),
)
def test_invalid_identity_models_are_refused(
    outputs: Tensors, parameters: dict[str, str], text: str, tmp_path: Path
) -> None:
    found = load_failure(config("identity", X, outputs, parameters=parameters), tmp_path)
    assert (found.code, text in found.text) == ("INVALID_ARG", True), found


class Point:
    """An entry point of another package."""

    def __init__(self, name: str, found: object) -> None:
        self.name = name
        self._found = found

    def load(self) -> object:
        return self._found


class Other(Backend):
    """A backend from another package."""


def test_backends_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [Point("other", Other), Point("wrong", np.ndarray)]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points if group == GROUP else [])
    assert registry.find("other") is Other
    with pytest.raises(InvalidRequest, match="'wrong' is not a subclass of Backend"):
        registry.find("wrong")
    with pytest.raises(Unsupported, match=r"known are: dali, fil, identity, .*openvino, other, .*python, .*wrong"):
        registry.find("another")


def test_a_backend_without_load_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Point("other", Other)])
    found = load_failure(config("other", X, Y), tmp_path)
    assert found.code == "MODEL_FAILED"
    assert "Can't instantiate abstract class Other" in found.text
    assert "load" in found.text
