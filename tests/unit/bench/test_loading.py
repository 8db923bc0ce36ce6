"""How the loading benchmark counts: delayed requests count as waiting, and CPU time comes from the kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.suites.loading import SPACING_NS, Found, Party, paced
from tests import ROOT

MS = 1_000_000


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.ns = 5_000_000_000
        self.waited = 0

    def now(self) -> int:
        return self.ns

    def wait(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)
        self.waited += 1

    def felt(self, took_ms: list[int], seconds: float) -> list[int]:
        """The n-th call takes this many milliseconds; all later ones take one."""
        times = iter(took_ms)

        def call() -> None:
            self.ns += next(times, 1) * MS

        return paced(call, lambda answer: None, seconds, self.wait, self.now)


def test_latency_counts_from_the_send_time_without_a_backlog() -> None:
    clock = Clock()
    taken = clock.felt([], 1.0)
    assert set(taken) == {1 * MS}
    assert 1000 * MS / SPACING_NS[1] <= len(taken) <= 1000 * MS / SPACING_NS[0] + 1


def test_a_pause_delays_every_call_due_during_it() -> None:
    smooth, stopped = Clock().felt([], 1.0), Clock().felt([1, 1, 200], 1.0)
    assert len(stopped) == len(smooth)  # none was left out
    assert stopped[:3] == [1 * MS, 1 * MS, 200 * MS]
    late = [taken for taken in stopped[3:] if taken > 1 * MS]
    assert len(late) >= 200 * MS // SPACING_NS[1]
    assert late == sorted(late, reverse=True)
    assert 200 * MS > late[0] > 190 * MS
    assert stopped[-1] == 1 * MS  # caught up with


def test_checking_answers_is_not_counted_in_the_latency() -> None:
    clock = Clock()
    seen: list[str] = []

    def check(answer: str) -> None:
        seen.append(answer)
        clock.ns += 1 * MS

    taken = paced(lambda: "answer", check, 0.1, clock.wait, clock.now)
    assert taken == [0] * len(taken)
    assert seen == ["answer"] * len(taken)


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
    found = Found(loads=inside, loads_outside=outside, reloads=inside, reloads_outside=outside, nothing=idle)
    assert inside.over(outside) == pytest.approx(1.2)
    assert inside.work(idle) == "2.00/s, 1.00 CPU s/s"
    assert found.failed == 2
    assert found.counted() == "150 requests, beside 6 loads and 6 reloads; x"
