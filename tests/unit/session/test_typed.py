"""Requests with Python lists: the data type comes from metadata, which is queried once."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from shmserve.errors import DeadlineExceeded, Internal, InvalidRequest, NotFound
from shmserve.protocol.messages import Answer, Ask, Cancel, Fail, Infer, Reply
from shmserve.session import Session
from tests.support.cases import cases
from tests.support.clients.sessions import ask, connect, connected, decoded, feed, sent

INPUTS = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}, {"name": "n", "datatype": "BYTES", "shape": [1]}]
}


def answered(session: Session, question: Any, document: Any = INPUTS) -> int:
    return feed(session, Answer(question.request, json.dumps(document).encode()))


def known(session: Session) -> Session:
    _, packets = ask(session, {"x": [[1, 2]]})
    (question,) = decoded(packets)
    answered(session, question)
    (request,) = sent(session)
    feed(session, Reply(request.request, 1, ()))
    return session


def arrays(request: Infer) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {tensor.name: (tensor.dtype, tensor.shape, tensor.data) for tensor in request.inputs}  # type: ignore[misc]


def test_metadata_is_queried_once() -> None:
    """The query is repeated on a new connection."""
    session = connected()
    ticket, packets = ask(session, {"x": [[1, 2]], "n": "text"})
    session.disconnected()
    (question,) = sent(connect(session, owner=2))
    assert [question] == decoded(packets) == [Ask(question.request, "metadata", "m", 0)]
    assert answered(session, question) == 0
    assert session.urgent
    (request,) = sent(session)
    assert arrays(request) == {
        "x": ("FP32", (1, 2), np.array([1, 2], np.float32).tobytes()),
        "n": ("BYTES", (1,), b"\x04\x00\x00\x00text"),
    }
    assert feed(session, Reply(request.request, 1, ())) == 1
    assert (ticket.ends, ticket.error) == (1, None)
    _, packets = ask(session, {"x": np.ones((1, 2)), "n": "a"})
    (request,) = decoded(packets)
    assert [tensor.dtype for tensor in request.inputs] == ["FP64", "BYTES"], "arrays are not converted"
    _, packets = ask(session, {"x": [[3, 4]]}, version=2)
    assert [type(message) for message in decoded(packets)] == [Ask], "another version may have other inputs"


@cases(
    ({"x": [[1], [2, 3]]}, r"input 'x': its lists have different lengths: 1 items at \[0\], 2 items at \[1\]"),
    ({"x": [["a"]]}, "input 'x': 'a' is not a number, as FP32 needs"),
    ({"y": [1]}, "model 'm' has no input 'y'; its inputs are x, n"),
)
def test_values_that_do_not_fit_the_metadata_are_refused(inputs: dict[str, Any], text: str) -> None:
    session = connected()
    ticket, packets = ask(session, inputs)
    assert answered(session, decoded(packets)[0]) == 1
    assert sent(session) == []
    with pytest.raises(InvalidRequest, match=text):
        raise ticket.error or AssertionError
    with pytest.raises(InvalidRequest, match=text):
        ask(session, inputs)


def test_a_request_whose_query_fails_is_cancelled_or_times_out_is_not_sent() -> None:
    session = connected()
    ticket, packets = ask(session, {"x": [1]})
    feed(session, Fail(decoded(packets)[0].request, "NOT_FOUND", "no model m"))
    assert isinstance(ticket.error, NotFound)
    assert (sent(session), session.tickets) == ([], {})
    ticket, packets = ask(session, {"x": [[1, 2]]})
    (question,) = decoded(packets)
    assert session.cancel(ticket)
    answered(session, question)
    assert sent(session) == []
    assert ticket.ends == 0
    session = connected()
    ticket, packets = ask(session, {"x": [[1, 2]]}, timeout=2)
    session.tick(101)
    answered(session, decoded(packets)[0])
    (request,) = sent(session)
    assert request.timeout_us == 2_000_000
    session.tick(103)
    assert isinstance(ticket.error, DeadlineExceeded)
    assert sent(session) == [Cancel(request.request)]


@pytest.mark.parametrize("event", ["refused", "disconnected"])
def test_metadata_is_queried_again_when_the_model_may_have_changed(event: str) -> None:
    session = known(connected())
    if event == "refused":
        ticket, packets = ask(session, {"x": [[1, 2]]})
        feed(session, Fail(decoded(packets)[0].request, "INVALID_ARG", "expected FP64"))
        assert isinstance(ticket.error, InvalidRequest)
    else:
        session.disconnected()
        connect(session, owner=2)
    ticket, packets = ask(session, {"x": [[1, 2]]})
    (question,) = decoded(packets)
    answered(session, question, {"inputs": [{"name": "x", "datatype": "FP64", "shape": [-1, 2]}]})
    assert [tensor.dtype for tensor in sent(session)[0].inputs] == ["FP64"]


@pytest.mark.parametrize("document", [{}, [], {"inputs": [{"name": "x"}]}, {"inputs": None}])
def test_metadata_without_inputs_is_an_error(document: Any) -> None:
    session = connected()
    ticket, packets = ask(session, {"x": [[1, 2]]})
    assert answered(session, decoded(packets)[0], document) == 1
    with pytest.raises(Internal, match="the server's metadata of model 'm' is not complete"):
        raise ticket.error or AssertionError
