"""Begins a request to an ensemble: fixes the versions of its steps and stores its inputs.

Invariant: all steps run on the versions found here, even if newer versions take over during the run. Sequences are the
exception (`Steps.follow`).
"""

from __future__ import annotations

from collections import deque

from shmserve.core.owners.run import Held, Iteration, Run, plans_of
from shmserve.core.records import Request, Version
from shmserve.core.service.graph import EnsembleGraph, StepPlan, reshape
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
    held: Held = {} if outer is None else outer.held
    state.observers.run_begun(request)
    members: dict[int, Version] = {}
    plans: dict[int, StepPlan] = {}
    failure, room = None, 0
    try:
        for index in needed:
            step = graph.steps[index]
            members[index] = _hold(state, held, state.resolve(step.model, version.model), step.version)
        many = frozenset([index for index, member in members.items() if member.service.decoupled])
        if many:
            room = _window(request, graph, members, many)
        levels = graph.levels(needed, many)
        plans = plans_of(graph, wanted, needed, members)
    except ServeError as error:
        failure, levels = (error.code, error.message), graph.levels(needed, _NONE)
    places: list[deque[Iteration]] = [deque() for _ in levels.steps]
    runs = state.runs
    run = Run(
        request,
        state.ledger,
        runs,
        state.observers,
        graph,
        needed,
        wanted,
        held,
        levels,
        [0, 0, 0],
        members,
        plans,
        places,
        room,
        failure,
    )
    request.move(RequestState.CHAINED)
    runs[request.number] = run
    version.users += 1
    runs.to_advance[run] = None
    if failure is None:
        inputs = [_inner(request, tensor) for tensor in request.inputs] if graph.reshapes else request.inputs
        run.begin(0, [(tensor.name, tensor) for tensor in inputs], False)


def _window(request: Request, graph: EnsembleGraph, members: dict[int, Version], many: frozenset[int]) -> int:
    """The number of responses that the caller accepts. `many`: the decoupled steps. Raises if they cannot run."""
    names = ", ".join(f"'{members[index].model}'" for index in sorted(many))
    if request.options is None or not request.options.window:  # the ensemble became decoupled only in this turn
        raise Unavailable(f"{names} of a step has become decoupled; call the ensemble with stream()")
    if any(graph.steps[index].mapped for index in many):
        raise Unavailable(f"{names} has become decoupled; a decoupled step cannot be mapped")
    return request.options.window


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
