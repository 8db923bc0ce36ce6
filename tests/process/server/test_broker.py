"""The broker process with real workers: start, signals, crashes, floods of messages, and clients that do not read."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.lib.processes import resident_bytes
from bench.lib.raw_client import ConnectionClosed, Lane, Zmq
from shmserve.protocol import codec
from shmserve.protocol.messages import Answer, Ask, Cancel, Fail, Goodbye, Infer, Reply, Tensor, Unmap
from tests.support.gateway.running_gateway import gated, open_gate
from tests.support.launch import Launched, identity
from tests.support.model_files import write_model

pytestmark = pytest.mark.process

CORE = max(os.sched_getaffinity(0))
BROKEN = 'name: "broken"\nbackend: "nonsense"\n'


def infer(number: int, model: str = "echo", timeout_us: int = 0) -> Infer:
    data = np.full((1, 2), number, np.float32).tobytes()
    return Infer(number, model, 0, (Tensor("x", "FP32", (1, 2), data),), None, timeout_us)


def answer_of(number: int) -> tuple[Tensor, ...]:
    return (Tensor("y", "FP32", (1, 2), np.full((1, 2), number, np.float32).tobytes()),)


def gated_infer(number: int, timeout_us: int = 0) -> Infer:
    """A request to the model that answers one request each time its gate is opened."""
    return Infer(number, "gated", 0, (Tensor("i_FP32", "FP32", (1, 1), bytes(4)),), None, timeout_us)


def is_live(lane: Lane) -> bool:
    lane.send(Ask(5, "live"))
    return bool(lane.receive_kind(Answer).body == b'{"live":true}')


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    identity(root, "echo")
    return root


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the server `running`."""
    return tmp_path_factory.mktemp("running")


@pytest.fixture(scope="module")
def gate(place: Path) -> Path:
    return gated(place / "models")


@pytest.fixture(scope="module")
def running(place: Path, gate: Path) -> Iterator[Launched]:
    """A server with one model that cannot be loaded."""
    identity(place / "models", "echo")
    write_model(place / "models", "broken", BROKEN)
    with Launched(place / "models", place / "run") as server:
        yield server


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """A server that throttles a client after 40 errors, with its workers on one core."""
    place = tmp_path_factory.mktemp("strict")
    identity(place / "models", "echo")
    options = ["--limit", "client_errors=40", "--host-policy", f"cpu,cpu-cores={CORE}", "--log-verbose", "2"]
    with Launched(place / "models", place / "run", *options) as server:
        yield server


def test_a_server_starts_answers_and_stops_on_sigint(repository: Path, tmp_path: Path) -> None:
    with Launched(repository, tmp_path / "run") as server:
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
        with Lane(server.lane) as lane:
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
    with Lane(running.lane) as lane, Zmq(running.zmq) as other:
        lane.hello("memfd")
        other.hello("frames")
        for number in range(1, 1500, 2):
            other.send(infer(number))
            lane.send(Ask(number, "live"), infer(number + 1))
            assert lane.receive_kind(Reply).request == number + 1
            assert other.receive_kind(Reply).request == number
        assert "ERROR" not in running.log[before:]


def test_a_stop_answers_requests_in_flight(tmp_path: Path) -> None:
    gate = gated(tmp_path / "models")
    with Launched(tmp_path / "models", tmp_path / "run") as server, Lane(server.lane) as lane:
        lane.hello("memfd")
        lane.send(*map(gated_infer, (1, 2, 3)), Ask(4, "live"))
        assert lane.receive_kind(Answer).body == b'{"live":true}'
        server.signal(signal.SIGTERM)
        while is_live(lane):
            pass  # until the signal has arrived
        lane.send(gated_infer(9))
        refused = lane.receive_kind(Reply, Fail)
        assert (refused.request, refused.code) == (9, "UNAVAILABLE")
        assert "stopping" in refused.text
        for number in (1, 2, 3):
            open_gate(gate)
            assert lane.receive_kind(Reply, Fail).request == number
        assert server.wait() == 0


def test_a_stop_fails_requests_after_the_exit_timeout(tmp_path: Path) -> None:
    identity(tmp_path / "models", "slow", batch=0, execute_delay_ms="60000")
    options = ("--exit-timeout-secs", "0.5")
    with Launched(tmp_path / "models", tmp_path / "run", *options) as server, Lane(server.lane) as lane:
        lane.hello("memfd")
        lane.send(Infer(1, "slow", 0, (Tensor("x", "FP32", (1,), b"\0" * 4),)), Ask(2, "live"))
        lane.receive_kind(Answer)
        server.signal(signal.SIGTERM)
        assert lane.receive_kind(Fail, seconds=20).code == "UNAVAILABLE"
        assert server.wait() == 0


def test_a_second_ctrl_c_fails_requests_in_flight(tmp_path: Path) -> None:
    gated(tmp_path / "models")
    options = ("--exit-timeout-secs", "3600")
    with Launched(tmp_path / "models", tmp_path / "run", *options) as server, Lane(server.lane) as lane:
        lane.hello("memfd")
        lane.send(gated_infer(1))
        server.signal(signal.SIGINT)
        while is_live(lane):
            pass  # until the signal has arrived
        server.signal(signal.SIGINT)
        failed = lane.receive_kind(Fail, seconds=20)
        assert (failed.request, failed.code) == (1, "UNAVAILABLE")
        assert server.wait() == 0
        assert "for up to 3600 s; Ctrl-C again fails them" in server.log
        assert "SIGINT again: failing the 1 request(s) in flight" in server.log
    assert list((tmp_path / "run").iterdir()) == []


def test_a_second_server_in_the_same_directory_is_refused(running: Launched, repository: Path) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "shmserve.broker.main", "--model-repository", str(repository)],
        env=os.environ | {"SHMSERVE_RUNTIME_DIR": str(running.runtime_dir)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 1
    assert "another server runs" in second.stderr
    with Lane(running.lane) as lane:
        lane.hello("memfd")
        assert is_live(lane)


def test_the_runtime_directory_is_locked_against_systemd_tmpfiles(running: Launched) -> None:
    """systemd-tmpfiles acquires this lock before it removes anything."""
    directory = os.open(running.runtime_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(directory)


def test_a_stopping_server_keeps_the_files_of_its_successor(repository: Path, tmp_path: Path) -> None:
    """A program that cleans temporary directories has removed the first server's files, and a second server was
    started."""
    with Launched(repository, tmp_path / "run") as first:
        shutil.rmtree(tmp_path / "run")
        with Launched(repository, tmp_path / "run") as second:
            assert first.stop() == 0
            with Lane(second.lane) as lane:
                lane.hello("memfd")
                assert is_live(lane)
            third = subprocess.run(
                [sys.executable, "-m", "shmserve.broker.main", "--model-repository", str(repository)],
                env=os.environ | {"SHMSERVE_RUNTIME_DIR": str(tmp_path / "run")},
                capture_output=True,
                text=True,
                check=False,
            )
            assert "another server runs" in third.stderr
    assert list((tmp_path / "run").iterdir()) == []


def test_workers_end_with_a_killed_broker_and_the_next_one_starts(repository: Path, tmp_path: Path) -> None:
    first = Launched(repository, tmp_path / "run")
    assert first.workers()
    first.kill()
    assert (tmp_path / "run" / "lane.sock").exists()
    with Launched(repository, tmp_path / "run") as server, Lane(server.lane) as lane:
        lane.hello("memfd")
        lane.send(infer(1))
        lane.receive_kind(Reply)


def test_a_client_that_disconnects_does_not_affect_others(running: Launched) -> None:
    with Lane(running.lane) as honest:
        honest.hello("memfd")
        for _ in range(20):
            with Lane(running.lane) as lane:
                lane.hello("memfd")
                lane.send(*[infer(n) for n in range(1, 40)])
        honest.send(infer(1))
        assert honest.receive_kind(Reply) == Reply(1, 1, answer_of(1))


def test_a_client_whose_outbox_is_full_is_disconnected_and_logged(repository: Path, tmp_path: Path) -> None:
    limits = ["--limit", "client_errors=0", "--limit", "client_outbox_bytes=512KiB"]
    with (
        Launched(repository, tmp_path / "run", *limits) as server,
        Lane(server.lane) as honest,
        Lane(server.lane) as silent,
    ):
        honest.hello("memfd")
        silent.hello("memfd")
        with pytest.raises((ConnectionClosed, OSError)):  # noqa: PT012
            for _ in range(40_000):
                silent.send(*[Unmap(1) for _ in range(1000)])  # each causes an error response
        honest.send(infer(1))
        honest.receive_kind(Reply)
        goodbye = silent.receive_kind(Goodbye)
        assert goodbye.code == "UNAVAILABLE"
        assert "client_outbox_bytes" in goodbye.text
    assert "does not read" in server.log


def test_a_client_that_does_not_read_is_paused_until_it_reads(running: Launched) -> None:
    with Lane(running.lane) as honest, Lane(running.lane) as silent:
        honest.hello("memfd")
        silent.hello("memfd")
        silent.limit_sends(2.0)
        resident = resident_bytes(running.process.pid)
        sent = 0
        with pytest.raises(BlockingIOError):  # the server has stopped receiving  # noqa: PT012
            while True:
                silent.send(*[Ask(sent + n, "metrics") for n in range(1, 101)])
                sent += 100
        honest.send(infer(1))
        honest.receive_kind(Reply)
        assert resident_bytes(running.process.pid) - resident < 256 << 20
        unanswered = set(range(1, sent + 1))
        while unanswered:
            answer = silent.receive_kind(Answer, Fail)
            if isinstance(answer, Fail):
                assert "(client_questions)" in answer.text
            if isinstance(answer, Fail) or not answer.more:
                unanswered.remove(answer.request)
        assert is_live(silent)


FLOOD = (Unmap(1),) * 40
"""Each message causes an error."""


def test_a_flood_of_errors_on_the_lane_is_throttled(strict: Launched) -> None:
    with Lane(strict.lane) as lane, Lane(strict.lane) as honest:
        lane.hello("memfd")
        honest.hello("memfd")
        lane.limit_sends(0.3)
        with pytest.raises(BlockingIOError):  # noqa: PT012
            for _ in range(20_000):
                lane.send(*FLOOD)  # until the socket is full
        honest.send(infer(1))
        honest.receive_kind(Reply)
        assert 40 <= len(lane.drain()) <= 600
        assert is_live(honest)


def test_a_flood_of_errors_over_zeromq_is_throttled_and_then_disconnected(strict: Launched) -> None:
    with Zmq(strict.zmq) as flood, Zmq(strict.zmq) as honest:
        flood.hello("frames")
        honest.hello("frames")
        flood.send(*FLOOD * 2)
        assert flood.receive_kind(Fail).code == "INVALID_ARG"
        flood.send(infer(1))  # waits until the errors are a second old
        honest.send(infer(2))
        assert honest.receive_kind(Reply).request == 2
        assert flood.receive_kind(Reply).request == 1
        flood.send(*FLOOD * 3)
        for number in range(1, 400):
            flood.send(infer(number))
        goodbye = flood.receive_kind(Goodbye)
        assert goodbye.code == "UNAVAILABLE"
        assert "client_errors" in goodbye.text
        flood.send(infer(1))  # it gets no answer, unless it sends Hello again
        honest.send(infer(3))
        assert honest.receive_kind(Reply).request == 3
        flood.hello("frames")
        flood.send(infer(2))
        assert flood.receive_kind(Reply, Goodbye) == Reply(2, 1, answer_of(2))


def test_the_backlog_of_a_throttled_zeromq_client_is_limited_in_bytes(strict: Launched) -> None:
    with Zmq(strict.zmq) as flood:
        flood.hello("frames")
        flood.send(*FLOOD * 3)
        for _ in range(12):
            flood.send_bytes(codec.encode([infer(1)]), (bytes(3 << 20),))
        goodbye = flood.receive_kind(Goodbye)
        assert goodbye.code == "UNAVAILABLE"
        assert "or 33554432 bytes while it was throttled" in goodbye.text


def test_cancel_and_deadline_reach_waiting_requests(running: Launched, gate: Path) -> None:
    with Lane(running.lane) as lane:
        lane.hello("memfd")
        lane.send(gated_infer(1), gated_infer(2), gated_infer(3, timeout_us=50_000), Cancel(2))
        ends = [lane.receive_kind(Reply, Fail) for _ in range(2)]
        assert [(end.request, end.code) for end in ends] == [(2, "CANCELLED"), (3, "DEADLINE_EXCEEDED")]
        open_gate(gate)
        assert lane.receive_kind(Reply, Fail).request == 1


def test_a_model_that_fails_to_load_does_not_affect_others(running: Launched) -> None:
    with Zmq(running.zmq) as client:
        client.hello("frames")
        client.send(Infer(1, "broken", 0, ()))
        assert "nonsense" in client.receive_kind(Fail).text
        client.send(infer(2))
        client.receive_kind(Reply)
        client.send(Ask(3, "ready"))
        assert client.receive_kind(Answer).body == b'{"ready":false,"settled":true,"out_of_service":false}'


def test_exit_on_error_ends_the_server_if_a_model_fails_to_load(repository: Path, tmp_path: Path) -> None:
    write_model(repository, "broken", BROKEN)
    with Launched(repository, tmp_path / "run", "--exit-on-error", "true", wait=False) as server:
        assert server.wait() == 1


def test_workers_run_on_their_cores_and_the_reason_for_a_batch_is_logged(strict: Launched) -> None:
    with Lane(strict.lane) as lane:
        lane.hello("memfd")
        lane.send(infer(1))
        lane.receive_kind(Reply)
    assert [os.sched_getaffinity(pid) for pid in strict.workers()] == [{CORE}]
    assert "1 rows in 1 requests, formed because: idle" in strict.log
