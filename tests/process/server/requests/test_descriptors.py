"""Processes that run out of descriptors: lost segments are announced again over a new connection."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from bench.lib import models
from shmserve.errors import ConnectionLost
from shmserve.protocol import codec
from shmserve.protocol.messages import Map
from shmserve.transport.lane import Lane as ClientLane
from shmserve.workers.link import BrokerLink as WorkerLink
from tests.support.launch import Launched
from tests.support.living import await_connections
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

SIZE = 1 << 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    folder = tmp_path_factory.mktemp("descriptors")
    models.write(folder / "models", "identity", models.identity(max_batch=8), {})
    with Launched(folder / "models", folder / "run") as server:
        yield server


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


def identity(client: shmserve.Client, value: float, size: int = SIZE) -> None:
    x = np.full((1, size), value, np.float32)
    assert np.array_equal(client.infer("identity", {"x": x}, timeout=PATIENCE_S)["y"], x)


def test_a_client_announces_its_segments_again_over_a_new_connection(server: Launched) -> None:
    with shmserve.Client(f"unix://{server.lane}") as client, shmserve.Client(f"unix://{server.lane}") as other:
        identity(other, 1)
        client.metadata("identity")  # connected, with no segment yet
        await_connections(other, 2)
        with no_descriptors(server.process.pid):
            with pytest.raises(shmserve.Unavailable, match="too many open files"):
                identity(client, 2)
            identity(other, 3)  # its segments are now known
        for value in (4, 5):
            identity(client, value)
        identity(client, 6, 4 * SIZE)


@pytest.mark.parametrize("end", [ClientLane, WorkerLink], ids=["client", "worker"])
def test_clients_and_workers_close_a_connection_that_lost_descriptors(end: Callable[[socket.socket], Any]) -> None:
    """A client reconnects after ConnectionLost; a worker ends and is restarted."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = end(ours)
    with theirs, contextlib.closing(link), open(os.devnull) as file:
        socket.send_fds(theirs, [codec.encode([Map(1 << 32, 4096)])], [file.fileno()])
        with no_descriptors(os.getpid()), pytest.raises(ConnectionLost, match="RLIMIT_NOFILE"):
            link.receive(*((1.0,) if end is ClientLane else ()))
