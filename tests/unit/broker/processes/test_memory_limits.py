"""Memory limits: which processes are checked when, and what is written to cgroups; the memory measured for budgets.

Cgroups are plain directories with the kernel's files; no kernel enforces them.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from shmserve.broker.processes import cgroups
from shmserve.broker.processes.cgroups import CgroupsUnavailable, ControlGroups
from shmserve.broker.processes.memory_limits import GPU_SETTINGS, NEAR_S, POLL_S, MemoryLimits
from shmserve.broker.processes.memory_meter import MIN_CHANGE, MemoryMeter
from shmserve.broker.processes.process_memory import ProcessMemory
from shmserve.broker.processes.reader import PeriodicReader
from shmserve.broker.processes.workers import WorkerResources, resources_of
from shmserve.core.events import Measured
from shmserve.core.limits import Limits
from shmserve.protocol.messages import Map
from shmserve.repo.config.schema import ModelConfig, ModelParameter
from shmserve.system import procfs
from tests.support.cases import cases
from tests.support.core.policies import plain
from tests.support.core.world import World
from tests.support.manual_loop import ManualLoop, ThreadedLoop

MIB = 1 << 20


class Place:
    """A loop, the memory of each pid, and the killed processes."""

    def __init__(self, groups: ControlGroups | None = None, **more: Any) -> None:
        self.loop = ManualLoop()
        self.used: dict[int, int] = {}
        self.killed: list[tuple[int, str]] = []
        self.memory = MemoryLimits(
            self.loop, lambda *what: self.killed.append(what), lambda pid: self.used[pid], groups, **more
        )


@cases(
    ({}, "of private memory, limit 100 MiB (--instance-memory-limit, memory_limit_mb)"),
    (
        {"what": "GPU memory", "settings": GPU_SETTINGS},
        "of GPU memory, limit 100 MiB (--instance-gpu-memory-limit, gpu_memory_limit_mb)",
    ),
)
def test_only_the_process_over_its_limit_is_killed(more: dict[str, Any], text: str) -> None:
    place = Place(**more)
    place.memory.started(1, 101, 100 * MIB)
    place.memory.started(2, 102, 300 * MIB)
    place.memory.started(3, 103, 0)
    place.used = {101: 10 * MIB, 102: 200 * MIB}
    assert place.loop.fire() == POLL_S
    place.used[101] = 101 * MIB
    assert place.loop.fire() == POLL_S
    assert place.killed == [(1, f"it uses 101 MiB {text}")]
    del place.used[101]
    place.loop.fire()
    assert len(place.killed) == 1
    # Processes near their limit are polled more often.
    for used, pause in ((240, POLL_S), (240, NEAR_S), (180, NEAR_S), (180, POLL_S)):
        place.used[102] = used * MIB
        assert place.loop.fire() == pause


def test_without_limits_memory_is_not_polled() -> None:
    place = Place()
    place.memory.started(1, 101, 0)
    assert not place.loop.timers
    place.memory.started(2, 102, MIB)
    assert place.memory.ended(2) == ""
    place.loop.fire()
    assert not place.loop.timers
    place.memory.started(3, 103, MIB)
    (timer,) = place.loop.timers
    place.memory.close()
    assert timer.cancelled


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's cgroup, delegated by systemd. Directories that contain files can be removed, as in the kernel's file
    system."""
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"1")
    monkeypatch.setattr(Path, "rmdir", lambda path: shutil.rmtree(path))
    folder = tmp_path / "shmserve.service"
    folder.mkdir()
    (folder / "cgroup.controllers").write_text("cpu memory pids\n")
    (folder / "cgroup.procs").write_text(f"{os.getpid()}\n")
    return folder


def events(folder: Path, **counts: int) -> None:
    (folder / "memory.events").write_text("".join(f"{key} {value}\n" for key, value in counts.items()))


def test_a_control_group_enforces_the_limit_and_reports_oom_kills(top: Path, caplog: pytest.LogCaptureFixture) -> None:
    (top / "instance-3").mkdir()  # left by a server that was killed
    place = Place(ControlGroups.take_over(top))
    assert not (top / "instance-3").exists()
    assert (top / "server" / "cgroup.procs").read_text() == str(os.getpid())
    assert (top / "cgroup.subtree_control").read_text() == "+memory"
    group = place.memory.group(7, 64 * MIB)
    assert group is not None
    place.memory.started(7, 107, 64 * MIB)
    assert not place.loop.timers, "what the kernel keeps to is not watched"
    folder = top / "instance-7"
    assert group.processes == folder / "cgroup.procs"
    assert (folder / "memory.max").read_text() == str(64 * MIB)
    events(folder, low=0, high=0, max=12, oom=1, oom_kill=1)
    text = "it exceeded its memory limit of 64 MiB (--instance-memory-limit, memory_limit_mb)"
    assert place.memory.ended(7) == text
    assert not folder.exists()
    # An exit for another reason, such as the end of a service that exceeds its limit as a whole.
    for counts in ({}, {"oom": 0, "oom_kill": 0}, {"oom": 0, "oom_kill": 1}):
        assert place.memory.group(7, MIB) is not None
        events(folder, **counts)
        assert place.memory.ended(7) == ""
    folder.mkdir()
    assert place.memory.group(7, MIB) is None
    assert "polling its memory instead" in caplog.text
    place.memory.started(7, 107, MIB)
    assert place.loop.timers


def test_a_group_that_is_still_in_use_is_removed_later(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(ControlGroups.take_over(top))
    place.memory.group(7, MIB)
    (top / "instance-7" / "cgroup.kill").write_text("")
    monkeypatch.setattr(Path, "rmdir", Mock(side_effect=OSError(16, "Device or resource busy")))
    place.memory.ended(7)
    assert (top / "instance-7" / "cgroup.kill").read_text() == "1", "what the model has left running ends, too"
    monkeypatch.setattr(Path, "rmdir", lambda path: shutil.rmtree(path))
    assert place.loop.fire() == POLL_S
    assert not (top / "instance-7").exists()
    assert not place.loop.timers


@cases(
    (lambda top: (top / "cgroup.controllers").write_text("cpu pids\n"), "does not have the memory controller"),
    (lambda top: (top / "cgroup.controllers").unlink(), "cannot read the control group of this process: No such file"),
    (lambda top: (top / "server").write_text(""), "below that of this service: File exists"),
)
def test_unusable_control_groups_are_refused_with_the_reason(spoil: Callable[[Path], Any], why: str, top: Path) -> None:
    spoil(top)
    with pytest.raises(CgroupsUnavailable, match=why):
        ControlGroups.take_over(top)


def test_a_control_group_that_is_not_delegated_is_not_used(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getxattr", Mock(side_effect=OSError(61, "No data available")))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(CgroupsUnavailable, match="is not delegated to it"):
        ControlGroups.take_over(top)
    assert not (top / "server").exists()


def test_the_own_control_group_is_found(tmp_path: Path) -> None:
    proc, mounts = tmp_path / "cgroup", tmp_path / "mounts"
    proc.write_text("4:memory:/x\n0::/system.slice/shmserve.service\n")
    mounts.write_text("cgroup /sys/fs/cgroup/memory cgroup rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n")
    assert cgroups.own(proc, mounts) == Path("/sys/fs/cgroup/unified/system.slice/shmserve.service")
    mounts.write_text("")
    with pytest.raises(CgroupsUnavailable, match="not mounted"):
        cgroups.own(proc, mounts)
    proc.write_text("4:memory:/x\n")
    with pytest.raises(CgroupsUnavailable, match="no cgroup v2"):
        cgroups.own(proc, mounts)


def test_model_parameters_override_the_limits_of_the_server() -> None:
    def of(**parameters: str) -> WorkerResources:
        said = {key: ModelParameter(string_value=value) for key, value in parameters.items()}
        return resources_of(
            ModelConfig(name="m", parameters=said), Path("/models/m"), WorkerResources(5 * MIB, unpacked="/cache")
        )

    assert of() == WorkerResources(5 * MIB, "", "/cache")
    assert of(memory_limit_mb="7") == WorkerResources(7 * MIB, "", "/cache")
    assert of(memory_limit_mb="0") == WorkerResources(0, "", "/cache")
    assert of(gpu_memory_limit_mb="5").gpu_memory == 5 * MIB
    assert of(EXECUTION_ENV_PATH="$$TRITON_MODEL_DIRECTORY/env").environment == "/models/m/env"
    assert of(EXECUTION_ENV_PATH="/opt/env").environment == "/opt/env"


def test_the_memory_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of its own, without what it shares; 0 for a process that has ended."""
    before, peak = procfs.anonymous_bytes(os.getpid())
    own = procfs.own_bytes(os.getpid())
    # Not of the heap, which may have as much free memory from earlier tests.
    block = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    np.frombuffer(block, np.uint8).fill(1)
    after, after_peak = procfs.anonymous_bytes(os.getpid())
    assert abs(after - before - len(block)) < 8 * MIB
    assert abs(procfs.own_bytes(os.getpid()) - own - len(block)) < 8 * MIB
    assert peak >= before
    block.close()
    _, still = procfs.anonymous_bytes(os.getpid())
    assert still >= after_peak - 8 * MIB, "the peak stays"
    assert (procfs.anonymous_bytes(2**22 + 1), procfs.own_bytes(2**22 + 1)) == ((0, 0), 0)
    # A process whose peak was 80 MB exits after the first file was read.
    files = {
        "smaps_rollup": b"...\nPss_Anon: 70000 kB\nAnonymous: 72000 kB\n",
        "status": b"...\nVmHWM: 80000 kB\nVmRSS: 9000 kB\nRssAnon: 4000 kB\n",
    }
    monkeypatch.setattr(procfs, "_read", lambda pid, name: files[name])
    assert procfs.anonymous_bytes(1) == (70_000 << 10, 73_000 << 10)
    files["status"] = b"...\nState: Z (zombie)\n"
    assert procfs.anonymous_bytes(1) == (70_000 << 10, 70_000 << 10)


def test_shared_pages_count_proportionally(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is measured when it has loaded its model; until then its resident memory is shown."""
    texts = {"smaps_rollup": b"...\nRss: 9000 kB\nPss: 3000 kB\nPss_Anon: 2000 kB\n"}
    monkeypatch.setattr(procfs, "_read", lambda pid, name: texts.get(name) or Path(f"/proc/{pid}/{name}").read_bytes())
    pid, loop = os.getpid(), ThreadedLoop()
    memory = ProcessMemory(loop, lambda: [pid])
    assert memory.bytes_of(pid) == pytest.approx(procfs.usage(pid).resident_bytes, rel=0.5)
    memory.loaded(pid)
    loop.run_one()
    assert memory.bytes_of(pid) == 3000 * 1024
    memory.close()


def test_workers_are_measured_and_changes_reported() -> None:
    """All workers are represented by this process."""
    world = World(Limits(memory_budget=1 << 50))  # more than this process has
    world.deploy(plain(), 2)
    first, second = world.workers
    segment = (first << 32) + 1
    world.turn([(first, Map(segment, 5 * MIB, None, "uid:1000"))])

    reported, loop = list[Measured](), ThreadedLoop()
    meter = MemoryMeter(loop, world.core.state, lambda peer: os.getpid(), lambda pid: 7, reported.append)
    meter.measure()
    loop.run_one()
    one, other = reported
    assert {one.peer, other.peer} == {first, second}
    assert abs(one.host - other.host - 5 * MIB) < MIB, "what it owns in shared memory counts"
    assert one.peak >= one.host
    assert (one.gpu, other.gpu) == (0, 0), "they are not on a GPU"
    world.turn([(0, one), (0, other)])
    size = 16 * MIN_CHANGE
    # Not from malloc, which may reuse memory that was freed before.
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(bytes(size))
        meter.measure()
        loop.run_one()
    assert reported[2].host >= one.host + size // 2
    meter.close()
    for _, instance in world.core.state.instances.values():
        assert instance.memory[0] > 5 * MIB


def test_a_failed_reading_is_raised_and_repeated() -> None:
    loop, results = ThreadedLoop(), list[int]()
    works: list[Callable[[], int]] = [lambda: 1 // 0, lambda: 2]
    reader = PeriodicReader(loop, "test", lambda: works.pop(0), results.append, lambda: 3.0)
    reader.read()
    with pytest.raises(ZeroDivisionError):
        loop.run_one()
    assert loop.fire() == 3.0
    loop.run_one()
    assert results == [2]
    reader.close()
