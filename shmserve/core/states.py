"""The state machines of the core: states and legal transitions.

Invariant: `move` and `move_all` are the only writers of a state. A transition that is not listed is an internal error,
reported with the object's `details()` and, in tests, with its last transitions (`History`).

A request leaves the broker for a worker (SENT). It becomes QUEUED again only if its batch is recalled, its worker dies,
or an iterative model runs it again. It may be answered before the worker is done with it (LINGERING: its inputs are
still in use), or be finished before its response may be sent (DONE). Whether a SENT request is running is the state of
its batch.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Any, Protocol, TypeVar

UNLOADED = "unloaded"
"""The reason of an UNAVAILABLE version that was unloaded."""


class RequestState(IntEnum):  # integers hash fast, and requests change state thousands of times a second
    QUEUED = 1  # in the model's queue, in the broker
    SENT = 2  # in a batch at a worker
    LINGERING = 3  # answered early; the worker may still read its inputs
    DONE = 4  # finished by its worker; its response waits for earlier ones (preserve_ordering)
    ENDED = 5
    CHAINED = 6  # a request to an ensemble: its steps are in flight
    OPEN = 7  # its batch has run, and its model will send further responses


class BatchState(Enum):
    __hash__ = object.__hash__  # Enum.__hash__ is a Python function

    OPEN = "open"  # queued at the worker, can be extended
    RUNNING = "running"
    ENDED = "ended"


class InstanceState(Enum):
    __hash__ = object.__hash__  # Enum.__hash__ is a Python function

    WAITING = "waiting"  # queued to load
    STARTING = "starting"  # its process runs, its model is loading
    READY = "ready"
    BACKOFF = "backoff"  # without a process until a known time, or until its GPU is healthy again
    GOING_TO_SLEEP = "going to sleep"  # its process is stopping, to free memory; requests wake it again
    ASLEEP = "asleep"  # without a process until it is woken
    KILLED = "killed"  # its process is being killed: protocol error, hang, or no exit in time
    FAILED = "failed"  # not restarted any more, or failed to load; its process has ended
    STOPPING = "stopping"
    STOPPED = "stopped"


class VersionState(Enum):
    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    UNLOADING = "UNLOADING"


class SequenceState(Enum):
    WAITING = "waiting"  # for a slot: in the backlog
    BOUND = "bound"  # to a slot of an instance
    ENDED = "ended"


_R, _B, _I, _V, _S = RequestState, BatchState, InstanceState, VersionState, SequenceState

REQUEST_MOVES = {
    _R.QUEUED: {_R.SENT, _R.ENDED, _R.CHAINED},
    _R.SENT: {_R.LINGERING, _R.DONE, _R.ENDED, _R.QUEUED, _R.OPEN},
    _R.LINGERING: {_R.ENDED},
    _R.DONE: {_R.ENDED},
    _R.CHAINED: {_R.LINGERING, _R.ENDED},
    _R.OPEN: {_R.LINGERING, _R.ENDED},
    _R.ENDED: set[RequestState](),
}

BATCH_MOVES = {
    _B.OPEN: {_B.RUNNING, _B.ENDED},
    _B.RUNNING: {_B.ENDED},
    _B.ENDED: set[BatchState](),
}

INSTANCE_MOVES = {
    _I.WAITING: {_I.STARTING, _I.BACKOFF, _I.STOPPED, _I.FAILED, _I.ASLEEP},
    _I.STARTING: {_I.READY, _I.BACKOFF, _I.FAILED, _I.STOPPING, _I.STOPPED, _I.KILLED, _I.ASLEEP},
    _I.READY: {_I.BACKOFF, _I.FAILED, _I.STOPPING, _I.STOPPED, _I.KILLED, _I.GOING_TO_SLEEP},
    _I.BACKOFF: {_I.STARTING, _I.WAITING, _I.STOPPED, _I.FAILED, _I.ASLEEP},
    _I.GOING_TO_SLEEP: {_I.ASLEEP, _I.STOPPING, _I.STOPPED, _I.KILLED},
    _I.ASLEEP: {_I.WAITING, _I.STOPPED},
    _I.KILLED: {_I.BACKOFF, _I.FAILED, _I.STOPPED, _I.ASLEEP},
    _I.FAILED: set[InstanceState](),
    _I.STOPPING: {_I.STOPPED, _I.KILLED},
    _I.STOPPED: set[InstanceState](),
}

VERSION_MOVES = {
    _V.LOADING: {_V.READY, _V.UNAVAILABLE, _V.UNLOADING},
    _V.READY: {_V.UNAVAILABLE, _V.UNLOADING},
    _V.UNLOADING: {_V.UNAVAILABLE},
    _V.UNAVAILABLE: {_V.READY, _V.UNLOADING},  # an instance has recovered, or the models of an ensemble have
}

SEQUENCE_MOVES = {
    _S.WAITING: {_S.BOUND, _S.ENDED},
    _S.BOUND: {_S.ENDED},
    _S.ENDED: set[SequenceState](),
}

MOVES: dict[Any, set[Any]] = REQUEST_MOVES | BATCH_MOVES | INSTANCE_MOVES | VERSION_MOVES | SEQUENCE_MOVES


class Moving(Protocol):
    """An object with a state."""

    state: Any

    @property
    def title(self) -> str: ...

    def details(self) -> str:
        """Its other fields, for the report of an illegal transition."""


M = TypeVar("M", bound=Moving)


class IllegalMove(AssertionError):
    """An illegal transition, which is an internal error of the core."""

    def __init__(self, moving: Moving, finish: Enum) -> None:
        change = f"{moving.state.name} -> {finish.name}"
        text = f"{moving.title}: {change} is not a legal transition; details: {moving.details()}"
        before = history.of(moving) if history is not None else ""
        super().__init__(f"{text}; before: {before}" if before else text)


class History:
    """The last transitions of each object, with the turn in which they happened. Only for tests."""

    OBJECTS = 4096
    MOVES = 16

    def __init__(self) -> None:
        self.turn = ""
        """What the current turn processes."""
        self._moves: OrderedDict[int, tuple[object, deque[str]]] = OrderedDict()
        """By id. The objects are kept, so that their ids are not used again."""

    def note(self, moving: Moving, finish: Enum) -> None:
        entry = self._moves.pop(id(moving), None) or (moving, deque(maxlen=self.MOVES))
        entry[1].append(f"{moving.state.name} -> {finish.name} ({self.turn})")
        self._moves[id(moving)] = entry
        if len(self._moves) > self.OBJECTS:
            self._moves.popitem(last=False)

    def of(self, moving: object) -> str:
        return ", ".join(self._moves[id(moving)][1]) if id(moving) in self._moves else ""


history: History | None = None
"""Set by tests."""


def move(moving: Moving, finish: Enum) -> None:
    if finish not in MOVES[moving.state]:
        raise IllegalMove(moving, finish)
    if history is not None:
        history.note(moving, finish)
    moving.state = finish


def move_all(requests: Sequence[M], start: RequestState, finish: RequestState) -> None:
    """`move` for many requests, most of which are in the state `start`, from which they may move. Tests, which keep a
    history, check each of them."""
    usual = start if history is None else None
    for request in requests:
        if request.state is usual:
            request.state = finish
        else:
            move(request, finish)
