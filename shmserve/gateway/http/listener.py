"""One HTTP listener, and the state that its connections share. The Prometheus endpoint is such a listener with one
path."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

from shmserve.gateway.auth.access import EndpointAccess
from shmserve.gateway.auth.header_forwarding import HeaderParameters
from shmserve.gateway.http.heads import HttpHeads
from shmserve.gateway.http.limits import HttpLimits
from shmserve.gateway.http.routes import RouteTable
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.listeners.callers import TURNS, Callers
from shmserve.gateway.upstream.link import GatewayLink


class HttpListener(Callers):
    """`connect`: as for `Callers`. `routes`: the paths that it serves. `end_streams`: ends
    the event streams of the page, so that access is checked again."""

    def __init__(
        self, connect: Callable[[HttpListener, str], Any], link: GatewayLink, limits: HttpLimits,
        access: EndpointAccess, routes: RouteTable, forward: HeaderParameters | None, budget: Budget | None,
        end_streams: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        super().__init__(
            link.bind(),
            connect,
            limits,
            limits.read_timeout_s / TURNS,
            budget or Budget(),
            link.shares,
            link.turns,
            link.reads,
            link.backlog,
        )
        self.link = link
        self.limits = limits
        self._end_streams = end_streams
        self.heads = HttpHeads(access, routes, forward)

    async def renew(self, tls: ssl.SSLContext | None) -> None:
        self.heads.forget()
        self._end_streams()
        await super().renew(tls)
