"""Finds the device of an instance from the instance groups of its model.

Invariant: the instance's name contains its index in the group, and the index determines the device.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from shmserve.errors import Unsupported
from shmserve.repo.gpus import VISIBLE

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig, ModelInstanceGroup


class Device(NamedTuple):
    """`kind` is the group's kind without KIND_. `number` is the GPU's number in the configuration."""

    kind: str
    number: int


def device_of(config: ModelConfig, instance: str) -> Device:
    member = group_of(config, instance)
    if member is None:
        return Device("CPU", 0)
    group, device = member
    return Device(group.kind.removeprefix("KIND_"), device)


def group_of(config: ModelConfig, instance: str) -> tuple[ModelInstanceGroup, int] | None:
    """Returns the group of an instance and the number of its GPU, 0 for other devices; None if no group has it.
    Instances are numbered across all groups of the same name, and within a group across its devices."""
    name, _, number = instance.rpartition("_")
    instances = [
        (group, device)
        for group in config.instance_group
        if group.name == name
        for device in (group.gpus if group.kind == "KIND_GPU" else (0,))
        for _ in range(group.count)
    ]
    index = int(number) if number.isdecimal() else len(instances)
    return instances[index] if index < len(instances) else None


def require_cpu(config: ModelConfig, instance: str, what: str) -> None:
    """Raises if the instance is on a GPU. `what`: models that run on the CPU only."""
    if device_of(config, instance).kind == "GPU":
        raise Unsupported(
            f"instance '{instance}' is to run on a GPU, and {what} run on the CPU only: set kind: KIND_CPU in "
            "instance_group"
        )


def visible_number(device: int) -> int:
    """Returns CUDA's number of a device: 0 if CUDA_VISIBLE_DEVICES shows this process only one."""
    visible = os.environ.get(VISIBLE, "").split(",")
    return 0 if sum(bool(name.strip()) for name in visible) == 1 else device
