"""When clients' input is read: in fair turns, and not while a client is paused.

Per turn of the broker at most SHARE messages of one client and MESSAGES of all are processed.

A link with more input waits in a queue, and each turn serves that queue first: users round-robin, and the links of a
user round-robin. So a client's wait depends on how many users have input, and on how many links its own user has, but
not on how much input they have.

The core pauses clients that cause many errors (the limit client_errors), instead of disconnecting them: they still get
the error texts that tell them what is wrong. On the lane a paused client's own sends block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shmserve.core.fair_queue import FairQueue
from shmserve.protocol.codec import Refused
from shmserve.protocol.messages import PACKET_MESSAGES, InferBatch

MESSAGES = 256
"""Per turn, for all clients: about 3 ms of work. A request needs two or three turns."""
SHARE = 128
"""Per turn and client, or less if many wait. More than the requests of one packet that could run as one batch."""
BYTES = 2048
"""Decoding this many bytes costs about as much as processing a message, and is charged as one."""
CHEAP_BYTES = 4096
"""A link whose next packet is at most this large is served before other links of its user."""


def weight(messages: Sequence[Any]) -> int:
    """What processing these messages costs: each request of an InferBatch counts."""
    if InferBatch not in map(type, messages):  # fast, as every packet pays for this
        return len(messages)
    return sum(map(_weight, messages))


def _weight(message: Any) -> int:
    return max(1, len(message.columns.requests)) if type(message) is InferBatch else 1


def split(messages: list[Any], share: int) -> tuple[list[Any], list[Any]]:
    """The first messages, at least one, with a total weight of about `share`; and the others."""
    total = 0
    for index, message in enumerate(messages):
        if total >= share:
            return messages[:index], messages[index:]
        total += _weight(message)
    return messages, []


def refused(messages: Sequence[Any]) -> Refused | None:
    """The error if a packet that must be delivered whole, as it has descriptors or frames, has too many requests."""
    count = weight(messages)
    if count <= PACKET_MESSAGES:
        return None
    return Refused(
        0,
        f"a packet with descriptors or frames has {count} requests and other messages, the limit is {PACKET_MESSAGES}",
    )


class ClientInput(Protocol):
    """The input of one client. `process_input` delivers up to `turns.share()` messages, and calls `wait` if there
    is more."""

    user: str

    def process_input(self) -> None: ...


class ClientTurns:
    """`due` is called when another turn must follow although nothing was delivered."""

    def __init__(self, due: Callable[[], None]) -> None:
        self._due = due
        self._left = MESSAGES
        self._waiting: FairQueue[ClientInput] = FairQueue()
        self._next: dict[ClientInput, bool] | None = None
        """Sources that called `wait` during `begin`: already served in this turn, they are queued for the next one.
        None outside `begin`. The value: heavy."""
        self._share = SHARE

    def share(self) -> int:
        """Messages that a client may deliver now; 0: it must call `wait`."""
        return self._share if self._left > 0 else 0

    def charge(self, messages: int) -> None:
        self._left -= messages

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
        """Begins a turn with the queued sources. True: some are still queued, so another turn must follow."""
        self._left = MESSAGES
        waiting = self._waiting
        following: dict[ClientInput, bool] = {}
        self._next = following
        counts = waiting.counts()
        while waiting and self._left > 0:
            source = waiting.pop()
            self._share = max(1, min(SHARE, MESSAGES // len(counts) // counts[source.user]))
            self._left -= 1
            source.process_input()
        self._share = SHARE
        self._next = None
        for source, heavy in following.items():
            waiting.add(source.user, source, heavy)
        return bool(waiting)


class InputPause:
    """Whether a client's input is paused."""

    __slots__ = ("_loop", "_timer", "_until", "active")

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._timer: Any = None
        self._until = 0
        self.active = False

    def extend(self, until: int, resume: Callable[[], None]) -> None:
        """Pauses until a time of the monotonic clock, then calls `resume`; the latest time counts."""
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
