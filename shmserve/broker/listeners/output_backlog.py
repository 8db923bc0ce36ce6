"""Output that clients have not read yet, counted per user and in total.

Invariant: no user exceeds a quarter of the limit, and all users together do not exceed the limit. To maintain it, the
client that has read nothing for the longest time is disconnected, so that clients that read are not affected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

BEHIND_BYTES = 1 << 20
"""A client with more unread output is behind: the broker neither reads its messages nor answers its queries. It has
caught up at half of this. A single answer may be larger than this."""
USERS = 4
"""The limit for the clients of one user is the total divided by this."""


class OutputReader(Protocol):
    peer: int
    user: str

    def cut_off(self, behind: str) -> None:
        """Disconnects the client and calls `removed`."""


class OutputBacklog:
    """`changed(peer, behind)` is called when a client falls behind or catches up."""

    def __init__(self, limit: int, changed: Callable[[int, bool], None]) -> None:
        self.changed = changed
        self._limit = limit
        self._bytes: dict[OutputReader, int] = {}
        """Clients with unread output. The client that has read nothing for the longest time comes first."""
        self._of_users: dict[str, int] = {}
        self._total = 0

    def add(self, reader: OutputReader, size: int) -> None:
        self._count(reader, size)
        self._bytes[reader] = self._bytes.get(reader, 0) + size
        limit = self._limit // USERS
        while (unsent := self._of_users.get(reader.user, 0)) > limit:
            slowest = next(other for other in self._bytes if other.user == reader.user)
            slowest.cut_off(f"{unsent} unsent bytes for clients of this user, over the limit of {limit} (outbox_bytes)")
        while self._total > self._limit:
            slowest = next(iter(self._bytes))
            slowest.cut_off(
                f"{self._total} unsent bytes for all clients, over the limit of {self._limit} (outbox_bytes)"
            )

    def read(self, reader: OutputReader, size: int) -> None:
        remaining = self._bytes.pop(reader, 0)
        if remaining:
            self._count(reader, -size)
        if remaining > size:
            self._bytes[reader] = remaining - size  # move to the end

    def removed(self, reader: OutputReader) -> None:
        self._count(reader, -self._bytes.pop(reader, 0))

    def _count(self, reader: OutputReader, size: int) -> None:
        self._total += size
        unsent = self._of_users.get(reader.user, 0) + size
        if unsent:
            self._of_users[reader.user] = unsent
        else:
            self._of_users.pop(reader.user, None)
