"""Requests without a version are divided according to operators' shares, and aliases are names of versions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shmserve.broker.models.traffic import TrafficControl
from shmserve.core import events
from shmserve.core.traffic import Split, Traffic
from shmserve.protocol.messages import Fail
from tests.support.core.lent import Lent, model
from tests.support.hypothesis_profiles import examples


class Divided(Lent):
    """The model `m` with versions 1, 2 and 3."""

    def __init__(self, **traffic: Any) -> None:
        super().__init__(model())
        for number in (2, 3):
            self.deploy(model(version=number))
        self.set(**traffic)

    def set(self, **traffic: Any) -> None:
        """These shares and aliases, and no others."""
        before = self.core.state.models["m"].traffic.aliases
        aliases = dict.fromkeys(before) | traffic.get("aliases", {})
        self.turn([(0, events.SetTraffic("m", traffic.get("shares", {}), aliases))])

    def version_of(self, name: str = "m", version: int = 0) -> int | str:
        """The version that answers a request, or its error."""
        message = self.ask(self.client, model=name, version=version)
        self.finish_running()
        answer = self.client.answers[message.request]
        return answer.text if isinstance(answer, Fail) else int(answer.version)


@given(st.dictionaries(st.integers(1, 6), st.integers(0, 25), max_size=4), st.sets(st.integers(1, 6)))
@settings(max_examples=examples(200))
def test_weights_follow_the_shares_of_ready_versions(shares: dict[int, int], ready: set[int]) -> None:
    found = dict(Traffic(shares).weights(ready))
    assert found.keys() <= ready
    assert all(weight > 0 for weight in found.values())
    rest = max(ready - shares.keys(), default=0)
    for number, weight in found.items():
        assert weight == (100 - sum(shares.values()) if number == rest else shares[number])
    if rest and sum(shares.values()) < 100:
        assert rest in found


@pytest.mark.parametrize("every", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("percent", [1, 10, 50, 90])
def test_shares_do_not_depend_on_the_arrival_times(percent: int, every: int) -> None:
    """Requests in every second turn, for example, get the same shares."""
    split = Split([(2, 100 - percent), (3, percent)])
    chosen = [split.choose() for _ in range(2000 * every)][::every]
    assert abs(chosen.count(3) / 20 - percent) < 0.5


def test_traffic_of_a_configuration() -> None:
    """It is set by the first load at once, by others when they succeed, and never after an operator has set one."""
    world = Divided()
    given = Traffic({2: 100}, {"prod": 1})
    model_of = world.core.state.models["m"]
    model_of.traffic_set = False

    def load(traffic: Traffic | None, *numbers: int) -> None:
        targets = tuple(world.targets["m"][number] for number in numbers or (1, 2, 3))
        world.turn([(0, events.Deploy("m", targets, traffic=traffic))])

    load(given)
    assert (world.version_of(), world.version_of("m@prod")) == (2, 1)
    load(None)
    assert model_of.traffic == given
    load(Traffic())
    assert (world.version_of(), model_of.traffic) == (3, Traffic())
    world.set(shares={1: 100})
    load(given)
    assert (world.version_of(), model_of.traffic) == (1, Traffic({1: 100}))
    world.turn([(0, events.Unload("m", 1))])
    load(given)
    assert (world.version_of(), model_of.traffic) == (2, given)


def test_a_load_that_fails_leaves_the_traffic() -> None:
    world = Divided()
    world.core.state.models["m"].traffic_set = False
    world.loads_itself["m"] = False
    targets = tuple(replace(world.targets["m"][number], source=90 + number) for number in (1, 2, 3))
    world.turn([(0, events.Deploy("m", targets, traffic=Traffic({1: 100})))])
    assert world.version_of() == 3, "not before the new generation serves"
    starting = [worker for worker in world.workers.values() if worker.name.endswith("~")]
    world.crash(starting[0], loading_error="no such file")
    assert (world.version_of(), world.core.state.models["m"].traffic) == (3, Traffic())


def test_changes_of_one_turn_are_all_applied() -> None:
    world = Divided()
    changes: list[events.SetTraffic] = []
    control = TrafficControl(world.core.state, changes.append)
    control.change("m", b'{"aliases": {"prod": 1}}')
    control.change("m", b'{"aliases": {"next": 3}}')
    control.change("m", b'{"shares": {"2": 100}}')
    world.turn([(0, change) for change in changes])
    assert world.core.state.models["m"].traffic == Traffic({2: 100}, {"prod": 1, "next": 3})
    assert control.document("m")["now"] == {"2": 100.0}
