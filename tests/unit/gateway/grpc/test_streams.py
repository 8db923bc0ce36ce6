"""ModelStreamInfer, with a fake stream and a fake session."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.errors import NotFound, Unavailable
from shmserve.gateway.grpc import calls as grpc_calls
from shmserve.gateway.grpc import stream as grpc_stream
from shmserve.gateway.grpc.methods import Methods
from shmserve.protocol.grpc.codes import Code, RpcError
from shmserve.protocol.messages import Reply
from tests.support.gateway.grpc_calls import Case, part, reply


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
