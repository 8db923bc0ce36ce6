"""Shares of the memory budgets: a user who wakes many models delays other users as little as possible.

The memory of a version is charged to the user who woke it and to those whose batches it has run since, in proportion.
What a user *holds* is a part of the budgets. Then:

- Users take turns in waking versions: next is the user whose last wake is the longest ago.
- A version that was used recently does not go to sleep for a user who would then hold more than one of the version's
  users, as long as that user has other versions, which can make room instead. If this is true for all of them, the one
  that the user holds the largest part of makes room.
- A busy version makes room at once for a user who will hold less than each of the version's users.

With a single user, none of this applies. Users are those of the queues: users of the machine, and callers of gateways.
"""

from __future__ import annotations

from shmserve.core.models import memory
from shmserve.core.models.memory import BytesByPlace
from shmserve.core.records import Version
from shmserve.core.state import State

USERS = 1024
"""Users whose last wake is known."""
RECENT_LOADS = 100
RECENT_NS = 30_000_000_000
"""A version was used recently if its last use is not longer ago than this many times its load time, or this time."""


def choose_waker(state: State, version: Version) -> int:
    """Chooses the user for whom the version wakes: of those who wait for it, the one whose last wake is the longest
    ago. Returns when that was."""
    sleep_state, turns = version.sleep_state, state.loading.turns
    sleep_state.waker = min(
        version.waiting_users(), key=lambda user: (turns.get(user, 0), user), default=sleep_state.waker
    )
    return turns.get(sleep_state.waker, 0)


def wakes(state: State, version: Version) -> None:
    """A process of the version starts: charges its memory to the user for whom it wakes, whose turn this was."""
    sleep_state, turns = version.sleep_state, state.loading.turns
    if not sleep_state.users:
        sleep_state.users = {sleep_state.waker: 1.0}
    turns.pop(sleep_state.waker, None)
    turns[sleep_state.waker] = state.now
    if len(turns) > USERS:
        del turns[next(iter(turns))]


class Shares:
    """What users hold, if these bytes are granted to one of them. `user` "": the one who holds the most makes room,
    because models have grown."""

    def __init__(self, state: State, user: str, need: BytesByPlace) -> None:
        self._held: dict[str, float] = {user: _part(state, need)} if user else {}
        """User -> the part of the budgets."""
        movable: dict[str, dict[Version, float]] = {}
        for version in dict.fromkeys(state.memory.holders.values()):
            users = version.sleep_state.users
            if users:
                each = _part(state, memory.of_version(version, state.memory.holders)) / sum(users.values())
                for other, count in users.items():
                    self._held[other] = self._held.get(other, 0.0) + each * count
                    if not memory.stays_loaded(version):
                        movable.setdefault(other, {})[version] = each * count
        self._user = user or max(movable, key=lambda one: (self._held[one], one), default="")
        self._own = movable.get(self._user, {})
        """The part of the budgets that the user holds of each version that can make room, now or when it has loaded."""

    def kept(self, last_used: dict[Version, int], now: int) -> set[Version]:
        """The versions that do not make room, of those in memory, which were last used at these times."""
        if not self._own:
            return set()
        kept = {version for version, used in last_used.items() if self._keeps(version, used, now)}
        if kept.issuperset(self._own):
            kept.remove(max(self._own, key=self._own.__getitem__))
        return kept

    def _keeps(self, version: Version, last_used: int, now: int) -> bool:
        """True if the user would then hold more than another user of this version, which was used recently."""
        sleep_state, holds = version.sleep_state, self._held.get(self._user, 0.0)
        if last_used + min(RECENT_LOADS * sleep_state.load_ns, RECENT_NS) <= now:
            return False
        return any(other != self._user and self._held.get(other, 0.0) < holds for other in sleep_state.users)

    def comes_before(self, version: Version) -> bool:
        """True if this busy version makes room at once for the user, who will hold less than each of its users."""
        users, holds = version.sleep_state.users, self._held.get(self._user, 0.0)
        return bool(users) and all(self._held.get(other, 0.0) > holds for other in users)


def _part(state: State, size: BytesByPlace) -> float:
    """The largest part of a budget that these bytes take."""
    parts = [count / budget for place, count in size.items() if (budget := memory.budget_of(state, place))]
    return max(parts, default=0.0)
