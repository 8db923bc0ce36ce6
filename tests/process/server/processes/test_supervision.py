"""Workers that crash, hang or never finish loading: which requests fail with which error, and which do not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.errors import DeadlineExceeded, ModelFailed, Unavailable
from shmserve.testing import Server
from tests.support.living import pids, until
from tests.support.model_files import parameters, python_model, write_model

pytestmark = pytest.mark.process

MODEL = python_model(
    """
    if (x == 13).any():
        print("thirteen is more than I can bear")
        os.kill(os.getpid(), signal.SIGSEGV)
    if (x == 99).any():
        threading.Event().wait()
    return self.respond(x * 2)
    """
)
FLAGGED = python_model(
    """
    if self.crashes and os.path.exists(self.flag + ".crash"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return self.respond(x * 2)
    """,
    """
    self.flag = json.loads(args["model_config"])["parameters"]["flag"]["string_value"]
    self.crashes = args["model_instance_name"].endswith("_1")
    if os.path.exists(self.flag + ".full"):
        raise RuntimeError("the device is full")
    """,
)
GATED = python_model(
    "return self.respond(x * 2)",
    """
    folder = args["model_repository"]
    if os.path.exists(folder + "/loaded"):
        open(folder + "/gate").read()  # a pipe: blocks until the test writes
    open(folder + "/loaded", "w").close()
    """,
)
CONFIG = """
backend: "python" max_batch_size: 16
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 1 ] }} ]
dynamic_batching {{ max_queue_delay_microseconds: 50000 preferred_batch_size: 16 }}
instance_group [ {{ count: {count} kind: KIND_CPU }} ]
{more}
"""


def write(repository: Path, name: str, more: str = "", count: int = 1, model: str = MODEL) -> Path:
    return write_model(repository, name, CONFIG.format(count=count, more=more), model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("supervision")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Server]:
    repository = folder / "models"
    write(repository, "frail")
    write(repository, "worn")
    write(repository, "pair", count=2)
    write(repository, "once", parameters(retry_alone="false"))
    write(repository, "slow", parameters(execution_limit_secs="0.5"))
    for name, count in (("three", 3), ("two", 2)):
        write(repository, name, parameters(flag=str(folder / name)), count, FLAGGED)
    os.mkfifo(write(repository, "gated", model=GATED) / "gate")
    with Server(repository, "--exit-on-error", "true") as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    """Waits for all workers at the end: the leak check of a later test would report a worker that restarts."""
    yield running
    with running.client() as client:
        until(client, lambda: all(is_complete(entry) for entry in client.models()), "every instance ready")


def is_complete(entry: dict[str, Any]) -> bool:
    return entry["state"] == "READY" and all(instance["state"] == "ready" for instance in entry["instances"])


def ask(client: shmserve.Client, name: str, values: list[int]) -> list[float | str]:
    """The answers to one batch: a number, or a code and a text."""
    futures = [client.submit(name, {"x": np.full((1, 1), value, np.float32)}) for value in values]
    found: list[float | str] = []
    for future in futures:
        try:
            found.append(float(future.result(60)["y"][0, 0]))
        except shmserve.ServeError as error:
            found.append(f"{error.code}: {error}")
    return found


@pytest.mark.parametrize("name", ["frail", "pair"])
@pytest.mark.parametrize("link", ["lane", "zmq"])
def test_only_the_crashing_request_fails(server: Server, name: str, link: str) -> None:
    with shmserve.Client(server.url if link == "lane" else server.zmq_url) as client:
        values = [1, 2, 3, 13, 5, 6, 7, 8]
        found = ask(client, name, values)
        culprit = found[3]
        assert [answer for answer in found if answer is not culprit] == [2.0 * value for value in values if value != 13]
        assert isinstance(culprit, str)
        assert culprit.startswith(f"MODEL_FAILED: model '{name}' version 1: the worker process of instance '{name}_0_")
        assert "signal SIGSEGV" in culprit
        assert client.infer(name, {"x": np.ones((1, 1), np.float32)})["y"] == 2


def test_consecutive_crashes_delay_restarts(server: Server) -> None:
    """A request that ends two processes counts once. The first answer resets the counter."""
    with server.client() as client:
        for _ in range(2):
            with pytest.raises(ModelFailed, match="ran this request alone"):
                client.infer("worn", {"x": np.full((1, 1), 13, np.float32)})
        with pytest.raises(Unavailable, match="3 times in a row"):
            client.infer("worn", {"x": np.full((1, 1), 13, np.float32)})
        client.wait_ready("worn", timeout=60)
        assert ask(client, "worn", [4]) == [8.0]
        with pytest.raises(ModelFailed, match="ran this request alone"):
            client.infer("worn", {"x": np.full((1, 1), 13, np.float32)})
        assert ask(client, "worn", [4]) == [8.0]
    ends = [line.partition("'worn_0_0' ended: ")[2] for line in server.log.splitlines()]
    assert [end for end in ends if end] == [
        *["signal SIGSEGV"] * 2,
        *["signal SIGSEGV, 2 times in a row; next attempt in 1 s"] * 2,
        "signal SIGSEGV, 3 times in a row; model 'worn' version 1 is UNAVAILABLE; next attempt in 2 s",
        *["signal SIGSEGV"] * 2,
    ]


def test_requests_of_a_crashed_batch_fail_if_retries_are_disabled(server: Server) -> None:
    with server.client() as client:
        found = ask(client, "once", [1, 13, 2])
        assert [str(answer).partition(":")[0] for answer in found] == ["MODEL_FAILED"] * 3
        assert ask(client, "once", [4]) == [8.0]


def test_a_worker_that_hangs_is_killed(server: Server) -> None:
    with server.client() as client:
        found = ask(client, "slow", [1, 99, 2])
        assert found[0] == 2.0
        assert found[2] == 4.0
        assert "it has run one batch for more than 0.5 s" in str(found[1])


def test_a_timeout_does_not_wait_for_the_worker(server: Server) -> None:
    with server.client() as client:
        with pytest.raises(DeadlineExceeded):
            client.infer("slow", {"x": np.full((1, 1), 99, np.float32)}, timeout=0.1)
        assert ask(client, "slow", [4]) == [8.0]


def test_idle_workers_that_are_killed_are_replaced(server: Server) -> None:
    with server.client() as client:
        killed = set(pids(client, "pair").values())
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        # A request that is sent to both before the server notices that they ended would fail.
        until(client, lambda: killed.isdisjoint(pids(client, "pair").values()), "the server has noticed both")
        assert ask(client, "pair", [1, 2, 3]) == [2.0, 4.0, 6.0]


def test_a_load_over_the_load_limit_is_aborted(tmp_path: Path) -> None:
    write(tmp_path, "stuck", model="import threading\nthreading.Event().wait()\n")
    write(tmp_path, "good")
    with Server(tmp_path, "--load-limit-secs", "5") as server, server.client() as client:
        reasons = {entry["name"]: entry["reason"] for entry in client.models()}
        assert reasons == {"stuck": "it did not load within 5 s (--load-limit-secs)", "good": ""}
        with pytest.raises((Unavailable, shmserve.NotFound), match="it did not load within 5 s"):
            client.infer("stuck", {"x": np.ones((1, 1), np.float32)})
        assert ask(client, "good", [4]) == [8.0]


EVERYWHERE = list(range(48))
"""Full batches for three instances."""


def entry_of(client: shmserve.Client, name: str) -> dict[str, Any]:
    (entry,) = (entry for entry in client.models() if entry["name"] == name)
    return entry


def test_an_instance_that_always_crashes_is_quarantined(server: Server, folder: Path) -> None:
    """No request fails during the quarantine, which ends with the instance's first answer."""
    crash = folder / "three.crash"
    crash.touch()
    with server.client() as client:
        while not any(instance["quarantined"] for instance in entry_of(client, "three")["instances"]):
            assert ask(client, "three", EVERYWHERE) == [2.0 * value for value in EVERYWHERE]
        found = entry_of(client, "three")
        assert found["state"] == "READY"
        assert found["degraded"]
        assert "2 of 3 instances: instance 'three_0_1' is quarantined: signal SIGSEGV" in found["reason"]
        metrics = client.metrics()
        assert 'shmserve_model_instances{model="three",version="1",state="quarantined"} 1\n' in metrics
        crash.unlink()
        while entry_of(client, "three")["degraded"]:
            assert ask(client, "three", EVERYWHERE) == [2.0 * value for value in EVERYWHERE]
    assert server.log.count("it is quarantined (READY 2/3)") == 1
    assert server.log.count("leaves quarantine") == 1


def test_a_version_is_degraded_while_one_instance_cannot_load_and_unavailable_if_none_can(
    server: Server, folder: Path
) -> None:
    full = folder / "two.full"
    with server.client() as client:
        full.touch()
        first, second = (instance["pid"] for instance in entry_of(client, "two")["instances"])
        os.kill(first, signal.SIGKILL)
        while "the device is full" not in entry_of(client, "two")["reason"]:
            assert ask(client, "two", [1]) == [2.0]
        found = entry_of(client, "two")
        assert (found["state"], found["degraded"]) == ("READY", True)
        assert client.ready("two")
        os.kill(second, signal.SIGKILL)
        while entry_of(client, "two")["state"] == "READY":
            pass
        with pytest.raises(Unavailable, match="the device is full"):
            client.infer("two", {"x": np.ones((1, 1), np.float32)})
        full.unlink()
        client.wait_ready("two", timeout=60)
        assert ask(client, "two", [1]) == [2.0]


def test_a_model_is_not_ready_until_the_next_worker_has_loaded(server: Server, folder: Path) -> None:
    with server.client() as client:
        assert client.ready("gated")
        (instance,) = entry_of(client, "gated")["instances"]
        os.kill(instance["pid"], signal.SIGKILL)
        until(client, lambda: not client.ready("gated"))
        waiting = client.submit("gated", {"x": np.full((1, 1), 4, np.float32)})
        client.flush()
        assert not client.ready("gated")
        (folder / "models" / "gated" / "gate").write_text("")
        assert waiting.result(60)["y"] == 8
        assert client.ready("gated")
