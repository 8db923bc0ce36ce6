"""How far a request to an ensemble is: which tensors are there, which steps wait for what, and what has come.

A step whose model answers many times is a *source*: with each of its answers all that comes after it is done anew, and
that is an Iteration. What does not depend on a source is done once, in the one iteration of level 0; what a source of
level 0 feeds is level 1, and so on. The rule of the file: bookkeeping only, what follows from it is `core.ensembles`'.

The answers keep their order: only the first open iteration of a level starts a source of its own. So those above the
first one of a level are always the first ones, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct, field

from shmserve.core.ensembles.graph import Graph, Levels
from shmserve.core.records import Request, Version
from shmserve.protocol.messages import Fail, Part, Reply, Tensor, Wanted

Held = dict["tuple[str, int] | Version", Version]


class Kept(Struct, eq=False):
    """A tensor of the ensemble that exists. `readers`: steps that have not read it yet; all of the levels below, and
    the answer, count as one more, which has read it when the iteration is over."""

    tensor: Tensor
    readers: int
    made: bool
    """By a step, and so held here; otherwise it is the caller's."""


class Iteration(Struct, eq=False):
    """The steps of a level, done once. `left`: how many of them are not over."""

    level: int
    left: int
    tensors: dict[str, Kept] = {}
    skipped: set[str] = set()
    """Tensors that will not be made, as a condition said no."""
    absent: set[str] = set()
    """Tensors that a model was to make, and did not."""
    pending: dict[int, int] = {}
    """For each step that has not started the tensors that it waits for."""
    due: dict[int, int] = {}
    """For each step that has started the rows whose answers have not come."""
    rows: dict[int, dict[int, tuple[Tensor, ...]]] = {}
    """For each mapped step the answers that have come, by row."""
    held_back: bool = False
    """Its source could start, but for the iterations before it."""

    def knows(self, name: str) -> bool:
        """Is the tensor there, or will it never be?"""
        return name in self.tensors or name in self.skipped or name in self.absent


class Spot(NamedTuple):
    """What the request of a step is for. `row`: of what the step is mapped over (0 if it is not)."""

    step: int
    row: int
    iteration: Iteration


class Mapped(Struct, eq=False):
    """A mapped step not all of whose rows have been asked for. `rows` are those left, `next` the number of the first;
    `inputs` are (name of the model, name of the ensemble, tensor)."""

    step: int
    iteration: Iteration
    inputs: list[tuple[str, str, Tensor]]
    rows: Iterator[Tensor]
    count: int
    next: int = 0


class Run(Struct, eq=False):
    """`out` are the requests of steps that have not ended. `over`: the caller has been answered, for the last time."""

    request: Request
    graph: Graph
    needed: frozenset[int]
    wanted: dict[str, Wanted | None]
    held: Held
    """The models of all its steps, and of the steps of these. A run inside of another has what that one has."""
    levels: Levels
    times: list[int]
    """What the batches of its steps took: input, infer, output ns."""
    members: dict[int, Version] = {}
    open: list[deque[Iteration]] = []
    """Of each level, those that are not over, in their order."""
    ready: list[tuple[Iteration, int]] = []
    mapped: deque[Mapped] = field(default_factory=deque)
    """Not empty, and the run has not failed: it is in State.mapped."""
    out: dict[int, Request] = {}
    spots: dict[int, Spot] = {}
    """Number of a request in `out` -> what it is for."""
    sources: dict[int, Request] = {}
    """Of each level the request to the source that is under way."""
    room: int = 0
    """So many answers may be given before the caller says more."""
    results: list[tuple[Spot, Reply | Part | Fail]] = []
    failure: tuple[str, str] | None = None
    over: bool = False

    def told(self, request: Request, message: Reply | Part | Fail, inner: Run | None) -> None:
        """An answer to a step. `inner`: the step is an ensemble itself."""
        self.results.append((self.spots[request.number], message))
        if isinstance(message, Part) and not message.last:
            return
        spent: Sequence[int] = ()
        if inner is not None:
            spent = inner.times
        elif request.batch is not None and request.batch.times:
            taken, ready, computed, placed = request.batch.times
            spent = (ready - taken, computed - ready, placed - computed)
        for index, ns in enumerate(spent):
            self.times[index] += ns

    def ended(self, request: Request) -> None:
        """A step has been answered for the last time, and no worker has it any more."""
        del self.out[request.number], self.spots[request.number]

    def fail(self, code: str, text: str) -> None:
        """The first failure is the one that is told."""
        if self.failure is None:
            self.failure = code, text

    # ------------------------------------------------------------------------------------ tensors

    def home(self, iteration: Iteration, name: str) -> Iteration:
        """Where the tensor is that this iteration reads: there, or in one above."""
        level = self.levels.tensors.get(name, 0)
        return iteration if level == iteration.level else self.open[level][0]

    def find(self, iteration: Iteration, name: str) -> Kept | None:
        return self.home(iteration, name).tensors.get(name)

    def keep(self, iteration: Iteration, name: str, tensor: Tensor, made: bool) -> bool:
        """False: nobody will read it."""
        readers = self.levels.reads.get(name, 0) + (made and name in self.wanted)
        if readers:
            iteration.tensors[name] = Kept(tensor, readers, made)
        return readers > 0

    def settle(self, iteration: Iteration, name: str) -> None:
        """The tensor is there, or will never be: who waits for it, here or below, waits for one thing less."""
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
        self, level: int, found: Iterable[tuple[str, Tensor | None]], made: bool, skipped: bool = False
    ) -> list[Kept]:
        """A new iteration with its first tensors. Returns those that no step will read."""
        iteration = Iteration(level, len(self.levels.steps[level]))
        self.open[level].append(iteration)
        unread = [self.appear(iteration, name, tensor, made, skipped) for name, tensor in found]
        self.wait(iteration)
        return [kept for kept in unread if kept is not None]

    def appear(self, iteration: Iteration, name: str, tensor: Tensor | None, made: bool, skipped: bool) -> Kept | None:
        """A tensor of the iteration. None: it will never exist, because its step was skipped or did not make it.
        Returns the tensor if a step has made it and no step will read it."""
        if tensor is None:
            (iteration.skipped if skipped else iteration.absent).add(name)
            return None
        if made:
            tensor = Tensor(name, tensor.dtype, tensor.shape, tensor.data)
        if not self.keep(iteration, name, tensor, made) and made:
            return Kept(tensor, 0, made)
        return None

    def wait(self, iteration: Iteration) -> None:
        """Its first tensors are there: what waits for others?"""
        for index in self.levels.steps[iteration.level]:
            # An input that the caller may leave out, and has left out, is nothing to wait for.
            count = self.levels.waits[index]
            if iteration.level:
                waits = self.graph.waits[index]
                count = sum(n in self.graph.maker and not self.home(iteration, n).knows(n) for n in waits)
            iteration.pending[index] = count
            if not count:
                self.ready.append((iteration, index))

    # ------------------------------------------------------------------------------------ where it stands

    def is_source(self, iteration: Iteration, index: int) -> bool:
        return iteration.level < len(self.levels.sources) and self.levels.sources[iteration.level] == index

    def is_done(self, iteration: Iteration) -> bool:
        """The first one of its level: is nothing more to be done in it, or below?"""
        if iteration.left:
            return False
        below = iteration.level + 1
        if below < len(self.open):
            return not self.open[below]
        return all(self.home(iteration, name).knows(name) for name in self.wanted)

    @property
    def is_last(self) -> bool:
        """Is nothing left but the first iteration of each level, and in these nothing to be done?"""
        return all(len(level) == 1 and not level[0].left for level in self.open)

    @property
    def waits_for_room(self) -> bool:
        """Nothing is under way, as the caller has not asked for more."""
        if not self.levels.sources or self.room or not self.open or not self.open[-1]:
            return False
        return self.is_done(self.open[-1][0])

    def to_come(self) -> Iterable[Version]:
        """The models of steps that may begin yet. Below a source nobody knows how often."""
        if self.levels.sources:
            return self.members.values()
        return (self.members[i] for done in self.iterations() for i in done.pending if i not in done.due)

    def iterations(self) -> Iterable[Iteration]:
        return (iteration for level in self.open for iteration in level)
