"""HTTP connections of the gateway on a transport, an event loop and a handler that the test controls."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from shmserve.gateway.auth.access import EndpointAccess
from shmserve.gateway.http.connection import HttpConnection, HttpExchange
from shmserve.gateway.http.heads import HttpHeads
from shmserve.gateway.http.limits import HttpLimits
from shmserve.gateway.http.routes import NoRoute
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.backlog import InputBacklog
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.caller_shares import CallerShares
from shmserve.gateway.limits.turns import JobTurns, ReadTurns
from shmserve.gateway.upstream.receive import ReceiveBuffer
from shmserve.protocol.roles import ROLES
from tests.support.manual_loop import ManualLoop


class Transport:
    """Records what the connection writes, and whether it reads. Also used for HTTP/2."""

    def __init__(self) -> None:
        self.sent = b""
        self.closed = False
        self.reads: Any = True
        self.unsent = 0

    def write(self, data: bytes) -> None:
        self.sent += data

    def writelines(self, parts: list[Any]) -> None:
        self.sent += b"".join(map(bytes, parts))

    def close(self) -> None:
        self.closed = True

    abort = write_eof = close

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def get_extra_info(self, name: str) -> Any:
        return ("192.0.2.1", 1000)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closed


class Echo:
    """Answers each request with its body, at once or when the test calls `answers`."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once
        self.answers: list[Callable[[], None]] = []

    def begin(self, exchange: HttpExchange, body: Any) -> None:
        refusal = exchange.head.refusal
        if isinstance(refusal, NoRoute):
            exchange.answer(refusal.status, [b"?"])
        elif self.at_once:
            exchange.answer(200, [body])
        else:
            self.answers.append(lambda: exchange.answer(200, [body]))

    def prepare(self, exchange: HttpExchange, first: Buffer) -> None:
        head = exchange.head
        half = head.length // 2
        begin, end = ReceiveBuffer(half), ReceiveBuffer(head.length - half)

        def whole(left: Buffer) -> None:
            assert not left
            exchange.complete()
            exchange.whole(bytes(begin.memory) + bytes(end.memory))

        exchange.fill([begin, end], first, whole)


def shared(loop: Any) -> Any:
    """The link of a listener, as far as it has what all endpoints share."""
    return SimpleNamespace(
        bind=lambda: loop,
        shares=CallerShares(),
        turns=JobTurns(loop),
        reads=ReadTurns(loop),
        backlog=InputBacklog(loop),
    )


def http_listener(budget: Budget | None = None, heads: HttpHeads | None = None, **limits: Any) -> Any:
    """What connections use of their listener. `limits`: see `HttpLimits`."""
    loop: Any = ManualLoop()
    return SimpleNamespace(
        turn=0, now=lambda: 0.0, stopping=False, heads=heads or HttpHeads(EndpointAccess(ROLES)),
        limits=HttpLimits(**limits), loop=loop, turns=JobTurns(loop), reads=ReadTurns(loop), backlog=InputBacklog(loop),
        enter=lambda connection: True, leave=lambda connection: None, budget=budget or Budget(1 << 30),
        answered=lambda status: None, min_bytes=10, idle_turns=100, shares=CallerShares(),
    )  # fmt: skip


def connected(
    at_once: bool = True, budget: Budget | None = None, listener: Any = None, handler: Any = None, **limits: int
) -> tuple[Any, Transport, Echo, ManualLoop]:
    """A connection of `listener`, by default of one of its own, to `handler`, by default an `Echo`."""
    listener, handler = listener or http_listener(budget, None, **limits), handler or Echo(at_once)
    connection, transport = HttpConnection(listener, handler), Transport()
    connection.connection_made(transport)
    return connection, transport, handler, listener.loop


def receive(connection: Any, data: bytes) -> None:
    """Passes `data` to the connection, as the event loop does."""
    while data:
        space = connection.get_buffer(-1)
        count = min(len(space), len(data))
        space[:count] = data[:count]
        data = data[count:]
        connection.buffer_updated(count)


def lines(*headers: str, first: str = "POST /v2/models/m/infer HTTP/1.1") -> bytes:
    """The head of a request."""
    return "\r\n".join((first, "Host: x", *headers, "", "")).encode("latin-1")


def post(body: bytes, *headers: str) -> bytes:
    return lines(f"Content-Length: {len(body)}", *headers) + body


def chunked(pieces: list[bytes], end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece) + end


def answered(sent: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each response in `sent`."""
    responses = []
    while sent:
        head, _, sent = sent.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        responses.append((int(head.split()[1]), sent[:size]))
        sent = sent[size:]
    return responses
