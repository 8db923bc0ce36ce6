"""Deadlock detection among instances that wait for other models.

A blocked instance can continue if all calls that block it will be answered. An instance of a version that has to free
its memory can sleep if all of its calls will be answered. A request will be answered if the instance that has it can
continue or, while it is queued, if an instance that may run it can. Instances for which this cannot be shown are
deadlocked.

Invariant: if there is no deadlock, a new call can only deadlock its own caller, so only that call is checked. All
instances are checked only if something else may have formed a deadlock (`State.deadlock_possible`).
"""

from __future__ import annotations

from itertools import chain

from shmserve.core.models import memory
from shmserve.core.owners.run import Run
from shmserve.core.records import Instance, Request, Version
from shmserve.core.state import State
from shmserve.core.states import BatchState, InstanceState, RequestState, VersionState

ANSWERED = (RequestState.LINGERING, RequestState.ENDED, RequestState.DONE)
"""States of requests that no caller waits for any more, or only for the responses to earlier ones."""

Stuck = dict[Instance, None]


def closes_cycle(state: State, request: Request) -> str:
    """Why a new call that blocks its instance would wait forever, or ""."""
    version, waiting = request.version, state.blocked_instances
    service = version.service
    usual = service.graph is None and service.order is None and service.sequence_slots is None
    if usual and any(instance.usable and instance not in waiting for instance in version.instances):
        return ""
    stuck = _stuck(state)
    return (
        _explanation(state, _path(state, request, stuck)[0], stuck)
        if _blocked_by(state, request, stuck) is not None
        else ""
    )


def newest_in_cycle(state: State) -> tuple[Request | None, str]:
    """The newest call of a cycle of waiting instances, if there is one, and its error text."""
    stuck = _stuck(state)
    for instance in stuck:
        calls, cycle = _path(state, _blocked_call(state, instance, stuck), stuck)
        newest = max(calls[cycle:], key=lambda call: call.number)
        return newest, _explanation(state, _path(state, newest, stuck)[0], stuck)
    return None, ""


def _stuck(state: State) -> Stuck:
    """Instances that can never continue. Killed ones are left out, because their calls end with them."""
    waiting = chain(state.blocked_instances, *(version.instances for version in state.memory.yielding))
    stuck = {i: None for i in waiting if i.caller is not None and i.state is not InstanceState.KILLED}
    changed = True
    while changed:
        changed = False
        for instance in list(stuck):
            if all(_blocked_by(state, request, stuck) is None for request in _held(state, instance)):
                del stuck[instance]
                changed = True
    return stuck


def _blocked_call(state: State, instance: Instance, stuck: Stuck) -> Request:
    return next(request for request in _held(state, instance) if _blocked_by(state, request, stuck) is not None)


def _path(state: State, request: Request, stuck: Stuck) -> tuple[list[Request], int]:
    """The chain of calls that starts with this one, and the index at which its cycle begins."""
    calls, seen = [request], {_caller(state, request)[1]: 0}
    while True:
        blocker = _blocked_by(state, calls[-1], stuck)
        assert blocker is not None
        if blocker in seen:
            return calls, seen[blocker]
        seen[blocker] = len(calls)
        calls.append(_blocked_call(state, blocker, stuck))


def _blocked_by(state: State, request: Request, stuck: Stuck) -> Instance | None:
    """A deadlocked instance that keeps this request from being answered."""
    order = request.version.service.order
    if order is not None:
        for before in order:
            if before is request:
                break
            blocker = _runs_at(state, before, stuck)
            if blocker is not None:
                return blocker
    return _runs_at(state, request, stuck)


def _runs_at(state: State, request: Request, stuck: Stuck) -> Instance | None:
    run = state.runs.get(request.number)
    if request.state in ANSWERED or (run is not None and run.failure is not None):
        return None
    if run is not None:
        return _held_up_by(state, run, stuck)
    instance, batch = request.instance, request.batch
    if instance is None and request.suspect:  # suspects run one at a time
        instance = request.version.trial
    elif instance is None or (batch is not None and batch.state is BatchState.OPEN):  # it may still move
        sequence = request.sequence
        while sequence is not None and sequence.before is not None:
            sequence = sequence.before
        instance = sequence.instance if sequence is not None else None
    if instance is not None:
        return instance if _is_blocked(state, instance, stuck) else None
    return _served_by(state, request.version, stuck)


def _held_up_by(state: State, run: Run, stuck: Stuck) -> Instance | None:
    """For a request to an ensemble: checks its steps in flight and those that have not started."""
    blockers = [_blocked_by(state, step, stuck) for step in run.in_flight]
    blockers += [_served_by(state, member, stuck) for member in run.to_come()]
    return next((blocker for blocker in blockers if blocker is not None), None)


def _served_by(state: State, version: Version, stuck: Stuck) -> Instance | None:
    """A deadlocked instance that the version's queue waits for. None: an instance will run the queued requests, or they
    will fail."""
    if version.service.graph is not None:
        members = version.members or memory.needed_by(state, version)
        blockers = [_served_by(state, member, stuck) for member in members]
        return next((blocker for blocker in blockers if blocker is not None), None)
    able = [instance for instance in version.instances if not instance.over and not instance.spec.passive]
    blocked = [instance for instance in able if _is_blocked(state, instance, stuck)]
    others = [one for one in able if one not in blocked and not memory.may_never_load(state, one)]
    if not others:
        return next(iter(blocked), None)
    if all(memory.waits_for_memory(state, instance) for instance in others):
        return memory.held_up_by(state, version, stuck)
    return None


def _is_blocked(state: State, instance: Instance, stuck: Stuck) -> bool:
    """False for an instance that only cannot sleep: it still runs new requests."""
    return instance in stuck and instance in state.blocked_instances


def _explanation(state: State, calls: list[Request], stuck: Stuck) -> str:
    for call in calls:
        needed = memory.needed_by(state, call.version)
        short = next((one for one in needed if memory.held_up_by(state, one, stuck) is not None), None)
        if short is not None:
            to_wake = memory.needed_to_wake(short)
            need = " and ".join(
                f"{memory.megabytes(size)} of {memory.name_of(place)} ({memory.setting_of(place)})"
                for place, size in (to_wake or memory.needed_to_load(short)).items()
            )
            problem = "which sleeps and cannot be woken: it" if to_wake else "whose new instance cannot be loaded: it"
            if not to_wake and short.state is VersionState.LOADING:
                problem = "which cannot be loaded: it"
            called = f"'{call.version.model}', "
            if short is not call.version:
                called += f"which waits for '{short.model}', "
            return (
                f"model '{_caller(state, call)[0].model}' calls {called}{problem} "
                f"needs {need}, and the models that wait for it use what is left"
            )
    names = [_caller(state, calls[0])[0].model]
    for call in calls:
        blocker = _blocked_by(state, call, stuck)
        assert blocker is not None
        version, _ = state.instances[blocker.peer]
        names += [call.version.model]
        if version.model != names[-1]:  # a step of an ensemble, or an earlier request in order
            names.append(version.model)
    return (
        f"deadlock: model '{names[0]}' calls '{names[1]}', but all instances of {' -> '.join(names)} wait for the "
        "next model; raise instance_group.count of one of them, or call from a separate thread of a decoupled "
        "model, which blocks no instance"
    )


def _caller(state: State, request: Request) -> tuple[Version, Instance]:
    return state.instances[request.client.number]


def _held(state: State, instance: Instance) -> list[Request]:
    """The calls that block the instance or keep it awake."""
    caller = instance.caller
    if caller is None:
        return []
    version, _ = state.instances[instance.peer]
    return [one for one in caller.requests.values() if one.number in caller.blocking or version.yielding]
