"""Client sessions without a link: messages in, messages out, and tickets that record how they ended."""

from __future__ import annotations

from typing import Any

from shmserve.errors import ServeError
from shmserve.protocol import codec
from shmserve.protocol.messages import PROTOCOL, Answer, ClientMessage, Hello, Reply, Welcome
from shmserve.session import Packet, RowReply, Session, Ticket, inline_result

decode = codec.Codec(ClientMessage).decode


class RecordingTicket(Ticket):
    __slots__ = ("answer", "ends", "error")

    def __init__(self) -> None:
        self.answer: Any = None
        self.error: ServeError | None = None
        self.ends = 0
        """How many times the ticket was settled or failed."""

    def settle(self, answer: Any) -> None:
        self.ends += 1
        try:
            self.answer = inline_result(answer) if isinstance(answer, (Reply, RowReply)) else answer
        except ServeError as error:
            self.error = error

    def fail(self, error: ServeError) -> None:
        self.ends += 1
        self.error = error


def feed(session: Session, *messages: Any) -> int:
    return session.receive(codec.encode(list(messages)))


def connect(session: Session, owner: int = 1, memory: str = "memfd", batch_requests: int = 0) -> Session:
    """Exchanges Hello and Welcome, also after a lost connection. `batch_requests` 0: the server does not know
    InferBatch."""
    (hello,) = decode(session.hello(7, "test").data)
    assert hello == Hello(PROTOCOL, 7, "test", memory)
    limits = {"client_requests": 10} | ({"batch_requests": batch_requests} if batch_requests else {})
    feed(session, Welcome(PROTOCOL, owner, "server", limits))
    return session


def connected(memory: str = "memfd", owner: int = 1) -> Session:
    return connect(Session(memory), owner, memory)


def confirm_loaded(session: Session) -> None:
    """Answer the query that a client sends after a lost connection, before it resends its requests."""
    question = sent(session)[-1]
    assert question.what == "loaded"
    feed(session, Answer(question.request, b'{"loaded": true}'))


def decoded(packets: list[Packet]) -> list[Any]:
    return [message for packet in packets for message in decode(packet.data)]


def sent(session: Session) -> list[Any]:
    return decoded(session.take())


def ask(session: Session, inputs: dict[str, Any], **options: Any) -> tuple[RecordingTicket, list[Packet]]:
    ticket = RecordingTicket()
    session.infer(ticket, "m", inputs, 100.0, **options)
    return ticket, session.take()
