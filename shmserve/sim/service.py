"""Service times: the duration of a batch with some number of rows and padded length, or of loading a model.

Invariant: random times use only the generator that is passed in.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from pathlib import Path
from random import Random

from msgspec import Struct

from shmserve.errors import InvalidRequest

UNITS = {"ns": 1, "us": 1000, "ms": 1_000_000, "s": 1_000_000_000}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s)")
FORMS = "5ms, 1ms+0.2ms/row, 1ms+5us/element (rows x length), lognormal:5ms,0.4 (median, sigma) or table:FILE"


class Constant(Struct, frozen=True):
    """The same time for every batch."""

    time_ns: int

    def ns(self, rows: int, random: Random, length: int = 1) -> int:
        return self.time_ns


class Affine(Struct, frozen=True):
    """A fixed time for a batch, plus a time for each row."""

    batch_ns: int
    row_ns: int

    def ns(self, rows: int, random: Random, length: int = 1) -> int:
        return self.batch_ns + self.row_ns * rows


class PerElement(Struct, frozen=True):
    """A fixed time for a batch, plus a time for each element (rows x padded length)."""

    batch_ns: int
    element_ns: int

    def ns(self, rows: int, random: Random, length: int = 1) -> int:
        return self.batch_ns + self.element_ns * rows * length


class Lognormal(Struct, frozen=True):
    """`median_ns` times exp(sigma * z) with z normally distributed: mostly near the median, sometimes much longer."""

    median_ns: int
    sigma: float
    row_ns: int = 0

    def ns(self, rows: int, random: Random, length: int = 1) -> int:
        return round(self.median_ns * math.exp(self.sigma * random.gauss(0.0, 1.0))) + self.row_ns * rows


class Table(Struct, frozen=True):
    """Measured times: (rows, times in ns), both ascending. A time is drawn at random from those of an entry,
    interpolated between entries, and extrapolated in proportion to the rows beyond the last entry."""

    entries: tuple[tuple[int, tuple[int, ...]], ...]

    def ns(self, rows: int, random: Random, length: int = 1) -> int:
        entries, share = self.entries, random.random()
        after = bisect_left(entries, rows, key=lambda entry: entry[0])
        if after == len(entries):
            maximum, times = entries[-1]
            return _drawn(times, share) * rows // maximum
        above, times = entries[after]
        if above == rows or after == 0:
            return _drawn(times, share)
        below, shorter = entries[after - 1]
        low, high = _drawn(shorter, share), _drawn(times, share)
        return low + (high - low) * (rows - below) // (above - below)


class Measured(Struct, frozen=True):
    """Mean times and how they vary: (rows, ns), ascending, plus a time for each element (rows x padded length). A drawn
    time is the mean multiplied by a factor from `spread`, plus the pause at the same index of `pauses`, if any. Means
    are interpolated, and extrapolated from the last two entries."""

    entries: tuple[tuple[int, float], ...]
    element_ns: float = 0.0
    spread: tuple[float, ...] = (1.0,)
    pauses: tuple[float, ...] = ()

    def mean_ns(self, rows: int, length: int = 1) -> float:
        entries = self.entries
        after = min(max(bisect_left(entries, rows, key=lambda entry: entry[0]), 1), len(entries) - 1)
        above, high = entries[after]
        below, low = entries[after - 1]
        time = high if above == below else low + (high - low) * (rows - below) / (above - below)
        return time + self.element_ns * rows * length

    def ns(self, rows: int, random: Random, length: int = 1) -> int:
        place = int(random.random() * len(self.spread))
        time = self.mean_ns(rows, length) * self.spread[place]
        return max(0, round(time + self.pauses[place])) if self.pauses else round(time)


Service = Constant | Affine | PerElement | Lognormal | Table | Measured
BY_LENGTH = (PerElement, Measured)
"""The services whose times may depend on the length."""


def _drawn(times: tuple[int, ...], share: float) -> int:
    return times[int(share * len(times))]


# ------------------------------------------------------------------------------------ parsing


def time_ns(text: str) -> int:
    """Parses a duration: 300us, 5ms, 1.5s."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"'{text}' is not a duration, such as 300us, 5ms or 1.5s")
    return round(float(match[1]) * UNITS[match[2]])


def parse(text: str) -> Service:
    """Parses a service time in one of the `FORMS`."""
    kind, colon, rest = text.partition(":")
    if colon and kind == "table":
        return read_table(Path(rest))
    if colon and kind == "lognormal":
        median, comma, sigma = rest.partition(",")
        try:
            return Lognormal(time_ns(median), float(sigma) if comma else 0.5)
        except ValueError:
            raise InvalidRequest(f"'{sigma}' is not a number, in '{text}'; write {FORMS}") from None
    base, plus, each = text.partition("+")
    if plus and each.strip().endswith("/row"):
        return Affine(time_ns(base), time_ns(each.strip().removesuffix("/row")))
    if plus and each.strip().endswith("/element"):
        return PerElement(time_ns(base), time_ns(each.strip().removesuffix("/element")))
    if colon or plus:
        raise InvalidRequest(f"'{text}' is not a service time; write {FORMS}")
    return Constant(time_ns(text))


def read_table(path: Path) -> Table:
    """Reads a JSON object: rows -> one time or a list of times, in milliseconds."""
    try:
        table = json.loads(path.read_text())
        entries = []
        for rows, times in table.items():
            times_ms = times if isinstance(times, list) else [times]
            entries.append((int(rows), tuple(sorted(round(float(ms) * 1e6) for ms in times_ms))))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InvalidRequest(f"{path} is not a table of service times: {error}; see docs/sizing.md") from error
    if not entries or any(rows < 1 or not times or times[0] < 0 for rows, times in entries):
        raise InvalidRequest(f"{path}: a table of service times needs rows from 1 on, and times for each")
    return Table(tuple(sorted(entries)))
