"""Answers in parts, in a session without input or output: any order of what comes and what is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import ConnectionLost, DeadlineExceeded, InvalidRequest, ModelFailed
from shmserve.protocol import codec
from shmserve.protocol.messages import (
    PROTOCOL,
    Answer,
    Cancel,
    ClientMessage,
    Fail,
    Infer,
    More,
    Part,
    Tensor,
    Welcome,
)
from shmserve.session import Session, StreamTicket
from shmserve.session.session import GRACE_S

decode = codec.Codec(ClientMessage).decode


class Noted(StreamTicket):
    __slots__ = ("told",)

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self.told = 0

    def on_part(self) -> None:
        self.told += 1


def feed(session: Session, *messages: Any) -> None:
    session.receive(codec.encode(list(messages)))


def sent(session: Session) -> list[Any]:
    return [message for packet in session.take() for message in decode(packet.data)]


def connected() -> Session:
    session = Session("frames")
    session.hello(1, "test")
    feed(session, Welcome(PROTOCOL, 7, "test"))
    return session


def asked(session: Session, window: int, **more: Any) -> tuple[Noted, Infer]:
    ticket = Noted(window)
    session.infer(ticket, "m", {"x": np.zeros(1, np.float32)}, 0.0, window=window, **more)
    (infer,) = sent(session)
    assert infer.options.window == window
    return ticket, infer


def part(request: int, value: int, last: bool = False) -> Part:
    return Part(request, 1, (Tensor("y", "INT64", (1,), value.to_bytes(8, "little")),), None, last)


def read(session: Session, ticket: Noted) -> int:
    return int(session.next_part(ticket)["y"].item())


@given(window=st.integers(1, 9), count=st.integers(0, 40), empty_end=st.booleans(), data=st.data())
def test_whatever_comes_and_is_read_in_whatever_order(window: int, count: int, empty_end: bool, data: Any) -> None:
    """The server sends while it may. They never wait for each other, and never is more than a window kept."""
    session = connected()
    ticket, infer = asked(session, window)
    room, made, found = window, 0, list[int]()
    while not (ticket.ended and not ticket.parts):
        mores = [message for message in sent(session) if isinstance(message, More)]
        room += sum(message.count for message in mores)
        choices = ["read"] * bool(ticket.parts)
        if made < count and room:
            choices.append("part")
        elif made == count and not ticket.ended:
            choices.append("end")
        assert choices, "each waits for the other"
        match data.draw(st.sampled_from(choices)):
            case "read":
                found.append(read(session, ticket))
            case "part":
                made += 1
                room -= 1
                feed(session, part(infer.request, made, made == count and not empty_end))
            case "end":
                feed(session, Part(infer.request, 1, (), None, True))
        assert len(ticket.parts) <= window
    assert found == list(range(1, count + 1))
    assert not session.tickets
    assert ticket.error is None


def test_a_failure_waits_until_the_parts_before_it_are_read() -> None:
    session = connected()
    ticket, infer = asked(session, 4)
    feed(session, part(infer.request, 1), part(infer.request, 2), Fail(infer.request, "MODEL_FAILED", "no more"))
    assert ticket.told == 3
    assert [read(session, ticket), read(session, ticket)] == [1, 2]
    assert isinstance(ticket.error, ModelFailed)
    assert not sent(session)  # nothing is asked of a request that has ended


def test_what_comes_after_a_cancel_is_nobodys() -> None:
    session = connected()
    ticket, infer = asked(session, 4)
    feed(session, part(infer.request, 1))
    assert session.cancel(ticket)
    assert not session.cancel(ticket)
    assert sent(session) == [Cancel(infer.request)]
    feed(session, part(infer.request, 2), part(infer.request, 3))
    assert len(ticket.parts) == 1
    feed(session, Fail(infer.request, "CANCELLED", "so it is"))
    assert not session.tickets
    feed(session, part(infer.request, 4))  # of nobody at all


def test_the_last_part_that_crosses_a_cancel_ends_it() -> None:
    session = connected()
    ticket, infer = asked(session, 4)
    session.cancel(ticket)
    feed(session, part(infer.request, 1, last=True))
    assert not session.tickets


def test_who_is_forgotten_is_cancelled_with_the_next_packet() -> None:
    called: list[int] = []
    session = Session("frames", on_full=lambda: called.append(1))
    session.hello(1, "test")
    feed(session, Welcome(PROTOCOL, 7, "test"))
    ticket, infer = asked(session, 4)
    session.forget(ticket)
    assert called == [1]
    assert session.has_returns
    assert sent(session) == [Cancel(infer.request)]
    assert not session.has_returns


def test_deadlines_are_for_the_whole() -> None:
    session = connected()
    ticket, infer = asked(session, 4, timeout=2.0)
    assert infer.timeout_us == 2_000_000
    feed(session, part(infer.request, 1))
    session.tick(2.0 + GRACE_S / 2)
    assert not ticket.ended
    session.tick(2.0 + 2 * GRACE_S)
    assert isinstance(ticket.error, DeadlineExceeded)
    assert "did not complete its responses within the timeout of 2 s" in str(ticket.error)


def test_what_has_begun_is_not_sent_again() -> None:
    session = connected()
    begun, first = asked(session, 4)
    fresh, second = asked(session, 4)
    feed(session, part(first.request, 1))
    session.disconnected()
    assert isinstance(begun.error, ConnectionLost)
    assert read(session, begun) == 1
    session.hello(1, "test")
    feed(session, Welcome(PROTOCOL, 8, "test"))
    (loaded,) = sent(session)
    feed(session, Answer(loaded.request, b'{"loaded": true}'))
    assert sent(session) == [second]
    feed(session, part(second.request, 5, last=True))
    assert (read(session, fresh), fresh.ended, fresh.error) == (5, True, None)


@pytest.mark.parametrize("window", [0, -5, (1 << 20) + 1, 1.0, True, None])
def test_windows_that_are_none(window: Any) -> None:
    with pytest.raises(InvalidRequest, match="the number of responses in flight must be from 1 to 1048576"):
        Noted(window)
