"""The gateway's connection to the broker: when it returns outputs, when it polls for packets, which outputs it
requests, and which configurations of models it knows."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.plans import plan_of
from shmserve.gateway.upstream.exchange import ask_for_config
from shmserve.gateway.upstream.link import RETURN_BYTES, GatewayLink
from shmserve.gateway.upstream.regions import Regions
from shmserve.gateway.upstream.requests import ModelRequest, PendingInference, RequestSender
from shmserve.protocol import codec
from shmserve.protocol.messages import (
    Answer,
    Ask,
    Changed,
    ClientMessage,
    Fail,
    Handle,
    Infer,
    Ping,
    Reply,
    Return,
    Tensor,
)
from shmserve.session.ticket import Ticket
from shmserve.transport.loop_link import LoopLink
from tests.support.manual_loop import ManualLoop

LARGE = 600 * 1024


class Server:
    """The server's end of the link. `arrived`: what the loop does when a packet has arrived."""

    arrived: Callable[[], None]
    awaits_lease = False

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []
        self.packets: list[bytes] = []
        self.looked = 0

    def send(self, packet: Any) -> bool:
        self.sent.append(codec.Codec(ClientMessage).decode(packet.data))
        return True

    def receive(self, wait: float | None) -> Any:
        self.looked += 1
        return (self.packets.pop(0), [], []) if self.packets else None

    def descriptors(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


class Query(Ticket):
    answer: Any = None

    def settle(self, answer: Any) -> None:
        self.answer = answer

    def fail(self, error: Any) -> None:
        self.answer = error


class Linked(LoopLink):
    """Connected to `server`."""

    def __init__(self, loop: Any, server: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._loop, self._link = loop, server
        server.arrived = self._readable

    def bind(self) -> Any:
        return self._loop


@pytest.fixture
def connected() -> Iterator[tuple[Any, ManualLoop, Server]]:
    loop, server = ManualLoop(), Server()
    link = GatewayLink(
        "unix:///nowhere", None, "gateway", 1 << 20, make_link=lambda *args, **more: Linked(loop, server, *args, **more)
    )
    yield link, loop, server
    link.session.close()


def drop(link: Any, offset: int, size: int = LARGE) -> Handle:
    handle = Handle(7, offset, size)
    link.session.memory.drops.dropped(handle)
    return handle


def test_large_outputs_are_returned_with_the_next_request(connected: Any) -> None:
    link, loop, server = connected
    handle = drop(link, 0)
    loop.run()
    assert not server.sent
    link.session.ask(Query(), "status", 0.0)
    link.send_soon()
    loop.run()
    [[returned, asked]] = server.sent
    assert returned == Return((handle,))
    assert type(asked) is Ask
    loop.advance(60)
    assert len(server.sent) == 1, "nothing is left to return"


def test_large_outputs_are_returned_alone_if_no_request_comes(connected: Any) -> None:
    link, loop, server = connected
    handles = (drop(link, 0), drop(link, LARGE))
    assert not server.sent
    loop.advance(60)
    assert server.sent == [[Return(handles)]]
    drop(link, 0)
    assert loop.timers, "the next outputs have a timer of their own"
    server.sent.clear()
    many = drop(link, LARGE, RETURN_BYTES)
    loop.run()
    assert [set(message.handles) >= {many} for [message] in server.sent] == [True], "many bytes are returned at once"


def test_packets_are_received_while_answers_are_due(connected: Any) -> None:
    link, _, server = connected
    queries = [Query(), Query()]
    for query in queries:
        link.session.ask(query, "status", 0.0)
    server.packets = [codec.encode([Answer(query.number, b'"yes"')]) for query in queries]
    server.packets.append(codec.encode([Ping(1)]))
    server.arrived()
    assert [query.answer for query in queries] == ["yes", "yes"]
    assert server.looked == 2, "no packet is expected after the last answer"
    server.arrived()
    assert not server.packets, "one that comes nevertheless is received"


class Inference(PendingInference):
    __slots__ = ("answer",)

    def __init__(self) -> None:
        self.answer: Any = None

    def take(self, answer: Any) -> None:
        self.answer = answer

    def failed(self, error: Any) -> None:
        self.answer = error


class Gateway:
    """Sends requests for outputs, and answers them as the server would."""

    def __init__(self, link: Any, loop: ManualLoop, server: Server) -> None:
        self._link, self._loop, self._server = link, loop, server
        self._sender = RequestSender(link, Regions(False))
        self.payer = link.shares.connect("").payer("")
        self.tickets: list[Inference] = []

    @property
    def held(self) -> int:
        """Number of calls charged to the client."""
        return len([ticket for ticket in self.tickets if ticket.payer is not None])

    def sent(self, kind: type) -> Any:
        self._loop.run()
        messages = [message for packet in self._server.sent for message in packet]
        self._server.sent.clear()
        assert [type(message) for message in messages] == [kind]
        return messages[0]

    def reply(self, message: Any) -> None:
        self._server.packets.append(codec.encode([message]))
        self._server.arrived()

    def infer(self, wanted: list[Any], replied: list[str], **parameters: Any) -> tuple[list[str] | None, Any]:
        """The outputs in the message, if any, and the answer."""
        inputs = [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]
        plan = plan_of(json.dumps({"inputs": inputs, "outputs": wanted, "parameters": parameters}).encode())
        ticket = Inference()
        self.tickets.append(ticket)
        pieces = [spec.data or b"" for spec in plan.inputs]
        self._sender.infer(ticket, ModelRequest(self.payer, "m", "", plan, pieces, ""))
        message: Infer = self.sent(Infer)
        self.reply(Reply(message.request, 1, tuple([Tensor(name, "FP32", (1,), b"1234") for name in replied])))
        return None if message.outputs is None else [output.name for output in message.outputs], ticket.answer


def named(*names: str) -> list[Any]:
    return [{"name": name} for name in names]


def test_outputs_are_left_out_of_requests_that_name_all_of_the_model(connected: Any) -> None:
    gateway = Gateway(*connected)
    sent, answer = gateway.infer(named("y", "z"), ["y", "z"])
    assert sent == ["y", "z"]
    assert type(answer) is Reply
    asked = gateway.sent(Ask)
    assert (asked.what, asked.model) == ("config", "m")
    assert gateway.infer(named("y", "z"), ["y", "z"])[0] == ["y", "z"], "the configuration is not known yet"
    gateway.reply(Answer(asked.request, json.dumps({"output": named("y", "z")}).encode()))
    for wanted in (named("y"), named("z", "y"), [*named("z"), {"name": "y", "parameters": {"classification": 1}}]):
        names = [one["name"] for one in wanted]
        assert gateway.infer(wanted, names)[0] == names
    sent, answer = gateway.infer(named("y", "z"), ["y", "z"])
    assert sent is None
    assert [tensor.name for tensor in answer.outputs] == ["y", "z"]
    in_sequence = gateway.infer(named("y", "z"), ["y", "z"], sequence_id=7, sequence_start=True)
    assert in_sequence[0] == ["y", "z"], "they are always named"


@pytest.mark.parametrize("replied", [["z"], ["z", "y"], []])
def test_a_request_is_repeated_with_output_names_if_the_outputs_changed(connected: Any, replied: list[str]) -> None:
    gateway = Gateway(*connected)
    gateway.infer(named("y"), ["y"])
    gateway.reply(Answer(gateway.sent(Ask).request, json.dumps({"output": named("y")}).encode()))
    sent, answer = gateway.infer(named("y"), replied)
    assert (sent, answer) == (None, None)
    message: Infer = gateway.sent(Infer)
    assert [output.name for output in message.outputs or ()] == ["y"]
    gateway.reply(Fail(message.request, InvalidRequest.code, "no such output"))
    [ticket] = gateway.tickets[-1:]
    assert isinstance(ticket.answer, InvalidRequest)
    assert gateway.infer(named("y"), ["y"])[0] == ["y"]
    assert not gateway.held


def test_a_configuration_is_known_until_the_server_announces_a_change(connected: Any) -> None:
    gateway = Gateway(*connected)
    link = connected[0]
    found: list[Any] = []
    exchange: Any = SimpleNamespace(payer=lambda: gateway.payer, wait_for=lambda ticket: None, fail=found.append)

    def ask(model: str, version: str = "") -> None:
        ask_for_config(exchange, link, model, version, found.append)

    def asked(model: str, version: str = "") -> Ask:
        ask(model, version)
        query: Ask = gateway.sent(Ask)
        assert (query.what, query.model, query.version) == ("config", model, int(version or 0))
        gateway.reply(Answer(query.request, json.dumps(f"of {model}").encode()))
        assert found.pop() == f"of {model}"
        return query

    def known(model: str) -> bool:
        ask(model)
        return bool(found) and found.pop() == f"of {model}"

    for name in "m", "own/n", "n", "n@prod":
        assert b"follow" in asked(name).body
        assert known(name)

    def refuse(config: Any) -> None:
        raise InvalidRequest("refused")

    ask_for_config(exchange, link, "m", "", refuse)
    assert found.pop().message == "refused"
    assert b"follow" not in asked("m", "1").body
    asked("m", "1")
    for changed, forgotten in ("own/n", {"own/n", "n"}), ("own/n@prod", {"n@prod"}):
        gateway.reply(Changed(changed))
        for name in "m", "own/n", "n", "n@prod":
            if name in forgotten:
                asked(name)
            assert known(name)
    own, other = socket.socketpair()
    other.close()  # there is something to read
    with own:
        link._link._watched = [own.fileno()]  # noqa: SLF001 - a change may have arrived that has not been read
        asked("m")
    link._link._watched = []  # noqa: SLF001
    link.session.disconnected()
    link.session.connected = True
    asked("m")
