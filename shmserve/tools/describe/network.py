"""Counts the operators, parameters, floating-point operations and bytes of an ONNX file, for given input shapes.

Invariant: nothing is run. Shapes of tensors in between are inferred; operators whose shapes stay unknown are counted as
`unknown`, and their work is missing in the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import onnx
from onnx import helper, shape_inference

from shmserve.errors import InvalidRequest

Shape = tuple[int, ...]
_SHAPING = frozenset(
    (
        "Cast",
        "Concat",
        "Constant",
        "ConstantOfShape",
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "GatherND",
        "Identity",
        "Pad",
        "Range",
        "Reshape",
        "ScatterND",
        "Shape",
        "Size",
        "Slice",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
        "Where",
    )
)
"""Operators that move data and compute nothing."""
_GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}
_WITH_GRAPHS = ("If", "Loop", "Scan")


class Operators(NamedTuple):
    """All `calls` of a kind of operator. `unknown`: how many of them have no known work."""

    kind: str
    calls: int
    flops: int
    parameters: int
    unknown: int


class Network(NamedTuple):
    """`inputs` and `outputs`: name -> shape, -1 for any size. `batches`: axis 0 of all of them has any size."""

    operators: Sequence[Operators]
    parameters: int
    weight_bytes: int
    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]
    opset: int
    batches: bool

    @property
    def flops(self) -> int:
        return sum(operators.flops for operators in self.operators)


class NetworkWork(NamedTuple):
    """The work of one batch. `input_bytes` and `output_bytes` are those of the request and of its response."""

    rows: int
    flops: int
    input_bytes: int
    output_bytes: int


def read(path: Path) -> onnx.ModelProto:
    """Raises InvalidRequest."""
    try:
        return onnx.load(path)
    except Exception as error:  # protobuf's own, which differs between its versions
        raise InvalidRequest(f"{path} cannot be read: {error}") from error


def network_of(model: onnx.ModelProto, shapes: Mapping[str, Shape], rows: int) -> tuple[Network, NetworkWork]:
    """The network, and its work for a batch. `shapes`: of inputs with variable dims, 1 where there is none. Axis 0 is
    replaced by `rows` if the network batches."""
    graph = model.graph
    weights = {one.name: one for one in graph.initializer}
    inputs = [one for one in graph.input if one.name not in weights]
    declared = {one.name: _declared(one) for one in (*inputs, *graph.output)}
    batches = all(shape[:1] == (-1,) for shape in declared.values())
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    for one in fixed.graph.input:
        if one.name in declared:
            _fix(one, _chosen(declared[one.name], shapes.get(one.name), rows if batches else None))
    for one in fixed.graph.output:  # otherwise the dims that the file names would be kept
        one.type.tensor_type.ClearField("shape")
    inferred = shape_inference.infer_shapes(fixed, data_prop=True)
    known = {one.name: one for one in (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)}
    sizes: dict[str, Shape] = {name: tuple(one.dims) for name, one in weights.items()}
    sizes |= {name: shape for name, one in known.items() if (shape := _declared(one)) and -1 not in shape}
    sizes |= {name: () for name, one in known.items() if name not in sizes and _is_scalar(one)}
    network = Network(
        _operators(inferred.graph, sizes, weights),
        sum(prod(one.dims) for one in weights.values()),
        sum(_bytes(one.data_type, tuple(one.dims)) for one in weights.values()),
        {one.name: declared[one.name] for one in inputs},
        {one.name: declared[one.name] for one in graph.output},
        next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), 0),
        batches,
    )
    input_bytes, output_bytes = (
        sum(_bytes(known[one.name].type.tensor_type.elem_type, sizes.get(one.name, (0,))) for one in tensors)
        for tensors in (inputs, graph.output)
    )
    return network, NetworkWork(rows if batches else 1, network.flops, input_bytes, output_bytes)


def _declared(value: Any) -> Shape:
    return tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in value.type.tensor_type.shape.dim)


def _is_scalar(value: Any) -> bool:
    return value.type.tensor_type.HasField("shape") and not value.type.tensor_type.shape.dim


def _chosen(declared: Shape, sample: Shape | None, rows: int | None) -> Shape:
    shape = sample or tuple(1 if dim < 0 else dim for dim in declared)
    return (rows, *shape[1:]) if rows is not None else shape


def _fix(value: Any, shape: Shape) -> None:
    del value.type.tensor_type.shape.dim[:]
    for size in shape:
        value.type.tensor_type.shape.dim.add().dim_value = size


def _bytes(element: int, shape: Shape) -> int:
    try:
        return prod(shape) * int(helper.tensor_dtype_to_np_dtype(element).itemsize)
    except KeyError:
        return 0


# ------------------------------------------------------------------------------------------------- operators


def _operators(graph: Any, sizes: Mapping[str, Shape], weights: Mapping[str, Any]) -> list[Operators]:
    operators: dict[str, Operators] = {}
    counted: set[str] = set()
    for node in graph.node:
        before = operators.get(node.op_type, Operators(node.op_type, 0, 0, 0, 0))
        own = [name for name in node.input if name in weights and name not in counted]
        counted.update(own)
        flops = _flops(node, sizes)
        operators[node.op_type] = Operators(
            node.op_type,
            before.calls + 1,
            before.flops + (flops or 0),
            before.parameters + sum(prod(weights[name].dims) for name in own),
            before.unknown + (flops is None),
        )
    return sorted(operators.values(), key=lambda one: (-one.flops, -one.parameters, one.kind))


def _flops(node: Any, sizes: Mapping[str, Shape]) -> int | None:
    """A multiplication with an addition counts as two. Operators without a rule count one for each element of their
    outputs. None: a shape is unknown, or the operator has graphs of its own."""
    if node.op_type in _SHAPING:
        return 0
    if node.op_type in _WITH_GRAPHS:
        return None
    try:
        rule = _RULES.get(node.op_type, _elementwise)
        return rule(
            node, [sizes[name] if name else () for name in node.input], [sizes[name] for name in node.output if name]
        )
    except (KeyError, IndexError):
        return None


def _elementwise(node: Any, inputs: list[Shape], outputs: list[Shape]) -> int:
    return sum(map(prod, outputs))


def _reduction(node: Any, inputs: list[Shape], outputs: list[Shape]) -> int:
    return prod(inputs[0])


def _pooling(node: Any, inputs: list[Shape], outputs: list[Shape]) -> int:
    kernel = next((one.ints for one in node.attribute if one.name == "kernel_shape"), ())
    return prod(outputs[0]) * prod(kernel)


def _matmul(node: Any, inputs: list[Shape], outputs: list[Shape]) -> int:
    return 2 * prod(outputs[0]) * inputs[0][-1]


def _gemm(node: Any, inputs: list[Shape], outputs: list[Shape]) -> int:
    across = any(one.name == "transA" and one.i for one in node.attribute)
    return 2 * prod(outputs[0]) * inputs[0][0 if across else 1]


def _conv(node: Any, inputs: list[Shape], outputs: list[Shape], weight: int = 1) -> int:
    return 2 * prod(outputs[0]) * prod(inputs[weight][1:])


def _deconv(node: Any, inputs: list[Shape], outputs: list[Shape]) -> int:
    return 2 * prod(inputs[0]) * prod(inputs[1][1:])


def _recurrent(node: Any, inputs: list[Shape], outputs: list[Shape]) -> int:
    steps, rows, features = inputs[0]
    directions, gates_and_hidden, _ = inputs[1]
    hidden = gates_and_hidden // _GATES[node.op_type]
    return 2 * steps * rows * directions * gates_and_hidden * (features + hidden)


_RULES: Mapping[str, Callable[[Any, list[Shape], list[Shape]], int]] = {
    "AveragePool": _pooling,
    "Conv": _conv,
    "ConvInteger": _conv,
    "ConvTranspose": _deconv,
    "FusedConv": _conv,
    "GRU": _recurrent,
    "Gemm": _gemm,
    "GlobalAveragePool": _reduction,
    "GlobalMaxPool": _reduction,
    "LSTM": _recurrent,
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "MaxPool": _pooling,
    "QLinearConv": partial(_conv, weight=3),
    "QLinearMatMul": _matmul,
    "RNN": _recurrent,
    "ReduceMax": _reduction,
    "ReduceMean": _reduction,
    "ReduceSum": _reduction,
}
