"""Generates the models and repositories for measurements, from fixed seeds.

Repositories are written in the documented layout without importing server code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEED = 20
MLP_SHAPE = [256]
CNN_SHAPE = [3, 224, 224]

IDENTITY = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())
            ])
            for request in requests
        ]
"""
FIRST = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[:1].copy())
            ])
            for request in requests
        ]
"""


class GraphBuilder:
    """Collects nodes and weights; each layer method returns the name of its output."""

    def __init__(self) -> None:
        import numpy as np

        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self._random = np.random.default_rng(SEED)

    def node(self, kind: str, inputs: list[str], output: str | None = None, **attributes: Any) -> str:
        from onnx import helper

        output = output or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def weight(self, shape: tuple[int, ...], scale: float) -> str:
        import numpy as np
        from onnx import numpy_helper

        name = f"w{len(self.weights)}"
        values = (self._random.standard_normal(shape) * scale).astype(np.float32)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def dense(self, x: str, inner: int, outer: int, output: str | None = None) -> str:
        weights = self.weight((inner, outer), inner**-0.5)
        return self.node("Gemm", [x, weights, self.weight((outer,), 0.01)], output)

    def conv(self, x: str, inner: int, outer: int, kernel: int, stride: int, relu: bool = True) -> str:
        scale = (2.0 / (inner * kernel * kernel)) ** 0.5
        weights = self.weight((outer, inner, kernel, kernel), scale)
        x = self.node("Conv", [x, weights], strides=[stride] * 2, pads=[kernel // 2] * 4, kernel_shape=[kernel] * 2)
        return self.node("Relu", [x]) if relu else x

    def save(self, path: Path, shape: list[int], classes: int) -> None:
        from onnx import TensorProto, helper

        graph = helper.make_graph(
            self.nodes,
            path.stem,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *shape])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", classes])],
            self.weights,
        )
        save(graph, path)


def save(graph: Any, path: Path) -> None:
    """Writes a GraphProto as a model that old versions of ONNX Runtime load."""
    import onnx

    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))


def make_mlp(path: Path) -> None:
    """FP32 256-1024-1024-64 with ReLU between layers: about 1.4 M multiply-adds per row."""
    graph = GraphBuilder()
    x = graph.node("Relu", [graph.dense("x", 256, 1024)])
    x = graph.node("Relu", [graph.dense(x, 1024, 1024)])
    graph.dense(x, 1024, 64, "y")
    graph.save(path, MLP_SHAPE, 64)


def make_cnn(path: Path, base: int = 32) -> None:
    """A residual network of 18 layers at half width, about 0.5 G multiply-adds per image of 3x224x224 (600 KB)."""
    graph = GraphBuilder()
    x = graph.conv("x", 3, base, 7, 2)
    x = graph.node("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    width = base
    for stage in range(4):
        wider = base << stage
        for block in range(2):
            stride = 2 if stage and not block else 1
            y = graph.conv(x, width, wider, 3, stride)
            y = graph.conv(y, wider, wider, 3, 1, relu=False)
            if stride != 1 or width != wider:
                x = graph.conv(x, width, wider, 1, stride, relu=False)
            x = graph.node("Relu", [graph.node("Add", [x, y])])
            width = wider
    x = graph.node("Flatten", [graph.node("GlobalAveragePool", [x])])
    graph.dense(x, width, 1000, "y")
    graph.save(path, CNN_SHAPE, 1000)


def make_adder(path: Path, width: int) -> None:
    """y = x + 1, without a batch dimension."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [width]) for name in ("x", "y")]
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    graph = helper.make_graph([helper.make_node("Add", ["x", "one"], ["y"])], "adder", tensors[:1], tensors[1:], [one])
    save(graph, path)


def make_transformer(path: Path, hidden: int = 32, layers: int = 1, heads: int = 2, words: int = 1000) -> None:
    """A small text encoder. Inputs: ids and mask, both [n, length]; outputs: one vector per text and one per token.
    The text vector is the mean of the token vectors, so a wrong mask or another request's answer is detected. The cost
    of attention is quadratic in the length.
    """
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    graph = GraphBuilder()

    def constant(name: str, value: Any) -> str:
        graph.weights.append(numpy_helper.from_array(value, name))
        return name

    def linear(x: str, inner: int, outer: int) -> str:
        product = graph.node("MatMul", [x, graph.weight((inner, outer), inner**-0.5)])
        return graph.node("Add", [product, graph.weight((outer,), 0.01)])

    def norm(x: str) -> str:
        return graph.node("LayerNormalization", [x, one, zero], axis=-1)

    one, zero = constant("one", np.ones(hidden, np.float32)), constant("zero", np.zeros(hidden, np.float32))
    split = constant("split", np.array([0, 0, heads, hidden // heads], np.int64))
    joined = constant("joined", np.array([0, 0, hidden], np.int64))
    mask = graph.node("Cast", ["attention_mask"], to=TensorProto.FLOAT)
    masked = graph.node("Sub", [mask, constant("unit", np.float32(1))])
    masked = graph.node("Mul", [masked, constant("large", np.float32(1e9))])
    bias = graph.node("Unsqueeze", [masked, constant("axes", np.array([1, 2], np.int64))])
    x = norm(graph.node("Gather", [graph.weight((words, hidden), 1.0), "input_ids"]))
    for _ in range(layers):
        parts = [graph.node("Reshape", [linear(x, hidden, hidden), split]) for _ in range(3)]
        query, value = (graph.node("Transpose", [parts[place]], perm=[0, 2, 1, 3]) for place in (0, 2))
        scores = graph.node("MatMul", [query, graph.node("Transpose", [parts[1]], perm=[0, 2, 3, 1])])
        scale = constant(f"scale{len(graph.nodes)}", np.float32((hidden // heads) ** -0.5))
        weights = graph.node("Add", [graph.node("Mul", [scores, scale]), bias])
        seen = graph.node("MatMul", [graph.node("Softmax", [weights], axis=-1), value])
        seen = graph.node("Reshape", [graph.node("Transpose", [seen], perm=[0, 2, 1, 3]), joined])
        x = norm(graph.node("Add", [x, linear(seen, hidden, hidden)]))
        inner = graph.node("Relu", [linear(x, hidden, 4 * hidden)])
        x = norm(graph.node("Add", [x, linear(inner, 4 * hidden, hidden)]))
    graph.node("Identity", [x], "tokens")
    axis = constant("axis", np.array([1], np.int64))
    column = graph.node("Unsqueeze", [mask, constant("last", np.array([2], np.int64))])
    total = graph.node("ReduceSum", [graph.node("Mul", [x, column]), axis], keepdims=0)
    graph.node("Div", [total, graph.node("ReduceSum", [mask, axis], keepdims=1)], "text")
    ids = [helper.make_tensor_value_info(n, TensorProto.INT64, ["n", "l"]) for n in ("input_ids", "attention_mask")]
    shapes: dict[str, list[str | int | None]] = {"text": ["n", hidden], "tokens": ["n", "l", hidden]}
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    save(helper.make_graph(graph.nodes, path.stem, ids, outputs, graph.weights), path)


@dataclass
class Model:
    """The contents of a model's config.pbtxt. `inputs` and `outputs` map names to data type and dims, without the batch
    dimension.
    """

    backend: str
    inputs: dict[str, tuple[str, list[int]]]
    outputs: dict[str, tuple[str, list[int]]]
    max_batch: int = 0
    dynamic: bool = False
    instances: int = 1
    kind: str = "KIND_CPU"
    parameters: dict[str, str] = field(default_factory=dict)
    more: str = ""
    """Further fields, as text."""


def config(name: str, model: Model) -> str:
    lines = [f'name: "{name}"', f'backend: "{model.backend}"', f"max_batch_size: {model.max_batch}"]
    for kind, tensors in (("input", model.inputs), ("output", model.outputs)):
        for tensor, (dtype, dims) in tensors.items():
            lines.append(f'{kind} [ {{ name: "{tensor}" data_type: TYPE_{dtype} dims: {dims} }} ]')
    lines.append(f"instance_group [ {{ count: {model.instances} kind: {model.kind} }} ]")
    if model.dynamic:
        lines.append("dynamic_batching { }")
    for key, value in model.parameters.items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    return "\n".join([*lines, model.more]) + "\n"


def write(root: Path, name: str, model: Model, files: dict[str, str | Path]) -> None:
    """Writes version 1 of a model. `files` maps names to the text of a file, or to the path of a file to hard-link."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config(name, model))
    for file, content in files.items():
        if isinstance(content, Path):
            (folder / file).hardlink_to(content)
        else:
            (folder / file).write_text(content)


def onnx_model(shape: list[int], classes: int, max_batch: int, instances: int = 1) -> Model:
    return Model(
        "onnxruntime",
        {"x": ("FP32", shape)},
        {"y": ("FP32", [classes])},
        max_batch=max_batch,
        dynamic=max_batch > 1,
        instances=instances,
        parameters={"intra_op_thread_count": "1"},
    )


def first_element() -> Model:
    return Model("python", {"x": ("FP32", [-1])}, {"y": ("FP32", [1])})


def identity(dtype: str = "FP32", dims: list[int] | None = None, max_batch: int = 0, instances: int = 1) -> Model:
    dims = [-1] if dims is None else dims
    return Model(
        "identity",
        {"x": (dtype, dims)},
        {"y": (dtype, dims)},
        max_batch=max_batch,
        dynamic=max_batch > 1,
        instances=instances,
    )
