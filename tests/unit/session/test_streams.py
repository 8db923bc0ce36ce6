"""Streamed responses in a session: the window, failures, cancellation and lost connections."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import ModelFailed
from shmserve.protocol.messages import Cancel, Fail, Infer, More, Part, Tensor
from shmserve.session import Session, StreamTicket
from tests.support.clients.sessions import connect, connected, feed, sent


class CountingTicket(StreamTicket):
    __slots__ = ("notifications",)

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self.notifications = 0

    def on_part(self) -> None:
        self.notifications += 1


def asked(session: Session, window: int, **more: Any) -> tuple[CountingTicket, Infer]:
    ticket = CountingTicket(window)
    session.infer(ticket, "m", {"x": np.zeros(1, np.float32)}, 0.0, window=window, **more)
    (infer,) = sent(session)
    assert infer.options.window == window
    return ticket, infer


def part(request: int, value: int, last: bool = False) -> Part:
    return Part(request, 1, (Tensor("y", "INT64", (1,), value.to_bytes(8, "little")),), None, last)


def read(session: Session, ticket: CountingTicket) -> int:
    return int(session.next_part(ticket)["y"].item())


@given(window=st.integers(1, 9), count=st.integers(0, 40), empty_end=st.booleans(), data=st.data())
def test_any_order_of_arriving_and_reading(window: int, count: int, empty_end: bool, data: Any) -> None:
    """No deadlock, no more than a window of unread parts, and all parts in order."""
    session = connected("frames")
    ticket, infer = asked(session, window)
    room, made, values = window, 0, list[int]()
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
                values.append(read(session, ticket))
            case "part":
                made += 1
                room -= 1
                feed(session, part(infer.request, made, made == count and not empty_end))
            case "end":
                feed(session, Part(infer.request, 1, (), None, True))
        assert len(ticket.parts) <= window
    assert values == list(range(1, count + 1))
    assert not session.tickets
    assert ticket.error is None


def test_a_failure_follows_the_unread_parts() -> None:
    session = connected("frames")
    ticket, infer = asked(session, 4)
    feed(session, part(infer.request, 1), part(infer.request, 2), Fail(infer.request, "MODEL_FAILED", "no more"))
    assert ticket.notifications == 3
    assert [read(session, ticket), read(session, ticket)] == [1, 2]
    assert isinstance(ticket.error, ModelFailed)
    assert not sent(session)  # no More for a request that has ended


def test_parts_after_a_cancel_are_dropped() -> None:
    called: list[int] = []
    session = connect(Session("frames", on_full=lambda: called.append(1)), memory="frames")
    ticket, infer = asked(session, 4)
    feed(session, part(infer.request, 1))
    assert session.cancel(ticket)
    assert not session.cancel(ticket)
    assert sent(session) == [Cancel(infer.request)]
    feed(session, part(infer.request, 2), part(infer.request, 3))
    assert len(ticket.parts) == 1
    feed(session, Fail(infer.request, "CANCELLED", "so it is"))
    assert not session.tickets
    feed(session, part(infer.request, 4))  # its request is no longer known
    ticket, infer = asked(session, 4)
    session.cancel(ticket)
    feed(session, part(infer.request, 1, last=True))
    assert not session.tickets, "a last part that crosses the cancellation ends the request"
    session.take()
    ticket, infer = asked(session, 4)
    session.cancel_later(ticket)
    assert session.has_returns
    assert sent(session) == [Cancel(infer.request)], "with the next packet"
    assert called == [1]
    assert not session.has_returns
