"""Measuring the memory of workers for the budgets."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmserve.broker.processes.memory_meter import MIN_CHANGE, MemoryMeter
from shmserve.broker.processes.process_memory import ProcessMemory
from shmserve.broker.processes.reader import PeriodicReader
from shmserve.core.events import Measured
from shmserve.core.limits import Limits
from shmserve.protocol.messages import Map
from shmserve.system import procfs
from tests.support.core.policies import plain
from tests.support.core.world import World
from tests.support.manual_loop import ThreadedLoop

MIB = 1 << 20


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
