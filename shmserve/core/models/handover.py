"""Handover at a restart: requests that the old process has not started move to the new one; the rest has
--exit-timeout-secs to finish.

A worker reads its messages only between two batches, so a healthy worker answers Withdraw before it starts its waiting
batch. A hanging worker does not: after RECALL_NS its waiting requests are taken back without a reply, and it is killed
if it starts them later.
"""

from __future__ import annotations

from shmserve.core.batching import dispatch, leases
from shmserve.core.exit import exit
from shmserve.core.records import Instance, Version
from shmserve.core.state import State, Timer
from shmserve.core.states import InstanceState, RequestState
from shmserve.core.termination import expect_end, kill

RECALL_NS = 1_000_000_000
"""How long a worker has to report the requests that it has not started. Much longer than a message takes."""


def process(state: State, now: int) -> None:
    """Processes, at the end of a turn, replaced versions and instances, and models unloaded by force."""
    changes = state.changes
    while changes.replaced_instances:
        version, instance = changes.replaced_instances.pop()
        instance.retiring = True
        _limit(state, version, instance, now)
    while changes.replaced_versions:
        version, successor = changes.replaced_versions.pop()
        _replace(state, version, successor, now)
    while changes.forced_unloads:
        _end(state, changes.forced_unloads.pop())


# ------------------------------------------------------------------------------------ restart


def _replace(state: State, old: Version, new: Version, now: int) -> None:
    """A new generation takes over. Queued requests stay with the version that validated them if the policies
    differ, and always for sequences and ensembles."""
    before = old.service
    if before.sequence_slots is None and before.graph is None and old.policy == new.policy:
        old.successor = new
        moved = [*new.service.take_over(before), *old.suspects]
        new.suspects.extend(old.suspects)
        old.suspects.clear()
        for request in moved:
            request.taken_over(new)
        new.service.split_order(before, new)
        exit.respond_in_order(state, old)
        state.to_dispatch[new] = None
    for instance in old.instances:
        if instance.peer:
            _limit(state, old, instance, now)


def _limit(state: State, version: Version, instance: Instance, now: int) -> None:
    expect_end(state, instance, state.limits.exit_ns)
    if instance.waiting is not None and (instance.retiring or version.successor is not None):
        dispatch.recall(state, instance, instance.waiting)
        state.set_timer(now + RECALL_NS, Timer.RECALL, instance)


def recall_over(state: State, version: Version, instance: Instance, now: int) -> None:
    """The recall has timed out: takes back the requests that the worker has not returned."""
    batch = instance.waiting
    if batch is None or not batch.recalled or instance.state is InstanceState.KILLED:
        return
    for request in batch.requests():
        if request.state is RequestState.SENT:
            instance.revoked.add(request.number)
            dispatch.take_out(state, version, instance, batch, request)
    state.to_dispatch[version] = None


def overdue(state: State, version: Version, instance: Instance, now: int) -> None:
    """The grace period for the batch or leased request that was running when the instance was replaced is over. A batch
    that started since then gets another grace period."""
    limit_ns = state.limits.exit_ns
    limit = f"{limit_ns / 1e9:g} s (--exit-timeout-secs)"
    if not instance.peer or not instance.due or now < instance.due or instance.state is InstanceState.KILLED:
        return
    if instance.state is InstanceState.GOING_TO_SLEEP:
        kill(state, version, instance, f"it was idle and did not exit within {limit}")
        return
    running = instance.running
    old = instance.streams or (running is not None and running.began <= instance.due - limit_ns)
    if not old and not instance.lease and instance.state is not InstanceState.STOPPING:
        expect_end(state, instance, max(limit_ns, RECALL_NS))
        return
    text = (
        f"{version.label}: instance '{instance.spec.name}' was restarted while it ran this request, which did not "
        f"finish within {limit}"
    )
    for request in [*(running.requests() if running is not None else ()), *instance.streams.values()]:
        exit.fail_early(state, request, "MODEL_FAILED", text)
    leases.fail(state, instance, "MODEL_FAILED", text)
    kill(state, version, instance, f"it was restarted and did not exit within {limit}")


# ------------------------------------------------------------------------------------ unload by force


def _end(state: State, version: Version) -> None:
    """Fails all requests of the version and kills its processes."""
    service = version.service
    text = f"{version.label} was unloaded by force before this request completed"
    for request in list(state.requests.values()):
        chain = state.runs.get(request.number)
        if request.version is version or (chain is not None and version in chain.members.values()):
            exit.fail_early(state, request, "UNAVAILABLE", text)
    if service.sequence_slots is not None:
        service.sequence_slots.lose(None, text)
    for instance in version.instances:
        leases.fail(state, instance, "UNAVAILABLE", text)
        if instance.peer and instance.state in (InstanceState.READY, InstanceState.STOPPING):
            kill(state, version, instance, "its model was unloaded by force")
    state.to_dispatch[version] = None
