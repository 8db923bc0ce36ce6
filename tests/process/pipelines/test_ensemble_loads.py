"""The load of an ensemble, and what is counted of it and of its models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shmserve.testing import Server
from tests.support.living import states

pytestmark = pytest.mark.process

SLOW = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        if args["model_version"] == "1":
            time.sleep(2)

    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]) for x in given]
"""
ENDS = """
    max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: 4 }
    output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""
STEP = """
    ensemble_scheduling { step {
        model_name: "member" model_version: -1
        input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }
    } }
"""


def write(root: Path) -> None:
    """The ensemble is ready as soon as version 3 of its model is; version 1 takes longer."""
    for version in ("1", "3"):
        (root / "member" / version).mkdir(parents=True)
        (root / "member" / version / "model.py").write_text(SLOW)
    (root / "member" / "config.pbtxt").write_text(f'backend: "python" {ENDS} version_policy {{ all {{ }} }}')
    (root / "outer" / "1").mkdir(parents=True)
    (root / "outer" / "config.pbtxt").write_text(f'platform: "ensemble" {ENDS} {STEP}')


def test_load_waits_for_all_versions_and_each_is_counted(tmp_path: Path) -> None:
    write(tmp_path)
    with Server(tmp_path, "--model-control-mode", "explicit") as server, server.client() as client:
        client.load("outer")
        assert states(client, "member") == {"1": "READY", "3": "READY"}

        x = np.ones((2, 4), np.float32)
        for _ in range(3):
            client.infer("outer", {"x": x})
        client.infer("member", {"x": x}, version=1)
        stats = client.statistics("member")["model_stats"]
        assert [(entry["version"], entry["inference_count"]) for entry in stats] == [("1", 2), ("3", 6)]
        assert [entry["version"] for entry in client.statistics("member", 3)["model_stats"]] == ["3"]

        (outer,) = client.statistics("outer")["model_stats"]
        assert [(batch["batch_size"], batch["compute_infer"]["count"]) for batch in outer["batch_stats"]] == [(2, 3)]
        assert outer["batch_stats"][0]["compute_infer"]["ns"] == outer["inference_stats"]["compute_infer"]["ns"]
        assert 'nv_inference_request_failure{model="outer",reason="OTHER",version="1"} 0' in client.metrics()
        client.unload("outer", unload_dependents=True)
