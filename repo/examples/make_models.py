"""Makes the ONNX files of the samples. Needs the `onnx` package; the files it makes are committed.

The rule of the file: the same bytes on every machine and with every version of what it uses. Weights come from a
generator whose stream is frozen for ever, and every number that a library could choose is written here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

EXAMPLES = Path(__file__).parent
OPSET = 17
IR_VERSION = 8

Weights = dict[str, NDArray[np.float32]]
Shapes = dict[str, list[Any]]


def weights(generator: np.random.RandomState, *shape: int) -> NDArray[np.float32]:
    """Uniform and centred, scaled so that what goes through a layer keeps its size."""
    inputs = int(np.prod(shape[1:]))
    return ((generator.random_sample(shape) - 0.5) * np.sqrt(12 / inputs)).astype(np.float32)


def model(name: str, nodes: list[Any], inputs: Shapes, outputs: Shapes, data: Weights) -> bytes:
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(key, TensorProto.FLOAT, shape) for key, shape in inputs.items()],
        [helper.make_tensor_value_info(key, TensorProto.FLOAT, shape) for key, shape in outputs.items()],
        [numpy_helper.from_array(value, key) for key, value in data.items()],
    )
    made = helper.make_model(graph, producer_name="shmserve", opset_imports=[helper.make_opsetid("", OPSET)])
    made.ir_version = IR_VERSION
    onnx.checker.check_model(made)
    return bytes(made.SerializeToString(deterministic=True))


def mlp() -> bytes:
    """64 numbers -> two hidden layers of 128 -> the probabilities of 10 classes."""
    generator = np.random.RandomState(1)
    data: Weights = {}
    nodes, last = [], "x"
    for layer, (size, outputs) in enumerate([(64, 128), (128, 128), (128, 10)]):
        data[f"w{layer}"] = weights(generator, outputs, size)
        data[f"b{layer}"] = weights(generator, outputs, 1).reshape(outputs)
        nodes.append(helper.make_node("Gemm", [last, f"w{layer}", f"b{layer}"], [f"h{layer}"], transB=1))
        last = f"h{layer}"
        if outputs != 10:
            nodes.append(helper.make_node("Relu", [last], [f"r{layer}"]))
            last = f"r{layer}"
    nodes.append(helper.make_node("Softmax", [last], ["y"], axis=1))
    return model("mlp", nodes, {"x": ["batch", 64]}, {"y": ["batch", 10]}, data)


def cnn() -> bytes:
    """A 64 x 64 picture -> three convolutions, each halving it -> the mean of each map -> 10 scores."""
    generator = np.random.RandomState(2)
    data: Weights = {}
    nodes, last = [], "image"
    for layer, (size, maps) in enumerate([(3, 16), (16, 32), (32, 64)]):
        data[f"w{layer}"] = weights(generator, maps, size, 3, 3)
        data[f"b{layer}"] = weights(generator, maps, 1).reshape(maps)
        names = [last, f"w{layer}", f"b{layer}"]
        nodes.append(helper.make_node("Conv", names, [f"c{layer}"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"]))
        last = f"r{layer}"
    data["w"] = weights(generator, 10, 64)
    data["b"] = weights(generator, 10, 1).reshape(10)
    nodes.append(helper.make_node("GlobalAveragePool", [last], ["mean"]))
    nodes.append(helper.make_node("Flatten", ["mean"], ["flat"], axis=1))
    nodes.append(helper.make_node("Gemm", ["flat", "w", "b"], ["scores"], transB=1))
    return model("cnn", nodes, {"image": ["batch", 3, 64, 64]}, {"scores": ["batch", 10]}, data)


def make(dest: Path) -> list[Path]:
    """Writes every model under `dest` and returns the files."""
    files = []
    for name, made in (("mlp", mlp()), ("cnn", cnn())):
        file = dest / name / "1" / "model.onnx"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(made)
        files.append(file)
    return files


if __name__ == "__main__":
    for file in make(Path(sys.argv[1]) if len(sys.argv) > 1 else EXAMPLES):
        print(f"{file}: {file.stat().st_size} bytes")
