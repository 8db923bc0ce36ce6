"""The state machine of test_machine.py, with operators: versions are also deployed, reloaded, resized, unloaded and
restarted, and workers fail to load.

Additional invariants: each operation ends once, and a request fails only because of an operation on its model.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from msgspec.structs import replace

from shmserve.core import events
from shmserve.core.effects import Kill, Settled
from shmserve.core.limits import Limits
from shmserve.core.models import scaling, sizes
from shmserve.core.policy import InstanceSpec, MemoryEstimate, ScalingPolicy
from shmserve.core.service.scaler import WINDOW_NS
from shmserve.core.states import VersionState
from shmserve.protocol.worker_messages import LoadFailed
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.machine import run_machine
from tests.support.core.policies import scaling_of
from tests.unit.core.state_machines.test_machine import LIMITS, MODELS, CoreMachine, Slow

NAMES = ["plain", "pair", "timed", "ranked", "strict", "single", "flat"]
"""Not `ordered`: requests of an old generation may be answered after those of the new one."""
AHEAD = ["plain", "pair", "timed"]
EXPECTED = (
    "it is no longer needed",
    "it was restarted and",
    "it started requests that it had to return for a restart",  # after a second without hearing of it
)
"""Reasons to kill workers that keep to the protocol."""


class Operated(Slow):
    def __init__(self, limits: Limits = LIMITS) -> None:
        super().__init__(limits)
        self.settled: dict[int, str] = {}

    def tell(self, effect: Any) -> None:
        if isinstance(effect, Kill) and effect.reason.startswith(EXPECTED):
            return
        if isinstance(effect, Settled):
            assert effect.operation not in self.settled, f"operation {effect.operation} is over twice"
            self.settled[effect.operation] = effect.code
        super().tell(effect)


class OperatedMachine(CoreMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world: Operated = Operated()
        self.operations = 0

    @initialize(names=st.lists(st.sampled_from(NAMES), max_size=1), ahead=st.sampled_from(AHEAD))
    def begin(self, names: list[str], ahead: str) -> None:
        self.set_out(names, ahead)

    def operate(self, event: Any, together: bool) -> None:
        self.operations += 1
        event.operation = self.operations
        self.send([(0, event)], together)

    @rule(
        which=st.integers(0, 9), source=st.integers(0, 3), count=st.integers(1, 3), fresh=st.booleans(),
        numbers=st.sampled_from([(1,), (1,), (1, 2), (2,)]), known=st.booleans(), together=st.booleans(),
        scaled=st.booleans(),
    )  # fmt: skip
    def deploy(
        self, which: int, source: int, count: int, fresh: bool, numbers: tuple[int, ...], known: bool, together: bool,
        scaled: bool = False,
    ) -> None:  # fmt: skip
        """`known`: all versions that were not deleted. `scaled`: the number of instances follows the load."""
        name = self.names[which % len(self.names)]
        specs, scaling = self.instances(name, count, scaled)
        first = self.world.policies[name, 1]
        self.world.policies[name, 2] = replace(first, version=2)
        memory = self.memory_of(name)
        targets = tuple(
            events.Target(number, source + 10 * (number - 1), specs, memory=memory, scaling=scaling)
            for number in numbers
        )
        self.operate(events.Deploy(name, targets, 0, fresh and source == 0, numbers if known else None), together)

    def instances(self, name: str, count: int, scaled: bool) -> tuple[tuple[InstanceSpec, ...], ScalingPolicy | None]:
        scaling = scaling_of(name, f"1-{count + 1}", up="1ms", down="20ms") if scaled else None
        return tuple(InstanceSpec(f"{name}_{index}") for index in range(count)), scaling

    def memory_of(self, name: str) -> MemoryEstimate:
        """The memory of each instance of the model."""
        return MemoryEstimate()

    @rule(which=st.integers(0, 9), really=st.integers(0, 2), together=st.booleans())
    def unload(self, which: int, really: int, together: bool) -> None:
        if not really:
            self.operate(events.Unload(self.names[which % len(self.names)]), together)

    @rule(which=st.integers(0, 9), one=st.booleans(), together=st.booleans())
    def restart(self, which: int, one: bool, together: bool) -> None:
        name = self.names[which % len(self.names)]
        self.operate(events.Restart(name, 0, f"{name}_0" if one else ""), together)

    @rule(which=st.integers(0, 9), number=st.integers(0, 3), grow=st.booleans())
    def resize(self, which: int, number: int, grow: bool) -> None:
        """The core adds an instance or removes one, but not the last that serves."""
        version = self.world.core.state.ready.get(self.names[which % len(self.names)])
        if version is None or version.service.graph is not None:
            return
        self.send([])
        if version.state is not VersionState.READY:
            return
        here = [instance for instance in version.instances if not instance.over]
        chosen = here[number % len(here)]
        others = [instance for instance in here if instance is not chosen and instance.usable]
        if self.world.core.state.models[version.model].operation is not None:
            return  # scaling waits until it is over: it may remove the others
        if grow and len(here) < 4:
            name = sizes.free_name({instance.spec.name for instance in version.instances}, version.model)
            spec = replace(chosen.spec, name=name)
            self.world.change(lambda state: scaling.join(state, version, spec))
        elif not grow and others:
            self.world.change(lambda state: scaling.leave(state, version, chosen))

    @precondition(lambda self: self.clients)
    @rule(which=st.integers(0, 9), count=st.integers(0, 8), windows=st.integers(1, 8))
    def long_time(self, which: int, count: int, windows: int) -> None:
        """Long enough for some measurements of scaled versions, while requests wait."""
        self.load(which, which, [count] if count else [])
        self.send([])
        self.world.advance(self.world.now + windows * WINDOW_NS)

    @precondition(lambda self: self.workers(_loads))
    @rule(which=st.integers(0, 9), says=st.booleans())
    def cannot_load(self, which: int, says: bool) -> None:
        loading = self.workers(_loads)
        worker = loading[which % len(loading)]
        worker.outbox[:] = [LoadFailed("MODEL_FAILED", "no")] if says else []
        self.send([])
        self.world.crash(worker, "exit code 3")

    @precondition(lambda self: self.workers(_may_leave))
    @rule(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        leaving = self.workers(_may_leave)
        self.send([])
        self.world.crash(leaving[which % len(leaving)], "exit code 0")

    def teardown(self) -> None:
        self.send([])
        self.finish_everything()
        state = self.world.core.state
        self.check_sizes()
        assert set(self.world.settled) == set(range(1, self.operations + 1)), "an operation that is never over"
        assert not state.loading.queue
        assert not state.loading.running
        assert not state.changes.joined
        assert not state.changes.unloading_versions
        for model in state.models.values():
            assert model.operation is None
            assert not model.coming
            assert not model.leaving
            assert not model.unloading
            for version in model.versions.values():
                assert version.state in (VersionState.READY, VersionState.UNAVAILABLE)
        super().teardown()

    @invariant()
    def check_sizes(self) -> None:
        """No version is scaled beyond its bounds."""
        for model in self.world.core.state.models.values():
            for version in model.versions.values():
                if version.scaler is not None and version.state is VersionState.READY and model.operation is None:
                    (group,) = version.scaler.policy.groups
                    assert len(sizes.specs_of(version)) >= 1, version.label
                    assert len(sizes.specs_of(version)) <= max(group.maximum, 4), version.label


def _loads(worker: FakeWorker) -> bool:
    return any(isinstance(message, events.Compiled) for message in worker.outbox)


def _may_leave(worker: FakeWorker) -> bool:
    return worker.stopping and worker.running is None and not worker.inbox


@pytest.mark.hypothesis
def test_the_ledger_balances_with_random_operations() -> None:
    run_machine(OperatedMachine, 120)


def test_requeued_requests_are_answered_when_their_model_fails_to_reload() -> None:
    """One of two instances cannot be reloaded; the other one ends with a request that it had not begun."""
    machine = OperatedMachine()
    machine.begin(names=[], ahead="pair")
    machine.connect(kind=0, other=False)
    machine.connect(kind=0, other=False)
    machine.crash(which=63)
    machine.segment(together=False, which=0)
    machine.crash(which=0)
    machine.gone(really=0, which=0)
    machine.gone(really=0, which=0)
    machine.time(late=False, us=1)
    for _ in range(2):
        machine.infer(
            count=1, optional=False, options=None, rows=0, shape=1, timeout_ms=0, together=False, wanted=None,
            where="inline", which=0, which_model=0,
        )  # fmt: skip
    machine.cannot_load(says=True, which=0)
    machine.crash(which=0)
    machine.teardown()


COMPARED = ["plain", "pair", "timed", "single", "flat", "padded"]
TWICE = [(replace(policy, version=number), count, large) for policy, count, large in MODELS for number in (1, 2)]


class ShadowMachine(OperatedMachine):
    """With shadows: one of two versions also gets the requests of the other, and clients keep their inputs for it.

    Additional invariants: everything kept for a shadow is released, and clients get nothing that they would not get
    without it (the fakes assert the rest).
    """

    @initialize(names=st.lists(st.sampled_from(COMPARED), min_size=1, max_size=2, unique=True))
    def begin(self, names: list[str]) -> None:
        self.begin_with(set(names), TWICE)
        for number, name in enumerate(self.names):
            self._set(name, 1 + number % 2, 100)

    def _set(self, name: str, answers: int, percent: int) -> None:
        shadow = {3 - answers: percent} if percent else {}
        self.send([(0, events.SetTraffic(name, {answers: 100}, shadow=shadow))])

    @precondition(lambda self: len(self.clients) < 5)
    @rule(kind=st.integers(0, 5), other=st.booleans())
    def connect(self, kind: int, other: bool) -> None:
        kinds = (("lane", "memfd"), ("lane", "memfd"), ("zmq", "posix"), ("zmq", "frames"))
        plane, outputs = kinds[max(0, kind - 2)]
        self.enter(plane, outputs, other, keeps=kind < 4)

    @rule(which=st.integers(0, 9), answers=st.integers(1, 2), percent=st.sampled_from([0, 40, 100, 100]))
    def shadow(self, which: int, answers: int, percent: int) -> None:
        self._set(self.names[which % len(self.names)], answers, percent)

    @precondition(lambda self: self.workers(_compares))
    @rule(which=st.integers(0, 9), output=st.sampled_from(["y", "w"]))
    def differ(self, which: int, output: str) -> None:
        comparing = self.workers(_compares)
        comparing[which % len(comparing)].differs ^= {output}

    def teardown(self) -> None:
        super().teardown()
        state = self.world.core.state
        assert not state.shadowed
        assert not state.shadow_client.requests
        assert state.compared_bytes == state.shadow_client.bytes == 0
        assert not [client.name for client in self.clients if client.held_inputs]


def _compares(worker: FakeWorker) -> Any:
    return worker.expected


@pytest.mark.hypothesis
def test_shadows_release_all_memory_they_keep() -> None:
    run_machine(ShadowMachine, 120)
