"""Amounts of resources, which are never exceeded. tests/scenarios/rate_limit.txt has the order of instances."""

from __future__ import annotations

from shmserve.core.owners.rate_limiter import lacking
from shmserve.core.policy import InstanceSpec, Resource


def spec(name: str, *resources: Resource, turn: int = 1, device: int = 0) -> InstanceSpec:
    return InstanceSpec(name, device=device, resources=resources, turn=turn)


def test_a_resource_is_either_shared_or_of_each_device() -> None:
    own, shared = spec("own", Resource("r", 1)), spec("shared", Resource("r", 1, shared=True))
    text = (
        'Resource "r" is present as both global and device-specific resource in the model configuration. It is global '
        "for instance 'shared' and device-specific for instance 'own'"
    )
    assert lacking([own, shared], ()) == lacking([own], (), [shared]) == lacking([shared], (), [own]) == text
    assert not lacking([own], (), [own, spec("other", Resource("s", 1, shared=True))])
