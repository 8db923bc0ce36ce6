"""Amounts of resources, which are never exceeded. tests/scenarios/rate_limit.txt has the order of instances."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.core.limits import Limits
from shmserve.core.owners.rate_limiter import ANY, SHARED, lacking
from shmserve.core.policy import InstanceSpec, Resource
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.policies import plain
from tests.support.core.world import World
from tests.support.hypothesis_profiles import examples


def spec(name: str, *resources: Resource, turn: int = 1, device: int = 0) -> InstanceSpec:
    return InstanceSpec(name, device=device, resources=resources, turn=turn)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((), ""),
        ((("r", ANY, 4),), ""),
        ((("r", ANY, 3),), "3"),
        ((("r", ANY, 3), ("r", 0, 4)), ""),
        ((("r", ANY, 4), ("r", 0, 3)), ""),
        ((("r", 1, 9),), "0"),
        ((("r", SHARED, 9),), "0"),
        ((("other", ANY, 9),), ""),
    ],
)
def test_insufficient_resources_are_reported(given: tuple[tuple[str, int, int], ...], text: str) -> None:
    if text:
        text = (
            f'Resource count for "r" is limited to {text} which will prevent scheduling of one or more model '
            "instances, the minimum required count is 4 (--rate-limit-resource, instance 'm_0')"
        )
    assert lacking([spec("m_0", Resource("r", 4))], given) == text


def test_a_resource_is_either_shared_or_of_each_device() -> None:
    own, shared = spec("own", Resource("r", 1)), spec("shared", Resource("r", 1, shared=True))
    text = (
        'Resource "r" is present as both global and device-specific resource in the model configuration. It is global '
        "for instance 'shared' and device-specific for instance 'own'"
    )
    assert lacking([own, shared], ()) == lacking([own], (), [shared]) == lacking([shared], (), [own]) == text
    assert not lacking([own], (), [own, spec("other", Resource("s", 1, shared=True))])


RESOURCES = st.lists(st.sampled_from([Resource("a", 1), Resource("a", 2), Resource("b", 1, shared=True)]), max_size=2)


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(RESOURCES, st.integers(1, 3), st.integers(0, 1)), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)
def test_every_request_runs_and_no_resource_is_exceeded(
    instances: list[tuple[list[Resource], int, int]], wanted: list[int], random: Any
) -> None:
    """check() asserts after every turn that no resource is exceeded."""
    world = World(Limits(rate_limit=True))
    names = [f"m{index}" for index in range(len(instances))]
    for name, (resources, turn, device) in zip(names, instances, strict=True):
        world.resources[name] = tuple({resource.name: resource for resource in resources}.values())
        world.turns[name], world.gpus[name] = turn, (device,)
        world.deploy(plain(name, 1))
    client = world.connect("a")

    def running() -> list[FakeWorker]:
        return [worker for worker in world.workers.values() if worker.running is not None]

    for number, which in enumerate(wanted, 1):
        world.turn([client.infer(number, names[which % len(names)])])
        if random.random() < 0.3 and running():
            world.finish(random.choice(running()).name)
    while running():
        world.finish(random.choice(running()).name)
    assert len(client.answers) == len(wanted)
