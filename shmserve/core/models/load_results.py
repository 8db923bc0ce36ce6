"""The results of loads: a version has loaded, or an instance has failed to load, and is tried again or fails its
version."""

from __future__ import annotations

from typing import Any

from shmserve.core.models import deployment, retirement
from shmserve.core.records import Instance, Version
from shmserve.core.state import State, Timer
from shmserve.core.states import InstanceState, VersionState

_I, _V = InstanceState, VersionState


def version_loaded(state: State, version: Version, now: int) -> None:
    version.move(_V.READY)
    version.took_ns = max(now - version.began, 1)
    state.observers.loaded(state.models[version.model], version)
    state.refresh(version.model)
    lost = [instance for instance in version.instances if instance.lost]
    text = f"{version.label} is READY with {len(version.instances) - len(lost)} instance(s)"
    if lost:
        text += f", and without {len(lost)}: {lost[0].reason}"
    level = "warning" if lost else "debug"
    state.log_version(level, text, version)


def failed_to_load(state: State, version: Version, instance: Instance, reason: str, now: int) -> None:
    """Handles the failed load of an instance that has never been READY. Only a version that is loading fails because
    of it, since it needs all of its instances."""
    instance.explain(reason)
    if version.state is not _V.LOADING:
        _has_failed(state, instance)
        version.instances.remove(instance)
        if version.state is _V.UNAVAILABLE:  # its GPU had been unhealthy
            version.explain(version.degraded_reason or reason)
            state.log("error", f"{version.label} is UNAVAILABLE: {reason}", **log_fields(version, instance))
        deployment.has_failed(state, version, reason, instance)
    elif version.retries < state.limits.load_retries:
        version.retries += 1
        text = f"{version.label} failed to load and will be retried (--model-load-retry-count): {reason}"
        state.log("warning", text, **log_fields(version, instance))
        back_off(state, version, instance, state.limits.backoff_ns, now)
    else:
        give_up(state, version, instance, reason)


def cannot_fit(state: State, version: Version, reason: str, now: int) -> None:
    """There is not enough memory for its instances that wait to load for the first time."""
    waiting = [one for one in version.instances if one.state is _I.WAITING and not one.loaded]
    for instance in waiting:
        if instance.state is not _I.WAITING:  # the version has already failed because of an earlier instance
            break
        if version.state is _V.LOADING:
            give_up(state, version, instance, reason)
        else:
            failed_to_load(state, version, instance, reason, now)
    version.settle_sleep()


def _has_failed(state: State, instance: Instance) -> None:
    instance.move(_I.FAILED)
    state.memory.free(instance)


def give_up(state: State, version: Version, instance: Instance, reason: str) -> None:
    """The version fails to load, because it needs all of its instances."""
    instance.explain(reason)
    _has_failed(state, instance)
    fail_version(state, version, instance, reason)
    for other in list(version.instances):
        retirement.stop(state, version, other)
    version.idle.clear()
    deployment.has_failed(state, version, reason)


def fail_version(state: State, version: Version, instance: Instance, reason: str) -> None:
    """Counts and logs the failed load. `instance`: the one that did not load."""
    model = state.models[version.model]
    state.observers.load_failed(model)
    version.move(_V.UNAVAILABLE, reason)
    state.refresh(version.model)
    if model.versions.get(version.number) is version:
        state.log("error", f"{version.label} is UNAVAILABLE: {reason}", **log_fields(version, instance))


def back_off(state: State, version: Version, instance: Instance, pause: int, now: int) -> None:
    instance.move(_I.BACKOFF)
    state.memory.holders[instance] = version
    instance.load_error = ""
    instance.retry_at = now + pause
    state.set_timer(instance.retry_at, Timer.RETRY, instance)


def log_fields(version: Version, instance: Instance) -> dict[str, Any]:
    """Describes the instance, with the model's traceback if it failed to load, otherwise with the worker's last
    output."""
    fields: dict[str, Any] = {"model": version.model, "version": version.number, "instance": instance.spec.name}
    if version.traceback:
        more = {"traceback": version.take_traceback()}
    else:
        more = {"last_words": instance.last_words}
    return fields | {name: text for name, text in more.items() if text}
