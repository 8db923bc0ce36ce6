"""Models that do not load: the reason is clear, names what is wrong, and tells nothing of the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.repo.backends import GROUP
from shmserve.repo.config.schema import ModelConfig, ModelOptimizationPolicy, ModelOptimizationPolicyGraph
from shmserve.workers.backends import StackedBackend, registry
from shmserve.workers.process.exit_codes import Exit
from tests.support.workers.worker_harness import WorkerProcess, config
from tests.support.workers.worker_models import Graph, python_model, version_folder

X, Y = {"x": ("FP32", (3,))}, {"y": ("FP32", (3,))}


def fails(given: ModelConfig, folder: Path, code: str, *texts: str) -> None:
    with WorkerProcess(given, folder) as worker:
        failed = worker.failed()
        assert worker.ended() == Exit.LOAD_FAILED
        assert failed.code == code
        for text in texts:
            assert text in failed.text
        assert str(folder) not in failed.text
        assert "workers/" not in failed.trace


def relu(folder: Path, dims: tuple[int, ...] = (-1, 3)) -> None:
    Graph().input("x", "FP32", dims).output("y", "FP32", dims).node("Relu", ["x"], ["y"]).save(folder)


@pytest.mark.process
def test_an_unknown_backend(tmp_path: Path) -> None:
    known = "identity, onnxruntime, openvino, python, pytorch"
    fails(config("nothing", X, Y), tmp_path, "UNSUPPORTED", "unknown backend 'nothing'", known)


@pytest.mark.process
@pytest.mark.parametrize("backend", ["onnxruntime", "python"])
def test_no_file(tmp_path: Path, backend: str) -> None:
    file = {"onnxruntime": "model.onnx", "python": "model.py"}[backend]
    fails(config(backend, X, Y), tmp_path, "NOT_FOUND", "version 1 of model 'm'", f"no file '{file}'")


@pytest.mark.process
@pytest.mark.parametrize(
    ("source", "code", "text"),
    [
        ("class TritonPythonModel(", "MODEL_FAILED", "SyntaxError"),
        ("import nothing_of_that_name", "MODEL_FAILED", "nothing_of_that_name"),
        ("class Model: pass", "INVALID_ARG", "no class TritonPythonModel"),
        ("class TritonPythonModel: pass", "INVALID_ARG", "no execute method"),
        (
            "class TritonPythonModel:\n  def execute(self, r): pass\n  def initialize(self, args): raise KeyError('k')",
            "MODEL_FAILED",
            "KeyError: 'k'",
        ),
        (
            "class TritonPythonModel:\n  def execute(self, r): pass\n"
            "  @staticmethod\n  def auto_complete_config(c): return 5",
            "INVALID_ARG",
            "auto_complete_config of model 'm' must return",
        ),
        (
            "class TritonPythonModel:\n  def execute(self, r): pass\n"
            "  @staticmethod\n  def auto_complete_config(c): c.add_input({'name': 'z'})",
            "MODEL_FAILED",
            "lacks 'data_type'",
        ),
    ],
    ids=["syntax", "import", "class", "execute", "initialize", "complete returns", "complete raises"],
)
def test_python_models(tmp_path: Path, source: str, code: str, text: str) -> None:
    python_model(tmp_path, source)
    fails(config("python", X, Y), tmp_path, code, text)


def not_a_model(folder: Path) -> ModelConfig:
    (version_folder(folder) / "model.onnx").write_bytes(b"not a model")
    return config("onnxruntime", X, Y, max_batch=4)


def other_input(folder: Path) -> ModelConfig:
    relu(folder)
    return config("onnxruntime", {"z": ("FP32", (3,))}, Y, max_batch=4)


def fewer_inputs(folder: Path) -> ModelConfig:
    graph = Graph().input("x", "FP32", [-1, 3]).input("w", "FP32", [-1, 3]).output("y", "FP32", [-1, 3])
    graph.node("Add", ["x", "w"], ["y"]).save(folder)
    return config("onnxruntime", X, Y, max_batch=4)


def other_dtype(folder: Path) -> ModelConfig:
    relu(folder)
    return config("onnxruntime", {"x": ("INT64", (3,))}, Y, max_batch=4)


def other_dims(folder: Path) -> ModelConfig:
    relu(folder)
    return config("onnxruntime", X, {"y": ("FP32", (4,))}, max_batch=4)


def other_rank(folder: Path) -> ModelConfig:
    relu(folder)
    return config("onnxruntime", X, Y)


def fixed_batch(folder: Path) -> ModelConfig:
    relu(folder, (1, 3))
    return config("onnxruntime", X, Y, max_batch=4)


def other_parameter(folder: Path) -> ModelConfig:
    relu(folder)
    return config("onnxruntime", X, Y, max_batch=4, parameters={"intra_op_thread_count": "many"})


@pytest.mark.process
@pytest.mark.parametrize(
    ("make", "code", "text"),
    [
        (not_a_model, "MODEL_FAILED", "model.onnx"),
        (other_input, "INVALID_ARG", "unexpected inference input 'z', allowed inputs are: x"),
        (fewer_inputs, "INVALID_ARG", "configuration expects 1 inputs, model provides 2: it also has w"),
        (other_dtype, "INVALID_ARG", "input 'x' is INT64 in the configuration and FP32 in the model"),
        (other_dims, "INVALID_ARG", "output 'y' has shape [-1, 4] in the configuration"),
        (other_rank, "INVALID_ARG", "input 'x' has shape [3] in the configuration and [-1, 3] in the model"),
        (fixed_batch, "INVALID_ARG", "the first dimension of input 'x' is 1 in the model"),
        (other_parameter, "INVALID_ARG", "intra_op_thread_count must be a whole number"),
    ],
)
def test_onnx_models(tmp_path: Path, make: Callable[[Path], ModelConfig], code: str, text: str) -> None:
    fails(make(tmp_path), tmp_path, code, text)


@pytest.mark.process
def test_a_wrong_graph_level(tmp_path: Path) -> None:
    from msgspec.structs import replace

    relu(tmp_path)
    level = ModelOptimizationPolicy(graph=ModelOptimizationPolicyGraph(level=5))
    given = replace(config("onnxruntime", X, Y, max_batch=4), optimization=level)
    fails(given, tmp_path, "INVALID_ARG", "optimization.graph.level 5")


@pytest.mark.process
@pytest.mark.parametrize(
    ("inputs", "outputs", "parameters", "text"),
    [
        (X, {"y": ("FP32", (3,)), "z": ("FP32", (3,))}, {}, "output 'z' has no input to repeat"),
        (X, {"y": ("INT8", (3,))}, {}, "output 'y' is TYPE_INT8"),
        (X, Y, {"delay_us": "soon"}, "delay_us must be a number"),
    ],
)
def test_identity_models(
    tmp_path: Path,
    inputs: dict[str, tuple[str, tuple[int, ...]]],
    outputs: dict[str, tuple[str, tuple[int, ...]]],
    parameters: dict[str, str],
    text: str,
) -> None:
    fails(config("identity", inputs, outputs, parameters=parameters), tmp_path, "INVALID_ARG", text)


# ---------------------------------------------------------------------------------------------- in this process


def test_a_missing_engine_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shmserve.workers.backends.onnx.backend", raising=False)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(Unsupported, match=r"pip install 'shmserve\[cpu\]'"):
        registry.find("onnxruntime")


class Point:
    """An entry point of another package."""

    def __init__(self, name: str, found: object) -> None:
        self.name = name
        self._found = found

    def load(self) -> object:
        return self._found


class Other(StackedBackend):
    """A backend that another package brings."""


def test_backends_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [Point("other", Other), Point("wrong", np.ndarray)]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points if group == GROUP else [])
    assert registry.find("other") is Other
    with pytest.raises(InvalidRequest, match="'wrong' is not a StackedBackend"):
        registry.find("wrong")
    with pytest.raises(Unsupported, match=r"known are: identity, .*openvino, other, python, .*wrong"):
        registry.find("another")
