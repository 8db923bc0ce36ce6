"""Limits of parameters and totals, and the bodies of operations. limits.txt, errors.txt and
queries.txt of tests/scenarios have the others."""

from __future__ import annotations

import heapq
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.core import events
from shmserve.core.core import Core
from shmserve.core.effects import Query, Send
from shmserve.core.intake.queries import ARGUMENTS_BYTES
from shmserve.core.limits import BURST_S, NAMED, Limits
from shmserve.core.policy import BatchPolicy
from shmserve.core.records import ORDER
from shmserve.core.state import SWEPT_TIMERS, State, Timer
from shmserve.protocol.messages import (
    FIELD_BYTES,
    PROTOCOL,
    Ask,
    Cancel,
    Fail,
    Goodbye,
    Handle,
    Hello,
    Options,
    Reply,
    Return,
)
from shmserve.protocol.roles import ALL_ROLES
from tests import ROOT
from tests.support.core.fakes.client import FakeClient
from tests.support.core.policies import plain
from tests.support.core.world import Recorded, World
from tests.support.hypothesis_profiles import examples


class Crowded(Recorded):
    """A world with a model that runs one request at a time."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(Limits(**limits))
        self.numbers = 0
        self.deploy(plain(max_batch=1))

    def ask(self, client: FakeClient) -> None:
        self.numbers += 1
        self.turn([client.infer(self.numbers)])

    def fails(self, client: FakeClient) -> list[Fail]:
        return [answer for answer in client.answers.values() if isinstance(answer, Fail)]


def check_refused(answers: list[Any], name: str, *numbers: int) -> None:
    """Asserts that the limit `name` refused the requests, and that the text has these numbers."""
    assert answers
    for answer in answers:
        assert answer.code == "UNAVAILABLE"
        assert f"({name})" in answer.text
        assert set(map(str, numbers)) <= set(re.findall(r"\d+", answer.text)), answer.text


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


def test_cancelled_requests_are_freed_while_another_runs() -> None:
    """With preserve_ordering, the first request runs for minutes, and the others are cancelled as soon as they are
    sent."""
    world = World(checks=False)
    world.deploy(plain(max_batch=1, batching=BatchPolicy(preserve_ordering=True)))
    client = world.connect("a")
    for number in range(1, 4001):
        world.turn([client.infer(number), *([(client.peer, Cancel(number))] if number > 1 else [])])
    order = world.core.state.ready["m"].service.order
    assert order is not None
    assert len(order) <= ORDER + 1
    world.finish()
    assert isinstance(client.answers[1], Reply)
    world.core.check()


def test_errors_of_one_message_beyond_the_limit_disconnect_once() -> None:
    world = Crowded(client_errors=5)
    client = world.connect("a")
    unknown = Handle(77, 0, 64)
    world.turn([(client.peer, Return((unknown,) * 20 * BURST_S))])
    (goodbye,) = [effect.message for effect in world.of(Send) if isinstance(effect.message, Goodbye)]
    check_refused([goodbye], "client_errors", 5)
    assert len(client.errors) == 5 * BURST_S + 1


def test_timers_of_answered_requests_are_removed() -> None:
    """A timer keeps its request: 7,000 of them would keep 6 MB."""
    world = World(checks=False)
    world.deploy(plain(max_batch=100))
    client = world.connect("a")

    def ask() -> None:
        first = 1 + max(client.answers, default=0)
        messages = [client.infer(number) for number in range(first, first + 100)]
        for _, message in messages:
            message.timeout_us = 3_600_000_000
        world.turn(messages)
        world.finish_all()
        for number in list(client.answers)[:-1]:
            del client.answers[number]
        client.order.clear()

    tracemalloc.start()
    for _ in range(70):
        ask()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 5_000_000


def test_timers_in_use_are_not_swept_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[object] = []
    monkeypatch.setattr(heapq, "heapify", sweeps.append)
    state = State(Limits(), False)
    for at in range(5 * SWEPT_TIMERS):
        state.set_timer(at, Timer.RETRY, None)
    assert len(sweeps) == 3


def test_every_limit_has_its_test() -> None:
    """The other limits are tested in test_overrides.py and test_turns.py."""
    tests = [Path(__file__).read_text(), *(path.read_text() for path in (ROOT / "tests" / "scenarios").glob("*.txt"))]
    for row in NAMED:
        elsewhere = row.name in ("override_bytes", "client_outbox_bytes", "outbox_bytes")
        assert elsewhere or any(f" {row.name}=" in text or f'"{row.name}"' in text for text in tests), row.name


def serving() -> Core:
    core = Core()
    opened = events.Opened(1, "uid:1", "lane", ALL_ROLES)
    core.handle([(0, opened), (1, Hello(PROTOCOL, 1, "c", "memfd"))], 0)
    return core


def failed(effects: list[Any]) -> list[Fail]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Fail)]


@pytest.mark.parametrize("what", ["load", "set_log"])
def test_operations_and_their_bodies_do_not_wait(what: str) -> None:
    core = serving()
    pieces = [Ask(1, what, "m", 0, bytes(FIELD_BYTES), True), *[Ask(1, "", "", 0, bytes(FIELD_BYTES), True)] * 20]
    effects = core.handle([(1, piece) for piece in pieces], 0)
    assert [e.ask for e in effects if isinstance(e, Query)] == pieces


def test_the_bytes_of_a_body_do_not_wait_with_a_query() -> None:
    core = serving()
    asks = [Ask(n, "live", "", 0, bytes(FIELD_BYTES)) for n in range(1, 100)]
    core.handle([(1, ask) for ask in asks], 0)
    assert not any(ask.body for ask in asks)
    (fail,) = failed(core.handle([(1, Ask(200, "live", "", 0, b"", True))], 0))
    assert "too long" in fail.text
    wait, long = Ask(201, "config", "m", 0, b'{"wait": true}'), Ask(202, "config", "m", 0, bytes(ARGUMENTS_BYTES + 1))
    (fail,) = failed(core.handle([(1, wait), (1, long)], 0))
    assert (fail.request, wait.body) == (202, b'{"wait": true}')
