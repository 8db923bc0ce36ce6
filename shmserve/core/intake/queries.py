"""The queue of queries (`Ask`): at most QUERIES_PER_TURN are passed to the shell per turn, in the order of a FairQueue.

A query may take milliseconds (metrics, statistics of a thousand models), so it is queued instead of being answered on
arrival. The heavy queries of one turn must be equal, so that they share the response. Operations bypass the queue: they
need the role operate, and their bodies arrive in pieces.

Invariant: a query counts until the shell reports `Answered`, and a peer's queries are dropped with the peer. No query
is passed on while the peer has too much unread output.
"""

from __future__ import annotations

from collections import deque

from shmserve.core.effects import Query
from shmserve.core.events import Answered, Behind
from shmserve.core.fair_queue import FairQueue
from shmserve.core.state import State
from shmserve.errors import InvalidRequest, Unavailable
from shmserve.protocol import roles
from shmserve.protocol.messages import Ask

QUERIES_PER_TURN = 4
"""Queries passed to the shell in one turn, for all peers together."""
ARGUMENTS_BYTES = 64
"""Maximum size of the arguments of a query."""
WITH_ARGUMENTS = frozenset({"config", "activity"})
"""Queries with arguments in their body: whether to wait for the model, and the time since when models have changed."""
HEAVY = frozenset({"metrics", "statistics", "activity", "models", "config", "origins", "report", "logs"})
"""Queries whose responses may be large and take milliseconds to build."""


class QueryQueue:
    def __init__(self, state: State) -> None:
        self._state = state
        self._limit = state.limits.client_questions
        self._unanswered: dict[int, set[int]] = {}
        """Peer -> request numbers, queued or passed to the shell."""
        self._queued: dict[int, deque[Ask]] = {}
        self._behind: set[int] = set()
        self._next: FairQueue[int] = FairQueue()
        """Peers with queued queries that are not behind."""
        self.waiting = self._next.users
        """While it is not empty, another turn is due immediately."""

    def put(self, peer: int, ask: Ask) -> None:
        """Queues a query. Raises if the peer may not send it now. `what` is empty in later pieces of an operation's
        body."""
        if not ask.what or ask.what in roles.OPERATIONS:
            self._state.effects.append(Query(peer, ask))
            return
        if ask.more:
            raise InvalidRequest(f"the body of '{ask.what}' is too long")
        unanswered = self._unanswered.get(peer)
        if unanswered is None:
            unanswered = self._unanswered[peer] = set()
        if ask.request in unanswered:
            raise InvalidRequest(f"request number {ask.request} is already in use by a query in flight")
        if len(unanswered) >= self._limit:
            raise Unavailable(
                f"{len(unanswered)} queries of this client are in flight, its limit (client_questions); wait for "
                "responses first"
            )
        if ask.what not in WITH_ARGUMENTS:
            ask.body = b""  # no other query has a body; do not keep its bytes queued
        elif len(ask.body) > ARGUMENTS_BYTES:
            raise InvalidRequest(f"the body of '{ask.what}' is too long")
        unanswered.add(ask.request)
        queue = self._queued.get(peer)
        if queue is not None:
            queue.append(ask)
        else:
            self._queued[peer] = deque((ask,))
            self._enqueue(peer)

    def answered(self, peer: int, event: Answered, now: int) -> None:
        unanswered = self._unanswered.get(event.peer)
        if unanswered is not None:
            unanswered.discard(event.request)
            if not unanswered:
                del self._unanswered[event.peer]

    def behind(self, peer: int, event: Behind, now: int) -> None:
        if event.peer not in self._state.clients or event.behind == (event.peer in self._behind):
            return
        if event.behind:
            self._dequeue(event.peer)
            self._behind.add(event.peer)
        else:
            self._behind.remove(event.peer)
            self._enqueue(event.peer)

    def gone(self, peer: int) -> None:
        self._dequeue(peer)
        self._unanswered.pop(peer, None)
        self._queued.pop(peer, None)
        self._behind.discard(peer)

    def pass_on(self) -> None:
        """Passes queries to the shell, once per turn."""
        built: tuple[str, str, int, bytes] | None = None
        for _ in range(QUERIES_PER_TURN):
            if not self._next:
                return
            ask = self._queued[self._next.first()][0]
            if ask.what in HEAVY:
                key = ask.what, ask.model, ask.version, ask.body
                if built is not None and key != built:
                    return
                built = key
            peer = self._next.pop()
            queue = self._queued[peer]
            self._state.effects.append(Query(peer, queue.popleft()))
            if queue:
                self._enqueue(peer)
            else:
                del self._queued[peer]

    def _enqueue(self, peer: int) -> None:
        queue = self._queued.get(peer)
        if queue is not None and peer not in self._behind:
            self._next.add(self._user(peer), peer, queue[0].what in HEAVY)

    def _dequeue(self, peer: int) -> None:
        if peer in self._queued and peer not in self._behind:
            self._next.remove(self._user(peer), peer)

    def _user(self, peer: int) -> str:
        """The user of a peer. Each worker counts as a separate user."""
        client = self._state.clients.get(peer)
        return client.user if client is not None else str(peer)

    def check(self, peers: set[int]) -> None:
        assert self._unanswered.keys() <= peers
        assert self._behind <= peers
        assert self._next.members() == self._queued.keys() - self._behind
        for peer, queue in self._queued.items():
            assert queue
            assert {ask.request for ask in queue} <= self._unanswered[peer]
            assert len(self._unanswered[peer]) <= self._limit
