"""The state of a request to an ensemble: existing tensors, steps in progress, and results not yet processed.

A step whose model is decoupled is a *source*: each of its responses starts an Iteration, in which everything that
depends on the source runs once. Steps that depend on no source run in the single iteration of level 0; steps that
depend on a source of level 0 are level 1, and so on. This module only keeps records; `core.ensembles.advance` acts on
them.

Invariant: responses stay in order, because only the first open iteration of a level starts its source. So the
iterations above the first one of a level are also the first ones of their levels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

from msgspec import Struct, field

from shmserve.core.fair_queue import FairQueue
from shmserve.core.ledger import Ledger
from shmserve.core.owners.observers import Observers
from shmserve.core.records import STEP, Request, Response, Version
from shmserve.core.service.graph import EnsembleGraph, Levels, StepInput, StepPlan
from shmserve.protocol.messages import Fail, Handle, Part, Reply, Tensor, Wanted

Held = dict["tuple[str, int] | Version", Version]
_PLANS = 64
"""Cached plans per ensemble; beyond that, the cache is cleared. Limited because callers choose the outputs."""
FITTED = 256
"""Cached input shapes per step; beyond that, the cache is cleared."""


class KeptTensor(Struct, eq=False):
    """An existing tensor of the ensemble. `readers`: steps that have not read it yet. All levels below, and the
    response, count as one more, which ends with the iteration."""

    tensor: Tensor
    readers: int
    produced: bool
    """Produced by a step, and therefore pinned by the run; otherwise it is the caller's."""


class Iteration(Struct, eq=False):
    """One execution of the steps of a level. `remaining`: steps that are not done."""

    level: int
    remaining: int
    tensors: dict[str, KeptTensor] = {}
    skipped: set[str] = set()
    """Tensors that will not be produced, because a condition was false."""
    absent: set[str] = set()
    """Tensors that a model should have produced but did not."""
    pending: dict[int, int] = {}
    """For each step that has not started: how many tensors it waits for."""
    due: dict[int, int] = {}
    """For each step that has started: how many results (one per row) are missing."""
    rows: dict[int, dict[int, tuple[Tensor, ...]]] = {}
    """For each mapped step: the results so far, by row."""
    held_back: bool = False
    """Its source is ready, but must wait for earlier iterations."""

    def knows(self, name: str) -> bool:
        """True if the tensor exists, or is known never to exist."""
        return name in self.tensors or name in self.skipped or name in self.absent


class StepPosition(NamedTuple):
    """The purpose of a step's request. `row`: index in the tensor over which the step is mapped, 0 otherwise."""

    step: int
    row: int
    iteration: Iteration


class MappedStep(Struct, eq=False):
    """A mapped step with rows left to request: `rows`, the first of which has the index `next`."""

    step: int
    iteration: Iteration
    inputs: list[tuple[StepInput, Tensor]]
    rows: Iterator[Tensor]
    count: int
    next: int = 0


class Runs(dict[int, "Run"]):
    """Number of the request to an ensemble -> its run."""

    def __init__(self) -> None:
        self.to_advance: dict[Run, None] = {}
        """Runs to advance: a step's result has arrived, or the run has failed."""
        self.with_rows: FairQueue[Run] = FairQueue()
        """Runs with rows that still need requests, queued by user. May contain runs that have ended."""


class Run(Struct, eq=False):
    """The requester of the steps. `runs`: itself and all others. `over`: the last response has been sent to the
    caller."""

    kind: ClassVar[str] = STEP
    request: Request
    ledger: Ledger
    runs: Runs
    observers: Observers
    graph: EnsembleGraph
    needed: frozenset[int]
    wanted: dict[str, Wanted | None]
    held: Held
    """Versions of all its steps and of nested ensembles' steps, by name and number. Nested runs share it."""
    levels: Levels
    times: list[int]
    """Total input, infer and output ns of its steps' batches."""
    members: dict[int, Version]
    plans: dict[int, StepPlan]
    open: list[deque[Iteration]]
    """For each level: the open iterations, in order."""
    room: int
    """Responses that the caller accepts before it sends More."""
    failure: tuple[str, str] | None
    ready: list[tuple[Iteration, int]] = []
    mapped: deque[MappedStep] = field(default_factory=deque)
    """Invariant: if this is not empty and the run has not failed, the run is in Runs.with_rows."""
    in_flight: dict[Request, StepPosition] = {}
    """Requests of steps that have not ended, and their purposes."""
    sources: dict[int, Request] = {}
    """Level -> the request in flight to its source."""
    forwarded: set[Handle] = set()
    """Outputs of steps that are the caller's own memory, which the ledger does not track."""
    results: list[tuple[StepPosition, Reply | Part | Fail]] = []
    over: bool = False

    # ------------------------------------------------------------------------------------ as a requester

    def hold(self, handles: Iterable[Handle]) -> None:
        for handle in handles:
            self.ledger.keep(handle)

    def drop(self, handles: Iterable[Handle]) -> None:
        for handle in self.request.client.of_others(handles):
            if handle not in self.forwarded:
                self.ledger.unpin(handle)

    def deliver(self, request: Request, message: Response) -> None:
        """Records a result of a step. `advance` processes it."""
        assert isinstance(message, Reply | Part | Fail)
        position = self.in_flight[request]
        self.results.append((position, message))
        self.runs.to_advance[self] = None
        if isinstance(message, Part) and not message.last:
            return
        spent: Sequence[int] = ()
        queue_ns = 0
        inner = self.runs.get(request.number)
        if inner is not None:  # the step is an ensemble itself
            spent = inner.times
        elif request.batch is not None and request.batch.times:
            taken, ready, computed, placed = request.batch.times
            spent = (ready - taken, computed - ready, placed - computed)
            queue_ns = max(0, taken - request.arrived)
        for index, ns in enumerate(spent):
            self.times[index] += ns
        self.observers.step_done(self.request.version, position.step, queue_ns, spent, isinstance(message, Fail))

    def entered(self, request: Request, position: StepPosition) -> None:
        """A step was requested."""
        self.in_flight[request] = position
        request.client.steps += 1
        request.client.bytes += request.inline
        request.payer.enter()

    def fail_early(self, request: Request, code: str, text: str) -> None:
        self.deliver(request, Fail(request.client_number, code, text))

    def detached(self, request: Request) -> None:
        """A step counts until it ends."""

    def released(self, request: Request) -> None:
        """The run looks at what is in flight."""

    def ended(self, request: Request) -> None:
        del self.in_flight[request]
        client = request.client
        client.steps -= 1
        client.bytes -= request.inline
        self.runs.to_advance[self] = None

    def follow(self, index: int, member: Version) -> None:
        """The step continues a sequence in this generation, which is held in addition to those held by name."""
        self.members[index] = member
        self.plans = plans_of(self.graph, self.wanted, self.needed, self.members)
        if member not in self.held:
            self.held[member] = member
            member.users += 1

    # ------------------------------------------------------------------------------------ failure

    def fail(self, code: str, text: str) -> None:
        """Records a failure. Only the first one is reported."""
        if self.failure is None:
            self.failure = code, text

    # ------------------------------------------------------------------------------------ tensors

    def home(self, iteration: Iteration, name: str) -> Iteration:
        """The iteration that contains the tensor: this one, or one of a level above."""
        level = self.levels.tensors.get(name, 0)
        return iteration if level == iteration.level else self.open[level][0]

    def find(self, iteration: Iteration, name: str) -> KeptTensor | None:
        return iteration.tensors.get(name) or self.home(iteration, name).tensors.get(name)

    def keep(self, iteration: Iteration, name: str, tensor: Tensor, produced: bool) -> bool:
        """Stores the tensor. False: no step will read it."""
        readers = self.levels.reads.get(name, 0) + (produced and name in self.wanted)
        if readers:
            iteration.tensors[name] = KeptTensor(tensor, readers, produced)
        return readers > 0

    def settle(self, iteration: Iteration, name: str) -> None:
        """The tensor exists, or never will: decrements the count of each step, at this level and below, that waits for
        it."""
        level, levels = iteration.level, self.levels
        self._one_less(iteration, levels.readers[level].get(name, ()))
        if level < len(levels.sources) and self.open[level][0] is iteration:  # only the first one has any below
            for below in range(level + 1, len(self.open)):
                for waiting in self.open[below]:
                    self._one_less(waiting, levels.readers[below].get(name, ()))

    def _one_less(self, iteration: Iteration, readers: Iterable[int]) -> None:
        pending = iteration.pending
        for index in readers:
            pending[index] -= 1
            if not pending[index]:
                self.ready.append((iteration, index))

    def begin(
        self, level: int, tensors: Iterable[tuple[str, Tensor | None]], produced: bool, skipped: bool = False
    ) -> list[KeptTensor]:
        """Adds an iteration with its first tensors. Returns those that no step will read."""
        iteration = Iteration(level, len(self.levels.steps[level]))
        self.open[level].append(iteration)
        unread = [self.appear(iteration, name, tensor, produced, skipped) for name, tensor in tensors]
        self.wait(iteration)
        return [kept for kept in unread if kept is not None]

    def appear(
        self, iteration: Iteration, name: str, tensor: Tensor | None, produced: bool, skipped: bool
    ) -> KeptTensor | None:
        """Adds a tensor to the iteration. None: it will never exist, because its step was skipped or did not produce
        it. Returns the tensor if a step produced it and no step will read it."""
        if tensor is None:
            (iteration.skipped if skipped else iteration.absent).add(name)
            return None
        if produced:
            tensor = Tensor(name, tensor.dtype, tensor.shape, tensor.data)
        if not self.keep(iteration, name, tensor, produced) and produced:
            return KeptTensor(tensor, 0, produced)
        return None

    def wait(self, iteration: Iteration) -> None:
        """Initializes the counts of missing tensors of all steps."""
        levels = self.levels
        if not iteration.level:  # steps do not wait for an optional input that the caller has left out
            iteration.pending = levels.pending.copy()
            self.ready += [(iteration, index) for index in levels.first]
            return
        for index in levels.steps[iteration.level]:
            waits = self.graph.waits[index]
            count = sum(n in self.graph.maker and not self.home(iteration, n).knows(n) for n in waits)
            iteration.pending[index] = count
            if not count:
                self.ready.append((iteration, index))

    # ------------------------------------------------------------------------------------ progress

    def is_source(self, iteration: Iteration, index: int) -> bool:
        return iteration.level < len(self.levels.sources) and self.levels.sources[iteration.level] == index

    def is_done(self, iteration: Iteration) -> bool:
        """True if the first iteration of its level is done, including everything below."""
        if iteration.remaining:
            return False
        below = iteration.level + 1
        if below < len(self.open):
            return not self.open[below]
        return all(self.home(iteration, name).knows(name) for name in self.wanted)

    @property
    def is_last(self) -> bool:
        """True if only one iteration remains in each level, with all steps done."""
        return all(len(level) == 1 and not level[0].remaining for level in self.open)

    @property
    def waits_for_room(self) -> bool:
        """True if nothing is in flight because the caller has not asked for more responses."""
        if not self.levels.sources or self.room or not self.open or not self.open[-1]:
            return False
        return self.is_done(self.open[-1][0])

    def to_come(self) -> Iterable[Version]:
        """The versions of steps that may still start: all of them if there is a source, because it may start any step
        again."""
        if self.levels.sources:
            return self.members.values()
        return (self.members[i] for done in self.iterations() for i in done.pending if i not in done.due)

    def iterations(self) -> Iterable[Iteration]:
        return (iteration for level in self.open for iteration in level)


def plans_of(
    graph: EnsembleGraph, wanted: Mapping[str, object], needed: Container[int], members: Mapping[int, Version]
) -> dict[int, StepPlan]:
    """The plans of the steps: everything that does not depend on the individual request, computed once and cached.
    The cached plans refer to the policies, so that their ids, which are part of the keys, cannot be reused."""
    cache = graph.plans
    key = (tuple(wanted), *[id(member.policy) for member in members.values()])
    plans = cache.get(key)
    if plans is None:
        plans = {index: _plan(graph, wanted, needed, index, member) for index, member in members.items()}
        if len(cache) >= _PLANS:
            cache.clear()
        cache[key] = plans
    return plans


def _plan(
    graph: EnsembleGraph, wanted: Container[str], needed: Container[int], index: int, member: Version
) -> StepPlan:
    step, policy = graph.steps[index], member.policy
    assert policy is not None
    specs = {spec.name: spec for spec in policy.inputs}
    inputs = []
    for own, name in step.inputs:
        spec = specs.get(own)
        required = name == step.mapped or (spec is not None and not spec.optional)
        inputs.append(StepInput(own, name, spec.dims if spec is not None else None, required))
    outputs = []
    for own, name in step.outputs:
        if name in wanted or any(reader in needed for reader in graph.readers.get(name, ())):
            outputs.append(Wanted(own))
    final = any(name in wanted for _, name in step.outputs)
    return StepPlan(policy, tuple(inputs), tuple(outputs), final)
