"""The search over all candidates, in the simulator.

1. For each number of instances and threads, and each batch size: the highest rate, without a queue delay and with one,
  because large batches that are never full lose to small ones unless requests wait for them.
2. For the best of these, the other settings: delays and padding. A candidate that cannot beat those already known costs
  one simulation.
3. The best again, with longer simulations.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import log
from multiprocessing import resource_tracker
from typing import TypeVar

from msgspec.structs import replace

from shmserve.system import interrupts
from shmserve.tools.tune.fit import Fit, Pair
from shmserve.tools.tune.goal import Goal
from shmserve.tools.tune.predict import PRECISION, Prediction, RatePredictor
from shmserve.tools.tune.space import MULTIPLES, Candidate, TunedModel

Task = TypeVar("Task")
Answer = TypeVar("Answer")


class SimulationPool:
    """With a size of 1, everything runs in this process."""

    def __init__(self, processes: int) -> None:
        self._executor: ProcessPoolExecutor | None = None
        if processes > 1:
            # Not forked: this process may have threads.
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(processes, context)

    def __enter__(self) -> SimulationPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def run(self, work: Callable[[Task], Answer], tasks: Iterable[Task]) -> Iterator[Answer]:
        """`work` is a function of a module, or a partial of one, so that it can be sent to another process."""
        if self._executor is None:
            return iter(map(work, tasks))
        resource_tracker.ensure_running()  # its start would unblock the signal
        with interrupts.blocked_in_children():  # the process that owns the pool ends it
            return self._executor.map(work, tasks)


COARSE_DELAYS = (0.0, 0.2)
"""Queue delays of step 1, as shares of the latency target."""
REFINED = 4
"""Number of batch sizes of instances and threads that go on from step 1 to step 2."""
FINAL = 6
"""Number of candidates in step 3."""
LONGER = 3
"""Factor for the length of the simulations of step 3."""
POOR = 0.7
"""In step 1, candidates below this share of the best known rate are not examined further."""
ALIKE = 0.01
"""Predicted rates this close count as equal: the simpler setting comes first."""

NONE: Mapping[Candidate, float] = {}

Report = Callable[[int, int, Prediction | None], None]
"""Number of simulated candidates, their total, and the best so far."""


class Search:
    def __init__(
        self, predictor: RatePredictor, memory: Mapping[Pair, int], pool: SimulationPool, report: Report
    ) -> None:
        """`memory`: measured bytes of the instances."""
        self._predictor = predictor
        self._memory = memory
        self._pool = pool
        self._report = report
        self._goal: Goal = predictor.goal
        self._model: TunedModel = predictor.model
        self._done = self._total = 0
        self.predictions: dict[Candidate, Prediction] = {}
        """All candidates with a prediction; with a target rate, including those that do not hold the p99."""
        self.tried: set[Candidate] = set()

    def run(self) -> list[Prediction]:
        """The candidates that hold the p99, best first."""
        coarse = sorted(self._coarse(), key=lambda candidate: -self._predictor.capacity(candidate))
        self._total = len(coarse)
        first = max(4, len(coarse) // 4)
        self._try(coarse[:first], 0.0, 1)
        self._try(coarse[first:], POOR * self._floor(1), 1)
        best: dict[tuple[Pair, int], Prediction] = {}
        for each in self.ranked():
            best.setdefault((_pair(each), each.candidate.batch), each)
        near = {
            candidate: each.rate
            for each in list(best.values())[:REFINED]
            for candidate in self._around(each.candidate)
            if candidate not in self.predictions
        }
        self._total += len(near)
        self._try(list(near), self._floor(FINAL), 1, near)
        guesses = {each.candidate: each.rate for each in self.ranked()[:FINAL]}
        final = list(guesses)
        self._total += len(final)
        self._try(final, 0.0, LONGER, guesses)
        ranked = self.ranked()
        return [each for each in ranked if each.candidate in final] + [
            each for each in ranked if each.candidate not in final
        ]

    def _coarse(self) -> list[Candidate]:
        now, pairs = self._model.current, [pair for pair in self._predictor.fits if self._fits(pair)]
        sizes = self._model.batches(self._goal.rows)
        delays = self._model.delays_us(self._goal.p99_ns, COARSE_DELAYS)
        results = [
            Candidate(*pair, size, delay, now.multiple, self._batch_cost(pair))
            for delay in delays
            for pair in pairs
            for size in sizes
            if size > 1 or not delay
        ]
        if (now.instances, now.threads) in pairs and now.batch >= self._goal.rows:
            results.append(now)
        return list(dict.fromkeys(results))

    def _fits(self, pair: Pair) -> bool:
        return not self._goal.memory or self._memory.get(pair, 0) <= self._goal.memory

    def _batch_cost(self, pair: Pair) -> int:
        """The fixed cost of a batch in elements, according to the fit."""
        fit: Fit = self._predictor.fits[pair]
        now = self._model.current
        return round(fit.batch_ns / fit.element_ns) if now.multiple and fit.element_ns else now.batch_cost

    def _around(self, candidate: Candidate) -> Iterable[Candidate]:
        """The same instances, threads and batch size with all delays, or with other padding."""
        if candidate.batch > 1:
            for delay in self._model.delays_us(self._goal.p99_ns):
                yield replace(candidate, delay_us=delay)
        if candidate.multiple:
            cost = candidate.batch_cost
            for multiple in MULTIPLES:
                yield replace(candidate, multiple=multiple)
            for other in (cost // 4, cost * 4, self._model.current.batch_cost):
                yield replace(candidate, batch_cost=other)

    def _floor(self, place: int) -> float:
        """The rate of the candidate at this place in the ranking; of the last one if there are fewer."""
        ranked = self.ranked()
        return ranked[min(len(ranked), place) - 1].rate if ranked else 0.0

    def _try(
        self, candidates: Sequence[Candidate], floor: float, longer: int, guesses: Mapping[Candidate, float] = NONE
    ) -> None:
        if self._goal.rate:
            work = partial(_at_rate, self._predictor, self._goal.rate, longer)
        else:
            work = partial(_highest, self._predictor, floor, longer, guesses)
        for candidate, result in zip(candidates, self._pool.run(work, candidates), strict=True):
            self._done += 1
            self.tried.add(candidate)
            if result is not None:
                self.predictions[candidate] = result
            else:
                self.predictions.pop(candidate, None)
            ranked = self.ranked()
            self._report(self._done, self._total, ranked[0] if ranked else None)

    def ranked(self) -> list[Prediction]:
        return sorted((each for each in self.predictions.values() if self._predictor.holds(each)), key=self._order)

    def _order(self, result: Prediction) -> tuple[float, ...]:
        candidate = result.candidate
        memory = self._memory.get(_pair(result), 0)
        cores = candidate.instances * max(candidate.threads, 1)
        if self._goal.rate:  # the cheapest that holds the p99
            cheapest = (candidate.instances, memory, cores, result.p99_ns)
            first = {"latency": round(log(result.p99_ns) / ALIKE), "memory": memory}.get(self._goal.objective, 0)
            return (first, *cheapest)
        changes = len(self._model.edits(candidate))
        return (-round(log(result.rate) / ALIKE), candidate.instances, cores, changes, -result.rate)


def _highest(
    predictor: RatePredictor, floor: float, longer: int, guesses: Mapping[Candidate, float], candidate: Candidate
) -> Prediction | None:
    return predictor.highest(candidate, floor, longer, guesses.get(candidate, 0.0))


def _at_rate(predictor: RatePredictor, rate: float, longer: int, candidate: Candidate) -> Prediction | None:
    return predictor.at(candidate, rate, longer=longer) if predictor.capacity(candidate) >= rate else None


def shortlist(ranked: Sequence[Prediction], count: int, worst: float) -> list[Prediction]:
    """The best candidate; the best one with other instances or threads; the best of those that differ from the chosen
    ones in more than delay and padding, if their rate is at least `worst` times the best; then the next ones in the
    ranking. Confirmation is meant to correct errors of the fits, which candidates with equal instances and threads
    share, especially with equal batch size. A candidate that differs from a chosen one only in its delay, and has the
    same prediction, is left out: only chance would decide between them."""
    good = [each for each in ranked if each.rate >= worst * ranked[0].rate]
    chosen = good[:1]
    chosen += [each for each in good if _pair(each) != _pair(good[0])][:1]
    for each in good:
        if all((_pair(each), each.candidate.batch) != (_pair(other), other.candidate.batch) for other in chosen):
            chosen.append(each)
    for each in ranked:
        if each not in chosen and not any(_alike(each, other) for other in chosen):
            chosen.append(each)
    return chosen[:count]


def _pair(each: Prediction) -> Pair:
    return each.candidate.instances, each.candidate.threads


def _alike(one: Prediction, other: Prediction) -> bool:
    delayed = replace(one.candidate, delay_us=other.candidate.delay_us)
    return delayed == other.candidate and abs(log(one.rate / other.rate)) <= PRECISION
