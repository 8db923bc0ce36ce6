"""A fault of the server's own costs the one who met it, and nobody else anything."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.core.core import Core
from shmserve.core.effects import Kill, Log, Send
from shmserve.core.internal_errors import MANY, SIGN
from shmserve.core.policy import BatchPolicy, ModelPolicy, TensorSpec
from shmserve.core.records import Instance, Version
from shmserve.protocol.messages import Done, Fail, Goodbye, Infer, Reply, Tensor
from tests.support.core.fakes import FakeClient
from tests.support.core.world import World

SPECS = (TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),)


class Faulty(World):
    """Its core has a fault for requests with the number 13, and for batches whose answer has three rows."""

    def __init__(self, survive: bool) -> None:
        super().__init__()
        self.core = Core("test", survive=survive)
        self.deploy(ModelPolicy("m", 1, 8, *SPECS, BatchPolicy()), 1, "")
        self.logs: list[str] = []
        self.parted: list[Goodbye] = []
        self.kills: list[str] = []
        infer, done = self.core._of_clients[Infer], self.core._of_reports[Done]

        def bad_infer(peer: int, message: Infer, now: int) -> None:
            if message.request == 13:
                raise ZeroDivisionError("thirteen")
            infer(peer, message, now)

        def bad_done(version: Version, instance: Instance, message: Done, now: int) -> None:
            if len(message.rows) == 3:
                raise KeyError(message.batch)
            done(version, instance, message, now)

        self.core._of_clients[Infer], self.core._of_reports[Done] = bad_infer, bad_done

    def tell(self, effect: Any) -> None:
        super().tell(effect)
        if isinstance(effect, Log) and effect.level == "critical":
            self.logs.append(effect.text)
        elif isinstance(effect, Send) and isinstance(effect.message, Goodbye):
            self.parted.append(effect.message)
        elif isinstance(effect, Kill):
            self.kills.append(effect.reason)


def ask(client: FakeClient, number: int) -> tuple[int, Infer]:
    client.sends(number)
    return client.peer, Infer(number, "m", 0, (Tensor("x", "FP32", (1, 1), bytes(4)),))


def finish(world: World) -> None:
    worker = world.worker("m_0")
    while worker.running is not None:
        worker.finish(world.now)
        world.settle()


def test_the_client_is_sent_away_and_all_else_of_the_turn_goes_on() -> None:
    world = Faulty(survive=True)
    good, bad = world.connect("good"), world.connect("bad")
    world.turn([ask(bad, 1), ask(bad, 13), ask(good, 2)])
    assert bad.ended
    (goodbye,) = world.parted
    assert goodbye.code == "INTERNAL"
    assert "thirteen" not in goodbye.text
    (log,) = world.logs
    assert SIGN in log
    assert f"Infer of client {bad.peer}" in log
    assert "ZeroDivisionError: thirteen" in log
    finish(world)
    assert isinstance(good.answers[2], Reply)
    world.turn([ask(good, 3)])
    finish(world)
    assert isinstance(good.answers[3], Reply)
    assert not world.core.state.requests


def test_the_worker_is_ended_and_its_requests_are_run_by_another() -> None:
    world = Faulty(survive=True)
    client = world.connect("a")
    world.turn([ask(client, number) for number in (1, 2, 3)])
    finish(world)
    (reason,) = world.kills
    assert f"{SIGN} in its Done" in reason
    world.advance(world.now + 10**10)
    finish(world)
    world.advance(world.now + 10**10)
    finish(world)
    assert set(client.answers) == {1, 2, 3}
    assert not any(isinstance(answer, Fail) and "KeyError" in answer.text for answer in client.answers.values())
    assert not world.core.state.requests


def test_faults_without_end_are_no_accident() -> None:
    world = Faulty(survive=True)
    clients = [world.connect(str(number)) for number in range(MANY + 1)]
    with pytest.raises(ZeroDivisionError):
        world.turn([ask(client, 13) for client in clients])


def test_tests_see_them() -> None:
    world = Faulty(survive=False)
    with pytest.raises(ZeroDivisionError):
        world.turn([ask(world.connect("a"), 13)])


def test_what_follows_from_events() -> None:
    """One model's batches cannot be formed; another's can."""
    world = Faulty(survive=True)
    world.deploy(ModelPolicy("n", 1, 8, *SPECS, BatchPolicy()), 1, "")
    dispatch = world.core._dispatcher.dispatch

    def bad_dispatch(version: Any, now: int) -> None:
        if version.model == "m":
            raise IndexError("no batch")
        dispatch(version, now)

    world.core._dispatcher.dispatch = bad_dispatch  # type: ignore[method-assign]
    client = world.connect("a")
    client.sends(2)
    other = Infer(2, "n", 0, (Tensor("x", "FP32", (1, 1), bytes(4)),))
    world.turn([ask(client, 1), (client.peer, other)])
    worker = world.worker("n_0")
    worker.finish(world.now)
    world.settle()
    assert isinstance(client.answers[2], Reply)
    assert any("IndexError: no batch" in log for log in world.logs)
