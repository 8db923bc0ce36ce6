"""Requests for the top classes of an output, and parsing of the answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import Reply, Tensor, Wanted
from shmserve.session import Session
from shmserve.shm.strings import encode_bytes
from tests.support.cases import cases
from tests.support.clients.sessions import RecordingTicket, confirm_loaded, connect, connected, feed, sent


def ask(session: Session, outputs: Any) -> RecordingTicket:
    ticket = RecordingTicket()
    session.infer(ticket, "m", {"x": np.zeros((1, 2), np.float32)}, 0.0, outputs)
    return ticket


def test_classes_and_tensors_in_one_request() -> None:
    session = connected()
    place = np.zeros((1, 3), np.float32)
    ticket = ask(session, {"a": place, "b": shmserve.TopK(2), "c": None, "d": shmserve.TopK(np.int64(7))})  # type: ignore[arg-type]
    (message,) = sent(session)
    assert message.outputs == (Wanted("a"), Wanted("b", None, 2), Wanted("c"), Wanted("d", None, 7))
    classes = np.array([[b"0.9:1:cat", b"0.1:0"]], object)
    values = np.array([[1, 2, 3]], np.float32)
    outputs = (
        Tensor("a", "FP32", (1, 3), values.tobytes()),
        Tensor("b", "BYTES", (1, 2), encode_bytes(classes)),
        Tensor("c", "FP32", (1, 3), values.tobytes()),
    )
    feed(session, Reply(message.request, 1, outputs))
    assert ticket.answer["a"] is place
    assert place.tolist() == values.tolist()
    assert ticket.answer["b"].tolist() == classes.tolist()
    assert ticket.answer["c"].tolist() == values.tolist()
    session.close()


def test_a_repeated_request_asks_for_the_same_outputs() -> None:
    session = connected()
    block = session.memory.empty((1, 3000), np.dtype(np.float32))
    ask(session, {"a": block, "b": shmserve.TopK(2)})
    *_, first = sent(session)
    session.disconnected()
    confirm_loaded(connect(session, 9))
    (again,) = sent(session)
    assert again.outputs[1] == first.outputs[1] == Wanted("b", None, 2)
    assert [message.outputs[0].place.segment >> 32 for message in (first, again)] == [1, 9]
    session.close()


@pytest.mark.parametrize("k", [0, -1, 2**31, 1.5, "3", None, True])
def test_an_invalid_number_of_classes_is_refused(k: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"TopK.*a number from 1 to 2147483647"):
        shmserve.TopK(k)


@cases(
    (b"0.900000:5:cat", 0.9, 5, "cat"),
    (b"-3:0", -3, 0, ""),
    (b"18446744073709551615:2:a:b", 2**64 - 1, 2, "a:b"),
    ("inf:1:ä", math.inf, 1, "ä"),
    ("1.000000:7:", 1.0, 7, ""),
)
def test_parse_class(text: bytes | str, value: float, index: int, label: str) -> None:
    found = shmserve.parse_class(text)
    assert (found.value, found.index, found.label) == (value, index, label)
    assert type(found.value) is type(value)


@pytest.mark.parametrize("text", [b"", b"5", b"cat:1", b"1:cat", "1.0:", b"\xff:1"])
def test_malformed_classes_are_refused(text: bytes | str) -> None:
    with pytest.raises(InvalidRequest, match="not a class"):
        shmserve.parse_class(text)
