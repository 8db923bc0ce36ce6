"""The outputs of a batch, as a backend provides them, and the rows of its requests.

A backend computes an output in the array that `place` returns, or on the GPU at `near`, or hands over an array with
`put`.

Invariant: each output is computed where it will be read, or copied there once. Small outputs go into the message, large
ones into the arena of the request's audience, or into the caller's own memory if it asked for that. A request for
classes gets only the class strings, never the tensor. Requests without `inline` get at most single bytes in the
message: conditions of ensembles, which the broker reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from operator import lt
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.dtypes import ITEM_BYTES, elements
from shmserve.errors import InvalidRequest, ModelFailed, ServeError, Unavailable
from shmserve.protocol.messages import (
    FIELD_BYTES,
    INLINE_BYTES,
    OWNER_SHIFT,
    PACKET_MESSAGES,
    Columns,
    Failure,
    Handle,
    Tensor,
    TensorForm,
    Wanted,
)
from shmserve.protocol.work_items import WorkColumns, shares_of
from shmserve.protocol.worker_messages import Row
from shmserve.workers.batch.classification import Top, classify, refusal, top
from shmserve.workers.batch.output_checks import check_shape, strings
from shmserve.workers.output_arenas import INTERNAL

if TYPE_CHECKING:
    from shmserve.protocol.messages import Value
    from shmserve.protocol.worker_messages import Work
    from shmserve.shm.arena import Block
    from shmserve.workers.batch.scatter import Scatter
    from shmserve.workers.batch.specs import Spec
    from shmserve.workers.gpu.shared import DevicePiece

Array = np.ndarray[Any, np.dtype[Any]]
_Place = Handle | Top | None | bool
"""Where a request wants an output: a Handle to its memory, a Top for classes, None for anywhere, False for nowhere."""


class Results:
    """The outputs of one group: a backend fills them in with `place` or `put`, then `rows` returns what each request
    gets.

    Must be finished by either `rows` or `abandon`.
    """

    __slots__ = (
        "_blocks",
        "_columns",
        "_failures",
        "_incomplete",
        "_inline",
        "_inlined",
        "_one_row_each",
        "_placed",
        "_places",
        "_ready",
        "_rows",
        "_scatter",
        "_work_items",
    )

    def __init__(self, scatter: Scatter, work_items: Sequence[Work], rows: int) -> None:
        self._scatter = scatter
        self._work_items = work_items
        self._rows = rows
        self._one_row_each = rows == len(work_items)
        count = len(scatter.specs)
        self._columns: list[Sequence[Tensor | None] | None] = [None] * count
        """Output -> what each request gets of it."""
        self._ready: list[Array | None] = [None] * count
        """Output -> the array that `place` has returned."""
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
        if len(work_items) == 1:
            self._inlined = work_items[0].inline
            if work_items[0].outputs is not None:
                self._places = self._requested_places(work_items)
        elif type(work_items) is not WorkColumns:
            self._inlined = [work.inline for work in work_items].count(True) == len(work_items)
            if [work.outputs for work in work_items].count(None) != len(work_items):
                self._places = self._requested_places(work_items)

    def _requested_places(self, work_items: Sequence[Work]) -> list[list[_Place]]:
        names, specs = self._scatter.names, self._scatter.specs
        places: list[list[_Place]] = [[False] * len(work_items) for _ in names]
        for position, work in enumerate(work_items):
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

    # ------------------------------------------------------------------------------------ for backends

    def needed(self, index: int) -> bool:
        """Whether any request wants this output."""
        return self._places is None or any(place is not False for place in self._places[index])

    def direct(self, index: int, shape: tuple[int, ...]) -> bool:
        """Whether `place` returns the memory that the requests get, so that computing there saves a copy."""
        spec = self._scatter.specs[index]
        if not spec.item:
            return False
        if len(self._work_items) == 1:
            place = self._place(index, 0)
            if isinstance(place, Handle):
                return not self._scatter.placing.is_on_device(place)
            return place is None and elements(shape) * spec.item > self._max_inline()
        return self._block_sizes(index, shape) is not None

    def place(self, index: int, shape: tuple[int, ...]) -> Array:
        """Returns an array for an output of all requests. Its initial content is undefined."""
        spec = self._scatter.specs[index]
        check_shape(self._scatter.model, spec, shape, self._rows)
        array = self._own_place(index, spec, shape)
        if array is None:
            if not spec.item:
                array = np.empty(shape, spec.numpy)
            else:
                array = self._scatter.buffers.array(index, spec, shape)
        self._ready[index] = array
        return array

    def place_alone(self, index: int, shape: tuple[int, ...]) -> Array | None:
        """Returns the memory that the only request gets for this output. None: the output has to be `put`."""
        spec = self._scatter.specs[index]
        if not self._fits_alone(spec, shape):
            return None
        array = self._ready[index] = self._own_place(index, spec, shape)
        return array

    def near_alone(self, index: int, shape: tuple[int, ...]) -> int | None:
        """`near` for the only request. None also if the output has to be `put`."""
        return self.near(index, shape) if self._fits_alone(self._scatter.specs[index], shape) else None

    def _fits_alone(self, spec: Spec, shape: tuple[int, ...]) -> bool:
        return bool(spec.item) and spec.fits(shape) and not (spec.batched and shape[0] != self._rows)

    def near(self, index: int, shape: tuple[int, ...]) -> int | None:
        """Returns the address on this process's GPU at which to write an output of all requests, instead of `place`;
        None if a reader wants it on the host or there is no room.
        """
        spec, work_items = self._scatter.specs[index], self._work_items
        place = self._place(index, 0)
        if isinstance(place, Handle):
            return self._near_places(index, shape)
        if (
            type(work_items) is WorkColumns
            or [work.step is not None and spec.name in work.step.near for work in work_items].count(True)
            != len(work_items)
            or not spec.item
        ):
            return None
        check_shape(self._scatter.model, spec, shape, self._rows)
        size = elements(shape) * spec.item
        small = size <= INLINE_BYTES if len(work_items) == 1 else self._block_sizes(index, shape) is None
        if small or (self._places is not None and any(place is not None for place in self._places[index])):
            return None
        try:
            block = self._scatter.arenas.allocate_near(work_items[0].audience, size)
        except Unavailable:
            return None
        self._blocks[index] = block
        self._ready[index] = spec.hollow(shape)
        return block.address

    def _near_places(self, index: int, shape: tuple[int, ...]) -> int | None:
        """Returns the caller's own GPU memory for one request, or a temporary GPU block that `rows` copies to the
        places of several requests. None: the output goes through the host, where errors are reported."""
        spec, work_items, placing = self._scatter.specs[index], self._work_items, self._scatter.placing
        if not spec.item or self._failures or self._places is None:
            return None
        check_shape(self._scatter.model, spec, shape, self._rows)
        row_bytes = elements(shape[1:]) * spec.item
        sizes = [work.rows * row_bytes for work in work_items] if len(work_items) > 1 else [elements(shape) * spec.item]
        handles = [place for place in self._places[index] if isinstance(place, Handle) and placing.is_on_device(place)]
        if len(handles) < len(work_items) or any(map(lt, [place.size for place in handles], sizes)):
            return None
        if len(work_items) == 1:
            address = placing.gpu.address(handles[0])
        else:
            try:
                block = self._scatter.arenas.allocate_near(INTERNAL, sum(sizes))
            except Unavailable:
                return None
            self._blocks[index] = block
            address = block.address
        self._placed.add(index)
        self._ready[index] = spec.hollow(shape)
        return address

    def put(self, index: int, array: Array) -> None:
        """Takes an output of all requests that was computed elsewhere, and copies it before it returns."""
        spec = self._scatter.checks.check(self._scatter.specs[index], array, self._rows, len(self._work_items))
        if spec.item and array.dtype != spec.numpy:  # in another byte order
            array = array.astype(spec.numpy)
        if self._places is None or self.needed(index):
            self._columns[index] = self._split(index, spec, array)

    def put_named(self, name: str, array: Any) -> None:
        """`put` by name. `array` may also be a piece on the GPU."""
        index = self._scatter.names.get(name)
        if index is None:
            raise ModelFailed(
                f"unexpected output '{name}': the outputs of model '{self._scatter.model}' are "
                f"{', '.join(self._scatter.names)}"
            )
        if self._columns[index] is not None or self._ready[index] is not None:
            raise ModelFailed(f"output '{name}' was given twice")
        if not isinstance(array, np.ndarray) and hasattr(array, "host"):
            if self._stays(index, array):
                return
            array = array.host()
        self.put(index, array)

    def _stays(self, index: int, piece: DevicePiece) -> bool:
        """Copies a piece on the GPU to where all readers want it. Returns False if that is outside this GPU."""
        spec = self._scatter.specs[index]
        if piece.dtype != spec.numpy or not spec.fits(piece.shape):
            return False
        address = self.near(index, piece.shape)
        if address is None:
            return False
        self._scatter.placing.gpu.move(address, piece)
        return True

    def alias(self, index: int, source: str, shape: tuple[int, ...]) -> bool:
        """Uses an input as the output without a copy, if only workers read it. False: it must be copied."""
        spec, arenas = self._scatter.specs[index], self._scatter.arenas
        check_shape(self._scatter.model, spec, shape, self._rows)
        if type(self._work_items) is WorkColumns:  # inside the messages
            return False
        column = []
        for position, work in enumerate(self._work_items):
            if not work.aliases:
                return False
            tensor = next((tensor for tensor in work.inputs if tensor.name == source), None)
            if tensor is None or not spec.item or not isinstance(tensor.data, tuple):
                return False
            if self._place(index, position) is not None or tensor.dtype != spec.dtype:
                return False
            if any(arenas.owns(part.segment) or not part.segment >> OWNER_SHIFT for part in tensor.data):
                return False
            column.append(Tensor(spec.name, spec.dtype, tensor.shape, tensor.data))
        self._columns[index] = column
        return True

    def omit(self, index: int) -> None:
        """Marks an output as absent from this batch; the rows do not contain it."""
        self._columns[index] = [None] * len(self._work_items)
        self._incomplete = True

    # ------------------------------------------------------------------------------------ the end

    def rows(self, parameters: dict[str, Value] | None = None) -> list[Row]:
        """Returns the row of each request, in the order of the work items."""
        columns = self._finished()
        work_items = self._work_items
        if columns and self._places is None and not (self._failures or self._incomplete):
            each: Any = zip(*columns, strict=True)
            return [
                Row(work.request, tensors, None, parameters) for work, tensors in zip(work_items, each, strict=True)
            ]
        return [self._row(position, columns, parameters) for position in range(len(work_items))]

    def answers(self, parameters: dict[str, Value] | None = None) -> Columns | list[Row]:
        """Returns the results in columns if the requests came in columns and all outputs are inside the message,
        otherwise as `rows`."""
        work_items = self._work_items
        if type(work_items) is not WorkColumns or parameters is not None:
            return self.rows(parameters)
        columns = self._finished()
        if not columns or self._failures or self._incomplete or len(work_items) > PACKET_MESSAGES:
            return self.rows()
        forms: list[TensorForm] = []
        blobs: list[list[bytes]] = []
        for column in columns:
            if type(column) is not InlineColumn:
                return self.rows()
            forms.append(column.form)
            blobs.append(column.blobs)
        each: Any = zip(*blobs, strict=True)
        return Columns(tuple(forms), tuple(work_items.requests), tuple(work_items.rows), tuple(each))

    def _finished(self) -> list[Sequence[Tensor | None]]:
        columns: list[Sequence[Tensor | None]] = []
        for index, spec in enumerate(self._scatter.specs):
            array, column = self._ready[index], self._columns[index]
            if array is not None:
                column = self._split(index, spec, array)
            elif column is None:
                if self.needed(index):
                    self._missing(index)
                column = [None] * len(self._work_items)
            columns.append(column)
            self._columns[index] = column
            self._ready[index] = None
        return columns

    def _missing(self, index: int) -> None:
        """Handles a missing output, which is absent from the responses unless outputs are strict."""
        if not self._scatter.checks.strict:
            self._incomplete = True
            return
        pairs = zip(self._ready, self._columns, strict=True)
        produced = sum(ready is not None or any(done or ()) for ready, done in pairs)
        name, count = self._scatter.specs[index].name, sum(map(self.needed, range(len(self._scatter.specs))))
        self.abandon()
        raise ModelFailed(f"the model did not produce output '{name}': expected {count} output(s), found {produced}")

    def _row(self, position: int, columns: list[Sequence[Tensor | None]], parameters: dict[str, Value] | None) -> Row:
        work = self._work_items[position]
        tensors = [column[position] for column in columns]
        error = self._failures.get(position)
        if error is not None:
            self._scatter.release(tensors)
            return Row(work.request, (), Failure(error.code, str(error)))
        if work.outputs is not None:
            names = self._scatter.names
            tensors = [tensors[names[wanted.name]] for wanted in work.outputs]
        return Row(work.request, tuple(tensor for tensor in tensors if tensor is not None), None, parameters)

    def abandon(self) -> None:
        """Frees the memory of the outputs; they will not be used."""
        arenas = self._scatter.arenas
        arenas.free([Handle(block.segment, block.offset, block.size) for block in self._blocks.values()])
        for column in self._columns:
            self._scatter.release(column or ())
        self._blocks = {}
        self._columns = [None] * len(self._columns)
        self._ready = [None] * len(self._ready)

    # ------------------------------------------------------------------------------------ where outputs go

    def _block_sizes(self, index: int, shape: tuple[int, ...]) -> list[int] | None:
        """Returns the bytes of each request's share if one block can hold them all and be split; else None."""
        work_items = self._work_items
        if self._places is not None and any(place is not None for place in self._places[index]):
            return None
        row_bytes = elements(shape[1:]) * self._scatter.specs[index].item
        sizes = [row_bytes * share for share in shares_of(work_items)]
        if min(sizes) <= INLINE_BYTES:
            return None
        audience = work_items[0].audience
        return None if any(work.audience != audience for work in work_items) else sizes

    def _own_place(self, index: int, spec: Spec, shape: tuple[int, ...]) -> Array | None:
        """Returns the memory that the requests get. None: the output is copied there."""
        if len(self._work_items) > 1:
            sizes = self._block_sizes(index, shape)
            return None if sizes is None else self._allocate(index, spec, shape, sum(sizes))
        size = elements(shape) * spec.item
        place = self._place(index, 0)
        if isinstance(place, Handle) and self._scatter.placing.is_on_device(place):
            return None
        if isinstance(place, Handle) and spec.item:
            try:
                array = self._scatter.placing.writable(spec, place, shape, size)
            except ServeError as error:
                self.fail(0, error)
                return None
            if array.flags.aligned:
                self._placed.add(index)
                return array
        elif place is None and size > self._max_inline():
            return self._allocate(index, spec, shape, size)
        return None

    def _max_inline(self) -> int:
        """The largest output that a lone request gets inside its message."""
        return INLINE_BYTES if self._inlined else 1

    def _allocate(self, index: int, spec: Spec, shape: tuple[int, ...], size: int) -> Array | None:
        """Returns a block for the whole output. Without room for it, `_copy_share` tries the requests one by one."""
        try:
            block = self._scatter.arenas.allocate(self._work_items[0].audience, size)
        except Unavailable:
            return None
        self._blocks[index] = block
        return block.array(spec.numpy, shape)

    # ------------------------------------------------------------------------------------ from array to tensors

    def _split(self, index: int, spec: Spec, array: Array) -> Sequence[Tensor | None]:
        work_items = self._work_items
        shape = spec.outer(array.shape)
        if index in self._placed:
            return self._split_placed(index, spec, array, shape)
        if index in self._blocks:
            return self._split_block(index, spec, array, shape)
        if len(work_items) == 1:
            return [self._copy_share(index, spec, 0, array, shape)]
        if self._places is None and spec.item and self._inlined:
            shares = (1,) * len(work_items) if self._one_row_each else shares_of(work_items)
            step = array.nbytes // self._rows
            largest = step if self._one_row_each else step * max(shares)
            if largest <= INLINE_BYTES and self._inline + largest <= FIELD_BYTES:
                self._inline += largest
                return InlineColumn(spec, shape[1:], shares, _sliced(array.tobytes(), step, shares, self._one_row_each))
        tensors = []
        start = 0
        for position, work in enumerate(work_items):
            end = start + work.rows
            tensors.append(self._copy_share(index, spec, position, array[start:end], (work.rows, *shape[1:])))
            start = end
        return tensors

    def _split_placed(self, index: int, spec: Spec, array: Array, shape: tuple[int, ...]) -> Sequence[Tensor | None]:
        assert self._places is not None
        work_items, places = self._work_items, [place for place in self._places[index] if isinstance(place, Handle)]
        if len(work_items) == 1:
            return [Tensor(spec.name, spec.dtype, shape, (places[0],))]
        row_bytes = array.nbytes // self._rows
        self._scatter.placing.gpu.spread(
            self._blocks[index].address, places, [work.rows * row_bytes for work in work_items]
        )
        block = self._blocks.pop(index)
        self._scatter.arenas.free([Handle(block.segment, block.offset, block.size)])
        return [
            Tensor(spec.name, spec.dtype, (work.rows, *shape[1:]), (place,))
            for work, place in zip(work_items, places, strict=True)
        ]

    def _split_block(self, index: int, spec: Spec, array: Array, shape: tuple[int, ...]) -> Sequence[Tensor | None]:
        block = self._blocks.pop(index)
        work_items = self._work_items
        if len(work_items) == 1:
            return [Tensor(spec.name, spec.dtype, shape, (Handle(block.segment, block.offset, array.nbytes),))]
        row_bytes = array.nbytes // self._rows
        tail = shape[1:]
        pieces = self._scatter.arenas.split(block, [work.rows * row_bytes for work in work_items])
        return [
            Tensor(
                spec.name,
                spec.dtype,
                (work.rows, *tail),
                (Handle(piece.segment, piece.offset, work.rows * row_bytes),),
            )
            for work, piece in zip(work_items, pieces, strict=True)
        ]

    def _shares(self, index: int, spec: Spec, shares: Sequence[Array | None]) -> list[Tensor | None]:
        """Returns what each request gets of an output; None: the request does not get it."""
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
            inline = self._inlined or size <= 1 or self._work_items[position].inline
            if inline and size <= INLINE_BYTES and self._inline + size <= FIELD_BYTES:
                if position == len(self._work_items) - 1:
                    self._inline += INLINE_BYTES if len(self._work_items) > 1 else size
                return Tensor(spec.name, dtype, shape, source.tobytes())
            if self._scatter.calls is not None and source is part and part.flags.c_contiguous:
                passed = self._scatter.calls.passed_on(part, self._work_items[position].audience)
                if passed is not None:
                    return Tensor(spec.name, dtype, shape, (passed,))
            block = self._scatter.arenas.allocate(self._work_items[position].audience, size)
        except ServeError as error:
            self.fail(position, error)
            return None
        np.copyto(block.array(source.dtype, source.shape), source)
        return Tensor(spec.name, dtype, shape, (Handle(block.segment, block.offset, size),))


class InlineColumn(Sequence["Tensor | None"]):
    """An output of several requests, inside the message: `blobs[n]` has the share of the n-th request. `dims`: the
    shape of a share without axis 0, whose length is in `shares`."""

    __slots__ = ("blobs", "dims", "shares", "spec")

    def __init__(self, spec: Spec, dims: tuple[int, ...], shares: Sequence[int], blobs: list[bytes]) -> None:
        self.spec = spec
        self.dims = dims
        self.shares = shares
        self.blobs = blobs

    @property
    def form(self) -> TensorForm:
        return TensorForm(self.spec.name, self.spec.dtype, self.dims)

    def __len__(self) -> int:
        return len(self.blobs)

    def __iter__(self) -> Iterator[Tensor | None]:
        """Iterates in one pass, for results that do not stay in columns."""
        shares, dims = self.shares, self.dims
        shapes: Iterable[tuple[int, ...]] = repeat((shares[0], *dims))
        if shares.count(shares[0]) != len(shares):
            shapes = [(share, *dims) for share in shares]
        return map(Tensor, repeat(self.spec.name), repeat(self.spec.dtype), shapes, self.blobs)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return Tensor(self.spec.name, self.spec.dtype, (self.shares[index], *self.dims), self.blobs[index])


def _sliced(data: bytes, step: int, shares: Sequence[int], one_row_each: bool) -> list[bytes]:
    """Returns the bytes of each request; a row has `step` bytes."""
    if not step:
        return [b""] * len(shares)
    if one_row_each:
        return [data[at : at + step] for at in range(0, len(data), step)]
    ends = list(accumulate(shares))
    return [data[(end - share) * step : end * step] for share, end in zip(shares, ends, strict=True)]
