"""Instances on GPUs, in a real server on a machine that has none: stand-ins for the driver and for the libraries.

The rule: what a worker sees is asked of a model in it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from tests import STANDINS
from tests.support.workers.gpu_harness import adder

pytestmark = pytest.mark.process

GPUS = [{"uuid": "GPU-aa11", "pci": "00000000:3B:00.0"}, {"uuid": "GPU-bb22", "pci": "00000000:AF:00.0"}]
TELL = """\
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        self.said = f"{args['model_instance_kind']} {args['model_instance_device_id']} {seen}"

    def execute(self, requests):
        said = np.array([self.said], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("said", said)]) for _ in requests]
"""
CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "said" data_type: TYPE_STRING dims: 1 }
instance_group [ %s ]
"""


def telling(repository: Path, name: str, group: str) -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(TELL)
    (folder.parent / "config.pbtxt").write_text(CONFIG % group)


PLAN = 'backend: "tensorrt" instance_group { kind: KIND_GPU gpus: %d }'
ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 40000 } output { name: "y" data_type: TYPE_FP32 dims: 40000 }
ensemble_scheduling { %s }
"""
STEP = """step { model_name: "%s" model_version: -1
input_map { key: "x" value: "%s" } output_map { key: "y" value: "%s" } }"""


def planned(repository: Path, name: str, gpu: int) -> None:
    adder(repository / name, 40_000)
    (repository / name / "config.pbtxt").write_text(PLAN % gpu)


def chained(repository: Path, name: str, *models: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    tensors = ["x", *[f"t{number}" for number in range(len(models) - 1)], "y"]
    steps = [STEP % step for step in zip(models, tensors, tensors[1:], strict=False)]
    (repository / name / "config.pbtxt").write_text(ENSEMBLE % "\n".join(steps))


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, journal: Path) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("gpus")
    telling(repository, "on_gpu", "{ kind: KIND_GPU gpus: 1 }")
    telling(repository, "anywhere", "{ count: 1 }")
    telling(repository, "on_cpu", "{ kind: KIND_CPU }")
    telling(repository, "beyond", "{ kind: KIND_GPU gpus: 2 }")
    adder(repository / "plan", 40_000)
    for name, gpu in (("first", 0), ("second", 0), ("third", 0), ("other", 1)):
        planned(repository, name, gpu)
    chained(repository, "same", "first", "second", "third")
    chained(repository, "apart", "first", "other", "third")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_GPUS", json.dumps(GPUS))
        patch.setenv("CUDA_STANDIN_JOURNAL", str(journal))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(STANDINS), os.environ.get("PYTHONPATH", "")]).rstrip(":"))
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        with Server(repository) as server:
            yield server


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.Client]:
    with server.client() as client:
        yield client


def said(client: shmserve.Client, model: str) -> set[str]:
    answers = [client.infer(model, {"x": np.zeros(1, np.float32)})["said"] for _ in range(8)]
    return {answer[0].decode() for answer in answers}


def test_a_worker_sees_its_own_gpu(client: shmserve.Client) -> None:
    assert said(client, "on_gpu") == {"GPU 0 GPU-bb22"}
    assert said(client, "on_cpu") == {"CPU 0 all"}


def test_a_model_that_may_run_anywhere_has_an_instance_on_each(client: shmserve.Client) -> None:
    config = client.config("anywhere")
    assert config["instance_group"][0]["kind"] == "KIND_GPU"
    assert config["instance_group"][0]["gpus"] == [0, 1]
    futures = [client.submit("anywhere", {"x": np.zeros(1, np.float32)}) for _ in range(32)]
    assert {future.result()["said"][0].decode() for future in futures} == {"GPU 0 GPU-aa11", "GPU 0 GPU-bb22"}


def test_a_gpu_that_is_not_there(client: shmserve.Client) -> None:
    (entry,) = [entry for entry in client.models() if entry["name"] == "beyond"]
    assert "instance_group[0].gpus[0]: no GPU 2; this machine has [0, 1]" in str(entry)


def test_a_plan(client: shmserve.Client) -> None:
    """From the client's memory to the device and back, through the server."""
    random = np.random.default_rng(1)
    xs = [random.standard_normal((rows, 40_000)).astype(np.float32) for rows in (1, 2, 1, 3)]
    futures = [client.submit("plan", {"x": x}) for x in xs]
    for x, future in zip(xs, futures, strict=True):
        np.testing.assert_array_equal(future.result()["y"], x + 1)
    config = client.config("plan")
    assert (config["backend"], config["max_batch_size"]) == ("tensorrt", 8)
    small = np.ones((1, 40_000), np.float32)
    np.testing.assert_array_equal(client.infer("plan", {"x": small})["y"], small + 1)


def test_metrics_and_the_log(server: Server, client: shmserve.Client) -> None:
    text = client.metrics()
    assert f'nv_gpu_memory_total_bytes{{gpu_uuid="GPU-bb22"}} {80 << 30}' in text
    assert 'nv_gpu_utilization{gpu_uuid="GPU-aa11"} 0.25' in text
    assert "GPU 1: Stand-in, GPU-bb22" in server.log


def test_steps_on_one_gpu_hand_over_on_it(journal: Path, client: shmserve.Client) -> None:
    """What is between steps on the same GPU never leaves it. The answer is the same whichever way it went."""
    x = np.arange(80_000, dtype=np.float32).reshape(2, 40_000)
    for ensemble in ("apart", "same"):
        for path in journal.iterdir():
            path.unlink()
        futures = [client.submit(ensemble, {"x": x}) for _ in range(4)]
        for future in futures:
            np.testing.assert_array_equal(future.result()["y"], x + 3)
        done = {path.name.partition("_")[0]: Counter(path.read_text().splitlines()) for path in journal.iterdir()}
        copies = {
            name: {kind for kind in ("1", "2", "3") if calls[f"memcpyAsync {kind}"]}
            for name, calls in done.items()
            if name in ("first", "second", "other", "third")  # another test's model may still be freeing memory
        }
        if ensemble == "apart":
            assert copies == {"first": {"1", "2"}, "other": {"1", "2"}, "third": {"1", "2"}}
        else:
            # Within the device only what more than one request brings to a batch.
            assert {name: kinds - {"3"} for name, kinds in copies.items()} == {
                "first": {"1"},
                "second": set(),
                "third": {"2"},
            }
            # Each segment is opened once, whatever number of tensors lies in it.
            assert done["second"]["ipcOpenMemHandle "] == done["first"]["ipcGetMemHandle "] >= 1
            assert done["third"]["ipcOpenMemHandle "] == done["second"]["ipcGetMemHandle "] >= 1
