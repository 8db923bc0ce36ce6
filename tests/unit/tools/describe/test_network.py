"""FLOPs, parameters and bytes of small networks, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from shmserve.errors import InvalidRequest
from shmserve.tools.describe.machine import MachineSpeed
from shmserve.tools.describe.network import Network, NetworkWork, network_of, read

_Shapes = Mapping[str, Sequence[Any]]


def model(nodes: list[Any], inputs: _Shapes, outputs: _Shapes, weights: Mapping[str, tuple[int, ...]]) -> Any:
    def infos(shapes: _Shapes) -> list[Any]:
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]

    values = [numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in weights.items()]
    graph = helper.make_graph(nodes, "g", infos(inputs), infos(outputs), values)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def found(network: Network) -> dict[str, tuple[int, int, int, int]]:
    return {one.kind: (one.calls, one.flops, one.parameters, one.unknown) for one in network.operators}


def test_a_convolutional_network() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "v"], ["y"], transB=1),
    ]
    weights = {"w": (8, 3, 3, 3), "v": (10, 8)}
    given = model(nodes, {"x": ["n", 3, "h", "w"]}, {"y": ["n", 10]}, weights)
    network, work = network_of(given, {"x": (1, 3, 16, 16)}, 4)
    assert found(network) == {
        "Conv": (1, 2 * 4 * 8 * 16 * 16 * 27, 216, 0),
        "Gemm": (1, 2 * 4 * 10 * 8, 80, 0),
        "Relu": (1, 4 * 8 * 256, 0, 0),
        "GlobalAveragePool": (1, 4 * 8 * 256, 0, 0),
        "Flatten": (1, 0, 0, 0),
    }
    assert (network.parameters, network.weight_bytes, network.opset, network.batches) == (296, 1184, 17, True)
    assert work == NetworkWork(4, network.flops, 4 * 4 * 3 * 256, 4 * 4 * 10)
    assert network.inputs == {"x": (-1, 3, -1, -1)}


def test_a_recurrent_network_and_a_batched_product() -> None:
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r"], ["h"], hidden_size=5),
        helper.make_node("MatMul", ["a", "b"], ["c"]),
    ]
    inputs = {"x": [7, 2, 3], "a": [4, 6, 3], "b": [4, 3, 8]}
    weights = {"w": (1, 20, 3), "r": (1, 20, 5)}
    network, work = network_of(model(nodes, inputs, {"h": [7, 1, 2, 5], "c": [4, 6, 8]}, weights), {}, 9)
    assert found(network) == {"LSTM": (1, 2 * 7 * 2 * 20 * (3 + 5), 160, 0), "MatMul": (1, 2 * 4 * 6 * 8 * 3, 0, 0)}
    assert (network.batches, work.rows) == (False, 1)


def test_operators_of_unknown_shape_are_counted_as_unknown() -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["i"]), helper.make_node("Neg", ["i"], ["y"])]
    given = model(nodes, {"x": [5]}, {"y": [1, "k"]}, {})
    given.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    assert found(network_of(given, {}, 1)[0]) == {"Neg": (1, 0, 0, 1), "NonZero": (1, 0, 0, 1)}


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\xff" * 20)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read(tmp_path / "model.onnx")


def test_the_bound_of_a_machine() -> None:
    """Weights that fit into the cache are not read again."""
    machine = MachineSpeed(flops=1e9, memory=1e8, cache=1000)
    assert machine.seconds(2 * 10**9, 1000, 500) == (2.0, 500 / 1e8)
    assert machine.seconds(0, 1001, 500) == (0.0, 1501 / 1e8)
