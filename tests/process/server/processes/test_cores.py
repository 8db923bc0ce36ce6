"""Workers run on the cores and with the number of threads of their instance."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import shmserve
from tests.support.cases import cases
from tests.support.ensemble_models import config_text
from tests.support.launch import Launched
from tests.support.model_files import python_model, write_model
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

CORE = min(os.sched_getaffinity(0))
VARIABLES = ("SHMSERVE_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "MKL_NUM_THREADS")
CONFIG = config_text("python", "x:FP32:[1]", "y:STRING", "instance_group { count: 1 kind: KIND_CPU }")
LOOK = python_model(
    f"""
    square = np.ones((400, 400), np.float32)
    square @ square
    own = [*os.sched_getaffinity(0), len(os.listdir("/proc/self/task"))]
    return self.respond(np.array([*map(str, own), *(os.environ.get(name, "") for name in {VARIABLES})], object))
    """
)


@cases(
    ({}, ["1", "1", "1", "1", "1", ""]),
    (
        {"OMP_NUM_THREADS": "2,1", "OPENBLAS_NUM_THREADS": "1", "NUMEXPR_NUM_THREADS": "", "MKL_NUM_THREADS": "3"},
        ["1", "2", "2,1", "1", "2", "3"],
    ),
    ids=["of the instance", "variables of the environment take precedence"],
)
def test_cores_and_threads(
    variables: dict[str, str], threads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numpy reads the variables when it is imported; it has no other thread. MKL follows OpenMP unless its own variable
    is set, which torch prefers to OMP_NUM_THREADS."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    write_model(tmp_path / "models", "look", CONFIG, LOOK)
    options = ("--host-policy", f"cpu,cpu-cores={CORE}")
    with (
        Launched(tmp_path / "models", tmp_path / "run", *options) as server,
        shmserve.Client(f"unix://{server.lane}") as client,
    ):
        client.wait_ready(timeout=PATIENCE_S)
        found = client.infer("look", {"x": np.ones(1, np.float32)}, timeout=PATIENCE_S)["y"]
    assert [word.decode() for word in found] == [str(CORE), *threads]
