"""The networks of the published experiments, with random weights and a fraction of their width, so that a CPU answers
several times a second. Their layers have the order and the kinds of the originals.
"""

from __future__ import annotations

from pathlib import Path

from bench.lib.models import Graph

IMAGE = [3, 224, 224]
CLASSES = 1000
GROWTH = 12
"""Channels that a layer of DenseNet adds; 32 in the original."""
DENSE_BLOCKS = (6, 12, 24, 16)
WIDTH = 4
"""Inception's widths are divided by this."""
INCEPTION_BLOCKS = (3, 4, 2)


def make_densenet(path: Path) -> None:
    """DenseNet-121: each layer of a block reads the outputs of all layers before it."""
    graph = Graph()
    width = 2 * GROWTH
    x = graph.conv("x", 3, width, 7, 2)
    x = graph.node("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    for number, layers in enumerate(DENSE_BLOCKS):
        for _ in range(layers):
            added = graph.conv(graph.conv(x, width, 4 * GROWTH, 1, 1), 4 * GROWTH, GROWTH, 3, 1)
            x = graph.node("Concat", [x, added], axis=1)
            width += GROWTH
        if number < len(DENSE_BLOCKS) - 1:
            x = graph.conv(x, width, width // 2, 1, 1)
            x = graph.node("AveragePool", [x], kernel_shape=[2, 2], strides=[2, 2])
            width //= 2
    _classified(graph, x, width).save(path, IMAGE, CLASSES)


def make_inception(path: Path) -> None:
    """After Inception v3: blocks of four branches, whose outputs are joined."""
    graph = Graph()
    width = 192 // WIDTH
    x = graph.conv(graph.conv("x", 3, 32 // WIDTH, 3, 2), 32 // WIDTH, width, 3, 2)
    for stage, blocks in enumerate(INCEPTION_BLOCKS):
        for _ in range(blocks):
            branch = (64 << stage) // WIDTH
            threes = graph.conv(graph.conv(x, width, branch, 1, 1), branch, branch, 3, 1)
            fives = graph.conv(x, width, branch, 1, 1)
            for _ in range(2):
                fives = graph.conv(fives, branch, branch, 3, 1)
            pooled = graph.node("AveragePool", [x], kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1])
            ones = graph.conv(x, width, branch, 1, 1)
            x = graph.node("Concat", [ones, threes, fives, graph.conv(pooled, width, branch, 1, 1)], axis=1)
            width = 4 * branch
        if stage < len(INCEPTION_BLOCKS) - 1:
            x = graph.node("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    _classified(graph, x, width).save(path, IMAGE, CLASSES)


def _classified(graph: Graph, x: str, width: int) -> Graph:
    flat = graph.node("Flatten", [graph.node("GlobalAveragePool", [x])])
    graph.dense(flat, width, CLASSES, "y")
    return graph
