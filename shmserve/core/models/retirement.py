"""Retirement of versions and instances: they get no new requests, finish their work, and then their processes end."""

from __future__ import annotations

from shmserve.core.effects import Kill
from shmserve.core.models import loading
from shmserve.core.owners.model import Model
from shmserve.core.records import Instance, Version
from shmserve.core.state import State, Timer
from shmserve.core.states import UNLOADED, InstanceState, VersionState
from shmserve.core.termination import expect_end
from shmserve.protocol.worker_messages import Stop

_I, _V = InstanceState, VersionState


def abandon(state: State, model: Model, version: Version) -> None:
    """Retires a version that is replaced, now or later, by a generation of the same number."""
    if version not in model.leaving and not version.gone:
        model.leaving.append(version)
    retire(state, version)


def retire(state: State, version: Version) -> None:
    """Retires a version: it gets no new requests, finishes its work, and then its processes end. One that is still
    loading ends immediately."""
    is_loading = version.state is _V.LOADING
    state.cache.purge(version)
    if version in state.ensembles:
        del state.ensembles[version]
        if version.state is _V.UNAVAILABLE:
            version.explain(UNLOADED)
    if is_loading or version.state is _V.READY or version.recovering:
        version.move(_V.UNLOADING)
        state.changes.unloading_versions[version] = None
        if version.service.sequence_slots is not None:
            state.set_timer(state.now + state.limits.leaving_ns, Timer.LEAVE, version)
    if is_loading:
        if version.unchecked.count:
            state.loaded_versions[version] = None
        for instance in list(version.instances):
            stop(state, version, instance)


def stop(state: State, version: Version, instance: Instance, hurry: bool = True) -> None:
    """Stops an instance: it gets no more requests and finishes its work. One that is loading has nothing to finish.
    `hurry`: its sequences have a limited time to end."""
    service = version.service
    state.deadlock_possible = True
    if instance.state in (_I.WAITING, _I.BACKOFF, _I.ASLEEP):
        instance.move(_I.STOPPED)
        state.memory.free(instance)
        remove_stopped(version, instance)
    elif instance.state is _I.GOING_TO_SLEEP:
        instance.move(_I.STOPPING)
    elif instance.state is _I.READY and _let_finish(state, version, instance, hurry):
        pass
    elif instance.state is _I.READY:
        state.changes.retiring_instances.pop(instance, None)
        if service.sequence_slots is not None and service.sequence_slots.at(instance):
            service.sequence_slots.lose(instance, f"instance '{instance.spec.name}' is no longer served")
            state.to_dispatch[version] = None
        if instance in version.idle:
            version.idle.remove(instance)
        instance.move(_I.STOPPING)
        state.send(instance.peer, Stop())
        if instance.due:  # it was replaced by a restart, and stayed for its sequences or streams
            expect_end(state, instance, state.limits.exit_ns)
    elif instance.state is _I.STARTING:
        instance.move(_I.STOPPING)
        state.effects.append(Kill(instance.peer, "it is no longer needed"))
        loading.load_over(state, instance)
    elif instance.state is _I.KILLED:
        instance.retiring = instance.closing = True
    version.settle_sleep()
    settle_lost(state, version)


def _let_finish(state: State, version: Version, instance: Instance, hurry: bool) -> bool:
    """An instance removed from a version that continues stays for its sequences (with `hurry`, for a limited time) and
    its streams."""
    if version.state is not _V.READY or instance.retiring or not version.needs(instance):
        return False
    instance.retiring = True
    state.changes.retiring_instances[instance] = version
    if version.service.sequence_slots is not None:
        if hurry:
            state.set_timer(state.now + state.limits.leaving_ns, Timer.LEAVE, instance)
    else:
        instance.closing = True
        if instance in version.idle:
            version.idle.remove(instance)
    return True


def settle_lost(state: State, version: Version) -> bool:
    """Updates the state of a version with lost instances: it is READY only while one is alive. True: the last one
    is lost. Lost ones continue to be restarted with back-off. The dispatcher answers queued requests."""
    lost = [
        instance for instance in version.instances if instance.lost and not (instance.over or instance.spec.passive)
    ]
    if version.state is _V.READY and lost and not version.alive:
        version.move(_V.UNAVAILABLE, version.degraded_reason)
        state.refresh(version.model)
        state.to_dispatch[version] = None
        return True
    if version.recovering:
        version.explain(version.degraded_reason)
    return False


def end_grace_period(state: State, subject: Version | Instance | None, now: int) -> None:
    """The grace period for sequences is over. None: the server stops, and only sequences with requests in progress
    continue."""
    if subject is None:
        for sequence in [sequence for sequence in state.sequences.values() if sequence.idle]:
            sequence.fail("UNAVAILABLE", f"sequence {sequence.id!r} has ended: the server is stopping")
            sequence.mark_changed()
            state.to_dispatch[sequence.version] = None
        return
    version = state.changes.retiring_instances.get(subject) if isinstance(subject, Instance) else subject
    if version is None or version.service.sequence_slots is None:
        return
    if isinstance(subject, Instance):
        stop(state, version, subject)
    else:
        version.service.sequence_slots.lose(None, "its version is no longer served")
        state.to_dispatch[version] = None


def remove_stopped(version: Version, instance: Instance) -> None:
    """Removes an instance from a version that continues."""
    goes_on = version.state in (_V.LOADING, _V.READY) or version.recovering
    if goes_on and any(not other.over for other in version.instances):
        version.instances.remove(instance)


def forget_deleted(model: Model, version: Version) -> None:
    """Drops an unloaded version that was deleted from the repository long ago, so that it is not listed forever."""
    unloaded = version.state is _V.UNAVAILABLE and version.gone
    if version.deleted and unloaded and model.versions.get(version.number) is version:
        del model.versions[version.number]
