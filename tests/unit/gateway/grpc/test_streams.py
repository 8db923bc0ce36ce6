"""ModelStreamInfer on streams that are not real."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.errors import NotFound, Unavailable
from shmserve.gateway.grpc import calls as grpc_calls
from shmserve.gateway.grpc import stream as grpc_stream
from shmserve.gateway.http2.codes import Code
from shmserve.protocol.messages import Reply
from tests.support.gateway.grpc_calls import Case, part, reply

# ---------------------------------------------------------------------------------------- streams


def test_whole_answers_come_in_the_order_of_their_requests() -> None:
    case = Case("ModelStreamInfer")
    first, second = case.ask(id="1"), case.ask(id="2")
    assert case.ask("refused", id="3") is None
    fourth = case.ask(id="4")
    second.settle(reply("b"))
    fourth.settle(reply("d"))
    assert case.said() == []
    first.settle(reply("a"))
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
    waits.settle(reply("z"))
    assert case.said() == [("w", "z", True)]
    assert case.stream.end == (0, "")


def test_answers_of_a_decoupled_model_do_not_wait_for_one_another() -> None:
    """Though each is the only one to its request, and nothing was known of the model before the first of them."""
    case = Case("ModelStreamInfer")
    slow, quick, other, failing = case.ask("p", id="1"), case.ask("p", id="2"), case.ask(id="3"), case.ask("p", id="4")
    failing.fail(Unavailable("no more"))
    other.settle(reply("o"))
    assert case.said() == []
    quick.part(part("q", True), True)
    assert case.said() == [("2", "q", True), ("4", "no more", None), ("3", "o", True)]
    slow.part(part("s", True), True)
    assert case.said() == [("1", "s", True)]
    first, second = case.ask(id="5"), case.ask(id="6")  # they still do if it is not decoupled
    second.settle(reply("t"))
    assert case.said() == []
    first.settle(reply("f"))
    assert case.said() == [("5", "f", True), ("6", "t", True)]


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
    ticket, other = case.ask("p", id="1"), case.ask(id="2")
    ticket.part(part("a"), False)
    ticket.fail(Unavailable("no more"))
    case.call.message(b"\xff")
    other.settle(reply("b"))
    said = case.said()
    assert said[:3] == [("1", "a", False), ("1", "no more", None), ("2", "b", True)]
    assert "ModelInferRequest" in said[3][1]
    assert case.stream.end is None


def test_or_the_stream_for_who_asks_for_that() -> None:
    case = Case("ModelStreamInfer", triton_grpc_error="true")
    first, second = case.ask(id="1"), case.ask(id="2")
    second.fail(NotFound("gone"))
    assert case.said() == []
    first.settle(reply("a"))
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
    whole.settle(reply("c"))
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
        ticket.settle(reply("a"))
        assert case.stream.paused is (grpc_stream.MOST - count > grpc_stream.MOST // 2)
    assert len(case.said()) == grpc_stream.MOST


def test_a_stream_is_taken_back() -> None:
    case = Case("ModelStreamInfer")
    done, left, right = case.ask(), case.ask(), case.ask("p")
    done.settle(reply("a"))
    right.part(part("b"), False)
    case.call.cancelled()
    assert case.link.cancelled == [left, right]
    case.said()
    left.settle(reply("c"))
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
    assert busy.ask(id="late") is None
    ticket.settle(reply("a"))
    assert busy.said() == [("", "a", True), ("late", grpc_stream.STOPPING, None)]
    stops = (Code.UNAVAILABLE, "the gateway is stopping")
    assert [*ends, busy.stream.end] == [stops, None, stops]


def test_mistakes_of_ours_end_one_request(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("ModelStreamInfer")

    def broken(*given: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(grpc_stream, "answer_of", broken)
        ticket = case.ask(id="1")
        ticket.part(part("a"), False)
        assert case.said() == [("1", "the gateway could not forward the response; see its log", None)]
        assert case.link.cancelled == [ticket]
    case.ask().settle(reply("b"))
    assert case.said() == [("", "b", True)]
    unary = Case("ModelInfer")
    with monkeypatch.context() as patch:
        patch.setattr(grpc_calls, "answer_of", broken)
        unary.ask().settle(Reply(0, 1, ()))
    assert unary.stream.end is not None
    assert unary.stream.end[0] == Code.INTERNAL
    assert "cannot forward a response" in caplog.text
