"""What the core knows of a client, and of a worker that is one as its model calls others."""

from __future__ import annotations

from msgspec import Struct

from shmserve.protocol.messages import OWNER_SHIFT, Handle


class Client(Struct, eq=False):
    """`outputs` is how it takes large answers: memfd, posix or frames; empty until it has said Hello.

    Answers are placed for its `audience`: whoever shares it may map them. `roles` are bits of access.ROLES; it has them
    from its Hello on, and until it is sent away (`leaving`). Its connection counts for its `user`.
    """

    number: int
    audience: str
    plane: str
    outputs: str = ""
    name: str = ""
    requests: dict[int, int] = {}
    """Its number of each request in flight -> ours."""
    steps: int = 0
    """Requests of steps of its ensembles."""
    bytes: int = 0
    """Inside the messages of its requests in flight, those of steps included."""
    segments: set[int] = set()
    mapped: set[int] = set()
    holds: set[tuple[int, int]] = set()
    held_bytes: int = 0
    gone: bool = False
    reclaiming: bool = False
    user: str = ""
    granted: int = 0
    roles: int = 0
    leaving: bool = False
    denied: bool = False
    fined_until: int = 0
    """Where its mistakes stand against client_errors: each moves it on by its share of a second."""

    def has_placed(self, handle: Handle) -> bool:
        """Of what it is answered with: is this in memory of its own, where it wanted it? Then it is no hold."""
        return handle.segment >> OWNER_SHIFT == self.number


class Caller(Client, eq=False):
    """A worker that calls other models, by the number of its process. It can have nothing placed, so it holds all that
    it is answered with, also what its own process has made for it."""

    waits_for: int = 0
    """Calls that the instance waits for, and does nothing meanwhile."""
    since: int = 0
    """When it began to."""

    def has_placed(self, handle: Handle) -> bool:
        return False
