"""Memory of instances, and the budgets for it: on the host, and on each GPU.

An instance is charged from the moment it may load until its process has ended: with the largest memory measured for
processes of its version or, while it loads, the largest measured during loading. Before the first measurement, an
estimate is charged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

from msgspec.structs import replace

from shmserve.core.events import Measured, Target
from shmserve.core.limits import ANY_GPU
from shmserve.core.policy import MemoryEstimate
from shmserve.core.records import Instance, Version
from shmserve.core.state import State
from shmserve.core.states import InstanceState, VersionState

_I = InstanceState

HOST = -2
"""The host as a place with memory. Other places are GPU numbers."""

BytesByPlace = Counter[int]
"""Keys: HOST or a GPU number."""


def budget_of(state: State, place: int) -> int:
    """The budget of a place, in bytes; 0: no limit."""
    if place == HOST:
        return state.limits.memory_budget
    budgets = dict(state.limits.gpu_budgets)
    return budgets.get(place, budgets.get(ANY_GPU, 0))


def setting_of(place: int) -> str:
    return "--model-memory-budget" if place == HOST else "--gpu-memory-budget"


def name_of(place: int) -> str:
    return "memory" if place == HOST else f"memory of GPU {place}"


def megabytes(size: int) -> str:
    return f"{size / 1e6:.3g} MB" if size < 1e9 else f"{size / 1e9:.3g} GB"


def estimate_of(target: Target, current: Version | None) -> MemoryEstimate:
    """The estimate for a new generation. A measurement of the current generation is better than a guess from the
    files."""
    if current is None or target.memory.configured or not current.sleep_state.host:
        return target.memory
    sleep_state = current.sleep_state
    return MemoryEstimate(max(sleep_state.host, sleep_state.host_peak), max(sleep_state.gpu, sleep_state.gpu_peak))


def charge_of(version: Version, instance: Instance) -> BytesByPlace:
    sleep_state = version.sleep_state
    loads = instance.state in (_I.WAITING, _I.STARTING, _I.ASLEEP)
    host, gpu = instance.memory
    host = max(host, sleep_state.host or sleep_state.memory.host, sleep_state.host_peak if loads else 0)
    charge = Counter({HOST: host})
    if instance.spec.on_gpu:
        charge[instance.spec.device] = max(
            gpu, sleep_state.gpu or sleep_state.memory.gpu, sleep_state.gpu_peak if loads else 0
        )
    return charge


def of_version(version: Version, held: Container[Instance]) -> BytesByPlace:
    return needed(version, [instance for instance in version.instances if instance in held])


def label_of(place: int) -> str:
    return "host" if place == HOST else f"gpu{place}"


def budgets(state: State) -> BytesByPlace:
    """The budgets of the host and of each GPU that instances have used."""
    devices = {instance.spec.device for instance in state.memory.holders if instance.spec.on_gpu}
    devices.update(gpu for gpu, _ in state.limits.gpu_budgets if gpu != ANY_GPU)
    return +Counter({place: budget_of(state, place) for place in (HOST, *devices)})


def used(state: State) -> BytesByPlace:
    return _total(state.memory.holders.items())


def _total(instances: Iterable[tuple[Instance, Version]]) -> BytesByPlace:
    total: BytesByPlace = Counter()
    for instance, version in instances:
        total.update(charge_of(version, instance))
    return total


def shortage(state: State, now_used: BytesByPlace) -> BytesByPlace:
    """Bytes above the budgets."""
    over: BytesByPlace = Counter()
    for place, size in now_used.items():
        budget = budget_of(state, place)
        if budget and size > budget:
            over[place] = size - budget
    return over


def measured(state: State, peer: int, event: Measured, now: int) -> None:
    known = state.instances.get(event.peer)
    if known is None:
        return
    version, instance = known
    state.memory.changed = True
    instance.memory = (event.host, event.gpu)
    version.sleep_state.measured(event.host, event.gpu, event.peak, instance.state is _I.READY)


# ------------------------------------------------------------------------------------ waiting for memory


def needed(version: Version, instances: Iterable[Instance]) -> BytesByPlace:
    """The memory needed by instances that are about to load."""
    return _total((instance, version) for instance in instances)


def needed_to_wake(version: Version) -> BytesByPlace:
    """The memory needed to wake a version, for which one instance is enough."""
    asleep = [one for one in version.instances if one.sleeping and not one.over and not one.spec.passive]
    return needed(version, asleep[:1])


def needed_to_load(version: Version) -> BytesByPlace:
    """The memory needed by the instances that an operation has added, which are loaded together."""
    added = [
        one
        for one in version.instances
        if one.state is _I.WAITING and not (one.loaded or one.joining or one.spec.passive)
    ]
    return needed(version, added)


def is_fixed(version: Version, instance: Instance) -> bool:
    """True if the instance never releases its memory for others."""
    return stays_loaded(version) and not (instance.over or instance.asleep_soon)


def stays_loaded(version: Version) -> bool:
    """True if the version never sleeps. A replaced generation may: ensemble runs that wait for memory may keep it in
    use."""
    return version.sleep_state.stays_loaded and version.state is not VersionState.UNLOADING


def guess_less(version: Version, place: int, size: int) -> None:
    """Reduces the estimate for an instance, which was too large to fit."""
    before = version.sleep_state.memory
    version.sleep_state.memory = replace(before, host=size) if place == HOST else replace(before, gpu=size)


def fixed(state: State, but: Version | None = None) -> BytesByPlace:
    """Memory of versions that stay loaded, except those of the same model as `but`, which make room for it."""
    return _total(
        (instance, version)
        for instance, version in state.memory.holders.items()
        if is_fixed(version, instance) and (but is None or version.model != but.model)
    )


def waits_for_memory(state: State, instance: Instance) -> bool:
    """True if the instance is asleep or waits to load, without a memory grant."""
    waits = instance.sleeping or instance.state is _I.WAITING
    return state.memory.limited and waits and instance not in state.memory.holders


def may_never_load(state: State, instance: Instance) -> bool:
    """True if it is an instance that was added for more throughput or could not load again, and that gets only memory
    that is free."""
    return state.memory.limited and (instance.joining or instance.lost) and instance not in state.memory.holders


def needed_by(state: State, version: Version) -> list[Version]:
    """The versions that have to load for a request: this one or, if it is an ensemble, the loading models for which it
    waits."""
    if version.service.graph is None:
        return [version]
    loading: dict[Version, None] = {}
    todo, seen = [version], {version}
    while todo:
        version = todo.pop()
        graph = version.service.graph
        for step in graph.steps if graph is not None else ():
            model = state.models.get(state.resolve(step.model, version.model))
            for member in model.versions.values() if model is not None else ():
                if member.state is not VersionState.LOADING or member in seen:
                    continue
                seen.add(member)
                if member.service.graph is not None:
                    todo.append(member)
                else:
                    loading[member] = None
    return list(loading)


def held_up_by(state: State, version: Version, stuck: Container[Instance]) -> Instance | None:
    """One of the instances in `stuck`, if this version needs the memory that their versions hold and cannot release."""
    if not state.memory.limited:
        return None
    need = needed_to_wake(version) or needed_to_load(version)
    taken: BytesByPlace = Counter()
    blocker = None
    for instance, other in state.memory.holders.items():
        blocking = next((one for one in other.instances if one in stuck), None)
        if blocking is not None or (other is not version and is_fixed(other, instance)):
            taken.update(charge_of(other, instance))
            blocker = blocker or blocking
    for place, size in need.items():
        budget = budget_of(state, place)
        if budget and size + taken[place] > budget:
            return blocker
    return None
