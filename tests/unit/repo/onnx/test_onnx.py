"""ONNX files: their header and its differences from a configuration, and written files, compared with the package
`onnx`, with the checks of a worker and with ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.dtypes import FROM_CONFIG
from shmserve.errors import ServeError
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.load import parse
from shmserve.repo.onnx import header as onnx_header
from shmserve.repo.onnx.differences import differences
from shmserve.repo.onnx.header import Declared, Header, NotOnnx, TooLarge, read_header
from shmserve.repo.onnx.protobuf import Node, metadata, strings, wrapped
from tests.support.hypothesis_profiles import examples

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
helper, kinds = onnx.helper, onnx.TensorProto


class Counting(io.FileIO):
    """A file that counts the bytes read."""

    count = 0

    def readinto(self, buffer: Any) -> int | None:
        found = super().readinto(buffer)
        self.count += found or 0
        return found


def header_of(data: bytes, tmp_path: Path) -> Header:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with path.open("rb") as file:
        return read_header(file)


def model_bytes(inputs: Sequence[Any], outputs: Sequence[Any], initializers: Sequence[Any] = ()) -> bytes:
    graph = helper.make_graph([], "g", inputs, outputs, initializers)
    return bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


def value(name: str, kind: int = 1, dims: Sequence[int | str] | None = ("n", 3)) -> Any:
    return helper.make_tensor_value_info(name, kind, dims)


def test_declared_tensors(tmp_path: Path) -> None:
    types = [kind for kind in kinds.DataType.values() if kind]
    inputs = [value(f"t{kind}", kind, ["n", kind]) for kind in types]
    inputs += [value("scalar", 1, []), value("any", 1, None), value("w"), helper.make_empty_tensor_value_info("none")]
    inputs.append(helper.make_tensor_sequence_value_info("sequence", 1, [2]))
    weights = helper.make_tensor("w", kinds.FLOAT, [1, 3], [1.0, 2.0, 3.0])
    found = header_of(model_bytes(inputs, [value("y\u00e4", 7, [2, 5])], [weights]), tmp_path)
    assert found.outputs == (Declared("y\u00e4", "INT64", (2, 5)),)
    assert found.initialized == {"w"}
    by_name = {tensor.name: tensor for tensor in found.inputs}
    assert [tensor.name for tensor in found.inputs] == [tensor.name for tensor in inputs]
    assert by_name["scalar"] == ("scalar", "FP32", ())
    assert by_name["any"] == ("any", "FP32", None)
    assert by_name["none"] == ("none", "", None)
    assert by_name["sequence"] == ("sequence", "", None)
    served = {kind: by_name[f"t{kind}"].dtype for kind in types if by_name[f"t{kind}"].dtype}
    assert len(served) == len(set(served.values())) == len(FROM_CONFIG)
    assert all(by_name[f"t{kind}"].dims == (-1, kind) for kind in types)


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    data = model_bytes([value("x")], [value("y")], [helper.make_tensor("w", 1, [9], [0.5] * 9)])
    whole = header_of(data, tmp_path)
    model = onnx.load_model_from_string(data)
    after = len(data) - len(b"".join(opset.SerializeToString() for opset in model.opset_import)) - 2
    for end in range(len(data)):
        if end == after:  # the graph is complete
            assert header_of(data[:end], tmp_path) == whole
        else:
            with pytest.raises(NotOnnx, match=r"truncated|has no graph"):
                header_of(data[:end], tmp_path)


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda data: b"\x3a" + bytes([len(data)]) + data))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    descriptor = os.memfd_create("onnx")
    with os.fdopen(descriptor, "r+b") as file:
        file.write(data)
        file.flush()
        with contextlib.suppress(NotOnnx, TooLarge):
            read_header(file)


def test_weights_are_not_read(tmp_path: Path) -> None:
    """A sparse file of 1 GiB."""
    size = 1 << 30
    weights = helper.make_tensor("w", kinds.UINT8, [0], b"", raw=True).SerializeToString() + b"\x4a" + varint(size)
    graph = onnx.load_model_from_string(model_bytes([value("x")], [value("y")])).graph.SerializeToString()
    initializer = b"\x2a" + varint(len(weights) + size) + weights
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        file.write(b"\x3a" + varint(len(graph) + len(initializer) + size) + initializer)
        file.seek(size, os.SEEK_CUR)
        file.write(graph)
    with Counting(path) as raw, io.BufferedReader(raw) as buffered:
        found = read_header(buffered)
        assert raw.count < 64 << 10
    assert found == Header((Declared("x", "FP32", (-1, 3)),), (Declared("y", "FP32", (-1, 3)),), frozenset({"w"}))


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def test_fields_and_bytes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = model_bytes([value(f"x{number}") for number in range(100)], [value("y")])
    assert len(header_of(data, tmp_path).inputs) == 100
    monkeypatch.setattr(onnx_header, "FIELDS", 50)
    with pytest.raises(TooLarge):
        header_of(data, tmp_path)
    monkeypatch.setattr(onnx_header, "FIELDS", 10_000)
    with pytest.raises(TooLarge):
        header_of(model_bytes([value("x" * (onnx_header.MESSAGE_BYTES + 1))], [value("y")]), tmp_path)


ENGINE = helper.make_model(
    helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["s"]), helper.make_node("Identity", ["a"], ["t"])],
        "g",
        [value("a"), value("b", 1, ["n", 3])],
        [value("s"), value("t", 1, ["n", 3])],
    ),
    opset_imports=[helper.make_opsetid("", 17)],
    ir_version=8,
).SerializeToString()

NAMES = st.sampled_from(["a", "b", "s", "t", "other"])
TYPES = st.sampled_from(["TYPE_FP32", "TYPE_FP32", "TYPE_INT64"])
DIMS = st.sampled_from(["3", "3", "-1", "4", "3, 1", "-1, 3", "2, 3"])


@st.composite
def tensors(draw: st.DrawFn, field: str, usual: str) -> str:
    names = draw(st.just(list(usual)) | st.lists(NAMES, min_size=1, max_size=3, unique=True))
    entries = [f'{{ name: "{name}" data_type: {draw(TYPES)} dims: [ {draw(DIMS)} ] }}' for name in names]
    return f"{field} [ {', '.join(entries)} ]\n"


@given(st.sampled_from([0, 8]), tensors("input", "ab"), tensors("output", "st"))
@settings(max_examples=examples(120))
def test_a_difference_is_found_exactly_if_a_worker_finds_one(batch: int, inputs: str, outputs: str) -> None:
    config = parse(f'name: "m" backend: "onnxruntime" max_batch_size: {batch}\n{inputs}{outputs}')
    descriptor = os.memfd_create("onnx")
    with os.fdopen(descriptor, "r+b") as file:
        file.write(ENGINE)
        file.flush()
        found = list(differences(config, read_header(file)))
    assert bool(found) == (worker_error(config) != ""), (found, worker_error(config))


def test_a_valid_configuration_has_no_differences(tmp_path: Path) -> None:
    header = header_of(ENGINE, tmp_path)
    for text in (
        'max_batch_size: 8 input [ { name: "a" data_type: TYPE_FP32 dims: [ -1 ] },'
        ' { name: "b" data_type: TYPE_FP32 dims: [ 3, 1 ] reshape: { shape: [ 3 ] } } ]'
        ' output [ { name: "t" data_type: TYPE_FP32 dims: [ 3 ] } ]',
        'input [ { name: "b" data_type: TYPE_FP32 dims: [ 5, 3 ] },'
        ' { name: "a" data_type: TYPE_FP32 dims: [ -1, 3 ] } ]',
        "max_batch_size: 8",
        "",
    ):
        assert list(differences(parse(text), header)) == []


SESSION = ort.InferenceSession(ENGINE, providers=["CPUExecutionProvider"])


def worker_error(config: ModelConfig) -> str:
    from shmserve.workers.backends.model_facts import match, none_missing
    from shmserve.workers.backends.onnx.facts import facts_of
    from shmserve.workers.batch.specs import model_inputs_of, model_outputs_of

    needed = facts_of(SESSION.get_inputs())
    try:
        match("m", "input", model_inputs_of(config), needed, flat=(-1,))
        none_missing("m", model_inputs_of(config), needed)
        match("m", "output", model_outputs_of(config), facts_of(SESSION.get_outputs()))
    except ServeError as error:
        return str(error)
    return ""


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
