"""The memory cost of more instances of one ONNX model: `python -m bench.suites.weights [--mib 128]`.

One model, with weights stored in four ways, served by one instance and by four. Prints how many times the weights are
in memory: PSS of the workers, minus that of as many workers with a model without weights, divided by the weights' size.
It measures no times, so it can run beside other processes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib import models
from bench.lib.processes import descendants
from bench.lib.setting import serving
from shmserve.system.procfs import command_line, proportional_bytes

WIDTH = 1024
MIB = 1 << 20
PREPACKED = {
    "session.save_external_prepacked_constant_initializers": "1",
    "session.optimized_model_external_initializers_file_name": "weights.bin",
    "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
}


def make(path: Path, layers: int, external: bool) -> None:
    """y = x times a matrix, `layers` times."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(1)
    nodes, weights, last = [], [], "x"
    for layer in range(layers):
        matrix = random.standard_normal((WIDTH, WIDTH), np.float32) / 32
        weights.append(numpy_helper.from_array(matrix, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [last := f"h{layer}"]))
    nodes.append(helper.make_node("Neg", [last], ["y"]))
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "matrices", tensors[:1], tensors[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    path.parent.mkdir(parents=True)
    onnx.save(model, str(path), save_as_external_data=external, location="weights.bin")
    _written(path.parent)


def prepack(source: Path, target: Path) -> None:
    """The model as optimised by the engine, with weights in the layout in which it computes."""
    import onnxruntime as ort

    target.parent.mkdir(parents=True)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # suppress the warning that the file is specific to this CPU type, which is intended
    options.optimized_model_filepath = os.fspath(target)
    for key, value in PREPACKED.items():
        options.add_session_config_entry(key, value)
    ort.InferenceSession(os.fspath(source), options, providers=["CPUExecutionProvider"])
    _written(target.parent)


def _written(folder: Path) -> None:
    """Writes dirty pages to disk, because they would count as memory of the process."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def measured(repository: Path, source: Path, instances: int, parameters: dict[str, str]) -> int:
    """PSS of all workers of a model, after each has run."""
    import shmserve

    model = models.onnx_model([WIDTH], WIDTH, 0, instances)
    model.inputs["x"] = model.outputs["y"] = ("FP32", [-1, WIDTH])
    model.parameters |= parameters
    files: dict[str, Any] = {path.name: path for path in source.parent.iterdir()}
    models.write(repository, "matrices", model, files)
    with serving(repository) as server, shmserve.Client(server.lane) as client:
        x = np.ones((1, WIDTH), np.float32)
        for call in [client.submit("matrices", {"x": x}) for _ in range(8 * instances)]:
            call.result()
        return sum(map(proportional_bytes, _workers(server.broker_pid())))


def _workers(broker: int) -> list[int]:
    return [pid for pid in descendants(broker) if "shmserve.workers.main" in command_line(pid)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.suites.weights")
    parser.add_argument("--mib", type=int, default=128, help="size of the weights in MiB (default 128)")
    layers = max(1, parser.parse_args().mib * MIB // (WIDTH * WIDTH * 4))
    size = layers * WIDTH * WIDTH * 4
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        created = {kind: work / kind / "model.onnx" for kind in ("none", "inside", "beside", "prepacked")}
        make(created["none"], 0, False)
        make(created["inside"], layers, False)
        make(created["beside"], layers, True)
        prepack(created["beside"], created["prepacked"])
        variants: list[tuple[str, str, dict[str, str]]] = [
            ("inside model.onnx", "inside", {}),
            ("external data", "beside", {}),
            ("external data, session.disable_prepacking 1", "beside", {"session.disable_prepacking": "1"}),
            ("external data, prepacked by the engine", "prepacked", {}),
        ]
        none = {count: measured(work / f"none-{count}", created["none"], count, {}) for count in (1, 4)}
        print(f"weights of {size // MIB} MiB; a worker without any: {none[1] / MIB:.0f} MiB\n")
        print("| Weights | 1 instance | 4 instances | PSS of 4 over 1 |\n| --- | --- | --- | --- |")
        for number, (title, kind, parameters) in enumerate(variants):
            pss = {count: measured(work / f"{number}-{count}", created[kind], count, parameters) for count in (1, 4)}
            cells = [f"{(pss[count] - none[count]) / size:.1f} x" for count in (1, 4)]
            print(f"| {title} | {cells[0]} | {cells[1]} | {pss[4] / pss[1]:.1f} |")


if __name__ == "__main__":
    main()
