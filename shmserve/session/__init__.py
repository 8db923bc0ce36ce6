"""The client session: the client's half of the protocol without input or output, for every client and every link."""

from __future__ import annotations

from shmserve.session.decode import Result, inline_result
from shmserve.session.encode import Raw
from shmserve.session.outbox import Incoming, Packet
from shmserve.session.session import Session
from shmserve.session.streams import WINDOW, StreamTicket
from shmserve.session.ticket import Ticket

__all__ = ["WINDOW", "Incoming", "Packet", "Raw", "Result", "Session", "StreamTicket", "Ticket", "inline_result"]
