"""The broker process: start, signals, the files of its directory, floods of messages, and processes that run out of
descriptors, which announce lost segments again over a new connection."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from bench.lib.raw_client import RawLane, Zmq
from shmserve.errors import ConnectionLost
from shmserve.protocol import codec
from shmserve.protocol.messages import Answer, Ask, Fail, Goodbye, Infer, Map, Reply, Tensor, Unmap
from shmserve.protocol.roles import OPERATIONS, QUERIES
from shmserve.testing import Server
from shmserve.transport.lane import Lane as ClientLane
from shmserve.workers.link import BrokerLink as WorkerLink
from tests.support.launch import Launched, identity
from tests.support.living import await_connections
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process


def infer(number: int) -> Infer:
    data = np.full((1, 2), number, np.float32).tobytes()
    return Infer(number, "echo", 0, (Tensor("x", "FP32", (1, 2), data),))


def answer_of(number: int) -> tuple[Tensor, ...]:
    return (Tensor("y", "FP32", (1, 2), np.full((1, 2), number, np.float32).tobytes()),)


def is_live(lane: RawLane) -> bool:
    lane.send(Ask(5, "live"))
    return bool(lane.receive_kind(Answer).body == b'{"live":true}')


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    identity(root, "echo")
    return root


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    place = tmp_path_factory.mktemp("running")
    identity(place / "models", "echo")
    with Launched(place / "models", place / "run") as server:
        yield server


@pytest.mark.parametrize("what", QUERIES)
def test_every_query_in_the_table_of_actions_has_a_handler(running: Launched, what: str) -> None:
    with RawLane(running.lane) as lane:
        lane.hello("memfd")
        # Operations must change nothing: this body is no JSON, and there is no such model.
        lane.send(Ask(5, what, "nobody", body=b"[" if what in OPERATIONS else b""))
        answer = lane.receive_kind(Answer, Fail)
        assert isinstance(answer, Answer) or answer.code != "INTERNAL", answer


def test_a_server_starts_after_one_that_was_killed_and_stops_on_sigint(repository: Path, tmp_path: Path) -> None:
    first = Launched(repository, tmp_path / "run")
    assert first.workers()
    first.kill()  # the workers end with it
    assert (tmp_path / "run" / "lane.sock").exists()
    with Launched(repository, tmp_path / "run") as server:
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
        directory = os.open(tmp_path / "run", os.O_RDONLY | os.O_DIRECTORY)
        with pytest.raises(BlockingIOError):  # systemd-tmpfiles acquires this lock before it removes anything
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(directory)
        with RawLane(server.lane) as lane:
            lane.hello("memfd")
            lane.send(infer(1))
            assert lane.receive_kind(Reply) == Reply(1, 1, answer_of(1))
        server.signal(signal.SIGINT)
        assert server.wait() == 0
    assert list((tmp_path / "run").iterdir()) == []


def test_messages_reach_a_worker_in_the_order_of_turns(running: Launched) -> None:
    """Sending the answer to a question polls ZeroMQ in the middle of a turn. Requests that arrive at that point must
    wait until the orders of this turn have been sent."""
    before = len(running.log)
    with RawLane(running.lane) as lane, Zmq(running.zmq) as other:
        lane.hello("memfd")
        other.hello("frames")
        for number in range(1, 1500, 2):
            other.send(infer(number))
            lane.send(Ask(number, "live"), infer(number + 1))
            assert lane.receive_kind(Reply).request == number + 1
            assert other.receive_kind(Reply).request == number
        assert "ERROR" not in running.log[before:]


def test_a_stopping_server_keeps_the_files_of_its_successor(repository: Path, tmp_path: Path) -> None:
    """A program that cleans temporary directories has removed the first server's files, and a second server was
    started."""
    with Launched(repository, tmp_path / "run") as first:
        shutil.rmtree(tmp_path / "run")
        with Launched(repository, tmp_path / "run") as second:
            assert first.stop() == 0
            with RawLane(second.lane) as lane:
                lane.hello("memfd")
                assert is_live(lane)
            command = [sys.executable, "-m", "shmserve.broker.main", "--model-repository", str(repository)]
            third = subprocess.run([*command, "--runtime-dir", str(tmp_path / "run")], capture_output=True, text=True)
            assert (third.returncode, "another server runs" in third.stderr) == (1, True)
    assert list((tmp_path / "run").iterdir()) == []


def test_the_backlog_of_a_throttled_zeromq_client_is_limited_in_bytes(repository: Path, tmp_path: Path) -> None:
    with Launched(repository, tmp_path / "run", "--limit", "client_errors=40") as server, Zmq(server.zmq) as flood:
        flood.hello("frames")
        flood.send(*[Unmap(1)] * 120)  # each message causes an error
        for _ in range(12):
            flood.send_bytes(codec.encode([infer(1)]), (bytes(3 << 20),))
        goodbye = flood.receive_kind(Goodbye)
        assert goodbye.code == "UNAVAILABLE"
        assert "or 33554432 bytes while it was throttled" in goodbye.text


def test_a_server_with_a_missing_repository_runs_but_is_not_live(tmp_path: Path) -> None:
    options = ("--exit-on-error=false", "--model-control-mode=poll")
    with Server(tmp_path / "none", *options, gateway=True) as server, server.client() as client:
        for path, status in (("/v2/health/live", 400), ("/v2/health/ready", 400), ("/v2", 200)):
            with contextlib.closing(HTTPConnection(server.endpoints["http"], timeout=PATIENCE_S)) as connection:
                connection.request("GET", path)
                assert connection.getresponse().status == status
        assert client.models() == []
    assert "none is not a directory: serving no models; the server is neither live nor ready" in server.log


SIZE = 1 << 16


@contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """Within the block, the process cannot open any file."""
    taken = {int(entry.name) for entry in list(Path(f"/proc/{pid}/fd").iterdir()) if entry.is_symlink()}  # not our own
    free = next(number for number in range(len(taken) + 1) if number not in taken)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def echo(client: shmserve.Client, value: float, size: int = SIZE) -> None:
    x = np.full((1, size), value, np.float32)
    assert np.array_equal(client.infer("echo", {"x": x}, timeout=PATIENCE_S)["y"], x)


def test_a_client_announces_its_segments_again_over_a_new_connection(running: Launched) -> None:
    with shmserve.Client(f"unix://{running.lane}") as client, shmserve.Client(f"unix://{running.lane}") as other:
        echo(other, 1)
        client.metadata("echo")  # connected, with no segment yet
        await_connections(other, 2)
        with no_descriptors(running.process.pid):
            with pytest.raises(shmserve.Unavailable, match="too many open files"):
                echo(client, 2)
            echo(other, 3)  # its segments are now known
        for value in (4, 5):
            echo(client, value)
        echo(client, 6, 4 * SIZE)


@pytest.mark.parametrize("end", [ClientLane, WorkerLink], ids=["client", "worker"])
def test_clients_and_workers_close_a_connection_that_lost_descriptors(end: Callable[[socket.socket], Any]) -> None:
    """A client reconnects after ConnectionLost; a worker ends and is restarted."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = end(ours)
    with theirs, contextlib.closing(link), open(os.devnull) as file:
        socket.send_fds(theirs, [codec.encode([Map(1 << 32, 4096)])], [file.fileno()])
        with no_descriptors(os.getpid()), pytest.raises(ConnectionLost, match="RLIMIT_NOFILE"):
            link.receive(*((1.0,) if end is ClientLane else ()))
