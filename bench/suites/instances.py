"""The cost of an instance as a process: memory of one and of four, time to READY. `python -m bench.suites.instances`.

Memory is the kernel's PSS after each instance has run a request; a page shared by several processes is divided among
them.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shmserve
from bench.lib import models
from shmserve.system.procfs import children, proportional_bytes
from shmserve.testing import Server

ROUNDS = 5
SIDE = 4096
"""Rows and columns of the matrix of weights: 64 MiB."""
CONFIG = """
backend: "{backend}" max_batch_size: 8
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {side} ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ {side} ] }} ]
instance_group [ {{ count: {count} kind: KIND_CPU }} ]
"""


def identity(folder: Path) -> None:
    return


def python(folder: Path) -> None:
    (folder / "model.py").write_text(models.IDENTITY)


def onnx(folder: Path, external: bool = False) -> None:
    import onnx

    helper, tensor, numbers = onnx.helper, onnx.helper.make_tensor_value_info, onnx.numpy_helper
    shape: list[str | int | None] = ["n", SIDE]
    inputs, outputs = [tensor("x", 1, shape)], [tensor("y", 1, shape)]
    weights = numbers.from_array(np.zeros((SIDE, SIDE), np.float32), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", inputs, outputs, [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "model.onnx", save_as_external_data=external, location="weights.bin")


def onnx_external(folder: Path) -> None:
    onnx(folder, external=True)


MODELS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "identity": ("identity", identity),
    "python": ("python", python),
    "onnx, 64 MiB in the file": ("onnxruntime", onnx),
    "onnx, 64 MiB beside it": ("onnxruntime", onnx_external),
}


def main() -> None:
    rows = [measure(name) for name in MODELS]
    print(json.dumps(rows, indent=1))
    print("| model | PSS of 1, MiB | of 4 | ratio | READY, 1, ms | READY, 4, ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        memory = f"{row['pss_1']:.0f} | {row['pss_4']:.0f} | {row['pss_4'] / row['pss_1']:.1f}"
        print(f"| {row['model']} | {memory} | {row['ready_1']:.0f} | {row['ready_4']:.0f} |")


def measure(name: str) -> dict[str, Any]:
    backend, make = MODELS[name]
    results: dict[str, Any] = {"model": name}
    with tempfile.TemporaryDirectory() as place:
        for count in (1, 4):
            folder = Path(place, f"m{count}")
            (folder / "1").mkdir(parents=True)
            (folder / "config.pbtxt").write_text(CONFIG.format(backend=backend, count=count, side=SIDE))
            make(folder / "1")
        with Server(place, "--model-control-mode", "explicit") as server, shmserve.Client(server.url) as client:
            for count in (1, 4):
                results[f"ready_{count}"], results[f"pss_{count}"] = of(server, client, f"m{count}", count)
    return results


def of(server: Server, client: shmserve.Client, model: str, count: int) -> tuple[float, float]:
    """The shortest time to READY in ms, and the memory of all workers and the zygote, in MiB."""
    times = []
    for round_ in range(ROUNDS + 1):
        began = time.perf_counter()
        client.load(model)
        times.append(time.perf_counter() - began)
        if round_ < ROUNDS:
            client.unload(model)
    x = np.zeros((1, SIDE), np.float32)
    for future in [client.submit(model, {"x": x}) for _ in range(count * 4)]:
        future.result(60)
    memory = sum(map(proportional_bytes, children(server.pid)))
    client.unload(model)
    return min(times) * 1e3, memory / 2**20


if __name__ == "__main__":
    main()
