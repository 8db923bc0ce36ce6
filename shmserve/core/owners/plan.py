"""Plans of the steps of an ensemble: everything that does not depend on the individual request is computed once and
cached.

Invariant: a plan is used only while the steps have the policies for which it was made. The cache holds references to
these policies, so that their ids, which are part of its keys, cannot be reused.
"""

from __future__ import annotations

from shmserve.core.owners.run import Run
from shmserve.core.records import Version
from shmserve.core.service.graph import StepInput, StepPlan
from shmserve.protocol.messages import Wanted

_PLANS = 64
"""Cached plans per ensemble; beyond that, the cache is cleared. Limited because callers choose the outputs."""
FITTED = 256
"""Cached input shapes per step; beyond that, the cache is cleared."""


def plans_of(run: Run) -> dict[int, StepPlan]:
    members, cache = run.members, run.graph.plans
    key = (tuple(run.wanted), *[id(member.policy) for member in members.values()])
    plans = cache.get(key)
    if plans is None:
        plans = {index: _plan(run, index, member) for index, member in members.items()}
        if len(cache) >= _PLANS:
            cache.clear()
        cache[key] = plans
    return plans


def _plan(run: Run, index: int, member: Version) -> StepPlan:
    step, policy = run.graph.steps[index], member.policy
    assert policy is not None
    specs = {spec.name: spec for spec in policy.inputs}
    inputs = []
    for own, name in step.inputs:
        spec = specs.get(own)
        required = name == step.mapped or (spec is not None and not spec.optional)
        inputs.append(StepInput(own, name, spec.dims if spec is not None else None, required))
    outputs = []
    for own, name in step.outputs:
        if name in run.wanted or any(reader in run.needed for reader in run.graph.readers.get(name, ())):
            outputs.append(Wanted(own))
    final = any(name in run.wanted for _, name in step.outputs)
    return StepPlan(policy, tuple(inputs), tuple(outputs), final)
