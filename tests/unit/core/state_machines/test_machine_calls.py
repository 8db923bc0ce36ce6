"""The state machine with everything at once, in which models also call each other: at random, so that deadlocks form.

In addition to the checks of test_machine_all.py: a worker whose model waits does not continue before its call is
answered, yet all work ends; no call is refused while an instance of the called model is not itself waiting for a call;
and each model gets and passes on the response to its own request.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from msgspec.structs import replace

from shmserve.core.calls import deadlock
from shmserve.core.effects import Spawn
from shmserve.core.limits import Limits
from shmserve.core.records import Request
from shmserve.core.state import State
from shmserve.protocol.messages import Cancel, Handle, Options, Return, Tensor
from shmserve.protocol.worker_messages import Call, Row, Work
from tests.support.core.calling import caller_of
from tests.support.core.everything import SEQUENCES, STREAMS, Everything
from tests.support.core.fakes.tensors import references
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.machine import not_a_rule, run_machine
from tests.unit.core.state_machines.test_machine_all import ALL_LIMITS, EverythingMachine

CALL = st.tuples(
    st.integers(0, 30),
    st.integers(0, 9),
    st.sampled_from(["inline", "parent", "own", "held"]),
    st.sampled_from([True, True, False]),
    st.sampled_from([0, 0, 0, 2]),
)


closes_cycle = deadlock.closes_cycle


def checked_closes_cycle(state: State, request: Request) -> str:
    """Also asserts that all usable instances are waiting if a call to an ordinary model is refused."""
    found = closes_cycle(state, request)
    version = request.version
    if (
        found
        and version.service.graph is None
        and version.service.sequence_slots is None
        and version.service.order is None
    ):
        assert all(instance.waits for instance in version.instances if instance.usable), found
    return found


class EverythingCalls(Everything):
    def __init__(self, limits: Limits, limited: bool) -> None:
        super().__init__(limits, limited)
        self.passed_on = 0

    def _spawn(self, effect: Spawn) -> None:
        super()._spawn(effect)
        self.workers[effect.peer].compute = self._compute_or_pass_on

    def _compute_or_pass_on(self, worker: FakeWorker, work: Work) -> Row:
        row = self._compute(worker, work)
        worker.compute = self._compute_or_pass_on
        if worker.caller is not None:
            for tensor in row.outputs:
                self._pass_on(worker, work, tensor)
        return row

    def _pass_on(self, worker: FakeWorker, work: Work, tensor: Tensor) -> None:
        """Returns, instead of a new output, a held tensor with the same content."""
        assert worker.caller is not None
        if not isinstance(tensor.data, tuple) or tensor.data[0].segment >> 32 != worker.peer:
            return
        (made,) = tensor.data
        segments = self.core.state.ledger.segments
        for held in worker.caller.holds:
            fits = segments[held.segment].audience == work.audience and held.size >= made.size > 0
            if fits and self.value(tensor) == self._in_block(held.segment, held.offset, held.size):
                tensor.data = (Handle(held.segment, held.offset + held.size - made.size, made.size),)
                del worker.out[made]
                self.passed_on += 1
                return


class CallingMachine(EverythingMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world: EverythingCalls = EverythingCalls(ALL_LIMITS, False)

    def new_world(self, limits: Limits, limited: bool) -> Everything:
        return EverythingCalls(limits, limited)

    @rule(calls=st.lists(CALL, min_size=1, max_size=4), deliver=st.booleans(), together=st.booleans())
    def call(self, calls: list[tuple[int, int, str, bool, int]], deliver: bool, together: bool) -> None:
        for which, which_model, where, held, timeout_ms in calls:
            running = self.workers(lambda worker: worker.running or worker.streams)
            if not running:
                self.send([self._simple(self.clients[0], self.names[which_model % len(self.names)], 1)], False)
                self._deliver(False)
                continue
            worker, name = running[which % len(running)], self.names[which_model % len(self.names)]
            self._call(worker, name, where, held and worker.running is not None, timeout_ms)
            if deliver:
                self._deliver(together)

    def _deliver(self, together: bool) -> None:
        """All workers read their messages, and their reports are read."""
        for worker in self.workers(bool):
            worker.read()
            self.world.let_start(worker)
            self.send(self.world.heard(worker), together)

    @rule(which=st.integers(0, 9))
    def proceed(self, which: int) -> None:
        """Most requests in flight are finished."""
        for _ in range(3):
            for worker in self.workers(lambda worker: worker.running):
                if (worker.peer + which) % 4:
                    worker.finish(self.world.now)
            self._deliver(False)

    def _call(self, worker: FakeWorker, name: str, where: str, held: bool, timeout_ms: int) -> None:
        caller = caller_of(worker)
        work_items = worker.running.work_items if worker.running is not None else list(worker.streams.values())
        parent = work_items[0]
        options = Options(window=2) if name in STREAMS else None
        if name in SEQUENCES:
            options = replace(options or Options(), sequence=9, sequence_start=True, sequence_end=True)
        _, asked = self.make_ask(caller, name, 1, "inline", self.numbers % 2, options)
        for tensor in asked.inputs:
            tensor.data = self._data_of(worker, parent, where, tensor.data)
        self.world.expected.pop((worker.peer, asked.request), None)
        self.world.expect(worker.peer, asked)
        if held:
            worker.waits_for.add(asked.request)
        worker.outbox.append(
            Call(asked.request, parent.request, name, 0, asked.inputs, None, timeout_ms * 1000, asked.options, held)
        )

    def _data_of(self, worker: FakeWorker, parent: Work, where: str, data: Any) -> Any:
        size = len(data)
        if where == "own":
            handle = worker.allocate("internal", size)
            del worker.out[handle]
            self.world.put(handle.segment, handle.offset, size, data[0])
            return (handle,)
        known = references(parent.inputs) if where == "parent" else list(caller_of(worker).holds)
        for handle in known if where != "inline" else []:
            if handle.size >= size:
                return (Handle(handle.segment, handle.offset + handle.size - size, size),)
        return data

    @precondition(lambda self: self._callers())
    @rule(which=st.integers(0, 30), cancel=st.booleans(), count=st.integers(1, 3))
    def act(self, which: int, cancel: bool, count: int) -> None:
        """Cancels a call, or returns the answers to calls."""
        callers = self._callers()
        worker = callers[which % len(callers)]
        caller = caller_of(worker)
        if cancel and caller.open:
            worker.outbox.append(Cancel(max(caller.open)))
        self._give_back(worker, count)

    def _give_back(self, worker: FakeWorker, count: int | None = None) -> None:
        caller = caller_of(worker)
        handles = tuple(caller.holds.elements())[:count]
        for handle in handles:
            caller.give_back(handle)
        if handles:
            worker.outbox.append(Return(handles))

    def give_room(self) -> None:
        super().give_room()
        for worker in self._callers():
            worker.outbox += [message for _, message in self._room_of(caller_of(worker))]

    def _callers(self) -> list[FakeWorker]:
        return self.workers(lambda worker: worker.caller is not None)

    cross = not_a_rule(EverythingMachine.cross)
    to_worker = not_a_rule(EverythingMachine.to_worker)

    def teardown(self) -> None:
        self.send([])
        self.finish_everything()
        for worker in self._callers():
            caller = caller_of(worker)
            assert not caller.open, f"never answered: {caller.open} of {worker.name}"
            assert not caller.held_inputs, f"never released: {caller.held_inputs} of {worker.name}"
            self._give_back(worker)
        assert not self.world.core.state.blocked_instances
        super().teardown()


@pytest.mark.hypothesis
def test_the_ledger_balances_with_models_that_call_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlock, "closes_cycle", checked_closes_cycle)
    run_machine(CallingMachine, 25)
