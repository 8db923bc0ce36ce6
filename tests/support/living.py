"""Models whose answers name their generation, for tests of loading and unloading, and waiting for a server.

`write` replaces a file by renaming. Tests of files changed in place write them directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shmserve
from tests.support.patience import PATIENCE_S

PAUSE_S = 0.02

IDENTITY = """
backend: "identity" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
PYTHON = IDENTITY.replace("identity", "python")
GENERATION = """
import os
import select
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        folder = os.path.join(args["model_repository"], args["model_version"])
        with open(os.path.join(folder, "generation")) as file:
            self.generation = float(file.read())

    def execute(self, requests):
        select.select([], [], [], 0.002)
        return [self.one(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]

    def one(self, x):
        if not x.all():
            raise ValueError("zeros are not for me")
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full_like(x, self.generation))])
"""
ONE = np.ones((1, 3), np.float32)


def group(count: int) -> str:
    return f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]\n"


def policy(text: str) -> str:
    return f"version_policy {{ {text} }}\n"


def identity(root: Path, name: str, config: str = "", *versions: int) -> Path:
    for version in versions or (1,):
        (root / name / str(version)).mkdir(parents=True)
    write(root / name / "config.pbtxt", IDENTITY + config)
    return root / name


def generation(root: Path, name: str, number: float | str, config: str = "", version: int = 1) -> Path:
    """A model that answers with its number."""
    folder = root / name / str(version)
    folder.mkdir(parents=True)
    write(folder / "model.py", GENERATION)
    write(folder / "generation", str(number))
    write(root / name / "config.pbtxt", PYTHON + config)
    return root / name


def write(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.fresh")
    fresh.write_text(text)
    fresh.replace(path)


def renew(model: Path, number: float | str, version: int = 1) -> None:
    write(model / str(version) / "generation", str(number))


def answer(client: shmserve.Client, model: str, version: int | None = None) -> float:
    found: float = client.infer(model, {"x": ONE}, version=version)["y"][0, 0].item()
    return found


def index(client: shmserve.Client, model: str = "") -> dict[str, dict[str, Any]]:
    """ "name/version" -> entry, of all models or of one."""
    return {f"{entry['name']}/{entry['version']}": entry for entry in client.models() if model in ("", entry["name"])}


def states(client: shmserve.Client, model: str) -> dict[str, str]:
    """Version -> state."""
    return {entry["version"]: entry["state"] for entry in index(client, model).values()}


def ready(client: shmserve.Client, model: str) -> list[str]:
    return sorted(version for version, state in states(client, model).items() if state == "READY")


def pids(client: shmserve.Client, model: str) -> dict[str, int]:
    """Processes that serve: "version name" -> pid. Those of an old generation, which are listed last, are left out."""
    found: dict[str, int] = {}
    for entry in index(client, model).values():
        for instance in entry.get("instances", ()):
            if instance["state"] == "ready":
                found.setdefault(f"{entry['version']} {instance['name']}", instance["pid"])
    return found


def await_connections(client: shmserve.Client, count: int) -> None:
    """Waits until the server has closed the connections of earlier tests, whose descriptors and memory would count."""
    text = f'\nshmserve_clients{{plane="lane"}} {count}\n'
    until(client, lambda: text in client.metrics(), f"{count} connections")


def unload_all(client: shmserve.Client) -> None:
    for name in {entry["name"] for entry in client.models() if entry["state"]}:
        client.unload(name)


def until(client: shmserve.Client, holds: Callable[[], object], what: str = "") -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"{what or 'it'} has not come true: {client.models()}"
        client._link.pause(PAUSE_S)  # noqa: SLF001 - the pause of a client that waits
