"""The client's end of a lane: where it connects, and its receive timeout."""

from __future__ import annotations

import contextlib
import socket

import pytest

import shmserve
from shmserve.clients.transport.lane import Lane


@pytest.mark.parametrize(
    ("length", "error", "text"),
    [(107, shmserve.ConnectionLost, "no server at"), (108, shmserve.InvalidRequest, r"too long for a socket \(107")],
)
def test_the_length_of_a_path(length: int, error: type[Exception], text: str) -> None:
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
            limits.append(lane._limit)
    assert limits == [0.01, 5, 5, 2, 2, 0.04, 0.04, 0.5, None, 0.04]
