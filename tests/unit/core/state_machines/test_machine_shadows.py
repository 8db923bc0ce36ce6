"""The state machine of test_machine_operations.py with shadows: one of two versions also gets the requests of the
other, and clients keep their inputs for it.

Additional invariants: everything kept for a shadow is released, and clients get nothing that they would not get without
it (the fakes assert the rest).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from msgspec.structs import replace

from shmserve.core import events
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.machine import run_machine
from tests.unit.core.state_machines.test_machine import MODELS
from tests.unit.core.state_machines.test_machine_operations import OperatedMachine

NAMES = ["plain", "pair", "timed", "single", "flat", "padded"]
TWICE = [(replace(policy, version=number), count, large) for policy, count, large in MODELS for number in (1, 2)]


class ShadowMachine(OperatedMachine):
    @initialize(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True))
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
        name, audience = f"c{len(self.all_clients)}", "uid:2000" if other else "uid:1000"
        client = self.world.connect(name, plane, outputs, audience, keeps=kind < 4)
        self.clients.append(client)
        self.all_clients.append(client)

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
