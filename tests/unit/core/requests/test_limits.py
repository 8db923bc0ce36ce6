"""Each named limit: requests over it are refused with its name, its value and a hint; other clients are served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.core import events
from shmserve.core.limits import BURST_S, NAMED, PATIENCE_S, Limits
from shmserve.core.policy import BatchPolicy
from shmserve.core.records import ORDER
from shmserve.core.requests.quotas import DISCONNECT_BURST, DISCONNECT_NS
from shmserve.protocol.messages import (
    FIELD_BYTES,
    PROTOCOL,
    Cancel,
    Fail,
    Goodbye,
    Handle,
    Hello,
    Infer,
    Options,
    Reclaim,
    Reply,
    Return,
    Tensor,
    Unmap,
)
from shmserve.protocol.roles import ALL_ROLES, INFER
from tests.support.core.fakes.client import FakeClient
from tests.support.core.lent import Lent
from tests.support.core.policies import plain, plain_mapped
from tests.support.core.world import World
from tests.support.hypothesis_profiles import examples

S = 10**9


class Crowded(World):
    """A world with a model that runs one request at a time, and a list of all sent messages."""

    def __init__(self, large: str = "", /, **limits: Any) -> None:
        super().__init__(Limits(**limits))
        self.sent: list[tuple[int, Any]] = []
        self.numbers = 0
        self.deploy(plain(max_batch=1), 1, large)

    def _send(self, effect: Any) -> None:
        self.sent.append((effect.peer, effect.message))
        super()._send(effect)

    def ask(self, client: FakeClient, count: int = 1, elements: int = 1) -> None:
        for _ in range(count):
            self.numbers += 1
            client.sends(self.numbers)
            tensor = Tensor("x", "FP32", (1, elements), bytes(4 * elements))
            self.turn([(client.peer, Infer(self.numbers, "m", 0, (tensor,)))])

    def fails(self, client: FakeClient) -> list[Fail]:
        return [answer for answer in client.answers.values() if isinstance(answer, Fail)]

    def goodbyes(self, client: FakeClient) -> list[Goodbye]:
        return [m for peer, m in self.sent if peer == client.peer and isinstance(m, Goodbye)]


def check_refused(answers: list[Any], name: str, *numbers: int) -> None:
    """Asserts that the limit `name` refused the requests, and that the text has these numbers and a hint."""
    assert answers
    for answer in answers:
        assert answer.code == "UNAVAILABLE"
        assert f"({name})" in answer.text
        assert set(map(str, numbers)) <= set(re.findall(r"\d+", answer.text)), answer.text
        assert re.search(r"try again when|wait for|drop results|use larger|close some", answer.text), answer.text


# ---------------------------------------------------------------------------------------------- connections


def test_connections() -> None:
    world = Crowded(connections=3)
    clients = [world.connect(f"c{n}", roles=INFER, audience=f"uid:{n}") for n in range(3)]
    late = world.connect("late", roles=INFER, audience="uid:9")
    check_refused(world.goodbyes(late), "connections", 3)
    assert not late.welcomed
    assert world.connect("operator", roles=ALL_ROLES, audience="uid:0").welcomed
    world.gone(clients[0])
    world.gone(clients[1])
    assert world.connect("again", roles=INFER, audience="uid:9").welcomed


def test_uid_connections() -> None:
    world = Crowded(uid_connections=2)
    first, _ = world.connect("a"), world.connect("b")
    third = world.connect("c")
    check_refused(world.goodbyes(third), "uid_connections", 2)
    assert world.connect("d", audience="uid:7").welcomed
    world.gone(first)
    assert world.connect("e").welcomed
    assert not world.connect("f").welcomed


def test_closed_connections_do_not_count_against_the_limit_of_their_user() -> None:
    world = Crowded(uid_connections=1)
    for _ in range(5):
        client = world.connect("a")
        assert client.welcomed
        assert world.connect("b").ended
        world.gone(client)


# ---------------------------------------------------------------------------------------------- requests


def test_client_requests() -> None:
    world = Crowded(client_requests=4)
    greedy, other = world.connect("greedy"), world.connect("other")
    world.ask(greedy, 6)
    check_refused(world.fails(greedy), "client_requests", 4)
    assert len(world.fails(greedy)) == 2
    world.ask(other)
    world.finish_all()
    assert not world.fails(other)
    world.ask(greedy)
    assert len(world.fails(greedy)) == 2


@pytest.mark.parametrize("name", ["requests", "model_queue"])
def test_clients_below_their_share_are_served_when_the_server_is_full(name: str) -> None:
    world = Crowded(**{name: 8})
    greedy, modest = world.connect("greedy"), world.connect("modest")
    world.ask(greedy, 12)
    check_refused(world.fails(greedy), name, 8)
    kept = len(greedy.open)
    world.ask(modest, 3)
    assert not world.fails(modest)
    world.ask(greedy)
    assert len(greedy.open) == kept
    world.finish_all()
    assert len([a for a in modest.answers.values() if isinstance(a, Reply)]) == 3
    world.ask(greedy)
    assert len(greedy.open) == 1


@pytest.mark.parametrize("name", ["model_queue_bytes", "queue_bytes"])
def test_queued_bytes_are_limited(name: str) -> None:
    """Requests of a kilobyte each; the worker has taken the first two."""
    world = Crowded(**{name: 64 << 10})
    greedy, modest = world.connect("greedy"), world.connect("modest")
    world.ask(greedy, 80, 256)
    check_refused(world.fails(greedy), name, 64 << 10)
    assert 64 <= len(greedy.open) <= 68
    world.ask(modest, 1, 256)
    assert not world.fails(modest)
    world.finish_all()
    world.advance(world.now + 1)  # waiting bytes are counted once per turn
    world.ask(greedy, 10, 256)
    assert len(greedy.open) == 10


LARGE = Options(parameters={f"p{n}": "v" * (60 << 10) for n in range(3)})


@pytest.mark.parametrize("name", ["model_queue_bytes", "queue_bytes"])
def test_queued_parameters_are_counted(name: str) -> None:
    """A request has three parameters of 60 KiB: 1 MiB holds five requests, besides the running one."""
    world = Crowded(**{name: 1 << 20})
    greedy, modest = world.connect("greedy"), world.connect("modest")
    for number in range(1, 31):
        world.turn([greedy.infer(number, options=LARGE)])
    check_refused(world.fails(greedy), name, 1 << 20)
    assert 5 <= len(greedy.open) <= 9
    world.ask(modest)
    assert not world.fails(modest)
    world.finish_all()
    world.advance(world.now + 1)
    assert world.core.state.clients[greedy.peer].bytes == 0
    world.turn([greedy.infer(31, options=LARGE)])
    assert greedy.open == {31}


@pytest.mark.parametrize("value", ["v" * (FIELD_BYTES + 1), "é" * (FIELD_BYTES // 2 + 1)])
def test_a_parameter_may_have_the_bytes_of_a_field(value: str) -> None:
    world = Crowded()
    client = world.connect("a")
    for number, text in ((1, value), (2, value[:-1])):
        world.turn([client.infer(number, options=Options(parameters={"p": text}))])
    (fail,) = world.fails(client)
    assert (fail.request, fail.code) == (1, "INVALID_ARG")
    assert f"parameter 'p' has {len(value.encode())} bytes, over the limit of {FIELD_BYTES}" in fail.text
    assert client.open == {2}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), max_size=30), st.integers(1, 20))
@settings(max_examples=examples(60))
def test_totals_exceed_their_limit_at_most_twofold(asked: list[tuple[int, int]], limit: int) -> None:
    """A client with less than an equal share is always served."""
    world = Crowded(requests=limit)
    clients = [world.connect(f"c{n}") for n in range(4)]
    for index, count in asked:
        client = clients[index]
        for _ in range(count):
            before, mine = len(world.core.state.requests), len(client.open)
            world.ask(client)
            if before < limit or mine * 4 < limit:
                assert len(client.open) == mine + 1
            else:
                assert len(client.open) == mine
    assert len(world.core.state.requests) < 2 * limit + 4
    world.finish_all()
    assert not world.core.state.requests


# ---------------------------------------------------------------------------------------------- memory


def test_client_held_bytes() -> None:
    world = Crowded("y", client_held_bytes=8)
    client, other = world.connect("a"), world.connect("b")
    world.ask(client, 3)
    world.finish_all()
    world.ask(client)
    check_refused(world.fails(client), "client_held_bytes", 12, 8)
    assert [m for peer, m in world.sent if isinstance(m, Reclaim)] == [Reclaim()]
    world.ask(other)
    world.finish_all()
    assert not world.fails(other)
    world.turn([(client.peer, Return(tuple(client.holds)))])
    client.holds.clear()
    world.ask(client)
    assert len(world.fails(client)) == 1


def of_size(client: FakeClient, number: int, segment: int, size: int) -> tuple[int, Any]:
    client.sends(number)
    tensor = Tensor("x", "FP32", (1, size // 4), (Handle(segment, 0, size),))
    return client.peer, Infer(number, "wide", 0, (tensor,))


@pytest.mark.parametrize("end", ["answered", "crashed", "cancelled", "gone"])
def test_client_input_bytes(end: str) -> None:
    """All requests refer to the same bytes, which need not be in memory. Each counts in full until no worker reads them
    any more."""
    world = Crowded(client_input_bytes=4096)
    world.deploy(plain("wide"))
    client, other = world.connect("a"), world.connect("b")
    numbers = {}
    for one in (client, other):
        announced = world.own_segment(one, 8192)
        numbers[one.peer] = announced.segment
        world.turn([(one.peer, announced)])
    mine = numbers[client.peer]
    world.turn([of_size(client, number, mine, 2048) for number in (1, 2, 3)])
    check_refused(world.fails(client), "client_input_bytes", 4096, 2048)
    world.turn([of_size(client, 4, mine, 8192)])
    assert "send smaller requests" in world.fails(client)[1].text
    world.turn([of_size(other, 1, numbers[other.peer], 4096)])
    assert not other.answers
    assert [one.input_bytes for one in world.core.state.clients.values()] == [4096, 4096]
    if end == "cancelled":
        world.turn([(client.peer, Cancel(1)), of_size(client, 5, mine, 2048)])
        check_refused(world.fails(client)[-1:], "client_input_bytes", 4096, 2048)
    elif end == "crashed":
        world.crash(world.worker("wide_0"))
        assert world.core.state.clients[client.peer].input_bytes == 4096, "they are retried"
    elif end == "gone":
        world.gone(client)
    world.finish_all()
    world.advance(world.now + S)
    world.finish_all()
    assert {one.input_bytes for one in world.core.state.clients.values()} == {0}


def test_held_bytes() -> None:
    world = Crowded("y", held_bytes=16)
    greedy, modest = world.connect("a"), world.connect("b")
    world.ask(greedy, 5)
    world.finish_all()
    world.ask(greedy)
    check_refused(world.fails(greedy), "held_bytes", 20, 16)
    world.ask(modest)
    world.finish_all()
    assert not world.fails(modest)


def test_client_segments() -> None:
    world = Crowded(client_segments=3)
    client, other = world.connect("a"), world.connect("b")
    for _ in range(3):
        world.turn([(client.peer, world.own_segment(client, 4096))])
    world.turn([(client.peer, Unmap(world.core.state.clients[client.peer].segments.copy().pop()))])
    world.turn([(client.peer, world.own_segment(client, 4096))])
    assert not client.ended
    world.turn([(client.peer, world.own_segment(client, 4096))])
    check_refused(world.goodbyes(client), "client_segments", 3)
    assert not world.core.state.ledger.segments
    assert len(world.forgotten) == 5
    world.turn([(other.peer, world.own_segment(other, 4096))])
    assert not other.ended


def test_segments() -> None:
    world = Crowded(segments=4)
    greedy, modest = world.connect("a"), world.connect("b")
    for _ in range(4):
        world.turn([(greedy.peer, world.own_segment(greedy, 4096))])
    world.turn([(modest.peer, world.own_segment(modest, 4096))])
    assert not modest.ended
    world.turn([(greedy.peer, world.own_segment(greedy, 4096))])
    check_refused(world.goodbyes(greedy), "segments", 5, 4)
    assert list(world.core.state.ledger.segments) == [modest.peer << 32 | 1]


# ---------------------------------------------------------------------------------------------- errors


def test_cancelled_requests_are_freed_while_another_runs() -> None:
    """With preserve_ordering, the first request runs for minutes, and the others are cancelled as soon as they are
    sent."""
    world = World(checks=False)
    world.deploy(plain(max_batch=1, batching=BatchPolicy(preserve_ordering=True)))
    client = world.connect("a")
    for number in range(1, 4001):
        world.turn([client.infer(number), *([(client.peer, Cancel(number))] if number > 1 else [])])
    order = world.core.state.ready["m"].order
    assert order is not None
    assert len(order) <= ORDER + 1
    world.finish()
    assert isinstance(client.answers[1], Reply)
    world.core.check()


def garbled(client: FakeClient) -> tuple[int, Any]:
    return client.peer, events.Garbled(0, "not a message")


def test_client_errors() -> None:
    world = Crowded(client_errors=5)
    client, other = world.connect("a"), world.connect("b")
    world.turn([garbled(client)] * 5 * BURST_S)
    assert not client.ended
    world.turn([garbled(client)] * 3)
    check_refused(world.goodbyes(client), "client_errors", 5)
    assert len(world.goodbyes(client)) == 1
    assert len(client.errors) == 5 * BURST_S + 1
    assert not other.ended
    assert world.connect("a again").welcomed


def test_errors_below_the_rate_do_not_disconnect() -> None:
    world = Crowded(client_errors=5)
    client = world.connect("a")
    for _ in range(100):
        world.turn([garbled(client)] * 5)
        world.advance(world.now + S)
    assert not client.ended
    for _ in range(2 * BURST_S):
        world.turn([garbled(client)] * 10)
        world.advance(world.now + S)
    assert world.goodbyes(client)


def test_a_client_with_many_errors_is_throttled_to_the_error_limit() -> None:
    world = Crowded(client_errors=5)
    client, other = world.connect("a"), world.connect("b")
    world.turn([garbled(client)] * 5 * PATIENCE_S)
    assert not world.paused
    world.turn([garbled(client)] * 2)
    assert world.paused == {client.peer: world.now + 2 * S // 5}
    world.advance(world.paused[client.peer])
    world.turn([garbled(client)])
    assert world.paused == {client.peer: world.now + S // 5}
    world.turn([garbled(other)])
    assert list(world.paused) == [client.peer]


def test_clients_of_a_user_with_many_disconnects_are_paused() -> None:
    """Each client sends Hello twice and is disconnected, and the next one connects at once."""
    world = Crowded()
    old, stranger = world.connect("a"), world.connect("b", audience="uid:7")
    waits = []
    for _ in range(3 * DISCONNECT_BURST):
        client = world.connect("a")
        waits.append(world.paused.get(client.peer, world.now) - world.now)
        world.turn([(client.peer, Hello(PROTOCOL, 1, "again", "memfd"))])
        assert world.goodbyes(client)
    assert waits[: DISCONNECT_BURST + 1] == [0] * (DISCONNECT_BURST + 1)
    assert waits[DISCONNECT_BURST + 1 :] == [DISCONNECT_NS * n for n in range(1, 2 * DISCONNECT_BURST)]
    assert old.peer not in world.paused
    assert world.connect("b", audience="uid:7").peer not in world.paused
    assert stranger.peer not in world.paused
    world.advance(world.now + 2 * PATIENCE_S * S)
    assert world.connect("a").peer not in world.paused


def test_no_limit_on_errors() -> None:
    world = Crowded(client_errors=0)
    client = world.connect("a")
    world.turn([garbled(client)] * 1000)
    assert not client.ended


def test_failed_requests_do_not_count_as_errors() -> None:
    """A gateway forwards requests of others, so it is not disconnected for their wrong shapes and names."""
    world = Crowded(client_errors=1)
    client = world.connect("a")
    for number in range(1, 5 * BURST_S):
        client.sends(number)
        world.turn([(client.peer, Infer(number, ("m", "nobody")[number % 2], 0, ()))])
    assert not client.ended
    assert {fail.code for fail in world.fails(client)} == {"INVALID_ARG", "NOT_FOUND"}


@pytest.mark.parametrize("most", [0, 1])
def test_leases(most: int) -> None:
    """If the limit "leases" is reached, requests go through the broker as before."""
    world = Lent(instances=3, leases=most)
    clients = [world.connect(f"c{number}", leases=True) for number in range(2)]
    for client in clients:
        world.alone(client=client)
    assert [len(client.leases) for client in clients] == [most, 0]
    world.alone(3, clients[1])
    assert all(isinstance(answer, Reply) for answer in clients[1].answers.values())
    if most:
        world.gone(clients[0])
        world.alone(client=clients[1])
        assert clients[1].leases


# ---------------------------------------------------------------------------------------------- the list of limits


def test_each_limit_is_listed_once_with_a_reason() -> None:
    names = [row.name for row in NAMED]
    assert len(names) == len(set(names))
    usual = Limits()
    for row in NAMED:
        assert getattr(usual, row.name) >= row.least
        assert row.counts
        assert row.why


def test_every_limit_has_its_test() -> None:
    """The other limits are tested in test_queries.py, tests/process/server/test_broker.py, and test_turns.py."""
    source = Path(__file__).read_text()
    for row in NAMED:
        elsewhere = row.name in ("client_questions", "client_outbox_bytes", "outbox_bytes")
        assert elsewhere or f'"{row.name}"' in source, row.name


def test_rows_of_mapped_steps_count_for_their_client() -> None:
    """The client with many rows is refused, and others are served."""
    world = World(Limits(requests=64))
    world.deploy(plain(max_batch=1))
    world.deploy(plain_mapped("e"))
    greedy, modest = world.connect("a"), world.connect("b")
    for number in (1, 2, 3):
        world.turn([greedy.infer(number, "e", rows=50)])
    fail = greedy.answers[2]
    assert isinstance(fail, Fail)
    assert fail.code == "UNAVAILABLE"
    assert "in ensemble 'e', " in fail.text
    assert "(requests)" in fail.text
    world.turn([modest.infer(1)])
    world.finish_all()
    assert isinstance(greedy.answers[1], Reply)
    assert isinstance(modest.answers[1], Reply)
    assert not world.core.state.requests
    assert {client.steps for client in world.core.state.clients.values()} == {0}
