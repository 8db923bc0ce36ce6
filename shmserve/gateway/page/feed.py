"""The event stream of the web page.

The gateway queries the broker once a second for all viewers together, less often if the broker needs long for the
reply, and not at all while there are no viewers. Invariant: no viewer waits for another. A viewer that does not read is
sent nothing. When it reads again, one event has everything that has changed. After missing STALLED events it is
disconnected.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from operator import itemgetter
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.errors import Internal, ServeError, Unavailable
from shmserve.gateway.kserve.generate import named_event
from shmserve.gateway.upstream.exchange import Exchange
from shmserve.gateway.upstream.link import GatewayLink
from shmserve.llm.figures import FIGURES, Counts, figures_of
from shmserve.session import Ticket

_encode = msgspec.json.Encoder().encode
PERIOD_S = 1.0
BROKER_SHARE = 0.02
"""Maximum fraction of the broker's time spent on the page."""
VIEWERS = 64
"""Maximum number of streams of a gateway."""
CALLER_VIEWERS = 16
"""Maximum number of streams of one caller. Callers without a token on this machine count as one, without this limit."""
STALLED = 10
log = logging.getLogger("shmserve.gateway")
_NO_TIME = 0.0
SLICE = 50
"""Number of versions compared in one slice of work."""
MEMORY_STEP = 1 << 20
"""Resident memory is rounded to this, because it changes constantly."""
KEPT_GONE = 1000
"""Number of removed versions remembered. A viewer that has missed earlier removals gets everything."""

Key = tuple[str, str]
Document = dict[str, Any]


_FIGURES = _encode([{"key": one.key, "name": one.name, "unit": one.unit, "help": one.help} for one in FIGURES])


class Row(Struct):
    """`entry`: as received, to compare with, but with figures instead of `language`, what engines have counted.
    `changed`: number of the event."""

    entry: Document
    text: bytes
    changed: int
    language: Counts


class Rows:
    """`number`: number of the last event before the first one of these rows."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        """Number of the last event."""
        self._time_ns = 0
        self.complete_since = number + 1
        """A viewer that has not received this event needs everything: some removals before it are no longer known."""
        self._rows: dict[Key, Row] = {}
        self._gone: dict[Key, int] = {}
        """Removed version -> the event of its removal."""

    def update(self, models: list[Document], time_ns: int = 0) -> Generator[None, None, None]:
        """Makes the new state the next event. A generator, so that other work can run in between. `time_ns`: time of
        the new state."""
        number, seconds = self.number + 1, (time_ns - self._time_ns) / 1e9
        missing = set(self._rows)
        for index, entry in enumerate(models):
            if index % SLICE == SLICE - 1:
                yield
            key = entry["name"], entry["version"]
            missing.discard(key)
            cpu_seconds = [one.pop("cpu_seconds", 0.0) for one in entry.get("instances", ())]
            for one in entry.get("instances", ()):
                one["memory_bytes"] -= one["memory_bytes"] % MEMORY_STEP
            row = self._rows.get(key)
            language = entry.pop("language", {})
            if language:
                figures = figures_of(row.language if row is not None else None, language, seconds)
                entry["figures"] = {name: value for name, value in figures.items() if value not in (None, {})}
            if row is not None and row.entry == entry:
                row.language = language
                continue
            self._rows[key] = Row(entry, _text(entry, cpu_seconds), number, language)
            self._gone.pop(key, None)
        for key in missing:
            del self._rows[key]
            self._gone[key] = number
        while len(self._gone) > KEPT_GONE:
            oldest = next(iter(self._gone))
            self.complete_since = self._gone.pop(oldest)
        self.number, self._time_ns = number, time_ns

    def since(self, number: int) -> tuple[bytes, bytes]:
        """The rows that changed after an event, and the removed versions, both as JSON."""
        rows = [row.text for row in self._rows.values() if row.changed > number]
        gone = [key for key, removed in self._gone.items() if removed > number]
        return b"[" + b",".join(rows) + b"]", _encode(gone)


def _text(entry: Document, cpu_seconds: list[float]) -> bytes:
    entry = dict(entry)
    if "instances" in entry:
        pairs = zip(entry["instances"], cpu_seconds, strict=True)
        entry["instances"] = [_filled(one) | {"cpu_seconds": cpu} for one, cpu in pairs]
    if "counters" in entry:
        entry["counters"] = _filled(entry["counters"])
    return _encode(_filled(entry))


def _filled(document: Document) -> Document:
    return {name: value for name, value in document.items() if value}


class Viewer:
    """`caller`: the name of who pays, see `caller_shares`. `roles`: those of its client, which the page shows."""

    def __init__(self, feed: PageFeed, exchange: Exchange, caller: str, roles: Iterable[str]) -> None:
        self.feed = feed
        self.exchange = exchange
        self.caller = caller
        self.roles = sorted(roles)
        self.number = 0
        """The last event sent."""
        self.missed = 0
        """Number of consecutive events not sent because the viewer does not read."""
        self.is_down = False
        """The viewer has been told that there is no server."""

    def disconnected(self) -> None:
        self.feed.remove(self)

    def stop(self) -> None:
        """Ends the stream."""
        self.feed.remove(self)
        self.exchange.end_events()


class _ActivityQuery(Ticket):
    __slots__ = ("_feed",)

    def __init__(self, feed: PageFeed) -> None:
        self._feed = feed

    def settle(self, answer: Any) -> None:
        self._feed.answered(answer)

    def fail(self, error: ServeError) -> None:
        self._feed.failed(error)


class PageFeed:
    """`servers`: other servers that the page shows."""

    def __init__(self, link: GatewayLink, servers: Sequence[str] = ()) -> None:
        self._link = link
        self._servers = _encode(servers)
        self._loop = link.bind()
        self._viewers: dict[Viewer, None] = {}
        self._callers: Counter[str] = Counter()
        self._rows = Rows()
        self._facts = b""
        """The part of the last document that every event repeats, as JSON. Empty: there is no document."""
        self._error = ""
        """Why there is no document, if the broker has been queried."""
        self._next_at = 0.0
        """The broker is not queried earlier, however often viewers connect and disconnect."""
        self._asking = False
        self._timer: Any = None

    # ------------------------------------------------------------------------------------ viewers

    def make_room(self, caller: str) -> None:
        """Raises Unavailable if the caller has too many streams. If there are too many, but the caller has few of them,
        the oldest one of the caller with the most ends."""
        count_of_caller = self._callers[caller]
        if caller and count_of_caller >= CALLER_VIEWERS:
            raise Unavailable(f"{count_of_caller} pages of this caller are open, the limit; close one of them")
        if len(self._viewers) < VIEWERS:
            return
        name, count = max(self._callers.items(), key=itemgetter(1))
        if count_of_caller + 1 >= count:
            raise Unavailable(f"{VIEWERS} pages are open at this gateway, the limit; close one of them")
        next(viewer for viewer in self._viewers if viewer.caller == name).stop()

    def add(self, viewer: Viewer) -> None:
        """The first event is sent as soon as there is one."""
        self._viewers[viewer] = None
        self._callers[viewer.caller] += 1
        if self._facts or self._error:
            self._send(viewer, {})
        self._schedule()

    def remove(self, viewer: Viewer) -> None:
        if viewer not in self._viewers:
            return
        del self._viewers[viewer]
        self._callers[viewer.caller] -= 1
        if not self._callers[viewer.caller]:
            del self._callers[viewer.caller]
        if not self._viewers:
            self._forget("")

    def end(self) -> None:
        """Ends all streams: the viewers reconnect, and their access is checked again."""
        for viewer in list(self._viewers):
            viewer.stop()

    # ------------------------------------------------------------------------------------ the broker

    def _schedule(self) -> None:
        if self._viewers and not self._asking and self._timer is None:
            self._timer = self._loop.call_at(self._next_at, self._ask)

    def _ask(self) -> None:
        self._timer = None
        if not self._viewers:
            return
        self._asking = True
        self._next_at = self._loop.time() + PERIOD_S
        try:
            self._link.session.ask(_ActivityQuery(self), "activity", _NO_TIME)
        except ServeError as error:
            self.failed(error)
            return
        self._link.send_soon()

    def failed(self, error: ServeError) -> None:
        self._forget(str(error))
        for viewer in list(self._viewers):
            self._send(viewer, {})
        self._done()

    def _forget(self, error: str) -> None:
        self._rows = Rows(self._rows.number)
        self._facts = b""
        self._error = error

    def _done(self) -> None:
        self._asking = False
        self._schedule()

    def answered(self, document: Any) -> None:
        self._next_at = max(self._next_at, self._loop.time() + document.get("took_ns", 0) / 1e9 / BROKER_SHARE)
        facts = _encode({name: document[name] for name in ("time_ns", "server", "gpus")})[1:-1]
        rows = self._rows
        work = rows.update(document["models"], document["time_ns"])
        self._link.turns.run(work, lambda _: self._updated(rows, facts), self._not_updated)

    def _updated(self, rows: Rows, facts: bytes) -> None:
        """`rows` were current when the update began; all viewers may have left since then."""
        if rows is self._rows and self._viewers:
            self._error = ""
            self._facts = facts
            shared: dict[int, bytes] = {}
            for viewer in list(self._viewers):
                self._send(viewer, shared)
        self._done()

    def _not_updated(self, error: Exception) -> None:
        log.error("cannot read the state of the server for the page", exc_info=error)
        self.failed(Internal("the gateway could not read the state of the server; see its log"))

    # ------------------------------------------------------------------------------------ events

    def _send(self, viewer: Viewer, shared: dict[int, bytes]) -> None:
        """`shared`: texts of this event, by the last event that a viewer has received."""
        exchange, number = viewer.exchange, viewer.number
        if not exchange.writable:
            viewer.missed += 1
            if viewer.missed > STALLED:
                self.remove(viewer)
                exchange.abort()
            return
        viewer.missed = 0
        if not self._facts:
            if not viewer.is_down:
                viewer.is_down = True
                exchange.send_event(named_event("down", _encode({"error": self._error})))
            return
        viewer.is_down = False
        viewer.number = self._rows.number
        if number < self._rows.complete_since:
            exchange.send_event(self._state(viewer))
            return
        if number not in shared:
            shared[number] = self._change(number)
        exchange.send_event(shared[number])

    def _state(self, viewer: Viewer) -> bytes:
        rows, _ = self._rows.since(0)
        return named_event(
            "state",
            b'{"seq":%d,%b,"roles":%b,"servers":%b,"figures":%b,"models":%b}'
            % (self._rows.number, self._facts, _encode(viewer.roles), self._servers, _FIGURES, rows),
        )

    def _change(self, number: int) -> bytes:
        rows, gone = self._rows.since(number)
        return named_event(
            "change", b'{"seq":%d,%b,"models":%b,"gone":%b}' % (self._rows.number, self._facts, rows, gone)
        )
