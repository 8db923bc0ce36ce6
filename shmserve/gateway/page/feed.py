"""The state of the server, once a second: recorded, and streamed to web pages.

The gateway queries the broker once a second, whether or not a page is open, and less often if the reply costs more
than its share of a core. Invariant: no viewer waits for another. A viewer that does not read is sent nothing. When it
reads again, one event has everything that has changed. After missing STALLED events it is disconnected.
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
from shmserve.gateway.page.recorder import SERVER, Key, Recorder
from shmserve.gateway.page.timeline import Timeline
from shmserve.gateway.upstream.exchange import Exchange
from shmserve.gateway.upstream.link import GatewayLink
from shmserve.gateway.upstream.requests import NO_TIME
from shmserve.llm.figures import FIGURES, Counts, figures_of
from shmserve.protocol.rates import MEMORY_STEP, percentiles, rates
from shmserve.session import Ticket
from shmserve.session.uploads import of_json

log = logging.getLogger("shmserve.gateway")
_encode = msgspec.json.Encoder().encode
PERIOD_S = 1.0
BROKER_SHARE = 0.02
"""Maximum fraction of the broker's time spent on open pages."""
RECORDING_SHARE = 0.006
"""The same for the history while no page is open. Sending and reading a state cost about half as much as making it, and
all together stays below 1 % of a core."""
VIEWERS = 64
"""Maximum number of streams of a gateway."""
CALLER_VIEWERS = 16
"""Maximum number of streams of one caller. Callers without a token on this machine count as one, without this limit."""
STALLED = 10
"""Number of events after which a viewer that reads none of them is disconnected."""
SLICE = 50
"""Number of versions compared in one slice of work."""
KEPT_GONE = 1000
"""Number of removed versions remembered. A viewer that has missed earlier removals gets everything."""
RATES = {
    "requests": "requests_per_s",
    "failed": "failed_per_s",
    "p50": "p50",
    "p99": "p99",
    "wait": "queue_seconds",
    "batch": "mean_batch",
    "busy": "busy",
}
"""Names of the page -> names of `rates`."""
Document = dict[str, Any]
_FIGURES = _encode([{"key": one.key, "name": one.name, "unit": one.unit, "help": one.help} for one in FIGURES])


class VersionRow(Struct):
    """`entry`: as received, to compare with, but with figures instead of `language`, what engines have counted.
    `changed`: number of the event. `rates`: of the interval before it."""

    entry: Document
    changed: int
    cpu_seconds: list[float]
    rates: Document
    language: Counts
    text: bytes = b""
    """The entry as JSON, once a viewer has needed it."""

    @property
    def key(self) -> Key:
        return self.entry["name"], self.entry["version"]

    @property
    def now(self) -> Document:
        """Requests that wait and that run."""
        return {"queue": self.entry.get("queued", 0), "running": self.entry.get("in_flight", 0)}


class VersionRows:
    """`timeline`: learns of changes. `number`: number of the last event before the first one of these rows."""

    def __init__(self, timeline: Timeline, number: int = 0) -> None:
        self._timeline = timeline
        self.number = number
        """Number of the last event."""
        self.complete_since = number + 1
        """A viewer that has not received this event needs everything: some removals before it are no longer known."""
        self._rows: dict[Key, VersionRow] = {}
        self._gone: dict[Key, int] = {}
        """Removed version -> the event of its removal."""

    def update(
        self, models: list[Document], seconds: float, names: Iterable[str] | None = None
    ) -> Generator[None, None, list[VersionRow]]:
        """Makes the new state the next event. A generator, so that other work can run in between. Returns the rows that
        changed. `seconds`: the time since the last state. `names`: the models that may have changed; None: all."""
        number = self.number + 1
        known = None if names is None else set(names)
        missing = {key for key in self._rows if known is None or key[0] in known}
        changed = []
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
            if row is not None:
                self._timeline.compare_versions(number, row.entry, entry)
            ready = sum(one["state"] == "ready" for one in entry.get("instances", ()))
            changes = rates(row.entry if row is not None else None, entry, seconds, ready)
            self._rows[key] = row = VersionRow(entry, number, cpu_seconds, changes, language)
            self._gone.pop(key, None)
            changed.append(row)
        for key in missing:
            del self._rows[key]
            self._gone[key] = number
        while len(self._gone) > KEPT_GONE:
            oldest = next(iter(self._gone))
            self.complete_since = self._gone.pop(oldest)
        self.number = number
        return changed

    def versions(self) -> list[VersionRow]:
        """Those of versions that have been loaded."""
        return [row for (_, version), row in self._rows.items() if version]

    def since(self, number: int) -> tuple[bytes, bytes]:
        """The rows that changed after an event, and the removed versions, both as JSON."""
        rows = [_text(row) for row in self._rows.values() if row.changed > number]
        gone = [key for key, removed in self._gone.items() if removed > number]
        return b"[" + b",".join(rows) + b"]", _encode(gone)


def _text(row: VersionRow) -> bytes:
    if not row.text:
        entry = dict(row.entry)
        if "instances" in entry:
            pairs = zip(entry["instances"], row.cpu_seconds, strict=True)
            entry["instances"] = [_filled(one) | {"cpu_seconds": cpu} for one, cpu in pairs]
        if "counters" in entry:
            entry["counters"] = _filled(entry["counters"])
        row.text = _encode(_filled(entry))
    return row.text


def _shown(row: VersionRow) -> tuple[str, str, Document | None]:
    """The rates of a version, without empty ones; None if they are unknown."""
    known = row.rates["requests_per_s"] is not None
    return *row.key, _filled({name: row.rates[key] for name, key in RATES.items()}) if known else None


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
        self.recorder = Recorder()
        self._link = link
        self._servers = _encode(servers)
        self._loop = link.bind()
        self._viewers: dict[Viewer, None] = {}
        self._callers: Counter[str] = Counter()
        self._timeline = Timeline()
        self._rows = VersionRows(self._timeline)
        self._server: Document | None = None
        """The server as last seen, also before an outage."""
        self._time_ns = 0
        """Time of the last document, as the broker reports it; 0: there is none."""
        self._facts = b""
        """The part of the last document that every event repeats, as JSON. Empty: there is no document."""
        self._error = ""
        """Why there is no document, if the broker has been queried."""
        self._asked_at = -PERIOD_S
        self._cost_s = 0.0
        """Time that the broker has spent on the last document."""
        self._running = False
        self._asking = False
        self._timer: Any = None

    def start(self) -> None:
        """Begins to query the broker."""
        self._running = True
        self._schedule()

    def stop(self) -> None:
        self._running = False
        self._schedule()

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

    def end(self) -> None:
        """Ends all streams: the viewers reconnect, and their access is checked again."""
        for viewer in list(self._viewers):
            viewer.stop()

    # ------------------------------------------------------------------------------------ the broker

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._asking:
            share = BROKER_SHARE if self._viewers else RECORDING_SHARE
            self._timer = self._loop.call_at(self._asked_at + max(PERIOD_S, self._cost_s / share), self._ask)

    def _ask(self) -> None:
        self._timer = None
        self._asking = True
        self._asked_at = self._loop.time()
        try:
            body = of_json({"since": self._time_ns}) if self._time_ns else None
            self._link.session.ask(_ActivityQuery(self), "activity", NO_TIME, body=body)
        except ServeError as error:
            self.failed(error)
            return
        self._link.send_soon()

    def failed(self, error: ServeError) -> None:
        self._rows = VersionRows(self._timeline, self._rows.number)
        self._time_ns = 0
        self._facts = b""
        self._error = str(error)
        for viewer in list(self._viewers):
            self._send(viewer, {})
        self._done()

    def _done(self) -> None:
        self._asking = False
        self._schedule()

    def answered(self, document: Any) -> None:
        self._link.turns.run(self._take(document), lambda _: self._taken(), self._not_taken)

    def _take(self, document: Any) -> Generator[None, None, None]:
        """Records the document, and makes it the next event."""
        time_ns = document["time_ns"]
        seconds = (time_ns - self._time_ns) / 1e9 if self._time_ns else 0.0
        server = document["server"]
        if self._server is not None:
            self._timeline.compare_servers(self._rows.number + 1, self._server, server)
        self._server = server
        changed = yield from self._rows.update(document["models"], seconds, document.get("changed"))
        total = self._record(time_ns // 1_000_000_000, seconds, changed)
        self._time_ns = time_ns
        self._cost_s = document.get("took_ns", 0) / 1e9
        self._error = ""
        facts = {name: document[name] for name in ("time_ns", "server", "gpus")} | {"total": total}
        self._facts = _encode(facts | {"rates": [_shown(row) for row in changed if row.entry["version"]]})[1:-1]

    def _record(self, second: int, seconds: float, changed: Iterable[VersionRow]) -> Document:
        """Returns the values of all versions together."""
        times: Counter[int] = Counter()
        answered = waited = 0.0
        values = {}
        for row in changed:
            if not row.entry["version"]:
                continue
            one = row.rates
            values[row.key] = {name: one[key] for name, key in RATES.items()} | row.now
            times.update(one["request_times"])
            if one["queue_seconds"] is not None:
                count = one["requests_per_s"] - one["failed_per_s"]
                answered += count
                waited += count * one["queue_seconds"]
        total: Document = {
            name: sum(one[name] or 0 for one in values.values()) if seconds else None for name in ("requests", "failed")
        }
        rows = self._rows.versions()
        total |= {name: sum(row.now[name] for row in rows) for name in ("queue", "running")}
        total |= percentiles(times) | {"wait": waited / answered if answered else None}
        self.recorder.record(second, seconds, [row.key for row in rows], values | {SERVER: total})
        return total | {"times": times}

    def _taken(self) -> None:
        shared: dict[int, bytes] = {}
        for viewer in list(self._viewers):
            self._send(viewer, shared)
        self._done()

    def _not_taken(self, error: Exception) -> None:
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
            b'{"seq":%d,%b,"roles":%b,"servers":%b,"figures":%b,"models":%b,"events":%b}'
            % (self._rows.number, self._facts, _encode(viewer.roles), self._servers, _FIGURES, rows, self._events(0)),
        )

    def _change(self, number: int) -> bytes:
        rows, gone = self._rows.since(number)
        return named_event(
            "change",
            b'{"seq":%d,%b,"models":%b,"gone":%b,"events":%b}'
            % (self._rows.number, self._facts, rows, gone, self._events(number)),
        )

    def _events(self, number: int) -> bytes:
        """What has happened since an event, without what a state that is being taken has shown so far."""
        return _encode([event for event in self._timeline.since(number) if event.number <= self._rows.number])
