"""A GPU of a real server fails and recovers, with stand-ins for the driver. Models report which GPU they see."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from tests import STANDINS
from tests.process.server.processes.test_gpus import CONFIG, GPUS, REPORT, seen
from tests.support.living import until
from tests.support.model_files import write_model

pytestmark = pytest.mark.process

FALLEN = "GPU 1 is out of service: Xid 79 (GPU has fallen off the bus); reboot the machine"


class Machine:
    """The driver's view of two GPUs."""

    def __init__(self, folder: Path) -> None:
        self.states, self.xids = folder / "states", folder / "xids"
        os.mkfifo(self.xids)
        self._fifo = os.open(self.xids, os.O_RDWR)

    def fail(self, uuid: str, xid: int) -> None:
        """The driver reports the error, and loses the GPU."""
        os.write(self._fifo, f"{uuid} {xid}\n".encode())
        (self.states.parent / "new").write_text(json.dumps({uuid: {"lost": 15}}))
        (self.states.parent / "new").rename(self.states)

    def mend(self) -> None:
        self.states.unlink()

    def close(self) -> None:
        os.close(self._fifo)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.close()


@pytest.fixture
def server(tmp_path: Path, machine: Machine) -> Iterator[Server]:
    repository = tmp_path / "models"
    write_model(repository, "anywhere", CONFIG % "{ count: 1 }", REPORT)
    write_model(repository, "second", CONFIG % "{ kind: KIND_GPU gpus: 1 }", REPORT)
    write_model(repository, "on_cpu", CONFIG % "{ kind: KIND_CPU }", REPORT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_GPUS", json.dumps(GPUS))
        patch.setenv("STANDIN_GPU_STATES", str(machine.states))
        patch.setenv("STANDIN_XIDS", str(machine.xids))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(STANDINS), os.environ.get("PYTHONPATH", "")]).rstrip(":"))
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        with Server(repository, "--metrics-interval-ms=100") as server:
            yield server


def test_requests_continue_on_the_other_gpu_until_the_first_has_recovered(server: Server, machine: Machine) -> None:
    both = {"GPU 0 GPU-aa11", "GPU 0 GPU-bb22"}
    with server.client() as client:
        assert seen(client, "anywhere") == both
        machine.fail("GPU-bb22", 79)
        until(client, lambda: FALLEN in server.log, "the GPU is out of service")
        assert seen(client, "anywhere") == {"GPU 0 GPU-aa11"}
        assert seen(client, "on_cpu")
        with pytest.raises(shmserve.Unavailable, match=r"GPU 1 is out of service: Xid 79"):
            client.infer("second", {"x": np.zeros(1, np.float32)})
        (entry,) = [one for one in client.models() if one["name"] == "anywhere"]
        assert (entry["state"], entry["degraded"]) == ("READY", True)
        assert FALLEN in entry["reason"]
        with pytest.raises(shmserve.Unavailable, match=r"Xid 79 \(GPU has fallen off the bus\); reboot the machine"):
            client.restart("second")
        text = client.metrics()
        assert 'shmserve_gpu_out_of_service{gpu_uuid="GPU-bb22"} 1.0' in text
        assert 'shmserve_gpu_xid_errors_total{gpu_uuid="GPU-bb22",xid="79"} 1' in text
        until(client, lambda: 'nv_gpu_memory_total_bytes{gpu_uuid="GPU-bb22"}' not in client.metrics(), "it is lost")
        machine.mend()
        until(client, lambda: seen(client, "anywhere") == both, "the GPU is used again")
        assert "GPU 1 is healthy again" in server.log
        until(client, lambda: client.ready("second"), "the model serves again")
        assert seen(client, "second") == {"GPU 0 GPU-bb22"}
