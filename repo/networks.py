"""Networks of the sizes that guides and articles measure, as ONNX files with random weights: DenseNet-121, Inception v3
and BERT-base. They cost as much as the trained ones, and their answers mean nothing.

Of third-party packages this module needs only numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmserve.repo.onnx.graph import PLACES, TEXTS, WORDS, Graph, TextEncoder

CLASSES = 1000
SEED = 1
DENSE_BLOCKS = (6, 12, 24, 16)
INCEPTION_POOLED = (32, 64, 64)
INCEPTION_SEVENS = (128, 160, 160, 192)
BERT_WORDS, BERT_PLACES, BERT_EPSILON = 30_522, 512, 1e-5


def densenet(growth: int = 32, size: int = 224) -> bytes:
    """DenseNet-121, x [rows, 3, size, size] -> y [rows, 1000]: each layer of a block reads the outputs of all layers
    before it. `growth`: the channels that a layer adds."""
    net = _Network()
    width = 2 * growth
    x = net.pool("MaxPool", net.relu(net.norm(net.conv("x", 3, width, 7, stride=2), width)), 3, 2, same=True)
    for number, layers in enumerate(DENSE_BLOCKS):
        for _ in range(layers):
            inner = net.conv(net.relu(net.norm(x, width)), width, 4 * growth)
            added = net.conv(net.relu(net.norm(inner, 4 * growth)), 4 * growth, growth, 3)
            x = net.joined(x, added)
            width += growth
        if number < len(DENSE_BLOCKS) - 1:
            x = net.pool("AveragePool", net.conv(net.relu(net.norm(x, width)), width, width // 2), 2, 2)
            width //= 2
    return net.classifier(net.relu(net.norm(x, width)), width, size)


def inception(divisor: int = 1, size: int = 299) -> bytes:
    """Inception v3, x [rows, 3, size, size] -> y [rows, 1000]: blocks of several branches, whose outputs are joined.
    `divisor`: all widths are divided by it."""
    net = _Inception(divisor)
    x = net.chain("x", (32, 3, 2, False), (32, 3, 1, False), (64, 3, 1, True))
    x = net.chain(net.halved(x), (80, 1, 1, True), (192, 3, 1, False))
    x = net.halved(x)
    for pooled in INCEPTION_POOLED:
        threes = net.chain(x, (64, 1, 1, True), (96, 3, 1, True), (96, 3, 1, True))
        fives = net.chain(x, (48, 1, 1, True), (64, 5, 1, True))
        x = net.joined(net.unit(x, 64), fives, threes, net.pooled(x, pooled))
    x = net.joined(
        net.chain(x, (384, 3, 2, False)),
        net.chain(x, (64, 1, 1, True), (96, 3, 1, True), (96, 3, 2, False)),
        net.halved(x),
    )
    for wide in INCEPTION_SEVENS:
        sevens = net.sevens(net.unit(x, wide), wide, 192)
        twice = net.sevens(net.sevens(net.unit(x, wide), wide, wide), wide, 192)
        x = net.joined(net.unit(x, 192), sevens, twice, net.pooled(x, 192))
    x = net.joined(
        net.chain(x, (192, 1, 1, True), (320, 3, 2, False)),
        net.chain(net.sevens(net.unit(x, 192), 192, 192), (192, 3, 2, False)),
        net.halved(x),
    )
    for _ in range(2):
        threes = net.crossed(net.unit(x, 384))
        twice = net.crossed(net.chain(x, (448, 1, 1, True), (384, 3, 1, True)))
        x = net.joined(net.unit(x, 320), threes, twice, net.pooled(x, 192))
    return net.classifier(x, size)


def bert(layers: int = 12, hidden: int = 768, heads: int = 12, words: int = BERT_WORDS) -> bytes:
    """BERT-base, input_ids, attention_mask [rows, length] -> POOLED [rows, hidden]: a vector for each text."""
    graph = Graph()
    encoder = TextEncoder(graph, _bert_weights(layers, hidden, words), heads, BERT_EPSILON)
    x = encoder.encoded(layers, graph.node("Cast", "attention_mask", to=1))
    first = graph.node("Gather", x, graph.ints(0), axis=1)
    pooled = encoder.linear("pooler.dense", graph.node("Reshape", first, graph.ints(0, hidden)))
    return graph.model(TEXTS, "int64", "Tanh", [pooled], "POOLED", ("rows", hidden))


def _bert_weights(layers: int, hidden: int, words: int) -> dict[str, NDArray[Any]]:
    random = _Random()
    weights = {PLACES: random.weights((BERT_PLACES, hidden), 0.02), WORDS: random.weights((words, hidden), 0.02)}

    def linear(name: str, inner: int, outer: int) -> None:
        weights[f"{name}.weight"] = random.weights((inner, outer), inner**-0.5).T
        weights[f"{name}.bias"] = random.weights((outer,), 0.01)

    def norm(name: str) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = np.ones(hidden, np.float32), np.zeros(hidden, np.float32)

    norm("embeddings.LayerNorm")
    for layer in (f"encoder.layer.{number}." for number in range(layers)):
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{layer}attention.{part}", hidden, hidden)
        linear(f"{layer}intermediate.dense", hidden, 4 * hidden)
        linear(f"{layer}output.dense", 4 * hidden, hidden)
        norm(f"{layer}attention.output.LayerNorm")
        norm(f"{layer}output.LayerNorm")
    linear("pooler.dense", hidden, hidden)
    return weights


SAMPLES: Mapping[str, Callable[[], bytes]] = {"bert": bert, "densenet": densenet, "inception": inception}
"""Model of the samples -> its file."""


class _Random:
    """Random weights, the same each time."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(SEED)

    def weights(self, shape: tuple[int, ...], scale: float) -> NDArray[np.float32]:
        return self._generator.standard_normal(shape, np.float32) * np.float32(scale)


class _Network:
    """A network of images. Each method adds a layer and returns the name of its output."""

    def __init__(self) -> None:
        self._graph = Graph()
        self._random = _Random()

    def weight(self, shape: tuple[int, ...], scale: float) -> str:
        return self._graph.constant(self._random.weights(shape, scale))

    def conv(self, x: str, inner: int, outer: int, *kernel: int, stride: int = 1, same: bool = True) -> str:
        """`kernel`: the height and width, or both; 1 if missing. `same`: the output has the size of the input, divided
        by the stride."""
        high, wide = (*kernel, *kernel, 1, 1)[:2]
        weights = self.weight((outer, inner, high, wide), (2.0 / (inner * high * wide)) ** 0.5)
        pads = [high // 2, wide // 2] * 2 if same else [0] * 4
        return self._graph.node("Conv", x, weights, kernel_shape=[high, wide], strides=[stride] * 2, pads=pads)

    def norm(self, x: str, width: int) -> str:
        scale, shift = (self._graph.constant(np.full(width, value, np.float32)) for value in (1.0, 0.0))
        return self._graph.node("BatchNormalization", x, scale, shift, shift, scale)

    def relu(self, x: str) -> str:
        return self._graph.node("Relu", x)

    def pool(self, op: str, x: str, size: int, stride: int, same: bool = False) -> str:
        pads = [size // 2] * 4 if same else [0] * 4
        return self._graph.node(op, x, kernel_shape=[size] * 2, strides=[stride] * 2, pads=pads)

    def joined(self, *parts: str) -> str:
        return self._graph.node("Concat", *parts, axis=1)

    def classifier(self, x: str, width: int, size: int) -> bytes:
        """The file of the network that ends here."""
        flat = self._graph.node("Flatten", self._graph.node("GlobalAveragePool", x))
        weights = self.weight((width, CLASSES), width**-0.5)
        operands = [flat, weights, self.weight((CLASSES,), 0.01)]
        return self._graph.model({"x": ("rows", 3, size, size)}, "float32", "Gemm", operands, "y", ("rows", CLASSES))


class _Inception:
    """Adds units to a network and remembers the width of each output, as its blocks are joined from several."""

    def __init__(self, divisor: int) -> None:
        self._net = _Network()
        self._divisor = divisor
        self._widths = {"x": 3}

    def unit(self, x: str, width: int, *kernel: int, stride: int = 1, same: bool = True) -> str:
        net, outer = self._net, width // self._divisor
        x = net.relu(net.norm(net.conv(x, self._widths[x], outer, *kernel, stride=stride, same=same), outer))
        self._widths[x] = outer
        return x

    def chain(self, x: str, *units: tuple[int, int, int, bool]) -> str:
        """`units`: width, kernel, stride, and whether the size stays."""
        for width, kernel, stride, same in units:
            x = self.unit(x, width, kernel, kernel, stride=stride, same=same)
        return x

    def sevens(self, x: str, between: int, width: int) -> str:
        return self.unit(self.unit(x, between, 1, 7), width, 7, 1)

    def crossed(self, x: str) -> str:
        return self.joined(self.unit(x, 384, 1, 3), self.unit(x, 384, 3, 1))

    def halved(self, x: str) -> str:
        return self._pool("MaxPool", x, 2)

    def pooled(self, x: str, width: int) -> str:
        return self.unit(self._pool("AveragePool", x, 1, same=True), width)

    def _pool(self, op: str, x: str, stride: int, same: bool = False) -> str:
        pooled = self._net.pool(op, x, 3, stride, same)
        self._widths[pooled] = self._widths[x]
        return pooled

    def joined(self, *parts: str) -> str:
        x = self._net.joined(*parts)
        self._widths[x] = sum(self._widths[part] for part in parts)
        return x

    def classifier(self, x: str, size: int) -> bytes:
        return self._net.classifier(x, self._widths[x], size)
