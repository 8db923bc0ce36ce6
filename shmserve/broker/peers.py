"""What arrives from peers and goes to them between two turns of the broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmserve.broker.link import PeerLink
from shmserve.broker.listeners.zmq_router import ZmqOutbox
from shmserve.core import events
from shmserve.core.events import Event
from shmserve.protocol.messages import Answer, Fail

Link = PeerLink | ZmqOutbox


class Inbox:
    """The events since the last turn. What arrives before `begin` waits for the first turn."""

    def __init__(self, loop: Any) -> None:
        self.events: list[Event] = []
        self.is_due = False
        """A turn that takes the events is scheduled, or has begun."""
        self._loop = loop
        self._turn: Callable[[], None] | None = None

    def begin(self, turn: Callable[[], None]) -> None:
        """Runs `turn` once now, and from now on whenever something has arrived."""
        self._turn = turn
        self.wake()

    def put(self, event: Any) -> None:
        """Adds an event that is not a message of a peer."""
        self.put_from(0, event)

    def put_from(self, peer: int, event: Any) -> None:
        self.events.append((peer, event))
        self.wake()

    def wake(self) -> None:
        """Schedules a turn."""
        if not self.is_due and self._turn is not None:
            self.is_due = True
            self._loop.call_soon(self._turn)

    def hold(self) -> None:
        """Begins a turn: what arrives until `take` belongs to it."""
        self.is_due = True

    def take(self) -> list[Event]:
        taken, self.events = self.events, []
        self.is_due = False
        return taken


class Peers:
    """The links of all peers, and those with messages to be sent at the end of the turn."""

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox
        self.links: dict[int, Link] = {}
        self.unsent: dict[Link, None] = {}

    def send(self, peer: int, message: Any) -> None:
        """Sends a message other than the result of a request, at the end of the next turn."""
        kind = type(message)
        if kind is Fail or (kind is Answer and not message.more):
            self.inbox.put(events.Answered(peer, message.request))
        link = self.links.get(peer)
        if link is not None:
            link.outbox.append(message)
            self.unsent[link] = None
            self.inbox.wake()

    def remove(self, peer: int) -> None:
        link = self.links.pop(peer, None)
        if link is not None:
            self.unsent.pop(link, None)
