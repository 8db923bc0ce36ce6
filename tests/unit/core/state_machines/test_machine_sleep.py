"""The state machines of test_machine_all.py, test_machine_leases.py and test_machine_calls.py with models that go to
sleep after a few milliseconds without requests, or because others need their memory, and are woken by clients, steps,
calls and operators.

Additional invariants: no request is lost in a sleeping version, at the end all versions sleep, and the processes never
exceed the memory budget.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule
from msgspec.structs import replace

from shmserve.core import events
from shmserve.core.effects import Kill
from shmserve.core.limits import Limits
from shmserve.core.policy import MemoryEstimate, ModelPolicy
from shmserve.core.state import State
from shmserve.core.states import InstanceState, VersionState
from tests.support.core.everything import Everything
from tests.support.core.machine import MS, WorldMachine, run_machine
from tests.support.core.world import World
from tests.unit.core.state_machines.test_machine import LIMITS
from tests.unit.core.state_machines.test_machine_all import EverythingMachine
from tests.unit.core.state_machines.test_machine_calls import CallingMachine, EverythingCalls
from tests.unit.core.state_machines.test_machine_leases import LeaseMachine, LentWorld
from tests.unit.core.state_machines.test_machine_operations import Operated, OperatedMachine

IDLE = 4 * MS
BUDGET = 90
"""The budget fits three instances of the largest model."""


def _is_slow_exit(effect: Any) -> bool:
    """Workers that do not read are killed."""
    return isinstance(effect, Kill) and effect.reason.startswith("it was idle and did not exit within")


class Sleepy(World):
    def tell(self, effect: Any) -> None:
        if not _is_slow_exit(effect):
            super().tell(effect)


class SleepyWorld(Sleepy, Everything):
    pass


def check_all_sleep(state: State) -> None:
    for model in state.models.values():
        for version in model.versions.values():
            if version.state is VersionState.READY and version.service.graph is None:
                assert version.asleep, version.label
    remaining = [instance for _, instance in state.instances.values() if instance.state is not InstanceState.STOPPING]
    assert not remaining, f"{remaining[0].state} {remaining[0].details()}"
    assert not state.changes.to_sleep


def finish(machine: WorldMachine) -> None:
    """Finishes all running and waiting requests; then all versions sleep."""
    machine.send([])
    machine.finish_everything()
    check_all_sleep(machine.world.core.state)


def tight(limits: Limits) -> Limits:
    """Limits with memory for only a few models. Idle models sleep in any case, after a while."""
    return replace(limits, memory_budget=BUDGET, memory_wait_ns=3 * MS, idle_unload_ns=30 * MS)


class SleepMachine(EverythingMachine):
    def new_world(self, limits: Limits, limited: bool) -> Everything:
        return SleepyWorld(replace(limits, idle_unload_ns=IDLE), limited)

    @rule()
    def rest(self) -> None:
        """Time passes, long enough for idle versions to fall asleep."""
        self.send([])
        for worker in self.workers(lambda worker: worker.inbox):
            worker.read()
            self.world.let_start(worker)
        self.world.advance(self.world.now + IDLE)

    @rule(count=st.integers(1, 3))
    def wake_and_rest(self, count: int) -> None:
        for _ in range(count):
            for worker in self.workers(lambda worker: worker.outbox):
                self.send(self.world.heard(worker))
            self.rest()

    def teardown(self) -> None:
        finish(self)
        super().teardown()


class Tight(Sleepy):
    """Models have different sizes, and not all fit."""

    def size_of(self, name: str) -> int:
        return size_of(name)

    def target(self, policy: ModelPolicy, source: int, instances: int) -> events.Target:
        target = super().target(policy, source, instances)
        memory = MemoryEstimate(self.size_of(policy.name), 0, True)
        return replace(target, memory=memory) if policy.steps is None else target

    def _handle(self, happened: list[tuple[int, Any]]) -> None:
        super()._handle(happened)
        names = [worker.policy.name for worker in self.workers.values()]
        assert sum(map(self.size_of, names)) <= self.core.state.limits.memory_budget, f"above the budget: {names}"


class TightWorld(Tight, Everything):
    pass


def size_of(name: str) -> int:
    return 10 + 5 * (len(name) % 5)


class TightMachine(SleepMachine):
    def new_world(self, limits: Limits, limited: bool) -> Everything:
        return TightWorld(tight(limits), limited)

    @rule(which=st.integers(0, 30))
    def measure(self, which: int) -> None:
        workers = self.workers(bool)
        if workers:
            worker = workers[which % len(workers)]
            size = size_of(worker.policy.name)
            self.send([(0, events.Measured(worker.peer, size, size))])


class TightCalls(TightWorld, EverythingCalls):
    """Models that call each other, and may wait for each other's memory."""


class TightCallingMachine(CallingMachine):
    def new_world(self, limits: Limits, limited: bool) -> Everything:
        return TightCalls(tight(limits), limited)

    def teardown(self) -> None:
        finish(self)
        super().teardown()


class TightOperated(Tight, Operated):
    """Memory for two instances. Requests wait for it as long as the longest step: measurements of what is scaled take
    seconds, in which the timer for each wait of 3 ms would fire hundreds of times."""

    def __init__(self) -> None:
        super().__init__(replace(tight(LIMITS), memory_budget=50, memory_wait_ns=20 * MS))

    def size_of(self, name: str) -> int:
        return 20


class TightOperatedMachine(OperatedMachine):
    """Operators deploy more than fits, and scaling adds instances. Each operation ends."""

    def __init__(self) -> None:
        super().__init__()
        self.world: TightOperated = TightOperated()

    def memory_of(self, name: str) -> MemoryEstimate:
        return MemoryEstimate(self.world.size_of(name), 0, True)


class SleepyLentWorld(Sleepy, LentWorld):
    def __init__(self) -> None:
        super().__init__(idle_unload_ns=IDLE)


class SleepyLeaseMachine(LeaseMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = SleepyLentWorld()


MACHINES = {
    SleepMachine: 40,
    TightMachine: 60,
    TightOperatedMachine: 25,
    TightCallingMachine: 30,
    SleepyLeaseMachine: 40,
}


@pytest.mark.hypothesis
@pytest.mark.parametrize("machine", MACHINES)
def test_sleeping_models_wake_and_models_share_memory(machine: type[OperatedMachine]) -> None:
    run_machine(machine, MACHINES[machine])
