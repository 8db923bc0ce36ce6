"""Measures one load: from its start, through warm-up and windows, to its result."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from shmserve.tools.load.analysis.confidence import Stability, interval, stability
from shmserve.tools.load.analysis.latencies import LatencyHistogram, is_decided, needed, window_percentiles
from shmserve.tools.load.analysis.usage import Meter, UsageReading, used
from shmserve.tools.load.analysis.windows import (
    Collector,
    GeneratorUse,
    ResponseColumns,
    is_long_enough,
    timeline,
    window_of,
)
from shmserve.tools.load.generation.schedule import target_rate
from shmserve.tools.load.generation.team import Generators
from shmserve.tools.load.plan import SECOND, ClosedLoop, Load, LoadPlan, MeasureSettings, percentile_name
from shmserve.tools.load.record import Cost, Interval, Language, Latencies, LoadWindow, Point, ServerSide
from shmserve.tools.load.targets.base import LoadTarget

BUSY = 0.8
"""Use of a core by a generator process above which another process is added."""
KEEPS_UP = 0.97
"""Share of an open loop's rate that a server must answer."""
SHOW_S = 0.25
OVERLOADED = "overloaded"
DRAIN_S, OVERLOADED_S = 30.0, 0.5
"""Maximum wait for responses after a load. The backlog of an overloaded server is cancelled early, so that it does not
delay the next load."""


class LoadProgress(Struct, frozen=True):
    """The state of a running load. The numbers of responses are those of the last second."""

    phase: str
    """warm-up or window N."""
    seconds: float
    """Seconds since the start of the load."""
    per_s: float
    p50_ns: float
    p99_ns: float
    failed: int


class _Boundary(Struct):
    """Counters at the boundary of two windows."""

    at: int
    statistics: dict[str, Any]
    usage: UsageReading
    generator: GeneratorUse


class LoadRun:
    """One load from its start to its result."""

    def __init__(
        self,
        plan: LoadPlan,
        load: Load,
        generators: Generators,
        processes: int,
        control: LoadTarget,
        meter: Meter,
        show: Callable[[LoadProgress], None],
    ) -> None:
        self._plan = plan
        self._settings = settings_of(plan)
        self._load = load
        self._generators = generators
        self._processes = processes
        self._control = control
        self._meter = meter
        self._show = show
        self._collector = Collector(processes)
        self._windows: list[LoadWindow] = []
        self._responses: list[ResponseColumns] = []
        self._timeline: list[LoadWindow] = []
        self._boundaries: list[_Boundary] = []
        self._errors: list[Counter[str]] = []
        self._rows = 1.0
        """Mean number of rows per request."""
        self._start = 0

    async def run(self, may_grow: bool) -> Point | None:
        """None if the generator is the bottleneck in the warm-up and `may_grow`: repeat the load with more processes.
        After an exception the load continues until the generators stop.
        """
        generators, settings = self._generators, self._settings
        self._rows = await generators.ensure(self._processes)
        now = time.monotonic_ns()
        self._start = start = generators.begin(self._load, self._processes, now, self._collector.add)
        await self._wait(start, "warm-up", complete=True)
        before = dict(self._collector.used)
        await self._wait(start + settings.warmup_ns, "warm-up")
        if may_grow and max(_cores(before, self._collector.used)) > BUSY:
            await generators.end(OVERLOADED_S)
            return None
        await self._boundary(time.monotonic_ns())
        result = Stability(False, 0, "")
        while len(self._windows) < settings.max_windows:
            await self._window()
            result = stability(self._windows, settings, isinstance(self._load, ClosedLoop))
            if (result.stable and not self._undecided(result.first)) or self._is_hopeless():
                break
        unanswered = await generators.end(OVERLOADED_S if self._behind(self._windows) else DRAIN_S)
        return self._result(result, unanswered)

    async def _window(self) -> None:
        """Measures one more window, which is extended until it has enough responses."""
        settings, number = self._settings, len(self._windows) + 1
        start = end = self._boundaries[-1].at
        while True:
            end += settings.window_ns
            await self._wait(end, f"window {number}")
            if is_long_enough(end - start, self._collector.count(start), settings):
                break
        await self._boundary(end)
        await self._wait(end, f"window {number}", complete=True)
        result = self._collector.take(start, end)
        self._windows.append(window_of(result, start, end, self._start, self._plan.deadline_ns))
        self._responses.append(result)
        self._timeline += timeline(result, start, end, self._start)
        self._errors.append(self._collector.error_counts(result))

    async def _boundary(self, at: int) -> None:
        statistics = await self._control.statistics(self._plan.model, self._plan.version)
        self._boundaries.append(_Boundary(at, statistics, self._meter.read(), dict(self._collector.used)))

    async def _wait(self, end: int, phase: str, complete: bool = False) -> None:
        """Waits until this time, or until all responses up to it have been reported, and shows the progress."""
        while True:
            self._generators.check()
            now = time.monotonic_ns()
            if self._collector.complete(end) if complete else now >= end:
                return
            remaining = (end - now) / SECOND
            if remaining > 0:
                self._report(phase, now)
            await asyncio.sleep(min(SHOW_S, remaining) if remaining > 0 else 0.01)

    def _report(self, phase: str, now: int) -> None:
        end, recent = self._collector.latest()
        good = recent.good
        span = min(SECOND, max(1, end - self._start)) / SECOND
        p50, p99 = np.percentile(good, (50, 99)) if len(good) else (0.0, 0.0)
        seconds, failed = max(0, now - self._start) / SECOND, len(recent.code) - len(good)
        self._show(LoadProgress(phase, seconds, len(good) / span, float(p50), float(p99), failed))

    def _is_hopeless(self) -> bool:
        """Whether more windows would only cost time: nothing succeeds, or the server cannot keep up with the rate."""
        if len(self._windows) < self._plan.settings.min_windows:
            return False
        return not any(window.good for window in self._windows) or bool(self._behind(self._windows))

    def _behind(self, windows: list[LoadWindow]) -> str:
        """The text for a server that answers fewer requests than an open loop sends, beyond random variation."""
        rate = target_rate(self._load)
        seconds = sum(window.length_ns for window in windows) / SECOND
        per_s = sum(window.good + window.failed for window in windows) / seconds
        chance = 3 * (rate * seconds) ** 0.5 / seconds
        if not rate or per_s >= min(KEEPS_UP * rate, rate - chance):
            return ""
        return f"{OVERLOADED}: {per_s:,.0f} responses/s to {rate:,.6g} requests/s"

    def _undecided(self, first: int) -> str:
        """The text for windows with too few responses to tell whether the plan's limit was kept."""
        limit = self._plan.limit
        if limit is None:
            return ""
        responses = self._responses[first:]
        count = sum(len(part.good) for part in responses)
        above = sum(int((part.good > limit.ns).sum()) for part in responses)
        if is_decided(limit.percentile, count, above):
            return ""
        minimum = needed(limit.percentile)
        return f"{count:,} of {minimum:,} responses for {percentile_name(limit.percentile)}: set a longer --window"

    # ------------------------------------------------------------------------------------ the result

    def _result(self, result: Stability, unanswered: int) -> Point:
        first, confidence = result.first, self._plan.settings.confidence
        windows, responses = self._windows[first:], self._responses[first:]
        behind = self._behind(windows)
        undecided = "" if behind else self._undecided(first)
        failed = sum(window.failed for window in windows)
        errors: Counter[str] = Counter()
        for counts in self._errors[first:]:
            errors.update(counts)
        if unanswered and not behind:
            errors[f"no response within {DRAIN_S:g} s after the load"] += unanswered
            failed += unanswered
        seconds = sum(window.length_ns for window in windows) / SECOND
        before, after = self._boundaries[first], self._boundaries[-1]
        deadline = self._plan.deadline_ns
        streams = self._plan.stream
        return Point(
            load=self._load,
            windows=tuple(self._windows),
            timeline=tuple(self._timeline),
            used=(first, len(self._windows)),
            stable=result.stable and not behind and not undecided,
            note=behind or undecided or result.note,
            throughput=interval([window.per_s for window in windows], confidence),
            goodput=interval([window.in_time_per_s for window in windows], confidence) if deadline else None,
            rows=self._rows,
            latency=latencies_of([part.good for part in responses], confidence),
            failed=failed,
            errors=dict(errors),
            first_answer=latencies_of([part.first[part.first > 0] for part in responses], confidence)
            if streams
            else None,
            between_answers=latencies_of([part.gaps for part in responses], confidence) if streams else None,
            answers_per_s=sum(len(part.gaps) + int((part.first > 0).sum()) for part in responses) / seconds,
            language=_language(responses, windows, self._plan) if self._plan.prompts is not None else None,
            server=between(before.statistics, after.statistics),
            usage=used([boundary.usage for boundary in self._boundaries[first:]], (after.at - before.at) / SECOND),
            cost=self._cost(before, after, responses),
        )

    def _cost(self, before: _Boundary, after: _Boundary, responses: list[ResponseColumns]) -> Cost:
        cores = _cores(before.generator, after.generator)
        count = sum(len(part.code) for part in responses)
        delays = np.concatenate([part.delay for part in responses])
        late = np.percentile(delays, (50, 99)) if len(delays) else (0.0, 0.0)
        return Cost(
            processes=self._processes,
            cores=sum(cores),
            busiest=max(cores),
            request_ns=sum(cores) * (after.at - before.at) / count if count else 0.0,
            send_delay_p50_ns=float(late[0]),
            send_delay_p99_ns=float(late[1]),
        )


def _language(responses: list[ResponseColumns], windows: list[LoadWindow], plan: LoadPlan) -> Language:
    """The tokens of the successful requests of each window."""
    good = [np.flatnonzero(part.code == 0) for part in responses]
    per_s = [
        interval(
            [
                values[at].sum() * SECOND / window.length_ns
                for values, at, window in zip(tokens, good, windows, strict=True)
            ],
            plan.settings.confidence,
        )
        for tokens in ([part.prompt for part in responses], [part.output for part in responses])
    ]
    count = max(1, sum(map(len, good)))
    between_tokens = [part.between_tokens for part in responses]
    met = None
    if plan.objectives is not None:
        rates = [
            part.met(plan.objectives) * SECOND / window.length_ns
            for part, window in zip(responses, windows, strict=True)
        ]
        met = interval(rates, plan.settings.confidence)
    return Language(
        prompt_per_s=per_s[0],
        output_per_s=per_s[1],
        prompt_tokens=sum(int(part.prompt[at].sum()) for part, at in zip(responses, good, strict=True)) / count,
        output_tokens=sum(int(part.output[at].sum()) for part, at in zip(responses, good, strict=True)) / count,
        between_tokens=latencies_of([values[values > 0] for values in between_tokens], plan.settings.confidence),
        good=met,
    )


def settings_of(plan: LoadPlan) -> MeasureSettings:
    """With a limit, windows are long enough that all together have enough responses for its percentile."""
    settings = plan.settings
    if plan.limit is None:
        return settings
    return replace(
        settings,
        min_responses=max(settings.min_responses, math.ceil(needed(plan.limit.percentile) / settings.max_windows)),
    )


def _cores(before: GeneratorUse, after: GeneratorUse) -> list[float]:
    """Use of a core by each generator process. A process reports it together with the time, ten times a second."""
    changes = [(after[index][0] - cpu, after[index][1] - at) for index, (cpu, at) in before.items()]
    return [cpu / span if span else 0.0 for cpu, span in changes]


def latencies_of(parts: list[Any], confidence: float) -> Latencies:
    """The latencies of all parts together. The intervals come from the percentiles of each part, which is a window. A
    percentile that fewer than two windows have is unknown: its interval is from 0 to twice its value.
    """
    whole = LatencyHistogram()
    for values in parts:
        whole.add(values)
    each = [window_percentiles(values) for values in parts]
    low, high = whole.extremes
    percentiles = {}
    for name, value in whole.percentiles().items():
        values = [result[name] for result in each if name in result]
        half = interval(values, confidence).half if len(values) > 1 else value
        percentiles[name] = Interval(value, max(0.0, value - half), value + half)
    return Latencies(
        count=whole.count, mean=whole.mean, low=low, high=high, percentiles=percentiles, histogram=whole.encoded()
    )


Statistics = Mapping[str, Any]
PARTS = {"queue": "queue", "gather": "compute_input", "compute": "compute_infer", "scatter": "compute_output"}
"""Part of a request -> its name in Triton's statistics."""


def between(before: Statistics, after: Statistics) -> ServerSide | None:
    """None if the server has no statistics."""
    if not after.get("inference_stats"):
        return None
    good = _delta(before, after, "success", "count")
    parts = {part: _delta(before, after, name, "ns") / good if good else 0.0 for part, name in PARTS.items()}
    return ServerSide(
        requests=good,
        failed=_delta(before, after, "fail", "count"),
        batches=_number(after, "execution_count") - _number(before, "execution_count"),
        rows=_number(after, "inference_count") - _number(before, "inference_count"),
        parts=parts,
        batch_sizes=_differences(_sizes(before), _sizes(after)),
        reasons=_differences(_reasons(before), _reasons(after)),
    )


def _number(entry: Statistics, name: str) -> int:
    return int(entry.get(name, 0))


def _delta(before: Statistics, after: Statistics, kind: str, unit: str) -> int:
    """Counters are integers, or text in the JSON form of protobuf."""
    now, then = (entry.get("inference_stats", {}).get(kind, {}).get(unit, 0) for entry in (after, before))
    return int(now) - int(then)


def _sizes(entry: Statistics) -> dict[str, int]:
    return {
        str(batch.get("batch_size", 0)): int(batch.get("compute_infer", {}).get("count", 0))
        for batch in entry.get("batch_stats", ())
    }


def _reasons(entry: Statistics) -> dict[str, int]:
    return {str(reason): int(count) for reason, count in entry.get("batch_reasons", {}).items()}


def _differences(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: more for name, count in after.items() if (more := count - before.get(name, 0)) > 0}
