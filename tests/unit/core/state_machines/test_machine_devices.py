"""State machines of operations, memory budgets and leases with instances on two GPUs, which fail and recover at any
time.

Additional invariants: no process is kept on an unhealthy GPU, no request waits for one, and in the end no instance is
held.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from msgspec.structs import replace

from shmserve.core import events
from shmserve.core.effects import Kill
from shmserve.core.policy import InstanceSpec, MemoryEstimate, ModelPolicy, ScalingPolicy
from shmserve.core.states import VersionState
from tests.support.core.machine import WorldMachine, run_machine
from tests.support.core.world import World
from tests.unit.core.state_machines.test_machine_leases import LeaseMachine
from tests.unit.core.state_machines.test_machine_operations import AHEAD, NAMES, Operated, OperatedMachine
from tests.unit.core.state_machines.test_machine_sleep import SleepyLentWorld, TightOperated

DEVICES = (0, 1)


def spec_of(name: str, index: int) -> InstanceSpec:
    return InstanceSpec(f"{name}_{index}", "KIND_GPU", DEVICES[index % len(DEVICES)])


class OnDevices(World):
    def target(self, policy: ModelPolicy, source: int, instances: int) -> events.Target:
        target = super().target(policy, source, instances)
        return replace(target, instances=tuple(spec_of(policy.name, index) for index in range(len(target.instances))))

    def tell(self, effect: Any) -> None:
        if not (isinstance(effect, Kill) and effect.reason.startswith("GPU ")):
            super().tell(effect)


class OperatedOnDevices(OnDevices, Operated):
    pass


class TightOnDevices(OnDevices, TightOperated):
    pass


class LentOnDevices(OnDevices, SleepyLentWorld):
    pass


class DeviceRules(WorldMachine):
    @rule(device=st.sampled_from(DEVICES), broken=st.booleans(), together=st.booleans())
    def health(self, device: int, broken: bool, together: bool) -> None:
        self.send([(0, events.DeviceHealth(device, f"GPU {device} is broken" if broken else ""))], together)

    def teardown(self) -> None:
        self.send([(0, events.DeviceHealth(device)) for device in DEVICES])
        super().teardown()
        for model in self.world.core.state.models.values():
            for version in model.versions.values():
                assert not any(instance.held and not instance.over for instance in version.instances), version.label
                if version.state is VersionState.UNAVAILABLE:
                    assert "GPU" not in version.reason or version.gone, version.reason


class DeviceMachine(DeviceRules, OperatedMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world: Operated = OperatedOnDevices()

    @initialize(names=st.lists(st.sampled_from(NAMES), max_size=1), ahead=st.sampled_from(AHEAD))
    def begin(self, names: list[str], ahead: str) -> None:
        self.set_out(names, ahead)

    def instances(self, name: str, count: int, scaled: bool) -> tuple[tuple[InstanceSpec, ...], ScalingPolicy | None]:
        """Scaled instances are on the first GPU: a scaled group has one device."""
        _, scaling = super().instances(name, count, scaled)
        if scaling is None:
            return tuple(spec_of(name, index) for index in range(count)), None
        group = scaling.groups[0]
        specs = tuple(replace(spec, kind="KIND_GPU", device=DEVICES[0]) for spec in group.specs)
        return specs[:count], replace(scaling, groups=(replace(group, specs=specs),))


class TightDeviceMachine(DeviceMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = TightOnDevices()

    def memory_of(self, name: str) -> MemoryEstimate:
        return MemoryEstimate(20, 0, True)


class LentDeviceMachine(DeviceRules, LeaseMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = LentOnDevices()


MACHINES = {DeviceMachine: 120, TightDeviceMachine: 30, LentDeviceMachine: 40}


@pytest.mark.hypothesis
@pytest.mark.parametrize("machine", MACHINES)
def test_no_request_is_lost_when_gpus_fail_and_recover(machine: type[OperatedMachine]) -> None:
    run_machine(machine, MACHINES[machine])
