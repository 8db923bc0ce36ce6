"""Records the processor time of threads over time, and replays such a course in a process.

Threads are identified by process and name, because the threads of a reopened context have new ids.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from threading import Event
from time import perf_counter, process_time

from bench.lib.child import Answer, Handler

SAMPLE_S = 0.004
Course = list[tuple[float, float]]
"""Pairs of seconds since the start and the processor time used until then."""


class _Threads:
    """The processor time of all threads of a process, including ended ones, by name."""

    def __init__(self, pid: int) -> None:
        self._folder = f"/proc/{pid}/task"
        self._known: dict[str, tuple[str, int]] = {}
        self._started = {tid: taken for tid, (_, taken) in self._looked().items()}

    def _looked(self) -> dict[str, tuple[str, int]]:
        for tid in os.listdir(self._folder):
            try:
                with open(f"{self._folder}/{tid}/schedstat", "rb", 0) as file:
                    taken = int(file.read().split()[0])
                if tid not in self._known:
                    with open(f"{self._folder}/{tid}/comm", "rb", 0) as file:
                        self._known[tid] = file.read().decode().strip(), taken
            except (OSError, IndexError):
                continue  # the thread has ended; its last value is known
            self._known[tid] = self._known[tid][0], taken
        return self._known

    def taken(self) -> dict[str, float]:
        result: dict[str, float] = defaultdict(float)
        for tid, (name, taken) in self._looked().items():
            result[name] += (taken - self._started.get(tid, 0)) / 1e9
        return result


def watcher() -> Handler:
    wait = Event().wait

    def handle(seconds: float, pids: list[int]) -> Answer:
        threads = {pid: _Threads(pid) for pid in pids}
        courses: dict[str, Course] = defaultdict(lambda: [(0.0, 0.0)])
        start = perf_counter()
        while (at := perf_counter() - start) < seconds:
            for pid, watched in threads.items():
                for name, taken in watched.taken().items():
                    courses[f"{pid} {name}"].append((at, taken))
            wait(SAMPLE_S)
        return {"courses": courses}

    return handle


def beyond(course: Course, usual: Course) -> Course:
    """The processor time beyond the usual rate, which is assumed to be even."""
    rate = usual[-1][1] / usual[-1][0] if usual and usual[-1][0] else 0.0
    result, maximum = [], 0.0
    for at, taken in course:
        maximum = max(maximum, taken - rate * at)
        result.append((at, maximum))
    return result


def together(courses: Sequence[Course]) -> Course:
    """The sum of several threads' courses."""
    latest = [0.0] * len(courses)
    results: Course = []
    for at, index, taken in sorted((at, index, taken) for index, course in enumerate(courses) for at, taken in course):
        latest[index] = taken
        if results and results[-1][0] == at:
            results.pop()
        results.append((at, sum(latest)))
    return results


def burner() -> Handler:
    """Uses processor time as in the course; time lost to other processes is caught up later."""
    wait = Event().wait

    def handle(seconds: float, course: Course) -> Answer:
        start, begun = perf_counter(), process_time()
        for at, due in course:
            while process_time() - begun < due and perf_counter() < start + seconds:
                pass
            wait(max(0.0, start + min(at, seconds) - perf_counter()))
        return {}

    return handle
