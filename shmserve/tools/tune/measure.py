"""Measures how long batches take, with all instances busy: by size, number of instances and number of threads.

One setting is measured at all sizes, the others at three. More instances are tried until they gain nothing. Every time
is measured twice, the second time in reverse order, because the speed of a machine drifts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from msgspec import Struct

from shmserve.errors import ModelFailed
from shmserve.tools.tune.bench import Bench, Observation
from shmserve.tools.tune.fit import IN_FLIGHT, Pair, TimeSample
from shmserve.tools.tune.goal import MIB, Goal
from shmserve.tools.tune.space import Candidate, TunedModel, pair_text

GAIN = 1.05
"""Factor by which more instances must raise the throughput for still more to be tried."""
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

Progress = Callable[[str], None]


class Times(Struct):
    """All measurements."""

    samples: list[TimeSample] = []
    lone: Observation | None = None
    """One caller and the smallest batch."""
    full: Observation | None = None
    """Batches of the largest size, with all instances busy."""
    first: Pair = (1, 0)
    memory: dict[Pair, int] = {}
    gpu_memory: dict[Pair, int] = {}
    highest: dict[Pair, float] = {}
    """The highest number of rows per second that each pair has reached."""
    skipped: list[str] = []
    """Why larger numbers were not tried."""


class Measurement:
    def __init__(self, bench: Bench, model: TunedModel, goal: Goal, progress: Progress) -> None:
        self._bench = bench
        self._model = model
        self._goal = goal
        self._progress = progress
        self.times = Times()

    def run(self) -> Times:
        goal, times = self._goal, self.times
        low, high = goal.instances
        best = 0.0
        for count in sorted({low, *(count for count in COUNTS if low < count <= high), min(high, COUNTS[-1])}):
            if times.memory and self._too_large(count):
                break
            for threads in self._model.thread_counts(count):
                self._pair((count, threads), complete=not times.samples)
            now = max(rate for pair, rate in times.highest.items() if pair[0] == count)
            if now < best * GAIN:
                gain = now / best
                times.skipped.append(f"more than {count} instances: {count} have {gain:.2f} x the throughput of fewer")
                break
            best = max(best, now)
        return times

    def _too_large(self, count: int) -> bool:
        """Whether this many instances would exceed the memory limit, if each needs as much as the last one."""
        known = {pair[0]: size for pair, size in self.times.memory.items()}
        last = max(known)
        needed = known[last] / last * count
        if not self._goal.memory or needed <= self._goal.memory:
            return False
        self.times.skipped.append(
            f"{count} instances: they would need about {needed / MIB:,.0f} MiB, and --memory allows "
            f"{self._goal.memory / MIB:,.0f} MiB"
        )
        return True

    # ------------------------------------------------------------------------------------ one pair

    def _pair(self, pair: Pair, complete: bool) -> None:
        goal, times = self._goal, self.times
        sizes = self._sizes(complete)
        lengths = sorted({goal.lengths[0], goal.typical_length, goal.lengths[1]})
        rounds: dict[tuple[int, int], list[tuple[float, float]]] = {}
        if complete:
            times.first = pair
        for size in sizes:
            if not self._round(pair, size, lengths, rounds):
                break
        times.memory[pair], times.gpu_memory[pair] = self._bench.memory(), self._bench.gpu_memory()
        for size in sorted({size for size, _ in rounds}, reverse=True):
            self._round(pair, size, lengths, rounds)
        if complete:
            self._progress("a request alone")
            times.lone = _checked(self._bench.closed(1, goal.seconds, goal.typical_length), "one was sent alone")
        for (_, length), result in rounds.items():
            rows, batch_ns = (median(values) for values in zip(*result, strict=True))
            times.samples.append(TimeSample(*pair, rows, batch_ns, length))
            reached = pair[0] * self._model.devices * rows * 1e9 / batch_ns
            times.highest[pair] = max(times.highest.get(pair, 0.0), reached)

    def _sizes(self, complete: bool) -> list[int]:
        if complete:
            return self._model.batches(self._goal.rows)
        first = self.times.samples
        known = sorted({round(sample.rows) for sample in first if sample.pair == self.times.first})
        return sorted({known[0], known[len(known) // 2], known[-1]})

    def _round(
        self, pair: Pair, size: int, lengths: Sequence[int], rounds: dict[tuple[int, int], list[tuple[float, float]]]
    ) -> bool:
        """Measures one size. False if a batch takes longer than the latency target, which makes larger ones useless."""
        goal, model = self._goal, self._model
        count, threads = pair
        self._progress(f"batches of {size} row{'s' if size > 1 else ''}, {pair_text(count, threads)}")
        now = model.current
        self._bench.apply(model.saturated(Candidate(count, threads, size, 0, now.multiple, now.batch_cost)))
        workers = count * model.devices
        callers = max(1, IN_FLIGHT * workers * size // goal.rows)
        shortest = float("inf")
        for length in lengths:
            result = _checked(self._bench.closed(callers, goal.seconds / 4, length), f"batches of {size} were measured")
            rows = result.mean_batch
            batch_ns = workers * rows / goal.rows / result.per_s * 1e9
            rounds.setdefault((size, length), []).append((rows, batch_ns))
            full = self.times.full
            if pair == self.times.first and (full is None or rows >= full.mean_batch):
                self.times.full = result
            shortest = min(shortest, batch_ns)
        return shortest <= goal.p99_ns


def _checked(result: Observation, what: str) -> Observation:
    """Raises ModelFailed if requests failed, because their times are meaningless."""
    failed = result.failed + result.refused
    if failed or not result.per_s:
        raise ModelFailed(
            f"{failed} requests failed while {what}: {result.error or result.refusal or 'no response arrived'}"
        )
    return result
