"""Deployment: new generations load next to those that serve and replace them when READY. The old generations are
retired.

Invariant: a served version continues until all replacements of the operation are READY. Nothing here blocks; each
operation completes when the last event it waits for has happened, and is reported exactly once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from msgspec.structs import replace

from shmserve.core.effects import Settled
from shmserve.core.events import Deploy, Refuse, Restart, SetService, SetTraffic, Target, Unload
from shmserve.core.models import loading, memory, retirement, sizes
from shmserve.core.owners.model import Departure, FailedChange, Model, Operation, Unloading
from shmserve.core.policy import InstanceSpec
from shmserve.core.records import Instance, Version
from shmserve.core.service.scaler import Scaler
from shmserve.core.state import STOPPING, State
from shmserve.core.states import UNLOADED, InstanceState, VersionState
from shmserve.core.traffic import UNSET, Traffic

_I, _V = InstanceState, VersionState

LISTED = 10
"""How many unloaded versions of a model stay listed after they were deleted from the repository: the latest ones. In
Triton all do, for as long as the server runs."""
OVERTAKEN = "Newer operation has been applied to the model lifecycle"


def _report(state: State, operation: int, code: str = "", text: str = "") -> None:
    if operation:
        state.effects.append(Settled(operation, code, text))


# ------------------------------------------------------------------------------------ operations


def deploy(state: State, peer: int, event: Deploy, now: int) -> None:
    if state.draining:
        _report(state, event.operation, "UNAVAILABLE", STOPPING)
        return
    model = state.model(event.model)
    model.reason = ""
    state.changed_models[event.model] = None
    added: list[tuple[Version, Instance]] = []
    under_way = model.operation
    if under_way is not None:
        if under_way.targets == event.targets and not event.fresh:
            under_way.numbers.append(event.operation)
            under_way.traffic = event.traffic
            return
        _overtake(state, model, OVERTAKEN)
        added = [(version, instance) for version, instance in under_way.added if not instance.over]
    operation = model.operation = Operation(
        [event.operation], event.targets, model.default() is not None, added=added, traffic=event.traffic
    )
    if not operation.loads_while_served:  # versions may become READY before the others
        _set_traffic(state, model, event.traffic)
    for target in event.targets:
        served = model.versions.get(target.number)
        if served is not None and served.state is not _V.READY and not served.recovering:
            served = None
        _aim(state, model, operation, sizes.keep_size(target, served), event.fresh, now)
    wanted = {target.number for target in event.targets}
    for number in [number for number in model.coming if number not in wanted]:
        retirement.abandon(state, model, model.coming.pop(number))
    operation.dropped = [number for number in model.versions if number not in wanted]
    if event.present is not None:
        deleted = sorted(set(operation.dropped).difference(event.present))
        operation.deleted = frozenset(deleted[:-LISTED])
    loading.start_waiting(state)
    settle(state, model)


def _aim(state: State, model: Model, operation: Operation, target: Target, fresh: bool, now: int) -> None:
    """Brings the version to its target: unchanged, with other instances, or as a new generation."""
    number = target.number
    coming, current = model.coming.get(number), model.versions.get(number)
    for version in (coming, current):
        if version is None or version.source != target.source or fresh or version.state not in (_V.LOADING, _V.READY):
            continue
        if version.state is _V.LOADING and state.memory.limited and _lacks(version, target.instances):
            continue  # memory is granted to all of its instances at once: partial grants could deadlock
        if version is current and coming is not None:
            retirement.abandon(state, model, model.coming.pop(number))
        _set_scaling(state, version, target)
        _fit(state, operation, version, target.instances)
        if version.state is _V.LOADING:
            operation.loading[version] = None
        return
    if coming is not None:
        retirement.abandon(state, model, model.coming.pop(number))
    version = Version(model.name, number, [Instance(spec) for spec in target.instances], target.source, now)
    version.sleep_state.memory = memory.estimate_of(target, current)
    _set_scaling(state, version, target)
    if current is not None and current.reason != UNLOADED:
        version.statistics = current.statistics
        version.sleep_state.inherit(current.sleep_state)
    if target.policy is not None:
        version.apply_policy(target.policy, state.limits)
        state.ensembles[version] = None
        state.readiness_changed = True
    operation.loading[version] = None
    if current is not None and (current.state is _V.READY or current.recovering):
        model.coming[number] = version
    else:
        if current is not None:
            retirement.abandon(state, model, current)
        model.versions[number] = version
    state.loading.queue.extend((version, instance) for instance in version.instances)


def _set_scaling(state: State, version: Version, target: Target) -> None:
    policy, scaler = target.scaling, version.scaler
    if policy is None:
        version.scaler = None
    elif scaler is None or scaler.policy != policy:
        version.scaler = Scaler(policy) if scaler is None else scaler
        version.scaler.change(policy)
        state.to_dispatch[version] = None  # dispatching starts the measurement


def _lacks(version: Version, specs: Iterable[InstanceSpec]) -> bool:
    """True if one of these instances has to be added to the version."""
    remaining = [instance.spec for instance in version.instances if not instance.over]
    for spec in specs:
        match = next((one for one in remaining if _alike(one, spec)), None)
        if match is None:
            return True
        remaining.remove(match)
    return False


def _fit(state: State, operation: Operation, version: Version, specs: Iterable[InstanceSpec]) -> None:
    """Keeps the existing instances that are still wanted, adds missing ones, and marks the others as surplus."""
    remaining = [instance for instance in version.instances if not instance.over]
    for spec in specs:
        instance = next((instance for instance in remaining if _alike(instance.spec, spec)), None)
        if instance is None:
            _add(state, operation, version, Instance(spec))
            continue
        remaining.remove(instance)
        if not (instance.loaded or instance.held or instance.sleeping) and version.state is _V.READY:
            operation.starting[instance] = version
            if instance.is_tentative:  # it is needed now, so others make room for it
                instance.joining = False
        elif instance.loaded and instance.state is _I.BACKOFF:  # the operator may have removed the cause
            loading.start_again(state, version, instance)
    operation.surplus += [(version, instance) for instance in remaining]


def _add(state: State, operation: Operation, version: Version, instance: Instance) -> None:
    version.instances.append(instance)
    operation.added.append((version, instance))
    if version.state is _V.LOADING:
        operation.loading[version] = None
    else:
        operation.starting[instance] = version
    state.loading.queue.append((version, instance))


def refuse(state: State, peer: int, event: Refuse, now: int) -> None:
    model = state.model(event.model)
    state.observers.load_failed(model)
    model.failed = FailedChange(event.reason, now)
    state.readiness_changed = True
    if not event.version:
        model.reason = event.reason
        return
    current = model.versions.get(event.version)
    if current is None or (current.state is _V.UNAVAILABLE and not current.recovering):
        version = Version(event.model, event.version, [], began=now)
        version.move(_V.UNAVAILABLE, event.reason)
        model.versions[event.version] = version


def unload(state: State, peer: int, event: Unload, now: int) -> None:
    model = state.models.get(event.model)
    if model is None:
        _report(state, event.operation)
        return
    model.reason = ""
    model.failed = None
    _overtake(state, model, OVERTAKEN)
    for number in list(model.coming):
        retirement.abandon(state, model, model.coming.pop(number))
    for version in model.versions.values():
        retirement.retire(state, version)
    model.unloading.append(Unloading(event.operation, model.generations()))
    if event.force:
        state.changes.forced_unloads += model.generations()
    state.set_traffic(model.name, UNSET)
    model.traffic_set = False
    model.comparisons.clear()
    complete_departures(state, model)


def set_traffic(state: State, peer: int, event: SetTraffic, now: int) -> None:
    model = state.models.get(event.model)
    if model is not None:
        model.traffic_set = True
        state.set_traffic(event.model, model.traffic.changed(event.shares, event.aliases, event.shadow))


def set_service(state: State, peer: int, event: SetService, now: int) -> None:
    """Leases are revoked at the end of the turn, so that the core sees all requests that arrive."""
    state.out_of_service = event.out_of_service


def restart(state: State, peer: int, event: Restart, now: int) -> None:
    """Whole versions are reloaded from the same sources. For a single instance, a new process replaces the old
    one."""
    model = state.models.get(event.model)
    known = model.versions.values() if model is not None else ()
    served = [v for v in known if v.state in (_V.LOADING, _V.READY) or v.recovering]
    chosen = [version for version in served if event.version in (0, version.number)]
    if state.draining:
        _report(state, event.operation, "UNAVAILABLE", STOPPING)
    elif model is None or not chosen:
        which = f"version {event.version} of model '{event.model}'" if event.version else f"model '{event.model}'"
        _report(state, event.operation, "NOT_FOUND", f"cannot restart {which}: it is not served")
    elif model.operation is not None:
        text = f"cannot restart model '{model.name}' while it is loading; try again later"
        _report(state, event.operation, "UNAVAILABLE", text)
    elif event.instance:
        _replace(state, model, chosen, event)
    else:
        targets = tuple(_target_of(version) for version in served)
        operation = model.operation = Operation([event.operation], targets, True, restart=True)
        for version in chosen:
            _aim(state, model, operation, _target_of(version), True, now)
        loading.start_waiting(state)


def _replace(state: State, model: Model, versions: list[Version], event: Restart) -> None:
    replaced = [
        (version, instance)
        for version in versions
        for instance in version.instances
        if instance.spec.name == event.instance and not instance.over
    ]
    if not replaced:
        names = ", ".join(i.spec.name for version in versions for i in version.instances if not i.over)
        text = f"model '{model.name}' has no instance '{event.instance}'; it has {names}"
        _report(state, event.operation, "NOT_FOUND", text)
        return
    targets = tuple(_target_of(version) for version in versions)
    operation = model.operation = Operation([event.operation], targets, True)
    for version, instance in replaced:
        _add(state, operation, version, Instance(instance.spec, replaces=instance))
    loading.start_waiting(state)
    settle(state, model)


def interrupt(state: State, model: Model) -> None:
    """The server stops: cancels all loading, except for sleeping versions with requests."""
    state.loading.queue = deque((version, instance) for version, instance in state.loading.queue if instance.sleeping)
    _overtake(state, model, STOPPING)
    for number in list(model.coming):
        retirement.abandon(state, model, model.coming.pop(number))


def _overtake(state: State, model: Model, why: str) -> None:
    operation, model.operation = model.operation, None
    if operation is None:
        return
    for version, instance in operation.added:
        if instance.replaces is not None:  # the other instance is only removed by a commit
            retirement.stop(state, version, instance)
    for number in operation.numbers:
        _report(state, number, "UNAVAILABLE", f"failed to load '{model.name}': {why}")


# ------------------------------------------------------------------------------------ completion of operations


def has_loaded(state: State, version: Version, instance: Instance) -> None:
    """The instance has become READY, and possibly the version with it."""
    if instance.joining:
        instance.joining = False
        state.changes.joined.append((version, instance))
    goes_on_without(state, version, instance)


def goes_on_without(state: State, version: Version, instance: Instance) -> None:
    """No operation has to wait for this instance: it is READY, or loads only once its GPU is healthy again."""
    operation = state.models[version.model].operation
    if operation is not None:
        operation.starting.pop(instance, None)
    may_be_ready(state, version)


def may_be_ready(state: State, version: Version) -> None:
    """Called when the version may have become READY: settles the operation if it was the last one missing."""
    operation = state.models[version.model].operation
    if operation is not None:
        if version.state is _V.READY:
            operation.loading.pop(version, None)
        settle(state, state.models[version.model])


def has_failed(state: State, version: Version, reason: str, instance: Instance | None = None) -> None:
    """The version failed to load, or only this new instance of a version that is served."""
    model = state.models[version.model]
    operation = model.operation
    if instance is not None and instance.joining:
        state.changes.joined.append((version, instance))
    if operation is None:
        return
    if instance in operation.starting:
        del operation.starting[instance]
    elif instance is None and (version in operation.loading or version in model.coming.values()):
        operation.loading.pop(version, None)
    else:
        return
    operation.failures.append(f"version {version.number} is at UNAVAILABLE state: {reason}")
    operation.traceback = operation.traceback or version.take_traceback()
    for number, coming in list(model.coming.items()):  # none of them will take over, so stop loading them
        del model.coming[number]
        operation.loading.pop(coming, None)
        retirement.abandon(state, model, coming)
    settle(state, model)


def settle(state: State, model: Model) -> None:
    """Completes the operation if nothing is left to wait for."""
    operation = model.operation
    if operation is None or operation.loading or operation.starting:
        return
    model.operation = None
    if operation.failures:
        for version, instance in operation.added:
            retirement.stop(state, version, instance)
        why = "; ".join(dict.fromkeys(operation.failures))
        model.failed = FailedChange(why, state.now)
        text = f"load failed for model '{model.name}': {why}"
        if operation.loads_while_served and model.default() is not None:
            text += "; the previous version is still served"
            more = {"traceback": operation.traceback} if operation.traceback else {}
            state.log("error", text, model=model.name, **more)
    else:
        text = ""
        model.failed = None
        _commit(state, model, operation)
    state.refresh(model.name)
    stopping = [instance for _, instance in operation.surplus if instance.state is _I.STOPPING]
    if stopping and not text:
        model.departures.append(Departure(operation.numbers, stopping))
        return
    for number in operation.numbers:
        _report(state, number, "UNAVAILABLE" if text else "", text)


def _set_traffic(state: State, model: Model, traffic: Traffic | None) -> None:
    """Applies the traffic of a configuration."""
    if traffic is None or model.traffic_set or traffic == model.traffic:
        return
    state.log("info", f"traffic of model '{model.name}': {traffic.text}", model=model.name)
    state.set_traffic(model.name, traffic)


def _commit(state: State, model: Model, operation: Operation) -> None:
    _set_traffic(state, model, operation.traffic)
    for number, version in model.coming.items():
        old = model.versions[number]
        model.versions[number] = version
        retirement.abandon(state, model, old)
        if operation.restart:
            state.changes.replaced_versions.append((old, version))
    model.coming.clear()
    for version, instance in operation.added:
        replaced, instance.replaces = instance.replaces, None
        if replaced is not None:
            retirement.stop(state, version, replaced)
            state.changes.replaced_instances.append((version, replaced))
    for version, instance in operation.surplus:
        retirement.stop(state, version, instance)
    for number in operation.dropped:
        if number not in model.versions:  # it was deleted, and unloaded after the operation began
            continue
        version = model.versions[number]
        version.deleted = number in operation.deleted
        if version.reason == UNLOADED or version.state is not _V.UNAVAILABLE or not version.gone:
            retirement.retire(state, version)
            retirement.forget_deleted(model, version)
        else:
            del model.versions[number]


# ------------------------------------------------------------------------------------ completion of unloads


def finish_unloads(state: State) -> None:
    """Stops versions and instances that have finished, and removes those whose processes have ended. Called once
    per turn."""
    for instance, version in list(state.changes.retiring_instances.items()):
        if not version.needs(instance):
            retirement.stop(state, version, instance)
    for version in list(state.changes.unloading_versions):
        if version.finished:
            for instance in list(version.instances):
                retirement.stop(state, version, instance)
        if version.gone and version.finished:
            del state.changes.unloading_versions[version]
            version.move(_V.UNAVAILABLE, UNLOADED)
            model = state.models[version.model]
            if model.versions.get(version.number) is version:
                state.log("info", f"{version.label} is unloaded", model=model.name, version=version.number)
            retirement.forget_deleted(model, version)
            complete_departures(state, model)


def complete_departures(state: State, model: Model) -> None:
    """Completes unloads and departures. Called when a process of the model has ended or an unload has started."""
    model.leaving = [version for version in model.leaving if not version.gone or version.state is _V.UNLOADING]
    for unloading in list(model.unloading):
        if all(version.gone and version.state is not _V.UNLOADING for version in unloading.versions):
            model.unloading.remove(unloading)
            _report(state, unloading.number)
    for departure in list(model.departures):
        if not any(instance.state in (_I.STOPPING, _I.KILLED) for instance in departure.instances):
            model.departures.remove(departure)
            for number in departure.numbers:
                _report(state, number)


def _alike(one: InstanceSpec, other: InstanceSpec) -> bool:
    """Compares specs except for engine threads: these follow from the number of instances and do not justify a
    restart."""
    return replace(one, threads=0) == replace(other, threads=0)


def _target_of(version: Version) -> Target:
    specs = tuple(sizes.kept(version))
    policy = version.policy if version.service.graph is not None else None
    scaling = version.scaler.policy if version.scaler is not None else None
    return Target(version.number, version.source, specs, policy, version.sleep_state.memory, scaling)
