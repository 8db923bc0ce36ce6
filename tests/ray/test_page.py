"""The examples of docs/ray.md, with its paths replaced by those of the sample models."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import ROOT
from tests.ray.conftest import REASON
from tests.support.docs.pages import blocks, page
from tests.support.patience import CLUSTER_PATIENCE_S

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("ray")]


def block(language: str, containing: str) -> str:
    (found,) = [text for text in blocks(page("ray"), language) if containing in text]
    return found


def run_block(text: str, folder: Path) -> dict[str, Any]:
    """Runs Python code in this process, which is connected to Ray. Returns its variables."""
    file = folder / "example.py"
    file.write_text(text)
    return runpy.run_path(str(file))


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two revisions of a repository with the sample model `mlp`."""
    root = tmp_path_factory.mktemp("srv")
    for revision in ("1", "2"):
        shutil.copytree(ROOT / "repo" / "examples" / "mlp", root / revision / "models" / "mlp")
    return root


def infer(port: int) -> Any:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=CLUSTER_PATIENCE_S)) as connection:
        document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [1.0] * 64}]}
        connection.request("POST", "/v2/models/mlp/infer", json.dumps(document))
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        return json.loads(answer.read())


def test_serve_run_and_the_handle(place: Any, samples: Path, tmp_path: Path) -> None:
    from ray import serve

    words = block("sh", "serve run").split()
    words = [word.replace("/srv/models", str(samples / "1" / "models")) for word in words]
    program = Path(sys.executable).with_name(words[0])
    # Without --non-blocking, Ctrl-C would end Serve on the cluster.
    command = [str(program), *words[1:], "cpus=0.1", "--non-blocking"]
    environment = os.environ | {"RAY_ADDRESS": place.cluster.address, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=CLUSTER_PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        assert serve.status().applications["default"].deployments["Server"].replica_states == {"RUNNING": 3}
        assert infer(place.http)["model_name"] == "mlp"
        assert run_block(block("python", "Handle()"), tmp_path)["y"].dtype == np.float32
    finally:
        serve.delete("default")


def test_serve_run_without_a_cluster(samples: Path, tmp_path: Path) -> None:
    """Ray starts a cluster on this machine only after the application was built."""
    pytest.importorskip("ray", reason=REASON)
    code = f"from shmserve.ray import app; import ray; app({{'models': {str(samples)!r}}}); print(ray.is_initialized())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=CLUSTER_PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_the_configuration_file_of_the_page(place: Any, samples: Path) -> None:
    import yaml
    from ray import serve
    from ray.serve.schema import ServeDeploySchema

    from shmserve.ray import app

    document = yaml.safe_load(block("yaml", "applications:"))
    ServeDeploySchema.model_validate(document)
    (application,) = document["applications"]
    assert application["import_path"] == "shmserve.ray:app"
    arguments = application["args"] | {"cpus": 0.1, "gpus": 0, "replicas": 1}
    place_of_revisions = ("/srv/models/{revision}", str(samples / "{revision}" / "models"))
    arguments["models"] = arguments["models"].replace(*place_of_revisions)
    serve.run(app(arguments))
    try:
        assert infer(place.http)["model_name"] == "mlp"
    finally:
        serve.delete("default")
    for part in ("max_replicas: 8", "multiplexed: true"):
        app(yaml.safe_load(block("yaml", part))["args"])


def test_the_map_batches_example_of_the_page(place: Any, samples: Path, tmp_path: Path) -> None:
    source = (
        block("python", "Predictor,").replace("/srv/models", str(samples / "1" / "models")).replace("10_000", "300")
    )
    assert run_block(source, tmp_path)["answered"].count() == 300
