"""kill -9 at random points: of clients, of workers, of the broker. All that they held is released.

Leaks are detected from outside. Workers have so little memory for outputs, and the broker for frames, that one answer
takes nearly all of it: it would not fit if anything were still held for a killed process.
"""

from __future__ import annotations

import os
import random
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.hostile.run import BrokerSnapshot, compare
from bench.lib import models, processes
from bench.lib.child import Child
from bench.lib.raw_client import Zmq
from bench.lib.setting import BenchServer
from bench.soak.run import SLOW
from shmserve import Client, ModelFailed
from shmserve.protocol import codec
from shmserve.protocol.messages import Fail, Infer, Reply, Tensor
from shmserve.testing import Server
from tests.support.model_files import python_model

pytestmark = pytest.mark.process

KILLS = int(os.environ.get("SHMSERVE_KILLS", "100"))
SEED = int(os.environ.get("SHMSERVE_SEED", "1"))
OUTPUT_BYTES = 8 << 20
FRAMES_BYTES = 1 << 20
SHM = Path("/dev/shm")
END_S = 30.0
NAMES = ("identity", "slow")
DIES = python_model(
    """
    from shmserve.shm.extents import posix

    create = posix.create
    def create_and_die(*args):
        self.extent = create(*args)  # the reference keeps it open: closing would remove the name
        os.kill(os.getpid(), signal.SIGKILL)
    if not x.all():
        posix.create = create_and_die
    return self.respond(x)
    """
)
"""A zero kills it after it has created a named segment and before the broker is told of it."""


def write_repository(root: Path) -> None:
    models.write(root, "identity", models.identity(max_batch=8), {})
    dims = {"x": ("FP32", [-1])}, {"y": ("FP32", [-1])}
    models.write(root, "slow", models.Model("python", *dims, max_batch=4, dynamic=True), {"model.py": SLOW})
    models.write(root, "dies", models.Model("python", *dims), {"model.py": DIES})


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_repository(root)
    return root


def serving(repository: Path) -> Server:
    memory = ("--worker-output-bytes", str(OUTPUT_BYTES), "--broker-arena-bytes", str(FRAMES_BYTES))
    return Server(repository, *memory)


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with serving(repository) as server:
        yield server


def fill(server: Server) -> None:
    """Requests answers that need all available memory. One segment of each worker remains."""
    whole = np.ones((1, (OUTPUT_BYTES - 4096) // 4), np.float32)
    for url in (server.zmq_url, server.url):  # named segments, then nameless ones
        with Client(url) as client:
            for name in NAMES:
                assert np.array_equal(client.infer(name, {"x": whole})["y"], whole)
    frame = bytes(FRAMES_BYTES - 4096)
    with Zmq(server.zmq_url.removeprefix("ipc://")) as link:
        link.hello("frames")
        infer = Infer(1, "identity", 0, (Tensor("x", "FP32", (1, len(frame) // 4), 0),))
        link.send_bytes(codec.encode([infer]), (frame,))
        reply = link.receive_kind(Reply, Fail)
        assert isinstance(reply, Reply), reply
        assert reply.outputs[0].data == frame


def kill(pid: int) -> None:
    """Kills a process and waits for its end."""
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        assert select.select([descriptor], [], [], END_S)[0], f"process {pid} has not ended"
    finally:
        os.close(descriptor)


def let_pass(seconds: float) -> None:
    """Waits a random time: until the next kill, not until an expected event."""
    select.select([], [], [], seconds)


def infer_right(client: Client, name: str, value: float) -> None:
    x = np.full((1, 20_000), value, np.float32)
    assert np.array_equal(client.infer(name, {"x": x})["y"], x)


def test_r13_memory_of_killed_clients_is_released(server: Server) -> None:
    roll = random.Random(SEED)
    fill(server)
    lane, zmq = (url.partition("://")[2] for url in (server.url, server.zmq_url))
    before = BrokerSnapshot.of(server.pid)
    with Child("tests.stress.kill9:nest", lane=lane, zmq=zmq) as nest, Client(server.url) as honest:
        alive: list[int] = []
        for number in range(KILLS * 4 // 5):
            alive.append(nest.ask(kind=("lane", "posix", "frames")[number % 3], seed=roll.getrandbits(30))["pid"])
            processes.seen(alive[-1])
            let_pass(roll.random() * 0.04)
            if len(alive) == 3:
                kill(alive.pop(roll.randrange(3)))
            infer_right(honest, NAMES[number % 2], number)
        for pid in alive:
            kill(pid)
    fill(server)
    _, worse = compare(BenchServer(server.runtime_dir), before)
    assert not worse, worse


def ready_pids(client: Client) -> dict[str, int]:
    """Model -> pid of its worker, for workers that can be killed now."""
    return {
        entry["name"]: instance["pid"]
        for entry in client.models()
        for instance in entry["instances"]
        if instance["state"] == "ready" and instance["pid"]
    }


@pytest.mark.parametrize("link", ["lane", "zmq"])
def test_r13_killed_workers_leave_no_memory_or_descriptors(server: Server, link: str) -> None:
    roll = random.Random(SEED)
    fill(server)
    before = BrokerSnapshot.of(server.pid)
    killed: list[int] = []
    failed: list[str] = []
    held: list[Any] = []
    with Client(server.url if link == "lane" else server.zmq_url) as client:
        for number in range(KILLS // 10):
            name = NAMES[number % 2]
            infer_right(client, name, number)  # its worker is ready
            pid = ready_pids(client)[name]
            processes.seen(pid)
            arrays = [np.full((1, int(60_000 ** roll.random())), roll.random(), np.float32) for _ in range(40)]
            calls = [client.submit(name, {"x": x}) for x in arrays]
            client.flush()
            let_pass(roll.random() * 0.02)
            kill(pid)
            killed.append(pid)
            for x, call in zip(arrays, calls, strict=True):
                try:
                    y = call.result(END_S)["y"]
                except ModelFailed as error:
                    failed.append(str(error))
                else:
                    held.append((x, y))
            # Views of a dead worker's memory stay unchanged.
            assert all(np.array_equal(x, y) for x, y in held)
            del held[:-20], arrays, calls
        held.clear()
        infer_right(client, "identity", 1)
        infer_right(client, "slow", 1)
    # Only requests that were alone in the batch in which their worker was killed.
    assert len(failed) <= 2 * len(killed)
    assert all("SIGKILL" in text for text in failed)
    assert not [path.name for pid in killed for path in SHM.glob(f"shmserve-{pid}-*")]
    fill(server)
    count, before.workers = len(before.workers), BrokerSnapshot.of(server.pid).workers
    assert len(before.workers) == count
    _, worse = compare(BenchServer(server.runtime_dir), before)
    assert not worse, worse


def test_a_worker_killed_while_it_creates_a_segment_leaves_no_file(server: Server) -> None:
    """The segment was not announced to the broker, so no client's handle can keep or release it."""
    with Client(server.zmq_url) as client, Client(server.url) as lane:
        client.wait_ready("dies", timeout=END_S)
        pid = ready_pids(client)["dies"]
        with pytest.raises(ModelFailed, match="SIGKILL"):
            client.infer("dies", {"x": np.zeros(20_000, np.float32)})
        assert not named([pid])
        lane.infer("dies", {"x": np.ones(4, np.float32)})  # its next worker is ready


def named(pids: list[int]) -> set[str]:
    return {path.name for pid in pids for path in SHM.glob(f"shmserve-{pid}-*")}


def test_r13_only_leftovers_of_a_killed_broker_are_removed(repository: Path) -> None:
    """There are also another server with its own named segments, and a name that is not shmserve's."""
    x = np.arange(20_000, dtype=np.float32).reshape(1, -1)
    stranger = SHM / f"stranger-{os.getpid()}"
    stranger.write_bytes(b"mine")
    try:
        with (
            serving(repository) as server,
            serving(repository) as other,
            Client(server.zmq_url, reconnect_timeout=END_S) as client,
            Client(other.zmq_url) as beside,
        ):
            y = client.infer("identity", {"x": x})["y"]
            z = beside.infer("identity", {"x": x})["y"]
            theirs = named([other.pid, *processes.descendants(other.pid)])
            dead = [server.pid, *processes.descendants(server.pid)]
            assert theirs
            assert named(dead), "else the sweep has nothing to do"
            for pid in dead[1:]:  # otherwise they might be quick enough to clean up
                os.kill(pid, signal.SIGSTOP)
            server.kill()  # its workers have also ended; a server of another test that starts now also sweeps
            server.start()
            assert not named(dead)
            assert named([other.pid, *processes.descendants(other.pid)]) == theirs
            assert stranger.read_bytes() == b"mine"
            assert np.array_equal(client.infer("identity", {"x": x})["y"], x)
            assert np.array_equal(beside.infer("identity", {"x": x})["y"], x)
            assert np.array_equal(y, x)
            assert np.array_equal(z, x)
            del y, z
    finally:
        stranger.unlink()
