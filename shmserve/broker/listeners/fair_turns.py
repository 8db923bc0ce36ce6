"""Schedules reading the input of clients: in fair turns, and not while a client is paused.

In each turn, the broker processes at most SHARE messages of one client and MESSAGES of all clients.

A link with more input is queued, and each turn serves this queue first: round-robin over users, and over the links of
each user. A client's wait therefore depends on how many users have input and how many links its own user has, but not
on the amount of input.

The core pauses clients that cause many errors (limit client_errors) rather than disconnecting them, so that they still
get the error texts. On the lane, the sends of a paused client block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shmserve.core.fair_queue import FairQueue
from shmserve.protocol.codec import Refused
from shmserve.protocol.messages import PACKET_MESSAGES, InferBatch

MESSAGES = 256
"""Messages per turn of all clients: about 3 ms of work. A request needs two or three turns."""
SHARE = 128
"""Messages per turn of one client; less if many clients wait. Exceeds the number of requests in one packet that could
run as one batch."""
BYTES = 2048
"""Decoding this many bytes costs about as much as processing a message, and is charged like one."""
CHEAP_BYTES = 4096
"""A link whose next packet is at most this large is served before other links of its user."""


def weight(messages: Sequence[Any]) -> int:
    """The cost of processing these messages; each request of an InferBatch counts as one."""
    if InferBatch not in map(type, messages):  # fast path, as this runs for every packet
        return len(messages)
    return sum(map(_weight, messages))


def _weight(message: Any) -> int:
    return max(1, len(message.columns.requests)) if type(message) is InferBatch else 1


def split(messages: list[Any], share: int) -> tuple[list[Any], list[Any]]:
    """Splits off the first messages, at least one, with a total weight of about `share`."""
    total = 0
    for index, message in enumerate(messages):
        if total >= share:
            return messages[:index], messages[index:]
        total += _weight(message)
    return messages, []


def refused(messages: Sequence[Any]) -> Refused | None:
    """The error for a packet with too many requests that must be delivered whole, because it has descriptors or
    frames."""
    count = weight(messages)
    if count <= PACKET_MESSAGES:
        return None
    return Refused(
        0,
        f"a packet with descriptors or frames has {count} requests and other messages, the limit is {PACKET_MESSAGES}",
    )


class ClientInput(Protocol):
    """The input of one client. `process_input` delivers up to `turns.share()` messages, and calls `wait` if it has
    more."""

    user: str

    def process_input(self) -> None: ...


class ClientTurns:
    """The queue of clients with more input. `due` is called when another turn must follow although nothing was
    delivered."""

    def __init__(self, due: Callable[[], None]) -> None:
        self._due = due
        self._remaining = MESSAGES
        self._waiting: FairQueue[ClientInput] = FairQueue()
        self._next: dict[ClientInput, bool] | None = None
        """Sources that called `wait` during `begin` -> heavy. They were served in this turn, so they are queued for the
        next one. None outside `begin`."""
        self._share = SHARE

    def share(self) -> int:
        """The number of messages that a client may deliver now; 0: it must call `wait`."""
        return self._share if self._remaining > 0 else 0

    def charge(self, messages: int) -> None:
        self._remaining -= messages

    def wait(self, source: ClientInput, heavy: bool) -> None:
        """Queues a source with more input that is not queued yet."""
        if self._next is not None:
            self._next[source] = heavy
        else:
            self._waiting.add(source.user, source, heavy)
        self._due()

    def leave(self, source: ClientInput) -> None:
        if self._next is None or self._next.pop(source, None) is None:
            self._waiting.remove(source.user, source)

    def begin(self) -> bool:
        """Begins a turn by serving the queued sources. True if some are still queued, so that another turn must
        follow."""
        self._remaining = MESSAGES
        waiting = self._waiting
        following: dict[ClientInput, bool] = {}
        self._next = following
        counts = waiting.counts()
        while waiting and self._remaining > 0:
            source = waiting.pop()
            self._share = max(1, min(SHARE, MESSAGES // len(counts) // counts[source.user]))
            self._remaining -= 1
            source.process_input()
        self._share = SHARE
        self._next = None
        for source, heavy in following.items():
            waiting.add(source.user, source, heavy)
        return bool(waiting)


class InputPause:
    """The pause of a client's input."""

    __slots__ = ("_loop", "_timer", "_until", "active")

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._timer: Any = None
        self._until = 0
        self.active = False

    def extend(self, until: int, resume: Callable[[], None]) -> None:
        """Pauses until a time of the monotonic clock, then calls `resume`. The latest time of several calls counts."""
        self._until = max(self._until, until)
        if not self.active:
            self.active = True
            self._arm(resume)

    def cancel(self) -> None:
        if self.active:
            self.active = False
            self._timer.cancel()

    def _arm(self, resume: Callable[[], None]) -> None:
        self._timer = self._loop.call_later((self._until - time.monotonic_ns()) / 1e9, self._check, resume)

    def _check(self, resume: Callable[[], None]) -> None:
        if self._until > time.monotonic_ns():  # it was extended
            self._arm(resume)
        else:
            self.active = False
            resume()
