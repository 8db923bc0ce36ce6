"""The two servers that `bench.endpoints` compares, on one repository: shmserve with a gateway, and Triton.

Both run with their defaults, on free ports. The processor time of each process is read from /proc and assigned to its
role.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.lib import models
from bench.lib.processes import descendants
from bench.peers.running import running
from shmserve.system import procfs
from shmserve.testing import Server

ANSWER_S = 60.0
_SITE = "import sysconfig; print(sysconfig.get_paths()['purelib']); print(sysconfig.get_config_var('LIBDIR'))"

MLP = """\
import os

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = os.path.join(args["model_repository"], args["model_version"], "model.onnx")
        self.run = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run

    def execute(self, requests):
        parts = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        y = self.run(None, {"x": parts[0] if len(parts) == 1 else np.concatenate(parts)})[0]
        ends = np.cumsum([len(part) for part in parts])[:-1]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", part)]) for part in np.split(y, ends)]
"""
ROW = 16
"""Elements per row of identity."""
BATCH = 32


def repository(work: Path, mlp: Path) -> Path:
    """Writes the models: identity and mlp in batches of up to 32, and two for large tensors: `whole` (identity) and
    `first` (first element).
    """
    root = work / "endpoints"
    sizes = {"identity": (ROW, ROW, models.IDENTITY), "mlp": (models.MLP_SHAPE[0], 64, MLP)}
    for name, (inner, outer, source) in sizes.items():
        tensors = {"x": ("FP32", [inner])}, {"y": ("FP32", [outer])}
        files: dict[str, str | Path] = {"model.py": source} | ({"model.onnx": mlp} if name == "mlp" else {})
        models.write(root, name, models.Model("python", *tensors, max_batch=BATCH, dynamic=True), files)
    whole = models.Model("python", {"x": ("FP32", [-1])}, {"y": ("FP32", [-1])})
    models.write(root, "whole", whole, {"model.py": models.IDENTITY})
    models.write(root, "first", models.first_element(), {"model.py": models.FIRST})
    return root


@dataclass
class Serving:
    """A running server. Only shmserve has a `lane`."""

    name: str
    pids: dict[str, int]
    """Role -> pid. Their other descendants have the role `model`."""
    http: str
    grpc: str = ""
    lane: str = ""

    def busy(self) -> dict[str, float]:
        """Role -> processor time so far, in seconds."""
        named = {pid: part for part, pid in self.pids.items()}
        below = {pid for top in self.pids.values() for pid in descendants(top)}
        result = dict.fromkeys([*self.pids, "model"], 0.0)
        for pid in {*below, *named}:
            result[named.get(pid, "model")] += procfs.usage(pid).cpu_seconds
        return result

    def answered(self, model: str) -> int:
        """Successful requests of the model since the start."""
        with urllib.request.urlopen(f"http://{self.http}/v2/models/{model}/stats", timeout=ANSWER_S) as answer:
            (stats,) = json.load(answer)["model_stats"]
        return int(stats["inference_stats"]["success"]["count"])


# ---------------------------------------------------------------------------------------- shmserve


@contextmanager
def ours(root: Path, *options: str) -> Iterator[Serving]:
    """A server with all of these models, and a gateway."""
    with Server(root, "--allow-client-shm", *options, gateway=True) as server:
        gateway = next(pid for pid in descendants(server.pid) if "gateway" in procfs.command_line(pid))
        pids = {"broker": server.pid, "gateway": gateway}
        yield Serving("shmserve", pids, server.endpoints["http"], server.endpoints.get("grpc", ""), server.url)


# ---------------------------------------------------------------------------------------- Triton


def free_port() -> int:
    with socket.socket() as created:
        created.bind(("127.0.0.1", 0))
        return int(created.getsockname()[1])


@contextmanager
def triton(root: Path, python: Path, work: Path) -> Iterator[Serving]:
    """The server from the wheel `nvidia-pytriton`, installed for `python`, with the wheel's Python backend."""
    ports = {name: free_port() for name in ("http", "grpc", "metrics")}
    command, environment = triton_command(root, python, work, ports)
    with running("triton", command, environment, work) as process:
        url = f"127.0.0.1:{ports['http']}"
        process.await_success(urllib.request.Request(f"http://{url}/v2/health/ready"))
        yield Serving("Triton", {"tritonserver": process.pid}, url, f"127.0.0.1:{ports['grpc']}")


def triton_command(root: Path, python: Path, work: Path, ports: Mapping[str, int]) -> tuple[list[str], dict[str, str]]:
    """The command, and what it needs in its environment."""
    output = subprocess.run([str(python), "-c", _SITE], capture_output=True, text=True, check=True).stdout
    site, libraries = map(Path, output.split())
    inside = site / "pytriton" / "tritonserver"
    command = [
        str(inside / "bin" / "tritonserver"),
        f"--model-repository={root}",
        "--allow-gpu-metrics=false",
        f"--backend-directory={_backends(inside, python, work)}",
    ]
    for name, port in ports.items():
        command += [f"--{name}-address=127.0.0.1", f"--{name}-port={port}"]
    return command, {
        "PYTHONPATH": str(site),
        "OMP_NUM_THREADS": "1",
        "LD_LIBRARY_PATH": f"{site / 'nvidia_pytriton.libs'}:{libraries}",
        "PATH": f"{python.parent}:{os.environ['PATH']}",  # models run with the first python3 in PATH
    }


def _backends(inside: Path, python: Path, work: Path) -> Path:
    """A backend directory with the Python backend and the stub for this Python version."""
    version = subprocess.run(
        [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    created = work / "backends" / "python"
    shutil.copytree(inside / "backends" / "python", created)
    shutil.copy2(inside / "python_backend_stubs" / version / "triton_python_backend_stub", created)
    return created.parent
