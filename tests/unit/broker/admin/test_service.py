"""When a server that is out of service counts as empty. Time is the fake loop's."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.broker.admin.service import TICK_S, ServiceControl
from shmserve.core.policy import ModelPolicy, SequencePolicy
from shmserve.core.state import Timer
from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import Infer, Options
from tests.support.core.fakes.tensors import one_input
from tests.support.core.lent import Lent, X, Y
from tests.support.manual_loop import ManualLoop

OUT, IN = b'{"out_of_service": true}', b'{"out_of_service": false}'


class _Loop(ManualLoop):
    """A loop that runs callbacks at once."""

    def call_soon(self, call: Any) -> None:
        call()


class Operated:
    """A core in which requests run, and the control of its service."""

    def __init__(self) -> None:
        self.world = Lent()
        self.world.deploy(ModelPolicy("s", 1, 8, X, Y, sequence=SequencePolicy(False, 8, 10**12)))
        self.loop = _Loop()
        self.changes: list[bool] = []
        state = self.world.core.state
        self.control = ServiceControl(
            self.loop,
            state,
            lambda event: self.world.turn([(0, event)]),
            lambda: self.changes.append(state.out_of_service),
            self.loop.time,
        )

    def quiet(self, ticks: int = 0) -> float:
        for _ in range(ticks):
            self.loop.fire()
        return float(self.control.document()["quiet_seconds"])

    def infer(self, model: str = "m", **more: Any) -> None:
        self.world.numbers += 1
        self.world.client.sends(self.world.numbers)
        self.world.turn([(self.world.client.peer, Infer(self.world.numbers, model, 0, (one_input(1),), **more))])


@pytest.fixture
def operated() -> Operated:
    return Operated()


def test_repeated_changes_are_applied_once(operated: Operated) -> None:
    for body in (OUT, OUT, IN, IN):
        document = operated.control.change(body)
        assert document["out_of_service"] == operated.world.core.state.out_of_service == (body == OUT)
    assert operated.changes == [True, False]
    assert not operated.loop.timers
    for body in (b"", b"{}", b'{"out_of_service": 1}', b'{"out_of_service": true, "wait": true}'):
        with pytest.raises(InvalidRequest, match="set_service"):
            operated.control.change(body)


def test_quiet_seconds_count_from_the_last_request(operated: Operated) -> None:
    assert operated.quiet() == 0, "in service"
    operated.control.change(OUT)
    assert operated.quiet(5) == pytest.approx(5 * TICK_S)
    operated.infer()
    document = operated.control.document()
    assert (document["requests"], document["quiet_seconds"]) == (1, 0)
    assert document["clients"] == [{"name": operated.world.client.name, "in_flight": 1}]
    assert operated.quiet(3) == 0
    operated.world.finish_running()
    assert operated.quiet() == 0
    assert operated.quiet(2) == pytest.approx(2 * TICK_S)
    operated.infer()
    operated.world.finish_running()
    assert operated.quiet() == 0, "a request came and went between two looks"
    assert operated.quiet(4) == pytest.approx(4 * TICK_S)
    assert operated.control.document()["seconds"] == pytest.approx(14 * TICK_S)
    # An open sequence is waited for.
    operated.infer("s", options=Options(sequence=7, sequence_start=True))
    operated.world.finish_running()
    document = operated.control.document()
    assert (document["requests"], document["sequences"]) == (0, 1)
    assert operated.quiet(10) == 0
    operated.infer("s", options=Options(sequence=7, sequence_end=True))
    operated.world.finish_running()
    assert operated.quiet() == 0
    # Timers of the core, such as those that measure a scaled version about once a second, do not count.
    state = operated.world.core.state
    for _ in range(5):
        state.set_timer(state.now + 10**9, Timer.SCALE, next(iter(state.ready.values())))
        operated.quiet(1)
    assert operated.quiet() == pytest.approx(5 * TICK_S)
