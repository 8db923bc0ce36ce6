"""Creates the ONNX files of the samples and the word list of `sentiment_tokenizer`, which are committed. Needs `onnx`.

Invariant: the output is identical on every machine and with every version of the libraries. Weights come from a
generator whose stream is frozen, and every value that a library could choose is set here.
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
FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16

Shapes = dict[str, list[Any]]
Data = dict[str, NDArray[Any]]

NEGATIONS = "not no never nothing without hardly don't doesn't didn't isn't wasn't can't won't"
WORDS = {
    3.0: "excellent wonderful perfect brilliant love loved amazing superb delighted",
    2.0: "good great happy enjoyed beautiful fast reliable helpful best recommend impressed fresh",
    1.0: "nice fine like liked easy clean friendly works useful pleasant better clear calm",
    -1.0: "slow expensive late boring noisy hard cold small worse confusing dirty old",
    -2.0: "bad broken poor wrong sad disappointed rude fails failed useless annoying ugly problem",
    -3.0: "terrible awful horrible worst hate hated disgusting disaster dreadful",
}
"""Weight -> words: the sentiment of each word."""
ROOM = 128
"""Size of the classifier's vocabulary, including unused entries."""
LENGTH = 32
NEUTRAL = 0.8
"""A text is neutral if the absolute value of the sum of its words' weights is below this."""

HEIGHT, WIDTH = 144, 400
"""Size of the images of a road."""
STRIP = 4
"""A lane line has one column for so many rows of the image."""
HORIZON = 44
LINES = (20.0, 140.0, 260.0, 380.0)
"""Columns of the lane lines in the lowest row of the image. They meet in the middle of row HORIZON."""


def weights(generator: np.random.RandomState, *shape: int) -> NDArray[np.float32]:
    """Uniform and centred, scaled so that a layer preserves the variance of its input."""
    inputs = int(np.prod(shape[1:]))
    return ((generator.random_sample(shape) - 0.5) * np.sqrt(12 / inputs)).astype(np.float32)


def model(
    name: str,
    nodes: list[Any],
    inputs: Shapes,
    outputs: Shapes,
    data: Data,
    kind: int = FLOAT,
    output_kind: int = FLOAT,
) -> bytes:
    """An ONNX file. `kind`: the element type of its inputs; `output_kind`: of its outputs."""
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(key, kind, shape) for key, shape in inputs.items()],
        [helper.make_tensor_value_info(key, output_kind, shape) for key, shape in outputs.items()],
        [numpy_helper.from_array(value, key) for key, value in data.items()],
    )
    proto = helper.make_model(graph, producer_name="shmserve", opset_imports=[helper.make_opsetid("", OPSET)])
    proto.ir_version = IR_VERSION
    onnx.checker.check_model(proto)
    return bytes(proto.SerializeToString(deterministic=True))


def mlp() -> bytes:
    """64 numbers -> two hidden layers of 128 -> the probabilities of 10 classes."""
    generator = np.random.RandomState(1)
    data: Data = {}
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
    """A 64 x 64 image -> three convolutions, each halving its size -> the mean of each map -> 10 scores."""
    generator = np.random.RandomState(2)
    data: Data = {}
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


def words() -> dict[str, float]:
    """Word -> weight, in the order of word numbers, which start at 1; negations have weight 0."""
    known = dict.fromkeys(NEGATIONS.split(), 0.0)
    return known | {word: weight for weight, line in WORDS.items() for word in line.split()}


def classifier() -> bytes:
    """The numbers of LENGTH (32) words -> the sum s of their weights -> softmax of (-s, NEUTRAL, s).

    The weight of a word that follows a negation is multiplied by -1.
    """
    known = words()
    weight, factor = np.zeros(ROOM, np.float32), np.ones(ROOM, np.float32)
    weight[1 : len(known) + 1] = list(known.values())
    factor[1 : len(known) + 1] = [-1 if word in NEGATIONS.split() else 1 for word in known]
    data: Data = {
        "weight": weight,
        "factor": factor,
        "from": np.array([0]),
        "to": np.array([LENGTH - 1]),
        "axis": np.array([1]),
        "shift": np.array([0, 1, 0, 0]),
        "one": np.array(1, np.float32),
        "w": np.array([[-1], [0], [1]], np.float32),
        "b": np.array([0, NEUTRAL, 0], np.float32),
    }
    nodes = [
        helper.make_node("Gather", ["weight", "WORDS"], ["weights"]),
        helper.make_node("Gather", ["factor", "WORDS"], ["factors"]),
        helper.make_node("Slice", ["factors", "from", "to", "axis"], ["all_but_last"]),
        helper.make_node("Pad", ["all_but_last", "shift", "one"], ["forerunners"]),
        helper.make_node("Mul", ["weights", "forerunners"], ["counted"]),
        helper.make_node("ReduceSum", ["counted", "axis"], ["sum"], keepdims=1),
        helper.make_node("Gemm", ["sum", "w", "b"], ["logits"], transB=1),
        helper.make_node("Softmax", ["logits"], ["SCORES"], axis=1),
    ]
    shapes: tuple[Shapes, Shapes] = {"WORDS": ["batch", LENGTH]}, {"SCORES": ["batch", 3]}
    return model("sentiment_classifier", nodes, *shapes, data, TensorProto.INT64)


def expected_columns() -> NDArray[np.float32]:
    """Where the camera sees each lane line, in the middle of each strip: [lines, strips]."""
    rows = np.arange(HEIGHT // STRIP) * STRIP + (STRIP - 1) / 2
    depth = np.clip((rows - HORIZON) / (HEIGHT - 1 - HORIZON), 0, 1)
    bottom = np.array(LINES)[:, None]
    return np.asarray(WIDTH / 2 + (bottom - WIDTH / 2) * depth, np.float32)


def lanes() -> bytes:
    """A 144 x 400 image -> how much each pixel is brighter than what is left and right of it (MASK) -> the
    maximum of each strip of 4 rows -> for each lane line, the softmax over the columns of that and of the distance from
    where the line is expected -> the mean column, and the mean of the maximum there.
    """
    columns = np.arange(WIDTH, dtype=np.float32)
    expected = expected_columns()
    tolerance = 6 + 14 * (expected[-1] - WIDTH / 2) / (WIDTH / 2)  # lines are closer to each other in the distance
    away = (columns - expected[:, :, None]) / tolerance[:, None]
    data: Data = {
        "grey": np.array([0.299, 0.587, 0.114]).reshape(1, 3, 1, 1),
        "ridge": np.array([-1 / 8] * 4 + [1 / 5] * 5 + [-1 / 8] * 4).reshape(1, 1, 1, 13),
        "steep": np.array(24),
        "least": np.array(0.3),
        "line": np.array(10),
        "prior": -np.minimum(away**2, 30),
        "columns": (columns / (WIDTH - 1)).reshape(WIDTH, 1),
    }
    data = {name: value.astype(np.float16) for name, value in data.items()} | {"last": np.array([3])}
    nodes = [
        helper.make_node("Conv", ["IMAGE", "grey"], ["brightness"]),
        helper.make_node("Conv", ["brightness", "ridge"], ["ridges"], kernel_shape=[1, 13], pads=[0, 6, 0, 6]),
        helper.make_node("Sub", ["ridges", "least"], ["above"]),
        helper.make_node("Mul", ["above", "steep"], ["sharp"]),
        helper.make_node("Sigmoid", ["sharp"], ["MASK"]),
        helper.make_node("MaxPool", ["MASK"], ["strips"], kernel_shape=[STRIP, 1], strides=[STRIP, 1]),
        helper.make_node("Mul", ["strips", "line"], ["found"]),
        helper.make_node("Add", ["found", "prior"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["chances"], axis=3),
        helper.make_node("MatMul", ["chances", "columns"], ["column"]),
        helper.make_node("Squeeze", ["column", "last"], ["COLUMN"]),
        helper.make_node("Mul", ["chances", "strips"], ["there"]),
        helper.make_node("ReduceSum", ["there", "last"], ["PRESENT"], keepdims=0),
    ]
    strips = HEIGHT // STRIP
    shapes: Shapes = {
        "COLUMN": ["batch", 4, strips],
        "PRESENT": ["batch", 4, strips],
        "MASK": ["batch", 1, HEIGHT, WIDTH],
    }
    return model("lanes", nodes, {"IMAGE": ["batch", 3, HEIGHT, WIDTH]}, shapes, data, HALF, HALF)


def make(dest: Path) -> list[Path]:
    """Writes all files below `dest` and returns their paths."""
    files = []
    for name, proto in (
        ("mlp/1/model.onnx", mlp()),
        ("cnn/1/model.onnx", cnn()),
        ("lanes/1/model.onnx", lanes()),
        ("sentiment_classifier/1/model.onnx", classifier()),
        ("sentiment_tokenizer/1/words.txt", "".join(f"{word}\n" for word in words()).encode()),
    ):
        file = dest / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(proto)
        files.append(file)
    return files


if __name__ == "__main__":
    for file in make(Path(sys.argv[1]) if len(sys.argv) > 1 else EXAMPLES):
        print(f"{file}: {file.stat().st_size} bytes")
