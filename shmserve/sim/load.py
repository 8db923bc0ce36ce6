"""Loads: synthetic arrivals, a closed loop of callers, or a recording.

Invariant: synthetic arrivals are generated lazily, so a long run needs no memory for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.sim.results import SECOND

Arrival = tuple[int, int]
"""Time in ns since the start, and number of rows (0: drawn by the load)."""


class Regular(Struct, frozen=True):
    """One request every 1/rate seconds."""

    rate: float

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        number = 0
        while True:
            number += 1
            yield round(number * SECOND / self.rate), 0


class Poisson(Struct, frozen=True):
    """`rate` requests per second, independent of each other."""

    rate: float

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        mean, draw = self.rate / SECOND, random.expovariate
        at = 0.0
        while True:
            at += draw(mean)
            yield round(at), 0


class Bursts(Struct, frozen=True):
    """`rate` requests per second on average, in bursts of `size`."""

    rate: float
    size: int

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        mean, draw = self.rate / self.size / SECOND, random.expovariate
        at = 0.0
        while True:
            at += draw(mean)
            for _ in range(self.size):
                yield round(at), 0


class Replay(Struct, frozen=True):
    """Recorded arrivals: (time, rows), in ascending order."""

    recorded: tuple[Arrival, ...]

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        return iter(self.recorded)


class Closed(Struct, frozen=True):
    """A closed loop of `callers`: each sends a request, waits for the response, thinks, and repeats."""

    callers: int
    think_ns: int = 0


AUDIENCE = "uid:1000"


class Load(Struct, frozen=True):
    """Requests to one model.

    `rows` and `lengths` are ranges from which the number of rows and the size of each -1 dim of the inputs are drawn
    uniformly. With `sequence` (min, max), each arrival starts a sequence of that many requests, each sent `gap_ns`
    after the previous response. `distinct`: number of different inputs, which matters only for the response cache; 0:
    all differ.
    """

    model: str
    arrivals: Regular | Poisson | Bursts | Replay | Closed
    clients: int = 1
    rows: tuple[int, int] = (1, 1)
    timeout_ns: int = 0
    priority: int = 0
    sequence: tuple[int, int] = (0, 0)
    gap_ns: int = 0
    window: int = 8
    """For decoupled models: the response window, i.e. how many responses may arrive before the caller asks for more."""
    distinct: int = 0
    lengths: tuple[int, int] = (1, 1)
    audience: str = AUDIENCE
    """Who may map the outputs. It names the user whose share of the server these requests use."""


def read_recording(path: Path) -> dict[str, Replay]:
    """Reads one JSON object per line: {"at": seconds, "model": name, "rows": 1}. Lines may be in any order."""
    arrivals: dict[str, list[Arrival]] = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            at, rows = round(float(entry["at"]) * SECOND), int(entry.get("rows", 1))
            model = str(entry["model"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            text = f'{path}, line {number}: expected {{"at": seconds, "model": name, "rows": 1}}, found {line[:80]!r}'
            raise InvalidRequest(text) from error
        if at < 0 or rows < 0:
            raise InvalidRequest(f"{path}, line {number}: neither time nor rows can be negative")
        arrivals.setdefault(model, []).append((at, rows))
    return {model: Replay(tuple(sorted(entries))) for model, entries in arrivals.items()}
