"""Sequences: requests of one id that one instance runs one after another, from START to END.

The rule of the file: what belongs to a sequence waits in it, and at most one request of it is with its worker. A
sequence that loses a request (cancelled, too late, or with its worker) is broken, and is ended as a whole: no model
may be fed a sequence with a hole in it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from msgspec import Struct, field

from shmserve.core.policy import SequencePolicy
from shmserve.core.request import Request
from shmserve.core.states import SEQUENCE_MOVES, SequenceState, legal

if TYPE_CHECKING:
    from shmserve.core.instances import Instance
    from shmserve.core.versions import Version

Key = tuple[str, int, int | str]
"""Model, the version that callers name (0: the default one), and the id."""


class Sequence(Struct, eq=False):
    """`slot` is its place at its instance. `over`: END has come, and nothing behind it."""

    key: Key
    user: str
    version: Version
    active: int
    """When it last had a request that began or ended."""
    state: SequenceState = SequenceState.WAITING
    requests: deque[Request] = field(default_factory=deque)
    running: Request | None = None
    instance: Instance | None = None
    slot: int = -1
    over: bool = False
    broken: tuple[str, str] | None = None
    """Code and text for what still belongs to it."""

    @property
    def id(self) -> int | str:
        return self.key[2]

    @property
    def idle(self) -> bool:
        return self.running is None and not self.requests

    def move(self, finish: SequenceState) -> None:
        self.state = legal(SEQUENCE_MOVES, f"sequence {self.id!r}", self.state, finish, self.story())

    def story(self) -> str:
        at = f" slot {self.slot} of {self.instance.spec.name}" if self.instance is not None else ""
        return f"of {self.version.label}{at}, {len(self.requests)} requests wait, broken: {self.broken}"

    def fail(self, code: str, text: str) -> None:
        if self.broken is None:
            self.broken = code, text

    def drop(self, request: Request) -> None:
        """It waits no more, and the sequence has a hole where it was."""
        self.requests.remove(request)
        self.stirred()
        self.fail("CANCELLED", f"an earlier request of sequence {self.id!r} was given up, and so is all of it")

    def stirred(self) -> None:
        places = self.version.places
        assert places is not None
        places.stirred[self] = None

    def left(self, request: Request) -> None:
        """The request has ended at its worker, or is to be run again."""
        if self.running is request:
            self.running = None
        self.stirred()


class Places:
    """Where the sequences of one version are: `bound` to slots of instances, or in the `backlog`."""

    def __init__(self, policy: SequencePolicy) -> None:
        self.policy = policy
        self.bound: dict[Instance, list[Sequence | None]] = {}
        self.backlog: deque[Sequence] = deque()
        self.stirred: dict[Sequence, None] = {}
        """Those for which something has changed since they were last looked at."""

    @property
    def count(self) -> int:
        """Sequences that live."""
        return len(self.backlog) + sum(slot is not None for slots in self.bound.values() for slot in slots)

    def all(self) -> list[Sequence]:
        return [*self.backlog, *(found for slots in self.bound.values() for found in slots if found is not None)]

    @property
    def waits(self) -> int:
        """Requests that no worker has."""
        return sum(len(sequence.requests) for sequence in self.all())

    def at(self, instance: Instance) -> list[Sequence]:
        return [sequence for sequence in self.bound.get(instance, ()) if sequence is not None]

    def free(self, instances: list[Instance]) -> Instance | None:
        """Of the instances that can take one more sequence, one with the fewest."""
        best, fewest = None, self.policy.slots
        for instance in instances:
            if instance.usable and len(self.at(instance)) < fewest:
                best, fewest = instance, len(self.at(instance))
        return best

    def bind(self, sequence: Sequence, instance: Instance) -> None:
        slots = self.bound.setdefault(instance, [None] * self.policy.slots)
        sequence.slot = slots.index(None)
        sequence.instance = instance
        slots[sequence.slot] = sequence

    def lose(self, instance: Instance | None, text: str) -> None:
        """The instance (None: no instance) runs its sequences any more. Their version is to be dispatched."""
        for sequence in self.all() if instance is None else self.at(instance):
            sequence.fail("UNAVAILABLE", f"sequence {sequence.id!r} is over: {text}; send START again")
            sequence.stirred()

    def release(self, sequence: Sequence) -> None:
        if sequence.instance is None:
            self.backlog.remove(sequence)
            return
        slots = self.bound[sequence.instance]
        slots[sequence.slot] = None
        if not any(slots):
            del self.bound[sequence.instance]
        sequence.instance = None
