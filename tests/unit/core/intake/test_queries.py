"""Floods of queries, and the bodies of operations. tests/scenarios/queries.txt has the order of queries."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.core import events
from shmserve.core.core import Core
from shmserve.core.effects import Query, Send
from shmserve.core.intake.queries import ARGUMENTS_BYTES, QUERIES_PER_TURN
from shmserve.protocol.messages import FIELD_BYTES, PROTOCOL, Ask, Fail, Hello

EVERY = 7


def serving(clients: int, user: str = "") -> Core:
    """A core with this many clients, each of a user of its own, or all of one."""
    core = Core()
    for peer in range(1, clients + 1):
        opened = events.Opened(peer, user or f"uid:{peer}", "lane", EVERY)
        core.handle([(0, opened), (peer, Hello(PROTOCOL, 1, "c", "memfd"))], 0)
    return core


def failed(effects: list[Any]) -> list[Fail]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Fail)]


def passed(effects: list[Any]) -> list[tuple[int, int]]:
    return [(e.peer, e.ask.request) for e in effects if isinstance(e, Query) and isinstance(e.ask, Ask)]


def test_a_flood_of_queries_delays_other_clients_by_one_round() -> None:
    flooders, each = 40, 1000
    core = serving(flooders + 1)
    flood = [(peer, Ask(n, "metrics")) for peer in range(1, flooders + 1) for n in range(1, each + 1)]
    first = passed(core.handle(flood, 0))
    assert len(first) == QUERIES_PER_TURN
    honest = flooders + 1
    found = [passed(core.handle([(honest, Ask(1, "metrics"))], 0))]
    while (honest, 1) not in found[-1]:
        found.append(passed(core.tick(0)))
    assert len(found) <= flooders // QUERIES_PER_TURN + 1
    assert all(len(turn) == QUERIES_PER_TURN for turn in found)


def test_many_connections_of_a_user_delay_another_user_by_one_turn() -> None:
    core = serving(199, "uid:0")
    core.handle([(0, events.Opened(200, "uid:2", "lane", EVERY)), (200, Hello(PROTOCOL, 1, "c", "memfd"))], 0)
    core.handle([(peer, Ask(n, "metrics")) for peer in range(1, 200) for n in range(1, 11)], 0)
    found = passed(core.handle([(200, Ask(n, "metrics")) for n in range(1, 4)], 0)) + passed(core.tick(0))
    assert [n for peer, n in found if peer == 200] == [1, 2, 3]


def test_a_small_query_goes_before_large_ones_of_its_user() -> None:
    core = serving(200, "uid:1")
    core.handle([(peer, Ask(n, "statistics")) for peer in range(1, 200) for n in range(1, 11)], 0)
    found = passed(core.handle([(200, Ask(1, "ready"))], 0))
    assert (200, 1) in found
    assert len(found) == QUERIES_PER_TURN, "large ones are not starved"


@pytest.mark.parametrize("what", ["load", "set_log"])
def test_operations_and_their_bodies_do_not_wait(what: str) -> None:
    core = serving(1)
    pieces = [Ask(1, what, "m", 0, bytes(FIELD_BYTES), True), *[Ask(1, "", "", 0, bytes(FIELD_BYTES), True)] * 20]
    effects = core.handle([(1, piece) for piece in pieces], 0)
    assert [e.ask for e in effects if isinstance(e, Query)] == pieces


def test_the_bytes_of_a_body_do_not_wait_with_a_query() -> None:
    core = serving(1)
    asks = [Ask(n, "live", "", 0, bytes(FIELD_BYTES)) for n in range(1, 100)]
    core.handle([(1, ask) for ask in asks], 0)
    assert not any(ask.body for ask in asks)
    (fail,) = failed(core.handle([(1, Ask(200, "live", "", 0, b"", True))], 0))
    assert "too long" in fail.text
    wait, long = Ask(201, "config", "m", 0, b'{"wait": true}'), Ask(202, "config", "m", 0, bytes(ARGUMENTS_BYTES + 1))
    (fail,) = failed(core.handle([(1, wait), (1, long)], 0))
    assert (fail.request, wait.body) == (202, b'{"wait": true}')
