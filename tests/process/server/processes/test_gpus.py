"""Instances on GPUs in a real server, with stand-ins for the driver and the libraries. Models report what they see."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from shmserve.tools.tune.served import ServedModel
from tests import STANDINS
from tests.support.ensemble_models import config_text, ensemble
from tests.support.living import until
from tests.support.model_files import python_model, write_model
from tests.support.workers.gpu.harness import adder

pytestmark = pytest.mark.process

GPUS = [{"uuid": "GPU-aa11", "pci": "00000000:3B:00.0"}, {"uuid": "GPU-bb22", "pci": "00000000:AF:00.0"}]
REPORT = python_model(
    "return pb_utils.InferenceResponse([pb_utils.Tensor('seen', np.array([self.seen], object))])",
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    self.seen = f"{args['model_instance_kind']} {args['model_instance_device_id']} {visible}"
    """,
)
CONFIG = config_text("python", "x:FP32:[1]", "seen:STRING:[1]", "instance_group [ %s ]")


PLAN = 'backend: "tensorrt" instance_group { kind: KIND_GPU gpus: %d }'


def planned(repository: Path, name: str, gpu: int) -> None:
    adder(repository / name, 40_000)
    (repository / name / "config.pbtxt").write_text(PLAN % gpu)


def chained(repository: Path, name: str, *models: str) -> None:
    between = ["x", *[f"t{number}" for number in range(len(models) - 1)], "y"]
    steps = [f"{model}(x:{one})->(y:{other})" for model, one, other in zip(models, between, between[1:], strict=False)]
    ensemble(repository, name, "x:FP32:[40000]", "y:FP32:[40000]", *steps, more="max_batch_size: 8")


@contextmanager
def serving_on_gpus(repository: Path, journal: Path, *options: str, **variables: str) -> Iterator[Server]:
    """A server on a machine with two fake GPUs, which log copies to `journal`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_GPUS", json.dumps(GPUS))
        patch.setenv("CUDA_STANDIN_JOURNAL", str(journal))
        patch.setenv("STANDIN_PROCESSES", str(repository.parent / "processes"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(STANDINS), os.environ.get("PYTHONPATH", "")]).rstrip(":"))
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        with Server(repository, *options) as server:
            yield server


def copies(journal: Path, model: str) -> set[str]:
    """The kinds of copies that the workers of a model have made: 1 to the device, 2 to the host, 3 within it."""
    return {line[-1] for line in calls(journal, model) if line.startswith("memcpyAsync")}


def calls(journal: Path, model: str) -> list[str]:
    return [line for path in journal.glob(f"{model}_*") for line in path.read_text().splitlines()]


def clear(journal: Path) -> None:
    for path in journal.iterdir():
        path.unlink()


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for the `states` of the GPUs, with `xids`, a pipe."""
    folder = tmp_path_factory.mktemp("machine")
    os.mkfifo(folder / "xids")
    fifo = os.open(folder / "xids", os.O_RDWR)
    yield folder
    os.close(fifo)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, journal: Path, machine: Path) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("gpus")
    write_model(repository, "on_gpu", CONFIG % "{ kind: KIND_GPU gpus: 1 }", REPORT)
    write_model(repository, "anywhere", CONFIG % "{ count: 1 }", REPORT)
    write_model(repository, "on_cpu", CONFIG % "{ kind: KIND_CPU }", REPORT)
    for name, gpu in (("first", 0), ("second", 0), ("third", 0), ("other", 1)):
        planned(repository, name, gpu)
    chained(repository, "same", "first", "second", "third")
    chained(repository, "apart", "first", "other", "third")
    more = {"STANDIN_GPU_STATES": str(machine / "states"), "STANDIN_XIDS": str(machine / "xids")}
    with serving_on_gpus(repository, journal, "--metrics-interval-ms=100", **more) as server:
        yield server


def seen(client: shmserve.Client, model: str) -> set[str]:
    futures = [client.submit(model, {"x": np.zeros(1, np.float32)}) for _ in range(32)]
    return {future.result()["seen"][0].decode() for future in futures}


def test_a_worker_sees_its_own_gpu(server: Server, client: shmserve.Client) -> None:
    """Without a kind, a model has an instance on each GPU."""
    assert seen(client, "on_gpu") == {"GPU 0 GPU-bb22"}
    assert seen(client, "on_cpu") == {"CPU 0 all"}
    assert seen(client, "anywhere") == {"GPU 0 GPU-aa11", "GPU 0 GPU-bb22"}
    assert f'nv_gpu_memory_total_bytes{{gpu_uuid="GPU-bb22"}} {80 << 30}' in client.metrics()
    assert "GPU 1: Stand-in, GPU-bb22" in server.log


def test_tune_measures_the_memory_of_all_instances_on_gpus(client: shmserve.Client) -> None:
    pids = {entry["name"]: [each["pid"] for each in entry["instances"]] for entry in client.models()}
    used = {"GPU-aa11": dict.fromkeys(pids["anywhere"], 5), "GPU-bb22": dict.fromkeys(pids["on_gpu"], 7)}
    Path(os.environ["STANDIN_PROCESSES"]).write_text(json.dumps(used))
    models = [ServedModel(client, name, lambda length: ()) for name in ("anywhere", "on_gpu", "on_cpu")]
    until(client, lambda: [model.gpu_memory() for model in models] == [10, 7, 0])


def test_tensors_between_steps_on_one_gpu_stay_on_it(journal: Path, client: shmserve.Client) -> None:
    x = np.arange(80_000, dtype=np.float32).reshape(2, 40_000)
    models = ("first", "second", "other", "third")
    for name in ("apart", "same"):
        clear(journal)
        futures = [client.submit(name, {"x": x}) for _ in range(4)]
        for future in futures:
            np.testing.assert_array_equal(future.result()["y"], x + 3)
        found = {model: copies(journal, model) for model in models}
        if name == "apart":
            assert found == {"first": {"1", "2"}, "second": set(), "other": {"1", "2"}, "third": {"1", "2"}}
    # Copies within the device gather the requests of a batch.
    assert [found[model] - {"3"} for model in models] == [{"1"}, set(), set(), {"2"}]
    # Each segment is opened once, however many tensors it contains.
    for maker, reader in (("first", "second"), ("second", "third")):
        opened = calls(journal, reader).count("ipcOpenMemHandle ")
        assert opened == calls(journal, maker).count("ipcGetMemHandle ") >= 1
    text = client.metrics()
    for model, has in (("first", True), ("second", True), ("third", False)):
        assert (f'shmserve_instance_gpu_pool_bytes{{model="{model}"' in text) == has


FALLEN = "GPU 1 is out of service: Xid 79 (GPU has fallen off the bus); reboot the machine"


def test_requests_continue_on_the_other_gpu_until_the_first_has_recovered(
    server: Server, client: shmserve.Client, machine: Path
) -> None:
    both = {"GPU 0 GPU-aa11", "GPU 0 GPU-bb22"}
    assert seen(client, "anywhere") == both
    (machine / "xids").write_text("GPU-bb22 79\n")
    (machine / "new").write_text(json.dumps({"GPU-bb22": {"lost": 15}}))
    (machine / "new").rename(machine / "states")
    until(client, lambda: FALLEN in server.log, "the GPU is out of service")
    assert seen(client, "anywhere") == {"GPU 0 GPU-aa11"}
    assert seen(client, "on_cpu")
    (entry,) = [one for one in client.models() if one["name"] == "anywhere"]
    assert (entry["state"], entry["degraded"], FALLEN in entry["reason"]) == ("READY", True, True)
    for use in (lambda: client.infer("on_gpu", {"x": np.zeros(1, np.float32)}), lambda: client.restart("on_gpu")):
        with pytest.raises(shmserve.Unavailable, match=r"Xid 79 \(GPU has fallen off the bus\); reboot the machine"):
            use()
    until(client, lambda: 'nv_gpu_memory_total_bytes{gpu_uuid="GPU-bb22"}' not in client.metrics(), "it is lost")
    (machine / "states").unlink()
    until(client, lambda: seen(client, "anywhere") == both, "the GPU is used again")
    assert "GPU 1 is healthy again" in server.log
    until(client, lambda: client.ready("on_gpu") and client.ready("other"), "the models serve again")
    assert seen(client, "on_gpu") == {"GPU 0 GPU-bb22"}
