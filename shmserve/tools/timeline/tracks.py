"""Rows for spans that may overlap."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

LANES = 256
"""Maximum number of rows for one kind of span of a model; more would not be readable."""


def lanes(spans: Sequence[tuple[int, int]], most: int = LANES) -> list[int | None]:
    """The lowest free row for each span (begin, end); None if `most` rows are occupied."""
    found: list[int | None] = [None] * len(spans)
    occupied: list[tuple[int, int]] = []
    free: list[int] = []
    used = 0
    for place in sorted(range(len(spans)), key=lambda place: spans[place]):
        begin, end = spans[place]
        while occupied and occupied[0][0] <= begin:
            heappush(free, heappop(occupied)[1])
        if free:
            lane = heappop(free)
        elif used < most:
            lane = used
            used += 1
        else:
            continue
        found[place] = lane
        heappush(occupied, (end, lane))
    return found
