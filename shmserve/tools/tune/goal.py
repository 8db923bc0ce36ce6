"""The goal of tuning: the latency target, the load, and the limits."""

from __future__ import annotations

from msgspec import Struct

from shmserve.tools.load.report.table import rate_text

MS = 1e6
MIB = 1 << 20


class Goal(Struct, frozen=True):
    """`rate`: requests per second that must hold the p99; 0: find the highest rate that does. `memory`: bytes for all
    instances; 0: no limit. `lengths`: range of the dims of -1. `instances`: range of the instance count. `objective`:
    what is best among the settings that hold the p99 at `rate`; empty: the fewest instances."""

    p99_ns: int
    rate: float = 0.0
    memory: int = 0
    rows: int = 1
    lengths: tuple[int, int] = (1, 1)
    instances: tuple[int, int] = (1, 16)
    seconds: float = 2.0
    """Duration of each measurement."""
    confirm: int = 3
    """Number of candidates to measure on the server."""
    simulated: int = 2000
    """Number of requests in a simulation."""
    objective: str = ""

    @property
    def target(self) -> str:
        """The target as text for messages."""
        return f"a p99 of {self.p99_ns / MS:g} ms" + (f" at {rate_text(self.rate)} requests/s" if self.rate else "")

    @property
    def typical_length(self) -> int:
        return (self.lengths[0] + self.lengths[1] + 1) // 2
