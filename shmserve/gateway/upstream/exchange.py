"""A request over HTTP, as the endpoints for it see it: what it waits for, and its response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from shmserve.errors import ServeError
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.plans import RequestPlan
from shmserve.gateway.limits.caller_shares import Payer
from shmserve.gateway.limits.turns import SlicedWork
from shmserve.gateway.upstream.documents import BrokerQuery, Route, same
from shmserve.gateway.upstream.link import GatewayLink, Piece
from shmserve.gateway.upstream.requests import Charge, ModelRequest, PendingQuery, ask, serve_error
from shmserve.session.uploads import of_json

JSON = b"application/json"


class Watcher(Protocol):
    """What is made for the request elsewhere."""

    def disconnected(self) -> None:
        """The client has disconnected."""

    def stop(self) -> None:
        """Called when the gateway stops: ends a stream that would otherwise not end."""


class RequestHead(Protocol):
    """The fields of the request's head that endpoints use."""

    @property
    def route(self) -> Route: ...

    @property
    def token(self) -> str: ...

    @property
    def roles(self) -> frozenset[str]: ...

    @property
    def etags(self) -> str: ...

    @property
    def forwarded(self) -> dict[str, str] | None: ...

    @property
    def old(self) -> bool: ...


class Exchange(Protocol):
    @property
    def head(self) -> RequestHead: ...

    @property
    def address(self) -> str: ...

    def payer(self) -> Payer: ...

    def hold(self, size: int) -> None: ...

    def wait_for(self, ticket: Charge, resume: Callable[[], None] | None = None) -> None: ...

    def watch(self, viewer: Watcher, resume: Callable[[], None] | None = None) -> None: ...

    def work(
        self, work: SlicedWork[Any], then: Callable[[Any], None], failed: Callable[[ServeError], None] | None = None
    ) -> None: ...

    def answer(
        self, status: int, parts: list[Buffer], kind: bytes = JSON, json_length: int | None = None, more: bytes = b""
    ) -> None: ...

    def fail(self, error: ServeError, request_id: str = "") -> None: ...

    @property
    def writable(self) -> bool: ...

    def begin_events(self, status: int = 200, more: bytes = b"", first: bytes = b"") -> None: ...

    def send_event(self, data: bytes) -> None: ...

    def end_events(self, last: bytes = b"") -> None: ...

    def abort(self) -> None: ...


def model_request(
    exchange: Exchange, model: str, version: str, plan: RequestPlan, pieces: Sequence[Piece]
) -> ModelRequest:
    return ModelRequest(exchange.payer(), model, version, plan, pieces, plan.options.id, exchange.head.forwarded)


def ask_for(
    exchange: Exchange,
    link: GatewayLink,
    query: BrokerQuery,
    then: Callable[[Any], None],
    failed: Callable[[ServeError], None] | None = None,
) -> None:
    """Sends a query. `then` gets its document, and `failed` an error, which otherwise is the response."""
    ticket = PendingQuery(query, then, failed or exchange.fail)
    ask(link, exchange.payer(), ticket, query)
    exchange.wait_for(ticket)


def ask_for_config(
    exchange: Exchange,
    link: GatewayLink,
    model: str,
    version: str,
    then: Callable[[Any], None],
    failed: Callable[[ServeError], None] | None = None,
) -> None:
    """Asks for the configuration that decides how a request to the model continues. Like the request, the query waits
    for a model that is loading. The broker announces when other versions serve a model, so that the configuration of
    its default version is known until then."""
    if version:
        body, keep = {"wait": True}, same
    elif (known := link.known_config(model)) is not None:
        try:
            then(known)
        except Exception as error:
            (failed or exchange.fail)(serve_error(error))
        return
    else:
        body, keep = {"wait": True, "follow": True}, partial(link.keep_config, model)
    ask_for(exchange, link, BrokerQuery("config", keep, model, version, of_json(body)), then, failed)
