"""Tensors that a model has and its callers do not see: the controls and states of sequences, and what is computed from
the shapes of a ragged batch, whose requests differ in shape.

They are added to groups of requests before execution and taken from the outputs after it, where outputs are also cut
back to the shapes of an input; backends see ordinary inputs and outputs. Invariant: a new state is kept only if its
request was answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from shmserve.dtypes import elements
from shmserve.errors import InvalidRequest, ModelFailed, ServeError
from shmserve.protocol.worker_messages import Row, Work
from shmserve.workers.backends.base import SeparateModel, StackedModel
from shmserve.workers.batch.results import Results
from shmserve.workers.batch.sequence_inputs import (
    NULL,
    Controls,
    Key,
    SequenceRequest,
    States,
    in_turns,
    member_of,
    null_member,
    with_gaps_filled,
)
from shmserve.workers.batch.specs import batch_inputs_of, inputs_of, model_outputs_of

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.base import BackendModel
    from shmserve.workers.batch.gather import Gather, GatherGroup
    from shmserve.workers.batch.scatter import Scatter
    from shmserve.workers.batch.specs import Spec
    from shmserve.workers.model_calls.answer import Response

Array = np.ndarray[Any, np.dtype[Any]]
Shapes = list[tuple[int, ...] | None]
"""The shapes of one input with the batch dimension; None for a request without the input."""


class HiddenTensors:
    """Built once from the configuration of the model. The runner calls `begin` and `parts` for each batch and `before`
    and `after` around each group; for a model that runs requests one by one it calls `read`, `without_states` and
    `answered` instead of these two."""

    def __init__(self, config: ModelConfig, folder: Path, model: BackendModel, controls: bool) -> None:
        """`controls` false: requests contain the controls as inputs, as warm-up samples do."""
        self.sequences = config.sequence_batching is not None
        self.states = States(config, folder, model.text, model.strict)
        self.cuts = cuts_of(config)
        self.stacked = isinstance(model, StackedModel)
        self.slots = self.stacked or (isinstance(model, SeparateModel) and model.takes_slots)
        self.fresh = isinstance(model, StackedModel) and model.fresh
        outputs = [spec.name for spec in model_outputs_of(config)]
        self.declared = len(config.output)
        self.state_names = {spec.name: index for index, spec in enumerate(self.states.outputs)}
        self.state_at = {outputs.index(name): index for name, index in self.state_names.items()}
        self.new_states: list[Array | None] = []
        """The new states of the running group."""
        self._output_names = frozenset(outputs[: self.declared])
        self._model = config.name
        self._null = null_member(config)
        self._controls = Controls(config, model.text) if controls else None
        self._batch_inputs = BatchInputs(config)
        self._members: dict[int, SequenceRequest] = {}  # by request, of the running batch
        self._turns: list[list[Work]] = []
        self._running = False
        self._ended: list[Key] = []

    # ------------------------------------------------------------------------------------ around a batch

    def begin(self, work_items: Sequence[Work]) -> list[tuple[Work, ServeError]]:
        """Called before a batch runs. Returns the requests with invalid sequence options."""
        self._running = True
        if not self.sequences:
            self._turns = [list(work_items)]
            return []
        self._members = members = {}
        good, failures = [], []
        for work in work_items:
            try:
                member = members[work.request] = member_of(self._model, work)
                if self._controls is not None:
                    self._controls.check(member.key)
                good.append(work)
            except ServeError as error:
                failures.append((work, error))
        self._turns = in_turns(good, [members[work.request].key for work in good]) if good else []
        return failures

    def parts(self) -> Iterator[list[Work]]:
        """Yields the parts of the batch that run one after another. A part must have run before the next is requested,
        because the shapes of the next part's states may depend on it."""
        for turn in self._turns:
            if self.slots and turn[0].slot >= 0:
                turn.sort(key=lambda work: work.slot)
            if not self.stacked:
                yield turn
                continue
            if not self.states.varies or len(turn) == 1:
                yield turn
                continue
            alike: dict[Any, list[Work]] = {}
            for work in turn:
                alike.setdefault(self.states.shapes(self._members[work.request]), []).append(work)
            yield from alike.values()

    def end(self) -> None:
        self._running = False
        self._turns = []
        if self._ended:
            ended, self._ended = self._ended, []
            self.forget(ended)

    def forget(self, sequences: Sequence[Key]) -> None:
        """May be called while a batch runs: orders are processed while the model waits for room to send responses."""
        self.states.forget(sequences)
        if self._running:
            self._ended += sequences

    # ------------------------------------------------------------------------------------ around a group

    def in_slots(self, group: GatherGroup, gather: Gather) -> GatherGroup:
        """Returns the group with each row at the index of its sequence's slot, if the sequences have slots."""
        work_items = self.filled(group.work_items, gather)
        if work_items is group.work_items or not group.rows:
            return group
        (group,), failures = gather.groups(work_items)
        assert not failures
        return group

    def filled(self, work_items: Sequence[Work], gather: Gather) -> Sequence[Work]:
        """Returns the requests with null requests in empty slots, if their sequences have slots."""
        last = work_items[-1].slot
        return work_items if last < 0 or last == len(work_items) - 1 else with_gaps_filled(work_items, gather.specs)

    def results(self, scatter: Scatter, group: GatherGroup) -> Results:
        return VisibleResults(scatter, group.work_items, group.rows, self)

    def before(self, group: GatherGroup) -> None:
        """Adds the inputs that do not come from callers."""
        self.new_states = [None] * len(self.states.specs)
        group.extras = [
            *self._of_sequences(self._members_of(group.work_items)),
            *self._batch_inputs.arrays(group.work_items),
        ]

    def after(self, group: GatherGroup, rows: Sequence[Row], ran: bool) -> None:
        """Keeps the new states. `ran` false: the group failed, and its sequences lose their states."""
        new_states, self.new_states = self.new_states, []
        if not ran:
            self.states.forget([member.key for member in self._members_of(group.work_items) if not member.null])
            return
        states = [state for state in new_states if state is not None]
        if states:
            self.states.keep(self._members_of(group.work_items), states, [row.error is None for row in rows])

    def _members_of(self, work_items: Sequence[Work]) -> list[SequenceRequest]:
        if not self.sequences:
            return []
        members, null = self._members, self._null
        return [null if work.request == NULL else members[work.request] for work in work_items]

    def _of_sequences(self, members: Sequence[SequenceRequest]) -> list[Array]:
        """Returns the inputs that come from sequences, with one row for each member."""
        if not members:
            return []
        controls = self._controls.arrays(members) if self._controls is not None else []
        return controls + self.states.arrays(members)

    # ------------------------------------------------------------------------------------ around a request

    def read(self, gather: Gather, work: Work, length: int = 0) -> list[Array | None]:
        """Like `Gather.read`, plus the inputs that do not come from the caller."""
        arrays = gather.read(work, length)
        if self.sequences:
            members = self._members_of((work,))
            if self._controls is not None:
                arrays += self._controls.arrays(members)
            arrays += self.states.arrays(members)
        return arrays

    def without_states(self, work: Work, response: Response) -> tuple[dict[int, Array], Response]:
        """Splits a response into states and what remains for the caller."""
        names = self.state_names
        if not names or response.error is not None or names.keys().isdisjoint([name for name, _ in response.outputs]):
            return {}, response
        states = {
            names[name]: self.states.checked(
                names[name], array if isinstance(array, np.ndarray) else array.host(), work.rows, False
            )
            for name, array in response.outputs
            if name in names
        }
        outputs = [pair for pair in response.outputs if pair[0] not in names or pair[0] in self._output_names]
        return states, replace(response, outputs=outputs)

    def answered(self, work: Work, response: Response | None, states: dict[int, Array], row: Row | None) -> None:
        """Keeps the new states of a request. `response` None: its responses are separate messages. `row` None: the
        same, or it runs again."""
        if not self.sequences:
            return
        member = self._members[work.request]
        again = response is not None and response.again
        if response is not None and response.error is not None:
            self.states.forget((member.key,))
        elif row is None or row.error is None or member.end:
            self.states.update(member, states, member.end and not again)
        elif member.start:
            self.states.forget((member.key,))


class VisibleResults(Results):
    """Results in which some outputs are states and some are cut back to the shapes of an input."""

    __slots__ = ("_hidden", "_late")

    def __init__(self, scatter: Scatter, work_items: Sequence[Work], rows: int, hidden: HiddenTensors) -> None:
        super().__init__(scatter, work_items, rows)
        self._hidden = hidden
        self._late: dict[int, Array] = {}

    def needed(self, index: int) -> bool:
        return index in self._hidden.state_at or super().needed(index)

    def direct(self, index: int, shape: tuple[int, ...]) -> bool:
        return not self._special(index) and super().direct(index, shape)

    def near(self, index: int, shape: tuple[int, ...]) -> int | None:
        return None if self._special(index) else super().near(index, shape)

    def alias(self, index: int, source: str, shape: tuple[int, ...]) -> bool:
        return not self._special(index) and super().alias(index, source, shape)

    def place(self, index: int, shape: tuple[int, ...]) -> Array:
        if not self._special(index):
            return super().place(index, shape)
        hidden = self._hidden
        state = hidden.state_at.get(index)
        spec = self._scatter.specs[index] if state is None else hidden.states.outputs[state]
        array: Array = np.empty(shape, spec.numpy)
        self._late[index] = array
        return array

    def put(self, index: int, array: Array) -> None:
        self._put(index, array, self._hidden.fresh)

    def omit(self, index: int) -> None:
        if index < self._hidden.declared:
            super().omit(index)

    def rows(self, parameters: Any = None) -> list[Row]:
        for index, array in self._late.items():
            self._put(index, array, True)
        missing = [name for name, index in self._hidden.state_names.items() if self._hidden.new_states[index] is None]
        if missing:
            raise ModelFailed(f"the model did not produce state output(s) {', '.join(missing)}")
        return super().rows(parameters)

    def _special(self, index: int) -> bool:
        return index in self._hidden.state_at or index in self._hidden.cuts

    def _put(self, index: int, array: Array, fresh: bool) -> None:
        hidden = self._hidden
        state = hidden.state_at.get(index)
        if state is not None:
            hidden.new_states[state] = hidden.states.checked(state, array, self._rows, fresh)
            if index >= hidden.declared:
                return
        source = hidden.cuts.get(index)
        if source is None:
            super().put(index, array)
            return
        spec = self._scatter.checks.check_flat(self._scatter.specs[index], array)
        if self.needed(index):
            shares = self._cut(spec, array, source.name, shapes_in(self._work_items, source))
            self._columns[index] = self._shares(index, spec, shares)

    def _cut(self, spec: Spec, array: Array, source: str, shapes: Shapes) -> list[Array | None]:
        sizes = [0 if shape is None else elements(shape) for shape in shapes]
        if sum(sizes) != array.size:
            raise ModelFailed(
                f"output '{spec.name}' of model '{self._scatter.model}' has {array.size} elements; the shapes of input "
                f"'{source}', by which it is cut, have {sum(sizes)}"
            )
        flat = array.reshape(-1)
        ends = accumulate(sizes)
        return [
            None if shape is None else flat[end - size : end].reshape(shape)
            for shape, size, end in zip(shapes, sizes, ends, strict=True)
        ]


# ------------------------------------------------------------------------------------ ragged batches


def shapes_in(work_items: Sequence[Work], spec: Spec) -> Shapes:
    """Returns the shapes of an input in each request, as the backend sees them."""
    name = spec.name
    shapes: Shapes = []
    for work in work_items:
        shape = next((tensor.shape for tensor in work.inputs if tensor.name == name), None)
        shapes.append(spec.inner(shape) if shape is not None and spec.reshaped else shape)
    return shapes


class BatchInputs:
    """Computes the inputs of `batch_input` from the shapes of a ragged batch. One for each model.

    Invariant: a request counts once, with all its elements including its batch dimension; only the kinds
    BATCH_ITEM_SHAPE* count the items of its batch dimension.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.specs = batch_inputs_of(config)
        sources = {spec.name: spec for spec in inputs_of(config)}
        self._inputs: list[tuple[str, Spec, Spec]] = []
        specs = iter(self.specs)
        for index, entry in enumerate(config.batch_input):
            source = sources.get(entry.source_input[0]) if len(entry.source_input) == 1 else None
            if source is None:
                raise InvalidRequest(
                    f"batch_input[{index}] of model '{config.name}' needs one source_input that is an input of the "
                    f"model, found {list(entry.source_input)}"
                )
            self._inputs += [(entry.kind, source, next(specs)) for _ in entry.target_name]

    def arrays(self, work_items: Sequence[Work]) -> list[Array]:
        shapes: dict[str, Shapes] = {}
        arrays = []
        for kind, source, spec in self._inputs:
            source_shapes = shapes.get(source.name)
            if source_shapes is None:
                source_shapes = shapes[source.name] = shapes_in(work_items, source)
            arrays.append(_values(kind, source_shapes, len(source.shape)).astype(spec.numpy, copy=False))
        return arrays


def _values(kind: str, shapes: Shapes, rank: int) -> Array:
    if kind.startswith("BATCH_ITEM_SHAPE"):
        items = [shape[1:] for shape in shapes if shape is not None for _ in range(shape[0])]
        table = np.array(items, np.int64).reshape(len(items), rank)
        return table if kind == "BATCH_ITEM_SHAPE" else table.ravel()
    counts = [0 if shape is None else elements(shape) for shape in shapes]
    if kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        return np.zeros(max(counts), np.int64)
    if kind == "BATCH_ELEMENT_COUNT":
        return np.array(counts, np.int64)
    return np.array(list(accumulate(counts, initial=0 if kind.endswith("WITH_ZERO") else None)), np.int64)


def cuts_of(config: ModelConfig) -> dict[int, Spec]:
    """Returns, by index of each output that is cut back, the input whose shapes it is cut to."""
    sources = {spec.name: spec for spec in inputs_of(config)}
    places = {entry.name: index for index, entry in enumerate(config.output)}
    cuts: dict[int, Spec] = {}
    for number, entry in enumerate(config.batch_output):
        source = sources.get(entry.source_input[0]) if len(entry.source_input) == 1 else None
        unknown = [name for name in entry.target_name if name not in places]
        if source is None or unknown:
            raise InvalidRequest(
                f"batch_output[{number}] of model '{config.name}' needs one source_input that is an input of the "
                f"model, found {list(entry.source_input)}, and outputs as target_name, found {list(entry.target_name)}"
            )
        cuts.update({places[name]: source for name in entry.target_name})
    return cuts


def hidden_tensors_of(
    config: ModelConfig, folder: Path, model: BackendModel, controls: bool = True
) -> HiddenTensors | None:
    """Returns None if the model has none."""
    if config.sequence_batching is None and not (config.batch_input or config.batch_output):
        return None
    return HiddenTensors(config, folder, model, controls)
