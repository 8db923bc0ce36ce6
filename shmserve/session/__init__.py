"""The client half of the protocol, without sockets, threads or a clock; clients, CLI and gateway share it.

`Session.infer` and `ask` turn a call into a message (`encode`) and a ticket, and append the message to the outbox.
`take` returns the packets to send; `receive` decodes incoming messages and settles tickets with results (`decode`).
`tickets` keeps the unanswered requests. `memory` owns the arena for inputs and maps the output segments of other
processes; `announcements` lists the segments that the server has not yet seen. After a reconnect, `resend` prepares
unanswered requests for the new connection. Tensors on GPUs are in `gpu`; `staging` decides whether they are sent
through host memory.
"""

from __future__ import annotations

from shmserve.session.columns import RowReply
from shmserve.session.decode import Result, inline_result
from shmserve.session.encode import Raw
from shmserve.session.outbox import Incoming, Packet
from shmserve.session.session import Session
from shmserve.session.streams import WINDOW, StreamTicket
from shmserve.session.ticket import Ticket

__all__ = [
    "WINDOW",
    "Incoming",
    "Packet",
    "Raw",
    "Result",
    "RowReply",
    "Session",
    "StreamTicket",
    "Ticket",
    "inline_result",
]
