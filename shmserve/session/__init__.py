"""The client's half of the protocol, without sockets, threads or a clock; clients, CLI and gateway share it.

`Session.infer` and `ask` turn a call into a message (`encode`) and a ticket, and put the message into the outbox.
`take` gives the packets to send; `receive` decodes what came and settles tickets with results (`decode`). `memory` owns
the arena for inputs and maps the outputs of others; `announcements` is what the server must be told of segments.
After a new connection `resend` renews the requests that have no answer yet. Tensors on GPUs are in `gpu`; `staging`
decides whether they go by way of the host.
"""

from __future__ import annotations

from shmserve.session.decode import Result, inline_result
from shmserve.session.encode import Raw
from shmserve.session.outbox import Incoming, Packet
from shmserve.session.session import Session
from shmserve.session.streams import WINDOW, StreamTicket
from shmserve.session.ticket import Ticket

__all__ = ["WINDOW", "Incoming", "Packet", "Raw", "Result", "Session", "StreamTicket", "Ticket", "inline_result"]
