"""The fixtures of the client suite."""

from __future__ import annotations

from tests.conformance.client_ways import client, connect, link, way
from tests.support.broker.running_broker import broker

__all__ = ["broker", "client", "connect", "link", "way"]
