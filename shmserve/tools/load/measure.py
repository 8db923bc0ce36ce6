"""Carries out a plan: one load after another, each until its windows are stable.

`measure` is the entry point for programs, e.g. `shmserve tune`.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.tools.load.analysis.latencies import count_above, is_decided, percentile_of
from shmserve.tools.load.analysis.usage import Meter, is_local, usable_cores
from shmserve.tools.load.generation.schedule import useful_processes
from shmserve.tools.load.generation.team import Generators
from shmserve.tools.load.one_load import OVERLOADED, LoadProgress, LoadRun
from shmserve.tools.load.plan import (
    HTTP,
    NATIVE,
    OPENAI,
    PERCENTILES,
    SCHEMES,
    ClosedLoop,
    LatencyLimit,
    Load,
    LoadPlan,
    OpenLoop,
    ReplayLoop,
    percentile_name,
)
from shmserve.tools.load.record import EchoResult, Point, SavedRun
from shmserve.tools.load.targets.base import LoadTarget
from shmserve.tools.load.targets.native import open_target


class MeasureProgress(Struct, frozen=True):
    """A load of the run, and its state."""

    load: Load
    number: int
    """Number of this load, from 1."""
    loads: int
    """Number of loads; 0: not known (a search)."""
    state: LoadProgress


OnProgress = Callable[[MeasureProgress], None]


def measure(
    plan: LoadPlan, on_progress: OnProgress = lambda progress: None, echo: EchoResult | None = None
) -> SavedRun:
    """Measures all loads of the plan, or searches for its limit. Raises ServeError, or Misuse for impossible inputs.

    `on_progress` is called several times a second. Must not be called in a running event loop; use `measured` there.
    """
    return asyncio.run(measured(plan, on_progress, echo))


async def measured(
    plan: LoadPlan, on_progress: OnProgress = lambda progress: None, echo: EchoResult | None = None
) -> SavedRun:
    check(plan)
    control = open_target(plan.endpoint)
    try:
        facts = await control.facts(plan.model, plan.version)
        if facts.decoupled and not plan.stream:
            text = f"model '{plan.model}' is decoupled and may answer a request several times: use --stream"
            raise InvalidRequest(text)
        unknown = [name for name in plan.inputs.outputs if name not in facts.outputs]
        if unknown:
            has = ", ".join(facts.outputs)
            raise InvalidRequest(f"model '{plan.model}' has no output '{unknown[0]}'; its outputs are {has}")
        async with Generators(plan) as generators:
            session = _Session(plan, control, generators, on_progress)
            points = await session.run()
    finally:
        await control.close()
    return SavedRun(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        plan=replace(plan, endpoint=replace(plan.endpoint, headers=())),
        server=facts.server,
        machine=_machine(),
        points=tuple(points),
        best=best(session.tried),
        undecided=session.undecided,
        echo=echo,
    )


def check(plan: LoadPlan) -> None:
    """Raises InvalidRequest or Unsupported for a plan that cannot be carried out."""
    endpoint = plan.endpoint
    if endpoint.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise InvalidRequest(f"invalid url {endpoint.url!r}: expected one of {known}")
    if endpoint.openai and endpoint.scheme not in ("http", "https"):
        raise InvalidRequest(f"invalid url {endpoint.url!r} of an OpenAI API: expected http://HOST:PORT/v1")
    if plan.prompts is None and (plan.objectives is not None or endpoint.kind == OPENAI):
        raise InvalidRequest("objectives and an OpenAI API are for language models, which take prompts")
    if plan.prompts is not None and not plan.stream:
        raise InvalidRequest("prompts are sent with streams only")
    if plan.stream and endpoint.kind == HTTP and plan.inputs.outputs:
        raise Unsupported("generate_stream sends all outputs: leave out --outputs, or measure natively or over gRPC")
    if endpoint.headers and endpoint.kind == NATIVE:
        raise InvalidRequest("headers are only for http, https, grpc and grpcs://")
    if endpoint.client_key is not None and endpoint.client_cert is None:
        raise InvalidRequest("--client-key needs --client-cert")
    if (endpoint.ca or endpoint.client_cert) and not endpoint.is_secure:
        raise InvalidRequest("--ca and --client-cert are only for https:// and grpcs://")
    if not plan.loads:
        raise InvalidRequest("the plan has no load")
    for load in plan.loads:
        if isinstance(load, ReplayLoop) and len(load.times) < 2:
            raise InvalidRequest("recorded times need at least two requests")
        if not isinstance(load, ReplayLoop) and not load.value > 0:
            raise InvalidRequest(f"{load} is not a load: it must be above 0")
    if plan.limit is not None and isinstance(plan.loads[0], ReplayLoop):
        raise InvalidRequest("a search needs a concurrency or a rate that it can vary")
    settings = plan.settings
    if not 2 <= settings.min_windows <= settings.max_windows:
        text = f"{settings.min_windows} to {settings.max_windows} windows: a confidence interval needs at least 2"
        raise InvalidRequest(text)
    if settings.percentile not in PERCENTILES:
        known = ", ".join(map(percentile_name, PERCENTILES))
        raise InvalidRequest(
            f"windows do not have {percentile_name(settings.percentile)}: --percentile is one of {known}"
        )


class _Session:
    """The loads of a run, one after another."""

    def __init__(self, plan: LoadPlan, control: LoadTarget, generators: Generators, on_progress: OnProgress) -> None:
        self._plan = plan
        self._control = control
        self._generators = generators
        self._on_progress = on_progress
        self._meter = Meter(plan.endpoint)
        cores = usable_cores()
        self._max_processes = max(1, cores // 2 if is_local(plan.endpoint) else cores)
        self._processes = plan.processes or 1
        self._number = 0
        self.tried: dict[float, bool] = {}
        """With a limit: load -> whether it kept the limit."""
        self.undecided: float | None = None

    async def run(self) -> list[Point]:
        plan = self._plan
        if plan.limit is None:
            return [await self._point(load) for load in plan.loads]
        points: list[Point] = []
        whole = isinstance(plan.loads[0], ClosedLoop)
        while (value := next_load(self.tried, plan.limit, whole)) is not None:
            point = await self._point(_varied(plan.loads[0], value))
            points.append(point)
            kept = keeps(point, plan.limit)
            if kept is None:
                self.undecided = value
                break
            self.tried[value] = kept
        return sorted(points, key=lambda point: point.value)

    async def _point(self, load: Load) -> Point:
        self._number += 1
        loads = 0 if self._plan.limit is not None else len(self._plan.loads)

        def show(state: LoadProgress) -> None:
            self._on_progress(MeasureProgress(load, self._number, loads, state))

        while True:
            processes = useful_processes(load, self._processes)
            run = LoadRun(self._plan, load, self._generators, processes, self._control, self._meter, show)
            point = await run.run(self._may_grow(load))
            if point is not None:
                return point
            self._processes = min(self._max_processes, self._processes * 2)

    def _may_grow(self, load: Load) -> bool:
        """Whether more generator processes may be used."""
        more = min(self._max_processes, self._processes * 2)
        return not self._plan.processes and useful_processes(load, more) > useful_processes(load, self._processes)


def keeps(point: Point, limit: LatencyLimit) -> bool | None:
    """Whether the load kept the limit: the percentile is not above it, nothing failed, and the server kept up. None:
    too few responses to tell.
    """
    if not point.latency.count or point.failed or point.note.startswith(OVERLOADED):
        return False
    histogram = point.latency.histogram
    if not is_decided(limit.percentile, point.latency.count, count_above(histogram, limit.ns)):
        return None
    return percentile_of(histogram, limit.percentile) <= limit.ns


def _varied(load: Load, value: float) -> Load:
    if isinstance(load, OpenLoop):
        return replace(load, rate=value)
    return ClosedLoop(int(value))


def _machine() -> dict[str, str]:
    """The machine that generated the load, without identifying data."""
    return {
        "cores": str(usable_cores()),
        "kernel": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def next_load(tried: Mapping[float, bool], limit: LatencyLimit, whole: bool) -> float | None:
    """The next load to try; None at the end. `tried`: load -> whether it kept the limit. `whole`: only integers.

    If a load fails, all higher loads count as failed, whatever their results: noise must not hide the limit.
    """
    failed = min((load for load, kept in tried.items() if not kept), default=None)
    kept = max((load for load, ok in tried.items() if ok and (failed is None or load < failed)), default=None)
    if kept is None:
        return limit.low if failed is None else None
    if failed is None:
        return None if kept >= limit.high else min(limit.high, kept * 2)
    if failed - kept <= max(1.0 if whole else 0.0, kept * limit.resolution):
        return None
    middle = (kept + failed) / 2
    return float(round(middle)) if whole else middle


def best(tried: Mapping[float, bool]) -> float | None:
    """The highest load that kept the limit, below all that did not."""
    failed = min((load for load, kept in tried.items() if not kept), default=float("inf"))
    return max((load for load, kept in tried.items() if kept and load < failed), default=None)
