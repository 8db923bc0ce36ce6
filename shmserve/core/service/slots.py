"""The slots of the instances of one version, and the sequences that have one or wait for one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Generic, Protocol, TypeVar

from shmserve.core.policy import SequencePolicy
from shmserve.core.states import SequenceState


class Slotted(Protocol):
    """The fields of a sequence that `SequenceSlots` reads, and those in which it stores its own state."""

    before: Any
    after: Any
    instance: Any
    slot: int

    @property
    def id(self) -> int | str: ...
    @property
    def worker_id(self) -> int | str: ...
    @property
    def user(self) -> str: ...

    def move(self, finish: SequenceState) -> None: ...
    def fail(self, code: str, text: str) -> None: ...
    def mark_changed(self) -> None: ...


class SlotInstance(Protocol):
    """The fields that decide whether an instance can take another sequence."""

    @property
    def usable(self) -> bool: ...
    @property
    def retiring(self) -> bool: ...
    @property
    def waits(self) -> bool: ...
    @property
    def quarantined(self) -> bool: ...


class Waiting(Protocol):
    """A queued request."""

    @property
    def inline(self) -> int: ...


SequenceT = TypeVar("SequenceT", bound=Slotted)
InstanceT = TypeVar("InstanceT", bound=SlotInstance)


class SequenceSlots(Generic[SequenceT, InstanceT]):
    """The slots of one version's sequences: `bound` to instances, or waiting in the `backlog`."""

    def __init__(self, policy: SequencePolicy) -> None:
        self.policy = policy
        self.bound: dict[InstanceT, list[SequenceT | None]] = {}
        self.backlog: dict[SequenceT, None] = {}
        self._next: dict[str, OrderedDict[SequenceT, None]] = {}
        """Sequences of the backlog that may get a slot, by user, next user first. Invariant: no user's entry is
        empty."""
        self.latest: dict[int | str, SequenceT] = {}
        """Worker id -> the newest sequence that has not ended."""
        self.changed: dict[SequenceT, None] = {}
        """Sequences that have changed since they were last processed."""
        self.waits = self.bytes = 0
        """Queued requests, and the bytes inside their messages."""

    @property
    def count(self) -> int:
        """Live sequences."""
        return len(self.backlog) + sum(slot is not None for slots in self.bound.values() for slot in slots)

    def all(self) -> list[SequenceT]:
        return [*self.backlog, *(found for slots in self.bound.values() for found in slots if found is not None)]

    def at(self, instance: InstanceT) -> list[SequenceT]:
        return [sequence for sequence in self.bound.get(instance, ()) if sequence is not None]

    def waiting(self, request: Waiting) -> None:
        self.waits += 1
        self.bytes += request.inline

    def gone(self, request: Waiting) -> None:
        self.waits -= 1
        self.bytes -= request.inline

    # ------------------------------------------------------------------------------------ enter, bind, end

    def enter(self, sequence: SequenceT) -> None:
        before = sequence.before = self.latest.get(sequence.worker_id)
        self.latest[sequence.worker_id] = sequence
        self.backlog[sequence] = None
        if before is None:
            self._queue(sequence)
        else:
            before.after = sequence

    def _queue(self, sequence: SequenceT) -> None:
        self._next.setdefault(sequence.user, OrderedDict())[sequence] = None

    def bind_waiting(self, instances: list[InstanceT]) -> None:
        """Binds sequences of the backlog to free slots: round robin between users, in order of arrival within each
        user."""
        while self._next:
            instance = self._free(instances)
            if instance is None:
                return
            user = next(iter(self._next))
            own_slots = self._next.pop(user)
            first, _ = own_slots.popitem(last=False)
            if own_slots:
                self._next[user] = own_slots  # behind the other users
            del self.backlog[first]
            slots = self.bound.setdefault(instance, [None] * self.policy.slots)
            first.slot = slots.index(None)
            first.instance = instance
            slots[first.slot] = first
            first.move(SequenceState.BOUND)

    def _free(self, instances: list[InstanceT]) -> InstanceT | None:
        """Of the instances that can take another sequence, the one with the fewest."""
        best, fewest = None, self.policy.slots
        for instance in instances:
            if instance.usable and not instance.retiring and not instance.waits:
                slots = self.bound.get(instance)
                count = self.policy.slots - slots.count(None) if slots is not None else 0
                if count < (min(fewest, 1) if instance.quarantined else fewest):
                    best, fewest = instance, count
        return best

    def lose(self, instance: InstanceT | None, text: str) -> None:
        """Fails the sequences of the instance (None: of all instances), which can no longer run them. The caller
        dispatches the version."""
        for sequence in self.all() if instance is None else self.at(instance):
            sequence.fail("UNAVAILABLE", f"sequence {sequence.id!r} has ended: {text}; send START again")
            sequence.mark_changed()

    def end(self, sequence: SequenceT) -> None:
        before, after = sequence.before, sequence.after
        if sequence.instance is None:
            del self.backlog[sequence]
            if before is None:
                own_slots = self._next[sequence.user]
                del own_slots[sequence]
                if not own_slots:
                    del self._next[sequence.user]
        else:
            slots = self.bound[sequence.instance]
            slots[sequence.slot] = None
            if not any(slots):
                del self.bound[sequence.instance]
            sequence.instance = None
        sequence.move(SequenceState.ENDED)
        if before is not None:
            before.after = after
        if after is not None:
            after.before = before
            if before is None:
                self._queue(after)
        elif before is not None:
            self.latest[sequence.worker_id] = before
        else:
            del self.latest[sequence.worker_id]
        sequence.before = sequence.after = None
