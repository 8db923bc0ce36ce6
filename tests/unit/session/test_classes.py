"""Asking for classes instead of a tensor, and reading them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shmserve
from shmserve.errors import InvalidRequest
from shmserve.protocol import codec
from shmserve.protocol.messages import PROTOCOL, Answer, ClientMessage, Infer, Reply, Tensor, Wanted, Welcome
from shmserve.session import Session
from shmserve.shm.strings import encode_bytes
from tests.unit.session.test_session import Noted

decode = codec.Codec(ClientMessage).decode


def session(owner: int = 3) -> Session:
    made = Session("memfd")
    welcome(made, owner)
    return made


def welcome(made: Session, owner: int) -> None:
    made.receive(codec.encode([Welcome(PROTOCOL, owner, "server")]))


def sent(made: Session) -> list[Infer]:
    found = [message for packet in made.take() for message in decode(packet.data)]
    return [message for message in found if isinstance(message, Infer)]


def ask(made: Session, outputs: Any) -> Noted:
    ticket = Noted()
    made.infer(ticket, "m", {"x": np.zeros((1, 2), np.float32)}, 0.0, outputs)
    return ticket


def test_a_mixed_mapping() -> None:
    made = session()
    place = np.zeros((1, 3), np.float32)
    ticket = ask(made, {"a": place, "b": shmserve.TopK(2), "c": None, "d": shmserve.TopK(np.int64(7))})  # type: ignore[arg-type]
    (message,) = sent(made)
    assert message.outputs == (Wanted("a"), Wanted("b", None, 2), Wanted("c"), Wanted("d", None, 7))
    classes = np.array([[b"0.9:1:cat", b"0.1:0"]], object)
    values = np.array([[1, 2, 3]], np.float32)
    outputs = (
        Tensor("a", "FP32", (1, 3), values.tobytes()),
        Tensor("b", "BYTES", (1, 2), encode_bytes(classes)),
        Tensor("c", "FP32", (1, 3), values.tobytes()),
    )
    made.receive(codec.encode([Reply(message.request, 1, outputs)]))
    assert ticket.answer["a"] is place
    assert place.tolist() == values.tolist()
    assert ticket.answer["b"].dtype == object
    assert ticket.answer["b"].tolist() == classes.tolist()
    assert ticket.answer["c"].tolist() == values.tolist()
    made.close()


def test_what_is_sent_again_asks_for_the_same() -> None:
    made = session()
    block = made.memory.empty((1, 3000), np.dtype(np.float32))
    ask(made, {"a": block, "b": shmserve.TopK(2)})
    (first,) = sent(made)
    made.disconnected()
    welcome(made, 9)
    (*_, loaded) = [message for packet in made.take() for message in decode(packet.data)]
    made.receive(codec.encode([Answer(loaded.request, b'{"loaded": true}')]))
    (again,) = sent(made)
    assert first.outputs is not None
    assert again.outputs is not None
    assert again.outputs[1] == first.outputs[1] == Wanted("b", None, 2)
    assert first.outputs[0].place is not None
    assert again.outputs[0].place is not None
    assert again.outputs[0].place.segment >> 32 == 9
    made.close()


@pytest.mark.parametrize("k", [0, -1, 2**31, 1.5, "3", None, True])
def test_wrong_numbers(k: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"TopK.*a number from 1 to 2147483647"):
        shmserve.TopK(k)


@pytest.mark.parametrize(
    ("text", "value", "index", "label"),
    [
        (b"0.900000:5:cat", 0.9, 5, "cat"),
        (b"-3:0", -3, 0, ""),
        (b"18446744073709551615:2:a:b", 2**64 - 1, 2, "a:b"),
        ("inf:1:ä", math.inf, 1, "ä"),
        ("1.000000:7:", 1.0, 7, ""),
    ],
)
def test_classes_are_taken_apart(text: bytes | str, value: float, index: int, label: str) -> None:
    found = shmserve.parse_class(text)
    assert (found.value, found.index, found.label) == (value, index, label)
    assert type(found.value) is type(value)
    assert found == shmserve.ClassResult(value, index, label)


@pytest.mark.parametrize("text", [b"", b"5", b"cat:1", b"1:cat", "1.0:", b"\xff:1"])
def test_what_is_no_class(text: bytes | str) -> None:
    with pytest.raises(InvalidRequest, match="not a class"):
        shmserve.parse_class(text)


@given(st.floats(allow_nan=False), st.integers(0, 2**31), st.text())
def test_any_class(value: float, index: int, label: str) -> None:
    found = shmserve.parse_class(f"{value:f}:{index}:{label}")
    assert found == shmserve.ClassResult(float(f"{value:f}"), index, label)
