"""A fair queue: round robin between users, then between the members of a user.

A user with a thousand connections delays another user by one member, not by all. Within a user, cheap members go before
heavy ones, so that a small message does not wait for a thousand large ones.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")
HEAVY_EVERY = 4
"""One in this many members taken from a user is a heavy one, so that they are delayed but not starved."""


class _User(Generic[T]):
    def __init__(self) -> None:
        self.cheap: deque[T] = deque()
        self.heavy: deque[T] = deque()
        self.taken = 0

    def __len__(self) -> int:
        return len(self.cheap) + len(self.heavy)

    def pop(self) -> T:
        member = self._next().popleft()
        self.taken += 1
        return member

    def first(self) -> T:
        return self._next()[0]

    def _next(self) -> deque[T]:
        heavy = self.heavy and (not self.cheap or (self.taken + 1) % HEAVY_EVERY == 0)
        return self.heavy if heavy else self.cheap


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self.users: dict[str, _User[T]] = {}
        """Next user first. Invariant: each user has members, so the dict is empty if and only if the queue is."""

    def __bool__(self) -> bool:
        return bool(self.users)

    def counts(self) -> dict[str, int]:
        return {user: len(turns) for user, turns in self.users.items()}

    def add(self, user: str, member: T, heavy: bool = False) -> None:
        """Appends behind the user's other members."""
        turns = self.users.get(user)
        if turns is None:
            turns = self.users[user] = _User()
        (turns.heavy if heavy else turns.cheap).append(member)

    def pop(self) -> T:
        """Removes and returns the next member."""
        user = next(iter(self.users))
        turns = self.users.pop(user)
        member = turns.pop()
        if turns:
            self.users[user] = turns  # behind the other users
        return member

    def first(self) -> T:
        """Returns the next member without removing it."""
        return next(iter(self.users.values())).first()

    def remove(self, user: str, member: T) -> None:
        turns = self.users[user]
        (turns.cheap if member in turns.cheap else turns.heavy).remove(member)
        if not turns:
            del self.users[user]

    def members(self) -> set[T]:
        return {member for turns in self.users.values() for member in (*turns.cheap, *turns.heavy)}
