"""A fake link, fake streams, and calls of the gRPC services on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from shmserve.errors import InvalidRequest
from shmserve.gateway.auth.access import EndpointAccess
from shmserve.gateway.grpc.methods import Methods
from shmserve.gateway.grpc.services import Services
from shmserve.gateway.kserve.answers import Held
from shmserve.gateway.limits.caller_shares import CallerShares, Payer
from shmserve.gateway.upstream.regions import Regions
from shmserve.protocol.grpc.messages import INFERENCE
from shmserve.protocol.messages import Part, Reply, Tensor
from shmserve.session import StreamTicket, Ticket
from tests.support.gateway.rpc import message, parameter


class Link:
    """Keeps requests and queries for the test to answer."""

    def __init__(self) -> None:
        self.session = self
        self.wants_trace_context = False
        self.memory: Any = None
        self.outbox = SimpleNamespace(messages=[])
        self.asked: deque[tuple[Ticket, tuple[Any, ...]]] = deque()
        self.cancelled: list[Ticket] = []
        self.later: list[Any] = []

    def infer(self, ticket: Ticket, *more: Any) -> None:
        if more[0] == "refused":
            raise InvalidRequest("not this one")
        self.asked.append((ticket, more))

    def ask(self, ticket: Ticket, *more: Any) -> None:
        self.asked.append((ticket, more))

    def send_soon(self) -> None:
        self.outbox.messages.clear()

    def next_part(self, ticket: StreamTicket) -> Any:
        return ticket.hand_out()[0]

    def cancel(self, ticket: Ticket) -> None:
        self.cancelled.append(ticket)

    def bind(self) -> Any:
        return self

    def call_later(self, delay: float, call: Any) -> Any:
        self.later.append(call)
        return SimpleNamespace(cancel=lambda: self.later.remove(call))


class Stream:
    def __init__(self, path: str, **metadata: str) -> None:
        self.path = path
        self.metadata = metadata
        self.shares = CallerShares().connect("127.0.0.1")
        self.writable = True
        self.paused = False
        self.sent: list[bytes] = []
        self.end: tuple[int, str] | None = None

    def payer(self, token: str) -> Payer:
        return self.shares.payer(token)

    def send(self, parts: Sequence[Any]) -> None:
        assert self.end is None
        assert self.writable
        self.sent.append(b"".join(parts))

    def finish(self, code: int, text: str = "") -> None:
        assert self.end is None
        self.end = code, text

    def pause(self) -> None:
        assert not self.paused
        self.paused = True

    def unpause(self) -> None:
        assert self.paused
        self.paused = False


class Forward:
    """Forwards the metadata that begins with x-."""

    def of(self, headers: Any) -> dict[str, str] | None:
        return {name: value for name, value in headers if name.startswith("x-")} or None


class Case:
    def __init__(self, method: str, service: str = INFERENCE, **metadata: str) -> None:
        self.link = Link()
        link: Any = self.link
        roles = {"infer", "observe", "operate"}
        forward: Any = Forward()
        self.services = Services(link, 16 << 20, EndpointAccess(roles, option="--grpc-roles"), Regions(False), forward)
        self.stream = Stream(f"/{service}/{method}", **metadata)
        stream: Any = self.stream
        self.call: Any = Methods(self.services)(stream)

    def ask(self, model: str = "m", **more: Any) -> Any:
        """Sends a request. Returns its ticket, or None if it was refused."""
        before = len(self.link.asked)
        made = message("ModelInferRequest", model_name=model, id=more.pop("id", ""))
        for name, value in more.items():
            parameter(made.parameters[name], value)
        self.call.message(made.SerializeToString())
        return self.link.asked[-1][0] if len(self.link.asked) > before else None

    def answers(self) -> list[tuple[str, str, bool | None]]:
        """The responses since the last call: id, output or error, and whether it is the final one."""
        answers = []
        for data in self.stream.sent:
            one = message("ModelStreamInferResponse").FromString(data)
            answer = one.infer_response
            final = answer.parameters["triton_final_response"].bool_param if answer.parameters else None
            text = one.error_message or b"".join(answer.raw_output_contents).decode()
            answers.append((answer.id, text, final))
        self.stream.sent.clear()
        return answers


def part(text: str, last: bool = False) -> Held:
    data = text.encode()
    return Held(Part(0, 1, (Tensor("o", "UINT8", (len(data),), data),), None, last), [[data]])


def reply(text: str) -> Reply:
    """The response of a model that is not decoupled."""
    data = text.encode()
    return Reply(0, 1, (Tensor("o", "UINT8", (len(data),), data),))
