"""Sequences: the control inputs that describe them to a model, and their states.

Invariant: a state never leaves the worker. It is kept by the id of its sequence from one run of the sequence to the
next. It is reset by START and after a failed run, and dropped by END or when the broker ends the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from shmserve.dtypes import FROM_CONFIG, elements
from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.protocol.messages import Tensor
from shmserve.protocol.worker_messages import Work
from shmserve.shm.strings import decode_bytes
from shmserve.workers.batch.buffers import Buffers
from shmserve.workers.batch.data_files import read_tensor
from shmserve.workers.batch.output_checks import as_state
from shmserve.workers.batch.specs import control_of, controls_of, matches, new_states_of, states_of

if TYPE_CHECKING:
    from pathlib import Path

    from shmserve.repo.config.schema import ModelConfig, ModelSequenceBatchingState
    from shmserve.workers.batch.specs import Spec

Array = np.ndarray[Any, np.dtype[Any]]
Key = int | str

FOLDER = "initial_state"
"""Directory of the data files of initial states, below the model's directory."""
WHOLE_BYTES = 4 * 1024 * 1024
"""The states of a batch up to this total size stay in one array as long as one of its sequences needs it, so that
nothing is copied if the same sequences run together again. Larger states are copied into separate arrays."""
NULL = -1
"""The request id of a row that fills an empty slot."""


class SequenceRequest(Struct, gc=False):
    """The sequence options of a request. `key`: its correlation ID, by which its states are kept."""

    key: Key
    start: bool = False
    end: bool = False
    null: bool = False


def member_of(model: str, work: Work) -> SequenceRequest:
    options = work.options
    if options is None or not options.sequence:
        raise InvalidRequest(
            f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID"
        )
    if work.rows > 1:
        raise InvalidRequest(
            f"inference request to model '{model}' must specify batch-size 1 due to requirements of sequence batcher; "
            f"it has {work.rows}"
        )
    return SequenceRequest(options.sequence, options.sequence_start, options.sequence_end)


def null_member(config: ModelConfig) -> SequenceRequest:
    """Returns the member of an empty slot."""
    entries = config.sequence_batching.control_input if config.sequence_batching is not None else ()
    strings = any(control.data_type == "TYPE_STRING" for entry in entries for control in entry.control)
    return SequenceRequest("" if strings else 0, null=True)


class Controls:
    """Creates the control tensors of a batch. One for each model."""

    def __init__(self, config: ModelConfig, text: bool) -> None:
        """`text`: strings are str instead of bytes."""
        self._text = text
        self._controls: list[tuple[Spec, str, tuple[Any, ...]]] = []
        entries = config.sequence_batching.control_input if config.sequence_batching is not None else ()
        for entry, spec in zip(entries, controls_of(config), strict=True):
            control = control_of(entry)
            pair = control.int32_false_true or control.fp32_false_true or control.bool_false_true
            self._controls.append((spec, control.kind, tuple(pair)))
        self._id = next((spec for spec, kind, _ in self._controls if kind == "CONTROL_SEQUENCE_CORRID"), None)
        self._kind = int if self._id is None or self._id.item else str
        self._max = int(np.iinfo(self._id.numpy).max) if self._id is not None and self._id.item else 0

    def check(self, key: Key) -> None:
        """Refuses an id that the type of the control input cannot hold."""
        if self._id is None or (type(key) is self._kind and (self._kind is str or 0 <= key <= self._max)):  # type: ignore[operator]
            return
        spec = self._id
        if isinstance(key, str) != (not spec.item):
            kinds = ("a string", "an integer") if isinstance(key, str) else ("an integer", "a string")
            raise InvalidRequest(
                f"the correlation ID is {kinds[0]}, but control input '{spec.name}' has type {spec.dtype}: it must "
                f"be {kinds[1]}"
            )
        raise InvalidRequest(f"correlation ID {key} does not fit into control input '{spec.name}' of type {spec.dtype}")

    def arrays(self, members: Sequence[SequenceRequest]) -> list[Array]:
        arrays: list[Array] = []
        for spec, kind, pair in self._controls:
            if kind == "CONTROL_SEQUENCE_START":
                values: list[Any] = [pair[member.start] for member in members]
            elif kind == "CONTROL_SEQUENCE_END":
                values = [pair[member.end] for member in members]
            elif kind == "CONTROL_SEQUENCE_READY":
                values = [pair[not member.null] for member in members]
            elif self._text or spec.item:
                values = [member.key for member in members]
            else:
                values = [str(member.key).encode() for member in members]
            array = np.array(values, spec.numpy)
            arrays.append(array.reshape(-1, 1) if spec.batched else array)
        return arrays


class _Kept(Struct):
    """The states of a sequence: one row of each of these arrays, which other sequences of its last batch may share."""

    arrays: Sequence[Array]
    place: int


class States:
    """The states of all sequences of one instance. `strict`: they must have the data type of the configuration."""

    def __init__(self, config: ModelConfig, folder: Path, text: bool, strict: bool) -> None:
        sequence = config.sequence_batching
        entries = sequence.state if sequence is not None else ()
        self.specs = states_of(config)
        self.outputs = new_states_of(config)
        self._model = config.name
        self._batched = config.max_batch_size > 0
        self._empty: Any = "" if text else b""
        self.varies = not all(spec.fixed for spec in self.specs)
        self._first = _Kept(
            [self._initial(entry, spec, folder) for entry, spec in zip(entries, self.specs, strict=True)], 0
        )
        self._kept: dict[Key, _Kept] = {}
        self._strict = strict
        self._buffers = Buffers()

    def shapes(self, member: SequenceRequest) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of a member's states: equal for members that run together, if shapes vary."""
        return tuple(array.shape[self._batched :] for array in self._now(member).arrays)

    def arrays(self, members: Sequence[SequenceRequest]) -> list[Array]:
        """Returns the states of a batch of members with equal shapes."""
        if not self.specs:
            return []
        kept = [None if member.null else self._now(member) for member in members]
        some = next((state for state in kept if state is not None), self._first)
        if not self._batched:
            return list(some.arrays)
        # The same sequences in the same rows as in the last batch: pass the model's arrays back without a copy.
        if len(some.arrays[0]) == len(kept) and all(
            state is None or (state.arrays is some.arrays and state.place == place) for place, state in enumerate(kept)
        ):
            return list(some.arrays)
        return [self._gathered(index, kept, some) for index in range(len(self.specs))]

    def checked(self, index: int, array: Any, rows: int, fresh: bool) -> Array:
        """Checks and returns a state from the model. `fresh`: the array is not shared and need not be copied."""
        spec = self.outputs[index]
        what = f"state output '{spec.name}' of model '{self._model}'"
        if not isinstance(array, np.ndarray):
            raise ModelFailed(f"{what} is a {type(array).__name__}; expected an array")
        if not self._strict and array.dtype != spec.numpy:
            array = as_state(spec, array)
        if array.dtype != spec.numpy and not (not spec.item and array.dtype.kind in "SU"):
            raise ModelFailed(f"{what} has the wrong data type: expected {spec.dtype}, found {array.dtype}")
        if not spec.fits(array.shape) or (spec.batched and array.shape[0] != rows):
            raise ModelFailed(f"{what} has the wrong shape: expected {spec.expected(rows)}, found {list(array.shape)}")
        if not spec.item:
            kept = self._strings(array.ravel().tolist(), array.shape)
        else:
            kept = array if fresh and array.flags.c_contiguous else array.copy()
        kept.flags.writeable = False
        return kept

    def keep(self, members: Sequence[SequenceRequest], arrays: Sequence[Array], good: Sequence[bool]) -> None:
        """Keeps the states of a run, one row for each member; only members with `good` continue from them."""
        apart = len(members) > 1 and sum(array.nbytes for array in arrays) > WHOLE_BYTES
        for place, member in enumerate(members):
            if member.null:
                continue
            if not good[place]:
                if member.start or member.end:
                    self._kept.pop(member.key, None)
            elif member.end:
                self._kept.pop(member.key, None)
            elif apart:
                self._kept[member.key] = _Kept([array[place : place + 1].copy() for array in arrays], 0)
            else:
                self._kept[member.key] = _Kept(arrays, place)

    def update(self, member: SequenceRequest, states: dict[int, Array], last: bool) -> None:
        """Keeps states of a model that answers request by request, and may leave some unchanged."""
        if last:
            self._kept.pop(member.key, None)
        elif states or member.start:
            arrays = self._now(member).arrays
            self._kept[member.key] = _Kept([states.get(index, array) for index, array in enumerate(arrays)], 0)

    def forget(self, sequences: Sequence[Key]) -> None:
        for key in sequences:
            self._kept.pop(key, None)

    # ------------------------------------------------------------------------------------ one state

    def _now(self, member: SequenceRequest) -> _Kept:
        return self._first if member.start else self._kept.get(member.key, self._first)

    def _gathered(self, index: int, kept: Sequence[_Kept | None], some: _Kept) -> Array:
        spec = self.specs[index]
        sample = some.arrays[index]
        shape = (1, *sample.shape[1:])
        if len(kept) == 1:
            return sample[some.place : some.place + 1]
        if None in kept:
            null = np.zeros(shape, spec.numpy) if spec.item else np.full(shape, self._empty, object)
        pieces = [null if s is None else s.arrays[index][s.place : s.place + 1] for s in kept]
        if not spec.item:
            strings: Array = np.concatenate(pieces)
            return strings
        target = self._buffers.array(index, spec, (len(kept), *shape[1:]))
        np.concatenate(pieces, out=target)
        return target

    def _initial(self, entry: ModelSequenceBatchingState, spec: Spec, folder: Path) -> Array:
        dims = tuple(1 if dim == -1 else dim for dim in spec.dims)
        file = ""
        for initial in entry.initial_state:
            what = f"the initial state '{initial.name}' of '{entry.input_name}' of model '{self._model}'"
            if FROM_CONFIG.get(initial.data_type, spec.dtype) != spec.dtype:
                raise InvalidRequest(f"{what} has data_type {initial.data_type}; the state's is {entry.data_type}")
            dims = tuple(initial.dims)
            if any(dim < 1 for dim in dims) or not matches(dims, spec.dims):
                raise InvalidRequest(f"{what} has dims {list(dims)}; the state's are {list(spec.dims)}")
            file = initial.data_file or ""
        shape = (1, *dims) if self._batched else dims
        if file:
            array = self._from_file(file, shape, spec, folder)
        elif spec.item:
            array = np.zeros(shape, spec.numpy)
        else:
            array = np.full(shape, self._empty, object)
        array.flags.writeable = False
        return array

    def _from_file(self, name: str, shape: tuple[int, ...], spec: Spec, folder: Path) -> Array:
        what = f"data file '{name}' of the initial state of '{spec.name}' of model '{self._model}'"
        data = read_tensor(folder, FOLDER, name, what, spec, shape)
        if spec.item:
            return np.frombuffer(data, spec.numpy).reshape(shape).copy()
        try:
            return self._strings(decode_bytes(data, shape, what).ravel().tolist(), shape)
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{what} holds a string that is not UTF-8: {error.reason}") from None

    def _strings(self, strings: Sequence[str | bytes], shape: tuple[int, ...]) -> Array:
        """Converts strings to the type that the model gets."""
        array: Array = np.empty(len(strings), object)
        if isinstance(self._empty, str):
            array[:] = [text.decode() if isinstance(text, bytes) else text for text in strings]
        else:
            array[:] = [text.encode() if isinstance(text, str) else text for text in strings]
        return array.reshape(shape)


# ---------------------------------------------------------------------------------------------- batches


def in_turns(work_items: Sequence[Work], keys: Sequence[Key]) -> list[list[Work]]:
    """Splits work items into batches to run in order, so that no sequence and no slot occurs twice in a batch."""
    slots = [work.slot for work in work_items if work.slot >= 0]
    if len(set(keys)) == len(keys) and len(set(slots)) == len(slots):
        return [list(work_items)]
    turns: list[list[Work]] = []
    latest: dict[Any, int] = {}
    for work, key in zip(work_items, keys, strict=True):
        names = (("key", key), ("slot", work.slot)) if work.slot >= 0 else (("key", key),)
        turn = max(latest.get(name, -1) for name in names) + 1
        for name in names:
            latest[name] = turn
        if turn == len(turns):
            turns.append([])
        turns[turn].append(work)
    return turns


def with_gaps_filled(work_items: Sequence[Work], specs: Sequence[Spec]) -> list[Work]:
    """Returns a request for each slot from 0 to the highest; empty slots get zeros in the shapes of the
    first request."""
    slots = {work.slot: work for work in work_items}
    items = {spec.name: spec.item or 4 for spec in specs}
    sample = work_items[0]
    tensors = tuple(
        Tensor(tensor.name, tensor.dtype, tensor.shape, bytes(elements(tensor.shape) * items[tensor.name]))
        for tensor in sample.inputs
    )
    null = Work(NULL, sample.rows, tensors, (), sample.audience)
    return [slots.get(slot, null) for slot in range(max(slots) + 1)]
