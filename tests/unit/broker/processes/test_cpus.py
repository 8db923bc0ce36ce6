"""The available cores, read from trees like /sys, and their assignment to instances."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.broker.processes.cpus import HostPolicy, as_list, cpu_list, host_policy, quota, resolve, survey
from shmserve.core.policy import InstanceSpec
from shmserve.repo.compile import CoreSet, compile_instances
from shmserve.repo.config.schema import ModelConfig, ModelInstanceGroup
from shmserve.repo.rules.fields import unknown_policies
from tests.support.cases import cases


def tree(sys: Path, nodes: dict[int, str], gpus: dict[str, str] | None = None) -> Path:
    for node, cores in nodes.items():
        folder = sys / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    for pci, cores in (gpus or {}).items():
        folder = sys / "bus/pci/devices" / pci
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(cores + "\n")
    return sys


def model(*groups: ModelInstanceGroup) -> ModelConfig:
    return ModelConfig(name="m", instance_group=groups)


def group(count: int, name: str = "a", **more: str | bool) -> ModelInstanceGroup:
    return ModelInstanceGroup(name=name, kind="KIND_CPU", count=count, **more)  # type: ignore[arg-type]


def dealt(config: ModelConfig, cores: CoreSet) -> list[tuple[tuple[int, ...], int]]:
    return [(spec.cpus, spec.threads) for spec in compile_instances(config, cores)]


ONE = CoreSet(tuple(range(8)), (tuple(range(8)),))
TWO = CoreSet(tuple(range(8)), ((0, 1, 2, 3), (4, 5, 6, 7)))


def test_cores_nodes_policies_and_gpus_are_discovered(tmp_path: Path) -> None:
    sys = tree(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15", 2: ""}, {"0000:3b:00.0": "0-3,8-11", "0001:af:00.0": "0-15"})
    gpus = {0: "00000000:3B:00.0", 1: "0001:AF:00.0", 2: "0000:00:00.0"}
    found = survey({"cpu": (1,)}, gpus, sys=sys, cgroup=tmp_path / "none", usable=range(1, 16))
    assert found.usable == tuple(range(1, 16))
    assert found.nodes == ((1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    assert found.policies == {"cpu": (1,)}
    assert found.gpus == {0: (1, 2, 3, 8, 9, 10, 11), 1: (), 2: ()}
    assert found.quota == 0
    assert set(survey().usable) == os.sched_getaffinity(0)
    none = tmp_path / "none"
    assert survey(sys=sys, cgroup=none, usable=(5, 4)).nodes == ((4, 5),), "nodes without a usable core do not count"
    assert survey(sys=none, cgroup=none, usable=(1, 0)).nodes == ((0, 1),)


@cases(
    ("0::/", {}, 0),
    ("0::/", {"": "150000 100000"}, 2),
    ("0::/a/b", {"a": "400000 100000", "a/b": "max 100000"}, 4),
    ("0::/a/b", {"": "max 100000", "a": "400000 100000", "a/b": "50000 100000"}, 1),
    ("4:cpu:/a", {"": "100000 100000"}, 0),
    # Of version 1.
    ("4:cpu,cpuacct:/", {}, 0),
    ("4:cpu,cpuacct:/", {"cpu,cpuacct": -1}, 0),
    ("4:cpu,cpuacct:/", {"cpu,cpuacct": 150_000}, 2),
    ("4:cpu,cpuacct:/", {"cpu": 150_000}, 2),
    ("5:cpuset:/a\n4:cpu:/a/b", {"cpu": -1, "cpu/a": 400_000, "cpu/a/b": -1, "cpuset/a": 100_000}, 4),
    ("4:cpu,cpuacct:/a/b", {"cpu,cpuacct": -1, "cpu,cpuacct/a": 400_000, "cpu,cpuacct/a/b": 50_000}, 1),
    # In a container, the files are at the top.
    ("4:cpu,cpuacct:/docker/1f\n1:name=systemd:/docker/1f\n0::/x:y", {"cpu,cpuacct": 300_000}, 3),
)
def test_a_quota_of_control_groups(lines: str, limits: dict[str, str | int], wanted: int, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text(lines + "\n")
    for name, allowed in limits.items():
        folder = tmp_path / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(allowed, str):
            (folder / "cpu.max").write_text(allowed + "\n")
        else:
            (folder / "cpu.cfs_quota_us").write_text(f"{allowed}\n")
            (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert quota(tmp_path / "cgroup", tmp_path / "sys") == wanted


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cores(cores: set[int]) -> None:
    assert cpu_list(as_list(cores)) == tuple(sorted(cores))


def test_cores_of_host_policies_are_resolved(tmp_path: Path) -> None:
    sys = tree(tmp_path, {0: "0-3", 1: "4-7"})
    texts = ["a,cpu-cores=0-1,3", "b,numa-node=1", "c,numa-node=0", "c,cpu-cores=5", "a,cpu-cores=2"]
    found = resolve(map(host_policy, texts), sys=sys, usable=range(7))
    assert found == {"a": (2,), "b": (4, 5, 6), "c": (5,)}
    for policy, text in (
        (HostPolicy(cores=(1, 6, 8, 9)), "unusable cores: 6,8-9; usable cores: 0-5"),
        (HostPolicy(node=2), "NUMA node 2 has no usable cores; usable nodes: 0, 1"),
    ):
        with pytest.raises(ValueError, match=f"^host policy 'x': {text}$"):
            resolve([("x", policy)], sys=sys, usable=range(6))


def test_cores_are_divided_among_instances() -> None:
    assert compile_instances(model(group(1))) == (InstanceSpec("a_0"),), "without cores"
    assert dealt(model(group(1)), ONE) == [((), 8)]
    assert dealt(model(group(3)), ONE) == [((), 2)] * 3
    assert dealt(model(group(20)), ONE) == [((), 1)] * 20
    assert dealt(model(group(2), group(2, "spare", passive=True)), ONE) == [((), 4)] * 4
    assert dealt(model(group(2, passive=True)), ONE) == [((), 8)] * 2
    # Several nodes.
    first, second = TWO.nodes
    assert dealt(model(group(1)), TWO) == [((), 8)]
    assert dealt(model(group(2)), TWO) == [(first, 4), (second, 4)]
    assert dealt(model(group(3)), TWO) == [(first, 2), (second, 4), (first, 2)]
    uneven = CoreSet(tuple(range(8)), ((0, 1, 2, 3, 4, 5), (6, 7)))
    assert dealt(model(group(2)), uneven) == [((), 4)] * 2
    assert dealt(model(group(4)), uneven) == [(uneven.nodes[0], 3), ((6, 7), 1)] * 2
    # A quota.
    four = (0, 1, 2, 3)
    cores = CoreSet(tuple(range(8)), (tuple(range(8)),), {"cpu": four}, quota=3)
    for count, threads in ((1, 3), (2, 1), (8, 1)):
        assert dealt(model(group(count)), cores) == [(four, threads)] * count
    # Cores near to a GPU.
    cores = CoreSet(tuple(range(8)), TWO.nodes, {"gpu_2": (1,)}, {0: four, 1: (4, 5, 6, 7), 2: (4, 5), 3: ()})
    config = model(ModelInstanceGroup(name="g", kind="KIND_GPU", count=2, gpus=(0, 1, 2, 3)))
    found = [(spec.device, spec.cpus, spec.threads) for spec in compile_instances(config, cores)]
    assert found[::2] == found[1::2] == [(0, four, 2), (1, (4, 5, 6, 7), 2), (2, (1,), 1), (3, (), 4)]


def test_instances_get_the_cores_of_their_policy() -> None:
    cores = CoreSet(tuple(range(8)), TWO.nodes, {"cpu": (0, 1, 2, 3, 4, 5), "big": (6, 7)})
    config = model(group(3), group(1, "b", host_policy="big"), group(1, "c", host_policy="other"))
    assert dealt(config, cores) == [(cores.policies["cpu"], 2)] * 3 + [((6, 7), 2), ((), 8)]
    assert unknown_policies(config, cores.policies) == ("other",)
