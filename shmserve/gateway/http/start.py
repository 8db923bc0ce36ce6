"""Builds an HTTP listener."""

from __future__ import annotations

from collections.abc import Callable

from shmserve.gateway.auth.access import EndpointAccess
from shmserve.gateway.auth.header_forwarding import Forward, HeaderParameters
from shmserve.gateway.http.connection import HttpConnection
from shmserve.gateway.http.limits import HttpLimits
from shmserve.gateway.http.listener import HttpListener
from shmserve.gateway.http.requests import Requests
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.page.feed import PageFeed
from shmserve.gateway.page.requests import PageRequests
from shmserve.gateway.upstream.link import GatewayLink
from shmserve.gateway.upstream.regions import Regions


def make_listener(
    link: GatewayLink, limits: HttpLimits, access: EndpointAccess, *, metrics: bool = False,
    extra: Callable[[], str] = lambda: "", regions: Regions | None = None, forward: Forward | None = None,
    budget: Budget | None = None,
) -> HttpListener:  # fmt: skip
    """`metrics`: serve the Prometheus endpoint. `extra`: text appended to the broker's metrics."""
    feed = PageFeed(link)
    requests = Requests(link, limits, extra, regions or Regions(False), PageRequests(link, feed))
    headers = HeaderParameters(forward, lambda: link.session.wants_trace_context)
    return HttpListener(
        lambda made: HttpConnection(made, requests), link, limits, access, metrics, headers, budget, feed.end
    )
