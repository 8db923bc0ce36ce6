"""The gateway's connection to the broker: when it returns outputs, and when it looks for packets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.gateway.upstream.link import RETURN_BYTES, GatewayLink
from shmserve.protocol import codec
from shmserve.protocol.messages import Answer, Ask, ClientMessage, Handle, Ping, Return
from shmserve.session.ticket import Ticket
from tests.support.gateway.manual_loop import ManualLoop

LARGE = 600 * 1024


class Loop(ManualLoop):
    def __init__(self) -> None:
        super().__init__()
        self.timers: list[Callable[[], Any]] = []
        self.call_soon_threadsafe = self.call_soon

    def is_closed(self) -> bool:
        return False

    def call_later(self, delay: float, callback: Callable[[], Any]) -> Any:
        self.timers.append(callback)
        return SimpleNamespace(cancel=lambda: self.timers.remove(callback))


class Server:
    """The server's end of the link."""

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []
        self.packets: list[bytes] = []
        self.looked = 0

    def send(self, packet: Any) -> bool:
        self.sent.append(codec.Codec(ClientMessage).decode(packet.data))
        return True

    def receive(self, wait: float | None) -> Any:
        self.looked += 1
        return (self.packets.pop(0), [], []) if self.packets else None

    def descriptors(self) -> list[int]:
        return []


class Query(Ticket):
    answer: Any = None

    def settle(self, answer: Any) -> None:
        self.answer = answer

    def fail(self, error: Any) -> None:
        self.answer = error


@pytest.fixture
def connected() -> Iterator[tuple[Any, Loop, Server]]:
    link: Any = GatewayLink("unix:///nowhere", None, "gateway", 1 << 20)
    loop, server = Loop(), Server()
    link._loop, link._link = loop, server
    link.bind = lambda: loop
    yield link, loop, server
    link._link = None
    link.session.close()


def drop(link: Any, offset: int, size: int = LARGE) -> Handle:
    handle = Handle(7, offset, size)
    link.session.memory.drops.dropped(handle)
    return handle


def test_large_outputs_are_returned_with_the_next_request(connected: Any) -> None:
    link, loop, server = connected
    handle = drop(link, 0)
    loop.run()
    assert not server.sent
    link.session.ask(Query(), "status", 0.0)
    link.send_soon()
    loop.run()
    [[returned, asked]] = server.sent
    assert returned == Return((handle,))
    assert type(asked) is Ask
    loop.timers.pop()()
    assert len(server.sent) == 1, "nothing is left to return"


def test_large_outputs_are_returned_alone_if_no_request_comes(connected: Any) -> None:
    link, loop, server = connected
    handles = (drop(link, 0), drop(link, LARGE))
    assert not server.sent
    [timer] = loop.timers
    timer()
    assert server.sent == [[Return(handles)]]
    drop(link, 0)
    assert len(loop.timers) == 2, "the next outputs have a timer of their own"


def test_many_bytes_are_returned_at_once(connected: Any) -> None:
    link, loop, server = connected
    handle = drop(link, 0, RETURN_BYTES)
    loop.run()
    assert server.sent == [[Return((handle,))]]
    assert not loop.timers


def test_packets_are_received_while_answers_are_due(connected: Any) -> None:
    link, _, server = connected
    queries = [Query(), Query()]
    for query in queries:
        link.session.ask(query, "status", 0.0)
    server.packets = [codec.encode([Answer(query.number, b'"yes"')]) for query in queries]
    server.packets.append(codec.encode([Ping(1)]))
    link._readable()
    assert [query.answer for query in queries] == ["yes", "yes"]
    assert server.looked == 2, "no packet is expected after the last answer"
    link._readable()
    assert not server.packets, "one that comes nevertheless is received"
