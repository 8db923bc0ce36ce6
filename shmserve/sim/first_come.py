"""The simplest possible server, as a baseline for the core: a single queue, first come first served.

An idle instance takes the oldest requests, as many rows as fit. Only callers know deadlines: they stop waiting, but
their requests still run. Messages take no time. Invariant: this module uses no code of the core, so it can also serve
as an oracle.
"""

from __future__ import annotations

import heapq
from collections import deque
from random import Random

from shmserve.errors import InvalidRequest
from shmserve.sim.load import Closed, Load
from shmserve.sim.results import SECOND, ModelResult
from shmserve.sim.service import Service


def first_come(
    load: Load, service: Service, max_batch: int = 1, instances: int = 1, seconds: float = 10.0, seed: int = 0
) -> ModelResult:
    """Serves the same arrivals and rows that `simulate` draws for this load, if it is the first load of a plan with
    this seed."""
    if isinstance(load.arrivals, Closed):
        raise InvalidRequest("a closed loop never offers more than is served; compare with another kind of arrivals")
    source = f"{seed} load 0 {load.model}"
    draws, times = Random(f"{source} rows"), Random(f"{seed} first come")
    result = ModelResult(load.model, instances=instances, seconds=seconds)
    waiting: deque[tuple[int, int]] = deque()
    done: list[int] = []
    now = end = 0

    def serve() -> None:
        """Starts batches while requests are queued and an instance is idle."""
        nonlocal end
        while waiting and len(done) < instances:
            rows = 0
            batch: list[int] = []
            while waiting and (not batch or rows + waiting[0][1] <= max_batch):
                arrived, size = waiting.popleft()
                rows += size
                batch.append(arrived)
            took = service.ns(rows, times)
            heapq.heappush(done, now + took)
            end = max(end, now + took)
            result.busy_ns += took
            result.batches[rows] = result.batches.get(rows, 0) + 1
            for arrived in batch:
                latency = now + took - arrived
                result.answered += 1
                result.latency.add(latency)
                if not load.timeout_ns or latency <= load.timeout_ns:
                    result.in_time += 1
                    result.good += now + took <= seconds * SECOND

    for at, provided in load.arrivals.arrivals(Random(f"{source} arrivals")):
        if at > seconds * SECOND:
            break
        low, high = load.rows
        rows = provided or (low if low == high else draws.randint(low, high))
        while done and done[0] <= at:
            now = heapq.heappop(done)
            serve()
        now = at
        result.sent += 1
        waiting.append((at, rows))
        serve()
    while done:
        now = heapq.heappop(done)
        serve()
    result.elapsed_s = max(end / SECOND, seconds)
    return result
