"""Scaling: the number of instances of a version follows its load, within the bounds of its groups.

An instance is added when requests wait in the queue while all instances are busy, and removed when fewer would have
been enough for a long time. A timer measures a version only while requests meet busy instances or it has more than the
minimum number of instances; otherwise scaling costs nothing.

Invariant: no request, sequence or stream is lost. An instance gets work only once it is READY, and a leaving instance
finishes its work.
"""

from __future__ import annotations

from shmserve.core.batching import leases
from shmserve.core.models import loading, retirement, sizes
from shmserve.core.policy import InstanceSpec, ScaledGroup
from shmserve.core.records import Instance, Version
from shmserve.core.service.scaler import SLOW_WINDOW_NS, SUSTAINED, WINDOW_NS, Measured, Reading, Scaler
from shmserve.core.state import State, Timer
from shmserve.core.states import InstanceState, VersionState

_I = InstanceState
FREE = 0.8
"""Maximum fraction of the slots of sequences or streams in use after an instance is removed."""


def notice(state: State, version: Version, scaler: Scaler, now: int) -> None:
    """Called with each version that is dispatched: starts to measure it if there may be something to change."""
    if version.state is not VersionState.READY or version.asleep or state.draining:
        return
    prompts = version.service.prompts
    if version.idle and not version.waits and scaler.last is not None and not (prompts is not None and prompts.total):
        return
    scaler.begin(_read(version, now))
    state.set_timer(now + WINDOW_NS, Timer.SCALE, version)


def measure(state: State, version: Version, now: int) -> None:
    """The timer at the end of a window."""
    scaler = version.scaler
    if scaler is None or not scaler.watched:
        return
    scaler.watched = False
    if version.state is not VersionState.READY or version.asleep or state.draining:
        scaler.stop()
        return
    before, reading = scaler.last, _read(version, now)
    policy = version.policy
    delay_ns = policy.batching.delay_ns if policy is not None and policy.batching is not None else 0
    measured = scaler.measure(reading, delay_ns)
    if not _changes(state, version):
        if scaler.short >= SUSTAINED and not measured.is_falling and now >= scaler.retry_at:
            if not _loads(version):
                _grow(state, version, scaler, measured, now)
        elif scaler.calm_since and now - scaler.calm_since >= scaler.down_ns:
            _shrink(state, version, scaler, measured, now)
    if state.leases and _can_shrink(version, scaler):
        _read_leases(state, version)
    unused = before is not None and reading.busy_ns == before.busy_ns and not (reading.oldest_ns or reading.prompts_ns)
    if unused and reading.spare and not _can_shrink(version, scaler):
        return  # until `notice`
    scaler.watched = True
    state.set_timer(now + (SLOW_WINDOW_NS if unused else WINDOW_NS), Timer.SCALE, version)


def joined(state: State, now: int) -> None:
    """At the end of a turn: instances that were added are READY, or could not load."""
    added, state.changes.joined = state.changes.joined, []
    for version, instance in added:
        scaler, failed = version.scaler, instance.state is _I.FAILED
        if scaler is not None and failed:
            scaler.did_not_join(now, state.limits)
            instance.retry_at = scaler.retry_at
        elif scaler is not None:
            scaler.joined()
        ready, wanted = version.counts
        text = f"instance '{instance.spec.name}' of {version.label} was added (READY {ready}/{wanted})"
        if failed:
            text = f"{version.label} continues without a new instance '{instance.spec.name}': {instance.reason}"
            if instance.retry_at:
                text += f"; next attempt in {(instance.retry_at - now) / 1e9:g} s at the earliest"
        state.log_version("error" if failed else "debug", text, version, instance)


# ------------------------------------------------------------------------------------ measuring


def _read(version: Version, now: int) -> Reading:
    service = version.service
    statistics = version.statistics
    busy_ns, oldest = statistics.busy_ns, now
    streams = needed = 0
    for instance in version.instances:
        running, waiting = instance.running, instance.waiting
        if running is not None:
            busy_ns += max(0, now - running.began)
        if instance.leased_since:
            busy_ns += max(0, now - instance.leased_since)
        if waiting is not None:
            oldest = min([oldest, *(request.arrived for request in waiting.requests())])
        streams += len(instance.streams)
        needed += bool(instance.streams)
    oldest = min(oldest, _oldest_queued(version, now))
    spare = bool(version.idle)
    if service.streams:
        needed = -(-streams // max(1, int(service.streams * FREE)))
    if service.sequence_slots is not None:
        slots = service.sequence_slots.policy.slots
        needed = -(-service.sequence_slots.count // max(1, int(slots * FREE)))
        spare = spare and not service.sequence_slots.backlog
    return Reading(
        at=now,
        busy_ns=busy_ns,
        queue_ns=statistics.queue_ns,
        requests=sum(statistics.queue_times),
        oldest_ns=now - oldest,
        instances=_count(version),
        spare=spare,
        needed=needed,
        service_ns=version.service_ns,
        prompts_ns=_prompts_ns(version, now),
    )


def _prompts_ns(version: Version, now: int) -> int:
    """How long it will take to compute the prompts that wait. The largest one in the engine of each instance is not
    counted: another instance would not compute it earlier."""
    backlog = version.service.prompts
    if backlog is None or not backlog.total or not (rate := backlog.rate(now)):
        return 0
    computed = 0
    for instance in version.instances:
        prompts = [request.prompt.tokens for request in instance.streams.values() if request.prompt is not None]
        computed += max(prompts, default=0)
    return int((backlog.total - computed) / rate * 1e9)


def _count(version: Version) -> int:
    return sum(not (instance.over or instance.spec.passive) for instance in version.instances)


def _oldest_queued(version: Version, now: int) -> int:
    """Arrival time of the request that has been in the broker's queue the longest."""
    service = version.service
    if service.sequence_slots is not None:
        waiting = (sequence.requests[0].arrived for sequence in service.sequence_slots.backlog if sequence.requests)
        return min(waiting, default=now)
    arrivals = [request.arrived for request in version.suspects]
    if service.queue.count:
        arrivals += [request.arrived for request in service.queue.in_order()]
    return min(arrivals, default=now)


def _changes(state: State, version: Version) -> bool:
    model = state.models[version.model]
    return model.operation is not None or model.versions.get(version.number) is not version


def _loads(version: Version) -> bool:
    """True if an instance is loading, or waits to load or for memory."""
    loading = (_I.WAITING, _I.STARTING, _I.BACKOFF, _I.GOING_TO_SLEEP)
    return any(i.state in loading and not i.lost and not i.over for i in version.instances)


def _size(version: Version, group: ScaledGroup) -> int:
    return sum(sizes.belongs(spec, group) for spec in sizes.specs_of(version))


def _can_shrink(version: Version, scaler: Scaler) -> bool:
    return any(_size(version, group) > group.minimum for group in scaler.policy.groups)


def _read_leases(state: State, version: Version) -> None:
    """Reads the logs of leases, since leased requests are counted only then."""
    for instance in version.instances:
        if instance.lease:
            leases.ask_for_log(state, instance)


# ------------------------------------------------------------------------------------ changing


def join(state: State, version: Version, spec: InstanceSpec) -> Instance:
    """Adds an instance to a version that is READY, outside an operation. It is queued to load like all instances;
    `joined` processes the outcome. If it cannot load, it is removed and the version continues without it."""
    assert version.state is VersionState.READY, version.label
    assert not state.draining
    instance = Instance(spec, joining=True)
    version.instances.append(instance)
    state.loading.queue.append((version, instance))
    loading.start_waiting(state)
    return instance


def leave(state: State, version: Version, instance: Instance) -> None:
    """Removes an instance from a version that continues. It gets no new work, and its process ends when its batches,
    sequences and streams have. No operation may be waiting for the instance, and another one must serve."""
    operation = state.models[version.model].operation
    assert operation is None or instance not in operation.starting, instance.details()
    retirement.stop(state, version, instance, hurry=False)


def _grow(state: State, version: Version, scaler: Scaler, measured: Measured, now: int) -> None:
    """Adds an instance to the group that is smallest relative to its bounds."""
    groups = [group for group in scaler.policy.groups if not state.loading.forbids(group.specs[0])]
    room = [group for group in groups if _size(version, group) < group.maximum]
    if not room:
        return
    group = min(room, key=lambda group: _size(version, group) / group.maximum)
    count = _count(version)
    instance = join(state, version, sizes.next_spec(version, scaler.policy, group))
    scaler.has_grown(now)
    state.observers.scaled(version, 1)
    _, maximum = sizes.bounds(version, scaler.policy)
    limit = f"{_ms(scaler.policy.up_ns)} (scale_up_queue_ms)"
    backlog = version.service.prompts
    if backlog is not None and measured.prompts_wait_ns == measured.wait_ns:
        wait = f"prompts of about {backlog.total} tokens wait, {_ms(measured.wait_ns)} on average, more than {limit}"
    else:
        wait = f"requests waited {_ms(measured.wait_ns)} on average, more than {limit}, while all were busy"
    text = f"gets one more instance, '{instance.spec.name}' ({count + 1} of at most {maximum}): {wait}"
    state.log_version("info", f"{version.label} {text}", version, instance)


def _shrink(state: State, version: Version, scaler: Scaler, measured: Measured, now: int) -> None:
    """Removes the least useful instance."""
    served = [i for i in version.instances if not i.over]
    groups = [group for group in scaler.policy.groups if _size(version, group) > group.minimum]
    removable = [
        i
        for i in served
        if any(sizes.belongs(i.spec, group) for group in groups)
        and any(other.usable for other in served if other is not i)
    ]
    if not removable:
        return
    instance = min(removable, key=lambda i: _value(version, i))
    down_s = scaler.down_ns / 1e9
    leave(state, version, instance)
    scaler.has_shrunk(now)
    state.observers.scaled(version, -1)
    minimum, _ = sizes.bounds(version, scaler.policy)
    text = (
        f"needs one instance less, so '{instance.spec.name}' leaves ({_count(version)} remain, of at least {minimum}): "
        f"fewer were enough for {down_s:g} s (scale_down_secs), and {measured.busy:.2f} were busy on average"
    )
    state.log_version("info", f"{version.label} {text}", version, instance)


def _value(version: Version, instance: Instance) -> tuple[bool, bool, int, bool, bool, int]:
    """Sort key for removal. Removed first: an instance that does not serve, then one without sequences or streams, then
    an idle one, then the newest."""
    service = version.service
    serves = instance.state is _I.READY
    held = len(service.sequence_slots.at(instance)) if service.sequence_slots is not None else len(instance.streams)
    number = int(instance.spec.name.rpartition("_")[2])
    return serves, not instance.quarantined and serves, held, not instance.idle, bool(instance.lease), -number


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.4g} ms"
