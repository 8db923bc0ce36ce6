"""Instances on an unhealthy GPU: they are held, without a process, until the GPU is healthy again.

Invariant: no process starts on a GPU in `State.unhealthy_devices`. Their requests run on the version's other instances;
without any, the version is UNAVAILABLE, or stays asleep.
"""

from __future__ import annotations

from shmserve.core.models import loading, retirement, sleep
from shmserve.core.models.termination import kill
from shmserve.core.records import Instance, Version
from shmserve.core.state import State
from shmserve.core.states import InstanceState

_I = InstanceState


def instances_on(state: State, device: int) -> list[tuple[Version, Instance]]:
    return [
        (version, instance)
        for model in state.models.values()
        for version in model.generations()
        for instance in version.instances
        if instance.spec.kind == "KIND_GPU" and instance.spec.device == device
    ]


def take_out(state: State, version: Version, instance: Instance, reason: str) -> None:
    """The GPU of this instance has become unhealthy. Instances that wait to load are set aside by the load queue."""
    if instance.state in (_I.STARTING, _I.READY):
        instance.held = not instance.retiring
        kill(state, version, instance, reason)
    elif instance.state in (_I.BACKOFF, _I.ASLEEP):
        hold(state, version, instance, reason)


def hold(state: State, version: Version, instance: Instance, reason: str) -> None:
    """Keeps an instance without a process. Its version serves with the others, or is UNAVAILABLE."""
    if instance.sleeping:
        sleep.hold(state, version, instance, reason)
        return
    if instance.state is not _I.BACKOFF:
        instance.move(_I.BACKOFF)
    instance.held = instance.lost = True
    instance.reason, instance.load_error, instance.retry_at = reason, "", 0
    state.memory_holders.pop(instance, None)
    state.memory_changed = True
    if retirement.settle_lost(state, version):
        text = f"{version.label} is UNAVAILABLE: {version.reason}"
        state.log("error", text, model=version.model, version=version.number, instance=instance.spec.name)
    state.to_dispatch[version] = None


def resume(state: State, version: Version, instance: Instance) -> None:
    """Starts an instance whose GPU is healthy again. One whose process has not ended follows when it has."""
    if not instance.held or instance.peer or state.draining:
        return
    instance.held = False
    instance.deaths = instance.crashes = 0
    if instance.state is _I.BACKOFF:
        loading.start_again(state, version, instance)
    elif instance.state is _I.ASLEEP:
        sleep.may_wake_again(state, version, instance)
