"""An internal error affects only the client or the worker whose message caused it."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.core.batching import dispatch, reports
from shmserve.core.core import Core
from shmserve.core.effects import Kill, Log, Send
from shmserve.core.exit import exit
from shmserve.core.intake.admission import Admission
from shmserve.core.internal_errors import ERRORS_PER_TURN, INTERNAL_ERROR
from shmserve.protocol.messages import Cancel, Columns, Fail, Goodbye, InferBatch, Reply, TensorForm
from tests.support.core.policies import plain
from tests.support.core.world import Recorded


class Faulty(Recorded):
    def __init__(self, survive: bool = True) -> None:
        super().__init__()
        self.core = Core("test", survive=survive)
        self.deploy(plain())

    def logs(self) -> list[str]:
        return [log.text for log in self.of(Log) if log.level == "critical"]


@pytest.fixture(autouse=True)
def _the_core_has_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails for requests with number 13, for results of three rows, and for batches of the model "faulty"."""

    def fail_if(owner: Any, name: str, is_bad: Any, error: Exception) -> None:
        good = getattr(owner, name)

        def bad(*arguments: Any) -> None:
            if is_bad(*arguments):
                raise error
            good(*arguments)

        monkeypatch.setattr(owner, name, bad)

    fail_if(Admission, "infer", lambda _, peer, message, *rest: message.request == 13, ZeroDivisionError("thirteen"))
    fail_if(reports, "done", lambda state, version, instance, message, now: len(message.rows) == 3, KeyError("three"))
    fail_if(dispatch, "dispatch", lambda state, version, now: version.model == "faulty", IndexError("no batch"))


def test_the_client_is_disconnected_and_the_rest_of_the_turn_is_processed() -> None:
    world = Faulty()
    good, bad = world.connect("good"), world.connect("bad")
    world.turn([bad.infer(1), bad.infer(13), good.infer(2)])
    assert bad.ended
    sent = [effect.message for effect in world.of(Send)]
    (goodbye,) = [message for message in sent if isinstance(message, Goodbye)]
    assert goodbye.code == "INTERNAL"
    assert "thirteen" not in goodbye.text
    (log,) = world.logs()
    for part in (INTERNAL_ERROR, f"Infer of client {bad.peer}", "ZeroDivisionError: thirteen"):
        assert part in log
    world.finish_all()
    world.turn([good.infer(3)])
    world.finish_all()
    assert [type(answer) for answer in good.answers.values()] == [Reply, Reply]
    assert not world.core.state.requests


def test_the_worker_is_killed_and_its_requests_are_run_by_another() -> None:
    world = Faulty()
    client = world.connect("a")
    world.turn([client.infer(number) for number in (1, 2, 3)])
    world.finish_all()
    (kill,) = world.of(Kill)
    assert f"{INTERNAL_ERROR} in its Done" in kill.reason
    for _ in range(2):
        world.advance(world.now + 10**10)
        world.finish_all()
    assert set(client.answers) == {1, 2, 3}
    assert not any(isinstance(answer, Fail) and "KeyError" in answer.text for answer in client.answers.values())
    assert not world.core.state.requests


@pytest.mark.parametrize("columns", [False, True])
def test_requests_answered_before_the_error_are_not_run_again(columns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Faulty()
    world.checks = False  # the batch has counted the request whose end failed
    client, worker = world.connect("a"), world.worker("m_0")
    world.turn([client.infer(9)])  # the fake worker sends no columns for every third Execute
    world.finish()
    worker.in_columns = columns
    for number in (1, 2):
        client.sends(number)
    form = TensorForm("x", "FP32", (1,))
    world.turn([(client.peer, InferBatch("m", 0, Columns((form,), (1, 2), (1, 1), ((bytes(4),), (bytes(4),)))))])
    assert worker.running is not None
    assert len(worker.running.work_items) == 2
    world.turn([(client.peer, Cancel(2))])
    fail_once(monkeypatch, exit, "released")
    worker.finish(world.now)
    assert (worker.outbox[-1].columns is not None) == columns
    world.settle()
    assert len(world.logs()) == 1
    assert isinstance(client.answers[1], Reply)
    world.advance(world.now + 10**10)
    world.checks = True
    world.finish_all()
    assert not world.core.state.requests
    world.gone(client)
    assert len(world.logs()) == 1


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    good = getattr(owner, name)

    def bad(*arguments: Any) -> None:
        monkeypatch.setattr(owner, name, good)
        raise ArithmeticError(name)

    monkeypatch.setattr(owner, name, bad)


def test_too_many_errors_end_the_server() -> None:
    world = Faulty()
    clients = [world.connect(str(number)) for number in range(ERRORS_PER_TURN + 1)]
    with pytest.raises(ZeroDivisionError):
        world.turn([client.infer(13) for client in clients])


def test_internal_errors_propagate_unless_the_core_survives_them() -> None:
    world = Faulty(survive=False)
    with pytest.raises(ZeroDivisionError):
        world.turn([world.connect("a").infer(13)])


def test_an_error_in_the_dispatch_of_one_model_does_not_affect_others() -> None:
    world = Faulty()
    world.deploy(plain("faulty"))
    client = world.connect("a")
    world.turn([client.infer(1, "faulty"), client.infer(2)])
    world.finish()
    assert isinstance(client.answers[2], Reply)
    assert any("IndexError: no batch" in log for log in world.logs())
