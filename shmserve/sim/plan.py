"""What to simulate: models, loads, faults, and the costs of messages and turns. Immutable values only."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from shmserve.core.limits import Limits
from shmserve.core.policy import InstanceSpec, MemoryEstimate, ModelPolicy, ScalingPolicy
from shmserve.sim.faults import Faults
from shmserve.sim.load import Load
from shmserve.sim.service import Constant, Service

MS = 1_000_000


class SimModel(Struct, frozen=True):
    """A served model. An ensemble (`policy.steps`) has no instances, and the models of its steps are also in the plan.

    `service` and `load` are the distributions of execution and loading times. `free_dims`: the range from which -1 dims
    of outputs are drawn, e.g. the number of crops over which a step is mapped. `responses`: the range of the number of
    responses per request of a decoupled model. `iterations`: how often an iterative model runs each request.
    """

    policy: ModelPolicy
    instances: tuple[InstanceSpec, ...] = ()
    service: Service = Constant(MS)
    load: Service = Constant(0)
    free_dims: tuple[int, int] = (1, 1)
    true_share: float = 0.5
    """Probability that an output of a single BOOL is true."""
    responses: tuple[int, int] = (1, 1)
    iterations: int = 1
    calls: tuple[str, ...] = ()
    """Models that it calls for each request, one after another, before it computes. The calls block its instance."""
    scaling: ScalingPolicy | None = None
    """How the number of instances follows the load; `instances` are the initial ones."""
    memory: MemoryEstimate = MemoryEstimate()
    """What each instance uses of the memory budgets in `Plan.limits`."""


class Plan(Struct, frozen=True):
    """One simulation. Arrivals end after `seconds` or after `requests` requests, whichever is first (0: no limit). The
    simulation then continues until all requests are answered, at most for `patience_s`.

    A message between processes takes `link_ns`. A turn of the broker takes `turn_ns`, plus `message_ns` for each
    message in it; messages that arrive during a turn are processed in the next one. `check_every`: call `Core.check`
    after every n-th turn (0: never).
    """

    models: tuple[SimModel, ...]
    loads: tuple[Load, ...] = ()
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
    """Mean time between two reloads, each of one of the served models; 0: no reloads."""
    patience_s: float = 600.0
    """Simulated time after the last arrival, after which unanswered requests count as lost."""


def simple_model(policy: ModelPolicy, instances: int, service: Service) -> SimModel:
    """A model with this many identical instances."""
    specs = tuple(InstanceSpec(f"{policy.name}_{index}") for index in range(instances))
    return SimModel(policy, specs, service)


def may_stream(model: SimModel, models: Sequence[SimModel]) -> bool:
    """Whether a request may get several responses: the model is decoupled, or an ensemble with such a step."""
    names = {step.model for step in model.policy.steps or ()}
    return model.policy.decoupled or any(may_stream(other, models) for other in models if other.policy.name in names)
