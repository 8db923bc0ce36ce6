"""Values from /proc."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from shmserve.system import procfs
from tests.support.patience import PATIENCE_S


def test_the_memory_and_the_cores_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    total, used = procfs.memory()
    assert total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < used < total
    assert 0 <= procfs.Cores().share() <= 1
    looks = iter([(100, 1000), (100, 1001), (150, 1100), (450, 1200)])
    monkeypatch.setattr(procfs, "_times", lambda: next(looks))
    cores = procfs.Cores()
    assert [cores.share() for _ in range(3)] == [0.0, 0.5, 1.0], "what is too short is not divided by"


def test_the_usage_of_a_process() -> None:
    own, times = procfs.usage(os.getpid()), os.times()
    assert own.cpu_seconds == pytest.approx(times.user + times.system, abs=0.1)
    assert 0 < own.started <= float(Path("/proc/uptime").read_text().split()[0])
    assert procfs.usage(-1) == procfs.NO_USAGE


def test_children_of_all_threads_are_found() -> None:
    processes, started, seen = list[subprocess.Popen[bytes]](), threading.Event(), threading.Event()

    def start() -> None:
        processes.append(subprocess.Popen(["sleep", "infinity"]))
        started.set()
        seen.wait(PATIENCE_S)

    thread = threading.Thread(target=start)
    thread.start()
    assert started.wait(PATIENCE_S)
    found = procfs.children(os.getpid())
    seen.set()
    thread.join()
    (process,) = processes
    process.kill()
    process.wait()
    assert process.pid in found
    assert procfs.children(2**22 + 1) == []
