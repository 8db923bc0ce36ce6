"""ONNX graphs, added to node by node, and the text encoder that BERT and its relatives have.

Of third-party packages this module needs only numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmserve.repo.onnx.protobuf import Node, Shape, written

OPSET = 17
WORDS, PLACES = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
TEXTS: Mapping[str, Shape] = dict.fromkeys(("input_ids", "attention_mask"), ("rows", "length"))
"""The inputs of a network that reads texts."""


class Graph:
    """Each method adds a node or a constant and returns the name of its output."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._constants: dict[str, NDArray[Any]] = {}

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        output = f"t{len(self._nodes)}"
        self._nodes.append(Node(op, inputs, [output], attributes))
        return output

    def constant(self, value: NDArray[Any], name: str = "") -> str:
        name = name or f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def number(self, value: float) -> str:
        return self.constant(np.array(value, np.float32), f"number {value}")

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64), f"ints {values}")

    def model(
        self, inputs: Mapping[str, Shape], element: str, op: str, operands: list[str], output: str, shape: Shape
    ) -> bytes:
        """The file of the model whose last node is `op`, with these operands. `element`: the type of the inputs."""
        nodes = [*self._nodes, Node(op, operands, [output])]
        return written(nodes, inputs, {output: shape}, self._constants, OPSET, element)


class TextEncoder:
    """Adds an encoder to a graph. `weights`: by the names that those of BERT have. `epsilon`: of layer
    normalisation."""

    def __init__(self, graph: Graph, weights: Mapping[str, NDArray[Any]], heads: int, epsilon: float) -> None:
        self._graph = graph
        self._weights = weights
        self._heads = heads
        self._epsilon = epsilon
        self._width = weights[WORDS].shape[1]

    def encoded(self, layers: int, mask: str) -> str:
        """input_ids -> [rows, length, width]. `mask`: attention_mask as FP32."""
        graph = self._graph
        # [rows, 1, 1, length]: 0 for words, a large negative number for padding
        bias = graph.node("Mul", graph.node("Sub", mask, graph.number(1.0)), graph.number(1e9))
        bias = graph.node("Unsqueeze", bias, graph.ints(1, 2))
        x = self._embedded()
        for layer in range(layers):
            x = self._layer(f"encoder.layer.{layer}.", x, bias)
        return x

    def linear(self, name: str, x: str) -> str:
        matrix = self._graph.constant(self._weights[f"{name}.weight"].T, f"{name}.weight")
        return self._graph.node("Add", self._graph.node("MatMul", x, matrix), self._weight(f"{name}.bias"))

    def _embedded(self) -> str:
        graph = self._graph
        words = graph.node("Gather", self._weight(WORDS), "input_ids")
        length = graph.node("Shape", "input_ids", start=1, end=2)
        places = graph.node("Slice", self._weight(PLACES), graph.ints(0), length, graph.ints(0))
        return self._normalised("embeddings.LayerNorm", graph.node("Add", words, places))

    def _layer(self, name: str, x: str, bias: str) -> str:
        graph = self._graph
        seen = self.linear(f"{name}attention.output.dense", self._attention(f"{name}attention.self.", x, bias))
        x = self._normalised(f"{name}attention.output.LayerNorm", graph.node("Add", seen, x))
        inner = self.linear(f"{name}intermediate.dense", x)
        half = graph.node("Mul", inner, graph.number(0.5))
        error = graph.node("Erf", graph.node("Mul", inner, graph.number(0.5**0.5)))
        inner = graph.node("Mul", half, graph.node("Add", error, graph.number(1.0)))  # GELU
        output = self.linear(f"{name}output.dense", inner)
        return self._normalised(f"{name}output.LayerNorm", graph.node("Add", output, x))

    def _attention(self, name: str, x: str, bias: str) -> str:
        graph, size = self._graph, self._width // self._heads
        heads = graph.ints(0, 0, self._heads, size)
        query, key, value = (
            graph.node("Reshape", self.linear(name + part, x), heads) for part in ("query", "key", "value")
        )
        query = graph.node("Transpose", query, perm=[0, 2, 1, 3])
        key = graph.node("Transpose", key, perm=[0, 2, 3, 1])
        value = graph.node("Transpose", value, perm=[0, 2, 1, 3])
        scores = graph.node("Mul", graph.node("MatMul", query, key), graph.number(size**-0.5))
        chances = graph.node("Softmax", graph.node("Add", scores, bias), axis=-1)
        seen = graph.node("Transpose", graph.node("MatMul", chances, value), perm=[0, 2, 1, 3])
        return graph.node("Reshape", seen, graph.ints(0, 0, self._width))

    def _normalised(self, name: str, x: str) -> str:
        scale, shift = self._weight(f"{name}.weight"), self._weight(f"{name}.bias")
        return self._graph.node("LayerNormalization", x, scale, shift, axis=-1, epsilon=self._epsilon)

    def _weight(self, name: str) -> str:
        return self._graph.constant(self._weights[name], name)
