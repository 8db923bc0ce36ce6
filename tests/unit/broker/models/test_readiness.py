"""When the server as a whole is ready."""

from __future__ import annotations

from typing import Any, cast

import pytest
from msgspec.structs import replace

from shmserve.broker.admin.queries import Control
from shmserve.core import events
from shmserve.core.policy import ModelPolicy
from tests.support.broker.metrics import policy
from tests.support.core.world import World


def version(number: int) -> ModelPolicy:
    return replace(policy(), version=number)


def states(world: World) -> list[str]:
    return [one.state.name for one in world.core.state.models["m"].versions.values()]


def test_readiness_waits_for_the_first_load_of_a_model() -> None:
    world = World()
    control = Control(world.core, cast("Any", None), "test", "1", True)
    world.deploy(version(1), load=False)
    assert not control.server_ready()
    worker = world.worker("m_0")
    worker.outbox.append(events.Compiled(version(1)))
    world.settle()
    assert control.server_ready()


@pytest.mark.parametrize("strict", [True, False])
def test_readiness_does_not_wait_for_further_versions(strict: bool) -> None:
    world = World()
    control = Control(world.core, cast("Any", None), "test", "1", strict)
    world.deploy(version(1))
    world.deploy(version(2), load=False)
    assert states(world) == ["READY", "LOADING"]
    assert control.server_ready()


def test_readiness_ignores_versions_that_are_unloading() -> None:
    """Otherwise a load balancer would take the server out while the model finishes its requests."""
    world = World()
    control = Control(world.core, cast("Any", None), "test", "1", True)
    world.deploy(version(1))
    client = world.connect("c")
    world.turn([client.infer(1), (0, events.Unload("m"))])
    assert states(world) == ["UNLOADING"]
    assert control.server_ready()
    world.finish_running()
    assert control.server_ready()
