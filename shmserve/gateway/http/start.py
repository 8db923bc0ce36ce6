"""Builds an HTTP listener."""

from __future__ import annotations

from collections.abc import Callable

from shmserve.gateway.auth.access import EndpointAccess
from shmserve.gateway.auth.header_forwarding import Forward, HeaderParameters
from shmserve.gateway.http.connection import HttpConnection
from shmserve.gateway.http.limits import HttpLimits
from shmserve.gateway.http.listener import HttpListener
from shmserve.gateway.http.requests import Requests
from shmserve.gateway.http.routes import API_ROUTES, KSERVE_ROUTES, METRICS_ROUTES
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.page.feed import PageFeed
from shmserve.gateway.page.requests import PageRequests
from shmserve.gateway.upstream.link import GatewayLink
from shmserve.gateway.upstream.regions import Regions


def make_listener(
    link: GatewayLink, limits: HttpLimits, access: EndpointAccess, *, metrics: bool = False,
    extra: Callable[[], str] = lambda: "", regions: Regions | None = None, forward: Forward | None = None,
    budget: Budget | None = None, openai: bool = True,
) -> HttpListener:  # fmt: skip
    """`metrics`: serve only the Prometheus endpoint. `openai`: serve the OpenAI-compatible endpoints. `extra`: text
    appended to the broker's metrics."""
    servers = access.browsers.servers
    feed = None if metrics else PageFeed(link, servers)
    page = PageRequests(link, feed, servers) if feed is not None else None
    openai = openai and not metrics
    requests = Requests(link, limits, extra, regions or Regions(False), page, openai)
    routes = METRICS_ROUTES if metrics else API_ROUTES if openai else KSERVE_ROUTES
    headers = HeaderParameters(forward, lambda: link.session.wants_trace_context)
    return HttpListener(
        lambda made, client: HttpConnection(made, requests, client), link, limits, access, routes, headers, budget,
        feed.end if feed is not None else lambda: None,
    )  # fmt: skip
