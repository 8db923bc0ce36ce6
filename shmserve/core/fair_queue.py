"""A fair queue: round robin between users, then between the members of a user.

So a user with a thousand connections delays another user by one of them, not by all. Within a user, members with cheap
work go before those with heavy work, so that a small message need not wait for a thousand large ones.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")
EVERY = 4
"""Of a user's members that are taken, one in so many is a heavy one: they are delayed, not starved."""


class _User(Generic[T]):
    def __init__(self) -> None:
        self.cheap: deque[T] = deque()
        self.heavy: deque[T] = deque()
        self.taken = 0

    def __len__(self) -> int:
        return len(self.cheap) + len(self.heavy)

    def pop(self) -> T:
        found = self._next().popleft()
        self.taken += 1
        return found

    def first(self) -> T:
        return self._next()[0]

    def _next(self) -> deque[T]:
        heavy = self.heavy and (not self.cheap or (self.taken + 1) % EVERY == 0)
        return self.heavy if heavy else self.cheap


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self.users: dict[str, _User[T]] = {}
        """The first one is next. Invariant: each has members. Empty: so is the queue, which is cheaper to see here."""

    def __len__(self) -> int:
        """Of users."""
        return len(self.users)

    def counts(self) -> dict[str, int]:
        """Members by user."""
        return {user: len(mine) for user, mine in self.users.items()}

    def add(self, user: str, member: T, heavy: bool = False) -> None:
        """Behind the user's other members."""
        mine = self.users.get(user)
        if mine is None:
            mine = self.users[user] = _User()
        (mine.heavy if heavy else mine.cheap).append(member)

    def pop(self) -> T:
        """The next member."""
        user = next(iter(self.users))
        mine = self.users.pop(user)
        member = mine.pop()
        if mine:
            self.users[user] = mine  # behind the others
        return member

    def first(self) -> T:
        """The next member, which stays."""
        return next(iter(self.users.values())).first()

    def remove(self, user: str, member: T) -> None:
        mine = self.users[user]
        (mine.cheap if member in mine.cheap else mine.heavy).remove(member)
        if not mine:
            del self.users[user]

    def members(self) -> set[T]:
        return {member for mine in self.users.values() for member in (*mine.cheap, *mine.heavy)}
