"""A process of another user with the role infer attacks the server; honest clients beside it are not affected.

After each attack the server has the same workers and no more descriptors, segments or memory than before.
tests/security tests what such a user can see and open, tests/process the invalid messages of any client.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.hostile.client import SECRETS
from bench.hostile.run import BrokerSnapshot, compare
from bench.lib import models
from bench.lib.child import Child
from bench.lib.raw_client import RawLane, RawSegment, Zmq
from bench.lib.setting import BenchServer
from bench.soak.run import SLOW
from shmserve import Client
from shmserve.protocol.messages import Fail, Handle, Infer, Map, Reply, Tensor
from shmserve.shm.extents import posix
from shmserve.testing import Server
from tests.support.patience import PATIENCE_S

pytestmark = [
    pytest.mark.xdist_group("second uid"),
    pytest.mark.process,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]

NOBODY = 65534
HELD = 8 << 20
REQUESTS = 100
CONNECTIONS = 20
LIMITS = (f"client_held_bytes={HELD}", f"client_requests={REQUESTS}", f"uid_connections={CONNECTIONS}",
          f"client_outbox_bytes={1 << 20}")  # fmt: skip
FP32 = {"x": ("FP32", [-1])}, {"y": ("FP32", [-1])}
STRINGS = np.array([[f"{number}".encode() * (number % 7) for number in range(500)]], object)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server whose directory everybody may enter, and to which this user may connect."""
    folder = Path(tempfile.mkdtemp(prefix="shmserve-test-"))
    folder.chmod(0o755)
    root = folder / "models"
    models.write(root, "identity", models.identity(max_batch=8), {})
    models.write(root, "strings", models.identity("STRING", max_batch=8), {})
    dims = {"x": ("FP32", [4])}, {"y": ("FP32", [4])}
    models.write(root, "lent", models.Model("identity", *dims, max_batch=8, dynamic=True), {})
    models.write(root, "slow", models.Model("python", *FP32, max_batch=4, dynamic=True), {"model.py": SLOW})
    options = [f"--access=uid:{NOBODY}=infer", *(f"--limit={limit}" for limit in LIMITS)]
    with Server(root, *options, runtime_dir=folder / "run") as server:
        server.runtime_dir.chmod(0o755)
        (server.runtime_dir / "lane.sock").chmod(0o666)
        for url in (server.url, server.zmq_url):  # memory that is allocated once exists before anything is compared
            with Client(url) as client:
                honest(client)
        with attack(server) as child:
            child.ask(do="flip", requests=40)
            child.ask(do="hold", most=50)
        yield server
    shutil.rmtree(folder)


def attack(server: Server) -> Child:
    return Child("tests.stress.hostile.attacker:attacker", path=str(server.runtime_dir / "lane.sock"), uid=NOBODY)


@pytest.fixture
def attacker(server: Server) -> Iterator[Child]:
    """The attacker, whose end is part of each test: nothing of it may be left then."""
    before = BrokerSnapshot.of(server.pid)
    with attack(server) as child:
        child.ready()
        yield child
    _, worse = compare(BenchServer(server.runtime_dir), before)
    assert not worse, worse


def honest(client: Client, rounds: int = 5) -> None:
    """Sends requests of all kinds, many at a time, and checks each answer."""
    for number in range(rounds):
        sent: list[tuple[str, Any]] = [
            ("strings", STRINGS),
            *(("identity", np.full((1, size), number, np.float32)) for size in (5, 1000, 16_384, 16_384)),
            ("slow", np.full((2, 7), number, np.float32)),
        ]
        calls = [client.submit(model, {"x": x}) for model, x in sent]
        for (_, x), call in zip(sent, calls, strict=True):
            y = call.result(PATIENCE_S)["y"]
            assert y.dtype == x.dtype
            assert np.array_equal(y, x)


def only(told: dict[str, int], *allowed: str) -> dict[str, int]:
    """The number of reports by pattern. Each report must be allowed and contain no secrets."""
    found = dict.fromkeys(allowed, 0)
    for text, count in told.items():
        assert not SECRETS.search(text), text
        matching = [pattern for pattern in allowed if re.match(pattern, text)]
        assert matching, f"{count} x {text}"
        found[matching[0]] += count
    return found


def test_r3_inputs_that_change_while_they_are_read(server: Server, attacker: Child) -> None:
    """Changes numbers and the lengths of strings. The attacker's own answers may be anything, or the right error."""
    attacker.tell(do="flip", requests=800)
    with server.client() as client:
        honest(client, 20)
    answer = attacker.answer()
    found = only(answer["told"], "Reply", "INVALID_ARG: .*'x'")
    assert found["Reply"] >= 400
    assert found["INVALID_ARG: .*'x'"]
    assert answer["rounds"] > 100, "it changed all the time"


def test_r16_memory_that_the_server_reads_cannot_be_truncated(server: Server, attacker: Child) -> None:
    found = attacker.ask(do="cut_inputs")
    # A hole only makes the reader see zeros.
    assert found["errors"] == {"shrink": errno.EPERM, "grow": errno.EPERM, "hole": 0}
    assert found["told"] == {"Reply": 4}
    with server.client() as client:
        honest(client)


def test_r20_a_stopped_client_with_held_memory_does_not_block_others(server: Server, attacker: Child) -> None:
    """The client reaches its own limit. Then it is stopped, while it holds responses and does not read its socket."""
    held = attacker.ask(do="hold", most=50)
    assert held["held"] <= HELD // (1 << 20) + 1
    assert held["told"].startswith("UNAVAILABLE")
    assert "client_held_bytes" in held["told"]
    stuffed = attacker.ask(do="stuff")
    assert stuffed["sent"] > 0
    os.kill(attacker.pid, signal.SIGSTOP)
    try:
        with server.client() as client:
            honest(client, 20)
            for url in (server.url, server.zmq_url):
                with Client(url) as other:
                    honest(other)
    finally:
        os.kill(attacker.pid, signal.SIGCONT)


def test_r20_a_flood_of_requests_does_not_block_others(server: Server, attacker: Child) -> None:
    attacker.tell(do="flood", model="slow", requests=5000)
    with server.client() as client:
        honest(client, 20)
    found = only(attacker.answer()["told"], "Reply", "UNAVAILABLE: .*client_requests")
    assert found["Reply"] >= REQUESTS
    assert found["UNAVAILABLE: .*client_requests"] > 0


def test_r21_a_flood_of_queries_does_not_block_others(server: Server, attacker: Child) -> None:
    """Thousands of queries on each connection; half of the connections end without reading an answer."""
    attacker.tell(do="ask_at_once", connections=CONNECTIONS - 1, questions=20_000, what="metadata")
    with server.client() as client:
        honest(client, 20)
        assert attacker.answer()["sent"] == CONNECTIONS - 1
        honest(client, 20)
        assert client.metadata("identity")["name"] == "identity"


def test_r12_unexpected_descriptors_are_closed(server: Server, attacker: Child) -> None:
    before = BrokerSnapshot.of(server.pid)
    for _ in range(3):
        found = attacker.ask(do="misplace")["told"]
        only(found, "INVALID_ARG", "PROTOCOL", "Pong", "Reply", "the end", "Fail")
    with server.client() as client:
        honest(client)
    with RawLane(str(server.runtime_dir / "lane.sock")) as lane:
        lane.hello("memfd")
        own = RawSegment(lane, 4096)  # and descriptors still arrive correctly
        lane.send(Infer(1, "identity", 0, (Tensor("x", "FP32", (1, 1024), own.put(0, bytes(4096))),)))
        assert isinstance(lane.receive_kind(Reply, Fail), Reply)
        own.close()
    now, _ = compare(BenchServer(server.runtime_dir), before)
    more = now.descriptors - before.descriptors
    assert sum(more.values()) <= 1, more  # the segment that the attacker still has


@pytest.mark.parametrize("what", ["flood", "silence", "descriptors"])
def test_a_client_that_does_not_release_its_lease_does_not_block_others(
    server: Server, attacker: Child, what: str
) -> None:
    attacker.ask(do="hold_lease", what=what)
    with server.client() as client:
        for number in range(40):
            x = np.full((1, 4), number, np.float32)
            assert np.array_equal(client.infer("lent", {"x": x}, timeout=PATIENCE_S)["y"], x)
        honest(client)


def test_r16_a_truncated_named_segment_fails_only_its_own_requests(server: Server) -> None:
    """Only the server's own user may use named segments. Other requests of the same batch succeed."""
    count = 64 * 1024
    extent = posix.create(4 * count)
    try:
        with Zmq(server.zmq_url.removeprefix("ipc://")) as link, server.client() as client:
            link.hello("posix")
            segment = link.owner << 32 | 1
            cut = Infer(1, "identity", 0, (Tensor("x", "FP32", (1, count), (Handle(segment, 0, 4 * count),)),))
            link.send(Map(segment, 4 * count, extent.name), cut)
            assert isinstance(link.receive_kind(Reply, Fail), Reply)
            os.truncate(f"/dev/shm{extent.name}", 0)
            told = []
            for number in range(5):
                xs = [np.full((1, count), number, np.float32) for _ in range(6)]
                calls = [client.submit("identity", {"x": x}) for x in xs]
                client.flush()
                link.send(Infer(2 + number, "identity", 0, cut.inputs))
                answer = link.receive_kind(Reply, Fail, seconds=30)
                assert isinstance(answer, Fail)
                assert not SECRETS.search(answer.text), answer.text
                told.append(f"{answer.code}: {answer.text}")
                for x, call in zip(xs, calls, strict=True):
                    assert np.array_equal(call.result(PATIENCE_S)["y"], x)
            # If it shared its batch, it is run again by the next worker, which cannot even map the segment.
            assert re.match("MODEL_FAILED.*SIGBUS|HANDLE_LOST", told[0]), told
            assert all(text.startswith("HANDLE_LOST") for text in told[1:]), told
            (identity,) = (entry for entry in client.models() if entry["name"] == "identity")
            assert identity["instances"][0]["restarts"] == 1
            honest(client)
    finally:
        extent.close()
