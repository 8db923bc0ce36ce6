"""Shares of calls and input bytes per connection, address and token."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import ServeError, Unavailable
from shmserve.gateway.limits.caller_shares import (
    CallerShares,
    Charged,
    ConnectionShares,
    Payer,
    ShareBounds,
    network_of,
    release,
)
from shmserve.gateway.upstream.requests import PendingCall, PendingStream
from shmserve.protocol.messages import Part
from tests.support.cases import cases
from tests.support.hypothesis_profiles import examples


class Ticket(PendingCall):
    def __init__(self) -> None:
        self.payer = None
        self.input_bytes = 0

    def take(self, answer: object) -> None: ...

    def failed(self, error: ServeError) -> None: ...


def fill(payer: Payer, most: int, size: int = 0) -> list[Charged]:
    """Charges up to `most` calls, until one is refused."""
    charged: list[Charged] = []
    with suppress(Unavailable):
        for _ in range(most):
            ticket = Ticket()
            payer.charge(ticket, size)
            charged.append(ticket)
    return charged


def pool(calls: int, bounds: ShareBounds) -> CallerShares:
    shares = CallerShares(bounds)
    shares.limits({"client_requests": calls})
    return shares


def counts(shares: CallerShares) -> tuple[int, int]:
    return shares.requests.total.calls, shares.requests.total.input_bytes


def counts_by_key(shares: CallerShares) -> tuple[Counter[str], Counter[str]]:
    """Calls of each address and of each token that has an account."""
    keyed = shares.requests._addresses, shares.requests._tokens  # noqa: SLF001 - only memory would show it
    by_address, by_token = (Counter({key: one.calls for key, one in of.items()}) for of in keyed)
    return by_address, by_token


def test_nine_connections_of_one_address_leave_room_for_others() -> None:
    shares = CallerShares()
    attackers = [shares.connect("10.0.0.1").payer("") for _ in range(9)]
    taken = [len(fill(attacker, 1000)) for attacker in attackers]
    assert 2048 <= sum(taken) <= 4096
    assert len(fill(shares.connect("10.0.0.1").payer(""), 1000)) >= 50, "at the same address"
    assert len(fill(shares.connect("10.0.0.2").payer(""), 10_000)) >= 1000, "at another address"
    local = CallerShares()
    for _ in range(9):
        fill(local.connect("127.0.0.1").payer(""), 1000)
    assert len(fill(local.connect("127.0.0.1").payer(""), 1000)) >= 100


def test_many_connections_of_one_address_leave_new_ones_a_call() -> None:
    shares = CallerShares()
    for _ in range(1500):
        fill(shares.connect("10.0.0.1").payer(""), 1000)
    assert len(fill(shares.connect("10.0.0.1").payer(""), 1000)) == 1
    for _ in range(4000):
        fill(shares.connect("10.0.0.1").payer(""), 1000)
    assert shares.requests.total.calls == 8192 * 3 / 4
    assert len(fill(shares.connect("10.0.0.2").payer(""), 10_000)) == 8192 / 16


def test_a_connection_alone_has_a_quarter_of_the_calls() -> None:
    shares = pool(400, ShareBounds())
    payer = shares.connect("10.0.0.1").payer("")
    assert len(fill(payer, 1000)) == 100
    text = r"100 requests of this connection are in flight, its share \(--limit caller_share\) of the 400 that this "
    with pytest.raises(Unavailable, match=f"{text}gateway may have; retry later"):
        payer.take(0)
    assert shares.requests.refused == {"connection": 2, "address": 0, "token": 0}
    assert 'share_refusals_total{share="connection"} 2' in shares.metrics()
    assert [len(fill(shares.connect(f"10.0.0.{n + 10}").payer(""), 1000)) for n in range(4)] == [75, 56, 42, 31]


def test_a_full_address_refuses_its_largest_connections() -> None:
    shares = pool(400, ShareBounds())
    first, second = (shares.connect("10.0.0.1").payer("") for _ in range(2))
    assert len(fill(first, 1000)) == 100
    assert len(fill(second, 1000)) == 25
    with pytest.raises(Unavailable, match=r"125 requests of this address .* \(--limit caller_share\) of the 400"):
        second.take(0)
    assert [len(fill(shares.connect("10.0.0.1").payer(""), 1000)) for _ in range(8)] == [18, 14, 10, 8, 6, 4, 3, 3]


def test_input_bytes_have_shares_and_one_request_always_fits() -> None:
    shares = CallerShares(ShareBounds(input_bytes=4000))
    first, second = (shares.connect("10.0.0.1").payer("") for _ in range(2))
    assert len(fill(first, 10, 400)) == 2
    share = r"its share \(--limit caller_share\) of 4000 bytes \(--limit gateway_input_bytes\)"
    with pytest.raises(Unavailable, match=f"requests in flight take 800 bytes; 400 more would exceed {share}"):
        first.take(400)
    first.take(100)
    assert len(fill(second, 10, 400)) == 1
    shares.connect("10.0.0.2").payer("").take(5000)


def test_with_whole_shares_only_the_total_counts() -> None:
    shares = pool(400, ShareBounds(1.0))
    payer = shares.connect("10.0.0.1").payer("bob")
    assert len(fill(payer, 1000)) == 400
    with pytest.raises(Unavailable, match=r"400 requests are in flight through this gateway, .*\(client_requests\)"):
        payer.take(0)


def test_queries_have_shares_of_their_own() -> None:
    shares = pool(400, ShareBounds())
    shares.limits({"client_questions": 40})
    payer = shares.connect("10.0.0.1").payer("bob")
    assert len(fill(payer.queries, 1000)) == 10
    assert len(fill(payer, 1000)) == 100
    with pytest.raises(Unavailable, match=r"10 questions of this connection .* \(--limit caller_share\) of the 40 "):
        payer.queries.take(0)


def test_a_call_is_released_once() -> None:
    shares = CallerShares()
    payer = shares.connect("10.0.0.1").payer("bob")

    class Parts(PendingStream):
        def on_part(self) -> None: ...

    for end in (lambda one: one.fail(Unavailable("")), lambda one: one.settle(None), release):
        for ticket in (Ticket(), Parts()):
            payer.charge(ticket, 7)
            assert counts(shares) == (1, 7)
            end(ticket)
            release(ticket)
            assert counts(shares) == (0, 0)
    parts = Parts()
    payer.charge(parts, 7)
    parts.part(Part(1, 1, (), None, False), False)
    assert counts(shares) == (1, 7)
    parts.part(Part(1, 1, (), None, True), True)
    assert counts(shares) == (0, 0)


@cases(
    ("10.1.2.3", "10.1.2.3"),
    ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
    ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
    ("::ffff:10.1.2.3", "10.1.2.3"),
    ("fe80::1%eth0", "fe80::/64"),
    ("", ""),
    ("None", ""),
    ("127.0.0.9", ""),
    ("::1", ""),
    ("::ffff:127.0.0.1", ""),
)
def test_addresses_of_one_client(address: str, expected: str) -> None:
    assert network_of(address) == expected


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["take", "give", "close"]), st.integers(0, 50)), max_size=300)
)
def test_counts_are_the_sums_of_the_calls_in_flight(steps: list[tuple[int, str, int]]) -> None:
    shares = pool(60, ShareBounds(input_bytes=2000))
    open_: dict[int, tuple[ConnectionShares, str]] = {}
    flying: list[tuple[int, str, Charged]] = []
    for number, step, size in steps:
        address, token = f"10.0.0.{number % 3}", ("", "bob")[number % 2]
        if step == "take":
            connection, _ = open_.setdefault(number, (shares.connect(address), address))
            ticket = Ticket()
            with suppress(Unavailable):
                connection.payer(token).charge(ticket, size)
                flying.append((number, token, ticket))
        elif step == "give" and flying:
            release(flying.pop(size % len(flying))[2])
        elif step == "close" and number in open_:
            for one in [one for one in flying if one[0] == number]:
                release(one[2])
                flying.remove(one)
            open_.pop(number)[0].close()
        of_address: Counter[str] = Counter(f"10.0.0.{one[0] % 3}" for one in flying)
        of_token: Counter[str] = Counter(token for _, token, _ in flying if token)
        assert counts(shares) == (len(flying), sum(one[2].input_bytes for one in flying))
        by_address, by_token = counts_by_key(shares)
        assert (+by_address, +by_token) == (of_address, of_token)
        assert shares.requests.total.calls <= 60
    for one in flying:
        release(one[2])
    for connection, _ in open_.values():
        connection.close()
    assert counts_by_key(shares) == ({}, {}), "no account is left"
