"""Operations (load, unload, ...) in a session: encoding and pacing of bodies, cancellation, lost connections."""

from __future__ import annotations

import json
import os
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import ConnectionLost, DeadlineExceeded, InvalidRequest, Unavailable
from shmserve.protocol.messages import FIELD_BYTES, PACKET_BYTES, Answer, Ask, Cancel, Fail, Goodbye, Infer, Ping, Pong
from shmserve.session import Session
from shmserve.session.queries import WINDOW_BYTES, WINDOWS
from shmserve.session.uploads import Body, of_json, of_load
from tests.support.cases import cases
from tests.support.clients.sessions import RecordingTicket, connect, connected, decoded, feed, sent
from tests.support.leaks import count_descriptors

CONFIG = {"backend": "onnxruntime"}


def operate(session: Session, body: Body | None, what: str = "load", **options: Any) -> RecordingTicket:
    ticket = RecordingTicket()
    session.ask(ticket, what, 100.0, "m", body=body, **options)
    return ticket


def drained(body: Body) -> bytes:
    pieces = []
    while body.remaining:
        pieces.append(body.take())
        assert len(pieces[-1]) <= FIELD_BYTES
        assert len(pieces[-1]) == FIELD_BYTES or not body.remaining, "pieces are full but for the last"
    assert body.take() == b""
    return b"".join(pieces)


def sent_asks(session: Session) -> list[Ask]:
    """All messages of the operations; each Ping is answered."""
    asks: list[Ask] = []
    while packets := session.take():
        for packet in packets:
            assert len(packet.data) <= PACKET_BYTES
        messages = decoded(packets)
        asks += [message for message in messages if isinstance(message, Ask)]
        feed(session, *[Pong(message.number) for message in messages if isinstance(message, Ping)])
    return asks


sizes = st.lists(st.integers(0, 3 * FIELD_BYTES) | st.sampled_from([0, FIELD_BYTES, FIELD_BYTES + 1]), max_size=5)


@given(sizes, st.booleans())
def test_a_body_is_a_header_and_the_concatenated_files(sizes: list[int], in_files: bool) -> None:
    values = [os.urandom(size) for size in sizes]
    with tempfile.TemporaryDirectory(prefix="shmserve-test-") as folder:
        files: dict[str, Any] = {}
        for number, value in enumerate(values):
            path = Path(folder) / str(number)
            path.write_bytes(value)
            files[f"1/{number}"] = path if in_files else value
        whole = drained(of_load(CONFIG, files))
    line, _, rest = whole.partition(b"\n")
    header = json.loads(line)
    assert header["config"] == CONFIG
    assert header.get("files", []) == [[f"1/{number}", size] for number, size in enumerate(sizes)]
    assert rest == b"".join(values)


def test_encoding_of_bodies() -> None:
    assert drained(of_load(None, None)) == b""
    assert drained(of_load(None, {})) == b""
    assert json.loads(drained(of_json({"wait": False}))) == {"wait": False}
    assert json.loads(drained(of_load('{"name": "ü\\n"}', None))) == {"config": {"name": "ü\n"}}
    bare = '{"a:b" : "c:d", direct: {max_queue : 1, "e": "\\" f: g"}, h:[]}'
    named = {"a:b": "c:d", "direct": {"max_queue": 1, "e": '" f: g'}, "h": []}
    assert json.loads(drained(of_load(bare, None))) == {"config": named}, "names without quotes, as Triton accepts them"
    whole = drained(of_load({}, {"1/a": memoryview(b"abcd")[1:3], "1/b": bytearray(b"xy")}))
    assert whole.endswith(b"\nbcxy")


@cases(
    (None, {"1/a": b""}, "files= needs config="),
    ("{", None, "config is not JSON"),
    ("[]", None, "config must be a mapping, or the JSON of one, not list"),
    ({"x": object()}, None, "config cannot be written as JSON"),
    ({"x": float("nan")}, None, "config cannot be written as JSON"),
    ({}, {"1/a": "text"}, "file '1/a' must be bytes, or the path of a file"),
    ({}, {"": b""}, "a file name must be a path in the model directory"),
    ({}, {"1/a": Path("/no/such")}, "file '1/a' cannot be read from /no/such: No such file or directory"),
    ({}, {"1/a": Path("/proc")}, "not a regular file"),
)
def test_unusable_configurations_and_files_are_refused(config: Any, files: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        of_load(config, files)


def test_operations_are_sent_one_after_another() -> None:
    session = connected()
    ticket = operate(session, of_json({"wait": True}), "unload")
    assert sent(session) == [Ask(1, "unload", "m", 0, b'{"wait": true}')]
    assert feed(session, Answer(1, b'{"model": "m"}')) == 1
    assert ticket.answer == {"model": "m"}
    empty = operate(session, of_load(None, None))
    assert sent(session) == [Ask(2, "load", "m")]
    assert feed(session, Fail(2, "UNAVAILABLE", "no")) == 1
    assert empty.error is not None
    session = connected()
    for _ in range(3):
        operate(session, of_load(CONFIG, {"1/a": bytes(WINDOWS * WINDOW_BYTES)}))
    asks = sent_asks(session)
    assert not asks[-1].more
    assert [number for number, _ in groupby(ask.request for ask in asks)] == [1, 2, 3]


def test_a_question_is_sent_with_its_arguments_and_cancelled_if_it_may_wait() -> None:
    session = connected()
    asked = [operate(session, body, "config") for body in (of_json({"wait": True}), None)]
    assert sent(session) == [Ask(1, "config", "m", 0, b'{"wait": true}'), Ask(2, "config", "m")]
    for ticket in asked:
        session.cancel(ticket)
    assert sent(session) == [Cancel(1)]
    assert len(session.tickets) == 2
    for number in (1, 2):
        feed(session, Answer(number, b"{}"))
    assert not session.tickets


def test_a_long_body_is_sent_in_acknowledged_windows() -> None:
    session = connected()
    data = os.urandom(5 * WINDOWS * WINDOW_BYTES + 12345)
    ticket = operate(session, of_load(CONFIG, {"1/a": data}))
    messages = sent(session)
    pings = [message for message in messages if isinstance(message, Ping)]
    asks = [message for message in messages if isinstance(message, Ask)]
    assert len(pings) == WINDOWS
    assert sum(len(ask.body) for ask in asks) == WINDOWS * WINDOW_BYTES
    session.infer(RecordingTicket(), "m", {}, 0.0)
    assert [type(message) for message in sent(session)] == [Infer], "requests are not held up"
    assert session.take() == []
    feed(session, Pong(pings[0].number))
    assert session.urgent
    more = [message for message in sent(session) if isinstance(message, Ask)]
    assert sum(len(ask.body) for ask in more) == WINDOW_BYTES
    feed(session, Pong(pings[1].number), Pong(pings[1].number + 1))
    asks += more + sent_asks(session)
    assert [ask.more for ask in asks] == [True] * (len(asks) - 1) + [False]
    assert (asks[0].what, asks[0].model) == ("load", "m")
    assert {(ask.request, ask.what, ask.model) for ask in asks[1:]} == {(1, "", "")}
    assert b"".join(ask.body for ask in asks).partition(b"\n")[2] == data
    feed(session, Answer(1, b"{}"))
    assert ticket.answer == {}
    assert list(session.tickets) == [2]


def large(size: int = 4 * WINDOWS * WINDOW_BYTES) -> Body:
    return of_load(CONFIG, {"1/a": bytes(size)})


def test_a_file_that_changes_while_it_is_sent_cancels_the_operation(tmp_path: Path) -> None:
    before = count_descriptors()
    session = connected()
    path = tmp_path / "model"
    path.write_bytes(bytes(4 * WINDOWS * WINDOW_BYTES))
    ticket = operate(session, of_load(CONFIG, {"1/a": path}))
    session.take()
    assert count_descriptors() > before
    os.truncate(path, 10)
    feed(session, Pong(1))
    assert sent(session)[-1] == Cancel(1)
    assert isinstance(ticket.error, InvalidRequest)
    assert "changed while it was sent" in str(ticket.error)
    assert session.tickets == {}
    longer = operate(session, of_load(CONFIG, {"1/a": path}))
    path.write_bytes(bytes(11))
    session.take()
    assert str(longer.error) == "file '1/a' changed while it was sent: it had 10 bytes and now has 11"
    session.close()
    assert count_descriptors() == before


@pytest.mark.parametrize("end", [Fail(1, "INVALID_ARG", "too large"), Answer(1, b"{}")], ids=["refused", "answered"])
def test_a_body_that_the_server_does_not_need_is_not_sent_further(end: Fail | Answer) -> None:
    session = connected()
    ticket = operate(session, large())
    session.take()
    feed(session, end)
    assert (type(ticket.error), ticket.answer) in ((InvalidRequest, None), (type(None), {}))
    assert session.urgent
    assert sent(session) == [Cancel(1)]
    feed(session, Pong(1), Pong(2))
    assert session.take() == []


def test_cancelling_before_and_after_the_body_is_complete() -> None:
    session = connected()
    ticket = operate(session, large())
    session.take()
    assert session.cancel(ticket)
    assert session.tickets == {}
    assert sent(session) == [Cancel(1)]
    complete = operate(session, of_load(None, None))
    feed(session, Pong(1), Pong(2))
    session.take()
    assert session.cancel(complete)
    assert session.take() == [], "the server continues it"
    feed(session, Answer(2, b"{}"))
    assert (complete.ends, session.tickets) == (0, {})


def test_the_text_of_a_timeout_depends_on_whether_the_body_was_complete() -> None:
    session = connected()
    complete = operate(session, of_load(None, None), timeout=1.0)
    session.take()
    cut = operate(session, large(), timeout=1.0)
    session.take()
    session.tick(101.1)
    assert isinstance(complete.error, DeadlineExceeded)
    assert str(complete.error) == "'load' of model 'm' did not finish within its timeout; the server continues it"
    assert str(cut.error) == "'load' of model 'm' could not be sent within its timeout; nothing was changed"
    assert sent(session) == [Cancel(2)]


def test_only_operations_that_were_not_sent_are_repeated() -> None:
    session = Session()
    complete = operate(session, of_load(None, None))
    assert sent(connect(session)) == [Ask(1, "load", "m")]
    cut = operate(session, large())
    waiting = operate(session, of_json({}), "restart")
    session.take()
    assert waiting.ends == 0
    with pytest.raises(Unavailable, match="the server stops"):
        feed(session, Goodbye("UNAVAILABLE", "the server stops"))
    session.disconnected()
    assert isinstance(complete.error, ConnectionLost)
    assert "the connection ended (the server stops) before" in str(complete.error)
    assert "it may have taken effect: check the models" in str(complete.error)
    assert isinstance(cut.error, ConnectionLost)
    assert "before 'load' of model 'm' was sent completely; nothing was changed" in str(cut.error)
    assert sent(connect(session, 2)) == [Ask(3, "restart", "m", 0, b"{}")], "nothing of it had been sent"
    feed(session, Answer(3, b"{}"))
    assert waiting.answer == {}
