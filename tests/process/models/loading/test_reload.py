"""Models that change under load. Answers name their generation; processes and memory are read from /proc."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.shm.extents import posix
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
BALLAST = living.GENERATION.replace(
    "def initialize(self, args):", "def initialize(self, args):\n        self.{0} = {1}"
)


class Asking(threading.Thread):
    """A client that always has requests in flight, and holds its last results."""

    def __init__(self, load: Load, url: str) -> None:
        super().__init__(name=f"asking {url[:4]}")
        self._load, self._url = load, url
        self._answered = threading.Event()
        self.seen: list[float] = []
        self.wrong: list[str] = []

    def run(self) -> None:
        load = self._load
        held: deque[tuple[float, np.ndarray]] = deque(maxlen=HELD)
        flying: deque[tuple[float, shmserve.Future]] = deque()
        with shmserve.Client(self._url) as client:
            try:
                while not load.stop.is_set() or flying:
                    while len(flying) < IN_FLIGHT and not load.stop.is_set():
                        flying.append((load.least, client.submit(load.model, {"x": LARGE})))
                    least, future = flying.popleft()
                    self._check(least, future.result(PATIENCE_S)["y"], held)
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
                self._answered.set()
        self.wrong += [f"what was held changed from {n}" for n, y in held if not np.array_equal(y, LARGE * n)]

    def _check(self, least: float, y: np.ndarray, held: deque[tuple[float, np.ndarray]]) -> None:
        number, most = y[0, 0].item(), self._load.most
        if y.shape != LARGE.shape or not (y == number).all():
            self.wrong.append(f"generations are mixed: {np.unique(y)}")
        if not least <= number <= most:
            self.wrong.append(f"{number} answered, where {least} to {most} were served")
        if not self.seen or self.seen[-1] != number:
            self.seen.append(number)
        held.append((number, y))
        self._answered.set()

    def await_answer(self) -> None:
        self._answered.clear()
        assert self._answered.wait(PATIENCE_S), self.wrong
        assert not self.wrong, self.wrong


class Load:
    """Clients over both links for the duration of a block. Answers between `least` and `most` are right.

    `least` applies to requests sent from then on.
    """

    def __init__(self, server: Server, model: str, number: float) -> None:
        self.model = model
        self.least = self.most = number
        self.stop = threading.Event()
        self._clients = [Asking(self, url) for url in 2 * (server.url, server.zmq_url)]

    def __enter__(self) -> Load:
        for asking in self._clients:
            asking.start()
        self.await_answers()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop.set()
        for asking in self._clients:
            asking.join(PATIENCE_S)
        wrong = [text for asking in self._clients for text in asking.wrong]
        assert kind is not None or not wrong, wrong[:5]

    def await_answers(self) -> None:
        """Waits until each client has received another answer."""
        for asking in self._clients:
            asking.await_answer()

    def seen(self) -> list[list[float]]:
        return [asking.seen for asking in self._clients]


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
    assert load.seen() == [[1, 2, 3, 4, 5]] * 4


def resident(pids: set[int]) -> int:
    """Private memory of these processes, in bytes."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        fields = {line.partition(":")[0]: line.split()[1] for line in lines[1:]}
        total += 1024 * (int(fields["Private_Clean"]) + int(fields["Private_Dirty"]))
    return total


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
    living.write(folder / "1" / "model.py", BALLAST.format("ballast", f"b'x' * {ballast}"))
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
