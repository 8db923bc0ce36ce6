"""Begins a request to an ensemble: fixes the versions of its steps and stores its inputs.

Invariant: all steps run on the versions found here, even if newer versions take over during the run. Sequences are the
exception (`Steps.follow`).
"""

from __future__ import annotations

from collections import deque

from shmserve.core.owners.plan import plans_of
from shmserve.core.owners.run import Held, Run
from shmserve.core.records import Request, Version
from shmserve.core.service.graph import reshape
from shmserve.core.state import State
from shmserve.core.states import RequestState
from shmserve.errors import ServeError, Unavailable
from shmserve.protocol.messages import Tensor, Wanted

_NONE: frozenset[int] = frozenset()


def begin(state: State, request: Request) -> None:
    """Creates the run of a validated request. `advance` starts the first steps."""
    version = request.version
    graph = version.service.graph
    assert graph is not None
    wanted: dict[str, Wanted | None]
    if request.outputs is None:
        wanted = dict.fromkeys(graph.outputs)
    else:
        wanted = {output.name: output for output in request.outputs}
    outer = state.runs.get(request.parent)
    needed = graph.needed(tuple(wanted))
    held = {} if outer is None else outer.held
    levels = graph.levels(needed, _NONE)
    state.observers.run_begun(request)
    run = Run(request, state.ledger, state.runs, graph, needed, wanted, held, levels, times=[0, 0, 0])
    request.move(RequestState.CHAINED)
    state.runs[request.number] = run
    version.users += 1
    state.runs.to_advance[run] = None
    try:
        _take_members(state, run)
    except ServeError as error:
        run.fail(error.code, error.message)
        return
    run.plans = plans_of(run)
    run.open = [deque() for _ in run.levels.steps]
    inputs = [_inner(request, tensor) for tensor in request.inputs] if graph.reshapes else request.inputs
    run.begin(0, [(tensor.name, tensor) for tensor in inputs], False)


def _take_members(state: State, run: Run) -> None:
    request = run.request
    for index in run.needed:
        step = run.graph.steps[index]
        run.members[index] = _hold(state, run.held, state.resolve(step.model, request.version.model), step.version)
    many = frozenset(index for index, member in run.members.items() if member.service.decoupled)
    if not many:
        return
    names = ", ".join(f"'{run.members[index].model}'" for index in sorted(many))
    if request.options is None or not request.options.window:  # the ensemble became decoupled only in this turn
        raise Unavailable(f"{names} of a step has become decoupled; call the ensemble with stream()")
    if any(run.graph.steps[index].mapped for index in many):
        raise Unavailable(f"{names} has become decoupled; a decoupled step cannot be mapped")
    run.levels = run.graph.levels(run.needed, many)
    run.room = request.options.window


def _hold(state: State, held: Held, name: str, number: int) -> Version:
    """Holds the version that runs all steps with this name and number, even after another version has taken over."""
    member = held.get((name, number))
    if member is None:
        member = held[name, number] = state.look_up(name, number)
        member.users += 1
        for step in member.service.graph.steps if member.service.graph is not None else ():
            _hold(state, held, state.resolve(step.model, member.model), step.version)
    return member


def _inner(request: Request, tensor: Tensor) -> Tensor:
    """An input in the shape that the steps see."""
    policy = request.version.policy
    assert policy is not None
    for spec in policy.inputs:
        if spec.reshape is not None and spec.name == tensor.name:
            shape = reshape(tensor.shape, spec.dims, spec.reshape, policy.max_batch > 0)
            return Tensor(tensor.name, tensor.dtype, shape, tensor.data)
    return tensor
