"""What has happened to the server and its models: loads, crashes, quarantines, changes of traffic, drains.

The changes are those between two documents, so a change that was undone in between is not seen.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

KEPT = 200
NOT_LOADED = "NOT LOADED"
Document = Mapping[str, Any]


class TimelineEvent(Struct, omit_defaults=True):
    """`number`: of the event of the stream that is the first to have it. `time`: in seconds since 1970."""

    number: int
    time: float
    text: str
    bad: bool = False
    model: str = ""
    version: str = ""


class Timeline:
    def __init__(self) -> None:
        self._events: deque[TimelineEvent] = deque(maxlen=KEPT)

    def add(self, number: int, text: str, bad: bool, model: str = "", version: str = "") -> None:
        self._events.append(TimelineEvent(number, round(time.time(), 3), text, bad, model, version))

    def since(self, number: int) -> list[TimelineEvent]:
        return [event for event in self._events if event.number > number]

    def compare_servers(self, number: int, before: Document, after: Document) -> None:
        if before["pid"] != after["pid"]:
            self.add(number, "the server was restarted", True)
        elif before.get("out_of_service", False) != after.get("out_of_service", False):
            drained = after["out_of_service"]
            self.add(number, "the server is out of service" if drained else "the server is in service again", drained)

    def compare_versions(self, number: int, before: Document, after: Document) -> None:
        for text, bad in _changes(before, after):
            self.add(number, text, bad, after["name"], after["version"])


def _changes(before: Document, after: Document) -> Iterator[tuple[str, bool]]:
    """Yields the text of each change, and whether it is bad news."""
    if state_of(before) != (state := state_of(after)):
        reason = after.get("reason", "")
        yield f"{state}: {reason}" if reason and state != NOT_LOADED else state, state in ("UNAVAILABLE", "DEGRADED")
    failed = after.get("last_failed_change")
    if failed and failed != before.get("last_failed_change"):
        yield f"the last change failed: {failed['reason']}", True
    if _traffic(before) != _traffic(after):
        yield "the shares, aliases or shadows of its versions changed", False
    earlier = {one["name"]: one for one in before.get("instances", ())}
    for one in after.get("instances", ()):
        known = earlier.get(one["name"], {})
        if one.get("restarts", 0) > known.get("restarts", one.get("restarts", 0)):
            yield f"{one['name']} was restarted", True
        if one.get("quarantined") and not known.get("quarantined"):
            yield f"{one['name']} is quarantined: {one.get('reason', '')}", True


def _traffic(entry: Document) -> list[Any]:
    """What operators have set; the document also counts requests."""
    traffic = entry.get("traffic") or {}
    return [traffic.get(part) or None for part in ("shares", "aliases", "shadow")]


def state_of(entry: Document) -> str:
    """The state of a version, as views show it."""
    if entry.get("reason") == "unloaded" or not entry.get("state"):
        return NOT_LOADED
    if entry["state"] == "READY" and entry.get("reloading"):
        return "RELOADING"
    return "DEGRADED" if entry.get("degraded") else "ASLEEP" if entry.get("asleep") else str(entry["state"])
