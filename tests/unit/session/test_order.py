"""Requests of a sequence leave in the order of their calls, whatever a connection does meanwhile."""

from __future__ import annotations

import numpy as np

from shmserve.protocol.messages import PROTOCOL, Answer, Reply, Welcome
from shmserve.session import Session
from tests.unit.session.test_session import ask, connected, decode, feed, said

X = {"x": np.arange(3)}


def test_asked_before_the_first_connection_it_goes_with_it() -> None:
    session = Session()
    ask(session, X, sequence=9, sequence_start=True)
    decode(session.hello(7, "test").data)
    feed(session, Welcome(PROTOCOL, 1, "server"))
    _, packets = ask(session, X, sequence=9)
    assert [message.request for message in said(packets)] == [1, 2]
    feed(session, Reply(1, 1, ()), Reply(2, 1, ()))
    session.close()


def test_those_that_wait_for_a_server_to_load_are_not_overtaken() -> None:
    session = connected(owner=1)
    session.disconnected()
    ask(session, X, sequence=9, sequence_start=True)
    decode(session.hello(7, "test").data)
    feed(session, Welcome(PROTOCOL, 2, "server"))
    (loaded,) = said(session.take())
    _, packets = ask(session, X, sequence=9)
    assert not said(packets)
    _, packets = ask(session, X)
    assert [message.request for message in said(packets)] == [4], "it has no order to keep"
    feed(session, Answer(loaded.request, b'{"loaded": true}'))
    assert [message.request for message in said(session.take())] == [1, 3]
    _, packets = ask(session, X, sequence=9)
    assert [message.request for message in said(packets)] == [5]
    feed(session, *[Reply(number, 1, ()) for number in (1, 3, 4, 5)])
    session.close()
