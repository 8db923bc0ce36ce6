"""What is simulated: models, loads, faults, and what the machine between them takes. Frozen values, nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from shmserve.core.limits import Limits
from shmserve.core.policy import InstanceSpec, ModelPolicy
from shmserve.sim.faults import Faults
from shmserve.sim.load import Load
from shmserve.sim.service import Constant, Service

MS = 1_000_000


class SimModel(Struct, frozen=True):
    """A model that is served. An ensemble (`policy.steps`) has no instances, and its steps' models are in the plan too.

    `free` is what dimensions of outputs are drawn from where the policy says -1: so many crops, say, over which a step
    is mapped. `answers`: how often a decoupled model answers a request. `runs`: how often an iterative one runs it."""

    policy: ModelPolicy
    instances: tuple[InstanceSpec, ...] = ()
    service: Service = Constant(MS)
    load: Service = Constant(0)
    free: tuple[int, int] = (1, 1)
    true_share: float = 0.5
    """Of outputs of one BOOL: how often it is true."""
    answers: tuple[int, int] = (1, 1)
    runs: int = 1
    calls: tuple[str, ...] = ()
    """Models that it calls for each request, one after the other, before it computes. Its instance waits for them."""


class Plan(Struct, frozen=True):
    """Arrivals end after `seconds`, or with so many `requests` (0: no such limit); then what is left is answered.

    A message takes `link_ns` from process to process. The broker takes `turn_ns` for a turn and `message_ns` for each
    message in it; what comes meanwhile is in the next turn. `check_every`: `Core.check` after every n-th turn."""

    models: tuple[SimModel, ...]
    loads: tuple[Load, ...]
    seconds: float = 0.0
    requests: int = 0
    seed: int = 0
    faults: Faults = Faults()
    limits: Limits = Limits()
    link_ns: int = 20_000
    turn_ns: int = 20_000
    message_ns: int = 4_000
    check_every: int = 0
    reload_every_s: float = 0.0
    """Mean time until one of the models is loaded again, beside what is served; 0: never."""
    patience_s: float = 600.0
    """Simulated time after the last arrival; what has not been answered then is lost."""


def simple_model(
    policy: ModelPolicy, instances: int = 1, service: Service | None = None, load: Service | None = None
) -> SimModel:
    """With so many instances that are all alike."""
    specs = tuple(InstanceSpec(f"{policy.name}_{index}") for index in range(instances))
    return SimModel(policy, specs, service or Constant(MS), load or Constant(0))


def answers_many(model: SimModel, models: Sequence[SimModel]) -> bool:
    """Is it decoupled, or an ensemble that has such a step?"""
    names = {step.model for step in model.policy.steps or ()}
    return model.policy.decoupled or any(answers_many(other, models) for other in models if other.policy.name in names)
