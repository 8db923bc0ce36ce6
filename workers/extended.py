"""Runs models with sequences or ragged batches: adds sequence controls and states and inputs computed from the batch,
and cuts outputs back to the shapes of an input.

Extensions work around the batch, on groups of requests before execution and on arrays after it; backends see ordinary
inputs and outputs. Invariant: a new state is kept only if its request was answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.dtypes import elements
from shmserve.errors import ModelFailed, ServeError
from shmserve.protocol.messages import Row, Work
from shmserve.workers.backends.base import StackedBackend
from shmserve.workers.batch.ragged import BatchInputs, Shapes, cuts_of, shapes_in
from shmserve.workers.batch.scatter import Results
from shmserve.workers.batch.sequence_inputs import (
    NULL,
    BatchSequences,
    Controls,
    Key,
    SequenceRequest,
    States,
    in_turns,
    with_gaps_filled,
)
from shmserve.workers.batch.specs import model_outputs_of
from shmserve.workers.model_calls.answer import Answer
from shmserve.workers.runner import Ran, Runner, Trace, clock, failed

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.base import Backend
    from shmserve.workers.batch.gather import Gather, GatherGroup
    from shmserve.workers.batch.scatter import Scatter
    from shmserve.workers.batch.specs import Spec

Array = np.ndarray[Any, np.dtype[Any]]


class Extension:
    """The extensions of a model, built once from its configuration."""

    def __init__(self, config: ModelConfig, folder: Path, backend: Backend, controls: bool = True) -> None:
        """`controls` false: requests contain the controls as inputs, as warm-up samples do."""
        self.sequences = config.sequence_batching is not None
        self.members = BatchSequences(config)
        self.controls = Controls(config, backend.text) if controls else None
        self.states = States(config, folder, backend.text)
        self.states.strict = backend.strict
        self.batch_inputs = BatchInputs(config)
        self.cuts = cuts_of(config)
        self.fresh = isinstance(backend, StackedBackend) and backend.fresh
        outputs = [spec.name for spec in model_outputs_of(config)]
        self.declared = len(config.output)
        self.state_names = {spec.name: index for index, spec in enumerate(self.states.outputs)}
        self.state_at = {outputs.index(name): index for name, index in self.state_names.items()}

    def member(self, work: Work) -> SequenceRequest:
        member = self.members.of(work)
        if self.controls is not None:
            self.controls.check(member.id)
        return member

    def extras(self, members: Sequence[SequenceRequest]) -> list[Array]:
        """Returns the inputs that come from sequences, with one row for each member."""
        controls = self.controls.arrays(members) if self.controls is not None else []
        return controls + self.states.arrays(members)

    def forget(self, sequences: Sequence[Key]) -> None:
        self.states.forget(sequences)
        self.members.forget(sequences)


class ExtendedResults(Results):
    """Results in which some outputs are states, and some are cut back by the shapes of an input."""

    __slots__ = ("_extension", "_late", "states")

    def __init__(self, scatter: Scatter, works: Sequence[Work], rows: int, extension: Extension) -> None:
        super().__init__(scatter, works, rows)
        self._extension = extension
        self._late: dict[int, Array] = {}
        self.states: list[Array | None] = [None] * len(extension.states.specs)

    def needed(self, index: int) -> bool:
        return index in self._extension.state_at or super().needed(index)

    def direct(self, index: int, shape: tuple[int, ...]) -> bool:
        return not self._special(index) and super().direct(index, shape)

    def near(self, index: int, shape: tuple[int, ...]) -> int | None:
        return None if self._special(index) else super().near(index, shape)

    def alias(self, index: int, source: str, shape: tuple[int, ...]) -> bool:
        return not self._special(index) and super().alias(index, source, shape)

    def place(self, index: int, shape: tuple[int, ...]) -> Array:
        if not self._special(index):
            return super().place(index, shape)
        extension = self._extension
        state = extension.state_at.get(index)
        spec = self._scatter.specs[index] if state is None else extension.states.outputs[state]
        array: Array = np.empty(shape, spec.numpy)
        self._late[index] = array
        return array

    def put(self, index: int, array: Array) -> None:
        self._put(index, array, self._extension.fresh)

    def omit(self, index: int) -> None:
        if index < self._extension.declared:
            super().omit(index)

    def rows(self, parameters: Any = None) -> list[Row]:
        for index, array in self._late.items():
            self._put(index, array, True)
        lost = [name for name, index in self._extension.state_names.items() if self.states[index] is None]
        if lost:
            raise ModelFailed(f"the model did not produce state output(s) {', '.join(lost)}")
        return super().rows(parameters)

    def _special(self, index: int) -> bool:
        return index in self._extension.state_at or index in self._extension.cuts

    def _put(self, index: int, array: Array, fresh: bool) -> None:
        extension = self._extension
        state = extension.state_at.get(index)
        if state is not None:
            self.states[state] = extension.states.taken(state, array, self._rows, fresh)
            if index >= extension.declared:
                return
        source = extension.cuts.get(index)
        if source is None:
            super().put(index, array)
            return
        spec = self._scatter.checks.check_flat(self._scatter.specs[index], array)
        if self.needed(index):
            self._columns[index] = self._cut(index, spec, array, source.name, shapes_in(self._works, source))

    def _cut(self, index: int, spec: Spec, array: Array, source: str, shapes: Shapes) -> list[Any]:
        sizes = [0 if shape is None else elements(shape) for shape in shapes]
        if sum(sizes) != array.size:
            raise ModelFailed(
                f"output '{spec.name}' of model '{self._scatter.model}' has {array.size} elements; the shapes of input "
                f"'{source}', by which it is cut, have {sum(sizes)}"
            )
        flat = array.reshape(-1)
        tensors: list[Any] = []
        start = 0
        for position, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
            if shape is None:
                self._holes = True
                tensors.append(None)
                continue
            tensors.append(self._one(index, spec, position, flat[start : start + size].reshape(shape), shape))
            start += size
        return tensors


class ExtendedRunner(Runner):
    def __init__(
        self,
        instance: str,
        model_dir: str,
        backend: Backend,
        gather: Gather,
        scatter: Scatter,
        extension: Extension,
        trace: Trace,
    ) -> None:
        super().__init__(instance, model_dir, backend, gather, scatter, trace)
        self._extension = extension
        self._members: dict[int, SequenceRequest] = {}  # by request, of the running batch
        self._read = self._read_extended
        self._answered = self._answer
        self._running = False
        self._over: list[Key] = []

    def run(self, works: Sequence[Work]) -> Ran:
        self._running = True
        ran = super().run(works)
        self._running = False
        if self._over:
            self._extension.forget(self._over)
            self._over = []
        return ran

    def forget(self, sequences: Sequence[Key]) -> None:
        """May be called during `run`: a model that waits for the reader of its responses processes orders meanwhile."""
        self._extension.forget(sequences)
        if self._running:
            self._over += sequences

    # ------------------------------------------------------------------------------------ one array per input

    def _run_stacked(self, works: Sequence[Work]) -> Ran:
        taken = clock()
        found: dict[int, Row] = {}
        ready = computed = taken
        first = 0
        for turn in self._turns(works, found):
            for part in self._alike(turn):
                for group in self._groups(part, found):
                    rows, ready, computed = self._run_group(group)
                    first = first or ready
                    found.update({row.request: row for row in rows})
        rows = [found[work.request] for work in works]
        return rows, (taken, first or ready, computed, clock()), ()

    def _turns(self, works: Sequence[Work], found: dict[int, Row]) -> list[list[Work]]:
        """Returns batches to run one after the other; adds a row to `found` for each request with invalid options."""
        if not self._extension.sequences:
            return [list(works)]
        self._members = members = {}
        good = []
        for work in works:
            try:
                members[work.request] = self._extension.member(work)
                good.append(work)
            except ServeError as error:
                found[work.request] = failed(work, error)
        return in_turns(good, [members[work.request].key for work in good]) if good else []

    def _alike(self, works: list[Work]) -> Iterator[list[Work]]:
        """Splits works by the shapes of their states. Each part has run when the next is requested."""
        if not self._extension.states.varies or len(works) == 1:
            yield works
            return
        parts: dict[Any, list[Work]] = {}
        for work in works:
            parts.setdefault(self._extension.states.shapes(self._members[work.request]), []).append(work)
        yield from parts.values()

    def _groups(self, works: list[Work], found: dict[int, Row]) -> list[GatherGroup]:
        """Returns the groups that stack. With slots, each row is at the index of its sequence's slot."""
        slotted = works[0].slot >= 0
        if slotted:
            works = sorted(works, key=_slot)
        groups, failures = self._gather.groups(works)
        for place, error in failures:
            found[works[place].request] = failed(works[place], error)
        if not slotted:
            return groups
        return [self._in_slots(group) for group in groups]

    def _in_slots(self, group: GatherGroup) -> GatherGroup:
        if group.works[-1].slot == len(group.works) - 1 or not group.rows:
            return group
        groups, failures = self._gather.groups(with_gaps_filled(group.works, self._gather.specs))
        assert len(groups) == 1
        assert not failures
        return groups[0]

    def _run_group(self, group: GatherGroup) -> tuple[list[Row], int, int]:
        assert self._stacked is not None
        extension, works = self._extension, group.works
        results = ExtendedResults(self._scatter, works, group.rows, extension)
        members: list[SequenceRequest] = []
        try:
            extras: list[Array] = []
            if extension.sequences:
                members = [self._member(work) for work in works]
                extras = extension.extras(members)
            group.extras = extras + extension.batch_inputs.arrays(works)
            self._stacked.execute(group, results)
            computed = clock()
            rows = results.rows()
        except Exception as error:
            results.abandon()
            extension.states.forget([member.key for member in members if not member.null])
            computed = clock()
            failure = self._failure(error)
            rows = [Row(work.request, (), failure) for work in works]
        else:
            states = [state for state in results.states if state is not None]
            if states:
                extension.states.keep(members, states, [row.error is None for row in rows])
        return [row for row in rows if row.request != NULL], group.ready or computed, computed

    def _member(self, work: Work) -> SequenceRequest:
        return self._members[work.request] if work.request != NULL else self._extension.members.of(work)

    # ------------------------------------------------------------------------------------ request by request

    def _run_separate(self, works: Sequence[Work]) -> Ran:
        found: dict[int, Row] = {}
        turns = self._turns(works, found)
        if len(turns) == 1 and not found:
            return super()._run_separate(works)
        taken = clock()
        times = (taken, taken, taken, taken)
        again: tuple[int, ...] = ()
        for turn in turns:
            rows, times, more = super()._run_separate(turn)
            again += more
            found.update({row.request: row for row in rows})
        rows = [found[work.request] for work in works if work.request in found]
        return rows, (taken, *times[1:3], clock()), again

    def _read_extended(self, work: Work, length: int = 0) -> list[Array | None]:
        arrays = self._gather.read(work, length)
        if self._extension.sequences:
            arrays += self._extension.extras((self._members[work.request],))
        return arrays

    def _answer(self, work: Work, answer: Answer) -> Row:
        extension = self._extension
        if not extension.sequences:
            return self.row(work, answer)
        member = self._members[work.request]
        extension.members.answered(member)
        try:
            states, answer = self._without_states(work, answer)
        except ModelFailed as error:
            answer = Answer(error=self._failure(error))
        if answer.error is not None:
            extension.states.forget((member.key,))
            return self.row(work, answer)
        row = self.row(work, answer)
        if row.error is None or member.end:
            extension.states.update(member, states, member.end)
        elif member.start:
            extension.states.forget((member.key,))
        return row

    def _unanswered(self, work: Work, answer: Answer | None) -> None:
        """The request is answered by other messages, or runs again."""
        if not self._extension.sequences:
            return
        member = self._members[work.request]
        if answer is None:
            self._extension.members.answered(member)
            self._extension.states.update(member, {}, member.end)
            return
        self._extension.members.run_again(member, work.request)
        try:
            states, _ = self._without_states(work, answer)
        except ModelFailed as error:
            self._failure(error)
            self._extension.states.forget((member.key,))
            return
        self._extension.states.update(member, states, False)

    def _without_states(self, work: Work, answer: Answer) -> tuple[dict[int, Array], Answer]:
        """Splits an answer into states and what remains for the caller."""
        extension = self._extension
        names = extension.state_names
        if answer.error is not None or not any(name in names for name, _ in answer.outputs):
            return {}, answer
        states = {
            names[name]: extension.states.taken(
                names[name], array if isinstance(array, np.ndarray) else array.host(), work.rows, False
            )
            for name, array in answer.outputs
            if name in names
        }
        outputs = [pair for pair in answer.outputs if pair[0] not in names or pair[0] in self._scatter.names]
        return states, Answer(outputs, None, answer.parameters)


def _slot(work: Work) -> int:
    return work.slot


def extension_of(config: ModelConfig, folder: Path, backend: Backend, controls: bool = True) -> Extension | None:
    """Returns None if the model needs no extension."""
    if config.sequence_batching is None and not (config.batch_input or config.batch_output):
        return None
    return Extension(config, folder, backend, controls)


def runner_of(
    instance: str,
    model_dir: str,
    backend: Backend,
    gather: Gather,
    scatter: Scatter,
    extension: Extension | None,
    trace: Trace,
) -> Runner:
    if extension is None:
        return Runner(instance, model_dir, backend, gather, scatter, trace)
    return ExtendedRunner(instance, model_dir, backend, gather, scatter, extension, trace)
