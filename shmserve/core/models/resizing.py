"""Adds instances to versions that are served, and removes them, one at a time and outside operations.

Invariant: no request, sequence or stream is lost. An instance gets work only once it is READY, and a leaving instance
finishes its work.
"""

from __future__ import annotations

from shmserve.core.models import loading, retirement
from shmserve.core.policy import InstanceSpec
from shmserve.core.records import Instance, Version
from shmserve.core.state import State
from shmserve.core.states import InstanceState, VersionState


def join(state: State, version: Version, spec: InstanceSpec) -> Instance:
    """Adds an instance to a version that is READY. It is queued to load like all instances; `State.joined` reports the
    outcome. If it cannot load, it is removed and the version continues without it."""
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


def finish_joins(state: State) -> None:
    """At the end of a turn: logs the outcome of added instances."""
    for version, instance in state.changes.joined:
        about = {"model": version.model, "version": version.number, "instance": instance.spec.name}
        if instance.state is InstanceState.FAILED:
            text = f"{version.label} continues without a new instance '{instance.spec.name}': {instance.reason}"
            if instance.retry_at:
                text += f"; next attempt in {(instance.retry_at - state.now) / 1e9:g} s at the earliest"
            state.log("error", text, **about)
        else:
            ready, wanted = version.counts
            text = f"instance '{instance.spec.name}' of {version.label} was added (READY {ready}/{wanted})"
            state.log("debug", text, **about)
    state.changes.joined.clear()
