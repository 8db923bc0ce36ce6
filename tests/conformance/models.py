"""Models with an optional input, and slow models, for each backend.

`adding` computes a + b, or a + 100 without b; `slow` returns y = x after a while.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from shmserve.repo.config.schema import ModelConfig
from tests.support.workers.models import dali_models, paddle_models, tensorflow_models, tflite_models
from tests.support.workers.models.worker_models import (
    PYTHON_ADD,
    PYTHON_ECHO,
    Graph,
    openvino_input,
    openvino_result,
    openvino_save,
    python_model,
    torch_forward,
    tree_model,
    version_folder,
)
from tests.support.workers.worker_harness import config

Make = Callable[[Path], ModelConfig]
X = {"x": ("FP32", (-1,))}
Y = {"y": ("FP32", (-1,))}
CHAIN, CHAINS = 2000, 100
"""Nodes per tree, and number of trees, of the slow tree model."""
TIMES, SIDE = 24, 512
"""A slow model multiplies TIMES diagonal matrices of this side, so that the result is known."""


def adding_config(backend: str) -> ModelConfig:
    found = config(backend, {"a": ("FP32", (2,)), "b": ("FP32", (2,))}, {"sum": ("FP32", (2,))}, max_batch=8)
    return replace(found, input=(found.input[0], replace(found.input[1], optional=True)))


# ---------------------------------------------------------------------------------------------- identity


def identity_slow(folder: Path) -> ModelConfig:
    return config("identity", X, Y, parameters={"delay_us": "300000"})


# ---------------------------------------------------------------------------------------------- python


def python_adding(folder: Path) -> ModelConfig:
    python_model(folder, PYTHON_ADD)
    return adding_config("python")


def python_slow(folder: Path) -> ModelConfig:
    slowly = PYTHON_ECHO.replace("        return [self", "        select.select([], [], [], 0.3)\n        return [self")
    python_model(folder, "import select\n" + slowly)
    return config("python", X, Y)


# ---------------------------------------------------------------------------------------------- onnxruntime


def onnx_adding(folder: Path) -> ModelConfig:
    graph = Graph().input("a", "FP32", [-1, 2]).input("b", "FP32", [1, 2]).output("sum", "FP32", [-1, 2])
    graph.weight("b", np.full((1, 2), 100, np.float32)).node("Add", ["a", "b"], ["sum"]).save(folder)
    return adding_config("onnxruntime")


def onnx_slow(folder: Path) -> ModelConfig:
    graph = Graph().input("x", "FP32", [-1]).output("y", "FP32", [-1])
    graph.weight("one", np.eye(SIDE, dtype=np.float32)).weight("side", np.float32(SIDE))
    graph.node("ReduceSum", ["x"], ["sum"], keepdims=0).node("Mul", ["one", "sum"], ["m0"])
    for number in range(TIMES):
        graph.node("MatMul", [f"m{number}", "one"], [f"m{number + 1}"])
    graph.node("ReduceSum", [f"m{TIMES}"], ["trace"], keepdims=0).node("Div", ["trace", "side"], ["again"])
    graph.node("Sub", ["again", "sum"], ["zero"]).node("Add", ["x", "zero"], ["y"])
    graph.save(folder)
    return config("onnxruntime", X, Y)


# ---------------------------------------------------------------------------------------------- openvino


def openvino_slow(folder: Path) -> ModelConfig:
    from openvino import opset13

    x = openvino_input("x", "FP32", [-1])
    side = np.int64(SIDE)
    one = opset13.eye(side, side, np.int64(0), "f32")
    total = opset13.reduce_sum(x, np.array([0]), False)
    matrix = opset13.multiply(one, total)
    for _ in range(TIMES):
        matrix = opset13.matmul(matrix, one, False, False)
    again = opset13.divide(opset13.reduce_sum(matrix, np.array([0, 1]), False), np.float32(SIDE))
    zero = opset13.subtract(again, total)
    openvino_save(folder, [x], [openvino_result("y", opset13.add(x, zero))])
    return config("openvino", X, Y)


def openvino_adding(folder: Path) -> ModelConfig:
    """Refused: models of OpenVINO have no optional inputs."""
    from openvino import opset13

    a, b = openvino_input("a", "FP32", [-1, 2]), openvino_input("b", "FP32", [-1, 2])
    openvino_save(folder, [a, b], [openvino_result("sum", opset13.add(a, b))])
    return adding_config("openvino")


# ---------------------------------------------------------------------------------------------- pytorch


def torch_adding(folder: Path) -> ModelConfig:
    torch_forward(folder, "a, b: Optional[Tensor]", "return a + 100 if b is None else a + b")
    return adding_config("pytorch")


def torch_slow(folder: Path) -> ModelConfig:
    torch_forward(
        folder,
        "x",
        f"one = torch.eye({SIDE})",
        "matrix = one * x.sum()",
        f"for _ in range({TIMES}):",
        "    matrix = matrix @ one",
        f"return x + (matrix.sum() / {SIDE} - x.sum())",
    )
    return config("pytorch", X, Y)


# ---------------------------------------------------------------------------------------------- fil


def trees_slow(folder: Path) -> ModelConfig:
    """A sum of zeros over many trees, each a chain of nodes."""
    import treelite
    from treelite.model_builder import Metadata, ModelBuilder, PostProcessorFunc, TreeAnnotation

    builder = ModelBuilder(
        threshold_type="float32",
        leaf_output_type="float32",
        metadata=Metadata(2, "kRegressor", False, 2, [1, 1], (1, 1)),
        tree_annotation=TreeAnnotation(1, [0], [0]),
        postprocessor=PostProcessorFunc("identity"),
        base_scores=[0.0, 0.0],
    )
    builder.start_tree()
    for node in range(0, 2 * CHAIN, 2):
        builder.start_node(node)
        builder.numerical_test(
            0, -1.0, default_left=True, opname="<", left_child_key=node + 1, right_child_key=node + 2
        )
        builder.end_node()
        builder.start_node(node + 1)
        builder.leaf(1.0)
        builder.end_node()
    builder.start_node(2 * CHAIN)
    builder.leaf(0.0)
    builder.end_node()
    builder.end_tree()
    chains = treelite.Model.concatenate([builder.commit()] * CHAINS)
    model = treelite.Model.concatenate([chains, tree_model(2)])
    model.serialize(version_folder(folder) / "checkpoint.tl")
    two = ("FP32", (2,))
    return replace(config("fil", {"x": two}, {"y": two}), default_model_filename="checkpoint.tl")


# ---------------------------------------------------------------------------------------------- tensorflow


def tensorflow_adding(folder: Path) -> ModelConfig:
    tensorflow_models.adding(folder)
    return adding_config("tensorflow")


def tensorflow_slow(folder: Path) -> ModelConfig:
    return tensorflow_models.slow(folder, SIDE, TIMES)


# ---------------------------------------------------------------------------------------------- tflite


def tflite_adding(folder: Path) -> ModelConfig:
    """Refused: models of LiteRT have no optional inputs."""
    tflite_models.adding(folder)
    return adding_config("tflite")


def tflite_slow(folder: Path) -> ModelConfig:
    return tflite_models.slow(folder, SIDE, TIMES)


# ---------------------------------------------------------------------------------------------- paddle


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
SLOW: dict[str, Make] = {
    "dali": dali_models.slow,
    "identity": identity_slow,
    "python": python_slow,
    "onnxruntime": onnx_slow,
    "openvino": openvino_slow,
    "pytorch": torch_slow,
    "tensorflow": tensorflow_slow,
    "fil": trees_slow,
    "tflite": tflite_slow,
    "paddle": lambda folder: paddle_models.slow(folder, SIDE, TIMES),
}
