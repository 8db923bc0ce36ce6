"""A model with an optional input for each backend: a + b, or a + 100 without b."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from shmserve.repo.config.schema import ModelConfig
from tests.support.workers.models import paddle_models, tensorflow_models, tflite_models
from tests.support.workers.models.worker_models import (
    PYTHON_ADD,
    Graph,
    openvino_input,
    openvino_result,
    openvino_save,
    python_model,
    torch_forward,
)
from tests.support.workers.worker_harness import config

Make = Callable[[Path], ModelConfig]


def adding_config(backend: str) -> ModelConfig:
    found = config(backend, {"a": ("FP32", (2,)), "b": ("FP32", (2,))}, {"sum": ("FP32", (2,))}, max_batch=8)
    return replace(found, input=(found.input[0], replace(found.input[1], optional=True)))


def python_adding(folder: Path) -> ModelConfig:
    python_model(folder, PYTHON_ADD)
    return adding_config("python")


def onnx_adding(folder: Path) -> ModelConfig:
    graph = Graph().input("a", "FP32", [-1, 2]).input("b", "FP32", [1, 2]).output("sum", "FP32", [-1, 2])
    graph.weight("b", np.full((1, 2), 100, np.float32)).node("Add", ["a", "b"], ["sum"]).save(folder)
    return adding_config("onnxruntime")


def openvino_adding(folder: Path) -> ModelConfig:
    """Refused: models of OpenVINO have no optional inputs."""
    from openvino import opset13

    a, b = openvino_input("a", "FP32", [-1, 2]), openvino_input("b", "FP32", [-1, 2])
    openvino_save(folder, [a, b], [openvino_result("sum", opset13.add(a, b))])
    return adding_config("openvino")


def torch_adding(folder: Path) -> ModelConfig:
    torch_forward(folder, "a, b: Optional[Tensor]", "return a + 100 if b is None else a + b")
    return adding_config("pytorch")


def tensorflow_adding(folder: Path) -> ModelConfig:
    tensorflow_models.adding(folder)
    return adding_config("tensorflow")


def tflite_adding(folder: Path) -> ModelConfig:
    """Refused: models of LiteRT have no optional inputs."""
    tflite_models.adding(folder)
    return adding_config("tflite")


def paddle_adding(folder: Path) -> ModelConfig:
    """Refused: models of PaddlePaddle have no optional inputs."""
    paddle_models.adding(folder)
    return replace(adding_config("paddle"), default_model_filename="model.json")


REFUSING: dict[str, Make] = {"openvino": openvino_adding, "tflite": tflite_adding, "paddle": paddle_adding}
ADDING: dict[str, Make] = {
    "python": python_adding,
    "onnxruntime": onnx_adding,
    "pytorch": torch_adding,
    "tensorflow": tensorflow_adding,
}
