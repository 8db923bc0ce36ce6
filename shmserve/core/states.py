"""The states of everything that has any, and the legal moves between them. Two rules: every move goes through a
`move` that consults these tables, and a move that is not here is a bug of ours, told with the story of the thing.

A request leaves the broker for a worker (SENT), and is QUEUED again only if that worker dies. It may be answered before
the worker is done with it (LINGERING: its inputs are still in use), or be done before it may be answered (DONE).
Whether a sent request runs yet is the state of its batch.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import TypeVar


class RequestState(IntEnum):  # integers hash fast, and requests move thousands of times a second
    QUEUED = 1  # in the model's queue, here
    SENT = 2  # in a batch at a worker
    LINGERING = 3  # answered early; the worker may still read its inputs
    DONE = 4  # no worker has it any more; its answer waits for its turn (preserve_ordering)
    ENDED = 5
    CHAINED = 6  # to an ensemble: the requests of its steps are under way
    OPEN = 7  # its batch has run, and its model will answer it again


class BatchState(Enum):
    __hash__ = object.__hash__  # Enum's own is a Python function

    OPEN = "open"  # waits at the worker and may be extended
    RUNNING = "running"
    ENDED = "ended"


class InstanceState(Enum):
    __hash__ = object.__hash__  # Enum's own is a Python function

    WAITING = "waiting"  # for its turn to load
    STARTING = "starting"  # its process runs, its model is loading
    READY = "ready"
    BACKOFF = "backoff"  # its process ended; the next one starts at a known time
    KILLED = "killed"  # it contradicted the protocol, or did not stop in time; its process is being ended
    FAILED = "failed"  # given up, or could not load; its process has ended
    STOPPING = "stopping"
    STOPPED = "stopped"


class VersionState(Enum):
    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    UNLOADING = "UNLOADING"


class SequenceState(Enum):
    WAITING = "waiting"  # for a slot: it is in the backlog
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
    _I.WAITING: {_I.STARTING, _I.STOPPED},
    _I.STARTING: {_I.READY, _I.BACKOFF, _I.FAILED, _I.STOPPING, _I.STOPPED, _I.KILLED},
    _I.READY: {_I.BACKOFF, _I.FAILED, _I.STOPPING, _I.STOPPED, _I.KILLED},
    _I.BACKOFF: {_I.STARTING, _I.STOPPED, _I.FAILED},
    _I.KILLED: {_I.BACKOFF, _I.FAILED, _I.STOPPED},
    _I.FAILED: set[InstanceState](),
    _I.STOPPING: {_I.STOPPED, _I.KILLED},
    _I.STOPPED: set[InstanceState](),
}

VERSION_MOVES = {
    _V.LOADING: {_V.READY, _V.UNAVAILABLE, _V.UNLOADING},
    _V.READY: {_V.UNAVAILABLE, _V.UNLOADING},
    _V.UNLOADING: {_V.UNAVAILABLE},
    _V.UNAVAILABLE: {_V.READY, _V.UNLOADING},  # an instance, or the models of an ensemble, have come (back)
}

SEQUENCE_MOVES = {
    _S.WAITING: {_S.BOUND, _S.ENDED},
    _S.BOUND: {_S.ENDED},
    _S.ENDED: set[SequenceState](),
}

TABLES = {
    RequestState: REQUEST_MOVES,
    BatchState: BATCH_MOVES,
    InstanceState: INSTANCE_MOVES,
    VersionState: VERSION_MOVES,
    SequenceState: SEQUENCE_MOVES,
}

S = TypeVar("S", bound=Enum)


class IllegalMove(AssertionError):
    """Never expected: the core has contradicted itself. The text ends with the story of the thing that moved."""

    def __init__(self, what: str, start: Enum, finish: Enum, story: str) -> None:
        super().__init__(f"{what}: {start.name} -> {finish.name} is not a legal move; story: {story}")


def legal(moves: dict[S, set[S]], what: str, start: S, finish: S, story: str) -> S:
    """`finish`, if the table allows it. For things that move rarely; requests check inline (see request.py)."""
    if finish not in moves[start]:
        raise IllegalMove(what, start, finish, story)
    return finish
