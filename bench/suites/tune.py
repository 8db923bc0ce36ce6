"""`shmserve tune` against an exhaustive sweep: how good its choice is, and how much time it saves.

    python -m bench.suites.tune simulated [--model gpu]        five models on simulated servers
    python -m bench.suites.tune served FOLDER [--minutes 8]    two real models

A sweep measures every setting of the tuner's search space: instances, threads, batch sizes and queue delays, each at
several rates until the highest rate that holds the p99 is known to within 4 %. On a simulated server, service times are
known and every measurement counts as long as on a real one; the tuner's own computing time is added to its
measurements. The choice and the best setting of the sweep are then compared in long simulations. On a real server this
takes hours, so the results are kept in FOLDER, and a run continues where the last one stopped. At the end, the choice
and the best settings are measured again in turn, because the best of a hundred noisy values is partly luck.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from time import monotonic
from typing import Any

from bench.lib import models
from shmserve.clients.cli.temporary_server import TemporaryServer
from shmserve.paths import python
from shmserve.repo.config.schema import from_triton_json
from shmserve.tools.tune.bench import Bench, Observation
from shmserve.tools.tune.confirm import Confirmation, Confirmed
from shmserve.tools.tune.goal import Goal
from shmserve.tools.tune.predict import Prediction
from shmserve.tools.tune.served import WARM_SHARE, ServedModel
from shmserve.tools.tune.space import Candidate, TunedModel
from shmserve.tools.tune.tuner import Events, Tuner
from tests.unit.tools.tune.simulated import Service, SimulatedBench, tuned

MS = 1_000_000
P99_MS = {"mlp": 20, "cnn": 60}
INSTANCES = (1, 2)
CORES, SIMULATED_INSTANCES = 4, 3
LONG = 20_000
"""Requests in the simulations that compare two settings."""
BEST = 2
"""Settings of the sweep that are measured again."""
STEP = 1.05
"""Factor between the rates of the final comparison."""
IN_FLIGHT = 3


def write_models(root: Path) -> None:
    """An MLP of 1.4 M and a residual network of 30 M multiply-adds per row."""
    if (root / "cnn").exists():
        return
    models.make_mlp(root / "mlp.onnx")
    models.make_cnn(root / "cnn.onnx", 8)
    models.write(root, "mlp", models.onnx_model([256], 64, 32), {"model.onnx": root / "mlp.onnx"})
    models.write(root, "cnn", models.onnx_model([3, 224, 224], 1000, 16), {"model.onnx": root / "cnn.onnx"})


@contextmanager
def served(root: Path, name: str) -> Iterator[tuple[Bench, TunedModel]]:
    from shmserve.terminal import inputs

    with (
        TemporaryServer([root], ["--model-control-mode", "explicit"]) as server,
        server.client(30.0) as client,
    ):
        if not server.ready(60.0):
            raise RuntimeError(server.last_words)
        client.load(name)
        config = from_triton_json(client.config(name))
        text = (root / name / "config.pbtxt").read_text()
        known = inputs.specs(client.metadata(name))
        feeds = [inputs.random(known, 1, {}, seed) for seed in range(16)]
        yield ServedModel(client, name, lambda length: feeds), TunedModel(text, config, len(os.sched_getaffinity(0)))


def space(model: TunedModel, goal: Goal) -> list[Candidate]:
    """All settings that the tuner may choose, except padding. With batches of one row, a delay has no effect."""
    low, high = goal.instances
    return [
        Candidate(count, threads, batch, delay)
        for count in range(low, high + 1)
        for threads in model.thread_counts(count)
        for batch in model.batches(goal.rows)
        for delay in (model.delays_us(goal.p99_ns) if batch > 1 else [0])
    ]


def highest(bench: Bench, model: TunedModel, goal: Goal, candidate: Candidate) -> Confirmed:
    """The highest rate of one setting. The search begins below the throughput with all instances busy."""
    bench.apply(model.config_of(candidate))
    busy = bench.closed(IN_FLIGHT * candidate.instances * candidate.batch, goal.seconds / 2)
    start = Prediction(candidate, 0.8 * busy.per_s, 0.0, 0.0, 0.0, 0.0)
    return Confirmation(bench, model, goal, lambda text: None).run([(candidate, start)])[0]


def sweep(root: Path, name: str, goal: Goal, kept: dict[str, Any], until: float, save: Callable[[], None]) -> bool:
    """Measures missing settings. Returns whether all settings have been measured."""
    result = kept.setdefault("sweep", {})
    with served(root, name) as (bench, model):
        todo = [candidate for candidate in space(model, goal) if candidate.describe() not in result]
        for number, candidate in enumerate(todo):
            if monotonic() > until:
                print(f"{name}: {len(todo) - number} settings are left; run it again")
                return False
            begun = monotonic()
            one = highest(bench, model, goal, candidate)
            settings = [getattr(candidate, field) for field in candidate.__struct_fields__]
            result[candidate.describe()] = {"rate": one.rate, "seconds": monotonic() - begun, "settings": settings}
            save()
    return True


def tune(root: Path, name: str, goal: Goal) -> dict[str, Any]:
    """Runs the command as users do."""
    words = ["tune", str(root / name), "--p99", f"{P99_MS[name]}ms", "--seconds", str(goal.seconds), "--json"]
    words += ["--instances", f"{INSTANCES[0]}-{INSTANCES[1]}"]
    begun = monotonic()
    done = subprocess.run([*python(), "-m", "shmserve.clients.cli.main", *words], capture_output=True, text=True)
    if not done.stdout:
        raise RuntimeError(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    return {"seconds": monotonic() - begun, "chosen": result["chosen"], "confirmed": result["confirmed"]}


class TrackedRate:
    """The rate of a setting, which tracks its limit: a step up after a measurement that holds the p99, a step down
    after any other. So later measurements correct one that was disturbed by a pause."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.rates: list[float] = []
        self.held: list[bool] = []

    def follow(self, held: bool) -> None:
        self.rates.append(self.rate)
        self.held.append(held)
        self.rate *= STEP if held else 1 / STEP

    def mean(self, first: int) -> float:
        return geometric_mean(self.rates[first:])


def judge(root: Path, name: str, goal: Goal, kept: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Measures the choice and the best settings of the sweep in turn, so that changes in the machine's speed affect all
    of them."""
    ranked = sorted(kept["sweep"].values(), key=lambda each: -each["rate"])
    choice = Candidate(**kept["tune"]["chosen"])
    best = [Candidate(*each["settings"]) for each in ranked[:BEST]]
    limits = {candidate: TrackedRate(ranked[0]["rate"]) for candidate in (choice, *best)}
    with served(root, name) as (bench, model):
        confirmation = Confirmation(bench, model, goal, lambda text: None)
        for number in range(rounds):
            turns = list(limits.items())
            for candidate, limit in turns if number % 2 == 0 else reversed(turns):
                limit.follow(confirmation.measure(Confirmed(candidate, None), limit.rate).holds)
    # Until each setting has both failed and held, its rates depend on where it started.
    first = max(max(limit.held.index(held) for held in (True, False)) for limit in limits.values())
    rates = {candidate: limit.mean(first) for candidate, limit in limits.items()}
    other = max((each for each in rates if each != choice), key=rates.__getitem__, default=choice)
    shares = [own / its for own, its in zip(limits[choice].rates[first:], limits[other].rates[first:], strict=True)]
    quarter = len(shares) // 4
    parts = [geometric_mean(shares[part * quarter : (part + 1) * quarter]) for part in range(4)]
    return {
        "choice": choice.describe(),
        "best": other.describe(),
        "rates": {candidate.describe(): limit.rates for candidate, limit in limits.items()},
        "choice_rate": rates[choice],
        "best_rate": rates[other],
        "share": rates[choice] / rates[other],
        "quarters": parts,
    }


def report(name: str, kept: dict[str, Any]) -> str:
    swept = sum(each["seconds"] for each in kept["sweep"].values())
    tuned, judged = kept["tune"]["seconds"], kept["judge"]
    quarters = ", ".join(f"{part:.2f}" for part in judged["quarters"])
    choice, best = f"{judged['choice_rate']:,.0f}", f"{judged['best_rate']:,.0f}"
    return (
        f"{name}: the choice ({judged['choice']}) reaches {choice} requests/s, {judged['share']:.3f} of the {best} of "
        f"the best of {len(kept['sweep'])} settings ({judged['best']}); by quarters of the comparison: {quarters}; "
        f"tuning took {tuned:.0f} s, the sweep {swept:.0f} s: {tuned / swept:.3f}"
    )


# ------------------------------------------------------------------------------------------------- simulated


@dataclass(frozen=True)
class Hidden:
    """A model whose service times the tuner does not know. `ms`: of instances, threads and rows."""

    p99_ms: int
    ms: Service


def contended(count: int, threads: int) -> float:
    """How much longer a batch takes if the instances have more threads than there are cores."""
    return max(1.0, count * threads / CORES)


HIDDEN = {
    "small": Hidden(20, lambda count, threads, rows: (0.4 + 0.03 * rows) * contended(count, threads)),
    "cpu": Hidden(150, lambda count, threads, rows: (1 + 9 * rows / threads**0.8) * contended(count, threads)),
    "gpu": Hidden(40, lambda count, threads, rows: (4 + 0.15 * rows) * (1 + 0.85 * (count - 1))),
    "cache": Hidden(60, lambda count, threads, rows: (2 + rows * (0.4 if rows <= 8 else 2.0)) * contended(count, 1)),
    "remote": Hidden(60, lambda count, threads, rows: 6 + rows),
}
"""Many small batches; arithmetic that threads share; a device that instances share; batches that outgrow a cache; a
device for each instance."""


class Timed:
    """A Bench that adds up how long its measurements would take on a real server."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.seconds = 0.0
        self.apply, self.memory = bench.apply, bench.memory

    def closed(self, callers: int, seconds: float, length: int = 0) -> Observation:
        self.seconds += (1 + WARM_SHARE) * seconds
        return self._bench.closed(callers, seconds, length)

    def open(self, rate: float, seconds: float, give_up_ns: float) -> Observation:
        self.seconds += (1 + WARM_SHARE) * seconds
        return self._bench.open(rate, seconds, give_up_ns)


def simulated(name: str, processes: int) -> str:
    hidden, model = HIDDEN[name], tuned(cores=CORES)
    goal = Goal(hidden.p99_ms * MS, seconds=1.0, instances=(1, SIMULATED_INSTANCES))
    bench = Timed(SimulatedBench(hidden.ms))
    outcome = Tuner(bench, model, goal, Events(), processes).run()
    took = bench.seconds + outcome.seconds["search"]
    assert outcome.chosen is not None
    bench = Timed(SimulatedBench(hidden.ms))
    rates = {candidate: highest(bench, model, goal, candidate).rate for candidate in space(model, goal)}
    best = max(rates, key=rates.__getitem__)
    own, other = (true_rate(hidden, model, goal, candidate, rates[best]) for candidate in (outcome.chosen, best))
    return (
        f"{name}: the choice ({outcome.chosen.describe()}) holds {own:,.0f} requests/s, {own / other:.3f} of the "
        f"{other:,.0f} of the best of {len(rates)} settings ({best.describe()}); tuning took {took:.0f} s, the sweep "
        f"{bench.seconds:,.0f} s: {took / bench.seconds:.3f}"
    )


def true_rate(hidden: Hidden, model: TunedModel, goal: Goal, candidate: Candidate, near: float) -> float:
    """The highest rate that holds the p99 in long simulations, to half a percent."""
    bench = SimulatedBench(hidden.ms, requests=LONG)
    bench.apply(model.config_of(candidate))
    low, high = 0.5 * near, 1.3 * near
    while high > 1.005 * low:
        rate = (low + high) / 2
        if bench.open(rate, 1.0, 0.0).p99_ns <= goal.p99_ns:
            low = rate
        else:
            high = rate
    return low


# ------------------------------------------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.suites.tune", description=__doc__)
    parser.add_argument("where", choices=("simulated", "served"))
    parser.add_argument("folder", type=Path, nargs="?", help="of served models: for the models and the results")
    parser.add_argument("--model", action="append", choices=(*HIDDEN, *P99_MS), help="only this one; repeatable")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop sweeping after this time")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each measurement on a real server")
    parser.add_argument("--rounds", type=int, default=32, help="measurements of each setting in the final comparison")
    provided = parser.parse_args()
    names = list(provided.model or (*HIDDEN, *P99_MS))
    if provided.where == "simulated":
        for name in [name for name in names if name in HIDDEN]:
            print(simulated(name, os.cpu_count() or 1), flush=True)
        return
    if provided.folder is None:
        parser.error("served models need FOLDER")
    until = monotonic() + 60 * provided.minutes
    root = provided.folder.resolve() / "models"
    root.mkdir(parents=True, exist_ok=True)
    write_models(root)
    for name in [name for name in names if name in P99_MS]:
        file = provided.folder / f"{name}.json"
        kept = json.loads(file.read_text()) if file.exists() else {}
        goal = Goal(P99_MS[name] * MS, seconds=provided.seconds, instances=INSTANCES)

        def save(file: Path = file, kept: dict[str, Any] = kept) -> None:
            file.write_text(json.dumps(kept, indent=1))

        if "tune" not in kept:
            kept["tune"] = tune(root, name, goal)
            save()
        if sweep(root, name, goal, kept, until, save) and monotonic() < until:
            kept["judge"] = judge(root, name, goal, kept, provided.rounds)
            save()
            print(report(name, kept), flush=True)


if __name__ == "__main__":
    main()
