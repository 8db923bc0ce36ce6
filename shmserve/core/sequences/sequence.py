"""Sequences: requests of one id that one instance runs one after another, from START to END.

The rule of the file: what belongs to a sequence waits in it, and at most one request of it is with its worker. A
sequence that loses a request (cancelled, too late, or with its worker) is broken, and is ended as a whole: no model
may be fed a sequence with a hole in it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from shmserve.core.policy import SequencePolicy
from shmserve.core.requests.request import Request
from shmserve.core.states import SEQUENCE_MOVES, RequestState, SequenceState, legal

if TYPE_CHECKING:
    from shmserve.core.models.instance import Instance
    from shmserve.core.models.version import Version

Key = tuple[str, int, int | str, str]
"""Model, the version that callers name (0: the default one), the id, and whose it is: a user or a client's caller."""


class Sequence(Struct, eq=False):
    """`slot` is its place at its instance."""

    key: Key
    worker_id: int | str
    """What the worker and the model know it by: the id, or another one where a sequence of another user has that."""
    version: Version
    active: int
    """When it last had a request that began or ended."""
    state: SequenceState = SequenceState.WAITING
    requests: deque[Request] = field(default_factory=deque)
    running: Request | None = None
    instance: Instance | None = None
    slot: int = -1
    over: bool = False
    """Nothing comes any more that would belong to it."""
    cut: bool = False
    """It is over without an END."""
    own: bool = False
    """Of one request, which came without an id."""
    before: Sequence | None = None
    """Another one of its id, which must have ended first: what a worker keeps is kept by the id."""
    after: Sequence | None = None
    """The one that must wait for this one."""
    broken: tuple[str, str] | None = None
    """Code and text for what still belongs to it."""

    @property
    def id(self) -> int | str:
        return self.key[2]

    @property
    def user(self) -> str:
        return self.key[3]

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
        self.places.gone(request)
        self.stirred()
        self.fail("CANCELLED", f"an earlier request of sequence {self.id!r} was given up, and so is all of it")

    def run_again(self, request: Request) -> None:
        """An iterative model wants to run the request again: it waits at the head of the sequence."""
        request.move(RequestState.QUEUED)
        request.instance = request.batch = None
        if request.options is not None and request.options.sequence_start:
            request.options = replace(request.options, sequence_start=False)
        self.requests.appendleft(request)
        self.places.waiting(request)
        self.left(request)

    @property
    def places(self) -> Places:
        places = self.version.places
        assert places is not None
        return places

    def stirred(self) -> None:
        self.places.stirred[self] = None

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
        self.backlog: dict[Sequence, None] = {}
        self._next: dict[str, OrderedDict[Sequence, None]] = {}
        """Those of the backlog that may have a place, by user. The first user is next; invariant: each has some."""
        self.latest: dict[int | str, Sequence] = {}
        """By the workers' id, the newest one that has not ended."""
        self.stirred: dict[Sequence, None] = {}
        """Those for which something has changed since they were last looked at."""
        self.waits = self.bytes = 0
        """Requests that no worker has, and what is inside their messages."""

    @property
    def count(self) -> int:
        """Sequences that live."""
        return len(self.backlog) + sum(slot is not None for slots in self.bound.values() for slot in slots)

    def all(self) -> list[Sequence]:
        return [*self.backlog, *(found for slots in self.bound.values() for found in slots if found is not None)]

    def at(self, instance: Instance) -> list[Sequence]:
        return [sequence for sequence in self.bound.get(instance, ()) if sequence is not None]

    def waiting(self, request: Request) -> None:
        self.waits += 1
        self.bytes += request.inline

    def gone(self, request: Request) -> None:
        self.waits -= 1
        self.bytes -= request.inline

    # ------------------------------------------------------------------------------------ coming and going

    def enter(self, sequence: Sequence) -> None:
        before = sequence.before = self.latest.get(sequence.worker_id)
        self.latest[sequence.worker_id] = sequence
        self.backlog[sequence] = None
        if before is None:
            self._queue(sequence)
        else:
            before.after = sequence

    def _queue(self, sequence: Sequence) -> None:
        self._next.setdefault(sequence.user, OrderedDict())[sequence] = None

    def bind_waiting(self, instances: list[Instance]) -> None:
        """Gives slots that are free to those of the backlog: users in turn, and of a user first come first served."""
        while self._next:
            instance = self._free(instances)
            if instance is None:
                return
            user = next(iter(self._next))
            mine = self._next.pop(user)
            first, _ = mine.popitem(last=False)
            if mine:
                self._next[user] = mine  # behind the others
            del self.backlog[first]
            slots = self.bound.setdefault(instance, [None] * self.policy.slots)
            first.slot = slots.index(None)
            first.instance = instance
            slots[first.slot] = first
            first.move(SequenceState.BOUND)

    def _free(self, instances: list[Instance]) -> Instance | None:
        """Of the instances that can take one more sequence, one with the fewest."""
        best, fewest = None, self.policy.slots
        for instance in instances:
            if instance.usable and not instance.leaving and not instance.waits:
                slots = self.bound.get(instance)
                count = self.policy.slots - slots.count(None) if slots is not None else 0
                if count < (min(fewest, 1) if instance.quarantined else fewest):
                    best, fewest = instance, count
        return best

    def lose(self, instance: Instance | None, text: str) -> None:
        """The instance (None: every one) runs its sequences no more. Their version is to be dispatched."""
        for sequence in self.all() if instance is None else self.at(instance):
            sequence.fail("UNAVAILABLE", f"sequence {sequence.id!r} is over: {text}; send START again")
            sequence.stirred()

    def end(self, sequence: Sequence) -> None:
        before, after = sequence.before, sequence.after
        if sequence.instance is None:
            del self.backlog[sequence]
            if before is None:
                mine = self._next[sequence.user]
                del mine[sequence]
                if not mine:
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
