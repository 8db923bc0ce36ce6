"""The client's end of a lane: where it connects, its receive timeout, and the sockets of leases."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import pytest

import shmserve
from shmserve.protocol.messages import PACKET_BYTES
from shmserve.session import Packet
from shmserve.transport.lane import Lane
from tests.support.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("length", "error", "text"),
    [(107, shmserve.ConnectionLost, "no server at"), (108, shmserve.InvalidRequest, r"too long for a socket \(107")],
)
def test_socket_paths_over_the_length_limit_are_refused(length: int, error: type[Exception], text: str) -> None:
    path = "/" + "é" * ((length - 1) // 2) + "x" * ((length - 1) % 2)
    with shmserve.Client(f"unix://{path}") as client, pytest.raises(error, match=text):
        client.metadata()


def test_the_receive_timeout_is_changed_only_if_it_is_too_long_or_much_too_short() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, contextlib.closing(Lane(ours)) as lane:
        limits = []
        for wait in (0.01, 10, 8, 4, 0.0, 0.04, 0.1, 1, None, 0.04):
            theirs.send(b"packet")
            incoming = lane.receive(wait)
            assert incoming is not None
            assert bytes(incoming[0]) == b"packet"
            seconds, us = struct.unpack("ll", ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
            limits.append(seconds + us / 1e6)
    expected = [0.01, 5, 5, 2, 2, 0.04, 0.04, 0.5, 0, 0.04]  # 0: no limit
    assert limits == pytest.approx(expected, abs=0.01), "the kernel rounds to its ticks"


@pytest.fixture
def leased() -> Iterator[tuple[Lane, socket.socket]]:
    """A lane with lease 5, and the worker's end of its socket."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    (ours, theirs), (client, worker) = pairs
    with theirs, worker, contextlib.closing(Lane(ours)) as lane:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's minimum
        lane.open_lease(5, client.detach())
        yield lane, worker


def test_a_request_that_cannot_be_sent_ends_its_lease(leased: tuple[Lane, socket.socket]) -> None:
    lane, worker = leased
    worker.settimeout(PATIENCE_S)
    assert lane.send(Packet(b"small", lease=5))
    assert worker.recv(PACKET_BYTES) == b"small"
    assert lane.send(Packet(bytes(PACKET_BYTES), lease=5))
    assert worker.recv(PACKET_BYTES) == b""


def test_an_answer_is_read_although_the_worker_has_not_read_the_next_request(
    leased: tuple[Lane, socket.socket],
) -> None:
    lane, worker = leased
    worker.send(b"answer")
    assert lane.send(Packet(b"next", lease=5))
    worker.close()  # resets the connection
    assert lane.close_lease(5) == [b"answer"]
