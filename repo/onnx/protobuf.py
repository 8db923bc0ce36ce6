"""Edits and writes ONNX files as protobuf, without the package `onnx`.

Invariant: unknown fields are copied byte by byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_GRAPH, _METADATA = 7, 14
_NODE, _INITIALIZER, _INPUT, _OUTPUT = 1, 5, 11, 12
_FLOAT, _INT64, _STRING = 1, 7, 8
_IR_VERSION, _OPSET = 8, 13
_ATTRIBUTE_FLOAT, _ATTRIBUTE_INT, _ATTRIBUTE_INTS = 1, 2, 7
_ELEMENTS = {"float32": (_FLOAT, "<f4"), "int64": (_INT64, "<i8")}

Value = int | bytes | bytearray | memoryview
Shape = Sequence[int | str]


class Node(NamedTuple):
    """One operation. Attributes are numbers or lists of integers."""

    op: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Mapping[str, float | Sequence[int]] = {}


def metadata(model: bytes) -> Iterator[tuple[str, str]]:
    """The entries of metadata_props."""
    for number, _, value in _fields(memoryview(model)):
        if number == _METADATA:
            entry = {number: bytes(text) for number, _, text in _fields(value)}
            yield entry[1].decode(), entry[2].decode()


def wrapped(
    model: bytes,
    before: Iterable[Node],
    after: Iterable[Node],
    inputs: Mapping[str, Shape],
    outputs: Mapping[str, Shape],
    constants: Mapping[str, NDArray[Any]],
) -> bytes:
    """The model with other inputs and outputs, all FP32. Tensors that its nodes read and that are no longer inputs must
    come from `before` or from a constant of the same name.
    """
    encoded = bytearray()
    for number, kind, value in _fields(memoryview(model)):
        if number == _GRAPH:
            value = _around(value, before, after, inputs, outputs, constants)
        encoded += _field(number, kind, value)
    return bytes(encoded)


def written(
    nodes: Iterable[Node],
    inputs: Mapping[str, Shape],
    outputs: Mapping[str, Shape],
    constants: Mapping[str, NDArray[Any]],
    opset: int,
    element: str,
) -> bytes:
    """A model with FP32 outputs. `element`: the type of its inputs. Inputs and constants are FP32 or INT64."""
    graph = bytearray(_bytes(2, b"graph"))
    for node in nodes:
        graph += _bytes(_NODE, _node(node))
    for name, array in constants.items():
        graph += _bytes(_INITIALIZER, _tensor(name, array))
    for number, of_tensors, tensors in ((_INPUT, _ELEMENTS[element][0], inputs), (_OUTPUT, _FLOAT, outputs)):
        for name, shape in tensors.items():
            graph += _bytes(number, _described(name, shape, of_tensors))
    return _field(1, 0, _IR_VERSION) + _bytes(_GRAPH, graph) + _bytes(8, _field(2, 0, opset))


def strings(array: NDArray[Any], output: str) -> bytes:
    """A model without inputs whose output is this array of str."""
    constant = b"".join(_field(1, 0, size) for size in array.shape) + _field(2, 0, _STRING)
    constant += b"".join([_bytes(6, text.encode()) for text in array.ravel().tolist()]) + _bytes(8, b"constant")
    graph = _bytes(_NODE, _node(Node("Identity", ["constant"], [output]))) + _bytes(2, b"strings")
    graph += _bytes(_INITIALIZER, constant) + _bytes(_OUTPUT, _described(output, array.shape, _STRING))
    return _field(1, 0, _IR_VERSION) + _bytes(_GRAPH, graph) + _bytes(8, _field(2, 0, _OPSET))


def _around(
    graph: memoryview,
    before: Iterable[Node],
    after: Iterable[Node],
    inputs: Mapping[str, Shape],
    outputs: Mapping[str, Shape],
    constants: Mapping[str, NDArray[Any]],
) -> bytes:
    encoded = bytearray()
    for node in before:
        encoded += _bytes(_NODE, _node(node))
    for number, kind, value in _fields(graph):
        if number not in (_INPUT, _OUTPUT):
            encoded += _field(number, kind, value)
    for node in after:
        encoded += _bytes(_NODE, _node(node))
    for name, array in constants.items():
        encoded += _bytes(_INITIALIZER, _tensor(name, array))
    for number, tensors in ((_INPUT, inputs), (_OUTPUT, outputs)):
        for name, shape in tensors.items():
            encoded += _bytes(number, _described(name, shape))
    return bytes(encoded)


def _node(node: Node) -> bytes:
    encoded = bytearray()
    for name in node.inputs:
        encoded += _bytes(1, name.encode())
    for name in node.outputs:
        encoded += _bytes(2, name.encode())
    encoded += _bytes(3, node.outputs[0].encode()) + _bytes(4, node.op.encode())
    for name, value in node.attributes.items():
        attribute = _bytes(1, name.encode())
        if isinstance(value, int):
            attribute += _field(3, 0, value) + _field(20, 0, _ATTRIBUTE_INT)
        elif isinstance(value, float):
            attribute += _field(2, 5, struct.pack("<f", value)) + _field(20, 0, _ATTRIBUTE_FLOAT)
        else:
            attribute += b"".join(_field(8, 0, one) for one in value) + _field(20, 0, _ATTRIBUTE_INTS)
        encoded += _bytes(5, attribute)
    return bytes(encoded)


def _tensor(name: str, array: NDArray[Any]) -> bytes:
    encoded = b"".join(_field(1, 0, size) for size in array.shape)
    element, layout = _ELEMENTS[array.dtype.name]
    whole = np.ascontiguousarray(array, np.dtype(layout))
    return encoded + _field(2, 0, element) + _bytes(8, name.encode()) + _bytes(9, whole.tobytes())


def _described(name: str, shape: Shape, element: int = _FLOAT) -> bytes:
    sizes = b"".join(
        _bytes(1, _bytes(2, size.encode()) if isinstance(size, str) else _field(1, 0, size)) for size in shape
    )
    return _bytes(1, name.encode()) + _bytes(2, _bytes(1, _field(1, 0, element) + _bytes(2, sizes)))


# ----------------------------------------------------------------------------------------------------- protobuf


def _fields(message: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Number, wire type and value of each field: an int for wire type 0, else bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        value: Value
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, kind, value
            continue
        if kind == 2:
            length, at = _varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"not an ONNX file: protobuf wire type {kind}")
        if at + length > len(message):
            raise ValueError(f"not an ONNX file: truncated field: {len(message) - at} of {length} bytes")
        yield tag >> 3, kind, message[at : at + length]
        at += length


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        if at >= len(message):
            raise ValueError("not an ONNX file: it ends inside a number")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _bytes(number: int, value: bytes | bytearray) -> bytes:
    return _field(number, 2, value)


def _field(number: int, kind: int, value: Value) -> bytes:
    head = _number(number << 3 | kind)
    if isinstance(value, int):
        return head + _number(value)
    return head + (_number(len(value)) if kind == 2 else b"") + bytes(value)


def _number(value: int) -> bytes:
    value &= 2**64 - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
