"""Calls of gRPC on streams and a session that are not real: who is told what, in which order, and what is given up."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.clients.gateway import grpc_calls, grpc_stream
from shmserve.clients.gateway.access import Access
from shmserve.clients.gateway.answers import Held
from shmserve.clients.gateway.grpc_codes import Code, RpcError
from shmserve.clients.gateway.grpc_messages import HEALTH, INFERENCE
from shmserve.clients.gateway.grpc_services import Services
from shmserve.clients.gateway.limits import Limits
from shmserve.clients.gateway.link import GatewaySession
from shmserve.clients.gateway.regions import Regions
from shmserve.errors import InvalidRequest, NotFound, Unavailable, Unsupported
from shmserve.messages import Part, Reply, Tensor
from shmserve.session import StreamTicket, Ticket
from tests.rpc import POOL, message, parameter


class Link:
    """Keeps what is asked, for the test to answer."""

    def __init__(self) -> None:
        self.session = self
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
        self.writable = True
        self.paused = False
        self.sent: list[bytes] = []
        self.end: tuple[int, str] | None = None

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
    """Of metadata, what begins with x-."""

    def of(self, headers: Any) -> dict[str, str] | None:
        return {name: value for name, value in headers if name.startswith("x-")} or None


class Case:
    def __init__(self, method: str, service: str = INFERENCE, **metadata: str) -> None:
        self.link = Link()
        link: Any = self.link
        roles = {"infer", "observe", "operate"}
        forward: Any = Forward()
        self.services = Services(link, Limits(), Access(roles, knob="--grpc-roles"), Regions(False), forward)
        self.stream = Stream(f"/{service}/{method}", **metadata)
        stream: Any = self.stream
        self.call: Any = self.services(stream)

    def ask(self, model: str = "m", **more: Any) -> Any:
        """Sends a request; gives its ticket, where it came so far."""
        before = len(self.link.asked)
        made = message("ModelInferRequest", model_name=model, id=more.pop("id", ""))
        for name, value in more.items():
            parameter(made.parameters[name], value)
        self.call.message(made.SerializeToString())
        return self.link.asked[-1][0] if len(self.link.asked) > before else None

    def said(self) -> list[tuple[str, str, bool | None]]:
        """Of each answer since the last time: id, its output or error, and whether it is the final one."""
        found = []
        for data in self.stream.sent:
            one = message("ModelStreamInferResponse").FromString(data)
            answer = one.infer_response
            final = answer.parameters["triton_final_response"].bool_param if answer.parameters else None
            text = one.error_message or b"".join(answer.raw_output_contents).decode()
            found.append((answer.id, text, final))
        self.stream.sent.clear()
        return found


def part(text: str, last: bool = False) -> Held:
    data = text.encode()
    return Held(Part(0, 1, (Tensor("o", "UINT8", (len(data),), data),), None, last), [[data]])


# ---------------------------------------------------------------------------------------- one answer


def test_an_inference() -> None:
    case = Case("ModelInfer")
    made = message("ModelInferRequest", model_name="m", model_version="2", id="me", raw_input_contents=[b"abcd"])
    made.inputs.add(name="i", datatype="FP32", shape=[1])
    made.outputs.add(name="o")
    case.call.message(made.SerializeToString())
    case.call.half_closed()
    ((ticket, asked),) = case.link.asked
    assert asked[0] == "m"
    assert asked[1] == ((Tensor("i", "FP32", (1,), b"abcd"),), None, 4)
    assert (asked[3], asked[4], asked[11]) == (["o"], "2", "me")
    ticket.settle(Reply(0, 2, (Tensor("o", "INT8", (2,), b"hi"),), {"x": 1}))
    answer = message("ModelInferResponse").FromString(case.stream.sent[0])
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "2", "me")
    assert (answer.parameters["x"].int64_param, answer.raw_output_contents[0]) == (1, b"hi")
    assert case.stream.end == (0, "")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"inputs": [{"name": "i", "datatype": "FP32", "contents": {}}]}, "contents field must not be specified when "
         "using raw_input_contents for 'i' for model 'm'"),
        ({"inputs": [{"name": "i", "datatype": "FP32"}] * 2}, "has 1 tensors, and 2 inputs for model 'm'"),
        ({}, "has 1 tensors, and 0 inputs"),
    ],
)  # fmt: skip
def test_raw_contents_fit_the_inputs(fields: dict[str, Any], said: str) -> None:
    case = Case("ModelInfer")
    made = message("ModelInferRequest", model_name="m", id="me", raw_input_contents=[b"abcd"], **fields)
    with pytest.raises(RpcError, match=said) as caught:
        case.call.message(made.SerializeToString())
    assert caught.value.code == Code.INVALID_ARGUMENT
    assert caught.value.text.startswith("[request id: me] ")
    assert not case.link.asked


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_metadata_goes_on_to_models(method: str) -> None:
    case = Case(method, **{"x-who": "me", "authorization": "secret"})
    case.ask(**dict[str, Any](mine=1, **{"x-who": "you"}))
    assert case.link.asked[0][1][10] == {"x-who": "me", "mine": 1}


def test_how_an_inference_fails() -> None:
    for error, code, text in (
        (NotFound("no 'm'"), Code.NOT_FOUND, "no 'm'"),
        (InvalidRequest("no"), Code.INVALID_ARGUMENT, "[request id: me] no"),
        (
            Unsupported("model 'm' has a decoupled transaction policy"), Code.UNIMPLEMENTED,
            "ModelInfer RPC doesn't support models with decoupled transaction policy: "
            "model 'm' has a decoupled transaction policy",
        ),
    ):  # fmt: skip
        case = Case("ModelInfer")
        case.ask(id="me").fail(error)
        assert case.stream.end == (code, text)
        assert not case.stream.sent
    case = Case("ModelInfer")
    ticket = case.ask()
    ticket.settle(Reply(0, 1, (Tensor("o", "INT8", (2,), 7),)))  # of a kind that the lane does not have
    assert case.stream.end is not None
    assert case.stream.end[0] == Code.INTERNAL
    case = Case("ModelInfer")
    with pytest.raises(RpcError, match="not this one"):
        case.ask("refused")
    case = Case("ModelInfer")
    with pytest.raises(RpcError, match="sent none"):
        case.call.half_closed()


def test_an_inference_is_taken_back() -> None:
    case = Case("ModelInfer")
    ticket = case.ask()
    case.call.cancelled()
    case.call.cancelled()
    assert case.link.cancelled == [ticket]
    case = Case("ModelInfer")
    ticket = case.ask()
    with pytest.raises(RpcError, match="sent another"):
        case.ask()
    assert case.link.cancelled == [ticket]


def test_what_needs_another_role_is_known_from_the_message() -> None:
    case = Case("TraceSetting")
    access: Any = case.services
    access._access = Access({"infer", "observe"}, knob="--grpc-roles")
    case.call.message(b"")
    assert case.link.asked[0][1][0] == "trace"
    case = Case("TraceSetting")
    access = case.services
    access._access = Access({"infer", "observe"}, knob="--grpc-roles")
    with pytest.raises(RpcError, match="operate") as caught:
        case.call.message(message("TraceSettingRequest", settings={"trace_rate": {"value": ["1"]}}).SerializeToString())
    assert caught.value.code == Code.PERMISSION_DENIED
    assert not case.link.asked


def test_a_question_is_short() -> None:
    case = Case("TraceSetting")
    long = message("TraceSettingRequest", settings={"x": {"value": [""] * 40_000}}).SerializeToString()
    with pytest.raises(RpcError, match="TraceSettingRequest may have 65536 bytes"):
        case.call.message(long)
    case = Case("RepositoryModelLoad")
    parameters = {"config": {"string_param": "{}"}, "file:1/x": {"bytes_param": bytes(100_000)}}
    load = message("RepositoryModelLoadRequest", model_name="m", parameters=parameters)
    case.call.message(load.SerializeToString())
    assert case.link.asked[0][1][0] == "load"


PATHS = [(method.name, INFERENCE) for method in POOL.FindServiceByName(INFERENCE).methods]


@pytest.mark.parametrize(("method", "service"), [*PATHS, ("Check", HEALTH), ("Watch", HEALTH)])
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=3))
@settings(deadline=None, max_examples=30)
def test_any_messages_are_answered_or_refused(method: str, service: str, messages: list[bytes]) -> None:
    case = Case(method, service)
    try:
        for data in messages:
            case.call.message(data)
        case.call.half_closed()
    except RpcError as error:
        assert error.code in (Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED, Code.NOT_FOUND, Code.INTERNAL)  # noqa: PT017
    case.call.cancelled()
    assert len(case.link.cancelled) == len(case.link.asked)


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize("name", ["i", "input"])
def test_a_large_tensor_is_where_models_read_it(method: str, name: str) -> None:
    """Of two, the first need not be copied, wherever in the message it is; the second is as before."""
    case = Case(method)
    case.link.memory = GatewaySession("memfd").memory
    tensors = [bytes([number]) * 9001 for number in (1, 2)]
    made = message("ModelInferRequest", model_name="m", id="me", raw_input_contents=tensors)
    for number in range(2):
        made.inputs.add(name=f"{name}{number}", datatype="UINT8", shape=[9001])
    data = made.SerializeToString()
    assert case.call.room(len(data), data[:40]) is None
    room = case.call.room(len(data), data[:2000])
    assert room is not None
    room[:] = data
    case.call.message(room)
    ((_, asked),) = case.link.asked
    inputs, kept, _ = asked[1]
    assert [bytes(array) for array in kept.arrays] == tensors
    assert [np.shares_memory(array, np.frombuffer(room, np.uint8)) for array in kept.arrays] == [True, False]
    assert [case.link.memory.locate(array)[0] for array in kept.arrays] == [tensor.data[0] for tensor in inputs]
    assert all(tensor.data[0].offset % 64 == 0 for tensor in inputs)
    again = Case(method)
    again.link.memory = case.link.memory
    assert again.call.room(len(data), data[:2000]) is not None
    again.call.message(memoryview(data))  # it was read to another place after all
    assert [bytes(array) for array in again.link.asked[0][1][1][1].arrays] == tensors


def test_memory_that_is_used_up_is_told_when_the_message_is_here() -> None:
    case = Case("ModelInfer")
    case.link.memory = GatewaySession("memfd", memory_bytes=1 << 16).memory
    made = message("ModelInferRequest", model_name="m", raw_input_contents=[bytes(1 << 20)])
    made.inputs.add(name="i", datatype="UINT8", shape=[1 << 20])
    data = made.SerializeToString()
    assert case.call.room(len(data), data[:2000]) is None
    with pytest.raises(RpcError) as caught:
        case.call.message(data)
    assert caught.value.code == Code.UNAVAILABLE


# ---------------------------------------------------------------------------------------- health


def health(sent: bytes) -> int:
    status: int = message("grpc.health.v1.HealthCheckResponse").FromString(sent).status
    return status


def test_health() -> None:
    for service, settle, status in ((INFERENCE, {"ready": True}, 1), ("", {"ready": False}, 2)):
        case = Case("Check", HEALTH)
        case.call.message(message("grpc.health.v1.HealthCheckRequest", service=service).SerializeToString())
        case.link.asked[0][0].settle(settle)
        assert (health(case.stream.sent[0]), case.stream.end) == (status, (0, ""))
    case = Case("Check", HEALTH)
    case.call.message(b"")
    case.link.asked[0][0].fail(Unavailable("gone"))
    assert health(case.stream.sent[0]) == 2
    case = Case("Check", HEALTH)
    with pytest.raises(RpcError) as caught:
        case.call.message(message("grpc.health.v1.HealthCheckRequest", service="x").SerializeToString())
    assert caught.value.code == Code.NOT_FOUND


def test_who_watches_is_told_of_changes() -> None:
    case = Case("Watch", HEALTH)
    case.call.message(b"")
    case.call.half_closed()
    for answer in ({"ready": True}, {"ready": True}, None, {"ready": True}):
        ticket, _ = case.link.asked.popleft()
        if answer is None:
            ticket.fail(Unavailable("gone"))
        else:
            ticket.settle(answer)
        case.link.later.pop()()
    assert [health(sent) for sent in case.stream.sent] == [1, 2, 1]
    case.services.close()
    assert health(case.stream.sent[-1]) == 2
    assert case.stream.end == (Code.UNAVAILABLE, "the gateway stops")
    assert len(case.link.cancelled) == 1
    case = Case("Watch", HEALTH)
    case.call.message(message("grpc.health.v1.HealthCheckRequest", service="x").SerializeToString())
    assert health(case.stream.sent[0]) == 3
    case.call.cancelled()
    assert not case.services.watches


# ---------------------------------------------------------------------------------------- streams


def test_whole_answers_come_in_the_order_of_their_requests() -> None:
    case = Case("ModelStreamInfer")
    first, second = case.ask(id="1"), case.ask(id="2")
    assert case.ask("refused", id="3") is None
    fourth = case.ask(id="4")
    second.part(part("b", True), True)
    fourth.part(part("d", True), True)
    assert case.said() == []
    first.part(part("a", True), True)
    assert case.said() == [
        ("1", "a", True), ("2", "b", True), ("3", "[request id: 3] not this one", None), ("4", "d", True),
    ]  # fmt: skip
    case.call.half_closed()
    assert case.stream.end == (0, "")
    assert not case.services.streams


def test_answers_in_parts_come_as_they_are_made() -> None:
    case = Case("ModelStreamInfer")
    waits, talks, again = case.ask("w", id="w"), case.ask("p", id="p"), case.ask("p", id="q")
    talks.part(part("a"), False)
    again.part(part("x"), False)
    talks.part(part("b"), False)
    again.part(None, True)
    assert case.said() == [("p", "a", False), ("q", "x", False), ("p", "b", False)]
    talks.part(part("c", True), True)
    assert case.said() == [("p", "c", True)]
    known = case.ask("p", id="r")  # by now it is known that this model answers so
    known.part(part("y", True), True)
    assert case.said() == [("r", "y", True)]
    case.call.half_closed()
    assert case.stream.end is None
    waits.part(part("z", True), True)
    assert case.said() == [("w", "z", True)]
    assert case.stream.end == (0, "")


def test_an_empty_final_answer_is_for_who_asks_for_it() -> None:
    for wanted in (False, True):
        case = Case("ModelStreamInfer")
        ticket = case.ask(id="1", triton_enable_empty_final_response=wanted)
        ticket.part(part("a"), False)
        ticket.part(None, True)
        assert case.said() == [("1", "a", False), *([("1", "", True)] if wanted else [])]
        ticket = case.ask(id="2", triton_enable_empty_final_response=wanted)
        ticket.part(part("b", True), True)
        assert case.said() == [("2", "b", True)]
        assert "triton_enable_empty_final_response" not in (case.link.asked[-1][1][10] or {})


def test_an_error_ends_its_request_and_not_the_stream() -> None:
    case = Case("ModelStreamInfer")
    ticket, other = case.ask(id="1"), case.ask(id="2")
    ticket.part(part("a"), False)
    ticket.fail(Unavailable("no more"))
    case.call.message(b"\xff")
    other.part(part("b", True), True)
    said = case.said()
    assert said[:3] == [("1", "a", False), ("1", "no more", None), ("2", "b", True)]
    assert "ModelInferRequest" in said[3][1]
    assert case.stream.end is None


def test_or_the_stream_for_who_asks_for_that() -> None:
    case = Case("ModelStreamInfer", triton_grpc_error="true")
    first, second = case.ask(id="1"), case.ask(id="2")
    second.fail(NotFound("gone"))
    assert case.said() == []
    first.part(part("a", True), True)
    assert case.said() == [("1", "a", True)]
    assert case.stream.end == (Code.NOT_FOUND, "gone")
    case = Case("ModelStreamInfer", triton_grpc_error="true")
    first, second = case.ask(id="1"), case.ask(id="2")
    first.fail(NotFound("gone"))
    assert case.stream.end == (Code.NOT_FOUND, "gone")
    assert case.link.cancelled == [second]


def test_a_caller_who_does_not_read_is_sent_no_more() -> None:
    case = Case("ModelStreamInfer")
    talks, whole = case.ask("p", id="p"), case.ask(id="w")
    talks.part(part("a"), False)
    case.stream.writable = False
    talks.part(part("b"), False)
    talks.part(None, True)
    whole.part(part("c", True), True)
    assert case.said() == [("p", "a", False)]
    assert talks.handed == 1  # of the two that came, and no more are asked for
    case.call.half_closed()
    case.stream.writable = True
    case.call.resume()
    assert case.said() == [("p", "b", False), ("w", "c", True)]
    assert case.stream.end == (0, "")


def test_too_many_requests_wait_at_the_caller() -> None:
    case = Case("ModelStreamInfer")
    tickets = [case.ask() for _ in range(grpc_stream.MOST)]
    assert case.stream.paused
    for count, ticket in enumerate(tickets, 1):
        ticket.part(part("a", True), True)
        assert case.stream.paused is (grpc_stream.MOST - count > grpc_stream.MOST // 2)
    assert len(case.said()) == grpc_stream.MOST


def test_a_stream_is_taken_back() -> None:
    case = Case("ModelStreamInfer")
    done, left, right = case.ask(), case.ask(), case.ask("p")
    done.part(part("a", True), True)
    right.part(part("b"), False)
    case.call.cancelled()
    assert case.link.cancelled == [left, right]
    case.said()
    left.part(part("c", True), True)
    right.fail(Unavailable("late"))
    case.call.resume()
    assert not case.stream.sent
    assert case.stream.end is None
    assert not case.services.streams


def test_a_gateway_that_stops_ends_streams_when_they_are_answered() -> None:
    idle, busy = Case("ModelStreamInfer"), Case("ModelStreamInfer")
    ticket = busy.ask()
    for case in (idle, busy):
        case.services.close()
    ends = [idle.stream.end, busy.stream.end]
    ticket.part(part("a", True), True)
    assert len(busy.said()) == 1
    stops = (Code.UNAVAILABLE, "the gateway stops")
    assert [*ends, busy.stream.end] == [stops, None, stops]


def test_mistakes_of_ours_end_one_request(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("ModelStreamInfer")

    def broken(*given: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(grpc_stream, "answer_of", broken)
        ticket = case.ask(id="1")
        ticket.part(part("a"), False)
        assert case.said() == [("1", "the gateway could not pass the answer on; its log says why", None)]
        assert case.link.cancelled == [ticket]
    case.ask().part(part("b", True), True)
    assert case.said() == [("", "b", True)]
    unary = Case("ModelInfer")
    with monkeypatch.context() as patch:
        patch.setattr(grpc_calls, "answer_of", broken)
        unary.ask().settle(Reply(0, 1, ()))
    assert unary.stream.end is not None
    assert unary.stream.end[0] == Code.INTERNAL
    assert "could not be passed on" in caplog.text
