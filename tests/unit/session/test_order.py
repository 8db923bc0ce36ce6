"""Requests of a sequence are sent in the order of the calls, even across lost connections."""

from __future__ import annotations

import numpy as np

from shmserve.protocol.messages import Answer, Reply
from shmserve.session import Session
from tests.support.clients.sessions import ask, connect, connected, decoded, feed, sent

X = {"x": np.arange(3)}


def test_a_sequence_that_begins_before_the_first_connection_is_sent_with_it() -> None:
    session = Session()
    ask(session, X, sequence=9, sequence_start=True)
    connect(session)
    _, packets = ask(session, X, sequence=9)
    assert [message.request for message in decoded(packets)] == [1, 2]
    feed(session, Reply(1, 1, ()), Reply(2, 1, ()))
    session.close()


def test_requests_that_wait_for_a_loading_server_are_not_overtaken() -> None:
    session = connected(owner=1)
    session.disconnected()
    ask(session, X, sequence=9, sequence_start=True)
    (loaded,) = sent(connect(session, 2))
    _, packets = ask(session, X, sequence=9)
    assert not decoded(packets)
    _, packets = ask(session, X)
    assert [message.request for message in decoded(packets)] == [4], "a request without a sequence is sent at once"
    feed(session, Answer(loaded.request, b'{"loaded": true}'))
    assert [message.request for message in sent(session)] == [1, 3]
    _, packets = ask(session, X, sequence=9)
    assert [message.request for message in decoded(packets)] == [5]
    feed(session, *[Reply(number, 1, ()) for number in (1, 3, 4, 5)])
    session.close()
