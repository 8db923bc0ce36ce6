"""The interface of links to a server. A link moves packets and does not interpret them."""

from __future__ import annotations

from typing import Protocol

from shmserve.clients.transport.address import Address
from shmserve.session import Incoming, Packet

CLOSED = "the client was closed before the response arrived"
PAUSE_S = 0.01
"""Delay before the first reconnect; doubled after each failure, up to PAUSE_MOST_S."""
PAUSE_MOST_S = 0.25


class ServerLink(Protocol):
    """Any thread may send; only one thread at a time may receive."""

    def send(self, packet: Packet) -> bool:
        """False if the link is full. Raises ConnectionLost when it has ended."""

    def receive(self, wait: float | None, to_send: bool = False, wakeable: bool = False) -> Incoming | None:
        """The next packet. None if nothing came within about `wait` seconds (None: no limit), if there is room again
        for a packet `to_send`, or, if `wakeable`, if `wake` was called. Raises ConnectionLost when the link has ended.
        """

    def in_use(self) -> bool:
        """Whether a thread is inside a call of this link. That may be the current thread, as the garbage collector runs
        anywhere; code that runs in the collector must then not send.
        """

    def wait_writable(self, wait: float | None) -> None:
        """Returns when there may be room again, or after `wait` seconds."""

    def wake(self) -> None:
        """Wake up a wakeable `receive` that waits in another thread."""

    def descriptors(self) -> list[int]:
        """Descriptors that an event loop watches for reading. They are only hints: read until nothing is left."""

    def interrupt(self) -> None:
        """End the link for a thread that waits in `receive`; called before `close`."""

    def close(self, linger: bool = False) -> None:
        """`linger`: still deliver what was sent last."""

    def abandon(self) -> None:
        """Forget the link in a forked child, without sending anything; it belongs to the parent."""


def open_link(address: Address) -> ServerLink:
    """Raises ConnectionLost if there is no listener. Over ZeroMQ, only `receive` can detect that."""
    if address.kind == "unix":
        from shmserve.clients.transport.lane import Lane

        return Lane(address)
    from shmserve.clients.transport.zmq import ZmqLink

    return ZmqLink(address)
