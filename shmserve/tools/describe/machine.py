"""Measures what one core of this machine can do at most: multiplications per second in the engine, and bytes per second
from memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

SIDE = 1024
"""Rows and columns of the matrices that are multiplied."""
COPIED = 256 << 20
"""Bytes that are copied: more than caches hold."""
RUNS = 5
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20}


class MachineSpeed(NamedTuple):
    """`flops` and `memory` per second, of one core; `cache`: bytes of its largest cache, 0 if that is unknown."""

    flops: float
    memory: float
    cache: int

    def seconds(self, flops: int, weights: int, tensors: int) -> tuple[float, float]:
        """The minimum times of the arithmetic and of the memory for this work. Weights that fit into the cache stay
        there from one batch to the next."""
        return flops / self.flops, (tensors + (weights if weights > self.cache else 0)) / self.memory


def measure() -> MachineSpeed:
    return MachineSpeed(_flops(), _memory(), _cache())


def _flops() -> float:
    shape = [SIDE, SIDE]
    names = ("a", "b", "c")
    a, b, c = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in names)
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "product", [a, b], [c])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    matrix = np.ones(shape, np.float32)
    return 2 * SIDE**3 / _best(lambda: session.run(None, {"a": matrix, "b": matrix}))


def _memory() -> float:
    source = np.ones(COPIED // 8)
    target = np.empty_like(source)
    return 2 * COPIED / _best(lambda: np.copyto(target, source))


def _best(run: Callable[[], object]) -> float:
    """The shortest of some runs, after one that does not count."""
    run()
    taken = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _cache() -> int:
    sizes = [0]
    for file in CACHES.glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) * _UNITS.get(text[-1], 0) if text[-1:].isalpha() else int(text))
    return max(sizes)
