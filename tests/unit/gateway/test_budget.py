"""The memory budget of bodies: shares per connection and address, and memory only for bytes that have arrived."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

from h2.exceptions import StreamClosedError
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import Unavailable
from shmserve.gateway.http.connection import HttpExchange
from shmserve.gateway.limits.body_budget import Budget, BudgetAccount
from shmserve.gateway.limits.caller_shares import CallerShares, ShareBounds
from shmserve.gateway.limits.proxies import TrustedProxies, networks_of
from shmserve.gateway.upstream.receive import FIRST_BYTES, PART, WINDOW_BYTES, ReceiveBuffer, Room
from tests.support.cases import cases
from tests.support.gateway.http2_caller import Caller, Host
from tests.support.gateway.http2_frames import message
from tests.support.gateway.http_connection import answered, connected, http_listener, lines, post, receive

MIB = 1 << 20
BEHIND_A_PROXY = ShareBounds(proxies=TrustedProxies(networks_of("192.0.2.0/24")))


def fill(account: BudgetAccount, step: int = 1) -> int:
    while True:
        try:
            account.take(step)
        except Unavailable:
            return account.held


def test_a_connection_has_a_quarter_of_the_rest() -> None:
    budget = Budget(1024)
    assert [fill(budget.account("")) for _ in range(5)] == [256, 256, 256, 256, 1024 // 5], "or an equal part"
    assert fill(Budget(1024, 0.5).account("")) == 512


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 400), st.booleans()), max_size=60))
def test_the_total_is_the_sum_of_the_accounts(steps: list[tuple[int, int, bool]]) -> None:
    budget = Budget(1000)
    places = [number % 2 for number in range(6)]
    accounts = [budget.account(f"192.0.2.{place}") for place in places]
    for which, size, give in steps:
        account = accounts[which]
        try:
            account.give(min(size, account.held)) if give else account.take(size)
            places[which] = size % 3
            account.count_for(f"192.0.2.{places[which]}")
        except Unavailable:
            place = sum(other.held for other, where in zip(accounts, places, strict=True) if where == places[which])
            equal_part = account.held + size <= 1000 / 2 / 6
            assert not equal_part or place + size > 2 * 1000 / 4, "refused, though its address has no two shares"
        assert budget.held == sum(account.held for account in accounts) <= 2000
        assert budget.holders == sum(account.held > 0 for account in accounts)
    for account in accounts:
        account.give(account.held)
    assert (budget.held, budget.holders) == (0, 0)
    del accounts, account
    gc.collect()
    assert budget.addresses == 0


@given(st.integers(0, 300_000), st.lists(st.integers(1, 90_000), max_size=20), st.booleans(), st.booleans())
def test_bytes_may_arrive_in_any_pieces(size: int, pieces: list[int], shared: bool, trusted: bool) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    asked: list[int] = []
    warm = bytearray(size)

    def heat(begin: int, end: int) -> None:
        assert end - begin <= max(WINDOW_BYTES, len(pieces and data[: pieces[0]]))
        warm[begin:end] = bytes([1]) * (end - begin)

    def place(arrived: Any) -> Room | None:
        asked.append(len(arrived))
        return Room(memoryview(bytearray(size)), heat) if shared else None

    buffer = ReceiveBuffer(size, place, trusted)
    at = buffer.begin(data[: pieces[0] if pieces else 0])
    assert buffer.placed == shared or not trusted
    for piece in pieces[1:]:
        room = buffer.space()
        count = min(piece, len(room))
        room[:count] = data[at : at + count]
        at += count
        buffer.add(count) if count else None
        assert trusted or len(buffer.memory) <= max(FIRST_BYTES, PART * at), "memory is reserved for what has arrived"
    while not buffer.full:
        room = buffer.space()
        assert 0 < len(room) <= WINDOW_BYTES
        assert not buffer.placed or all(warm[at : at + len(room)]), "bytes are received only to warm pages"
        room[:] = data[at : at + len(room)]
        at += len(room)
        buffer.add(len(room))
    assert bytes(buffer.memory) == data[:size]
    assert not buffer.placed or all(warm)
    assert asked == [] or asked[0] >= min(size // PART, FIRST_BYTES) or size <= FIRST_BYTES or trusted
    assert buffer.placed == (shared and bool(asked))


def test_the_first_bytes_are_copied_and_warmed_in_parts() -> None:
    """A sixteenth of 64 MiB would be 4 MiB at once, for each of sixteen connections in the same turn."""
    size, warmed = 64 * MIB, list[int]()
    memory = memoryview(bytearray(size))
    buffer = ReceiveBuffer(size, lambda arrived: Room(memory, lambda begin, end: warmed.append(end - begin)))
    buffer.begin(b"")
    while not buffer.full:
        room = buffer.space()
        room[:] = b"x" * len(room)
        warmed.clear()
        buffer.add(len(room))
        assert sum(warmed) <= 2 * WINDOW_BYTES
    assert buffer.memory == b"x" * size


def test_announced_bodies_of_http_are_not_counted() -> None:
    """Sixteen connections announce the largest body, and send one byte."""
    budget = Budget(64 * MIB)
    waiting = []
    for _ in range(16):
        connection, _, _, _ = connected(budget=budget, input_bytes=64 * MIB)
        receive(connection, lines(f"Content-Length: {64 * MIB}") + b"x")
        waiting.append(connection)
    assert budget.held == 16
    honest, transport, _, _ = connected(budget=budget, input_bytes=64 * MIB)
    body = bytes(8 * MIB)
    receive(honest, post(body))
    assert answered(transport.sent) == [(200, body)]
    for connection in waiting:
        connection.connection_lost(None)
    assert budget.held == 0


@cases(
    lines(f"Content-Length: {8 * MIB}"),
    lines("Transfer-Encoding: chunked") + b"800000\r\n",
    ids=["content length", "chunks"],
)
def test_bytes_that_have_arrived_are_counted_and_refused_over_the_share(head: bytes) -> None:
    budget = Budget(4 * MIB)
    connection, transport, _, _ = connected(budget=budget, input_bytes=64 * MIB)
    receive(connection, head + bytes(MIB // 2))
    assert budget.held == MIB // 2
    receive(connection, bytes(MIB))
    assert [status for status, _ in answered(transport.sent)] == [503]
    assert b"--limit http_held_bytes" in transport.sent
    assert budget.held == 0


def test_announced_messages_of_grpc_are_not_counted() -> None:
    """One connection announces the largest message on a hundred streams, and sends one byte of each."""
    host = Host(message_bytes=64 * MIB, held_bytes=64 * MIB)
    hostile, honest = Caller(host), Caller(host)
    numbers = [hostile.begin() for _ in range(100)]
    first = message(bytes(64 * MIB))[:6]
    for number in numbers:
        hostile.send(number, first, end=False)
    assert host.held == 100
    assert honest.call(b"a" * 60_000) == (b"a" * 60_000, 0)
    hostile.core.streams.lost()
    assert host.held == 0


def test_bodies_count_for_the_callers_of_a_proxy() -> None:
    budget = Budget(4 * MIB)
    listener = http_listener(budget)
    listener.shares = CallerShares(BEHIND_A_PROXY)

    def sends(caller: str) -> list[int]:
        connection, transport, _, _ = connected(listener=listener)
        receive(connection, lines(f"Content-Length: {2 * MIB}", f"X-Forwarded-For: {caller}") + bytes(MIB * 7 // 8))
        return [status for status, _ in answered(transport.sent)]

    assert sends("203.0.113.1") == []
    assert sends("203.0.113.1") == [503]
    assert sends("203.0.113.2") == []
    assert budget.held == 2 * (MIB * 7 // 8)


def test_messages_count_for_the_callers_of_a_proxy_that_share_a_connection() -> None:
    host = Host(message_bytes=64 * MIB, held_bytes=16 * MIB)
    host.shares = CallerShares(BEHIND_A_PROXY)
    proxy = Caller(host, address="192.0.2.1")

    def sends(caller: str, size: int) -> int:
        number = proxy.begin(("x-forwarded-for", caller))
        with suppress(StreamClosedError):
            proxy.send(number, message(bytes(size))[:-1], end=False)
        return number

    sends("203.0.113.1", 3 * MIB)
    refused, other = sends("203.0.113.1", 2 * MIB), sends("203.0.113.2", 2 * MIB)
    assert proxy.status(refused) == 14
    assert other not in proxy.ended
    assert host.held == 5 * MIB - 2
    proxy.core.streams.lost()
    assert host.held == 0


def test_a_body_like_the_last_one_gets_its_memory_at_once() -> None:
    """So a connection reserves no more than it has sent before. Its next head is read without the body that follows."""
    connection, transport, echo, _ = connected(input_bytes=64 * MIB)
    sinks: list[ReceiveBuffer] = []

    def prepare(exchange: HttpExchange, first: Any) -> None:
        size, trusted = exchange.head.length, exchange.is_trusted
        sinks[:] = [ReceiveBuffer(half, None, trusted) for half in (size // 2, size - size // 2)]

        def whole(left: Any) -> None:
            exchange.complete()
            exchange.whole(b"".join([sink.memory for sink in sinks]))

        exchange.fill(sinks, first, whole)

    echo.prepare = prepare  # type: ignore[method-assign]

    def reserved(size: int) -> int:
        """The memory reserved for a body of `size` bytes of which one has arrived. Then the others arrive."""
        body = bytes(range(256)) * (size // 256)
        receive(connection, lines(f"Content-Length: {size}") + body[:1])
        found = sum(len(sink.memory) for sink in sinks)
        receive(connection, body[1:])
        assert answered(transport.sent) == [(200, body)]
        transport.sent = b""
        return found

    assert reserved(2 * MIB) == FIRST_BYTES
    assert len(connection.get_buffer(-1)) == 4096
    assert reserved(2 * MIB) == MIB, "the first half, with one of its bytes"
    assert reserved(2 * MIB + 512) < MIB, "it is larger than the last"
    assert reserved(32 * 1024) == 16 * 1024
    assert len(connection.get_buffer(-1)) > 4096, "a large body is not expected"
    assert reserved(2 * MIB) == FIRST_BYTES


def test_a_message_like_earlier_ones_gets_its_memory_at_once() -> None:
    """So a connection reserves no more than it has sent before, over all streams together."""
    host = Host(message_bytes=64 * MIB)
    caller = Caller(host)
    body = bytes(range(256)) * (2 * MIB // 256)

    def announce(reserved: int) -> int:
        number = caller.begin()
        caller.send(number, message(body)[:2000], end=False)
        buffer: Any = caller.core.streams.open[number]._buffer  # noqa: SLF001 - what a stream buffers is invisible
        assert len(buffer.memory) == reserved
        return number

    def finish(number: int) -> None:
        caller.send(number, message(body)[2000:])
        assert caller.messages(number) == [body]

    finish(announce(2 * MIB // PART))
    second = announce(2 * MIB)
    finish(announce(2 * MIB // PART))  # what was sent before is used up
    finish(second)
    caller.core.streams.lost()
    assert host.held == 0


def test_unread_http_responses_are_counted() -> None:
    budget = Budget(16 * MIB)
    slow = []
    for _ in range(8):
        connection, transport, _, _ = connected(False, budget)
        receive(connection, post(b"x"))
        connection.pause_writing()
        connection.exchange.answer(200, [bytes(2 * MIB)])
        slow.append((connection, transport))
        assert budget.held <= budget.limit
    answers = [answered(transport.sent)[0][0] for _, transport in slow]
    assert answers[:2] == [200, 200]
    assert 503 in answers, "the share of their address is used up"
    assert b"unsent responses of this address" in slow[answers.index(503)][1].sent
    slow[0][0].resume_writing()
    for connection, _ in slow[1:]:
        connection.connection_lost(None)
    assert budget.held == 0


def test_unread_grpc_responses_are_counted() -> None:
    host = Host(held_bytes=16 * MIB, message_bytes=16 * MIB)
    slow = Caller(host)
    slow.acknowledge = False
    numbers = [slow.begin() for _ in range(6)]
    for number in numbers:
        with suppress(StreamClosedError):  # refused before everything is sent
            slow.send(number, message(bytes(MIB)))
    unsent = sum(stream.unsent for stream in slow.core.streams.open.values())
    assert host.held == unsent > 3 * MIB
    assert unsent <= 4 * MIB, "a share"
    refused = [number for number in numbers if number in slow.ended and "grpc-status" in slow.ended[number]]
    assert {slow.status(number) for number in refused} == {14}
    slow.core.streams.lost()
    assert host.held == 0
