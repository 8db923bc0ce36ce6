"""Which device an instance runs on, by the instance groups of its model.

The rule: the name of an instance says where it stands in its group, and so which device it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig


class Device(NamedTuple):
    """`kind` is that of the instance group, without KIND_. `number` is that of the GPU, as the configuration has it."""

    kind: str
    number: int


def device_of(config: ModelConfig, instance: str) -> Device:
    """Instances are numbered through the groups of one name, and in each group through its devices."""
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
