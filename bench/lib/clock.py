"""Timed loops. Durations are the caller's wall time (monotonic), in ns; `summary` reports microseconds."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter, perf_counter_ns
from typing import Any, TypeVar

T = TypeVar("T")
GAP_S = 0.005
"""Shorter gaps are usual."""


def durations(call: Callable[[], Any], seconds: float, warm: int = 5) -> list[int]:
    """Calls repeatedly for this many seconds, after `warm` calls that are not timed; returns the durations in ns."""
    for _ in range(warm):
        call()
    taken: list[int] = []
    note = taken.append
    now = perf_counter_ns()
    end = now + int(seconds * 1e9)
    while now < end:
        start = perf_counter_ns()
        call()
        now = perf_counter_ns()
        note(now - start)
    return taken


def summary(taken: list[int]) -> dict[str, Any]:
    """Median, 99th percentile, rate and number of the calls of one caller."""
    taken = sorted(taken)
    return {
        "median_us": median(taken) / 1e3,
        "p99_us": taken[min(len(taken) - 1, len(taken) * 99 // 100)] / 1e3,
        "per_s": len(taken) * 1e9 / sum(taken),
        "calls": len(taken),
    }


def pipelined(seconds: float, flight: int, ask: Callable[[], T], take: Callable[[T], Any]) -> float:
    """Calls per second with `flight` calls in flight: the oldest is collected by `take` before another is made."""
    out = deque(ask() for _ in range(flight))
    oldest, put = out.popleft, out.append
    count, start = 0, perf_counter()
    end = start + seconds
    while (now := perf_counter()) < end:
        for _ in range(8):
            take(oldest())
            put(ask())
        count += 8
    while out:
        take(oldest())
    return count / (now - start)


def alternate(rounds: int, *parties: Callable[[], float]) -> list[list[float]]:
    """Calls the functions alternately (A B A B ...); returns, for each function, its value in each round."""
    values = [[party() for party in parties] for _ in range(rounds)]
    return [list(column) for column in zip(*values, strict=True)]


def in_turn(rounds: int, parties: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Calls each party once per round, in an order that is reversed each time."""
    results: dict[str, list[T]] = {name: [] for name in parties}
    for number in range(rounds):
        for name in list(parties)[:: -1 if number % 2 else 1]:
            results[name].append(parties[name]())
    return results


def watch_core(core: int) -> Callable[[float], dict[str, Any]]:
    """A party that finds out for `seconds` when this core ran nobody: the gaps, as begin and end, in the run of a
    thread with the highest priority, which sleeps for 1 ms at a time. Hypervisors do not report all of them."""
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_max(os.SCHED_FIFO)))

    def handle(seconds: float) -> dict[str, Any]:
        gaps, last = [], perf_counter()
        end = last + seconds
        while last < end:
            select.select((), (), (), 0.001)
            now = perf_counter()
            if now - last > GAP_S:
                gaps.append((last, now))
            last = now
        return {"gaps": gaps}

    return handle
