"""How the loading benchmark counts: delayed requests count as waiting, and CPU time comes from the kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.suites.loading import SPACING_NS, LoadingTimes, Party, paced
from tests import ROOT

MS = 1_000_000


def felt(took_ms: list[int], checked_ms: int = 0) -> list[int]:
    """The latencies of calls during a second on a clock that stands still. The n-th call takes this many milliseconds,
    later ones take one."""
    now, times = 5_000_000_000, iter(took_ms)

    def advance(ns: int) -> None:
        nonlocal now
        now += ns

    def wait(seconds: float) -> None:
        advance(round(seconds * 1e9))

    return paced(lambda: advance(next(times, 1) * MS), lambda answer: advance(checked_ms * MS), 1.0, wait, lambda: now)


def test_a_pause_delays_every_call_due_during_it() -> None:
    smooth, stopped = felt([]), felt([1, 1, 200])
    assert set(smooth) == set(felt([], checked_ms=1)) == {1 * MS}, "checking answers is not counted"
    assert 1000 * MS / SPACING_NS[1] <= len(smooth) <= 1000 * MS / SPACING_NS[0] + 1
    assert len(stopped) == len(smooth), "none was left out"
    assert stopped[:3] == [1 * MS, 1 * MS, 200 * MS]
    late = [taken for taken in stopped[3:] if taken > 1 * MS]
    assert len(late) >= 200 * MS // SPACING_NS[1]
    assert late == sorted(late, reverse=True)
    assert 200 * MS > late[0] > 190 * MS
    assert stopped[-1] == 1 * MS, "caught up with"


BUSY = """
import os
import resource
import subprocess
import sys
from bench.lib.processes import busy_seconds

def used():
    found = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in found)

subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
before, found, after = used(), busy_seconds(os.getpid()), used()
tick = 4 / os.sysconf("SC_CLK_TCK")
assert before - tick <= found <= after + tick, (before, found, after)
"""


def test_busy_seconds_agree_with_getrusage() -> None:
    """In a process of its own: a server that other tests share would count as well."""
    subprocess.run([sys.executable, "-c", BUSY], cwd=ROOT, check=True)


def test_ratio_work_and_failures() -> None:
    inside = Party(
        [100.0] * 3, [900.0, 1200.0, 5000.0], [2.0] * 3, [1.2] * 3, calls=30, cycles=6, failed=1, first=["x"]
    )
    outside = Party([100.0] * 3, [1000.0, 800.0, 1100.0], [2.0] * 3, [1.0] * 3, calls=30, cycles=6)
    idle = Party([80.0] * 3, [100.0] * 3, [0.0] * 3, [0.2] * 3, calls=30)
    found = LoadingTimes(loads=inside, loads_outside=outside, reloads=inside, reloads_outside=outside, nothing=idle)
    assert inside.over(outside) == pytest.approx(1.2)
    assert inside.work(idle) == "2.00/s, 1.00 CPU s/s"
    assert found.failed == 2
    assert found.counted() == "150 requests, beside 6 loads and 6 reloads; x"
