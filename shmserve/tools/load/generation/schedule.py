"""The intended send times of open loops, in ns since the start, divided among generator processes.

Invariant: latencies count from the intended time, so they include delays caused by the generator or by a full
connection (no coordinated omission).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate, count, islice
from random import Random

from shmserve.errors import InvalidRequest
from shmserve.tools.load.plan import SECOND, ClosedLoop, Load, OpenLoop, ReplayLoop

BLOCK = 1000
"""Random arrivals of all processes together after which the schedule is back at the nominal rate: many enough for the
queues that random arrivals cause, and few enough that even a short run has the rate that it states."""
LATEST = 10**9 * SECOND
"""Latest recorded time."""


def send_times(load: Load, index: int = 0, processes: int = 1) -> Iterator[int]:
    """The ascending send times of process `index`; endless. A closed loop has none."""
    if isinstance(load, ClosedLoop):
        return iter(())
    if isinstance(load, ReplayLoop):
        return islice(_repeated(load), index, None, processes)
    if load.arrivals == "constant":
        return (round(number * SECOND / load.rate) for number in count(index, processes))
    return _poisson(load.rate / processes, max(1, BLOCK // processes), Random(f"{load.seed}/{index}"))


def _poisson(rate: float, block: int, random: Random) -> Iterator[int]:
    """A Poisson process in which every `block` arrivals take exactly `block` / `rate`. The sum of independent Poisson
    processes is a Poisson process, so each generator process draws its own."""
    length = block * SECOND / rate
    for number in count():
        sums = list(accumulate(random.expovariate(1.0) for _ in range(block)))
        scale = length / sums[-1]
        for passed in sums:
            yield round(number * length + passed * scale)


def _repeated(load: ReplayLoop) -> Iterator[int]:
    first, period = load.times[0], load.period
    for lap in count():
        for at in load.times:
            yield lap * period + at - first


def share(load: Load, index: int, processes: int) -> Load:
    """The part of a closed loop that process `index` sends; open loops are divided by `send_times`."""
    if not isinstance(load, ClosedLoop):
        return load
    each, more = divmod(load.concurrency, processes)
    return ClosedLoop(each + (index < more))


def recorded_times(text: str, model: str, where: str) -> tuple[int, ...]:
    """The times of a recording in ns, ascending. A line is a number of seconds, or {"at": seconds}; lines that name
    another "model" are left out.
    """
    results = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            entry = entry if isinstance(entry, dict) else {"at": entry}
            at = round(float(entry["at"]) * SECOND)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            shown = f'expected {{"at": seconds}} or a number of seconds, found {line[:80]!r}'
            raise InvalidRequest(f"{where}, line {number}: {shown}") from error
        if not 0 <= at <= LATEST:
            latest = LATEST // SECOND
            raise InvalidRequest(f"{where}, line {number}: a time is from 0 to {latest:,} seconds, not {at / SECOND:g}")
        if entry.get("model", model) == model:
            results.append(at)
    if len(results) < 2:
        raise InvalidRequest(f"{where} has {len(results)} times for model '{model}', and at least 2 are needed")
    if min(results) == max(results):
        raise InvalidRequest(f"{where}: all times of model '{model}' are equal, which gives no rate")
    return tuple(sorted(results))


def useful_processes(load: Load, wanted: int) -> int:
    """At most one process per caller of a closed loop."""
    return max(1, min(wanted, load.concurrency)) if isinstance(load, ClosedLoop) else max(1, wanted)


def target_rate(load: Load) -> float:
    """The target rate of an open loop; 0 for a closed loop."""
    return load.rate if isinstance(load, OpenLoop | ReplayLoop) else 0.0
