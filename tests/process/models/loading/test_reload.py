"""Models that change under load. Answers name their generation; processes and memory are read from /proc."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.shm.extents import posix
from shmserve.system.procfs import anonymous_bytes
from shmserve.testing import Server
from tests.support import living
from tests.support.clients.client_faces import connect
from tests.support.launch import workers_of
from tests.support.living import answer, generation, group, pids, renew, states, until
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

OPTIONS = ()
"""A server of its own: its processes are counted."""
LARGE = np.ones((2, 30_000), np.float32)
"""Its answer is in shared memory: memfd on the lane, by name over ZeroMQ."""
HELD = 24
IN_FLIGHT = 3


class Load:
    """Clients over both links that always have requests in flight, for the duration of a block. An answer is right from
    `least`, as it was when the request was sent, to `most`."""

    def __init__(self, server: Server, model: str, number: float) -> None:
        self.model = model
        self.least = self.most = number
        self.seen: list[list[float]] = []
        self._urls = 2 * (server.url, server.zmq_url)
        self._stop = threading.Event()
        self._answered = [threading.Event() for _ in self._urls]

    def __enter__(self) -> Load:
        pool = ThreadPoolExecutor(len(self._urls))
        self._asking = [pool.submit(self._ask, *each) for each in zip(self._urls, self._answered, strict=True)]
        self.await_answers()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.seen = [asking.result(PATIENCE_S) for asking in self._asking]

    def await_answers(self) -> None:
        """Waits until each client has received another answer."""
        for answered in self._answered:
            answered.clear()
            assert answered.wait(PATIENCE_S)

    def _ask(self, url: str, answered: threading.Event) -> list[float]:
        """Returns the generations that answered, in their order."""
        seen: list[float] = []
        held: deque[tuple[float, np.ndarray]] = deque(maxlen=HELD)
        flying: deque[tuple[float, shmserve.Future]] = deque()
        with shmserve.Client(url) as client:
            while not self._stop.is_set() or flying:
                while len(flying) < IN_FLIGHT and not self._stop.is_set():
                    flying.append((self.least, client.submit(self.model, {"x": LARGE})))
                least, future = flying.popleft()
                y = future.result(PATIENCE_S)["y"]
                number = y[0, 0].item()
                assert np.array_equal(y, LARGE * number), "generations are mixed"
                assert least <= number <= self.most
                if seen[-1:] != [number]:
                    seen.append(number)
                held.append((number, y))
                answered.set()
        assert all(np.array_equal(y, LARGE * number) for number, y in held), "what was held has changed"
        return seen


def processes(server: Server) -> set[int]:
    """The pids of the server's workers."""
    return set(workers_of(server.pid))


def test_no_request_fails_during_reloads_under_load(server: Server, root: Path, client: shmserve.Client) -> None:
    folder = generation(root, "m", 1, "dynamic_batching { }\n" + group(2))
    client.load("m")
    with Load(server, "m", 1) as load:
        for number in range(2, 6):
            renew(folder, "three")
            broken = (
                "(?s)version 1 is at UNAVAILABLE state: .*could not convert .*; the previous version is still served"
            )
            with pytest.raises(shmserve.Unavailable, match=broken) as caught:
                client.load("m")
            assert str(root) not in str(caught.value)
            assert states(client, "m") == {"1": "READY"}
            renew(folder, number)
            load.most = number
            assert client.load("m")["changed"] is True
            load.least = number
            assert answer(client, "m") == number
            load.await_answers()
        until(client, lambda: processes(server) == set(pids(client, "m").values()), "the old ones have gone")
        assert len(pids(client, "m")) == 2
    assert load.seen == [[1, 2, 3, 4, 5]] * 4


def resident(pids: set[int]) -> int:
    """Private memory of these processes, in bytes."""
    return sum(anonymous_bytes(pid)[0] for pid in pids)


def segments(server: Server) -> tuple[int, int]:
    """Bytes of anonymous shared memory that the broker knows, and of named memory of its workers."""
    anonymous = 0
    folder = f"/proc/{server.pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            if "memfd:" in os.readlink(f"{folder}/{name}"):
                anonymous += os.stat(f"{folder}/{name}").st_blocks * 512
    workers, named = processes(server), 0
    for path in Path("/dev/shm").glob("shmserve-[0-9]*"):
        if int(path.name.split("-")[1]) in workers:
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                named += path.stat().st_blocks * 512
    return anonymous, named


@pytest.mark.parametrize("link", ["lane", "zmq"])
def test_unload_frees_memory(server: Server, root: Path, client: shmserve.Client, link: str) -> None:
    ballast, large = 64 << 20, np.ones((8, 1 << 20), np.float32)
    folder = generation(root, f"large_{link}", 1)
    begin = "def initialize(self, args):\n"
    source = living.GENERATION.replace(begin, f"{begin}        self.ballast = b'x' * {ballast}\n")
    living.write(folder / "1" / "model.py", source)
    with connect(server, f"sync {link}") as other:
        other.live()
        first = {server.pid}
        resting, resting_segments = resident(first), segments(server)
        client.load(folder.name)
        held = [other.infer(folder.name, {"x": large})["y"] for _ in range(2)]
        loaded = first | processes(server)
        assert len(loaded) == 2
        assert resident(loaded) > resting + ballast
        assert sum(segments(server)) >= 2 * large.nbytes
        client.unload(folder.name)
        assert processes(server) == set()
        assert resident(first) < resting + (8 << 20)
        assert all((y == 1).all() for y in held), "what a client holds stays readable"
        held.clear()
        other.flush()
        other.close()
    until(client, lambda: sum(segments(server)) <= sum(resting_segments) + (1 << 20), "segments are back")


def test_outputs_of_an_unloaded_model_survive_another_start(
    server: Server, root: Path, client: shmserve.Client
) -> None:
    """The starting server removes segments of dead processes, but not those that clients have yet to open by name."""
    generation(root, "swept", 1)
    client.load("swept")
    with shmserve.Client(server.zmq_url) as other:
        assert other.live()
        future = other.submit("swept", {"x": LARGE})
        other.flush()
        until(client, lambda: client.statistics("swept")["model_stats"][0]["execution_count"])
        client.unload("swept")
        posix.sweep()  # as a starting server does
        assert (future.result(PATIENCE_S)["y"] == 1).all()
