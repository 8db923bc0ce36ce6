"""What the gRPC listener adds to its connections: deadlines, and an end for silent clients."""

from __future__ import annotations

from typing import Any

from shmserve.gateway.http2.connection import LAST_CALLS_S, Http2Connection
from shmserve.gateway.http2.limits import Http2Limits
from shmserve.gateway.http2.listener import DEADLINE_S, RpcListener
from shmserve.gateway.limits.body_budget import Budget
from tests.support.gateway.http2_caller import Caller, Host, Unfinished
from tests.support.gateway.http2_frames import HEAD, HELLO, block, frame
from tests.support.gateway.http_connection import receive, shared
from tests.support.gateway.manual_loop import ManualLoop


def test_deadlines_are_kept_in_any_order() -> None:
    loop: Any = ManualLoop()
    listener: Any = RpcListener(shared(loop), Http2Connection, Unfinished, Http2Limits(), Budget(), lambda: None)
    caller = Caller(listener, opening=HELLO)
    for number, timeout in ((1, "1H"), (3, "50m"), (5, "150m"), (7, "100m")):
        caller.raw([frame(HEAD, 5, number, block(("grpc-timeout", timeout)))])

    def ended(seconds: float) -> list[int]:
        loop.advance(seconds)
        answers = [(stream, payload) for kind, _, stream, payload in caller.raw([]) if kind == HEAD]
        assert all(b"Deadline Exceeded" in payload for _, payload in answers)
        return [stream for stream, _ in answers]

    assert ended(0.05) == []
    assert ended(2 * DEADLINE_S) == [3]
    assert ended(0.1) == [7, 5]
    assert ended(3590) == []
    assert ended(20) == [1]
    assert listener.answers == {4: 4}


def test_a_client_that_does_not_answer_does_not_delay_the_end() -> None:
    host = Host()
    connection, transport = host.connect()
    receive(connection, HELLO)
    connection.stop()
    host.loop.advance(LAST_CALLS_S - 0.01)
    assert not transport.closed
    host.loop.advance(0.01)
    assert transport.closed
