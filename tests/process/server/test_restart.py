"""What was asked before a server went away is answered by the next one, also while that still loads its models."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server

pytestmark = pytest.mark.process

CONFIG = """backend: "python"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
dynamic_batching { }
parameters { key: "folder" value { string_value: "FOLDER" } }
"""
MODEL = """
import json
import pathlib
import select
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.folder = pathlib.Path(json.loads(args["model_config"])["parameters"]["folder"]["string_value"])
        first = not (self.folder / "seen").exists()
        (self.folder / "seen").touch()
        if not first:
            (self.folder / "loading").touch()
            with open(self.folder / "go") as pipe:  # until somebody writes
                pipe.read()
        self.first = first

    def execute(self, requests):
        if self.first:
            (self.folder / "begun").touch()
            select.select([], [], [], 600)
        found = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 2)]))
        return found
"""


@pytest.mark.parametrize("link", ["lane", "zmq"])
@pytest.mark.parametrize("size", [3, 30_000])
def test_a_request_outlives_the_server(tmp_path: Path, link: str, size: int) -> None:
    """Its model has begun to run it. The next server is asked while its model is still loading."""
    folder = tmp_path / "models" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG.replace("FOLDER", str(folder)))
    (folder / "1" / "model.py").write_text(MODEL)
    os.mkfifo(folder / "go")
    x = np.arange(size, dtype=np.float32)[None]
    with Server(tmp_path / "models") as server:
        url = server.url if link == "lane" else server.zmq_url
        with shmserve.Client(url) as client:
            future = client.submit("m", {"x": x})
            client.flush()
            asked = threading.Thread(target=future.result, args=(60,))
            asked.start()
            while not (folder / "begun").exists():
                server.client().close()
            server.kill()
            writer = threading.Thread(target=(folder / "go").write_text, args=("",))
            writer.start()
            server.restart()
            asked.join()
            writer.join()
            assert np.array_equal(future.result()["y"], x * 2)
