"""The Bench of a real server: applies configurations, sends requests, and reads the server's statistics.

Latencies of the open loop count from the intended time of a request, so that a slow server does not slow its own
measurement down.
"""

from __future__ import annotations

import asyncio
import gc
import math
import selectors
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from shmserve.errors import ConnectionLost, Unavailable
from shmserve.repo.config.schema import ModelConfig, as_triton_json
from shmserve.tools.tune.bench import Observation

if TYPE_CHECKING:
    from shmserve import AsyncClient, Client

SECOND = 1_000_000_000
WARM_SHARE = 0.2
"""Duration of the uncounted warm-up load, as a share of the measurement time."""
WINDOWS = 3
WINDOW_COUNT = 200
"""Number of answers that a window needs for its own p99."""
LEAST = 40
"""A measurement lasts until this many answers have arrived (closed loop: and two for each caller), but at most LONGEST
times its duration."""
LONGEST = 5.0
KEPT = 20_000
MAX_IN_FLIGHT = 30_000
"""Requests in flight at which a measurement ends as overloaded. The server must admit as many from one client."""

Inputs = Callable[[int], Sequence[Mapping[str, Any]]]
"""Length (0: drawn from the range) -> several distinct requests."""


class Served:
    """The model `name` of the server that `client` and `url` reach."""

    def __init__(self, client: Client, name: str, inputs: Inputs, seed: int = 1) -> None:
        self._client = client
        self._name = name
        self._inputs = inputs
        self._known: dict[int, Sequence[Mapping[str, Any]]] = {}
        self._seed = seed

    def apply(self, config: ModelConfig) -> None:
        self._client.load(self._name, config=as_triton_json(config))

    def memory(self) -> int:
        for entry in self._client.models():
            if entry["name"] == self._name and entry["state"] == "READY":
                return sum(_memory_of(each["pid"], each["memory_bytes"]) for each in entry["instances"])
        return 0

    def closed(self, callers: int, seconds: float, length: int = 0) -> Observation:
        return self._observed(length, lambda load: load.closed(callers, seconds))

    def open(self, rate: float, seconds: float, give_up_ns: float) -> Observation:
        self._seed += 1
        return self._observed(0, lambda load: load.open(rate, seconds, give_up_ns, Random(self._seed)))

    def _observed(self, length: int, run: Callable[[_Load], Any]) -> Observation:
        if length not in self._known:
            self._known[length] = self._inputs(length)
        # Timers of select() have a resolution of a microsecond, those of epoll and uvloop one of a millisecond.
        loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        gc.collect()
        gc.freeze()
        try:
            return loop.run_until_complete(self._run(length, run))
        finally:
            gc.unfreeze()
            _cancel_all(loop)
            loop.close()

    async def _run(self, length: int, run: Callable[[_Load], Any]) -> Observation:
        from shmserve import AsyncClient

        async with AsyncClient(self._client.url, name="shmserve tune") as client:
            load = _Load(client, self._name, self._known[length], self._counts)
            await run(load)
            return load.observation()

    def _counts(self) -> tuple[int, int]:
        """The number of batches that the server has run, and of their rows."""
        stats = self._client.statistics(self._name)["model_stats"]
        return (
            sum(entry["execution_count"] for entry in stats),
            sum(entry["inference_count"] for entry in stats),
        )


class _Load:
    """One load, from its first request until the last answer."""

    def __init__(
        self,
        client: AsyncClient,
        model: str,
        feeds: Sequence[Mapping[str, Any]],
        counts: Callable[[], tuple[int, int]],
    ) -> None:
        self._client = client
        self._model = model
        self._feeds = feeds
        self._counts = counts
        self._next = 0
        self._out: dict[Any, int] = {}
        self._over = asyncio.Event()
        self._from = self._to = 0
        """Only requests that are sent (closed loop: answered) between these times count."""
        self._answers: list[tuple[int, int]] = []
        """Intended time, and latency."""
        self._failed = 0
        self._error = ""
        self._refused: list[int] = []
        """Intended times of requests that a limit has rejected."""
        self._refusal = ""
        self._overloaded = False
        self._late: list[float] = []
        self._ended = 0
        self._before = (0, 0)
        self._after = (0, 0)

    def _send(self, intended: int, done: Callable[[Any], None]) -> None:
        self._next += 1
        future = self._client.submit(self._model, self._feeds[self._next % len(self._feeds)])
        self._out[future] = intended
        future.add_done_callback(done)

    def _settle(self, future: Any) -> tuple[int, int, bool]:
        """The intended time, the time of the answer, and whether the request was refused."""
        intended, now = self._out.pop(future), perf_counter_ns()
        error = None if future.cancelled() else future.exception()
        refused = isinstance(error, Unavailable) and not isinstance(error, ConnectionLost)
        if refused:
            self._refused.append(intended)
            self._refusal = self._refusal or str(error)
        elif error is not None:
            self._failed += 1
            self._error = self._error or str(error)
        return intended, now, refused

    # ------------------------------------------------------------------------------------ closed loop

    async def closed(self, callers: int, seconds: float) -> None:
        now = perf_counter_ns()
        self._from = now + round(seconds * WARM_SHARE * SECOND)
        self._to = self._from + round(seconds * SECOND)
        self._limit = self._from + round(seconds * LONGEST * SECOND)
        self._least = max(LEAST, 2 * callers)
        self._started = False
        self._before = self._counts()
        for _ in range(callers):
            self._send(now, self._again)
        await self._over.wait()
        self._after = self._counts()

    def _again(self, future: Any) -> None:
        sent, now, refused = self._settle(future)
        if refused:
            if not self._out:
                self._over.set()
            return
        if not self._started and now >= self._from:
            self._started = True  # from the first answer on, because answers arrive in batches
            self._from = now
        elif self._started:
            self._answers.append((sent, now - sent))
            self._ended = now
        if (now < self._to or len(self._answers) < self._least) and now < self._limit and not self._failed:
            self._send(now, self._again)
        elif not self._out:
            self._over.set()

    # ------------------------------------------------------------------------------------ open loop

    async def open(self, rate: float, seconds: float, give_up_ns: float, draws: Random) -> None:
        self._mean = SECOND / rate
        self._draws = draws
        self._most = min(max(50.0, rate * give_up_ns / SECOND), MAX_IN_FLIGHT - 1)
        begin = perf_counter_ns() + SECOND // 100
        self._from = begin + round(seconds * WARM_SHARE * SECOND)
        longer = min(LEAST * self._mean, seconds * LONGEST * SECOND)
        self._to = self._from + round(max(seconds * SECOND, longer))
        self._at = float(begin)
        self._before = self._counts()
        self._send_due()
        await self._over.wait()
        for future in list(self._out):
            future.cancel()
        self._after = self._counts()

    def _send_due(self) -> None:
        now = perf_counter_ns()
        if self._from <= self._at <= now:
            self._late.append(now - self._at)
        while self._at <= now and self._at < self._to and len(self._out) <= self._most:
            self._send(round(self._at), self._answered)
            self._at += self._draws.expovariate(1.0) * self._mean
        if len(self._out) > self._most:
            self._overloaded = True
            self._over.set()
        elif self._at < self._to and not self._failed:
            asyncio.get_running_loop().call_later((self._at - now) / SECOND, self._send_due)
        elif not self._out:
            self._over.set()
        else:
            self._at = math.inf

    def _answered(self, future: Any) -> None:
        intended, now, refused = self._settle(future)
        if intended >= self._from and not refused:
            self._answers.append((intended, now - intended))
        self._ended = now
        if not self._out and (self._at >= self._to or self._failed):
            self._over.set()

    # ------------------------------------------------------------------------------------ result

    def observation(self) -> Observation:
        answers = self._answers
        latencies = sorted(latency for _, latency in answers)
        seconds = max(self._ended - self._from, 1) / SECOND
        batches, rows = (after - before for after, before in zip(self._after, self._before, strict=True))
        step = max(1, len(latencies) // KEPT)
        missed = [(intended, math.inf) for intended in self._refused if intended >= self._from]
        p99 = math.inf if self._overloaded or not latencies else _p99([*answers, *missed])
        return Observation(
            len(answers) / seconds, seconds, _quantile(latencies, 0.5), p99, tuple(latencies[::step]), batches, rows,
            self._failed, self._error, len(self._refused), self._refusal, self._overloaded,
            _quantile(sorted(self._late), 0.99) if self._late else 0.0,
        )  # fmt: skip


def _p99(answers: Sequence[tuple[int, float]]) -> float:
    """The median of the p99 of equal windows, so that one pause of the machine does not decide; of all answers, if
    there are too few for windows."""
    if len(answers) < WINDOWS * WINDOW_COUNT:
        return _quantile(sorted(latency for _, latency in answers), 0.99)
    ordered = sorted(answers)
    size = len(ordered) // WINDOWS
    parts = [ordered[place * size : (place + 1) * size] for place in range(WINDOWS)]
    return median(_quantile(sorted(latency for _, latency in part), 0.99) for part in parts)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) if ordered else math.inf


def _memory_of(pid: int, resident: int) -> int:
    """The process's proportional memory (PSS); its resident memory if the kernel does not report PSS."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return resident
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), resident)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """Cancels all tasks of the loop after an interrupt."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
