"""A link to a server, as both clients use one: it moves packets, and does not know what is in them."""

from __future__ import annotations

from typing import Protocol

from shmserve.clients.transport.address import Address
from shmserve.session import Incoming, Packet

CLOSED = "the client was closed before the answer came"
PAUSE_S = 0.01
"""Before a lost connection is made again; doubled after each failure, up to PAUSE_MOST_S."""
PAUSE_MOST_S = 0.25


class ServerLink(Protocol):
    """Any thread may send; one at a time may receive."""

    def send(self, packet: Packet) -> bool:
        """False: not now, the link is full. ConnectionLost when it has ended."""

    def receive(self, wait: float | None, to_send: bool = False, wakeable: bool = False) -> Incoming | None:
        """The next packet. None: nothing came within about `wait` seconds (None: no limit), or there is room again
        for what is `to_send`, or, if `wakeable`, `wake` was called. ConnectionLost when the link has ended."""

    def in_use(self) -> bool:
        """A thread is in the midst of it, and that may be this one: the collector runs anywhere. It must not send."""

    def wait_writable(self, wait: float | None) -> None:
        """Returns when there may be room again, or the time is over."""

    def wake(self) -> None:
        """Ends a `receive` of another thread that waits and is wakeable."""

    def descriptors(self) -> list[int]:
        """What an event loop watches for reading. They tell that something may have come: read until there is none."""

    def interrupt(self) -> None:
        """Ends the link for a thread that waits in `receive`, before `close`."""

    def close(self, linger: bool = False) -> None:
        """`linger`: what was sent last shall still arrive."""

    def abandon(self) -> None:
        """In a forked child: forgets the link without a word, as it is the parent's."""


def open_link(address: Address) -> ServerLink:
    """ConnectionLost where nobody listens. Of ZeroMQ it cannot be said yet: `receive` will tell."""
    if address.kind == "unix":
        from shmserve.clients.transport.lane import Lane

        return Lane(address)
    from shmserve.clients.transport.zmq import ZmqLink

    return ZmqLink(address)
