"""Which models stay in memory: the core's choice in simulated time, beside LRU and the best fixed choice.

    python -m bench.suites.eviction [--requests 8000] [--rate 60] [--seed 1] [WORKLOAD ...]
    python -m bench.suites.eviction --beside [--seed 1]

200 models share a memory budget. The core loads at most `Limits.loading` of them at a time, and a load takes time. The
two choices beside it have neither restriction: LRU over the same requests, with loads that take no time, and the models
that would have been best to keep from the first request to the last. A request *hits* if its model is in memory when
it arrives. With `--beside`, one caller uses one model, and another one alternates between models that do not fit into
the memory together: how long the first one waits, beside the same requests alone. The results do not depend on the
machine.
"""

from __future__ import annotations

import argparse
from bisect import bisect
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, product, takewhile
from random import Random

from msgspec import Struct

from shmserve.core.limits import Limits
from shmserve.core.policy import InstanceSpec, MemoryEstimate, ModelPolicy, TensorSpec
from shmserve.sim import Constant, Load, Lognormal, Plan, Poisson, Replay, SimModel
from shmserve.sim.plan import MS
from shmserve.sim.results import SECOND, ModelResult
from shmserve.sim.run import Simulation

MODELS, ROOM, EXPONENT = 200, 20, 1.1
MIB = 1 << 20
SERVICE_NS = 5 * MS
LOAD_NS = 80 * MS
TENSORS = (TensorSpec("x", "FP32", (16,)),), (TensorSpec("y", "FP32", (16,)),)

Requests = list[tuple[float, int]]
"""Time in s, and the number of the model."""


class Workload(Struct, frozen=True):
    """`sizes` and `loads`: of each model, relative to the usual memory and load time."""

    requests: Requests
    sizes: Sequence[float] = (1.0,) * MODELS
    loads: Sequence[float] = (1.0,) * MODELS


class EvictionResult(Struct, frozen=True):
    hits: float
    saved: float
    """The share of load time that hits have saved, of what it would be if every request were to load its model."""
    lru_hits: float
    lru_saved: float
    best: float
    """The share that the best fixed choice would save."""
    hot_p90_ms: float
    hot_loads: int
    longest_ms: float
    """The longest that any request waited for its response."""


class Popularity:
    """Draws models by Zipf's law, in an order of popularity that can change."""

    def __init__(self, random: Random, exponent: float = EXPONENT) -> None:
        self.order = list(range(MODELS))
        self._random = random
        self._sums = list(accumulate((rank + 1) ** -exponent for rank in range(MODELS)))

    def draw(self) -> int:
        place = bisect(self._sums, self._random.random() * self._sums[-1])
        return self.order[min(place, MODELS - 1)]

    def swap(self) -> None:
        one, two = self._random.randrange(MODELS), self._random.randrange(MODELS)
        self.order[one], self.order[two] = self.order[two], self.order[one]


def _times(random: Random, rate: float) -> Iterator[float]:
    return (at / SECOND for at, _ in Poisson(rate).arrivals(random))


def zipf(random: Random, count: int, rate: float) -> Workload:
    """Zipf's law with exponent 1.1"""
    models = Popularity(random)
    return Workload([(at, models.draw()) for _, at in zip(range(count), _times(random, rate), strict=False)])


def uniform(random: Random, count: int, rate: float) -> Workload:
    """all models equally popular, at 0.4 of the rate: most requests load a model"""
    models = Popularity(random, 0.0)
    times = _times(random, 0.4 * rate)
    return Workload([(at, models.draw()) for _, at in zip(range(count), times, strict=False)])


def drift(random: Random, count: int, rate: float) -> Workload:
    """Zipf; every 40 requests, two models swap their popularity"""
    models = Popularity(random)
    results: Requests = []
    for number, at in zip(range(count), _times(random, rate), strict=False):
        results.append((at, models.draw()))
        if number % 40 == 39:
            models.swap()
    return Workload(results)


def shift(random: Random, count: int, rate: float) -> Workload:
    """Zipf; every 4,000 requests, popularity is dealt anew"""
    models = Popularity(random)
    results: Requests = []
    for number, at in zip(range(count), _times(random, rate), strict=False):
        results.append((at, models.draw()))
        if number % 4000 == 3999:
            random.shuffle(models.order)
    return Workload(results)


def scan(random: Random, count: int, rate: float) -> Workload:
    """Zipf; every 1,500 requests, one for each model in turn"""
    models = Popularity(random)
    results: Requests = []
    for number, at in zip(range(count), _times(random, rate), strict=False):
        turn = number % (1500 + MODELS) - 1500
        results.append((at, turn if turn >= 0 else models.draw()))
    return Workload(results)


def bursts(random: Random, count: int, rate: float) -> Workload:
    """Zipf; half of the requests are sessions: 100 to a random model, which then is forgotten"""
    models, session = Popularity(random), 0
    results: Requests = []
    for number, at in zip(range(count), _times(random, rate), strict=False):
        if number % 200 == 0:
            session = random.randrange(MODELS)
        results.append((at, session if number % 2 else models.draw()))
    return Workload(results)


def sizes(random: Random, count: int, rate: float) -> Workload:
    """Zipf; models of 0.25 to 4 times the memory, and of 0.25 to 4 times the load time"""
    drawn = zipf(random, count, rate)
    relative = [[4.0 ** random.uniform(-1, 1) for _ in range(MODELS)] for _ in range(2)]
    return Workload(drawn.requests, *relative)


WORKLOADS: dict[str, Callable[[Random, int, float], Workload]] = {
    workload.__name__: workload for workload in (zipf, uniform, drift, shift, scan, bursts, sizes)
}


# ------------------------------------------------------------------------------------ the core


def _model(number: int, size: float, load: float) -> SimModel:
    name = f"m{number}"
    policy = ModelPolicy(name, 1, 0, *TENSORS, None)
    memory = MemoryEstimate(round(size * MIB), configured=True)
    service, loading = Constant(SERVICE_NS), Lognormal(round(LOAD_NS * load), 0.3)
    return SimModel(policy, (InstanceSpec(name),), service, loading, memory=memory)


def of_core(workload: Workload, seed: int) -> list[ModelResult]:
    arrivals: list[list[tuple[int, int]]] = [[] for _ in range(MODELS)]
    for at, number in workload.requests:
        arrivals[number].append((round(at * SECOND), 1))
    models = [
        _model(number, size, load)
        for number, (size, load) in enumerate(zip(workload.sizes, workload.loads, strict=True))
    ]
    loads = tuple(Load(f"m{number}", Replay(tuple(times))) for number, times in enumerate(arrivals) if times)
    limits = Limits(memory_budget=ROOM * MIB)
    simulation = Simulation(Plan(tuple(models), loads, seed=seed, limits=limits))
    simulation.deploy()
    for number in range(MODELS):
        simulation.model_result(f"m{number}").loads = 0
    simulation.run()
    assert not simulation.result().lost
    return [simulation.model_result(f"m{number}") for number in range(MODELS)]


# ------------------------------------------------------------------------------------ beside it


def of_lru(workload: Workload) -> Counter[int]:
    """Hits by model, if loads take no time."""
    awake: OrderedDict[int, None] = OrderedDict()
    hits: Counter[int] = Counter()
    used = 0.0
    for _, number in workload.requests:
        if number in awake:
            awake.move_to_end(number)
            hits[number] += 1
            continue
        awake[number] = None
        used += workload.sizes[number]
        while used > ROOM:
            used -= workload.sizes[awake.popitem(last=False)[0]]
    return hits


def of_best(workload: Workload) -> Counter[int]:
    """Hits by model, if those stay in memory that save the most load time for their size."""
    asked = Counter(number for _, number in workload.requests)
    remaining, hits = float(ROOM), Counter[int]()
    for number in sorted(asked, key=lambda n: -asked[n] * workload.loads[n] / workload.sizes[n]):
        if workload.sizes[number] <= remaining:
            remaining -= workload.sizes[number]
            hits[number] = asked[number]
    return hits


def run(name: str, count: int, rate: float, seed: int) -> EvictionResult:
    workload = WORKLOADS[name](Random(f"{seed} {name}"), count, rate)
    results = of_core(workload, seed)
    asked = Counter(number for _, number in workload.requests)
    whole = sum(asked[number] * workload.loads[number] for number in asked)

    def saved(hits: Counter[int]) -> float:
        return sum(hits[number] * workload.loads[number] for number in hits) / whole

    own = Counter({number: result.sent - result.cold for number, result in enumerate(results)})
    lru, best = of_lru(workload), of_best(workload)
    hot = results[max(asked, key=lambda number: asked[number])]
    return EvictionResult(
        own.total() / count,
        saved(own),
        lru.total() / count,
        saved(lru),
        saved(best),
        hot.latency.quantile(0.9) / MS,
        hot.loads,
        max(result.latency.largest for result in results) / MS,
    )


# ------------------------------------------------------------------------------------ beside another caller

ALTERNATING = 6
"""The models of the other caller, of which three fit beside the first caller's model."""
BESIDE_S = 300


def beside(rate: float, load_s: float, other_rate: float, seed: int) -> ModelResult:
    """The result of a caller with this many requests/s to one model, for BESIDE_S."""
    load_ns = round(load_s * SECOND)
    models = [_model(number, 1.0, load_ns / LOAD_NS) for number in range(1 + ALTERNATING)]
    honest, other = Random(f"{seed} honest"), Random(f"{seed} other")
    loads = [Load("m0", Replay(_arrivals(honest, rate)), audience="uid:2000")]
    turns = _arrivals(other, other_rate) if other_rate else ()
    for number in range(ALTERNATING):
        own = turns[number::ALTERNATING]
        loads += [Load(f"m{1 + number}", Replay(own))] if own else []
    simulation = Simulation(Plan(tuple(models), tuple(loads), seed=seed, limits=Limits(memory_budget=4 * MIB)))
    simulation.deploy()
    simulation.run()
    return simulation.model_result("m0")


def _arrivals(random: Random, rate: float) -> tuple[tuple[int, int], ...]:
    times = takewhile(lambda at: at < BESIDE_S, _times(random, rate))
    return tuple((round(at * SECOND), 1) for at in times)


def compare_callers(seed: int) -> None:
    print(
        "| requests/s | load s | other's requests/s | cold | p90 ms | longest ms | alone: cold | p90 ms | longest ms |"
    )
    for rate, load_s, other_rate in product((0.1, 0.5, 2.0, 10.0), (0.08, 1.0), (2.0, 20.0)):
        cells = [f"{rate:g}", f"{load_s:g}", f"{other_rate:g}"]
        for others in (other_rate, 0.0):
            result = beside(rate, load_s, others, seed)
            latency = result.latency
            cells += [
                f"{result.cold / result.sent:.3f}",
                f"{latency.quantile(0.9) / MS:,.0f}",
                f"{latency.largest / MS:,.0f}",
            ]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--rate", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--beside", action="store_true", help="measure one caller beside another one")
    args = parser.parse_args()
    if args.beside:
        compare_callers(args.seed)
        return
    print("| workload | hits | LRU | load time saved | LRU | best fixed | hot p90 ms | hot loads | longest ms |")
    for name in args.workloads or WORKLOADS:
        result = run(name, args.requests, args.rate, args.seed)
        shares = (result.hits, result.lru_hits, result.saved, result.lru_saved, result.best)
        cells = [*(f"{share:.3f}" for share in shares), f"{result.hot_p90_ms:.1f}", f"{result.hot_loads}"]
        cells.append(f"{result.longest_ms:,.0f}")
        print(f"| {' | '.join([name, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
