"""The Bench of a real server: applies configurations, sends requests, and reads the server's statistics.

The requests are sent by the load library of `shmserve bench`, from this process.
"""

from __future__ import annotations

import asyncio
import gc
import math
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import count, takewhile
from statistics import median
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import uvloop
from msgspec.structs import replace

from shmserve.errors import QueueTimeout, Unavailable
from shmserve.repo.config.schema import ModelConfig, as_triton_json
from shmserve.system import procfs
from shmserve.tools.load.generation.schedule import send_times
from shmserve.tools.load.generation.sending import LoadSender, MonotonicTimer
from shmserve.tools.load.measure import measure
from shmserve.tools.load.plan import SECOND, Endpoint, LoadPlan, OpenLoop, Sequences
from shmserve.tools.load.record import Point
from shmserve.tools.load.targets.base import TargetOptions
from shmserve.tools.load.targets.native import NativeTarget
from shmserve.tools.tune.bench import Observation

if TYPE_CHECKING:
    from shmserve import Client

WARM_SHARE = 0.2
"""Duration of the uncounted warm-up load, as a share of the measurement time."""
WINDOWS = 3
WINDOW_COUNT = 200
"""Number of answers that a window needs for its own p99."""
MIN_RESPONSES = 40
"""A measurement lasts until this many answers have arrived (closed loop: and two for each caller), but at most LONGEST
times its duration."""
LONGEST = 5.0
KEPT = 20_000
MAX_IN_FLIGHT = 30_000
"""Requests in flight at which a measurement ends as overloaded. The server must admit as many from one client."""
LOOK_S = 0.01
"""Interval at which a measurement checks whether it has ended."""
DRAIN_S = 30.0
REFUSED = tuple(f"{error.code}: " for error in (Unavailable, QueueTimeout))
"""How the recorded errors of requests begin that a limit has rejected."""

Inputs = Callable[[int], Sequence[Mapping[str, Any]]]
"""Length (0: drawn from the range) -> several distinct requests."""
Run = Callable[[LoadSender], Coroutine[Any, Any, Observation]]


class ServedModel:
    """The model `name` of the server that `client` and `url` reach."""

    def __init__(self, client: Client, name: str, inputs: Inputs) -> None:
        self._client = client
        self._name = name
        self._inputs = inputs
        self._known: dict[int, Sequence[Mapping[str, Any]]] = {}
        self._seed = 1
        self._ids = count(1 << 32 | 1)
        """Those of sequences."""

    def apply(self, config: ModelConfig) -> None:
        self._client.load(self._name, config=as_triton_json(config))

    def memory(self) -> int:
        for entry in self._client.models():
            if entry["name"] == self._name and entry["state"] == "READY":
                return sum(procfs.proportional_bytes(each["pid"]) for each in entry["instances"])
        return 0

    def gpu_memory(self) -> int:
        entries = [each for each in self._client.activity()["models"] if each["name"] == self._name]
        return sum(instance["gpu_memory_bytes"] for each in entries for instance in each.get("instances", ()))

    def load(self, plan: LoadPlan) -> Point:
        """The result of a load of `bench`."""
        (point,) = measure(replace(plan, endpoint=Endpoint(url=self._client.url))).points
        return point

    def closed(self, callers: int, seconds: float, length: int = 0) -> Observation:
        return together([ModelLoad(self, partial(closed, callers=callers, seconds=seconds), length)])[0]

    def correlated(self, sequences: int, length: int, seconds: float) -> Observation:
        run = partial(closed, callers=sequences, seconds=seconds)
        return together([ModelLoad(self, run, sequences=Sequences(sequences, length))])[0]

    def open(self, rate: float, seconds: float, give_up_ns: float) -> Observation:
        return ServedModels([self]).open([rate], seconds, [give_up_ns])[0]

    def next_load(self, rate: float) -> OpenLoop:
        """Requests at random times, other ones than those of the last load."""
        self._seed += 1
        return OpenLoop(rate, seed=self._seed)

    def feeds(self, length: int) -> Sequence[Mapping[str, Any]]:
        if length not in self._known:
            self._known[length] = self._inputs(length)
        return self._known[length]

    async def run(self, load: ModelLoad) -> Observation:
        target, timer = NativeTarget(Endpoint(url=self._client.url)), MonotonicTimer()
        facts = await target.facts(self._name, "")
        options = TargetOptions(model=self._name)
        bodies = [target.prepare(feed, facts, options) for feed in self.feeds(load.length)]
        sender = LoadSender(
            bodies,
            target.slot,
            monotonic_ns,
            timer.until,
            stream=facts.decoupled,
            sequences=load.sequences,
            ids=self._ids,
        )
        try:
            return await load.run(sender)
        finally:
            await sender.stop(0)
            await target.close()
            timer.close()

    def counts(self) -> tuple[int, int]:
        """The number of batches that the server has run, and of their rows."""
        stats = self._client.statistics(self._name)["model_stats"]
        return (sum(entry["execution_count"] for entry in stats), sum(entry["inference_count"] for entry in stats))


class ModelLoad(NamedTuple):
    """A load for a model, with inputs of this length."""

    model: ServedModel
    run: Run
    length: int = 0
    sequences: Sequences | None = None


class ServedModels:
    """Several models of a server, under load at the same time."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models

    def open(self, rates: Sequence[float], seconds: float, give_up_ns: Sequence[float]) -> list[Observation]:
        lasts = max(max(seconds, min(MIN_RESPONSES / rate, seconds * LONGEST)) for rate in rates)
        return together(
            [
                ModelLoad(model, partial(opened, load=model.next_load(rate), seconds=lasts, give_up_ns=limit))
                for model, rate, limit in zip(self._models, rates, give_up_ns, strict=True)
            ]
        )


def together(loads: Sequence[ModelLoad]) -> list[Observation]:
    """Runs the loads at the same time."""
    for load in loads:
        load.model.feeds(load.length)  # made before the first load starts

    async def run() -> list[Observation]:
        return await asyncio.gather(*(load.model.run(load) for load in loads))

    gc.collect()
    gc.freeze()
    try:
        before = [load.model.counts() for load in loads]
        results = uvloop.run(run())
        after = [load.model.counts() for load in loads]
    finally:
        gc.unfreeze()
    return [
        replace(result, batches=new[0] - old[0], rows=new[1] - old[1])
        for result, old, new in zip(results, before, after, strict=True)
    ]


async def closed(sender: LoadSender, callers: int, seconds: float) -> Observation:
    """A load that ends at the first error."""
    recorder, minimum = sender.recorder, max(MIN_RESPONSES, 2 * callers)
    begin = monotonic_ns() + round(seconds * WARM_SHARE * SECOND)
    end, limit = (begin + round(seconds * share * SECOND) for share in (1, LONGEST))
    await sender.start_closed(callers, monotonic_ns())
    while (now := monotonic_ns()) < limit and not recorder.errors:
        if now >= end and len(recorder.done) - bisect_left(recorder.done, begin) > minimum:
            break
        await asyncio.sleep(LOOK_S)
    await sender.stop(DRAIN_S)
    first = bisect_left(recorder.done, begin)
    if first < len(recorder.done):  # from the first answer on, because answers arrive in batches
        begin = recorder.done[first] + 1
    return observation(sender, recorded(sender)[0] >= begin, begin)


async def opened(sender: LoadSender, load: OpenLoop, seconds: float, give_up_ns: float) -> Observation:
    """A load that ends early if requests fail, or too many of them wait."""
    limit = min(max(50, round(load.rate * give_up_ns / SECOND)), MAX_IN_FLIGHT - 1)
    start = monotonic_ns() + SECOND // 100
    begin = start + round(seconds * WARM_SHARE * SECOND)
    end = begin + round(seconds * SECOND)
    sender.start_open(takewhile(lambda after: start + after < end, send_times(load)), start, limit)
    while sender.is_dispatching and not sender.backlog and all(map(_is_refusal, sender.recorder.errors)):
        await asyncio.sleep(LOOK_S)
    overloaded = sender.backlog > 0
    await sender.stop(0 if overloaded else DRAIN_S)
    done, latency, *_ = recorded(sender)
    return observation(sender, done - latency >= begin, begin, overloaded)


def observation(sender: LoadSender, counts: Any, begin: int, overloaded: bool = False) -> Observation:
    """The result of the requests that count, from the time `begin` on."""
    done, latency, delay, code = recorded(sender)
    errors = sender.recorder.errors
    refused = np.array([False, *map(_is_refusal, errors)])[code]
    good: Any = np.sort(latency[counts & ~refused])
    seconds = max(int(done.max(initial=begin)) - begin, 1) / SECOND
    order = np.argsort((done - latency)[counts], kind="stable")
    late = np.where(refused, math.inf, latency)[counts][order]
    return Observation(
        per_s=len(good) / seconds,
        seconds=seconds,
        p50_ns=_quantile(good, 0.5),
        p99_ns=math.inf if overloaded or not len(good) else _p99(late),
        latencies=tuple(good[:: max(1, len(good) // KEPT)].tolist()),
        failed=int(((code > 0) & ~refused).sum()),
        error=next((_text(each) for each in errors if not _is_refusal(each)), ""),
        refused=int(refused.sum()),
        refusal=next((_text(each) for each in errors if _is_refusal(each)), ""),
        overloaded=overloaded,
        late_ns=_quantile(sorted(delay[counts]), 0.99) if counts.any() else 0.0,
    )


def recorded(sender: LoadSender) -> tuple[Any, Any, Any, Any]:
    """The times of all responses: of their arrival, since the intended time, how late each was sent; and its code."""
    recorder = sender.recorder
    done, latency, delay, code = map(np.array, (recorder.done, recorder.latency, recorder.delay, recorder.code))
    return done, latency, delay, code


def _is_refusal(error: str) -> bool:
    return error.startswith(REFUSED)


def _text(error: str) -> str:
    return error.partition(": ")[2]


def _p99(latencies: Sequence[float]) -> float:
    """The median of the p99 of equal windows, so that one pause of the machine does not decide; of all answers, if
    there are too few for windows. `latencies`: in the order of the intended times."""
    if len(latencies) < WINDOWS * WINDOW_COUNT:
        return _quantile(sorted(latencies), 0.99)
    size = len(latencies) // WINDOWS
    return median(_quantile(sorted(latencies[part * size : (part + 1) * size]), 0.99) for part in range(WINDOWS))


def _quantile(ordered: Sequence[float], share: float) -> float:
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) if len(ordered) else math.inf
