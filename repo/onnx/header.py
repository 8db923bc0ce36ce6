"""Reads the inputs and outputs that an ONNX file declares, without onnxruntime and without reading weights.

A file is untrusted and may be many gigabytes: weights and nodes are skipped by seeking, and all reads are limited. The
file is not mapped, because truncating a mapped file would kill the process with SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

FIELDS = 500_000
"""Maximum number of fields visited per file; a file with more is not checked."""
MESSAGE_BYTES = 1 << 20
"""Maximum size of a tensor description."""

_MODEL_GRAPH = 7
_GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT, _GRAPH_SPARSE = 5, 11, 12, 15
_TENSOR_NAME, _TENSOR_EXTERNAL, _SPARSE_VALUES = 8, 13, 1
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_VALUE_NAME, _VALUE_TYPE = 1, 2
_TYPE_TENSOR = 1
_TENSOR_ELEMENT, _TENSOR_SHAPE = 1, 2
_DIM_VALUE = 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_ELEMENTS = {
    1: "FP32",
    2: "UINT8",
    3: "INT8",
    4: "UINT16",
    5: "INT16",
    6: "INT32",
    7: "INT64",
    8: "BYTES",
    9: "BOOL",
    10: "FP16",
    11: "FP64",
    12: "UINT32",
    13: "UINT64",
    16: "BF16",
}
"""TensorProto.DataType -> wire data type."""


class NotOnnx(ValueError):
    """The file is truncated, or not an ONNX file."""


class TooLarge(Exception):
    """The file exceeds the limits and cannot be checked."""


class Declared(NamedTuple):
    """A declared tensor. `dtype` "": not a tensor, or of an unsupported type. `dims` None: not declared; -1 is any
    size.
    """

    name: str
    dtype: str
    dims: tuple[int, ...] | None


class Header(NamedTuple):
    """The declared tensors. `initialized`: names of tensors with values in the file; inputs among them are optional."""

    inputs: tuple[Declared, ...]
    outputs: tuple[Declared, ...]
    initialized: frozenset[str]


def read_header(file: BinaryIO) -> Header:
    """Reads the header. Raises NotOnnx, TooLarge and OSError."""
    return _HeaderReader(file).header()


def external_files(file: BinaryIO) -> list[str]:
    """The files with weights that the model needs, relative to its own. Raises NotOnnx, TooLarge and OSError."""
    return _HeaderReader(file).external_files()


def is_beside(name: str) -> bool:
    """Whether a file that `external_files` has returned lies in the directory of the model's own file, or below it."""
    return not os.path.isabs(name) and ".." not in Path(name).parts


class _Field(NamedTuple):
    number: int
    kind: int
    start: int
    end: int
    """Start and end of the field's value; for a number, of the varint itself."""
    value: int


class _HeaderReader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._visited = 0

    def header(self) -> Header:
        inputs: list[Declared] = []
        outputs: list[Declared] = []
        initialized: set[str] = set()
        graphs = [field for field in self._fields(0, self._size) if field.number == _MODEL_GRAPH]
        if not graphs:
            raise NotOnnx("not an ONNX file: it has no graph")
        for graph in graphs:  # protobuf merges repeated graphs
            for field in self._inside(graph):
                if field.number in (_GRAPH_INPUT, _GRAPH_OUTPUT):
                    (inputs if field.number == _GRAPH_INPUT else outputs).append(self._declared(field))
                elif field.number == _GRAPH_INITIALIZER:
                    initialized.add(self._text_in(field, _TENSOR_NAME))
                elif field.number == _GRAPH_SPARSE:
                    values = [inner for inner in self._inside(field) if inner.number == _SPARSE_VALUES]
                    initialized.update(self._text_in(inner, _TENSOR_NAME) for inner in values)
        if not outputs:
            raise NotOnnx("not an ONNX file: its graph has no outputs")
        return Header(tuple(inputs), tuple(outputs), frozenset(initialized))

    def external_files(self) -> list[str]:
        names: dict[str, None] = {}
        for graph in self._fields(0, self._size):
            tensors = self._inside(graph) if graph.number == _MODEL_GRAPH else ()
            for tensor in tensors:
                entries = self._inside(tensor) if tensor.number == _GRAPH_INITIALIZER else ()
                for entry in entries:
                    if entry.number == _TENSOR_EXTERNAL and self._text_in(entry, _ENTRY_KEY) == "location":
                        names[self._text_in(entry, _ENTRY_VALUE)] = None
        return list(names)

    def _declared(self, field: _Field) -> Declared:
        if field.end - field.start > MESSAGE_BYTES:
            raise TooLarge
        name, dtype = "", ""
        dims: tuple[int, ...] | None = None
        for inner in self._inside(field):
            if inner.number == _VALUE_NAME:
                name = self._text(inner)
            elif inner.number == _VALUE_TYPE:
                for tensor in self._inside(inner):
                    if tensor.number == _TYPE_TENSOR:
                        dtype, dims = self._tensor(tensor)
        return Declared(name, dtype, dims)

    def _tensor(self, field: _Field) -> tuple[str, tuple[int, ...] | None]:
        dtype = ""
        dims: tuple[int, ...] | None = None
        for inner in self._inside(field):
            if inner.number == _TENSOR_ELEMENT:
                dtype = _ELEMENTS.get(inner.value, "")
            elif inner.number == _TENSOR_SHAPE:
                dims = tuple(self._dim(dim) for dim in self._inside(inner) if dim.number == 1)
        return dtype, dims

    def _dim(self, field: _Field) -> int:
        values = [inner.value for inner in self._inside(field) if inner.number == _DIM_VALUE and inner.kind == _VARINT]
        return values[-1] if values and values[-1] < 1 << 63 else -1

    def _text_in(self, field: _Field, number: int) -> str:
        return next((self._text(inner) for inner in self._inside(field) if inner.number == number), "")

    def _text(self, field: _Field) -> str:
        self._check(field)
        if field.end - field.start > MESSAGE_BYTES:
            raise TooLarge
        self._file.seek(field.start)
        return self._file.read(field.end - field.start).decode("utf-8", "backslashreplace")

    # ------------------------------------------------------------------------------------ protobuf

    def _inside(self, field: _Field) -> Iterator[_Field]:
        self._check(field)
        return self._fields(field.start, field.end)

    def _check(self, field: _Field) -> None:
        """Raises NotOnnx unless the field is a text or a message."""
        if field.kind != _BYTES:
            raise NotOnnx(f"not an ONNX file: field {field.number} has wire type {field.kind}")

    def _fields(self, at: int, end: int) -> Iterator[_Field]:
        """The fields of a message in the file. Values are skipped, except for varints."""
        while at < end:
            self._visited += 1
            if self._visited > FIELDS:
                raise TooLarge
            self._file.seek(at)
            tag, at = self._varint(at, end)
            number, kind, value, start = tag >> 3, tag & 7, 0, at
            if kind == _VARINT:
                value, at = self._varint(at, end)
            elif kind == _BYTES:
                length, start = self._varint(at, end)
                at = start + length
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            else:
                raise NotOnnx(f"not an ONNX file: wire type {kind} at byte {start}")
            if at > end:
                self._cut(start, at, end)
            yield _Field(number, kind, start, at, value)

    def _cut(self, start: int, needed: int, end: int) -> None:
        if end == self._size:
            text = f"truncated, or not an ONNX file: {self._size:,} bytes, expected at least {needed:,}"
        else:
            text = f"not an ONNX file: the field at byte {start} exceeds its message"
        raise NotOnnx(text)

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = self._file.read(1) if at < end else b""
            if not byte:
                self._cut(at, at + 1, end)
            at += 1
            value |= (byte[0] & 0x7F) << shift
            if byte[0] < 0x80:
                return value, at
            shift += 7
            if shift > 63:
                raise NotOnnx(f"not an ONNX file: unterminated number at byte {at}")
