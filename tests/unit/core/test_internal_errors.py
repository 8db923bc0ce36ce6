"""An internal error affects only the client or the worker whose message caused it."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.core.batching import dispatch
from shmserve.core.core import Core
from shmserve.core.effects import Kill, Log, Send
from shmserve.core.internal_errors import ERRORS_PER_TURN, INTERNAL_ERROR
from shmserve.core.records import Instance, Version
from shmserve.core.state import State
from shmserve.protocol.messages import Fail, Goodbye, Infer, Reply
from shmserve.protocol.worker_messages import Done
from tests.support.core.policies import plain
from tests.support.core.world import World


class Faulty(World):
    """A world whose core fails for requests with number 13 and for batches with three rows."""

    def __init__(self, survive: bool) -> None:
        super().__init__()
        self.core = Core("test", survive=survive)
        self.deploy(plain(), 1, "")
        self.logs: list[str] = []
        self.goodbyes: list[Goodbye] = []
        self.kills: list[str] = []
        infer, done = self.core._of_clients[Infer], self.core._of_workers[Done]

        def bad_infer(peer: int, message: Infer, now: int) -> None:
            if message.request == 13:
                raise ZeroDivisionError("thirteen")
            infer(peer, message, now)

        def bad_done(version: Version, instance: Instance, message: Done, now: int) -> None:
            if len(message.rows) == 3:
                raise KeyError(message.batch)
            done(version, instance, message, now)

        self.core._of_clients[Infer], self.core._of_workers[Done] = bad_infer, bad_done

    def tell(self, effect: Any) -> None:
        super().tell(effect)
        if isinstance(effect, Log) and effect.level == "critical":
            self.logs.append(effect.text)
        elif isinstance(effect, Send) and isinstance(effect.message, Goodbye):
            self.goodbyes.append(effect.message)
        elif isinstance(effect, Kill):
            self.kills.append(effect.reason)


def test_the_client_is_disconnected_and_the_rest_of_the_turn_is_processed() -> None:
    world = Faulty(survive=True)
    good, bad = world.connect("good"), world.connect("bad")
    world.turn([bad.infer(1), bad.infer(13), good.infer(2)])
    assert bad.ended
    (goodbye,) = world.goodbyes
    assert goodbye.code == "INTERNAL"
    assert "thirteen" not in goodbye.text
    (log,) = world.logs
    assert INTERNAL_ERROR in log
    assert f"Infer of client {bad.peer}" in log
    assert "ZeroDivisionError: thirteen" in log
    world.finish_all()
    assert isinstance(good.answers[2], Reply)
    world.turn([good.infer(3)])
    world.finish_all()
    assert isinstance(good.answers[3], Reply)
    assert not world.core.state.requests


def test_the_worker_is_killed_and_its_requests_are_run_by_another() -> None:
    world = Faulty(survive=True)
    client = world.connect("a")
    world.turn([client.infer(number) for number in (1, 2, 3)])
    world.finish_all()
    (reason,) = world.kills
    assert f"{INTERNAL_ERROR} in its Done" in reason
    world.advance(world.now + 10**10)
    world.finish_all()
    world.advance(world.now + 10**10)
    world.finish_all()
    assert set(client.answers) == {1, 2, 3}
    assert not any(isinstance(answer, Fail) and "KeyError" in answer.text for answer in client.answers.values())
    assert not world.core.state.requests


def test_too_many_errors_end_the_server() -> None:
    world = Faulty(survive=True)
    clients = [world.connect(str(number)) for number in range(ERRORS_PER_TURN + 1)]
    with pytest.raises(ZeroDivisionError):
        world.turn([client.infer(13) for client in clients])


def test_internal_errors_propagate_unless_the_core_survives_them() -> None:
    world = Faulty(survive=False)
    with pytest.raises(ZeroDivisionError):
        world.turn([world.connect("a").infer(13)])


def test_an_error_in_the_dispatch_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of one model cannot be formed; those of another can."""
    world = Faulty(survive=True)
    world.deploy(plain("n"), 1, "")
    good_dispatch = dispatch.dispatch

    def bad_dispatch(state: State, version: Version, now: int) -> None:
        if version.model == "m":
            raise IndexError("no batch")
        good_dispatch(state, version, now)

    monkeypatch.setattr(dispatch, "dispatch", bad_dispatch)
    client = world.connect("a")
    world.turn([client.infer(1), client.infer(2, "n")])
    world.finish("n_0")
    assert isinstance(client.answers[2], Reply)
    assert any("IndexError: no batch" in log for log in world.logs)
