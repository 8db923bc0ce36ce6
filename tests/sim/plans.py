"""Plans for tests: simple ones, and random ones that cover all features."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from msgspec.structs import replace

from shmserve.core.limits import Limits
from shmserve.core.policy import (
    BatchPolicy,
    InstanceSpec,
    ModelPolicy,
    QueuePolicy,
    Resource,
    SequencePolicy,
    StepPolicy,
    TensorSpec,
    TimeoutAction,
)
from shmserve.sim import Bursts, Closed, Faults, Load, Plan, Poisson, Regular, SimModel
from shmserve.sim.service import Affine, Constant, Lognormal, Service, Table

MS = 1_000_000
LIMIT_NS = 200 * MS
"""A batch that takes longer hangs."""


def tensor(name: str, dims: tuple[int, ...] = (4,), dtype: str = "FP32", optional: bool = False) -> TensorSpec:
    return TensorSpec(name, dtype, dims, optional)


X, Y = (tensor("x"),), (tensor("y"),)


def policy(
    name: str = "m",
    max_batch: int = 8,
    batching: BatchPolicy | None = None,
    inputs: tuple[TensorSpec, ...] = X,
    outputs: tuple[TensorSpec, ...] = Y,
    **more: Any,
) -> ModelPolicy:
    if batching is None and max_batch > 1 and not more.keys() & {"sequence", "steps"}:
        batching = BatchPolicy()
    return ModelPolicy(name, 1, max_batch, inputs, outputs, batching, LIMIT_NS, **more)


def served(known: ModelPolicy, instances: int = 1, service: Service | None = None) -> SimModel:
    specs = tuple(InstanceSpec(f"{known.name}_{index}") for index in range(instances))
    return SimModel(known, specs, service or Affine(2 * MS, MS))


def pipeline(cached: bool = False) -> tuple[SimModel, ...]:
    """cut -> find (for each cut, if requested) -> out: an ensemble with a condition and a step mapped over rows."""
    cut = policy("cut", 0, outputs=(tensor("rows", (-1, 4)), tensor("go", (1,), "BOOL")))
    find = policy("find", 4)
    steps = (
        StepPolicy("cut", 0, (("x", "in"),), (("go", "go"), ("rows", "rows"))),
        StepPolicy("find", 0, (("x", "rows"),), (("y", "out"),), mapped="rows", condition="go"),
    )
    both = policy("both", 0, None, (tensor("in"),), (tensor("out", (-1, 4)),), steps=steps, cached=cached)
    cutter = served(cut)
    return (
        SimModel(cutter.policy, cutter.instances, Constant(MS), free_dims=(0, 5), true_share=0.8),
        served(find, 2),
        SimModel(both),
    )


def some_faults(draw: Random) -> Faults:
    def rarely(most: float) -> float:
        return draw.choice((0.0, most, most / 4))

    return Faults(
        death_every_s=draw.choice((0.0, 0.5, 2.0)),
        crash_share=rarely(0.02),
        poison_share=rarely(0.01),
        hang_share=rarely(0.005),
        failure_share=rarely(0.05),
        late_share=rarely(0.5),
        late_ns=50 * MS,
        client_every_s=draw.choice((0.0, 0.2, 1.0)),
        slow_share=rarely(0.5),
        hold_ns=20 * MS,
        cancel_share=rarely(0.1),
        cancel_ns=draw.choice((1, MS, 8 * MS)),
    )


def some_service(draw: Random) -> Service:
    table = Table(((1, (MS, 2 * MS)), (4, (2 * MS, 3 * MS, 9 * MS))))
    return draw.choice((Constant(0), Constant(3 * MS), Affine(MS, MS // 2), Lognormal(2 * MS, 1.0), table))


def some_batching(draw: Random) -> BatchPolicy:
    levels = draw.choice((0, 0, 3))
    action = draw.choice((TimeoutAction.REJECT, TimeoutAction.DELAY))
    queue = QueuePolicy(action, draw.choice((0, 0, 5 * MS)), True, draw.choice((0, 0, 12)))
    return BatchPolicy(
        preferred=draw.choice(((), (4,), (2, 6))),
        delay_ns=draw.choice((0, 0, 300_000, 4 * MS)),
        preserve_ordering=draw.random() < 0.2,
        levels=levels,
        default_level=2 if levels else 0,
        default_policy=queue if draw.random() < 0.4 else QueuePolicy(),
    )


def some_load(draw: Random, model: SimModel) -> Load:
    rate = draw.choice((50.0, 300.0, 900.0))
    arrivals = draw.choice((Poisson(rate), Bursts(rate, 12), Regular(rate), Closed(draw.randint(1, 20), MS)))
    known = model.policy
    rows = (1, draw.randint(1, max(known.max_batch, 1)))
    return Load(
        known.name,
        arrivals,
        clients=draw.randint(1, 4),
        rows=(1, 1) if known.sequence is not None else rows,
        timeout_ns=draw.choice((0, 0, 5 * MS, 60 * MS)),
        priority=draw.randint(0, 4),
        sequence=(1, draw.randint(1, 6)),
        gap_ns=draw.choice((0, MS, 15 * MS)),
        window=draw.choice((1, 3, 100)),
        distinct=draw.choice((0, 5, 50)),
    )


def limited(draw: Random) -> tuple[SimModel, ...]:
    """Two models whose instances cannot all run at once."""
    made = []
    for name in ("other", "m"):
        model = served(policy(name, batching=some_batching(draw)), 2, some_service(draw))
        resources = (Resource("memory", draw.randint(1, 2)), Resource("bus", 1, True))
        specs = tuple(replace(spec, resources=resources, turn=draw.randint(1, 3)) for spec in model.instances)
        made.append(SimModel(model.policy, specs, model.service))
    return tuple(made)


KINDS = (
    *("batches", "batches", "large", "single", "direct", "oldest", "iterative", "streams"),
    *("steps", "cached", "limited"),
)


def some_models(draw: Random) -> tuple[SimModel, ...]:
    kind = draw.choice(KINDS)
    if kind == "steps":
        return pipeline(draw.random() < 0.3)
    if kind == "limited":
        return limited(draw)
    batching, retry = some_batching(draw), draw.random() < 0.7
    wide = (tensor("x", (2000,)),), (tensor("y", (2000,)), tensor("z", (2,)))
    slots, idle, delay = draw.randint(1, 4), draw.choice((30 * MS, 1000 * MS)), draw.choice((0, 2 * MS))
    known = {
        "batches": policy("m", 8, batching, retry=retry),
        "large": policy("m", 8, batching, *wide, retry=retry),
        "cached": policy("m", 8, batching, (tensor("x"),), draw.choice((wide[1], (tensor("y"),))), cached=True),
        "single": policy("m", draw.choice((0, 1)), retry=retry),
        "direct": policy("m", slots, sequence=SequencePolicy(True, slots, idle, delay, draw.choice((0.0, 0.5, 1.0)))),
        "oldest": policy("m", 4, sequence=SequencePolicy(False, 3, idle, batching=BatchPolicy(delay_ns=delay))),
        "iterative": policy("m", 4, sequence=SequencePolicy(False, 3, idle, iterative=True)),
        "streams": policy("m", 4, batching, decoupled=True),
    }[kind]
    made = served(known, draw.randint(1, 3), some_service(draw))
    runs = draw.randint(1, 4) if kind == "iterative" else 1
    return (SimModel(known, made.instances, made.service, Constant(5 * MS), responses=(0, 9), iterations=runs),)


def calling(draw: Random) -> tuple[SimModel, ...]:
    """Models that call each other, also in cycles, and an ensemble that one of them may call."""
    wide, small = ((tensor("x", (2000,)),), (tensor("y", (2000,)),)), ((tensor("x"),), (tensor("y"),))
    names = ("m", "n", "k")
    found = []
    for name in names:
        known = policy(name, draw.choice((1, 4)), some_batching(draw), *draw.choice((wide, small)))
        calls = tuple(draw.choice((*names, "both")) for _ in range(draw.randint(0, 2)))
        found.append(replace(served(known, draw.randint(1, 3), some_service(draw)), calls=calls))
    own = policy("own", 4, BatchPolicy(preserve_ordering=draw.random() < 0.5))
    steps = StepPolicy("own", 0, (("x", "x"),), (("y", "t"),)), StepPolicy("own", 0, (("x", "t"),), (("y", "y"),))
    others = replace(served(own, 2), calls=draw.choice(((), ("k",)))), SimModel(policy("both", 4, steps=steps))
    return (*others, *reversed(found))


def some_plan(
    seed: int, seconds: float = 0.5, check_every: int = 1, kind: Callable[[Random], tuple[SimModel, ...]] = some_models
) -> Plan:
    draw = Random(seed)
    models = kind(draw)
    loads = tuple(some_load(draw, models[-1]) for _ in range(draw.randint(1, 2)))
    costs = draw.choice(((0, 0, 0), (20_000, 20_000, 4_000), (500_000, 300_000, 10_000)))
    reload = draw.choice((0.0, 0.0, 0.1))
    faults = some_faults(draw)
    limits = Limits(rate_limit=draw.random() < 0.5, cache_bytes=draw.choice((0, 50_000, 1 << 24)))
    if models[0].policy.name == "other":
        limits = replace(limits, rate_limit=True)
        loads += (some_load(draw, models[0]),)
    return Plan(models, loads, seconds, 0, seed, faults, limits, *costs, check_every, reload)
