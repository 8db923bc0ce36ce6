"""Eviction: an endpoint at its connection limit closes the connections that have been idle longest."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from shmserve.gateway.http.limits import HttpLimits
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.listeners.callers import EVICTED, EndpointListener
from tests import ROOT
from tests.support.gateway.http_connection import connected, http_listener, post, receive, shared


class Connection:
    check_timeouts: Any = None
    stop = give_up = abort = check_timeouts

    def __init__(self, idle_since: float | None) -> None:
        self.idle_since = idle_since
        self.evicted = 0

    def evict(self) -> None:
        self.evicted += 1


def callers(connections: int) -> EndpointListener:
    loop: Any = SimpleNamespace(call_later=lambda *_: None, call_soon=lambda _: None, time=lambda: 0.0)
    return EndpointListener(shared(loop), lambda *_: None, HttpLimits(connections=connections), 1.0, Budget())


def test_a_full_endpoint_closes_the_longest_idle_connections() -> None:
    endpoint = callers(16)
    ones = [Connection(None if number % 2 else 100.0 - number) for number in range(16)]
    assert all(endpoint.enter(one) for one in ones)
    assert endpoint.enter(Connection(101.0))
    assert [number for number, one in enumerate(ones) if one.evicted] == [14]
    assert endpoint.connections == 16
    assert "http_connections_evicted_total 1\n" in endpoint.metrics("HTTP", "Answers", "status")


def test_idle_connections_are_evicted_some_at_a_time() -> None:
    endpoint = callers(4096)
    crowd = [Connection(float(number)) for number in range(4096)]
    assert all(endpoint.enter(one) for one in [*crowd, Connection(5000.0)])
    assert [one.evicted for one in crowd] == [1] * EVICTED + [0] * (4096 - EVICTED)
    left = endpoint.connections
    assert all(endpoint.enter(Connection(5000.0)) for _ in range(EVICTED - 1))
    assert endpoint.connections == left + EVICTED - 1 == 4096
    assert endpoint.evicted == EVICTED


def test_connections_in_use_are_not_closed() -> None:
    endpoint = callers(4)
    ones = [Connection(None) for _ in range(4)]
    assert all(endpoint.enter(one) for one in ones)
    refused = Connection(1.0)
    assert not endpoint.enter(refused)
    endpoint.leave(refused)
    assert not any(one.evicted for one in ones)


def test_when_an_http_connection_is_idle() -> None:
    listener = http_listener()
    connection, transport, echo, _ = connected(False, listener=listener)

    def idle_since() -> Any:
        return connection.idle_since

    assert idle_since() == 0.0
    receive(connection, post(b"x"))
    assert idle_since() is None, "its request is being answered"
    listener.now = lambda: 7.0
    echo.answers.pop()()
    assert idle_since() == 7.0
    transport.unsent = 1
    assert idle_since() is None, "the client does not read"
    transport.unsent = 0
    receive(connection, b"POST / HT")
    assert idle_since() is None, "a request is being received"
    listener.turn += 2
    assert idle_since() == 7.0, "too slowly"
    connection.evict()
    assert transport.closed


def test_the_metrics_are_documented() -> None:
    endpoint = callers(1)
    text = endpoint.metrics("HTTP", "", "status") + endpoint.metrics("gRPC", "", "code") + endpoint.shares.metrics()
    names = re.findall("# TYPE (\\S+)", text)
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert len(names) == 13
    assert not [name for name in names if f"- `{name}` (" not in page]
