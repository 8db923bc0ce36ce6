"""The rules of Chrome's trace event format, as far as `shmserve trace` uses it: events that a viewer silently drops or
draws wrongly are errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

Event = dict[str, Any]

KNOWN = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    "C": {"name", "pid", "ts", "args"},
}


def ns(us: float) -> int:
    return round(Fraction(us) * 1000)


def check(events: Iterable[Event]) -> list[Event]:
    """Asserts the rules. Returns the slices."""
    events = list(events)
    slices: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        assert set(event) - {"ph"} == KNOWN[event["ph"]], event
        assert event.get("ts", 0) >= 0, event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            slices[event["tid"]].append(event)
    named = {(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
    for row, found in slices.items():
        (process,) = {event["pid"] for event in found}
        assert {("thread_name", process, row), ("process_name", process, 0)} <= named
        _nests(found)
    _arrows(events, slices)
    for event in events:
        if event["ph"] == "C":
            assert event["args"]["requests"] >= 0, event
    return [event for found in slices.values() for event in found]


def _nests(slices: list[Event]) -> None:
    open_until: list[int] = []
    for event in sorted(slices, key=lambda event: (ns(event["ts"]), -ns(event["dur"]))):
        begin = ns(event["ts"])
        end = begin + ns(event["dur"])
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], f"overlaps with another slice: {event}"
        open_until.append(end)


def _arrows(events: list[Event], slices: dict[int, list[Event]]) -> None:
    """Asserts that each arrow has a start and a later end, both inside a slice of their row."""
    arrows: dict[int, dict[str, Event]] = defaultdict(dict)
    spans = {row: {(ns(one["ts"]), ns(one["ts"]) + ns(one["dur"])) for one in found} for row, found in slices.items()}
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in arrows[event["id"]], f"twice: {event}"
            arrows[event["id"]][event["ph"]] = event
    for number, ends in arrows.items():
        assert ends.keys() == {"s", "f"}, f"arrow {number} has one end"
        assert ns(ends["s"]["ts"]) <= ns(ends["f"]["ts"]), ends
        assert ends["f"]["bp"] == "e"
        for event in ends.values():
            at = ns(event["ts"])
            assert any(begin <= at <= end for begin, end in spans[event["tid"]]), f"no slice there: {event}"
