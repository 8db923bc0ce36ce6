"""Unary gRPC calls, health and ModelStreamInfer, with a fake stream and a fake session."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from shmserve.errors import NotFound, Unavailable
from shmserve.gateway.auth.access import EndpointAccess
from shmserve.gateway.grpc import calls as grpc_calls
from shmserve.gateway.grpc import stream as grpc_stream
from shmserve.gateway.grpc.methods import Methods
from shmserve.protocol.grpc.codes import Code, RpcError
from shmserve.protocol.grpc.messages import HEALTH, INFERENCE
from shmserve.protocol.messages import Reply, Tensor
from shmserve.session import Session
from tests.support.cases import cases
from tests.support.gateway.grpc_calls import Case, Stream, part, reply
from tests.support.gateway.rpc import POOL, message


def test_an_inference() -> None:
    case = Case("ModelInfer")
    made = message("ModelInferRequest", model_name="m", model_version="2", id="me", raw_input_contents=[b"abcd"])
    made.inputs.add(name="i", datatype="FP32", shape=[1])
    made.outputs.add(name="o")
    case.call.message(made.SerializeToString())
    case.call.half_closed()
    ((ticket, asked),) = case.link.asked
    assert asked[:2] == ("m", ((Tensor("i", "FP32", (1,), b"abcd"),), None, 4))
    assert (asked[3], asked[4], asked[11]) == (["o"], "2", "me")
    ticket.settle(Reply(0, 2, (Tensor("o", "INT8", (2,), b"hi"),), {"x": 1}))
    answer = message("ModelInferResponse").FromString(case.stream.sent[0])
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "2", "me")
    assert (answer.parameters["x"].int64_param, answer.raw_output_contents[0]) == (1, b"hi")
    assert case.stream.end == (0, "")


@cases(
    (
        {"inputs": [{"name": "i", "datatype": "FP32", "contents": {}}]},
        "contents field must not be specified when using raw_input_contents for 'i' for model 'm'",
    ),
    ({"inputs": [{"name": "i", "datatype": "FP32"}] * 2}, "has 1 tensors, and 2 inputs for model 'm'"),
    ({}, "has 1 tensors, and 0 inputs"),
)
def test_raw_contents_that_do_not_fit_the_inputs_are_refused(fields: dict[str, Any], text: str) -> None:
    case = Case("ModelInfer")
    made = message("ModelInferRequest", model_name="m", id="me", raw_input_contents=[b"abcd"], **fields)
    with pytest.raises(RpcError, match=text) as caught:
        case.call.message(made.SerializeToString())
    assert caught.value.code == Code.INVALID_ARGUMENT
    assert caught.value.text.startswith("[request id: me] ")
    assert not case.link.asked


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_metadata_is_forwarded_to_the_model(method: str) -> None:
    case = Case(method, **{"x-who": "me", "authorization": "secret"})
    case.ask(**dict[str, Any](mine=1, **{"x-who": "you"}))
    assert case.link.asked[0][1][10] == {"x-who": "me", "mine": 1}


def test_a_call_has_one_valid_request_and_is_cancelled_with_it() -> None:
    with pytest.raises(RpcError, match="not this one"):
        Case("ModelInfer").ask("refused")
    with pytest.raises(RpcError, match="received none"):
        Case("ModelInfer").call.half_closed()
    several, cancelled = Case("ModelInfer"), Case("ModelInfer")
    tickets = [several.ask(), cancelled.ask()]
    with pytest.raises(RpcError, match="received another"):
        several.ask()
    for _ in range(2):
        cancelled.call.cancelled()
    assert [several.link.cancelled, cancelled.link.cancelled] == [[ticket] for ticket in tickets]


@pytest.mark.parametrize(("method", "service"), [("ServerMetadata", INFERENCE), ("Check", HEALTH)])
def test_a_query_over_its_share_is_refused_and_not_cancelled(method: str, service: str) -> None:
    case = Case(method, service)
    queries = case.stream.payer("").queries
    with suppress(Unavailable):
        while True:
            queries.take(0)
    with pytest.raises(RpcError, match="its share"):
        case.call.message(b"")
    case.call.cancelled()
    assert not case.link.cancelled


def test_a_role_that_depends_on_the_message_is_checked() -> None:
    reads, case = Case("TraceSetting"), Case("TraceSetting")
    reads.services.access = case.services.access = EndpointAccess({"infer", "observe"}, option="--grpc-roles")
    reads.call.message(b"")
    assert reads.link.asked[0][1][0] == "trace"
    with pytest.raises(RpcError, match="operate") as caught:
        case.call.message(message("TraceSettingRequest", settings={"trace_rate": {"value": ["1"]}}).SerializeToString())
    assert caught.value.code == Code.PERMISSION_DENIED
    assert not case.link.asked


def test_the_size_of_a_query_is_limited_except_for_loads() -> None:
    case = Case("TraceSetting")
    long = message("TraceSettingRequest", settings={"x": {"value": [""] * 40_000}}).SerializeToString()
    with pytest.raises(RpcError, match=r"TraceSettingRequest has .* bytes; the limit is 65536"):
        case.call.message(long)
    case = Case("RepositoryModelLoad")
    parameters = {"config": {"string_param": "{}"}, "file:1/x": {"bytes_param": bytes(100_000)}}
    load = message("RepositoryModelLoadRequest", model_name="m", parameters=parameters)
    case.call.message(load.SerializeToString())
    assert case.link.asked[0][1][0] == "load"


METHODS = [method.name for method in POOL.FindServiceByName(INFERENCE).methods]
PATHS = [(name, INFERENCE) for name in METHODS if name != "ModelStreamInfer"]


@pytest.mark.parametrize(("method", "service"), [*PATHS, ("Check", HEALTH), ("Watch", HEALTH)])
def test_a_message_that_protobuf_cannot_read_is_refused(method: str, service: str) -> None:
    case = Case(method, service)
    with pytest.raises(RpcError) as caught:
        case.call.message(b"\xff")
    assert caught.value.code == Code.INVALID_ARGUMENT
    assert not case.link.asked


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize("name", ["i", "input"])
def test_a_large_tensor_is_received_in_shared_memory(method: str, name: str) -> None:
    """The first of two tensors is not copied, at any position in the message; the second is."""
    case = Case(method)
    case.link.memory = Session("memfd").memory
    tensors = [bytes([number]) * 9001 for number in (1, 2)]
    made = message("ModelInferRequest", model_name="m", id="me", raw_input_contents=tensors)
    for number in range(2):
        made.inputs.add(name=f"{name}{number}", datatype="UINT8", shape=[9001])
    data = made.SerializeToString()
    assert case.call.room(len(data), data[:40]) is None
    room = case.call.room(len(data), data[:2000])
    assert room is not None
    room.memory[:] = data
    case.call.message(room.memory)
    ((_, asked),) = case.link.asked
    inputs, kept, _ = asked[1]
    assert [bytes(array) for array in kept.arrays] == tensors
    assert [np.shares_memory(array, np.frombuffer(room.memory, np.uint8)) for array in kept.arrays] == [True, False]
    assert [case.link.memory.locate(array)[0] for array in kept.arrays] == [tensor.data[0] for tensor in inputs]
    assert all(tensor.data[0].offset % 64 == 0 for tensor in inputs)
    again = Case(method)
    again.link.memory = case.link.memory
    assert again.call.room(len(data), data[:2000]) is not None
    again.call.message(memoryview(data))  # received elsewhere
    assert [bytes(array) for array in again.link.asked[0][1][1][1].arrays] == tensors


def test_a_message_is_refused_when_shared_memory_is_used_up() -> None:
    case = Case("ModelInfer")
    case.link.memory = Session("memfd", memory_bytes=1 << 16).memory
    made = message("ModelInferRequest", model_name="m", raw_input_contents=[bytes(1 << 20)])
    made.inputs.add(name="i", datatype="UINT8", shape=[1 << 20])
    data = made.SerializeToString()
    assert case.call.room(len(data), data[:2000]) is None
    with pytest.raises(RpcError) as caught:
        case.call.message(data)
    assert caught.value.code == Code.UNAVAILABLE


UNKNOWN_SERVICE = message("grpc.health.v1.HealthCheckRequest", service="x").SerializeToString()


def health(sent: bytes) -> int:
    status: int = message("grpc.health.v1.HealthCheckResponse").FromString(sent).status
    return status


def test_health() -> None:
    for service, settle, status in ((INFERENCE, {"ready": True}, 1), ("", {"ready": False}, 2), ("", None, 2)):
        case = Case("Check", HEALTH)
        case.call.message(message("grpc.health.v1.HealthCheckRequest", service=service).SerializeToString())
        ticket, _ = case.link.asked[0]
        ticket.settle(settle) if settle else ticket.fail(Unavailable("gone"))
        assert (health(case.stream.sent[0]), case.stream.end) == (status, (0, ""))
    with pytest.raises(RpcError) as caught:
        Case("Check", HEALTH).call.message(UNKNOWN_SERVICE)
    assert caught.value.code == Code.NOT_FOUND


def test_a_watch_reports_changes() -> None:
    case, second = Case("Watch", HEALTH), Stream(f"/{HEALTH}/Watch")
    other: Any = second
    case.call.message(b"")
    case.call.half_closed()
    Methods(case.services)(other).message(b"")
    for answer in ({"ready": True}, {"ready": True}, None, {"ready": True}):
        ((ticket, _),) = case.link.asked  # one query for all watches
        case.link.asked.clear()
        if answer is None:
            ticket.fail(Unavailable("gone"))
        else:
            ticket.settle(answer)
        case.link.later.pop()()
    assert [health(sent) for sent in case.stream.sent] == [health(sent) for sent in second.sent] == [1, 2, 1]
    case.services.close()
    for stream in (case.stream, second):
        assert health(stream.sent[-1]) == 2
        assert stream.end == (Code.UNAVAILABLE, "the gateway is stopping")
    assert len(case.link.cancelled) == 1
    assert not case.link.later
    case = Case("Watch", HEALTH)
    case.call.message(UNKNOWN_SERVICE)
    assert health(case.stream.sent[0]) == 3
    case.call.cancelled()
    assert not case.services.long_calls
    case = Case("Watch", HEALTH)
    case.services.close()
    with pytest.raises(RpcError, match="the gateway is stopping"):
        case.call.message(b"")


def test_single_responses_are_sent_in_the_order_of_their_requests() -> None:
    case = Case("ModelStreamInfer")
    first, second = case.ask(id="1"), case.ask(id="2")
    assert case.ask("refused", id="3") is None
    fourth = case.ask(id="4")
    second.settle(reply("b"))
    fourth.settle(reply("d"))
    assert case.answers() == []
    first.settle(reply("a"))
    assert case.answers() == [
        ("1", "a", True),
        ("2", "b", True),
        ("3", "[request id: 3] not this one", None),
        ("4", "d", True),
    ]
    case.call.half_closed()
    assert case.stream.end == (0, "")
    assert not case.services.long_calls


def test_responses_of_decoupled_models_are_sent_at_once() -> None:
    case = Case("ModelStreamInfer")
    waits, talks, again = case.ask("w", id="w"), case.ask("p", id="p"), case.ask("p", id="q")
    talks.part(part("a"), False)
    again.part(part("x"), False)
    talks.part(part("b"), False)
    again.part(None, True)
    assert case.answers() == [("p", "a", False), ("q", "x", False), ("p", "b", False)]
    talks.part(part("c", True), True)
    assert case.answers() == [("p", "c", True)]
    known = case.ask("p", id="r")  # the model is known to be decoupled
    known.part(part("y", True), True)
    assert case.answers() == [("r", "y", True)]
    case.call.half_closed()
    assert case.stream.end is None
    waits.settle(reply("z"))
    assert case.answers() == [("w", "z", True)]
    assert case.stream.end == (0, "")


def test_the_first_responses_of_a_decoupled_model_do_not_wait_for_each_other() -> None:
    """Even if each is the only response to its request, and the model was not known to be decoupled before."""
    case = Case("ModelStreamInfer")
    slow, quick, other, failing = case.ask("p", id="1"), case.ask("p", id="2"), case.ask(id="3"), case.ask("p", id="4")
    failing.fail(Unavailable("no more"))
    other.settle(reply("o"))
    assert case.answers() == []
    quick.part(part("q", True), True)
    assert case.answers() == [("2", "q", True), ("4", "no more", None), ("3", "o", True)]
    slow.part(part("s", True), True)
    assert case.answers() == [("1", "s", True)]
    first, second = case.ask(id="5"), case.ask(id="6")  # these do, as their model is not decoupled
    second.settle(reply("t"))
    assert case.answers() == []
    first.settle(reply("f"))
    assert case.answers() == [("5", "f", True), ("6", "t", True)]


def test_an_empty_final_response_is_sent_on_request() -> None:
    for wanted in (False, True):
        case = Case("ModelStreamInfer")
        ticket = case.ask(id="1", triton_enable_empty_final_response=wanted)
        ticket.part(part("a"), False)
        ticket.part(None, True)
        assert case.answers() == [("1", "a", False), *([("1", "", True)] if wanted else [])]
        ticket = case.ask(id="2", triton_enable_empty_final_response=wanted)
        ticket.part(part("b", True), True)
        assert case.answers() == [("2", "b", True)]
        assert "triton_enable_empty_final_response" not in (case.link.asked[-1][1][10] or {})


def test_an_error_does_not_end_the_stream() -> None:
    case = Case("ModelStreamInfer")
    ticket, other = case.ask("p", id="1"), case.ask(id="2")
    ticket.part(part("a"), False)
    ticket.fail(Unavailable("no more"))
    case.call.message(b"\xff")
    other.settle(reply("b"))
    *answers, invalid = case.answers()
    assert answers == [("1", "a", False), ("1", "no more", None), ("2", "b", True)]
    assert "ModelInferRequest" in invalid[1]
    assert case.stream.end is None


def test_an_error_ends_the_stream_on_request() -> None:
    """After the responses to earlier requests."""
    for fails_first in (False, True):
        case = Case("ModelStreamInfer", triton_grpc_error="true")
        first, second = case.ask(id="1"), case.ask(id="2")
        (first if fails_first else second).fail(NotFound("gone"))
        assert case.answers() == []
        if not fails_first:
            first.settle(reply("a"))
            assert case.answers() == [("1", "a", True)]
        assert case.stream.end == (Code.NOT_FOUND, "gone")
        assert case.link.cancelled == ([second] if fails_first else [])


def test_responses_wait_until_the_client_reads() -> None:
    case = Case("ModelStreamInfer")
    talks, whole = case.ask("p", id="p"), case.ask(id="w")
    talks.part(part("a"), False)
    case.stream.writable = False
    talks.part(part("b"), False)
    talks.part(None, True)
    whole.settle(reply("c"))
    assert case.answers() == [("p", "a", False)]
    assert talks.handed == 1  # of the two received; no more are requested
    case.call.half_closed()
    case.stream.writable = True
    case.call.resume()
    assert case.answers() == [("p", "b", False), ("w", "c", True)]
    assert case.stream.end == (0, "")


def test_the_stream_is_paused_at_many_requests() -> None:
    case = Case("ModelStreamInfer")
    tickets = [case.ask() for _ in range(grpc_stream.LIVE_REQUESTS)]
    assert case.stream.paused
    for count, ticket in enumerate(tickets, 1):
        ticket.settle(reply("a"))
        assert case.stream.paused is (grpc_stream.LIVE_REQUESTS - count > grpc_stream.LIVE_REQUESTS // 2)
    assert len(case.answers()) == grpc_stream.LIVE_REQUESTS


def test_a_cancelled_stream_cancels_its_requests() -> None:
    case = Case("ModelStreamInfer")
    done, left, right = case.ask(), case.ask(), case.ask("p")
    done.settle(reply("a"))
    right.part(part("b"), False)
    case.answers()
    case.call.cancelled()
    assert case.link.cancelled == [left, right]
    left.settle(reply("c"))
    right.fail(Unavailable("late"))
    case.call.resume()
    assert (case.stream.sent, case.stream.end) == ([], None)
    assert not case.services.long_calls


def test_shutdown_ends_streams_after_their_responses() -> None:
    idle, busy = Case("ModelStreamInfer"), Case("ModelStreamInfer")
    ticket = busy.ask()
    for case in (idle, busy):
        case.services.close()
    ends = [idle.stream.end, busy.stream.end]
    assert busy.ask(id="late") is None
    ticket.settle(reply("a"))
    assert busy.answers() == [("", "a", True), ("late", grpc_stream.NO_NEW_REQUESTS, None)]
    stops = (Code.UNAVAILABLE, "the gateway is stopping")
    assert [*ends, busy.stream.end] == [stops, None, stops]
    later: Any = busy.stream
    with pytest.raises(RpcError, match="the gateway is stopping"):
        Methods(busy.services)(later)


def test_an_internal_error_ends_one_request(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("ModelStreamInfer")

    def broken(*arguments: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(grpc_stream, "answer_of", broken)
        ticket = case.ask(id="1")
        ticket.part(part("a"), False)
        assert case.answers() == [("1", "the gateway could not forward the response; see its log", None)]
        assert case.link.cancelled == [ticket]
    case.ask().settle(reply("b"))
    assert case.answers() == [("", "b", True)]
    unary = Case("ModelInfer")
    with monkeypatch.context() as patch:
        patch.setattr(grpc_calls, "answer_of", broken)
        unary.ask().settle(Reply(0, 1, ()))
    assert unary.stream.end is not None
    assert unary.stream.end[0] == Code.INTERNAL
    assert "cannot forward a response" in caplog.text
