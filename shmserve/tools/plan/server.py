"""The interface of a server in a fleet, and a request on its way through the fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from shmserve.tools.plan.plan import FleetPlan

FOREVER = 1 << 62


class Flight(Struct, eq=False):
    """A request. `node`: the number of the server that has it; `tries`: how often it was sent."""

    sent: int
    key: int
    balancer: int
    until: int
    """Its deadline; 0: none."""
    node: int = -1
    tries: int = 0


Answered = Callable[[Flight, int, str], None]
"""Called with the time at which a server has answered, and the error code, if there is one."""


class Server(Protocol):
    """A server, which starts at `began`. Times are those of the fleet."""

    def __init__(self, plan: FleetPlan, name: str, began: int, answered: Answered) -> None: ...

    @property
    def busy_ns(self) -> int:
        """Total time that its instances have run."""

    @property
    def hits(self) -> int:
        """Number of responses from its cache."""

    def submit(self, flight: Flight, at: int) -> None:
        """Delivers a request at time `at`, which the server has not reached yet."""

    def advance(self, end: int) -> int:
        """Runs everything before `end`. Returns the time of the next event, or FOREVER."""
