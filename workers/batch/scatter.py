"""Turns the output arrays of a model into the tensors of its requests. Backends use it through `results`.

Invariant: each output is computed where it will be read, or copied there once. Small outputs go into the message, large
ones into the arena of the request's audience, or into the caller's own memory if it asked for that. A request for
classes gets only the class strings, never the tensor. Requests without `inline` get at most single bytes in the
message: conditions of ensembles, which the broker reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.dtypes import ITEM_BYTES
from shmserve.errors import InvalidRequest, ServeError
from shmserve.protocol.messages import FIELD_BYTES, INLINE_BYTES, Handle, Tensor, Wanted
from shmserve.protocol.works import ColumnWorks, shares_of
from shmserve.workers.batch.classification import Top, classify, refusal, top
from shmserve.workers.batch.columns import InlineColumn
from shmserve.workers.batch.output_checks import OutputChecks, strings
from shmserve.workers.batch.placement import Placing

if TYPE_CHECKING:
    from shmserve.protocol.worker_messages import Work
    from shmserve.shm.arena import Block
    from shmserve.shm.mapped import Mapped
    from shmserve.workers.batch.specs import Spec
    from shmserve.workers.model_calls.calls import OutgoingCalls
    from shmserve.workers.output_arenas import Arenas

Array = np.ndarray[Any, np.dtype[Any]]
_BYTE = np.dtype(np.uint8)
_Place = Handle | Top | None | bool
"""Where a request wants an output: a Handle to its memory, a Top for classes, None for anywhere, False for nowhere."""


class Scatter:
    """State shared by all batches of a model. Owns the buffers of outputs that are copied into messages."""

    def __init__(
        self,
        model: str,
        specs: Sequence[Spec],
        arenas: Arenas,
        mapped: Mapped,
        labels: Sequence[Sequence[str]] = (),
        calls: OutgoingCalls | None = None,
        strict: bool = True,
    ) -> None:
        """`labels`: the class labels of each output, empty if it has none. `calls`: arrays that came from a call are
        passed on by handle, without a copy. `strict`: outputs must match the configuration."""
        self.calls = calls
        self.checks = OutputChecks(model, strict)
        self.model = model
        self.specs = tuple(specs)
        self.labels = tuple(labels) or ((),) * len(self.specs)
        self.names = {spec.name: index for index, spec in enumerate(self.specs)}
        self.arenas = arenas
        self.placing = Placing(model, mapped)
        self._buffers: list[Array] = [np.empty(0, _BYTE) for _ in self.specs]
        self._others: list[Array] = list(self._buffers)

    def exchange_buffers(self) -> None:
        """Called when a batch begins while the one before may still be written to its buffers."""
        self._buffers, self._others = self._others, self._buffers

    def buffer(self, index: int, size: int) -> Array:
        buffer = self._buffers[index]
        if len(buffer) < size:
            buffer = self._buffers[index] = np.empty(size, _BYTE)
        return buffer[:size]

    def release(self, tensors: Sequence[Tensor | None]) -> None:
        """Frees outputs that will not be sent, as far as they are in this worker's arenas."""
        for tensor in tensors:
            if tensor is None or not isinstance(tensor.data, tuple):
                continue
            if self.calls is None or not self.calls.not_passed_on(tensor):
                self.arenas.free([part for part in tensor.data if self.arenas.owns(part.segment)])


class RequestOutputs:
    """The outputs that the requests of one group want, and the tensors that they get."""

    __slots__ = (
        "_blocks", "_failures", "_incomplete", "_inline", "_inlined", "_one_row_each", "_placed", "_places", "_rows",
        "_scatter", "_works",
    )  # fmt: skip

    def __init__(self, scatter: Scatter, works: Sequence[Work], rows: int) -> None:
        self._scatter = scatter
        self._works = works
        self._rows = rows
        self._one_row_each = rows == len(works)
        self._blocks: dict[int, Block] = {}
        """Output -> the block of an arena that is its array."""
        self._placed: set[int] = set()
        """Outputs whose array is the caller's own memory."""
        self._incomplete = False
        """Some row lacks some output."""
        self._failures: dict[int, ServeError] = {}
        self._inline = 0
        """Bytes in each row's message so far."""
        self._inlined = True
        """All requests take small outputs inside their messages."""
        self._places: list[list[_Place]] | None = None
        """Output -> where each request wants it; None: all requests want all outputs, anywhere."""
        if len(works) == 1:
            self._inlined = works[0].inline
            if works[0].outputs is not None:
                self._places = self._requested_places(works)
        elif type(works) is not ColumnWorks:
            self._inlined = [work.inline for work in works].count(True) == len(works)
            if [work.outputs for work in works].count(None) != len(works):
                self._places = self._requested_places(works)

    def _requested_places(self, works: Sequence[Work]) -> list[list[_Place]]:
        names, specs = self._scatter.names, self._scatter.specs
        places: list[list[_Place]] = [[False] * len(works) for _ in names]
        for position, work in enumerate(works):
            if work.outputs is None:
                for column in places:
                    column[position] = None
                continue
            for wanted in work.outputs:
                index = names.get(wanted.name)
                if index is None:
                    self._failures[position] = InvalidRequest(
                        f"unexpected inference output '{wanted.name}' for model '{self._scatter.model}'; "
                        f"its outputs are: {', '.join(names)}"
                    )
                elif not wanted.classes:
                    places[index][position] = wanted.place
                    if wanted.place is not None and self._scatter.placing.is_on_device(wanted.place):
                        self._check_reachable(position, wanted.place)
                else:
                    try:
                        labels = work.step.labels if work.step is not None else ()
                        places[index][position] = top(self._scatter.model, specs[index], wanted, labels)
                    except ServeError as error:
                        self.fail(position, error)
        return places

    def _check_reachable(self, position: int, place: Handle) -> None:
        """Fails the request if its place on a GPU cannot be written from this process, whatever the model produces."""
        try:
            self._scatter.placing.gpu.address(place)
        except ServeError as error:
            self.fail(position, error)

    def _place(self, index: int, position: int) -> _Place:
        return None if self._places is None else self._places[index][position]

    def fail(self, position: int, error: ServeError) -> None:
        """Fails one request of the group. Drops the traceback, whose frames would keep tensors and results alive."""
        self._failures[position] = error.with_traceback(None)

    # ------------------------------------------------------------------------------------ from array to tensors

    def _split(self, index: int, spec: Spec, array: Array) -> Sequence[Tensor | None]:
        works = self._works
        shape = spec.outer(array.shape)
        if index in self._placed:
            return self._split_placed(index, spec, array, shape)
        if index in self._blocks:
            return self._split_block(index, spec, array, shape)
        if len(works) == 1:
            return [self._copy_share(index, spec, 0, array, shape)]
        if self._places is None and spec.item and self._inlined:
            shares = (1,) * len(works) if self._one_row_each else shares_of(works)
            step = array.nbytes // self._rows
            largest = step if self._one_row_each else step * max(shares)
            if largest <= INLINE_BYTES and self._inline + largest <= FIELD_BYTES:
                self._inline += largest
                return InlineColumn(spec, shape[1:], shares, _sliced(array.tobytes(), step, shares, self._one_row_each))
        tensors = []
        start = 0
        for position, work in enumerate(works):
            end = start + work.rows
            tensors.append(self._copy_share(index, spec, position, array[start:end], (work.rows, *shape[1:])))
            start = end
        return tensors

    def _split_placed(self, index: int, spec: Spec, array: Array, shape: tuple[int, ...]) -> Sequence[Tensor | None]:
        assert self._places is not None
        works, places = self._works, [place for place in self._places[index] if isinstance(place, Handle)]
        if len(works) == 1:
            return [Tensor(spec.name, spec.dtype, shape, (places[0],))]
        row_bytes = array.nbytes // self._rows
        self._scatter.placing.gpu.spread(self._blocks[index].address, places, [work.rows * row_bytes for work in works])
        block = self._blocks.pop(index)
        self._scatter.arenas.free([Handle(block.segment, block.offset, block.size)])
        return [
            Tensor(spec.name, spec.dtype, (work.rows, *shape[1:]), (place,))
            for work, place in zip(works, places, strict=True)
        ]

    def _split_block(self, index: int, spec: Spec, array: Array, shape: tuple[int, ...]) -> Sequence[Tensor | None]:
        block = self._blocks.pop(index)
        works = self._works
        if len(works) == 1:
            return [Tensor(spec.name, spec.dtype, shape, (Handle(block.segment, block.offset, array.nbytes),))]
        row_bytes = array.nbytes // self._rows
        tail = shape[1:]
        pieces = self._scatter.arenas.split(block, [work.rows * row_bytes for work in works])
        return [
            Tensor(
                spec.name,
                spec.dtype,
                (work.rows, *tail),
                (Handle(piece.segment, piece.offset, work.rows * row_bytes),),
            )
            for work, piece in zip(works, pieces, strict=True)
        ]

    def _shares(self, index: int, spec: Spec, shares: Sequence[Array | None]) -> list[Tensor | None]:
        tensors: list[Tensor | None] = []
        for position, share in enumerate(shares):
            if share is None:
                self._incomplete = True
            tensors.append(None if share is None else self._copy_share(index, spec, position, share, share.shape))
        return tensors

    def _copy_share(self, index: int, spec: Spec, position: int, part: Array, shape: tuple[int, ...]) -> Tensor | None:
        """Copies one request's share into the message, the caller's place or the arena."""
        place = self._place(index, position)
        if place is False or position in self._failures:
            self._incomplete = True
            return None
        dtype = spec.dtype
        try:
            if isinstance(place, Top):
                if (error := refusal(self._scatter.model, spec, Wanted(spec.name, None, place.count))) is not None:
                    raise error
                labels = self._scatter.labels[index] if place.labels is None else place.labels
                part = classify(spec, part, place.count, labels)
                shape, dtype = part.shape, "BYTES"
            source = part if ITEM_BYTES[dtype] else strings(self._scatter.model, spec, part)
            size = source.nbytes
            if isinstance(place, Handle):
                self._scatter.placing.write(spec, place, part.shape, source)
                return Tensor(spec.name, spec.dtype, shape, (place,))
            inline = self._inlined or size <= 1 or self._works[position].inline
            if inline and size <= INLINE_BYTES and self._inline + size <= FIELD_BYTES:
                if position == len(self._works) - 1:
                    self._inline += INLINE_BYTES if len(self._works) > 1 else size
                return Tensor(spec.name, dtype, shape, source.tobytes())
            if self._scatter.calls is not None and source is part and part.flags.c_contiguous:
                passed = self._scatter.calls.passed_on(part, self._works[position].audience)
                if passed is not None:
                    return Tensor(spec.name, dtype, shape, (passed,))
            block = self._scatter.arenas.allocate(self._works[position].audience, size)
        except ServeError as error:
            self.fail(position, error)
            return None
        np.copyto(block.array(source.dtype, source.shape), source)
        return Tensor(spec.name, dtype, shape, (Handle(block.segment, block.offset, size),))


def _sliced(data: bytes, step: int, shares: Sequence[int], one_row_each: bool) -> list[bytes]:
    """Returns the bytes of each request; a row has `step` bytes."""
    if not step:
        return [b""] * len(shares)
    if one_row_each:
        return [data[at : at + step] for at in range(0, len(data), step)]
    ends = list(accumulate(shares))
    return [data[(end - share) * step : end * step] for share, end in zip(shares, ends, strict=True)]
