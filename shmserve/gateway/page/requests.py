"""Requests of the web page: its files, the event stream, and the details of one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from shmserve.errors import ServeError, Unsupported
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.caller_shares import Payer
from shmserve.gateway.page.feed import PageFeed, Viewer, ViewerConnection
from shmserve.gateway.page.files import PageFiles, confinement
from shmserve.gateway.upstream.documents import BrokerQuery, Route, error_body
from shmserve.gateway.upstream.link import GatewayLink
from shmserve.gateway.upstream.requests import Charge, PendingQuery, ask
from shmserve.protocol.actions import Action
from shmserve.protocol.roles import OPERATE, ROLES, remove_private

_JSON = b"application/json"
_TEXT = b"text/plain"
_PREFLIGHT = b"Access-Control-Allow-Headers: Authorization\r\nAccess-Control-Max-Age: 600\r\n"
_encode = msgspec.json.Encoder().encode


class PageHead(Protocol):
    """The fields of a request's head that the page uses."""

    @property
    def route(self) -> Route: ...

    @property
    def token(self) -> str: ...

    @property
    def roles(self) -> frozenset[str]: ...

    @property
    def etags(self) -> str: ...

    @property
    def old(self) -> bool: ...


class PageConnection(ViewerConnection, Protocol):
    @property
    def address(self) -> str: ...

    def payer(self, token: str) -> Payer: ...

    def wait_for(self, ticket: Charge, resume: Callable[[], None] | None = None) -> None: ...

    def watch(self, viewer: Viewer) -> None: ...

    def begin_events(self, status: int = 200, more: bytes = b"") -> None: ...

    def fail(self, error: ServeError, request_id: str = "") -> None: ...

    def answer(
        self, status: int, parts: list[Buffer], kind: bytes = b"", json_length: int | None = None, more: bytes = b""
    ) -> None: ...


class PageRequests:
    """`servers`: other servers that the page shows."""

    def __init__(self, link: GatewayLink, feed: PageFeed, servers: Sequence[str] = ()) -> None:
        self._link = link
        self._feed = feed
        self._files = PageFiles()
        self._confined = confinement(servers)

    def begin(self, connection: PageConnection, head: PageHead) -> None:
        """Answers the request. Raises the errors that the client receives."""
        if head.route.action is Action.PAGE_FILE:
            self._send_file(connection, head)
        elif head.route.action is Action.PAGE_EVENTS:
            self._begin_events(connection, head)
        elif head.route.action is Action.PAGE_PREFLIGHT:
            connection.answer(200, [], _TEXT, more=_PREFLIGHT)
        else:
            self._ask_report(connection, head)

    def _send_file(self, connection: PageConnection, head: PageHead) -> None:
        file = self._files.find(head.route.model)
        if file is None:
            connection.answer(404, [error_body("Not Found")], _JSON)
            return
        more = b"ETag: %b\r\nCache-Control: no-cache\r\n" % file.etag.encode() + self._confined
        if file.etag in head.etags:
            connection.answer(304, [], file.kind, more=more)
        else:
            connection.answer(200, [file.body], file.kind, more=more)

    def _begin_events(self, connection: PageConnection, head: PageHead) -> None:
        if head.old:
            raise Unsupported("the event stream requires HTTP/1.1")
        caller = connection.payer(head.token).name
        self._feed.make_room(caller)
        viewer = Viewer(self._feed, connection, caller, head.roles)
        connection.watch(viewer)
        connection.begin_events(more=self._confined)
        self._feed.add(viewer)

    def _ask_report(self, connection: PageConnection, head: PageHead) -> None:
        route = head.route

        def show(report: Any) -> None:
            if OPERATE not in (ROLES.get(role) for role in head.roles):
                remove_private("report", report)
            more = b"Cache-Control: no-store\r\n" + self._confined
            connection.answer(200, [_encode(report)], _JSON, more=more)

        query = BrokerQuery("report", model=route.model, version=route.version)
        ticket = PendingQuery(query, show, connection.fail)
        ask(self._link, connection.payer(head.token), ticket, query)
        connection.wait_for(ticket)
