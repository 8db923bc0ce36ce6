"""Readiness of ensembles: an ensemble is READY when the models of its steps are READY and compatible.

Invariant: all ensembles are evaluated from scratch whenever any model changes (`State.readiness_changed`), so no change
can be missed. The shell, which has the configurations, checks whether shapes are compatible (Compose, Composed), once
for each set of members.
"""

from __future__ import annotations

from shmserve.core.effects import Compose
from shmserve.core.events import Composed
from shmserve.core.models import deployment
from shmserve.core.records import Version
from shmserve.core.state import State
from shmserve.core.states import UNLOADED, VersionState

_V = VersionState


def update(state: State) -> None:
    """Evaluates all ensembles until nothing changes, because some are steps of others."""
    while state.readiness_changed:
        state.readiness_changed = False
        for version in list(state.ensembles):
            if version in state.ensembles:
                _evaluate(state, version)


def composed(state: State, peer: int, event: Composed, now: int) -> None:
    """Handles the shell's response: whether the models of the steps are compatible."""
    for version in list(state.ensembles):
        if version.source == event.source and version.compose_number == event.number:
            if event.problem:
                members = version.members
                _set_unavailable(state, version, event.problem)
                version.members = members  # do not ask again
            else:
                _set_ready(state, version, now)


def _evaluate(state: State, version: Version) -> None:
    assert version.service.graph is not None
    ready: list[Version] = []
    for step in version.service.graph.steps:
        member, why, recovers = _member(state, state.resolve(step.model, version.model), step.version)
        if member is None:
            cycle = _cycle(state, version)
            if cycle:
                _set_unavailable(state, version, f"ensemble '{version.model}' depends on itself: {cycle}")
            elif why:
                text = f"ensemble '{version.model}' depends on '{step.model}' which has no loaded version"
                _set_unavailable(state, version, f"{text}{why}", recovers)
            elif version.state is not _V.LOADING:
                _set_unavailable(state, version, f"model '{step.model}' of a step is being loaded", True)
            return
        ready.append(member)
    members = tuple(ready)
    _set_decoupled(state, version, members)
    if members != version.members:
        version.members = members
        state.cache.purge(version)
        version.compose_number = state.next_number()
        state.effects.append(Compose(version.source, version.compose_number))


def _set_decoupled(state: State, version: Version, members: tuple[Version, ...]) -> None:
    """An ensemble is decoupled if one of its steps is."""
    assert version.policy is not None
    decoupled = version.policy.decoupled or any(member.service.decoupled for member in members)
    if decoupled != version.service.decoupled:
        version.apply_policy(version.policy, state.limits, decoupled)
        state.cache.purge(version)
        state.readiness_changed = True


def _member(state: State, name: str, number: int) -> tuple[Version | None, str, bool]:
    """The version that runs a step; or None, the reason ("": it is loading), and whether it will recover by itself."""
    model = state.models.get(name)
    if model is None:
        if name in state.namesakes:
            return None, ": several namespaces have it, but not that of the ensemble", False
        return None, ": no such model, or it is not loaded yet", False
    version = model.versions.get(number) if number else model.default()
    if version is not None and version.state is _V.READY:
        return version, "", False
    if model.operation is not None and not model.unloading:
        return None, "", True
    candidates = [version] if version is not None else [] if number else list(model.versions.values())
    if any(other.state is _V.LOADING for other in candidates):
        return None, "", True
    recovers = any(other.will_recover for other in candidates)
    reasons = [other.reason for other in candidates if other.reason not in ("", UNLOADED)] or [model.reason]
    if reasons[0]:
        return None, f". Model '{name}' loading failed with error: {reasons[0]}", recovers
    return None, f": it has no version {number}" if number and version is None else ": it is unloaded", recovers


def _cycle(state: State, version: Version) -> str:
    """Ensembles that need each other would wait forever. Returns the path from this one to itself, or ""."""
    service = version.service
    assert service.graph is not None
    way, seen = [version.model], {version.model}
    todo = [(state.resolve(step.model, version.model), way) for step in service.graph.steps]
    while todo:
        name, way = todo.pop()
        if name == version.model:
            return " -> ".join([*way, name])
        model = state.models.get(name)
        if name in seen or model is None:
            continue
        seen.add(name)
        for other in (*model.versions.values(), *model.coming.values()):
            if other in state.ensembles and other.service.graph is not None:
                steps = other.service.graph.steps
                todo += [(state.resolve(step.model, name), [*way, name]) for step in steps]
    return ""


def _set_ready(state: State, version: Version, now: int) -> None:
    if version.state is _V.READY:
        return
    loading = version.state is _V.LOADING
    version.move(_V.READY)
    version.member_recovering = False
    model = state.models[version.model]
    if loading:
        version.took_ns = max(now - version.began, 1)
        state.observers.loaded(model, version)
    state.refresh(version.model)
    text = f"{version.label} is READY with {len(version.members)} step(s)"
    state.log_version("debug" if loading else "info", text, version)
    deployment.may_be_ready(state, version)


def _set_unavailable(state: State, version: Version, reason: str, recovers: bool = False) -> None:
    version.members, version.compose_number = (), 0
    if recovers != version.member_recovering:
        version.member_recovering = recovers
        state.readiness_changed = True
    if version.state is _V.UNAVAILABLE:
        version.explain(reason)
        return
    model = state.models[version.model]
    if version.state is _V.LOADING:
        state.observers.load_failed(model)
    version.move(_V.UNAVAILABLE, reason)
    state.refresh(version.model)
    if model.versions.get(version.number) is version:
        state.log_version("error", f"{version.label} is UNAVAILABLE: {reason}", version)
    else:  # another generation is served, and continues
        state.ensembles.pop(version, None)
    deployment.has_failed(state, version, reason)
