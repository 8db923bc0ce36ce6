"""Models that change under load. Answers name their generation; processes and memory are read from /proc."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.shm.extents import posix
from shmserve.testing import Server
from tests.support import living
from tests.support.clients.client_faces import connect
from tests.support.launch import workers_of
from tests.support.living import answer, generation, group, identity, index, pids, policy, ready, renew, states, until

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
                    self._check(least, future.result(living.PATIENCE_S)["y"], held)
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
        assert self._answered.wait(living.PATIENCE_S), self.wrong
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
            asking.join(living.PATIENCE_S)
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


# ------------------------------------------------------------------------------------------------ generations


def test_no_request_fails_during_reloads_under_load(server: Server, root: Path, client: shmserve.Client) -> None:
    folder = generation(root, "m", 1, "dynamic_batching { }\n" + group(2))
    client.load("m")
    with Load(server, "m", 1) as load:
        for number in range(2, 6):
            renew(folder, number)
            load.most = number
            assert client.load("m")["changed"] is True
            load.least = number
            assert answer(client, "m") == number
            load.await_answers()
        until(client, lambda: processes(server) == set(pids(client, "m").values()), "the old ones have gone")
        assert len(pids(client, "m")) == 2
    assert load.seen() == [[1, 2, 3, 4, 5]] * 4


def raises(folder: Path) -> None:
    renew(folder, "three")


def ends(folder: Path) -> None:
    living.write(folder / "1" / "model.py", "import os\nos._exit(3)\n")


LOADING = "load failed for model '{name}': version 1 is at UNAVAILABLE state: "


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (raises, rf"{LOADING}.*could not convert string to float: 'three'.*; the previous version is still served"),
        (ends, rf"{LOADING}.*exit code 3.*; the previous version is still served"),
    ],
)
def test_a_broken_generation_does_not_replace_the_served_one(
    server: Server,
    root: Path,
    client: shmserve.Client,
    break_it: Callable[[Path], None],
    reason: str,
) -> None:
    name = break_it.__name__
    folder = generation(root, name, 1)
    client.load(name)
    before = pids(client, name)
    with Load(server, name, 1) as load:
        break_it(folder)
        for _ in range(2):
            text = reason.replace("{name}", name)
            with pytest.raises(shmserve.ServeError, match=f"(?s){text}") as caught:
                client.load(name)
            assert str(root) not in str(caught.value)
        load.await_answers()
        assert pids(client, name) == before
        assert states(client, name) == {"1": "READY"}
        assert client.ready(name)
        living.write(folder / "config.pbtxt", living.PYTHON)
        living.write(folder / "1" / "model.py", living.GENERATION)
        renew(folder, 2)
        load.most = 2
        client.load(name)
        load.least = 2
        load.await_answers()
    assert load.seen() == [[1, 2]] * 4
    until(client, lambda: processes(server) == set(pids(client, name).values()))


# ------------------------------------------------------------------------------------------------ in place


def test_a_change_of_the_version_policy_keeps_other_versions(
    server: Server, root: Path, client: shmserve.Client
) -> None:
    """So does a change of the number of instances."""
    folder = generation(root, "versions", 1, policy("latest { num_versions: 1 }"))
    generation(root, "versions", 2, policy("latest { num_versions: 1 }"), version=2)
    client.load("versions")
    assert ready(client, "versions") == ["2"]
    kept = pids(client, "versions")
    with Load(server, "versions", 2) as load:
        for text, expected in {
            policy("all { }"): ["1", "2"],
            policy("all { }") + group(2): ["1", "2"],
            policy("latest { num_versions: 1 }") + group(2): ["2"],
        }.items():
            living.write(folder / "config.pbtxt", living.PYTHON + text)
            client.load("versions")
            assert ready(client, "versions") == expected
            assert kept.items() <= pids(client, "versions").items(), "the version that stays is not restarted"
            for version in expected:
                assert answer(client, "versions", int(version)) == int(version)
            load.await_answers()
        with pytest.raises(shmserve.Unavailable, match="'versions' version 1 is not at ready state"):
            answer(client, "versions", 1)  # unloading, or unloaded
        assert load.seen() == [[2]] * 4


# ------------------------------------------------------------------------------------------------ restarts


def test_no_request_fails_during_restarts_under_load(server: Server, root: Path, client: shmserve.Client) -> None:
    generation(root, "again", 1, "dynamic_batching { }\n" + group(3))
    client.load("again")
    with Load(server, "again", 1) as load:
        before = pids(client, "again")
        for name in ("again_0_1", "again_0_0"):
            client.restart("again", instance=name)
            after = pids(client, "again")
            assert {key for key in before if before[key] != after.get(key)} == {f"1 {name}"}
            load.await_answers()
            before = after
        client.restart("again")
        assert not set(before.values()) & set(pids(client, "again").values())
        load.await_answers()
        until(client, lambda: processes(server) == set(pids(client, "again").values()))


# ------------------------------------------------------------------------------------------------ unloading


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


def test_unload_finishes_requests_in_flight(server: Server, root: Path, client: shmserve.Client) -> None:
    generation(root, "leaving", 1)
    for url in (server.url, server.zmq_url):
        client.load("leaving")
        with shmserve.Client(url) as other:
            futures = [other.submit("leaving", {"x": LARGE}) for _ in range(20)]
            futures[0].result(living.PATIENCE_S)
            assert other.live(), "the connection is lost"  # sent after the others, which the unload must not overtake
            client.unload("leaving")
            answers = [future.result(living.PATIENCE_S)["y"] for future in futures]
            assert all((y == 1).all() for y in answers)
            with pytest.raises(shmserve.NotFound):
                answer(other, "leaving")
    assert states(client, "leaving") == {"1": "UNAVAILABLE"}
    assert index(client, "leaving")["leaving/1"]["reason"] == "unloaded"


def test_outputs_of_an_unloaded_model_survive_the_start_of_another_server(
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
        assert (future.result(living.PATIENCE_S)["y"] == 1).all()


def test_unloading_a_loading_model_fails_the_load(
    server: Server, root: Path, client: shmserve.Client, tmp_path: Path
) -> None:
    """The model never becomes READY, and the load call fails."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    folder = identity(root, "slow")
    living.write(folder / "config.pbtxt", living.PYTHON)
    living.write(folder / "1" / "model.py", BALLAST.format("gate", f"open({str(gate)!r}).read()"))
    outcomes: list[str] = []

    def load() -> None:
        with server.client() as other, pytest.raises(shmserve.Unavailable) as error:
            other.load("slow")
        outcomes.append(str(error.value))

    asker = threading.Thread(target=load)
    asker.start()
    end = os.open(gate, os.O_WRONLY)  # returns when the model reads
    assert states(client, "slow") == {"1": "LOADING"}
    client.unload("slow")
    asker.join(living.PATIENCE_S)
    os.close(end)
    assert len(outcomes) == 1
    assert "Newer operation has been applied to the model lifecycle" in outcomes[0]
    assert processes(server) == set()
