"""Carries out a plan: one load after another, each until its windows are stable.

`measure` is the entry for programs, e.g. `shmserve tune`.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from shmserve.clients.load.analysis import server_side
from shmserve.clients.load.analysis.confidence import Stability, interval, stability
from shmserve.clients.load.analysis.latencies import Histogram, percentile_of
from shmserve.clients.load.analysis.usage import Meter, Reading, is_local, used
from shmserve.clients.load.analysis.windows import Collector, Responses, is_long_enough, timeline, window_of
from shmserve.clients.load.generation.messages import Samples
from shmserve.clients.load.generation.schedule import describe_rate, useful_processes
from shmserve.clients.load.generation.team import Generators
from shmserve.clients.load.plan import HTTP, SECOND, Closed, Load, Open, Plan, Replay
from shmserve.clients.load.record import Cost, Echo, Interval, Latencies, Point, Run, Window
from shmserve.clients.load.search import best, next_load
from shmserve.clients.load.targets.base import Target
from shmserve.clients.load.targets.opening import open_target
from shmserve.errors import InvalidRequest, Unsupported

BUSY = 0.8
"""Use of a core by a generator process above which another process is added."""
KEEPS_UP = 0.97
"""Share of an open loop's rate that a server must answer."""
SHOW_S = 0.25
OVERLOADED = "overloaded"
DRAIN_S, OVERLOADED_S = 30.0, 0.5
"""Longest wait for responses after a load; the backlog of an overloaded server is cancelled, as the next load must not
find it."""


class Progress(Struct, frozen=True, kw_only=True):
    """The state of the running load."""

    load: Load
    number: int
    """Of this load, from 1."""
    loads: int
    """Number of loads; 0: not known (a search)."""
    phase: str
    """warm-up or window N."""
    seconds: float
    """Since its start."""
    per_s: float
    p50_ns: float
    p99_ns: float
    failed: int
    note: str = ""


OnProgress = Callable[[Progress], None]


def measure(
    plan: Plan,
    *,
    on_progress: OnProgress = lambda progress: None,
    on_point: Callable[[Point], None] = lambda point: None,
    echo: Echo | None = None,
) -> Run:
    """Measure all loads of the plan, or search for its limit. Raises ServeError, or Misuse for impossible inputs.

    `on_progress` is called several times a second, `on_point` after each load. Must not be called in a running event
    loop; use `measured` there.
    """
    return asyncio.run(measured(plan, on_progress=on_progress, on_point=on_point, echo=echo))


async def measured(
    plan: Plan,
    *,
    on_progress: OnProgress = lambda progress: None,
    on_point: Callable[[Point], None] = lambda point: None,
    echo: Echo | None = None,
) -> Run:
    check(plan)
    control = open_target(plan.endpoint)
    try:
        facts = await control.facts(plan.model, plan.version)
        if facts.decoupled and not plan.stream:
            text = f"model '{plan.model}' is decoupled, it may answer a request several times: use --stream"
            raise InvalidRequest(text)
        session = _Session(plan, control, on_progress)
        async with Generators(plan, session.on_samples) as generators:
            session.generators = generators
            points, highest = await session.run(on_point)
    finally:
        await control.close()
    return Run(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        plan=plan,
        server=facts.server,
        machine=_machine(),
        points=tuple(points),
        best=highest,
        echo=echo,
    )


def check(plan: Plan) -> None:
    """Raises InvalidRequest or Unsupported for a plan that cannot be carried out."""
    if plan.stream and plan.endpoint.kind == HTTP:
        raise Unsupported("streams are measured natively or over gRPC, not over http://: give another --url")
    if not plan.loads:
        raise InvalidRequest("the plan has no load")
    for load in plan.loads:
        if isinstance(load, Replay) and len(load.times) < 2:
            raise InvalidRequest("recorded times need at least two requests")
        if not isinstance(load, Replay) and not load.value > 0:
            raise InvalidRequest(f"{load} is no load: it must be above 0")
    if plan.limit is not None and isinstance(plan.loads[0], Replay):
        raise InvalidRequest("a search needs a concurrency or a rate that it can vary")
    settings = plan.settings
    if not 2 <= settings.min_windows <= settings.max_windows:
        text = f"{settings.min_windows} to {settings.max_windows} windows: a confidence interval needs at least 2"
        raise InvalidRequest(text)


class _Boundary(Struct):
    """Counters at the boundary of two windows."""

    at: int
    statistics: dict[str, Any]
    usage: Reading
    cpu: dict[int, int]


class _Session:
    """The loads of a run, one after another."""

    def __init__(self, plan: Plan, control: Target, on_progress: OnProgress) -> None:
        self.generators: Generators
        self._plan = plan
        self._control = control
        self._on_progress = on_progress
        self._meter = Meter(plan.endpoint)
        self._collector = Collector(1)
        cores = os.cpu_count() or 1
        self._most = max(1, cores // 2 if is_local(plan.endpoint) else cores)
        self._processes = plan.processes or 1
        self._number = 0

    def on_samples(self, process: int, samples: Samples) -> None:
        self._collector.add(process, samples)

    async def run(self, on_point: Callable[[Point], None]) -> tuple[list[Point], float | None]:
        points: list[Point] = []
        plan = self._plan
        if plan.limit is None:
            for load in plan.loads:
                points.append(await self._point(load))
                on_point(points[-1])
            return points, None
        tried: dict[float, bool] = {}
        whole = isinstance(plan.loads[0], Closed)
        while (value := next_load(tried, plan.limit, whole)) is not None:
            point = await self._point(_varied(plan.loads[0], value))
            points.append(point)
            on_point(point)
            tried[value] = keeps(point, plan.limit.percentile, plan.limit.ns)
        return sorted(points, key=lambda point: point.value), best(tried)

    async def _point(self, load: Load) -> Point:
        self._number += 1
        while True:
            processes = useful_processes(load, self._processes)
            prepared = await self.generators.ensure(processes)
            watch = _Load(self, load, processes, prepared.rows)
            point = await watch.run()
            if point is not None:
                return point
            self._processes = min(self._most, self._processes * 2)

    def may_grow(self, load: Load) -> bool:
        """Whether more generator processes may be used."""
        more = min(self._most, self._processes * 2)
        return not self._plan.processes and useful_processes(load, more) > useful_processes(load, self._processes)


class _Load:
    """One load from its start to its result."""

    def __init__(self, session: _Session, load: Load, processes: int, rows: int) -> None:
        self._session = session
        self._plan = session._plan
        self._load = load
        self._processes = processes
        self._rows = rows
        self._collector = session._collector = Collector(processes)
        self._windows: list[Window] = []
        self._responses: list[Responses] = []
        self._timeline: list[Window] = []
        self._boundaries: list[_Boundary] = []
        self._errors: list[Counter[str]] = []

    async def run(self) -> Point | None:
        """None if the generator is the limit and the load shall be repeated with more processes."""
        generators, settings = self._session.generators, self._plan.settings
        self._start = start = generators.begin(self._load, self._processes, time.monotonic_ns())
        try:
            cpu = dict(self._collector.cpu)
            await self._wait(start + settings.warmup_ns, "warm-up")
            if (
                settings.warmup_ns
                and self._busiest(cpu, settings.warmup_ns) > BUSY
                and self._session.may_grow(self._load)
            ):
                return None
            await self._boundary(time.monotonic_ns())
            found = Stability(False, 0, "")
            while len(self._windows) < settings.max_windows:
                await self._window()
                found = stability(self._windows, settings, isinstance(self._load, Closed))
                if found.stable or self._is_hopeless():
                    break
        finally:
            overloaded = bool(self._windows and self._behind(self._windows))
            unanswered = await generators.end(OVERLOADED_S if overloaded else DRAIN_S)
        return self._result(found, unanswered)

    async def _window(self) -> None:
        """Measure one more window, extended until it has enough responses."""
        settings, number = self._plan.settings, len(self._windows) + 1
        start = end = self._boundaries[-1].at
        while True:
            end += settings.window_ns
            await self._wait(end, f"window {number}")
            if is_long_enough(end - start, self._collector.count(start), settings):
                break
        await self._boundary(end)
        await self._wait(end, f"window {number}", complete=True)
        found = self._collector.take(start, end)
        self._windows.append(window_of(found, start, end, self._start, self._plan.deadline_ns))
        self._responses.append(found)
        self._timeline += timeline(found, start, end, self._start)
        self._errors.append(self._collector.error_counts(found))

    async def _boundary(self, at: int) -> None:
        statistics = await self._session._control.statistics(self._plan.model, self._plan.version)
        self._boundaries.append(_Boundary(at, statistics, self._session._meter.read(), dict(self._collector.cpu)))

    async def _wait(self, end: int, phase: str, complete: bool = False) -> None:
        """Until this time, or until all responses up to it have been reported. Shows the progress meanwhile."""
        while True:
            self._session.generators.check()
            now = time.monotonic_ns()
            if self._collector.complete(end) if complete else now >= end:
                return
            self._show(phase, now)
            left = (end - now) / SECOND
            await asyncio.sleep(min(SHOW_S, left) if left > 0 else 0.01)

    def _show(self, phase: str, now: int) -> None:
        recent = self._collector.peek(now - SECOND, now)
        good = recent.good
        span = min(SECOND, max(1, now - self._start)) / SECOND
        p50, p99 = np.percentile(good, (50, 99)) if len(good) else (0.0, 0.0)
        self._session._on_progress(
            Progress(
                load=self._load,
                number=self._session._number,
                loads=0 if self._plan.limit is not None else len(self._plan.loads),
                phase=phase,
                seconds=max(0, now - self._start) / SECOND,
                per_s=len(good) / span,
                p50_ns=float(p50),
                p99_ns=float(p99),
                failed=len(recent.code) - len(good),
            )
        )

    def _busiest(self, before: dict[int, int], length_ns: int) -> float:
        """Use of a core by the busiest generator process."""
        return max((self._collector.cpu[index] - cpu) / length_ns for index, cpu in before.items())

    def _is_hopeless(self) -> bool:
        """Whether more windows would only cost time: nothing succeeds, or the server cannot keep up with the rate."""
        if len(self._windows) < self._plan.settings.min_windows:
            return False
        return not any(window.good for window in self._windows) or bool(self._behind(self._windows))

    def _behind(self, windows: list[Window]) -> str:
        """The text for a server that answers less than an open loop asks, beyond what chance explains."""
        rate = describe_rate(self._load)
        per_s = fmean(window.good + window.failed for window in windows) * SECOND / fmean(w.length_ns for w in windows)
        chance = 3 * (rate * sum(window.length_ns for window in windows) / SECOND) ** 0.5
        chance /= sum(window.length_ns for window in windows) / SECOND
        if not rate or per_s >= min(KEEPS_UP * rate, rate - chance):
            return ""
        return f"{OVERLOADED}: {per_s:,.0f} responses/s to {rate:,.6g} requests/s"

    # ------------------------------------------------------------------------------------ the result

    def _result(self, found: Stability, unanswered: int) -> Point:
        first, confidence = found.first, self._plan.settings.confidence
        windows, responses = self._windows[first:], self._responses[first:]
        behind = self._behind(windows)
        errors: Counter[str] = Counter()
        for counts in self._errors[first:]:
            errors += counts
        if unanswered and not behind:
            errors[f"no response within the time after the load ({unanswered})"] += unanswered
        seconds = sum(window.length_ns for window in windows) / SECOND
        before, after = self._boundaries[first], self._boundaries[-1]
        deadline = self._plan.deadline_ns
        streams = self._plan.stream
        return Point(
            load=self._load,
            windows=tuple(self._windows),
            timeline=tuple(self._timeline),
            used=(first, len(self._windows)),
            stable=found.stable and not behind,
            note=behind or found.note,
            throughput=interval([window.per_s for window in windows], confidence),
            goodput=interval([window.in_time_per_s for window in windows], confidence) if deadline else None,
            rows=self._rows,
            latency=_latencies([part.good for part in responses], confidence),
            failed=sum(window.failed for window in windows),
            errors=dict(errors),
            first_answer=_latencies([part.first[part.first > 0] for part in responses], confidence)
            if streams
            else None,
            between_answers=_latencies([part.gaps for part in responses], confidence) if streams else None,
            answers_per_s=sum(len(part.gaps) + int((part.first > 0).sum()) for part in responses) / seconds,
            server=server_side.between(before.statistics, after.statistics),
            usage=used([boundary.usage for boundary in self._boundaries[first:]], (after.at - before.at) / SECOND),
            cost=self._cost(before, after, responses),
        )

    def _cost(self, before: _Boundary, after: _Boundary, responses: list[Responses]) -> Cost:
        length = after.at - before.at
        used = [after.cpu[index] - cpu for index, cpu in before.cpu.items()]
        count = sum(len(part.code) for part in responses)
        delays = np.concatenate([part.delay for part in responses])
        late = np.percentile(delays, (50, 99)) if len(delays) else (0.0, 0.0)
        return Cost(
            processes=self._processes,
            cores=sum(used) / length,
            busiest=max(used) / length,
            request_ns=sum(used) / count if count else 0.0,
            send_delay_p50_ns=float(late[0]),
            send_delay_p99_ns=float(late[1]),
        )


def _latencies(parts: list[Any], confidence: float) -> Latencies:
    """All parts together; the intervals come from the percentiles of each part, which is a window."""
    whole = Histogram()
    each = []
    for values in parts:
        one = Histogram()
        one.add(values)
        whole.add(values)
        each.append(one.percentiles())
    low, high = whole.extremes
    percentiles = {}
    for name, value in whole.percentiles().items():
        half = interval([found[name] for found in each if name in found], confidence).half
        percentiles[name] = Interval(value, max(0.0, value - half), value + half)
    return Latencies(
        count=whole.count, mean=whole.mean, low=low, high=high, percentiles=percentiles, histogram=whole.encoded()
    )


def keeps(point: Point, percentile: float, ns: int) -> bool:
    """Whether the load kept the limit: the percentile is not above it, nothing failed, and the server kept up."""
    if not point.latency.count or point.failed or point.note.startswith(OVERLOADED):
        return False
    return percentile_of(point.latency.histogram, percentile) <= ns


def _varied(load: Load, value: float) -> Load:
    if isinstance(load, Open):
        return replace(load, rate=value)
    return Closed(int(value))


def _machine() -> dict[str, str]:
    """The machine that generated the load; nothing that identifies it."""
    return {
        "cores": str(os.cpu_count()),
        "kernel": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }
