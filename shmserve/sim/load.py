"""Who asks, when, and for how much: synthetic arrivals, a closed loop of callers, or a recording.

The rule of the file: arrivals are drawn one after another, never all at once, so that a long run needs no memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from msgspec import Struct

from shmserve.errors import InvalidRequest

SECOND = 1_000_000_000

Arrival = tuple[int, int]
"""When, in ns from the beginning, and how many rows (0: as the load draws them)."""


class Regular(Struct, frozen=True):
    """One every 1/rate seconds."""

    rate: float

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        number = 0
        while True:
            number += 1
            yield round(number * SECOND / self.rate), 0


class Poisson(Struct, frozen=True):
    """`rate` a second, each independent of all others."""

    rate: float

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        mean, draw = self.rate / SECOND, random.expovariate
        at = 0.0
        while True:
            at += draw(mean)
            yield round(at), 0


class Bursts(Struct, frozen=True):
    """`rate` a second on average, but always `size` at once."""

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
    """As it was recorded: (when, rows), rising."""

    recorded: tuple[Arrival, ...]

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        return iter(self.recorded)


class Closed(Struct, frozen=True):
    """`callers`, each of which asks, waits for the answer, thinks, and asks again."""

    callers: int
    think_ns: int = 0


class Load(Struct, frozen=True):
    """Requests to one model.

    `rows` is drawn evenly from the two numbers and all between them, and so is the length of inputs, which have it in
    place of each dim of -1, from `lengths`. With `sequence` (from, to) each arrival begins a
    sequence of so many requests, each sent `gap_ns` after the answer to the one before. Of `distinct` different inputs
    each request has one, which matters to a response cache only; 0: no two are alike."""

    model: str
    arrivals: Regular | Poisson | Bursts | Replay | Closed
    clients: int = 1
    rows: tuple[int, int] = (1, 1)
    timeout_ns: int = 0
    priority: int = 0
    sequence: tuple[int, int] = (0, 0)
    gap_ns: int = 0
    window: int = 8
    """Of a decoupled model: so many answers may come before the caller asks for more."""
    distinct: int = 0
    lengths: tuple[int, int] = (1, 1)


def read_recording(path: Path) -> dict[str, Replay]:
    """A JSON object a line: {"at": seconds, "model": name, "rows": 1}. Lines need not be in order."""
    found: dict[str, list[Arrival]] = {}
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
        found.setdefault(model, []).append((at, rows))
    return {model: Replay(tuple(sorted(entries))) for model, entries in found.items()}
