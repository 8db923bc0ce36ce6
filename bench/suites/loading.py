"""Loading beside serving: the latency of a model's caller while another model, or its own, is loaded.

One caller sends requests at irregular times. Beside it, in turn: an operator loads and unloads another model in the
server, or loads a changed version of the caller's own; a process outside the server does the work of such a load; or
nothing happens. Invariant: the work outside is done as often as that inside in the turn before.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from threading import Event
from time import perf_counter, perf_counter_ns
from typing import Any

from bench.lib import models
from bench.lib.bare_engine import session
from bench.lib.child import Answer, Child, Handler
from bench.lib.clock import summary
from bench.lib.processes import busy_seconds
from bench.lib.setting import Setting, serving
from bench.lib.table import micros

SPACING_NS = (2_000_000, 8_000_000)
"""Interval between the caller's requests: irregular, so that it does not synchronise with anything."""
TURN = 2.5
"""Factor by which turns are longer than in other measures: a 99th percentile needs a thousand requests."""
SCRIPT = "import sys; from bench.lib.bare_engine import session; session(sys.argv[1])"


def paced(call: Callable[[], Any], check: Callable[[Any], None], seconds: float) -> list[int]:
    """Durations of calls in ns; each result is passed to `check`, whose time does not count.

    A call that was due during the previous one counts from when it was due: a pause of the server affects all requests
    that would have been sent during it.
    """
    spacing, wait, now = random.Random(models.SEED).randint, Event().wait, perf_counter_ns
    taken: list[int] = []
    due = now()
    end = due + int(seconds * 1e9)
    while due < end:
        start = due
        remaining = due - now()
        if remaining > 0:
            wait(remaining / 1e9)
            start = now()
        answer = call()
        taken.append(now() - start)
        check(answer)
        due += spacing(*SPACING_NS)
    return taken


def again(cycle: Callable[[], Any], seconds: float, period: float = 0.0) -> Answer:
    """Runs a cycle every `period` seconds, or as soon as the previous one has ended."""
    pause = Event()
    cycles, start = 0, perf_counter()
    while (due := cycles * period) < seconds and (past := perf_counter() - start) < seconds:
        if due > past:
            pause.wait(due - past)
        cycle()
        cycles += 1
    return {"cycles": cycles, "per_s": cycles / max(perf_counter() - start, cycles * period)}


# ------------------------------------------------------------------------------------------------ the processes


def caller(url: str, model: str, shape: list[int], oracle: str) -> Handler:
    """One request at a time. An answer that differs from the engine's counts as failed."""
    import numpy as np

    from shmserve import Client
    from shmserve.errors import ServeError

    client = Client(url)
    x = np.random.default_rng(2).standard_normal((1, *shape)).astype(np.float32)
    expected = session(oracle).run(None, {"x": x})[0]
    feed = {"x": x}
    wrong: list[str] = []

    def call() -> Any:
        try:
            return client.infer(model, feed)["y"]
        except ServeError as error:
            return error

    def check(answer: Any) -> None:
        if isinstance(answer, ServeError):
            wrong.append(f"{type(answer).__name__}: {answer}")
        elif not np.allclose(answer, expected, rtol=2e-4, atol=2e-4):
            wrong.append("another answer than the engine's")

    def handle(seconds: float) -> Answer:
        wrong.clear()
        taken = paced(call, check, seconds)
        return {**summary(taken), "failed": len(wrong), "first": wrong[:1]}

    for _ in range(50):
        check(call())
    assert not wrong, wrong[0]
    return handle


def operator(url: str, model: str) -> Handler:
    """Loads a model and unloads it."""
    from shmserve import Client

    client = Client(url)

    def cycle() -> None:
        client.load(model)
        client.unload(model)

    cycle()
    return lambda seconds: again(cycle, seconds)


def reloader(url: str, model: str, file: str) -> Handler:
    """Changes a file of a loaded model and loads it again: a new process starts beside the old one, which then ends."""
    from shmserve import Client

    client, numbers = Client(url), count()

    def cycle() -> None:
        Path(file).write_text(f"{next(numbers)}\n")
        client.load(model)

    cycle()
    return lambda seconds: again(cycle, seconds)


def script(model: str) -> Handler:
    """The work of a load without a server: a new process that imports the engine, creates the session, and exits."""
    command = [sys.executable, "-c", SCRIPT, model]
    environment = os.environ | {"ORT_DISABLE_TELEMETRY": "1"}

    def cycle() -> None:
        # In a new session, like the server's workers, which matters where the kernel's scheduler groups processes by
        # session.
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)

    cycle()
    return lambda seconds, period: again(cycle, seconds, period)


# ------------------------------------------------------------------------------------------------ the measure


@dataclass
class Party:
    """The caller's latencies and the work done beside it, one value per round."""

    p50_us: list[float] = field(default_factory=list)
    p99_us: list[float] = field(default_factory=list)
    per_s: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    """Processor time per second of the server and of the process that works beside the caller."""
    calls: int = 0
    cycles: int = 0
    failed: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, latency: Answer, done: Answer) -> None:
        self.p50_us.append(latency["median_us"])
        self.p99_us.append(latency["p99_us"])
        self.per_s.append(done["per_s"])
        self.calls += latency["calls"]
        self.cycles += done["cycles"]
        self.failed += latency["failed"]
        self.first += latency["first"]

    def latency(self) -> str:
        return f"p50 {micros(median(self.p50_us))}, p99 {micros(median(self.p99_us))}"

    def over(self, other: Party) -> float:
        return median(self.p99_us) / median(other.p99_us)

    def work(self, idle: Party) -> str:
        """`idle`: the party without work beside the caller; its processor time is subtracted."""
        busy = median(self.busy) - median(idle.busy)
        return f"{median(self.per_s):.2f}/s, {busy:.2f} CPU s/s"


@dataclass
class LoadingTimes:
    loads: Party = field(default_factory=Party)
    loads_outside: Party = field(default_factory=Party)
    reloads: Party = field(default_factory=Party)
    reloads_outside: Party = field(default_factory=Party)
    nothing: Party = field(default_factory=Party)

    def parties(self) -> list[Party]:
        return [self.loads, self.loads_outside, self.reloads, self.reloads_outside, self.nothing]

    @property
    def failed(self) -> int:
        return sum(party.failed for party in self.parties())

    def compared(self, inside: Party, outside: Party) -> str:
        latency = f"{inside.latency()}; outside {outside.latency()}; nothing {self.nothing.latency()}"
        return f"{latency}; in the server {inside.work(self.nothing)}, outside {outside.work(self.nothing)}"

    def counted(self) -> str:
        calls = sum(party.calls for party in self.parties())
        first = next((text for party in self.parties() for text in party.first), "")
        text = f"{calls:,} requests, beside {self.loads.cycles} loads and {self.reloads.cycles} reloads"
        return f"{text}; {first}" if first else text


def run_loading(setting: Setting) -> LoadingTimes:
    mlp, cnn = setting.onnx("mlp"), setting.onnx("cnn")
    repository = setting.repository("loading")
    models.write(repository, "mlp", models.onnx_model(models.MLP_SHAPE, 64, 32), {"model.onnx": mlp})
    models.write(repository, "cnn", models.onnx_model(models.CNN_SHAPE, 1000, 8), {"model.onnx": cnn})
    changed = str(repository / "mlp" / "1" / "changed.txt")
    result = LoadingTimes()
    with (
        serving(repository, "--model-control-mode", "explicit", "--load-model", "mlp") as server,
        Child(
            "bench.suites.loading:caller", url=server.lane, model="mlp", shape=models.MLP_SHAPE, oracle=str(mlp)
        ) as calls,
        Child("bench.suites.loading:operator", url=server.lane, model="cnn") as loads,
        Child("bench.suites.loading:script", model=str(cnn)) as loads_outside,
        Child("bench.suites.loading:reloader", url=server.lane, model="mlp", file=changed) as reloads,
        Child("bench.suites.loading:script", model=str(mlp)) as reloads_outside,
    ):
        for child in (calls, loads, loads_outside, reloads, reloads_outside):
            child.ready()
        broker, seconds = server.broker_pid(), setting.seconds * TURN

        def turn(party: Party, beside: Child | None = None, **order: float) -> None:
            pids = [broker, beside.pid] if beside is not None else [broker]
            busy, start = -sum(map(busy_seconds, pids)), perf_counter()
            if beside is not None:
                beside.tell(seconds=seconds, **order)
            latency = calls.ask(seconds=seconds)
            done = beside.answer() if beside is not None else {"cycles": 0, "per_s": 0.0}
            busy += sum(map(busy_seconds, pids))
            party.busy.append(busy / (perf_counter() - start))
            party.add(latency, done)

        for _ in range(setting.rounds):
            turn(result.loads, loads)
            turn(result.loads_outside, loads_outside, period=1 / result.loads.per_s[-1])
            turn(result.reloads, reloads)
            turn(result.reloads_outside, reloads_outside, period=1 / result.reloads.per_s[-1])
            turn(result.nothing)
    return result
