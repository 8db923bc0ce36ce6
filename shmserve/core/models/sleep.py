"""Sleep: an unused version stays deployed, but its processes end to free their memory.

A sleeping version is READY: requests are admitted, validated and queued as usual, and wake it. Then its instances load
again from the same source. It goes to sleep when it has no queued or running requests; leases are revoked first.

    READY -> GOING_TO_SLEEP -> ASLEEP -> WAITING -> STARTING -> READY

Invariant: `Version.asleep` is true if all instances that serve are asleep, or will be when their processes have ended
(`Version.settle_sleep`). In an awake version, an instance is asleep only if it could not be woken; waking it is retried
after a back-off.
"""

from __future__ import annotations

from typing import Any

from shmserve.core.batching import dispatch
from shmserve.core.limits import pause_ns
from shmserve.core.models import loading, retirement
from shmserve.core.records import Instance, Version
from shmserve.core.state import State, Timer
from shmserve.core.states import InstanceState, VersionState
from shmserve.core.termination import expect_end
from shmserve.protocol.worker_messages import Stop

_I, _V = InstanceState, VersionState

STATES = (_V.READY, _V.UNLOADING)
"""States of versions that may sleep. An UNLOADING version sleeps only if others need its memory: ensemble runs that
hold it for a later step may be waiting for those versions."""


# ------------------------------------------------------------------------------------ to sleep


def serves(state: State, version: Version, now: int) -> None:
    """An instance has become READY: starts the idle timer, and wakes the other instances."""
    if version.sleep_state.idle_ns and not version.sleep_state.watched:
        _watch(state, version, now)
    if version.asleep:  # the version has gone to sleep again, and the instance with it
        return
    for instance in version.instances:
        if instance.state is _I.ASLEEP and not instance.reason:
            _start(state, version, instance)
    loading.start_waiting(state)


def check_idle(state: State, version: Version, now: int) -> None:
    """The idle timer: the version goes to sleep if it has not been used since the timer was set."""
    version.sleep_state.watched = False
    if version.state is not _V.READY or version.asleep or state.draining:
        return
    if not is_busy(state, version) and last_used(version) + version.sleep_state.idle_ns <= now:
        state.changes.to_sleep[version] = False
    else:
        _watch(state, version, now)


def _watch(state: State, version: Version, now: int) -> None:
    version.sleep_state.watched = True
    due = last_used(version) + version.sleep_state.idle_ns
    state.set_timer(due if due > now else now + version.sleep_state.idle_ns, Timer.UNUSED, version)


def ready_since(version: Version) -> int:
    return max(instance.ready_since for instance in version.instances)


def last_used(version: Version) -> int:
    return max(version.statistics.last_inference_ns, ready_since(version))


def is_busy(state: State, version: Version) -> bool:
    """True if requests are queued or running, or instances are loading. Leases do not count."""
    service = version.service
    if version.waits or (service.sequence_slots is not None and service.sequence_slots.count):
        return True
    return any(_is_busy(state, instance) for instance in version.instances)


def is_running(state: State, version: Version) -> bool:
    """Like `is_busy`, but leases count and queued requests do not."""
    service = version.service
    if service.sequence_slots is not None and any(
        service.sequence_slots.at(instance) for instance in version.instances
    ):
        return True
    if any(lease.version is version for lease in state.leases.values()):
        return True
    return any(_is_busy(state, instance) for instance in version.instances)


def _is_busy(state: State, instance: Instance) -> bool:
    if instance.state is _I.READY:
        calls = instance.caller is not None and bool(instance.caller.requests)
        return bool(instance.batches() or instance.streams or calls or _keeps_tensors(state, instance))
    if instance.state is _I.WAITING and instance not in state.memory.holders:
        return False  # it waits for its turn to load, or for memory
    return not (instance.over or instance.state in (_I.BACKOFF, _I.ASLEEP))


def _keeps_tensors(state: State, instance: Instance) -> bool:
    """True if others use its tensors in device memory. Unlike those on the host, they are lost when its process
    ends."""
    if not instance.spec.on_gpu:
        return False
    return any(
        segment.owner == instance.peer and segment.on_device and (segment.blocks or segment.uses)
        for segment in state.ledger.segments.values()
    )


def put_unused_to_sleep(state: State, now: int) -> None:
    """At the end of a turn: puts versions to sleep, unless they have been used in the meantime. A version with a lease
    follows once the log of the lease has been read, which shows its last use."""
    for version, for_others in list(state.changes.to_sleep.items()):
        if version.state not in STATES or version.asleep or state.draining:
            del state.changes.to_sleep[version]
        elif is_busy(state, version) or not (for_others or last_used(version) + version.sleep_state.idle_ns <= now):
            del state.changes.to_sleep[version]
            if version.sleep_state.idle_ns and not version.sleep_state.watched:
                _watch(state, version, now)
        elif not any(lease.version is version for lease in state.leases.values()):
            del state.changes.to_sleep[version]
            if not for_others:
                idle_s = version.sleep_state.idle_ns / 1e9
                idle = f"it had no request for {idle_s:g} s (--idle-unload-secs, idle_unload_secs)"
                state.log_version("info", f"{version.label} goes to sleep: {idle}", version)
            put_to_sleep(state, version)


def put_to_sleep(state: State, version: Version) -> None:
    version.reserved = None
    for instance in list(version.instances):
        if instance.over or instance.state is _I.ASLEEP:
            continue
        if instance.joining:
            state.loading.queue.remove((version, instance))
            retirement.stop(state, version, instance)
            continue
        if instance.state is _I.WAITING:
            if not instance.loaded:  # an operation waits for this instance
                continue
            if instance.lost:
                instance.lost, instance.sleeping = False, True
            back_to_sleep(state, version, instance)
            continue
        instance.sleeping = True
        if instance.state is _I.BACKOFF:
            instance.lost = False
            instance.move(_I.ASLEEP)
            state.memory.free(instance)
            continue
        if instance in version.idle:
            version.idle.remove(instance)
        instance.move(_I.GOING_TO_SLEEP, "")
        expect_end(state, instance, state.limits.exit_ns)
        state.send(instance.peer, Stop())
    version.settle_sleep()


def back_to_sleep(state: State, version: Version, instance: Instance) -> None:
    """Puts an instance that waits to load, but is no longer needed, back to sleep."""
    state.loading.queue.remove((version, instance))
    state.memory.free(instance)
    instance.move(_I.ASLEEP)
    version.settle_sleep()
    if version.asleep:
        version.sleep_state.woken = 0


def fell_asleep(state: State, version: Version, instance: Instance, reason: str) -> None:
    """The process has ended. If requests have been queued since, the dispatcher wakes the version."""
    if reason.startswith("signal "):  # not a signal that the server sent
        text = f"worker of {version.label} instance '{instance.spec.name}' ended while going to sleep: {reason}"
        state.log_version("error", text, version, instance)
    instance.move(_I.ASLEEP, "")
    instance.due = 0
    if blocked := state.loading.forbids(instance.spec):
        hold(state, version, instance, blocked)
    elif not version.asleep:
        _start(state, version, instance)
        loading.start_waiting(state)


# ------------------------------------------------------------------------------------ waking


def wake(state: State, version: Version, now: int) -> None:
    """Loads the version's instances again for its queued requests. Fails the requests if it is too early to try again.
    Waits for old processes that have not ended."""
    if any(instance.peer and instance.asleep_soon for instance in version.instances):
        return
    able = [instance for instance in version.instances if instance.state is _I.ASLEEP and not instance.reason]
    if not able:
        if not any(instance.usable for instance in version.instances):  # a leaving instance may still run its sequences
            _refuse(state, version, now)
        return
    version.sleep_state.woken = version.sleep_state.woken or now
    version.sleep_state.users = {}
    # With budgets, it is logged once it is known which versions make room.
    version.sleep_state.logged = not state.memory.limited
    if version.sleep_state.logged:
        state.log_version("info", f"model '{version.model}' is waking for a request", version)
    for instance in able:
        _start(state, version, instance)
    version.settle_sleep()
    loading.start_waiting(state)


def _start(state: State, version: Version, instance: Instance) -> None:
    """Queues the instance behind others that wake, and before those that load for the first time."""
    instance.move(_I.WAITING)
    waking = sum(other.sleeping for _, other in state.loading.queue)
    state.loading.queue.insert(waking, (version, instance))


def _refuse(state: State, version: Version, now: int) -> None:
    failed = [instance for instance in version.instances if instance.state is _I.ASLEEP]
    why = "; ".join(dict.fromkeys(f"instance '{instance.spec.name}': {instance.reason}" for instance in failed))
    text = f"{version.label} was asleep and cannot be loaded: {why}"
    retried = [instance.retry_at for instance in failed if not instance.held]
    if retried:
        text += f"; it is tried again in {max(min(retried) - now, 0) / 1e9:g} s"
    dispatch.empty_queue(state, version, text)


def has_woken(state: State, version: Version, instance: Instance, now: int) -> None:
    instance.sleeping = False
    instance.explain("")
    if version.sleep_state.woken:
        took = now - version.sleep_state.woken
        version.sleep_state.woken = 0
        state.observers.woken(version, took)
        state.log_version("info", f"{version.label} is READY after {took / 1e9:.3g} s", version)


def died_waking(state: State, version: Version, instance: Instance, reason: str, fields: dict[str, Any]) -> None:
    """The process was killed or crashed while loading, for the first time: retries at once, as after any first
    death."""
    instance.deaths += 1
    instance.move(_I.ASLEEP)
    text = f"worker of {version.label} instance '{instance.spec.name}' ended while waking: {reason}"
    state.log("error", text, **fields)
    version.settle_sleep()
    if not version.asleep:
        _start(state, version, instance)
        loading.start_waiting(state)
    elif not version.waits:  # the next request wakes it
        version.sleep_state.woken = 0


def wake_failed(
    state: State, version: Version, instance: Instance, reason: str, now: int, fields: dict[str, Any]
) -> None:
    """The process ended while loading. If no other instance serves or loads, the dispatcher fails the queued requests;
    after the back-off, requests may wake the instance again."""
    instance.load_error = ""
    pause = _sleep_on(state, version, instance, reason, now)
    text = f"instance '{instance.spec.name}' of {version.label} could not be woken: {reason}"
    state.log("error", f"{text}; it is not tried again for {pause / 1e9:g} s", **fields)


def cannot_wake(state: State, version: Version, instances: list[Instance], reason: str, now: int) -> None:
    """There is not enough memory for these instances."""
    for instance in instances:
        _sleep_on(state, version, instance, reason, now)
        state.loading.queue.remove((version, instance))
    state.to_dispatch[version] = None
    state.log_version("error", f"{version.label} could not be woken: {reason}", version)


def _sleep_on(state: State, version: Version, instance: Instance, reason: str, now: int) -> int:
    """Keeps the instance asleep after a failed wake. Returns the time for which it cannot be woken."""
    limits = state.limits
    instance.deaths += 1
    instance.move(_I.ASLEEP, reason)
    pause = pause_ns(instance.deaths + 1, limits.backoff_ns, limits.backoff_max_ns)
    instance.retry_at = now + pause
    state.set_timer(instance.retry_at, Timer.RETRY, instance)
    version.settle_sleep()
    if version.asleep:
        version.sleep_state.woken = 0
        state.observers.wake_failed(version)
    return pause


def hold(state: State, version: Version, instance: Instance, reason: str) -> None:
    """Keeps an instance asleep, because its GPU is unhealthy."""
    if instance.state is not _I.ASLEEP:
        instance.move(_I.ASLEEP)
    instance.explain(reason)
    instance.held, instance.load_error = True, ""
    state.memory.free(instance)
    version.settle_sleep()
    if version.asleep:
        version.sleep_state.woken = 0
    state.to_dispatch[version] = None


def may_wake_again(state: State, version: Version, instance: Instance) -> None:
    """The back-off is over, or its GPU is healthy again. A sleeping version waits for the next request."""
    if instance.held:
        return
    instance.explain("")
    if not version.asleep and version.state in STATES and not state.draining:
        _start(state, version, instance)
        loading.start_waiting(state)
