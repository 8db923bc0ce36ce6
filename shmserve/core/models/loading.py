"""Starts the processes of instances, as many at a time as the limits of concurrent loads and of memory allow."""

from __future__ import annotations

from collections import deque
from itertools import takewhile

from shmserve.core.effects import Spawn
from shmserve.core.models import shares
from shmserve.core.records import Instance, Version
from shmserve.core.state import State, Timer
from shmserve.core.states import InstanceState

_I = InstanceState


def start_waiting(state: State) -> None:
    """Starts queued instances, as many as the limit of concurrent loads allows. With memory budgets, `room` grants them
    memory first."""
    state.memory.changed = True
    if state.loading.unhealthy_devices:
        _set_aside(state)
    while len(state.loading.running) < state.limits.loading:
        entry = _next(state)
        if entry is None:
            return
        version, instance = entry
        if instance.state is _I.WAITING:
            spawn(state, version, instance)
            state.loading.running[instance] = None


def _next(state: State) -> tuple[Version, Instance] | None:
    """Takes the next instance that may load from the queue. With budgets, it must have been granted its memory.
    Without, users take turns in waking versions."""
    queue = state.loading.queue
    if state.memory.limited:
        able = (entry for entry in queue if entry[1] in state.memory.holders or entry[1].state is not _I.WAITING)
        chosen = next(able, None)
    else:
        first = queue[0] if queue else None
        waking = takewhile(lambda entry: entry[1].sleeping, queue)
        chosen = min(waking, key=lambda entry: shares.choose_waker(state, entry[0]), default=first)
    if chosen is not None:
        queue.remove(chosen)
    return chosen


def free_slots(state: State) -> int:
    """How many more instances could load now, besides those that have been granted memory."""
    granted = sum(one.state is _I.WAITING and one in state.memory.holders for _, one in state.loading.queue)
    return state.limits.loading - len(state.loading.running) - granted


def _set_aside(state: State) -> None:
    """Removes instances from the queue whose GPU is unhealthy. `Core` processes them later in the turn."""
    blocked = [(version, instance) for version, instance in state.loading.queue if state.loading.forbids(instance.spec)]
    if blocked:
        state.loading.queue = deque(entry for entry in state.loading.queue if not state.loading.forbids(entry[1].spec))
        state.loading.blocked += blocked


def spawn(state: State, version: Version, instance: Instance) -> None:
    instance.move(_I.STARTING)
    instance.spawned = state.now
    instance.ready_since = 0
    instance.hung = False
    instance.memory = (0, 0)
    state.memory.holders[instance] = version
    if state.limits.load_ns:
        state.set_timer(state.now + state.limits.load_ns, Timer.LATE, instance)
    instance.peer = next(state.worker_numbers)
    state.instances[instance.peer] = (version, instance)
    if instance.sleeping:
        shares.wakes(state, version)
    urgent = instance.sleeping and version.waits > 0
    state.effects.append(Spawn(instance.peer, version.model, version.number, version.source, instance.spec, urgent))


def start_again(state: State, version: Version, instance: Instance) -> None:
    """Starts an instance after its back-off. If others have been granted its memory, it waits for memory; if its GPU is
    unhealthy, for the GPU."""
    if instance.held:
        return
    if instance in state.memory.holders:
        spawn(state, version, instance)
        return
    instance.move(_I.WAITING)
    state.loading.queue.append((version, instance))
    start_waiting(state)


def load_over(state: State, instance: Instance) -> None:
    """The instance has finished loading, successfully or not: starts the next one."""
    if instance in state.loading.running:
        del state.loading.running[instance]
        start_waiting(state)
