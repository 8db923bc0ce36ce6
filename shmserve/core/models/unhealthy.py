"""Instances on an unhealthy GPU: they are held, without a process, until the GPU is healthy again.

Invariant: no process starts on a GPU in `Loading.unhealthy_devices`. Their requests run on the version's other
instances; without any, the version is UNAVAILABLE, or stays asleep.
"""

from __future__ import annotations

from shmserve.core.events import DeviceHealth
from shmserve.core.models import deployment, load_results, loading, retirement, sleep
from shmserve.core.records import Instance, Version
from shmserve.core.state import State
from shmserve.core.states import InstanceState, VersionState
from shmserve.core.termination import kill

_I, _V = InstanceState, VersionState


def instances_on(state: State, device: int) -> list[tuple[Version, Instance]]:
    return [
        (version, instance)
        for model in state.models.values()
        for version in model.generations()
        for instance in version.instances
        if instance.spec.on_gpu and instance.spec.device == device
    ]


def take_out(state: State, version: Version, instance: Instance, reason: str, now: int) -> None:
    """The GPU of this instance has become unhealthy. Instances that wait to load are set aside by the load queue."""
    if instance.state in (_I.STARTING, _I.READY):
        instance.held = not instance.retiring
        kill(state, version, instance, reason)
    elif instance.state in (_I.BACKOFF, _I.ASLEEP):
        _hold_any(state, version, instance, reason, now)


def hold(state: State, version: Version, instance: Instance, reason: str) -> None:
    """Keeps an instance without a process. Its version serves with the others, or is UNAVAILABLE."""
    if instance.sleeping:
        sleep.hold(state, version, instance, reason)
        return
    if instance.state is not _I.BACKOFF:
        instance.move(_I.BACKOFF)
    instance.held = instance.lost = True
    instance.explain(reason)
    instance.load_error, instance.retry_at = "", 0
    state.memory.free(instance)
    if retirement.settle_lost(state, version):
        state.log_version("error", f"{version.label} is UNAVAILABLE: {version.reason}", version, instance)
    state.to_dispatch[version] = None


def resume(state: State, version: Version, instance: Instance) -> None:
    """Starts an instance whose GPU is healthy again. One whose process has not ended follows when it has, and one whose
    version is loading without it when that is over: two versions could each wait for the other's memory."""
    if not instance.held or instance.peer or state.draining or version.state is _V.LOADING:
        return
    instance.held = False
    instance.forgive()
    if instance.state is _I.BACKOFF:
        loading.start_again(state, version, instance)
    elif instance.state is _I.ASLEEP:
        sleep.may_wake_again(state, version, instance)


def load_over(state: State, version: Version) -> None:
    """The version is no longer loading: starts its instances whose GPUs have recovered in the meantime."""
    for instance in version.instances:
        if not state.loading.forbids(instance.spec):
            resume(state, version, instance)


def device_health(state: State, peer: int, event: DeviceHealth, now: int) -> None:
    """A GPU must not be used any more, or may be used again. If only the reason changes, it is shown from now on."""
    before = state.loading.unhealthy_devices.pop(event.device, "")
    if event.reason:
        state.loading.unhealthy_devices[event.device] = event.reason
    affected = instances_on(state, event.device)
    if event.reason and event.reason != before:
        state.log("critical", f"{event.reason} ({len(affected)} instance(s) are affected)", gpu=event.device)
        for version, instance in affected:
            take_out(state, version, instance, event.reason, now)
        loading.start_waiting(state)  # sets aside those that wait to load
    elif before and not event.reason:
        state.log("info", f"GPU {event.device} is healthy again", gpu=event.device)
        for version, instance in affected:
            resume(state, version, instance)


def hold_blocked(state: State, now: int) -> None:
    """Handles instances that were queued to load on an unhealthy GPU."""
    blocked, state.loading.blocked = state.loading.blocked, []
    for version, instance in blocked:
        if instance.state is not _I.WAITING:
            continue
        reason = state.loading.forbids(instance.spec)
        if not reason:  # it has recovered in this turn
            state.loading.queue.append((version, instance))
        else:
            _hold_any(state, version, instance, reason, now)
    loading.start_waiting(state)


def ended(state: State, version: Version, instance: Instance, now: int) -> None:
    """The process was killed because of its GPU, or has crashed on it. This does not count as a crash."""
    blocked = state.loading.forbids(instance.spec)
    reason = blocked or instance.reason
    _hold_any(state, version, instance, reason, now)
    if not blocked and instance.held:  # the GPU has recovered before the process had ended
        resume(state, version, instance)


def _hold_any(state: State, version: Version, instance: Instance, reason: str, now: int) -> None:
    """Holds an instance that has served, or one that something may wait for: its version, or an operation. One that
    only finishes the work of a version that is unloaded is stopped."""
    if version.state is _V.UNLOADING and not instance.sleeping:
        version.explain(f"instance '{instance.spec.name}': {reason}")
        retirement.stop(state, version, instance)
        state.to_dispatch[version] = None
    elif instance.sleeping or (instance.loaded and version.state is not _V.LOADING):
        hold(state, version, instance, reason)
    else:
        _hold_first_load(state, version, instance, reason, now)


def _hold_first_load(state: State, version: Version, instance: Instance, reason: str, now: int) -> None:
    """A version that is loading goes on with its instances on other devices; without any, its load fails."""
    others = [
        other
        for other in version.instances
        if other is not instance and not (other.over or other.spec.passive or other.held)
    ]
    if version.state is _V.LOADING and not others:
        _loads_later(state, version, instance, reason)
    elif instance.joining or instance.replaces is not None:
        load_results.failed_to_load(state, version, instance, reason, now)
    else:
        hold(state, version, instance, reason)
        if version.state is _V.LOADING and version.loaded:
            load_results.version_loaded(state, version, now)
            load_over(state, version)
        deployment.goes_on_without(state, version, instance)


def _loads_later(state: State, version: Version, instance: Instance, reason: str) -> None:
    """All GPUs of a version that is loading are unhealthy: its load fails now, and is made up for when one of them
    has recovered. A generation that was to replace another is given up."""
    if state.models[version.model].versions.get(version.number) is not version:
        load_results.give_up(state, version, instance, reason)
        return
    hold(state, version, instance, reason)
    load_results.fail_version(state, version, instance, reason)
    for other in list(version.instances):
        if not other.held and not other.over:
            retirement.stop(state, version, other)
    load_over(state, version)
    deployment.has_failed(state, version, reason)
