"""Queries that wait: for a model that is loading, for changes of a configuration, and for the probes of workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shmserve.broker.admin.answers import NOTIFIED, WAITING, QueryAnswers
from shmserve.broker.admin.readiness_probes import LIMIT_S, Probes
from shmserve.protocol.messages import Answer, Ask, Cancel, Changed
from shmserve.protocol.worker_messages import Probe, Probed
from tests.support.manual_loop import ManualLoop

WAIT = b'{"wait": true}'


def probing() -> tuple[ManualLoop, Probes, list[tuple[int, Probe]], list[bool]]:
    loop, sent, answers = ManualLoop(), list[tuple[int, Probe]](), list[bool]()
    probes = Probes(loop, lambda peer, message: sent.append((peer, message)))
    for peer in (1, 2):
        probes.probed(peer, Probed(0, True))
    return loop, probes, sent, answers


def test_readiness_requires_all_probes() -> None:
    loop, probes, sent, answers = probing()
    assert probes.probe([1, 2, 3], answers.append)
    assert sent == [(1, Probe(1)), (2, Probe(1))]
    probes.probed(1, Probed(1, True))
    probes.probed(1, Probed(1, False))  # reported twice
    probes.probed(3, Probed(1, False))  # was not asked
    assert not answers
    probes.probed(2, Probed(1, True))
    assert answers == [True]
    assert not loop.timers
    probes.probe([1, 2], answers.append)
    probes.probed(2, Probed(2, False))
    probes.probed(1, Probed(2, True))
    assert answers == [True, False], "one failed probe decides"
    sent.clear()
    assert not probes.probe([7], answers.append), "no probe is supported"
    assert (sent, answers, loop.timers) == ([], [True, False], [])


def test_a_probe_that_does_not_answer_is_not_ready() -> None:
    loop, probes, _, answers = probing()
    probes.probe([1], answers.append)
    assert loop.fire() == LIMIT_S
    probes.probed(1, Probed(1, True))
    assert answers == [False]
    probes.probe([1, 2], answers.append)
    probes.worker_exited(2)
    assert answers == [False, False]
    assert not probes.probe([2], answers.append)
    probes.probe([1], answers.append)
    probes.close()
    assert answers == [False] * 3


class World:
    def __init__(self) -> None:
        self.loading, self.served = {"m", "other"}, {"n", "n@prod", "n2"}
        self.sent: list[tuple[int, Any]] = []
        control: Any = SimpleNamespace(
            is_loading=lambda model="": model in self.loading,
            full_name=str,
            serves=lambda model: model in self.served,
            answer=lambda ask, roles, shared: [Answer(ask.request, b"{}")],
        )
        operations: Any = SimpleNamespace(cancelled=lambda peer, request: None, handle=lambda peer, ask: False)
        probes: Any = None
        self.answers = QueryAnswers(control, probes, operations, self.send, lambda peer: 0)

    def send(self, peer: int, message: Answer | Changed) -> None:
        self.sent.append((peer, message.request if isinstance(message, Answer) else message.model))

    def ask(self, peer: int, request: int, body: bytes = WAIT, model: str = "m") -> None:
        self.answers.query(peer, Ask(request, "config", model, 0, body))

    def notified(self) -> list[tuple[int, Any]]:
        self.answers.notify()
        return self.sent


def test_queries_wait_until_their_model_has_loaded_or_their_caller_has_gone() -> None:
    for body in (b"", b'{"wait": false}', b"?", b"[]", b'{"wait": "\xff"}', b'{"a":' + b"[" * 10_000):
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


def test_clients_that_follow_a_model_learn_of_a_change_once() -> None:
    world = World()
    for peer, model in (1, "n"), (2, "n"), (2, "n"), (3, "n"), (2, "n@prod"), (1, "n2"):
        world.ask(peer, 5, b'{"follow": true}', model)
    world.ask(4, 5, model="n")
    world.answers.peer_disconnected(3)
    world.sent.clear()
    for changed, sent in (
        ({}, []),
        ({"x": None}, []),
        ({"n": None}, [(1, "n"), (2, "n"), (2, "n@prod")]),
        ({"n": None}, []),
    ):
        world.answers.begin(changed)
        world.answers.end()
        assert sorted(world.sent) == sent
        world.sent.clear()
    world.ask(1, 6, b'{"follow": true}', "unready")
    assert world.sent == [(1, 6), (1, "unready")], "which version will serve it is not known"
