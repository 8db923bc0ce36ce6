"""CPU cores that the server may use: NUMA nodes, host policies, cores near a GPU, and the CPU quota.

Everything is read once, at startup. `repo.compile` assigns cores to instances.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from shmserve.repo.compile import CoreSet

SYS = Path("/sys")
CGROUP = Path("/proc/self/cgroup")

_KEYS = ("cpu-cores", "numa-node")


class HostPolicy(Struct, frozen=True):
    """Values of --host-policy for one name. `cores` takes precedence over `node`."""

    cores: tuple[int, ...] = ()
    node: int | None = None


def survey(
    policies: Mapping[str, tuple[int, ...]] | None = None,
    gpus: Mapping[int, str] | None = None,
    *,
    sys: Path = SYS,
    cgroup: Path = CGROUP,
    usable: Collection[int] | None = None,
) -> CoreSet:
    """`policies`: the cores of each host policy. `gpus`: PCI IDs by GPU number."""
    ours = usable_cores(usable)
    local = {gpu: local_cores(pci, sys, ours) for gpu, pci in (gpus or {}).items()}
    nodes = tuple(cores for _, cores in sorted(numa_nodes(sys, ours).items()))
    return CoreSet(ours, nodes, dict(policies or {}), local, quota(cgroup, sys))


def usable_cores(cores: Collection[int] | None = None) -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0) if cores is None else cores))


def numa_nodes(sys: Path, usable: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Usable cores per node, without nodes that have none. If the kernel lists no nodes, all cores are in node 0."""
    nodes = {}
    for path in (sys / "devices/system/node").glob("node[0-9]*/cpulist"):
        cores = tuple(core for core in cpu_list(path.read_text()) if core in usable)
        if cores:
            nodes[int(path.parent.name.removeprefix("node"))] = cores
    return nodes or {0: tuple(sorted(usable))}


def local_cores(pci: str, sys: Path, usable: Collection[int]) -> tuple[int, ...]:
    """The usable cores near a PCI device, whose ID may have the driver's form, "00000000:3B:00.0".

    Returns () if they are unknown, and if all cores are near, as binding would have no effect.
    """
    domain, colon, rest = pci.lower().partition(":")
    path = sys / "bus/pci/devices" / (domain[-4:] + colon + rest) / "local_cpulist"
    try:
        near = cpu_list(path.read_text())
    except OSError:
        return ()
    local = tuple(core for core in near if core in usable)
    return () if len(local) == len(usable) else local


def quota(cgroup: Path = CGROUP, sys: Path = SYS) -> int:
    """The CPU quota of the enclosing control groups (version 1 or 2) in cores, rounded up; 0: no limit. Container
    runtimes set such quotas."""
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return 0
    top = sys / "fs/cgroup"
    limits: list[int] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            limits += _limits(top, group, _limit)
        elif "cpu" in controllers.split(","):  # version 1 has a tree for each set of controllers
            mounts = [top / name for name in dict.fromkeys((controllers, "cpu")) if (top / name).is_dir()]
            for mount in mounts[:1]:
                limits += _limits(mount, group, _limit_of_version_1)
    return min(limits, default=0)


def _limits(top: Path, group: str, limit: Callable[[Path], int]) -> list[int]:
    """The limits of the group and its ancestors. The root group has none, and a container cannot see the ancestors of
    its group."""
    path = top / group.strip("/")
    limits: list[int] = []
    while True:
        try:
            limits.append(limit(path))
        except OSError:
            limits.append(0)
        if path == top or top not in path.parents:
            return [cores for cores in limits if cores]
        path = path.parent


def _limit(group: Path) -> int:
    allowed, period = (group / "cpu.max").read_text().split()
    return 0 if allowed == "max" else math.ceil(int(allowed) / int(period))


def _limit_of_version_1(group: Path) -> int:
    allowed = int((group / "cpu.cfs_quota_us").read_text())  # -1: no limit
    return 0 if allowed < 0 else math.ceil(allowed / int((group / "cpu.cfs_period_us").read_text()))


def cpu_list(text: str) -> tuple[int, ...]:
    """`0-3,8` -> (0, 1, 2, 3, 8): the list format of the kernel and of --host-policy. Empty text: ()."""
    cores: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) > 1 << 20:
            raise ValueError(f"'{part}' is not a core or a range of cores")
        if int(last or first) < int(first):
            raise ValueError(f"range '{part}' ends before it begins")
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))


# ------------------------------------------------------------------------------------------- host policies


def host_policy(text: str) -> tuple[str, HostPolicy]:
    """Parses `cpu,cpu-cores=0-3,8` or `gpu_0,numa-node=1`."""
    name, _, value = text.partition(",")
    key, equals, value = value.partition("=")
    if not name or not equals or key not in _KEYS:
        raise ValueError(f"'{text}' is not NAME,cpu-cores=LIST with a LIST such as 0-3,8, or NAME,numa-node=N")
    if key == "numa-node":
        if not value.isdecimal():
            raise ValueError(f"'{value}' is not a NUMA node number")
        return name, HostPolicy(node=int(value))
    cores = cpu_list(value)
    if not cores:
        raise ValueError(f"'{text}' contains no core")
    return name, HostPolicy(cores=cores)


def resolve(
    policies: Iterable[tuple[str, HostPolicy]], *, sys: Path = SYS, usable: Collection[int] | None = None
) -> dict[str, tuple[int, ...]]:
    """The cores of each policy. If a policy is repeated, its last cores and its last node count."""
    ours = usable_cores(usable)
    merged: dict[str, HostPolicy] = {}
    for name, policy in policies:
        before = merged.get(name, HostPolicy())
        node = before.node if policy.node is None else policy.node
        merged[name] = HostPolicy(policy.cores or before.cores, node)
    nodes = numa_nodes(sys, ours)
    return {name: _cores_of(name, policy, nodes, ours) for name, policy in merged.items()}


def _cores_of(
    name: str, policy: HostPolicy, nodes: Mapping[int, tuple[int, ...]], ours: tuple[int, ...]
) -> tuple[int, ...]:
    if not policy.cores:
        assert policy.node is not None
        if policy.node not in nodes:
            text = f"host policy '{name}': NUMA node {policy.node} has no usable cores; usable nodes:"
            raise ValueError(f"{text} {', '.join(map(str, sorted(nodes)))}")
        return nodes[policy.node]
    wrong = [core for core in policy.cores if core not in ours]
    if wrong:
        text = f"host policy '{name}': unusable cores: {as_list(wrong)}"
        raise ValueError(f"{text}; usable cores: {as_list(ours)}")
    return policy.cores


def as_list(cores: Collection[int]) -> str:
    """(0, 1, 2, 3, 8) -> `0-3,8`."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and parts[-1][1] == core - 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
