"""Requests of the web page: its files, the event stream, the history, and the details of one model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.errors import NotFound, Unsupported
from shmserve.gateway.limits.turns import SlicedWork
from shmserve.gateway.page.feed import PageFeed, Viewer
from shmserve.gateway.page.recorder import SERVER
from shmserve.gateway.upstream.documents import BrokerQuery, error_body
from shmserve.gateway.upstream.exchange import Exchange, ask_for
from shmserve.gateway.upstream.link import GatewayLink
from shmserve.protocol.actions import Action
from shmserve.protocol.roles import is_operator, remove_private

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
_KINDS = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".png": b"image/png",
    ".svg": b"image/svg+xml",
}
_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' blob: data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
_CONFINED = (
    b"X-Content-Type-Options: nosniff\r\n"
    b"X-Frame-Options: DENY\r\n"
    b"Referrer-Policy: same-origin\r\n"
    b"Cross-Origin-Opener-Policy: same-origin\r\n"
    b"Cross-Origin-Resource-Policy: same-origin\r\n"
)


def confinement(servers: Iterable[str]) -> bytes:
    """Headers of all responses of the page. The page runs only its own code, connects to no hosts but these servers,
    and cannot be shown in a frame. Pages of other origins cannot use its files. Trusted types forbid it to parse text
    as HTML."""
    policy = (*_POLICY, " ".join(("connect-src 'self'", *servers)))
    return b"Content-Security-Policy: " + "; ".join(policy).encode() + b"\r\n" + _CONFINED


class PageFile(Struct, frozen=True):
    kind: bytes
    body: bytes
    etag: str


def page_files() -> dict[str, PageFile]:
    """The files by their paths relative to the folder."""
    return {
        path.relative_to(FOLDER).as_posix(): _read(path)
        for path in sorted(FOLDER.rglob("*"))
        if path.is_file() and path.suffix in _KINDS
    }


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    return PageFile(_KINDS[path.suffix], body, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


_TEXT = b"text/plain"
_PREFLIGHT = b"Access-Control-Allow-Headers: Authorization\r\nAccess-Control-Max-Age: 600\r\n"
TRENDS = 8
"""Number of versions whose trends are written in one slice of work."""
_encode = msgspec.json.Encoder().encode


class PageRequests:
    """`servers`: other servers that the page shows."""

    def __init__(self, link: GatewayLink, feed: PageFeed, servers: Sequence[str] = ()) -> None:
        self._link = link
        self._feed = feed
        self._files = page_files()
        self._confined = confinement(servers)
        self._history = (-1, b"")
        """The last history of the server that was requested: its second, and its text."""

    def begin(self, exchange: Exchange) -> None:
        """Answers the request. Raises the errors that the client receives."""
        if exchange.head.route.action is Action.PAGE_FILE:
            self._send_file(exchange)
        elif exchange.head.route.action is Action.PAGE_EVENTS:
            self._begin_events(exchange)
        elif exchange.head.route.action is Action.PAGE_PREFLIGHT:
            exchange.answer(200, [], _TEXT, more=_PREFLIGHT)
        elif exchange.head.route.action is Action.PAGE_HISTORY:
            self._send_history(exchange)
        else:
            self._ask_report(exchange)

    def _send_file(self, exchange: Exchange) -> None:
        file = self._files.get(exchange.head.route.model or INDEX)
        if file is None:
            exchange.answer(404, [error_body("Not Found")])
            return
        more = b"ETag: %b\r\nCache-Control: no-cache\r\n" % file.etag.encode() + self._confined
        if file.etag in exchange.head.etags:
            exchange.answer(304, [], file.kind, more=more)
        else:
            exchange.answer(200, [file.body], file.kind, more=more)

    def _begin_events(self, exchange: Exchange) -> None:
        if exchange.head.old:
            raise Unsupported("the event stream requires HTTP/1.1")
        caller = exchange.payer().name
        self._feed.make_room(caller)
        viewer = Viewer(self._feed, exchange, caller, exchange.head.roles)
        exchange.watch(viewer)
        exchange.begin_events(more=self._confined)
        self._feed.add(viewer)

    def _send_history(self, exchange: Exchange) -> None:
        route, recorder = exchange.head.route, self._feed.recorder
        if not route.model:
            if self._history[0] == recorder.second:
                self._send_json(exchange, self._history[1])
            else:
                exchange.work(self._history_of_all(), partial(self._send_json, exchange))
            return
        curves = recorder.curves((route.model, route.version))
        if curves is None:
            raise NotFound(f"there is no history of version {route.version} of model {route.model}")
        self._send_json(exchange, _encode({"second": recorder.second, **curves}))

    def _history_of_all(self) -> SlicedWork[bytes]:
        """The history of the server, with the trends of all versions. All callers of a second get the same text."""
        recorder = self._feed.recorder
        second = recorder.second
        text = _encode({"second": second} | (recorder.curves(SERVER) or {}))
        trends = []
        for trend in recorder.trends():
            trends.append(_encode(trend))
            if len(trends) % TRENDS == 0:
                yield
        text = b'%b,"trends":[%b]}' % (text[:-1], b",".join(trends))
        self._history = second, text
        return text

    def _send_json(self, exchange: Exchange, text: bytes) -> None:
        exchange.answer(200, [text], more=b"Cache-Control: no-store\r\n" + self._confined)

    def _ask_report(self, exchange: Exchange) -> None:
        route = exchange.head.route

        def show(report: Any) -> None:
            if not is_operator(exchange.head.roles):
                remove_private("report", report)
            self._send_json(exchange, _encode(report))

        query = BrokerQuery("report", model=route.model, version=route.version)
        ask_for(exchange, self._link, query, show)
