"""`shmserve tune` against an exhaustive sweep: how good its choice is, and how much time it saves.

    python -m bench.suites.tune simulated [--model gpu]        five models on simulated servers
    python -m bench.suites.tune served FOLDER [--minutes 8]    two real models

A sweep measures every setting of the tuner's search space: instances, threads, batch sizes and queue delays, each at
several rates until the highest rate that holds the p99 is known to within 4 %. On a simulated server, service times are
known and every measurement counts as long as on a real one; the tuner's own computing time (of the CPU, so that the
load of this machine does not matter) is added to its measurements. Those of the sweep are simulated with fewer requests
than a real one has. The choice and the best settings of the sweep are then compared in long simulations. `--write`
saves the table.

On a real server this takes hours, so the results are kept in FOLDER, and a run continues where the last one stopped. At
the end, the choice and the best settings are measured again in turn, because the best of a hundred noisy values is
partly luck.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from time import monotonic, process_time
from typing import Any, NamedTuple

from bench.lib import models
from bench.lib.table import RESULTS, markdown
from shmserve.clients.cli.temporary_server import TemporaryServer
from shmserve.paths import python
from shmserve.repo.config.schema import from_triton_json
from shmserve.tools.tune.bench import Bench, Observation
from shmserve.tools.tune.confirm import Confirmation, Confirmed
from shmserve.tools.tune.goal import Goal
from shmserve.tools.tune.predict import Prediction
from shmserve.tools.tune.search import SimulationPool
from shmserve.tools.tune.served import WARM_SHARE, ServedModel
from shmserve.tools.tune.space import Candidate, TunedModel
from shmserve.tools.tune.tuner import Events, Tuner
from tests.unit.tools.tune.simulated import Service, SimulatedBench, tuned

MS = 1_000_000
P99_MS = {"mlp": 20, "cnn": 60}
INSTANCES = (1, 2)
CORES, SIMULATED_INSTANCES = 4, 3
REQUESTS = 300
"""Requests of a simulated measurement of the sweep, at least."""
LONG = 12_000
"""Requests in the simulations that compare two settings."""
LASTS = 2
"""A simulated measurement lasts at least this many times the p99, so that a growing queue has time to show."""
RESULT = RESULTS / "tune.md"
"""The table: a row for each model."""
BEST = 6
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
    "small": Hidden(100, lambda count, threads, rows: (8 + 0.6 * rows) * contended(count, threads)),
    "cpu": Hidden(150, lambda count, threads, rows: (1 + 9 * rows / threads**0.8) * contended(count, threads)),
    "gpu": Hidden(40, lambda count, threads, rows: (4 + 0.15 * rows) * (1 + 0.85 * (count - 1))),
    "cache": Hidden(60, lambda count, threads, rows: (2 + rows * (0.4 if rows <= 8 else 2.0)) * contended(count, 1)),
    "remote": Hidden(60, lambda count, threads, rows: 6 + rows),
}
"""Many small batches; arithmetic that threads share; a device that instances share; batches that outgrow a cache; a
device for each instance."""


class Timed:
    """A Bench that adds up how long its measurements would take on a real server, and how long they take here."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.seconds = self.computed = 0.0
        self.apply, self.memory, self.gpu_memory = bench.apply, bench.memory, bench.gpu_memory

    def closed(self, callers: int, seconds: float, length: int = 0) -> Observation:
        return self._measured(lambda: self._bench.closed(callers, seconds, length), seconds)

    def open(self, rate: float, seconds: float, give_up_ns: float) -> Observation:
        return self._measured(lambda: self._bench.open(rate, seconds, give_up_ns), seconds)

    def _measured(self, run: Callable[[], Observation], seconds: float) -> Observation:
        begun = process_time()
        result = run()
        self.computed += process_time() - begun
        self.seconds += (1 + WARM_SHARE) * seconds
        return result


class Proof(NamedTuple):
    """The choice of `shmserve tune` beside the best setting of a sweep. Rates are those that hold the p99 in long
    simulations; seconds are those of a real server, and the computing time of the tuner itself."""

    model: str
    choice: Candidate
    rate: float
    seconds: float
    best: Candidate
    best_rate: float
    settings: int
    sweep_seconds: float

    def cells(self) -> list[str]:
        return [
            self.model,
            self.choice.describe(),
            f"{self.rate:,.0f}",
            f"{self.best_rate:,.0f}",
            f"{self.rate / self.best_rate:.1%}",
            f"{self.seconds:.0f} s",
            f"{self.sweep_seconds:,.0f} s",
            f"1/{self.sweep_seconds / self.seconds:.0f}",
        ]


HEAD = ("Model", "Choice", "Requests/s", "Best of the sweep", "Share", "Tuning", "Sweep", "Time")


def simulated(name: str, pool: SimulationPool) -> Proof:
    model, goal = tuned(cores=CORES), goal_of(name)
    todo = space(model, goal)
    sweep = pool.run(partial(swept, name), todo)  # computed while the tuner runs
    bench = Timed(SimulatedBench(HIDDEN[name].ms, requests=REQUESTS, lasts_s=goal.seconds))
    begun = process_time()
    outcome = Tuner(bench, model, goal, Events()).run()
    seconds = bench.seconds + process_time() - begun - bench.computed
    assert outcome.chosen is not None
    measured = dict(zip(todo, sweep, strict=True))
    ranked = sorted(todo, key=lambda candidate: -measured[candidate][0])
    compared = list(dict.fromkeys([outcome.chosen, *ranked[:BEST]]))
    near = measured[ranked[0]][0]
    rates = dict(zip(compared, pool.run(partial(true_rate, name, near), compared), strict=True))
    best = max(ranked[:BEST], key=rates.__getitem__)
    return Proof(
        name,
        outcome.chosen,
        rates[outcome.chosen],
        seconds,
        best,
        rates[best],
        len(todo),
        sum(took for _, took in measured.values()),
    )


def goal_of(name: str) -> Goal:
    return Goal(HIDDEN[name].p99_ms * MS, instances=(1, SIMULATED_INSTANCES))


def bench_of(name: str, requests: int = REQUESTS) -> SimulatedBench:
    return SimulatedBench(HIDDEN[name].ms, requests=requests, lasts_s=LASTS * HIDDEN[name].p99_ms / 1000)


def swept(name: str, candidate: Candidate) -> tuple[float, float]:
    """The highest rate of a setting, and the seconds that measuring it takes on a real server."""
    bench = Timed(bench_of(name))
    return highest(bench, tuned(cores=CORES), goal_of(name), candidate).rate, bench.seconds


def write(proof: Proof) -> None:
    """Replaces the row of this model in the table."""
    lines = RESULT.read_text().splitlines()[2:] if RESULT.exists() else []
    rows = {row[0]: row for line in lines for row in [[cell.strip() for cell in line.strip("|").split("|")]]}
    rows[proof.model] = proof.cells()
    RESULT.write_text(markdown(HEAD, [rows[name] for name in HIDDEN if name in rows]) + "\n")


def true_rate(name: str, near: float, candidate: Candidate) -> float:
    """The highest rate that holds the p99 in long simulations, to one percent."""
    bench, goal = bench_of(name, LONG), goal_of(name)
    bench.apply(tuned(cores=CORES).config_of(candidate))
    low, high = 0.0, 1.5 * near
    while high > 1.01 * low:
        rate = (low + high) / 2
        if bench.open(rate, 1.0, 0.0).p99_ns <= goal.p99_ns:
            low = rate
        else:
            high = rate
    assert 0 < low < 1.4 * near
    return low


# ------------------------------------------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.suites.tune", description=__doc__)
    parser.add_argument("where", choices=("simulated", "served"))
    parser.add_argument("folder", type=Path, nargs="?", help="of served models: for the models and the results")
    parser.add_argument("--model", action="append", choices=(*HIDDEN, *P99_MS), help="only this one; repeatable")
    parser.add_argument("--write", action="store_true", help=f"of simulated models: update their rows in {RESULT.name}")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="that compute the sweep of simulated models"
    )
    parser.add_argument("--minutes", type=float, default=600.0, help="stop sweeping after this time")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each measurement on a real server")
    parser.add_argument("--rounds", type=int, default=32, help="measurements of each setting in the final comparison")
    args = parser.parse_args()
    names = list(args.model or (*HIDDEN, *P99_MS))
    if args.where == "simulated":
        with SimulationPool(args.processes) as pool:
            for name in [name for name in names if name in HIDDEN]:
                proof = simulated(name, pool)
                print(proof, flush=True)
                if args.write:
                    write(proof)
        return
    if args.folder is None:
        parser.error("served models need FOLDER")
    until = monotonic() + 60 * args.minutes
    root = args.folder.resolve() / "models"
    root.mkdir(parents=True, exist_ok=True)
    write_models(root)
    for name in [name for name in names if name in P99_MS]:
        file = args.folder / f"{name}.json"
        kept = json.loads(file.read_text()) if file.exists() else {}
        goal = Goal(P99_MS[name] * MS, seconds=args.seconds, instances=INSTANCES)

        def save(file: Path = file, kept: dict[str, Any] = kept) -> None:
            file.write_text(json.dumps(kept, indent=1))

        if "tune" not in kept:
            kept["tune"] = tune(root, name, goal)
            save()
        if sweep(root, name, goal, kept, until, save) and monotonic() < until:
            kept["judge"] = judge(root, name, goal, kept, args.rounds)
            save()
            print(report(name, kept), flush=True)


if __name__ == "__main__":
    main()
