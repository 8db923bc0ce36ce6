"""Written ONNX files, compared with the `onnx` package and run by ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmserve.repo.onnx.protobuf import Node, metadata, strings, wrapped

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")


def session(model: bytes) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def small() -> bytes:
    """out = twice * factor, with a factor that must be given and an entry of metadata."""
    helper, kind = onnx.helper, onnx.TensorProto
    nodes = [helper.make_node("Add", ["in", "in"], ["twice"]), helper.make_node("Mul", ["twice", "cast"], ["out"])]
    nodes.insert(0, helper.make_node("Cast", ["factor"], ["cast"], to=kind.FLOAT))
    inputs = [helper.make_tensor_value_info("in", kind.FLOAT, ["n", 3])]
    inputs.append(helper.make_tensor_value_info("factor", kind.INT64, []))
    outputs = [helper.make_tensor_value_info("out", kind.FLOAT, ["n", 3])]
    graph = helper.make_graph(nodes, "small", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, {"key": "value", "more": "a\nb\u00e4"})
    return bytes(model.SerializeToString())


def around(model: bytes) -> bytes:
    return wrapped(
        model,
        [Node("Transpose", ["X"], ["in"], {"perm": [1, 0]})],
        [Node("Softmax", ["out"], ["Y"], {"axis": -1}), Node("Slice", ["out", "low", "high"], ["HEAD"])],
        {"X": (3, "n")},
        {"Y": ("n", 3), "HEAD": ("m", 3)},
        {"factor": np.array(-300), "low": np.array([0]), "high": np.array([1])},
    )


def test_nodes_around_a_graph() -> None:
    model = around(small())
    before, after = onnx.load_model_from_string(small()), onnx.load_from_string(model)
    assert list(metadata(small())) == list(metadata(model)) == [("key", "value"), ("more", "a\nb\u00e4")]
    assert list(after.graph.node)[1:-2] == list(before.graph.node)
    for one in (before, after):
        for field in ("node", "input", "output", "initializer"):
            one.graph.ClearField(field)
    assert after == before, "all else is unchanged"
    onnx.checker.check_model(onnx.load_model_from_string(model))
    runner = session(model)
    assert [(node.name, node.shape, node.type) for node in runner.get_inputs()] == [("X", [3, "n"], "tensor(float)")]
    assert [(node.name, node.shape) for node in runner.get_outputs()] == [("Y", ["n", 3]), ("HEAD", ["m", 3])]
    x = np.random.default_rng(1).random((3, 5), np.float32) / 100
    y, head = runner.run(None, {"X": x})
    out = x.T * -600
    np.testing.assert_allclose(y, np.exp(out) / np.exp(out).sum(axis=1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(head, out[:1], rtol=1e-6)


def test_truncated_metadata_is_an_error_or_ends_between_fields() -> None:
    data = small()
    texts = []
    for end in range(1, len(data)):
        try:
            assert len(list(metadata(data[:end]))) < 2
        except ValueError as error:
            texts.append(str(error))
    assert len(texts) > len(data) // 2
    assert {text.partition(":")[0] for text in texts} == {"not an ONNX file"}


@pytest.mark.parametrize(
    "texts",
    [["a", "", "h\u00e9" * 200, "\0"], [], [["x"], ["y"], ["z"]], [[], []], "alone"],
    ids=["few", "none", "column", "empty", "one"],
)
def test_a_model_with_constant_strings(texts: Any) -> None:
    array = np.array(texts, object)
    model = strings(array, "text")
    onnx.checker.check_model(onnx.load_model_from_string(model))
    (made,) = session(model).run(["text"], {})
    assert made.shape == array.shape
    assert made.tolist() == array.tolist()
