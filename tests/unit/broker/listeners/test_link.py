"""The broker's end of a link, against real sockets: everything that a peer sent before it ended is read, however it
ended."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import uvloop

from shmserve.broker.link import EagerFlow, PeerLink
from shmserve.protocol import codec
from shmserve.protocol.messages import ClientMessage, Pong

uvloop.new_event_loop().close()
"""The first loop of a process creates a pipe that stays open."""
LAST = [Pong(number) for number in range(20)]


class Ends:
    """A link, its peer's socket, and the messages that the broker receives."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.heard: list[Any] = []
        self.ended: list[str] = []
        self.link = PeerLink(
            self.ours, 1, codec.Codec(ClientMessage), partial(EagerFlow, deliver=self.hear), self.end, loop
        )

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

    def fill(self) -> None:
        """Blocks the output to the peer."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.ours.send(bytes(60_000), socket.MSG_DONTWAIT)

    def until(self, holds: Callable[[], object]) -> None:
        async def turns() -> None:
            while not holds():
                await asyncio.sleep(0)

        self.loop.run_until_complete(asyncio.wait_for(turns(), 60))


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


@pytest.mark.parametrize("unread", [0, 1, 5])
@pytest.mark.parametrize("more", [0, 1, 2])
@pytest.mark.parametrize("drain", [True, False])
def test_the_last_messages_of_a_peer_are_read_before_its_end(ends: Ends, unread: int, more: int, drain: bool) -> None:
    """Even if the peer left packets unread, which the kernel reports first, and if more is sent to it before its
    messages are read. `drain` reads them at once, for a process that has ended."""
    for number in range(unread):
        ends.say(Pong(number))
    ends.leave()
    for number in range(more):
        ends.say(Pong(number))
    assert not ends.ended
    if drain:
        ends.link.flow.drain()
        assert ends.ended
    ends.until(lambda: ends.ended)
    assert (ends.heard, ends.ended, ends.link.open) == (LAST, [""], False)


def test_the_last_messages_are_read_while_output_to_the_peer_is_blocked(ends: Ends) -> None:
    ends.fill()
    ends.say(Pong(1))
    ends.leave()
    ends.until(lambda: ends.ended)
    assert (ends.heard, ends.ended) == (LAST, [""])


def test_a_link_that_waits_for_its_peer_to_read_ends_once(ends: Ends) -> None:
    ends.fill()
    ends.link.closing = True
    ends.say(Pong(1))
    assert ends.ended == [""]
    ends.link.cut_off("it has too much unsent output")  # by the limit on the output of all clients
    assert ends.ended == [""]
