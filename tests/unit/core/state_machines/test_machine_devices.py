"""The state machine of test_machine_operations.py with instances on two GPUs, which fail and recover at any time.

Additional invariants: no process is kept on an unhealthy GPU, no request waits for one, and in the end no instance is
held.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from shmserve.core import events
from shmserve.core.effects import Kill
from shmserve.core.policy import InstanceSpec
from shmserve.core.states import VersionState
from tests.support.core.machine import run_machine
from tests.unit.core.state_machines.test_machine_operations import AHEAD, NAMES, Operated, OperatedMachine

BROKEN = "GPU {} is broken"
DEVICES = (0, 1)


class OnDevices(Operated):
    def tell(self, effect: Any) -> None:
        if not (isinstance(effect, Kill) and effect.reason.startswith("GPU ")):
            super().tell(effect)


class DeviceMachine(OperatedMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world: OnDevices = OnDevices()
        self.world.gpus = dict.fromkeys(NAMES, DEVICES)

    @initialize(names=st.lists(st.sampled_from(NAMES), max_size=1), ahead=st.sampled_from(AHEAD))
    def begin(self, names: list[str], ahead: str) -> None:
        self.set_out(names, ahead)

    def spec(self, name: str, index: int) -> InstanceSpec:
        return InstanceSpec(f"{name}_{index}", "KIND_GPU", DEVICES[index % len(DEVICES)])

    @rule(device=st.sampled_from(DEVICES), broken=st.booleans(), together=st.booleans())
    def health(self, device: int, broken: bool, together: bool) -> None:
        self.send([(0, events.DeviceHealth(device, BROKEN.format(device) if broken else ""))], together)

    def teardown(self) -> None:
        self.send([(0, events.DeviceHealth(device)) for device in DEVICES])
        super().teardown()
        for model in self.world.core.state.models.values():
            for version in model.versions.values():
                assert not any(instance.held for instance in version.instances), version.label
                if version.state is VersionState.UNAVAILABLE:
                    assert "GPU" not in version.reason or version.gone, version.reason


@pytest.mark.hypothesis
def test_no_request_is_lost_when_gpus_fail_and_recover() -> None:
    run_machine(DeviceMachine, 120)
