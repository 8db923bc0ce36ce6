"""HTTP connections of the gateway, fed in pieces, without a socket."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import Unavailable
from shmserve.gateway.auth.access import EndpointAccess
from shmserve.gateway.http.connection import HttpConnection, HttpExchange
from shmserve.gateway.http.heads import HttpHeads
from shmserve.gateway.http.limits import AHEAD_BYTES, HttpLimits
from shmserve.gateway.http.requests import SCRAPES, Requests
from shmserve.gateway.http.routes import METRICS_ROUTES
from shmserve.gateway.limits.backlog import CONNECTION_WORK, TURN_WORK
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.turns import MIN_BYTES, READ_BYTES, SLICE_BYTES, SlicedWork
from shmserve.gateway.upstream.receive import ReceiveBuffer, Room
from shmserve.gateway.upstream.regions import Regions
from shmserve.protocol.roles import ROLES
from tests.support.cases import cases
from tests.support.gateway.http_connection import (
    Transport,
    answered,
    chunked,
    connected,
    http_listener,
    lines,
    post,
    receive,
)
from tests.support.hypothesis_profiles import examples

BODIES = st.lists(st.binary(max_size=40), min_size=1, max_size=5)


@settings(max_examples=examples(60))
@given(
    BODIES, st.lists(st.integers(1, 800), max_size=10), st.lists(st.booleans(), min_size=5, max_size=5), st.booleans()
)
def test_pieces_of_requests_do_not_matter(
    sent: list[bytes], cuts: list[int], as_chunks: list[bool], at_once: bool
) -> None:
    stream = b""
    for body, chunks in zip(sent, as_chunks, strict=False):
        stream += lines("Transfer-Encoding: chunked") + chunked([body]) if chunks else post(body)
    connection, transport, echo, loop = connected(at_once)
    places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    for begin, end in itertools.pairwise(places):
        receive(connection, stream[begin:end])
        loop.run()
    while echo.answers:
        echo.answers.pop(0)()
        loop.run()
    assert answered(transport.sent) == [(200, body) for body in sent]
    assert not transport.closed


def test_one_request_at_a_time_is_handled_and_the_next_are_not_read() -> None:
    connection, transport, echo, loop = connected(False)
    receive(connection, post(b"one") + post(b"two"))
    assert len(echo.answers) == 1
    receive(connection, post(bytes(100_000)))
    assert not transport.reads
    for _ in range(3):
        echo.answers.pop(0)()
        loop.run()
    assert transport.reads
    assert [len(body) for _, body in answered(transport.sent)] == [3, 3, 100_000]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v2/models/m/generate", "/v1/nothing"])
def test_a_body_that_is_too_large_or_slow_gets_an_error_in_the_form_of_its_endpoint(path: str) -> None:
    listener = http_listener(input_bytes=11)
    statuses, texts = [], []
    for size in (12,) if path == "/v1/nothing" else (12, 11):
        connection, transport, _, _ = connected(listener=listener)
        receive(connection, lines(f"Content-Length: {size}", first=f"POST {path} HTTP/1.1"))
        for _ in range(2):
            listener.turn += 5
            connection.check_timeouts(3)
        ((status, body),) = answered(transport.sent)
        document = json.loads(body)
        error = document["error"]
        assert ("type" in document) is (path == "/v1/messages")  # the form of Anthropic
        statuses.append(status)
        texts.append(error if path.startswith("/v2") else error["message"])
    assert statuses == [400, 408][: len(statuses)]
    assert "exceeds the maximum allowed input size of 11 bytes" in texts[0]
    assert ("binary" in texts[0]) is path.startswith("/v2")


class Viewer:
    def __init__(self) -> None:
        self.disconnects = 0

    def disconnected(self) -> None:
        self.disconnects += 1

    def stop(self) -> None: ...


def test_only_the_request_that_is_processed_is_notified_of_a_disconnect() -> None:
    first, second = Viewer(), Viewer()
    connection, _, echo, _ = connected(at_once=False)
    resumed: list[int] = []
    receive(connection, post(b"a"))
    connection.exchange.watch(first, lambda: resumed.append(1))
    connection.pause_writing()
    connection.resume_writing()
    echo.answers.pop()()
    receive(connection, post(b"b"))
    connection.pause_writing()
    connection.resume_writing()
    connection.exchange.watch(second)
    connection.connection_lost(None)
    assert (first.disconnects, second.disconnects, resumed) == (0, 1, [1])


def test_a_disconnect_ends_all_work_for_the_request() -> None:
    ended: list[str] = []

    def endless(name: str) -> SlicedWork[None]:
        try:
            while True:
                yield
        finally:
            ended.append(name)

    def begin(exchange: HttpExchange, body: Any) -> None:
        for name in ("one", "two"):
            exchange.work(endless(name), lambda _: None)

    connection, _, echo, _ = connected()
    echo.begin = begin  # type: ignore[method-assign]
    receive(connection, ALONE)
    assert ended == []
    connection.connection_lost(None)
    assert ended == ["one", "two"]


def test_a_response_waits_until_the_client_reads() -> None:
    connection, transport, _, _ = connected()
    connection.pause_writing()
    receive(connection, post(b"one"))
    assert not transport.sent
    connection.resume_writing()
    assert answered(transport.sent) == [(200, b"one")]


@cases(
    (b"\0" * 40_000, 431),
    (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 6000, 431),
    (b"no HTTP\r\n\r\n", 400),
    (lines("Content-Length: 1001"), 400),
    (lines("Transfer-Encoding: chunked") + b"no", None),
    (lines("Transfer-Encoding: chunked") + b"no\r\n", 400),
    (lines("Transfer-Encoding: chunked") + b"3e9\r\n", 400),
    (lines("Content-Length: 1000", first="POST /nowhere HTTP/1.1"), 404),
)
def test_a_connection_ends_with_its_first_invalid_request(sent: bytes, status: int | None) -> None:
    connection, transport, _, _ = connected(input_bytes=1000)
    receive(connection, sent)
    if status is None:
        assert not transport.sent
        return
    assert [code for code, _ in answered(transport.sent)] == [status]
    assert b"Connection: close" in transport.sent
    receive(connection, post(b"more"))
    assert len(answered(transport.sent)) == 1, "input after it is ignored"


def test_expect_100_continue() -> None:
    connection, transport, _, _ = connected()
    receive(connection, lines("Content-Length: 3", "Expect: 100-continue"))
    assert transport.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    receive(connection, b"abc")
    assert transport.sent.endswith(b"abc")


@cases((b"POST", b"x"), (lines("Content-Length: 50"), b"x"), (lines("Transfer-Encoding: chunked"), b""))
def test_a_request_that_arrives_too_slowly_times_out(begin: bytes, drip: bytes) -> None:
    listener = http_listener()
    connection, transport, _, _ = connected(listener=listener)
    receive(connection, begin)
    for turn in range(1, 7):
        listener.turn = turn
        connection.check_timeouts(4)
        if not transport.sent:
            receive(connection, drip)
    assert [status for status, _ in answered(transport.sent)] == [408]


def test_an_idle_connection_is_closed_but_not_while_its_response_is_due() -> None:
    listener = http_listener()
    connection, transport, echo, _ = connected(False, listener=listener)
    receive(connection, post(b"x"))
    listener.turn = 1000
    connection.check_timeouts(4)
    assert not transport.closed
    echo.answers.pop()()
    listener.turn += 101
    connection.check_timeouts(4)
    assert transport.closed


def test_a_client_that_does_not_read_is_disconnected() -> None:
    listener = http_listener()
    connection, transport, _, _ = connected(listener=listener)
    receive(connection, post(b"x"))
    for turn in range(1, 7):
        listener.turn = turn
        transport.unsent = 1000 - turn
        connection.check_timeouts(4)
    assert transport.closed


_CHUNKED = lines("Transfer-Encoding: chunked")
_HIDDEN = lines("Content-Length: 0", first="GET /v2/health/live HTTP/1.1")
SIZES = b"1;a\nb|1;a\rb|1;a=\0|1;a=\xff|1 | 1|+1|-1|0x1|1_0|10000000000000001|"
"""Before a chunk of one byte."""
CHUNKS = b"1\nx\r\n0\r\n\r\n|1;\n|1\n|1\r\nx\n0\r\n\r\n|1\r\nxy\r\n0\r\n\r\n|0\r\na: b\n\r\n|0\r\n\n"
TRAILERS = b"a: b\rc|a: \0|a: \xff|a : b|a: b\r\n c|no colon|: b"
HOSTS = b"|Host: a\r\nHost: b\r\n|Host: a\r\nhost: a\r\n|Host: a b\r\n|Host: a/b\r\n"
LENGTHS = (
    "Content-Length: 4\r\nTransfer-Encoding: chunked|Transfer-Encoding: chunked\r\nContent-Length: 4|"
    "Content-Length: 4\r\nContent-Length: 5|Content-Length: 4\r\nContent-Length: 4|Content-Length: 4, 4|"
    "Content-Length: +4|Content-Length: -4|Content-Length: 0x4|Content-Length: 4 4|Content-Length:|Content-Length : 4|"
    "Content_Length: 4|Content-Length: 99999999999999999999|Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked|"
    "Transfer-Encoding: chunked, chunked|Transfer-Encoding: chunked, identity|Transfer-Encoding: identity, chunked|"
    "Transfer-Encoding: xchunked|Transfer-Encoding: \x0bchunked|Transfer-Encoding : chunked|Transfer_Encoding: chunked"
)
HEADERS = "a: b\r\n c|a: b\nContent-Length: 4|a: b\rContent-Length: 4|a: \0|a\0: b|: b|no colon"
FIRST_LINES = (
    "POST  /v2 HTTP/1.1|POST /v2  HTTP/1.1|POST\t/v2 HTTP/1.1|POST /v2 HTTP/1.1 |POST /v2\0 HTTP/1.1|"
    "POST /v2 HTTP/1.1\r\n Host: a"
)


def _first(text: bytes) -> bytes:
    return b"POST /v2/models/m/infer HTTP/1.1\r\n" + text + b"\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        *(_CHUNKED + size + b"\r\nx\r\n0\r\n\r\n" for size in SIZES.split(b"|")),
        *(_CHUNKED + chunks for chunks in CHUNKS.split(b"|")),
        *(_CHUNKED + b"0\r\n" + trailer + b"\r\n\r\n" for trailer in TRAILERS.split(b"|")),
        *(_first(host) for host in HOSTS.split(b"|")),
        b"POST /v2 HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n",
        *(lines(length) + b"0\r\n\r\n" * ("chunked" in length) for length in LENGTHS.split("|")),
        lines("Transfer-Encoding: chunked", first="POST /v2 HTTP/1.0") + b"0\r\n\r\n",
        *(lines(header) for header in HEADERS.split("|")),
        *(lines(first=line) for line in FIRST_LINES.split("|")),
    ],
)
def test_requests_that_a_proxy_could_read_differently_are_refused(sent: bytes) -> None:
    """The connection ends there: the bytes after it are not read as a request."""
    for cut in (1, 1 << 20):
        connection, transport, echo, _ = connected(False)
        data = sent + _HIDDEN
        for begin in range(0, len(data), cut):
            receive(connection, data[begin : begin + cut])
        statuses = [status for status, _ in answered(transport.sent)]
        assert statuses == [400] or (statuses == [501] and b"Transfer-Encoding" in sent)
        assert b"Connection: close" in transport.sent
        assert not echo.answers


@cases(
    _CHUNKED + b"1;a=b\r\nx\r\n0\r\n\r\n",
    _CHUNKED + b'1 ; a="b; c"\r\nx\r\n0;last\r\n\r\n',
    _CHUNKED + b"01\r\nx\r\n00\r\nDigest: abc\r\nempty:\r\n\r\n",
    b"\r\n" + post(b"x"),
    post(b"x", "a: \xff"),
    _first(b"Host:\r\nContent-Length: 1\r\n") + b"x",
    _first(b"Host: [::1]:8000\r\nContent-Length: 1\r\n") + b"x",
)
def test_the_request_behind_a_valid_one_is_answered(sent: bytes) -> None:
    for cut in (1, 1 << 20):
        connection, transport, _, loop = connected()
        data = sent + post(b"next")
        for begin in range(0, len(data), cut):
            receive(connection, data[begin : begin + cut])
            loop.run()
        assert [answer for _, answer in answered(transport.sent)] == [b"x", b"next"]


def test_frequent_scrapes_share_a_page_of_metrics() -> None:
    now, asked = [0.0], list[Any]()
    link: Any = SimpleNamespace(
        bind=lambda: SimpleNamespace(time=lambda: now[0]),
        send_soon=lambda: None,
        cancel=lambda ticket: None,
        session=SimpleNamespace(ask=lambda ticket, *more: asked.append(ticket)),
    )
    requests = Requests(link, HttpLimits(), lambda: "extra\n", Regions(False), None, openai=False)

    listener = http_listener(heads=HttpHeads(EndpointAccess(ROLES), METRICS_ROUTES))

    def scrape() -> tuple[HttpConnection, Transport]:
        connection, transport, _, _ = connected(listener=listener, handler=requests)
        receive(connection, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        return connection, transport

    first, *others = [scrape() for _ in range(20)]
    assert len(asked) == 1, "the others wait for the same page"
    first[0].connection_lost(None)
    asked[0].settle("all\n")
    assert all(answered(transport.sent) == [(200, b"all\nextra\n")] for _, transport in others)
    assert not first[1].sent
    for count in range(SCRAPES):
        _, transport = scrape()
        assert len(asked) == 2 + count, "the next page is current"
        asked[-1].settle(f"{count}\n")
        assert answered(transport.sent) == [(200, f"{count}\nextra\n".encode())]
    now[0] = 0.9
    assert answered(scrape()[1].sent) == [(200, f"{SCRAPES - 1}\nextra\n".encode())]
    assert len(asked) == 1 + SCRAPES
    now[0] = 1.0
    waiting = [scrape() for _ in range(2)]
    assert len(asked) == 2 + SCRAPES
    asked[-1].fail(Unavailable("the server is away"))
    assert [status for _, transport in waiting for status, _ in answered(transport.sent)] == [503, 503]
    scrape()
    assert len(asked) == 3 + SCRAPES, "an error is not cached"


def fill(connection: HttpConnection, transport: Transport) -> int:
    """Reads until the connection pauses, as with a sender that is faster than the gateway."""
    sent = 0
    while transport.reads and sent < 2 * READ_BYTES:
        count = len(connection.get_buffer(-1))
        connection.buffer_updated(count)
        sent += count
    return sent


@pytest.mark.parametrize("uploads", [1, 4, 100])
@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_are_read_in_turns(uploads: int, chunked: bool) -> None:
    """All connections together read about READ_BYTES in a turn, in equal parts."""
    listener = http_listener()
    loop, many = listener.loop, [connected(listener=listener)[:2] for _ in range(uploads)]
    size = 60 << 20
    head = lines("Transfer-Encoding: chunked") + b"%x\r\n" % size if chunked else lines(f"Content-Length: {size}")
    for connection, _ in many:
        receive(connection, head)
        loop.run()
    for turn in range(5):
        taken = [fill(connection, transport) for connection, transport in many]
        assert sum(taken) <= READ_BYTES + uploads * 256 * 1024 if turn == 0 else sum(taken) <= 4 * READ_BYTES
        assert turn == 0 or uploads > 4 or min(taken) >= READ_BYTES // uploads // 4
        assert not any(transport.reads for _, transport in many if turn == 0 or uploads <= 4)
        loop.iterate()
        assert sum(transport.reads for _, transport in many) == min(uploads, READ_BYTES // MIN_BYTES)


ALONE = lines(first="GET /nothing HTTP/1.1")
"""A request that the gateway answers alone."""


@cases(
    ALONE * 2000,
    ALONE * 20 + lines(*[f"h{n}: {n}" for n in range(120)], first="GET /nothing HTTP/1.1") * 200,
    lines("Transfer-Encoding: chunked") + chunked([b"x"] * 20_000),
    post(bytes(60_000)) * 12,
    post(b"x", "Inference-Header-Content-Length: " + "9" * 17) * 400,
    ids=["without a route", "many headers", "many chunks", "large JSON", "a wrong size of the JSON"],
)
def test_requests_that_the_gateway_answers_alone_take_turns(flood: bytes) -> None:
    """Eight connections delay another by one turn, and are all answered in the end."""
    listener = http_listener()
    loop, backlog = listener.loop, listener.backlog
    *floods, (honest, heard) = [connected(listener=listener)[:2] for _ in range(9)]
    for connection, _ in floods:
        receive(connection, flood)
        assert backlog.remaining > -2 * CONNECTION_WORK, "of all connections together"
    for _ in range(4):  # until each of them has had a turn
        loop.iterate()
    for count in range(1, 5):
        receive(honest, ALONE)
        loop.iterate()
        assert len(answered(heard.sent)) == count
        assert loop.soon
    largest = 0
    while loop.soon:
        loop.iterate()
        largest = max(largest, TURN_WORK - backlog.remaining)
    assert largest <= TURN_WORK // 2 + 2 * CONNECTION_WORK
    answers = {tuple(status for status, _ in answered(transport.sent)) for _, transport in floods}
    assert len(answers) == 1
    assert len(answers.pop()) == flood.count(b" HTTP/1.1")
    assert all(transport.reads for _, transport in floods)


def test_what_waits_for_a_turn_is_bounded_and_answered_at_a_stop() -> None:
    listener, received = http_listener(), 0
    connection, transport, _, loop = connected(listener=listener)
    while transport.reads:
        receive(connection, ALONE * 100)
        received += 100
    before = len(answered(transport.sent))
    assert (received - before) * len(ALONE) <= AHEAD_BYTES + 100 * len(ALONE)
    listener.stopping = True
    connection.stop()
    assert not transport.closed
    loop.run()
    assert len(answered(transport.sent)) == before + 1
    assert transport.closed


def test_an_internal_error_in_one_turn_does_not_affect_other_connections() -> None:
    listener = http_listener()
    one, transport, _, loop = connected(listener=listener)
    other, heard, _, _ = connected(listener=listener)
    for connection in (one, other):
        receive(connection, ALONE * 100)
    one.shares = None
    loop.run()
    assert transport.closed
    assert len(answered(heard.sent)) == 100


def test_an_internal_error_in_a_request_is_its_response() -> None:
    connection, transport, echo, _ = connected()
    begin, echo.begin = echo.begin, lambda *_: 1 / 0  # type: ignore[assignment, method-assign]
    receive(connection, ALONE)
    echo.begin = begin  # type: ignore[method-assign]
    receive(connection, ALONE)
    assert [status for status, _ in answered(transport.sent)] == [500, 404]


@pytest.mark.parametrize("size", [1, 4 * SLICE_BYTES])
def test_an_invalid_body_is_refused_if_the_server_cannot_be_asked_for_the_model(size: int) -> None:
    def ask(*question: Any) -> None:
        raise Unavailable("the server is away")

    link: Any = SimpleNamespace(bind=lambda: SimpleNamespace(time=lambda: 0.0), session=SimpleNamespace(ask=ask))
    requests = Requests(link, HttpLimits(), lambda: "", Regions(False), None, openai=False)
    connection, transport, _, loop = connected(handler=requests)
    receive(connection, post(b"?" * size))
    loop.run()
    ((status, text),) = answered(transport.sent)
    assert status == 400
    assert b"JSON" in text


def test_a_body_is_refused_when_the_machine_has_no_memory_left() -> None:
    budget = Budget(8 << 20)
    connection, transport, echo, _ = connected(budget=budget)

    def warm(begin: int, end: int) -> None:
        if end > 1 << 20:
            raise Unavailable("no memory")

    def prepare(exchange: HttpExchange, first: Any) -> None:
        size = exchange.head.length
        room = Room(memoryview(bytearray(size)), warm)
        exchange.fill([ReceiveBuffer(size, lambda _: room)], first, lambda left: None)

    echo.prepare = prepare  # type: ignore[method-assign]
    receive(connection, lines(f"Content-Length: {2 << 20}") + bytes(1 << 20))
    assert b" 503 " in transport.sent.partition(b"\r\n")[0]
    assert budget.held == 0
