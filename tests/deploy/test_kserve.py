"""The serving runtime, run as KServe runs it: models in /mnt/models, and KServe's clients."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.deploy import programs
from tests.deploy.manifests import KSERVE, read
from tests.deploy.pod import running
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process
GRPC_PORT = 9000
VOLUME = "kserve-provision-location"


def test_the_kserve_client_gets_the_results_of_the_model(built: str, models: Path, tmp_path: Path) -> None:
    interpreter = programs.cluster()
    if interpreter is None:
        pytest.skip("KServe's client is not installed; `make test-fleet` installs it")
    (runtime,) = read(KSERVE / "clusterservingruntime.yaml")
    spec = runtime["spec"]
    (container,) = spec["containers"]
    assert f"--grpc-port={GRPC_PORT}" in container["args"]
    # KServe adds the volume into which its storage initializer has downloaded storageUri.
    container["volumeMounts"].append({"name": VOLUME, "mountPath": "/mnt/models", "readOnly": True})
    spec["volumes"].append({"name": VOLUME})
    with running(tmp_path, spec, {VOLUME: models}) as pod:
        script = Path(__file__).with_name("of_kserve.py")
        addresses = (f"http://{pod.address}:{container['ports'][0]['containerPort']}", f"{pod.address}:{GRPC_PORT}")
        done = subprocess.run(
            [str(interpreter), str(script), *addresses], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        assert pod.terminate() == 0
    session = onnxruntime.InferenceSession(str(models / "mlp/1/model.onnx"), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": np.arange(64, dtype=np.float32).reshape(1, 64)})
    for way, answers in json.loads(done.stdout).items():
        assert np.allclose(np.array(answers.pop("y")).reshape(expected.shape), expected, atol=1e-5), way
        assert answers == {"model": True, **({"live": True, "ready": True} if way == "grpc" else {})}, way
