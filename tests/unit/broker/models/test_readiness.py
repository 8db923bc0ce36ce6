"""When the server as a whole is ready."""

from __future__ import annotations

from typing import Any, cast

import pytest
from msgspec.structs import replace

from shmserve.broker.admin.queries import Control, ControlSettings
from shmserve.core import events
from shmserve.core.policy import ModelPolicy
from tests.support.broker.metrics import policy
from tests.support.core.world import World


def version(number: int) -> ModelPolicy:
    return replace(policy(), version=number)


def states(world: World) -> list[str]:
    return [one.state.name for one in world.core.state.models["m"].versions.values()]


@pytest.mark.parametrize("strict", [True, False])
def test_readiness_waits_only_for_the_first_load_of_a_model(strict: bool) -> None:
    """Otherwise a load balancer would take the server out while a model changes or finishes its requests."""
    world = World()
    control = Control(
        world.core, cast("Any", None), ControlSettings("test", "1", strict), lambda _: 0, lambda _: 0, dict
    )
    world.deploy(version(1), load=False)
    assert not control.server_ready()
    world.worker("m_0").outbox.append(events.Compiled(version(1)))
    world.settle()
    assert control.server_ready()
    world.deploy(version(2), load=False)
    assert states(world) == ["READY", "LOADING"]
    assert control.server_ready()
    client = world.connect("c")
    world.turn([client.infer(1), (0, events.Unload("m"))])
    assert "UNLOADING" in states(world)
    assert control.server_ready()
    world.finish_running()
    assert control.server_ready()
