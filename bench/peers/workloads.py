"""The workloads for every server: four models, and the numbers of requests in flight.

`first` takes 1 MiB and returns its first number, which measures the cost of a large input alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.endpoints import servers
from bench.lib import models
from bench.lib.wrk import Post

Array = NDArray[np.float32]
MIB = 1 << 20


@dataclass(frozen=True)
class PeerWorkload:
    name: str
    shape: tuple[int, ...]
    flights: tuple[int, ...]
    batches: bool = True
    """Whether requests may share a batch; otherwise the model takes one request at a time."""

    def row(self) -> Array:
        return np.random.default_rng(1).standard_normal(self.shape).astype(np.float32)


WORKLOADS = (
    PeerWorkload("identity", (servers.ROW,), (1, 8, 64)),
    PeerWorkload("mlp", tuple(models.MLP_SHAPE), (1, 8, 64)),
    PeerWorkload("cnn", tuple(models.CNN_SHAPE), (1, 8)),
    PeerWorkload("first", (MIB // 4,), (1, 8), batches=False),
)


def network(workload: PeerWorkload, work: Path) -> Path | None:
    """The ONNX file of a workload that has one."""
    makers: dict[str, Callable[[Path], None]] = {"mlp": models.make_mlp, "cnn": models.make_cnn}
    if workload.name not in makers:
        return None
    path = work / f"{workload.name}.onnx"
    if not path.exists():
        makers[workload.name](path)
    return path


def repository(workload: PeerWorkload, work: Path) -> Path:
    """A repository, for servers that use one: a `model.py` with the same engine."""
    root = work / f"models-{workload.name}"
    if root.exists():
        return root
    onnx = network(workload, work)
    if workload.name == "first":
        models.write(root, "first", models.first_element(), {"model.py": models.FIRST})
        return root
    outer = {"identity": servers.ROW, "mlp": 64, "cnn": 1000}[workload.name]
    tensors = {"x": ("FP32", list(workload.shape))}, {"y": ("FP32", [outer])}
    model = models.Model("python", *tensors, max_batch=servers.BATCH, dynamic=True)
    files: dict[str, str | Path] = {"model.py": servers.MLP if onnx else servers.IDENTITY}
    models.write(root, workload.name, model, files | ({"model.onnx": onnx} if onnx else {}))
    return root


def expected(workload: PeerWorkload, row: Array, work: Path) -> Array:
    """The correct output, computed by ONNX Runtime in this process."""
    onnx = network(workload, work)
    if onnx is None:
        return row[:1] if workload.name == "first" else row
    import onnxruntime

    session: Any = onnxruntime.InferenceSession(str(onnx), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": row[None]})[0][0], np.float32)


# ---------------------------------------------------------------------------------------- on the wire


def raw_post(path: str) -> Callable[[str, PeerWorkload, Array], Post]:
    """Posts the numbers as bytes."""
    headers = {"Content-Type": "application/octet-stream"}
    return lambda url, workload, row: Post(url + path, headers, row.tobytes())


def json_post(path: str) -> Callable[[str, PeerWorkload, Array], Post]:
    """Posts a batch of one as nested lists."""
    headers = {"Content-Type": "application/json"}
    return lambda url, workload, row: Post(url + path, headers, json.dumps({"x": [row.tolist()]}).encode())


def kserve_post(url: str, workload: PeerWorkload, row: Array) -> Post:
    """Posts a KServe request, with binary tensors in both directions."""
    data = row.tobytes()
    shape = [1, *row.shape] if workload.batches else list(row.shape)
    x = {"name": "x", "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [x], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    return Post(f"{url}/v2/models/{workload.name}/infer", headers, head + data)
