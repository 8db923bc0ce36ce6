"""Models for LiteRT, written operator by operator. Their format is a flatbuffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.repo.config.schema import ModelConfig
from tests.support.workers.worker_harness import config, echo_config

DTYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES"),
)
NAMES = {"FP16": "FLOAT16", "FP32": "FLOAT32", "FP64": "FLOAT64", "BF16": "BFLOAT16", "BYTES": "STRING"}
X, Y = {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}


class Graph:
    """Collects tensors and operators. Dims: -1 is dynamic."""

    def __init__(self) -> None:
        from ai_edge_litert import schema_py_generated as schema

        self.schema = schema
        self.graph = schema.SubGraphT()
        self.graph.tensors, self.graph.operators = [], []
        self.graph.inputs, self.graph.outputs = [], []
        self.buffers = [schema.BufferT()]
        self.codes: list[Any] = []
        self.names: dict[str, int] = {}

    def tensor(self, name: str, dtype: str, dims: Sequence[int], data: Any = None) -> str:
        found = self.schema.TensorT()
        found.name, found.type = name, getattr(self.schema.TensorType, NAMES.get(dtype, dtype))
        found.shape, found.shapeSignature = [1 if dim < 0 else dim for dim in dims], list(dims)
        found.hasRank = True
        if data is not None:
            found.buffer = len(self.buffers)
            buffer = self.schema.BufferT()
            buffer.data = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
            self.buffers.append(buffer)
        self.names[name] = len(self.graph.tensors)
        self.graph.tensors.append(found)
        return name

    def weight(self, name: str, array: Any) -> str:
        return self.tensor(name, {"float32": "FP32", "int32": "INT32"}[str(array.dtype)], array.shape, array)

    def input(self, name: str, dtype: str, dims: Sequence[int]) -> str:
        self.graph.inputs.append(len(self.graph.tensors))
        return self.tensor(name, dtype, dims)

    def output(self, name: str, dtype: str, dims: Sequence[int]) -> str:
        self.graph.outputs.append(len(self.graph.tensors))
        return self.tensor(name, dtype, dims)

    def node(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], **options: Any) -> None:
        """`options`: those of the operator; `of`: their name, if any."""
        code = self.schema.OperatorCodeT()
        code.builtinCode = getattr(self.schema.BuiltinOperator, kind)
        code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), 1
        node = self.schema.OperatorT()
        node.opcodeIndex = len(self.codes)
        node.inputs, node.outputs = ([self.names[name] for name in names] for names in (inputs, outputs))
        if "of" in options:
            name = options.pop("of")
            node.builtinOptionsType = getattr(self.schema.BuiltinOptions, name)
            node.builtinOptions = getattr(self.schema, f"{name}T")()
            for key, value in options.items():
                setattr(node.builtinOptions, key, value)
        self.codes.append(code)
        self.graph.operators.append(node)

    def save(self, folder: Path, signatures: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {}) -> Path:
        """`signatures`: their names, and the tensors behind the names of their inputs and outputs."""
        import flatbuffers

        model = self.schema.ModelT()
        model.version, model.description = 3, "test"
        model.operatorCodes, model.subgraphs, model.buffers = self.codes, [self.graph], self.buffers
        model.signatureDefs = [self._signature(key, *maps) for key, maps in signatures.items()]
        builder = flatbuffers.Builder(1024)
        builder.Finish(model.Pack(builder), b"TFL3")
        path = folder / "1" / "model.tflite"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(builder.Output())
        return path

    def _signature(self, key: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Any:
        found = self.schema.SignatureDefT()
        found.signatureKey, found.subgraphIndex = key, 0
        found.inputs, found.outputs = ([self._map(*pair) for pair in names.items()] for names in (inputs, outputs))
        return found

    def _map(self, name: str, tensor: str) -> Any:
        found = self.schema.TensorMapT()
        found.name, found.tensorIndex = name, self.names[tensor]
        return found


def echo(folder: Path, dtypes: Sequence[str], dims: Sequence[int], max_batch: int) -> ModelConfig:
    graph = Graph()
    full = [-1, *dims] if max_batch else list(dims)
    for dtype in dtypes:
        x, y = graph.input(f"x{dtype}", dtype, full), graph.output(f"y{dtype}", dtype, full)
        shape = graph.tensor(f"shape{dtype}", "INT32", [len(full)])
        graph.node("SHAPE", [x], [shape], of="ShapeOptions", outType=2)
        graph.node("RESHAPE", [x, shape], [y])
    graph.save(folder)
    return echo_config("tflite", dtypes, dims, max_batch)


def failing(folder: Path) -> ModelConfig:
    """y = x, after a lookup of element x[0, 0] of four, which fails if it does not exist."""
    graph = Graph()
    x, y = graph.input("x", "FP32", [-1, -1]), graph.output("y", "FP32", [-1, -1])
    looked = graph.output("looked", "FP32", [-1, -1])
    table, place = graph.weight("table", np.zeros(4, np.float32)), graph.tensor("place", "INT32", [-1, -1])
    graph.node("CAST", [x], [place], of="CastOptions", inDataType=0, outDataType=2)
    graph.node("GATHER", [table, place], [looked], of="GatherOptions", axis=0)
    graph.node("CONCATENATION", [x], [y], of="ConcatenationOptions", axis=0)
    graph.save(folder)
    return config("tflite", X, {**Y, "looked": ("FP32", (-1,))}, max_batch=8)


def adding(folder: Path) -> None:
    graph = Graph()
    a, b = graph.input("a", "FP32", [-1, 2]), graph.input("b", "FP32", [-1, 2])
    graph.node("ADD", [a, b], [graph.output("sum", "FP32", [-1, 2])], of="AddOptions")
    graph.save(folder)
