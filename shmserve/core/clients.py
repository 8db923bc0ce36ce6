"""What the core knows of a client."""

from __future__ import annotations

from msgspec import Struct

from shmserve.core.request import Request


class Client(Struct, eq=False):
    """`outputs` is how it takes large answers: memfd, posix or frames; empty until it has said Hello.

    Answers are placed for its `audience`: whoever shares it may map them. `roles` are bits of core.access; it has them
    from its Hello on, and until it is sent away (`leaving`). Its connection counts for its `user`.
    """

    number: int
    audience: str
    plane: str
    outputs: str = ""
    name: str = ""
    requests: dict[int, Request] = {}
    steps: int = 0
    """Requests of steps of its ensembles."""
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
