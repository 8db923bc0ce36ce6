"""Amounts of resources, which are never exceeded. tests/scenarios/rate_limit.txt has the order of instances."""

from __future__ import annotations

import pytest

from shmserve.core.owners.rate_limiter import ANY, SHARED, lacking
from shmserve.core.policy import InstanceSpec, Resource


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
