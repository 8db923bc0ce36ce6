"""The broker's end of a link, against real sockets: everything that a peer sent before it ended is read, however it
ended."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from shmserve.broker.link import PeerLink
from shmserve.broker.listeners.client_link import ClientLink
from shmserve.broker.listeners.fair_turns import ClientTurns
from shmserve.broker.listeners.output_backlog import OutputBacklog
from shmserve.protocol import codec
from shmserve.protocol.messages import ClientMessage, Pong

uvloop.new_event_loop().close()
"""The first loop of a process creates a pipe that stays open."""
LAST = [Pong(number) for number in range(20)]


class Ends:
    """A link, its peer's socket, and the messages that the broker receives."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.heard: list[Any] = []
        self.ended: list[str] = []
        self.link = self.open(ours)

    def open(self, ours: socket.socket) -> PeerLink:
        return PeerLink(ours, 1, codec.Codec(ClientMessage), self.hear, self.end, self.loop)

    def hear(self, peer: int, messages: list[Any], descriptors: list[int]) -> None:
        self.heard += messages

    def end(self, peer: int, reason: str) -> None:
        self.ended.append(reason)

    def say(self, message: Any) -> None:
        self.link.outbox.append(message)
        self.link.flush(lambda _: None)

    def leave(self) -> None:
        """The peer sends its last messages, each in a separate packet, and ends."""
        for message in LAST:
            self.theirs.send(codec.encode([message]))
        self.theirs.close()

    def until(self, holds: Callable[[], object]) -> None:
        async def turns() -> None:
            while not holds():
                await asyncio.sleep(0)

        self.loop.run_until_complete(asyncio.wait_for(turns(), 60))


class ClientEnds(Ends):
    link: ClientLink

    def open(self, ours: socket.socket) -> ClientLink:
        def due() -> None:
            self.loop.call_soon(turns.begin)

        turns = ClientTurns(due)
        backlog = OutputBacklog(1 << 20, lambda peer, behind: None)
        kind = codec.Codec(ClientMessage)
        return ClientLink(ours, 1, "uid:1", kind, self.hear, self.end, self.loop, 1 << 20, turns, backlog)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    made: asyncio.AbstractEventLoop = request.param()
    yield made
    made.close()


@pytest.fixture
def ends(loop: asyncio.AbstractEventLoop) -> Iterator[Ends]:
    made = Ends(loop)
    yield made
    made.link.close("")
    made.theirs.close()


@pytest.fixture
def client(loop: asyncio.AbstractEventLoop) -> Iterator[ClientEnds]:
    made = ClientEnds(loop)
    yield made
    made.link.close("")
    made.theirs.close()


@pytest.mark.parametrize("unread", [0, 1, 5])
@pytest.mark.parametrize("more", [0, 1, 2])
def test_the_last_messages_of_a_peer_are_read_before_its_end(ends: Ends, unread: int, more: int) -> None:
    """Even if the peer left packets unread, which the kernel reports first, and if more is sent to it before its
    messages are read."""
    for number in range(unread):
        ends.say(Pong(number))
    ends.leave()
    for number in range(more):
        ends.say(Pong(number))
    assert not ends.ended
    ends.until(lambda: ends.ended)
    assert ends.heard == LAST
    assert ends.ended == [""]
    assert not ends.link.open


@pytest.mark.parametrize("unread", [0, 1])
def test_drain_reads_the_last_messages_of_a_process_that_has_ended(ends: Ends, unread: int) -> None:
    """Its last messages are read at once, before its end is processed."""
    for number in range(unread):
        ends.say(Pong(number))
    ends.leave()
    ends.link.drain()
    assert ends.heard == LAST
    assert ends.ended == [""]


def test_a_paused_link_is_read_only_after_the_pause(client: ClientEnds) -> None:
    """Nothing is read before the pause is over; the longest pause counts; then everything is read in order."""
    for number in range(3):
        client.theirs.send(codec.encode([Pong(number)]))
    client.link.pause(time.monotonic_ns() + 1_000_000)
    until = time.monotonic_ns() + 50_000_000
    client.link.pause(until)
    client.link.pause(until - 40_000_000)
    client.until(lambda: client.heard)
    assert time.monotonic_ns() >= until
    client.leave()
    client.until(lambda: client.ended)
    assert client.heard == [Pong(0), Pong(1), Pong(2), *LAST]


def test_a_pause_ends_with_the_link(client: ClientEnds) -> None:
    client.theirs.send(codec.encode(LAST))
    client.link.pause(time.monotonic_ns() + 1_000_000)
    client.link.close("enough")
    behind = client.loop.create_future()
    client.loop.call_later(0.002, behind.set_result, None)
    client.loop.run_until_complete(behind)
    assert client.ended == ["enough"]
    assert not client.heard


def test_the_last_messages_are_read_while_output_to_the_peer_is_blocked(ends: Ends) -> None:
    large = bytes(60_000)
    ends.link.outbox.append(Pong(1))
    while not ends.link._unsent:
        ends.link._send(large, [])
    ends.leave()
    ends.until(lambda: ends.ended)
    assert ends.heard == LAST
    assert ends.ended == [""]


def test_a_broken_link_drops_its_queue_at_the_first_packet(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """One system call and one callback for each of thousands of queued packets would stall the broker."""
    drains: list[PeerLink] = []
    monkeypatch.setattr(PeerLink, "drain", lambda link: drains.append(link))
    while len(ends.link._unsent) < 100:
        ends.say(Pong(1))
    ends.theirs.close()
    ends.link._writable()
    assert not ends.link._unsent
    ends.loop.run_until_complete(asyncio.sleep(0))
    assert len(drains) == 1
