"""The client session: the client's half of the protocol without input or output, for every client and every link."""

from __future__ import annotations

from shmserve.session.inputs import Raw
from shmserve.session.outbox import Packet
from shmserve.session.results import Result, inline_result
from shmserve.session.session import Session
from shmserve.session.ticket import Ticket

__all__ = ["Packet", "Raw", "Result", "Session", "Ticket", "inline_result"]
