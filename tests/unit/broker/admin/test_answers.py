"""Queries that wait for a model that is loading."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shmserve.broker.admin.answers import NOTIFIED, WAITING, QueryAnswers
from shmserve.protocol.messages import Ask, Cancel

WAIT = b'{"wait": true}'


class World:
    def __init__(self) -> None:
        self.loading = {"m", "other"}
        self.sent: list[tuple[int, int]] = []
        control: Any = SimpleNamespace(
            is_loading=lambda model="": model in self.loading,
            full_name=str,
            answer=lambda ask, roles, shared: [ask.request],
        )
        operations: Any = SimpleNamespace(cancelled=lambda peer, request: None, handle=lambda peer, ask: False)
        probes: Any = None
        self.answers = QueryAnswers(control, probes, operations, lambda *sent: self.sent.append(sent), lambda peer: 0)

    def ask(self, peer: int, request: int, body: bytes = WAIT, model: str = "m") -> None:
        self.answers.query(peer, Ask(request, "config", model, 0, body))

    def notified(self) -> list[tuple[int, int]]:
        self.answers.notify()
        return self.sent


def test_queries_wait_until_their_model_has_loaded_or_their_caller_has_gone() -> None:
    for body in (b"", b'{"wait": false}', b"?", b"[]"):
        world = World()
        world.ask(1, 1, body)
        assert world.sent == [(1, 1)]
    world = World()
    world.ask(1, 1)
    world.ask(2, 1, model="other")
    world.ask(2, 2)
    world.loading.remove("m")
    assert world.notified() == [(1, 1), (2, 2)]
    world = World()
    for request in (1, 2):
        world.ask(1, request)
    world.answers.query(1, Cancel(1))
    world.answers.query(2, Cancel(2))
    assert world.notified() == [(1, 1)]
    world.loading.clear()
    assert world.notified() == [(1, 1), (1, 2)]


def test_the_queries_of_one_peer_that_wait_are_limited() -> None:
    world = World()
    for request in range(WAITING):
        world.ask(1, request, model="m" if request % 2 else "other")
    assert not world.sent
    world.ask(1, WAITING)
    assert world.sent == [(1, WAITING)]
    world.ask(2, 1)
    world.loading.clear()
    for _ in range(WAITING // NOTIFIED + 1):
        world.answers.notify()
    assert len(world.sent) == WAITING + 2
