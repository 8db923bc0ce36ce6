"""Responses of an HTTP endpoint, in whatever pieces they arrive."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import ConnectionLost, DeadlineExceeded, Denied, InvalidRequest, ModelFailed, ServeError
from shmserve.tools.load.generation.sending import Answers, ResponseRecorder
from shmserve.tools.load.plan import Endpoint
from shmserve.tools.load.targets import http_connection
from shmserve.tools.load.targets.connecting import connect
from shmserve.tools.load.targets.http import HttpTarget
from shmserve.tools.load.targets.http_connection import HttpClientConnection
from shmserve.tools.load.targets.openai import OpenAiTarget
from tests.support.cases import cases
from tests.support.hypothesis_profiles import examples

EVENTS = [b'data: {"y":1}', b'data: {"error":"x","model_name":"m"}', b"data: last"]


def chunked(events: list[bytes], size: int, status: str = "200 OK") -> bytes:
    """A response whose chunk boundaries are unrelated to its events."""
    body = b"".join(event + b"\n\n" for event in events)
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head.encode() + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


async def asked(pieces: list[bytes]) -> tuple[tuple[int, bytes], list[bytes]]:
    connection = HttpClientConnection()
    connection.connection_made(mock.create_autospec(asyncio.Transport))
    seen: list[bytes] = []
    answer = connection.ask(b"", seen.append)
    for piece in pieces:
        connection.data_received(piece)
    return await answer, seen


@settings(max_examples=examples(60))
@given(st.integers(1, 200), st.integers(1, 200))
def test_events_arrive_whole_and_in_order(chunk: int, piece: int) -> None:
    data = chunked(EVENTS, chunk)
    found, seen = asyncio.run(asked([data[at : at + piece] for at in range(0, len(data), piece)]))
    assert (found, seen) == ((200, b""), EVENTS)


class _Server(asyncio.Protocol):
    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(self._answer)


async def streamed(answer: bytes, kind: type[HttpTarget | OpenAiTarget], body: Any, receive: Any) -> None:
    """Sends a request to a server that answers each request with these bytes."""
    server = await asyncio.get_running_loop().create_server(lambda: _Server(answer), "127.0.0.1", 0)
    target = kind(Endpoint(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    try:
        await (await target.slot()).stream(body, None, receive)
    finally:
        await target.close()
        server.close()
        await server.wait_closed()


@cases(
    (chunked(EVENTS, 1000), 3, None, ""),
    (chunked([EVENTS[0], b'data: {"error":"after one"}'], 1000), 1, ModelFailed, "^after one$"),
    (chunked([b'data: {"error":"at once"}'], 1000, "500 Error"), 0, ModelFailed, "^HTTP 500: at once$"),
    (b'HTTP/1.1 400 Bad\r\nContent-Length: 15\r\n\r\n{"error":"bad"}', 0, InvalidRequest, "^HTTP 400: bad$"),
    (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", 0, Denied, "^HTTP 401: no text$"),
    (b"HTTP/1.1 504 Late\r\nContent-Length: 0\r\n\r\n", 0, DeadlineExceeded, "^HTTP 504: no text$"),
)
def test_a_stream_and_its_errors(answer: bytes, answers: int, kind: type[ServeError] | None, text: str) -> None:
    """A response with an output named "error" is a normal response."""
    seen: list[int] = []
    body = SimpleNamespace(request=lambda part: b"POST / HTTP/1.1\r\n\r\n")
    with pytest.raises(kind, match=text) if kind is not None else nullcontext():
        asyncio.run(streamed(answer, HttpTarget, body, lambda: seen.append(1)))
    assert len(seen) == answers


ROLE, LAST = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}', b"data: [DONE]"
TOKEN, TEXT = b'data: {"choices":[{"delta":{"content":"a"}}]}', b'data:{"choices":[{"text":"a"}],"usage":null}'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5}}'
FAILED = b'data: {"error":{"message":"no memory","code":500}}'


@cases(
    ([ROLE, TOKEN, TOKEN, USAGE, LAST], 2, (9, 5)),
    ([b": comment", TEXT, TEXT, LAST], 2, (0, 2)),
    ([ROLE, TOKEN, FAILED], 1, "^no memory$"),
    ([b"data: 5"], 0, "an event is not in OpenAI's format"),
    ids=["chat", "uncounted", "error", "foreign"],
)
def test_the_tokens_of_a_language_model(events: list[bytes], answers: int, tokens: Any) -> None:
    """Chunks without text are no responses."""
    recorder = ResponseRecorder()
    receive = Answers(recorder, 0, itertools.count(1).__next__)
    failing = isinstance(tokens, str)
    with pytest.raises(ModelFailed, match=tokens) if failing else nullcontext():
        asyncio.run(streamed(chunked(events, 7), OpenAiTarget, b"POST / HTTP/1.1\r\n\r\n", receive))
    assert receive.first == min(1, answers)
    assert len(recorder.gap) == max(0, answers - 1)
    if not failing:
        assert (receive.prompt, receive.output) == tokens


def test_a_target_closes_the_connection_that_has_replaced_a_closed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[HttpClientConnection] = []

    async def open_one(*_: Any) -> HttpClientConnection:
        opened.append(HttpClientConnection())
        opened[-1].connection_made(mock.create_autospec(asyncio.Transport))
        return opened[-1]

    async def run() -> list[bool]:
        monkeypatch.setattr(http_connection, "connect", open_one)
        target = HttpTarget(Endpoint(url="http://127.0.0.1:1"))
        slot = await target.slot()
        opened[0].close()
        asking = asyncio.ensure_future(slot.send(SimpleNamespace(request=lambda part: b""), None))
        while len(opened) < 2:
            await asyncio.sleep(0)
        await target.close()
        closed = [connection.closed for connection in opened]
        asking.cancel()
        return closed

    assert asyncio.run(run()) == [True, True]


def test_no_descriptor_for_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", full)
    with pytest.raises(ConnectionLost, match=r"cannot open one more connection .*: use fewer callers"):
        asyncio.run(connect(HttpClientConnection, Endpoint(url="http://127.0.0.1:1"), None))
