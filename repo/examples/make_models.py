"""Creates the ONNX files of the samples and the word list of `sentiment_tokenizer`. Needs `onnx`.
The files are committed.

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
FLOAT = TensorProto.FLOAT

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


def weights(generator: np.random.RandomState, *shape: int) -> NDArray[np.float32]:
    """Uniform and centred, scaled so that a layer preserves the variance of its input."""
    inputs = int(np.prod(shape[1:]))
    return ((generator.random_sample(shape) - 0.5) * np.sqrt(12 / inputs)).astype(np.float32)


def model(name: str, nodes: list[Any], inputs: Shapes, outputs: Shapes, data: Data, kind: int = FLOAT) -> bytes:
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(key, kind, shape) for key, shape in inputs.items()],
        [helper.make_tensor_value_info(key, FLOAT, shape) for key, shape in outputs.items()],
        [numpy_helper.from_array(value, key) for key, value in data.items()],
    )
    made = helper.make_model(graph, producer_name="shmserve", opset_imports=[helper.make_opsetid("", OPSET)])
    made.ir_version = IR_VERSION
    onnx.checker.check_model(made)
    return bytes(made.SerializeToString(deterministic=True))


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


def make(dest: Path) -> list[Path]:
    """Write all files below `dest` and return their paths."""
    files = []
    for name, made in (
        ("mlp/1/model.onnx", mlp()),
        ("cnn/1/model.onnx", cnn()),
        ("sentiment_classifier/1/model.onnx", classifier()),
        ("sentiment_tokenizer/1/words.txt", "".join(f"{word}\n" for word in words()).encode()),
    ):
        file = dest / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(made)
        files.append(file)
    return files


if __name__ == "__main__":
    for file in make(Path(sys.argv[1]) if len(sys.argv) > 1 else EXAMPLES):
        print(f"{file}: {file.stat().st_size} bytes")
