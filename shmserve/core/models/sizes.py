"""The instances of versions that are scaled: which are added, and how many remain after a deployment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from shmserve.core.events import Target
from shmserve.core.policy import InstanceSpec, ScaledGroup, ScalingPolicy, thread_share
from shmserve.core.records import Version


def group_of(spec: InstanceSpec) -> str:
    return spec.name.rpartition("_")[0]


def belongs(spec: InstanceSpec, group: ScaledGroup) -> bool:
    first = group.specs[0]
    return (group_of(spec), spec.kind, spec.device) == (group.group, first.kind, first.device)


def free_name(taken: Iterable[str], group: str) -> str:
    """The first of `group`_0, `group`_1, ... that is not in use, not even by an instance that is about to end."""
    number = 0
    while f"{group}_{number}" in taken:
        number += 1
    return f"{group}_{number}"


def specs_of(version: Version) -> list[InstanceSpec]:
    """The specs of the version's current and future instances, without leaving ones."""
    return [instance.spec for instance in version.instances if not instance.over]


def kept(version: Version) -> list[InstanceSpec]:
    """The specs of the instances that a new generation keeps."""
    return [instance.spec for instance in version.instances if not (instance.over or instance.is_tentative)]


def bounds(version: Version, policy: ScalingPolicy) -> tuple[int, int]:
    """The minimum and maximum number of instances of the version, including groups that are not scaled."""
    fixed = sum(not (spec.passive or _is_scaled(spec, policy)) for spec in specs_of(version))
    return fixed + sum(group.minimum for group in policy.groups), fixed + sum(group.maximum for group in policy.groups)


def _is_scaled(spec: InstanceSpec, policy: ScalingPolicy) -> bool:
    return any(belongs(spec, group) for group in policy.groups)


def next_spec(version: Version, policy: ScalingPolicy, group: ScaledGroup) -> InstanceSpec:
    """The spec of one more instance of the group."""
    spec = _named(group, free_name({instance.spec.name for instance in version.instances}, group.group))
    specs = [*specs_of(version), spec]
    return replace(spec, threads=_threads(policy, spec, specs))


def _named(group: ScaledGroup, name: str) -> InstanceSpec:
    """The group's spec with this name: its cores are those of the instance with the same number in a full group."""
    number = int(name.rpartition("_")[2])
    return replace(group.specs[number % len(group.specs)], name=name)


def _threads(policy: ScalingPolicy, spec: InstanceSpec, specs: Iterable[InstanceSpec]) -> int:
    sharing = Counter(other.cpus for other in specs if not other.passive)
    cores = len(spec.cpus) or policy.cores
    return thread_share(cores, policy.quota, sharing[spec.cpus], sharing.total()) if policy.cores else spec.threads


def keep_size(target: Target, served: Version | None) -> Target:
    """The target with as many instances of each scaled group as the served version has now, within the bounds of the
    target. Instances keep their names."""
    policy = target.scaling
    if policy is None or served is None or served.scaler is None:
        return target
    present = kept(served)
    configured = {spec.name: spec for spec in target.instances}
    specs = [spec for spec in target.instances if not _is_scaled(spec, policy)]
    for group in policy.groups:
        names = [spec.name for spec in present if belongs(spec, group)]
        names.sort(key=lambda name: int(name.rpartition("_")[2]))
        wanted = len(names) or sum(belongs(spec, group) for spec in target.instances)
        wanted = min(max(wanted, group.minimum), group.maximum)
        del names[wanted:]
        while len(names) < wanted:
            names.append(free_name({*names, *(spec.name for spec in (*present, *specs))}, group.group))
        for name in names:
            spec = configured.get(name)
            specs.append(spec if spec is not None and belongs(spec, group) else _named(group, name))
    return replace(target, instances=tuple(replace(spec, threads=_threads(policy, spec, specs)) for spec in specs))
