"""Finds the device of an instance from the instance groups of its model.

Invariant: the instance's name contains its index in the group, and the index determines the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig


class Device(NamedTuple):
    """`kind` is the group's kind without KIND_. `number` is the GPU's number in the configuration."""

    kind: str
    number: int


def device_of(config: ModelConfig, instance: str) -> Device:
    """Instances are numbered across all groups of the same name, and within a group across its devices."""
    name, _, number = instance.rpartition("_")
    devices = [
        Device(group.kind.removeprefix("KIND_"), device)
        for group in config.instance_group
        if group.name == name
        for device in (group.gpus if group.kind == "KIND_GPU" else (0,))
        for _ in range(group.count)
    ]
    place = int(number) if number.isdecimal() else len(devices)
    return devices[place] if place < len(devices) else Device("CPU", 0)
