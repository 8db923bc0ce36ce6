"""Reads the tensors of requests into the input arrays of a model. The hot path of the worker.

Invariants: a batch of one request is a view of the caller's bytes; a larger batch is gathered with one copy. If all
inputs of a batch are inside the messages and stack, it is checked as a whole; otherwise `InputReader` checks its
requests one by one, so that an invalid request fails alone. Everything that a request specifies is checked before use.

Ragged inputs, whose shapes differ between requests, become one dimension: the elements of all requests in order. Padded
inputs are copied into the batch buffer at their own length and the rest is filled, so each byte is written once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct

from shmserve.dtypes import elements
from shmserve.errors import InvalidRequest, ServeError
from shmserve.protocol.work_items import WorkColumns
from shmserve.shm.mapped import OnDevice
from shmserve.shm.strings import decode_bytes
from shmserve.workers.batch.buffers import Buffers

if TYPE_CHECKING:
    from shmserve.protocol.messages import Handle, Tensor, TensorForm
    from shmserve.protocol.worker_messages import Work
    from shmserve.shm.mapped import Mapped
    from shmserve.workers.batch.specs import Pad, Spec

Array = np.ndarray[Any, np.dtype[Any]]


class GatherGroup(Struct, eq=False):
    """Requests whose inputs stack along axis 0 and that a backend runs together; or one request without a batch
    dimension.

    `work_items` are in the order of their rows. `rows` is the length of axis 0, or 0 without a batch dimension.
    `lengths`: the length of each request before padding to `length`, for models with padded inputs. `extras` are the
    inputs that do not come from callers; they follow the others.
    """

    _gather: Gather
    work_items: Sequence[Work]
    rows: int
    _shapes: list[tuple[int, ...] | None]
    _blobs: Sequence[Sequence[bytes]] | None
    _pieces: list[list[Array]] | None
    lengths: Sequence[int] = ()
    length: int = 0
    ready: int = 0
    extras: Sequence[Array] = ()

    def computing(self) -> None:
        """Records that all inputs have been read or copied and that the computation starts."""
        self.ready = time.monotonic_ns()

    def shape(self, index: int) -> tuple[int, ...] | None:
        """Returns the shape of an input as the backend sees it; None for an absent optional input."""
        shapes = self._shapes
        return shapes[index] if index < len(shapes) else self.extras[index - len(shapes)].shape

    def array(self, index: int) -> Array | None:
        """Returns an input of all requests as one array, valid until the next batch; None for an absent
        optional input."""
        if index >= len(self._shapes):
            return self.extras[index - len(self._shapes)]
        shape = self._shapes[index]
        if shape is None:
            return None
        spec = self._gather.specs[index]
        if self._blobs is not None:
            blobs = self._blobs[index]
            return np.ndarray(shape, spec.numpy, b"".join(blobs) if len(blobs) > 1 else blobs[0])
        assert self._pieces is not None
        pieces = self._pieces[index]
        if self._gather.on_device:
            pieces = _on_host(pieces)
        padded = self._is_padded(spec)
        if len(pieces) == 1 and not padded:
            only = pieces[0]
            return only.reshape(shape) if spec.reshaped else only
        if padded and not spec.item:
            texts: Array = np.empty(shape, object)
            self._gather.pad(spec, pieces, texts)
            return texts
        if not spec.item:
            strings: Array = np.concatenate(pieces)
            return strings.reshape(shape)
        gathered = self._gather.buffers.array(index, spec, shape)
        if padded:
            self._gather.pad(spec, pieces, gathered)
        else:
            _copy(pieces, gathered)
        return gathered

    def _is_padded(self, spec: Spec) -> bool:
        """Whether some request needs padding in this input."""
        return spec.pad is not None and any(length != self.length for length in self.lengths)

    def pieces(self, index: int) -> list[Array] | None:
        """Returns the contiguous parts of an input in order, without copying them. None if they are inline in messages,
        where avoiding the copy gains nothing, or need padding."""
        if index >= len(self._shapes) or self._pieces is None or not self._gather.specs[index].item:
            return None
        return None if self._is_padded(self._gather.specs[index]) else self._pieces[index]

    def copy(self, index: int, target: Array) -> None:
        """Copies an input of all requests from where the callers wrote it into an array of its shape."""
        if index >= len(self._shapes) or self._blobs is not None or not self._gather.specs[index].item:
            target[...] = self.array(index)
            return
        assert self._pieces is not None
        pieces = _on_host(self._pieces[index]) if self._gather.on_device else self._pieces[index]
        if self._is_padded(self._gather.specs[index]):
            self._gather.pad(self._gather.specs[index], pieces, target)
        else:
            _copy(pieces, target)


class StoredInput(NamedTuple):
    """An input of a request as it is stored. `parts`: its bytes in order, in contiguous arrays or pieces on the GPU.
    Elements of BYTES are encoded, unless they were padded."""

    shape: tuple[int, ...]
    parts: Sequence[Array]


class Gather:
    """Reads requests. One for each model; `buffers` has the inputs of the current batch."""

    def __init__(
        self,
        model: str,
        specs: Sequence[Spec],
        mapped: Mapped,
        text: bool = False,
        on_device: bool = False,
        stored: bool = False,
    ) -> None:
        """`text`: elements of BYTES are str, and elements that are not UTF-8 are refused. `on_device`: the backend
        reads GPU tensors in place; otherwise they are copied to the host. `stored`: `read` returns StoredInputs."""
        self.text = text
        self.on_device = on_device
        self._stored = stored
        self.specs = tuple(specs)
        self._model = model
        self._pieces_of = InputReader(model, self.specs, mapped, text, on_device, stored).pieces
        self._ragged = any(spec.flat for spec in self.specs)
        self._pads: list[tuple[int, Pad]] = [
            (index, spec.pad) for index, spec in enumerate(self.specs) if spec.pad is not None
        ]
        self.buffers = Buffers()
        self._last_forms: tuple[tuple[TensorForm, ...] | None, list[int] | None] = (None, None)
        """The forms of the last batch in columns, and the index of each input among them."""

    def groups(self, work_items: Sequence[Work]) -> tuple[list[GatherGroup], list[tuple[int, ServeError]]]:
        """Returns the batch as groups that stack, nearly always one, and errors of unreadable requests by position."""
        uniform = self.inline_group(work_items)
        if uniform is not None:
            return [uniform], []
        failures: list[tuple[int, ServeError]] = []
        stacks: dict[Any, list[tuple[int, list[list[Array]]]]] = {}
        for position, work in enumerate(work_items):
            try:
                pieces = self._pieces_of(work)
                self._length(pieces)
            except ServeError as error:
                failures.append((position, error))
                continue
            # Requests without a batch dimension do not stack: each is a group.
            key = self._key(pieces) if work.rows else position
            stacks.setdefault(key, []).append((position, pieces))
        return [self._group(work_items, members) for members in stacks.values()], failures

    def inline_group(self, work_items: Sequence[Work]) -> GatherGroup | None:
        """Returns the batch as one group if all its inputs are inside the messages and stack."""
        if len(work_items) == 1:
            return self._alone(work_items)
        return self._in_columns(work_items) if type(work_items) is WorkColumns else self._uniform(work_items)

    @property
    def pads(self) -> bool:
        return bool(self._pads)

    def longest(self, work_items: Sequence[Work]) -> int:
        """Returns the common length to pad these requests to; 0 without padding."""
        if not self._pads:
            return 0
        return self._pads[0][1].rounded(max(map(self.length_of, work_items)))

    def length_of(self, work: Work) -> int:
        """Returns the length of the request's padded inputs; 0 if it has none."""
        for tensor in work.inputs:
            for index, pad in self._pads:
                if tensor.name == self.specs[index].name and len(tensor.shape) > pad.axes[-1]:
                    return tensor.shape[pad.axes[0]]
        return 0

    def read(self, work: Work, length: int = 0) -> list[Array | None]:
        """Returns the inputs of a request as one array each, None for an absent one. `length`: the length to pad to."""
        arrays: list[Array | None] = []
        inputs = self._pieces_of(work)
        own = self._length(inputs) if self._pads else 0
        for pieces, spec in zip(inputs, self.specs, strict=True):
            if not pieces:
                arrays.append(None)
                continue
            if spec.pad is not None and own < length:
                arrays.append(self._padded(spec, spec.pad, _on_host(pieces), length))
                continue
            if self._stored:  # the backend asked for it, and reads nothing else
                arrays.append(_stored(spec, pieces))  # type: ignore[arg-type]
                continue
            if self.on_device and (len(pieces) > 1 or spec.reshaped):
                pieces = _on_host(pieces)
            array = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            arrays.append(array.reshape(spec.inner(array.shape)) if spec.reshaped else array)
        return arrays

    def _padded(self, spec: Spec, pad: Pad, pieces: list[Array], length: int) -> Array:
        rows = sum([piece.shape[0] for piece in pieces])
        array: Array = np.empty(pad.to(length, (rows, *pieces[0].shape[1:])), spec.numpy if spec.item else object)
        self.pad(spec, pieces, array)
        return array

    def pad(self, spec: Spec, pieces: list[Array], target: Array) -> None:
        """Copies the pieces of an input, each padded, into an array for all requests."""
        assert spec.pad is not None
        value = spec.pad.value
        if not spec.item and self.text:
            value = value.decode()
        start = 0
        for piece in pieces:
            end = start + piece.shape[0]
            _pad_to(target[start:end], piece, value)
            start = end

    def _length(self, pieces: list[list[Array]]) -> int:
        """Returns the common length of all padded inputs of a request."""
        length: int | None = None
        for index, pad in self._pads:
            if not pieces[index]:
                continue
            for axis in pad.axes:
                own = pieces[index][0].shape[axis]
                if length not in (None, own):
                    raise InvalidRequest(
                        f"input '{self.specs[index].name}' has length {own} on padded axis {axis}, but another "
                        f"input has {length}; the padded inputs of a request to model '{self._model}' must have one "
                        f"length"
                    )
                length = own
        return length or 0

    # ---------------------------------------------------------------------------------- one, inline

    def _alone(self, work_items: Sequence[Work]) -> GatherGroup | None:
        """`_uniform` for a single request, the usual batch under low load."""
        work = work_items[0]
        inputs, rows = work.inputs, work.rows
        if not rows or self._ragged or self._pads or len(inputs) != len(self.specs):
            return None
        blobs: list[Sequence[bytes]] = []
        shapes: list[tuple[int, ...] | None] = []
        for spec, tensor in zip(self.specs, inputs, strict=True):
            data, shape = tensor.data, tensor.shape
            if type(data) is not bytes or tensor.name != spec.name or tensor.dtype != spec.dtype or not spec.item:
                return None
            if not shape or shape[0] != rows or min(shape) < 0 or len(data) != elements(shape) * spec.item:
                return None
            blobs.append((data,))
            shapes.append(spec.inner(shape) if spec.reshaped else shape)
        return GatherGroup(self, work_items, rows, shapes, blobs, None)

    # ---------------------------------------------------------------------------------- in columns

    def _in_columns(self, work_items: WorkColumns) -> GatherGroup | None:
        """Returns the group of a batch that came in columns; None if requests must be checked one by one."""
        order = self._order_of(work_items.forms)
        if order is None or 0 in work_items.rows:
            return None
        rows = sum(work_items.rows)
        columns = list(zip(*work_items.data, strict=True))
        blobs: list[Sequence[bytes]] = []
        shapes: list[tuple[int, ...] | None] = []
        for spec, index in zip(self.specs, order, strict=True):
            dims = work_items.forms[index].dims
            row_bytes = elements(dims) * spec.item
            sizes = list(map(len, columns[index]))
            if sizes.count(row_bytes) != rows and sizes != [share * row_bytes for share in work_items.rows]:
                return None
            blobs.append(columns[index])
            shapes.append(spec.inner((rows, *dims)))
        return GatherGroup(self, work_items, rows, shapes, blobs, None)

    def _order_of(self, forms: tuple[TensorForm, ...]) -> list[int] | None:
        """Returns the index of each input's form. None: an input is absent, has another type, or cannot simply be
        joined."""
        if forms == self._last_forms[0]:
            return self._last_forms[1]
        places = {form.name: place for place, form in enumerate(forms)}
        order: list[int] | None = [places.get(spec.name, -1) for spec in self.specs]
        assert order is not None
        usual = len(forms) == len(self.specs) and -1 not in order and not self._ragged and not self._pads
        if not usual or any(
            not spec.item or forms[place].dtype != spec.dtype or min(forms[place].dims, default=0) < 0
            for spec, place in zip(self.specs, order, strict=True)
        ):
            order = None
        self._last_forms = forms, order
        return order

    # ---------------------------------------------------------------------------------- all inline, all alike

    def _uniform(self, work_items: Sequence[Work]) -> GatherGroup | None:
        """Returns the group of a batch whose tensors are all inline and stack; None if requests must be checked one by
        one.

        Each request of a full batch pays for this, so it is written as simple passes over the batch, one for each
        condition.
        """
        count = len(work_items)
        shares = [work.rows for work in work_items]
        inputs = [work.inputs for work in work_items]
        if self._ragged or 0 in shares or list(map(len, inputs)).count(len(self.specs)) != count:
            return None
        rows, length = sum(shares), -1
        blobs: list[list[bytes]] = []
        shapes: list[tuple[int, ...] | None] = []
        for spec, column in zip(self.specs, zip(*inputs, strict=True), strict=True):
            data: list[Any] = [tensor.data for tensor in column]
            if (
                list(map(type, data)).count(bytes) != count
                or [tensor.name for tensor in column].count(spec.name) != count
                or [tensor.dtype for tensor in column].count(spec.dtype) != count
                or not spec.item
            ):
                return None
            tail = _tail([tensor.shape for tensor in column], shares)
            if tail is None:
                return None
            if spec.pad is not None:
                padded = {length, *[tail[axis - 1] for axis in spec.pad.axes]} - {-1}
                length = max(padded)
                if len(padded) > 1 or spec.pad.rounded(length) != length:
                    return None
            row_bytes = elements(tail) * spec.item
            lengths = list(map(len, data))
            if lengths.count(row_bytes) != rows and lengths != [share * row_bytes for share in shares]:
                return None
            blobs.append(data)
            shapes.append(spec.inner((rows, *tail)))
        length = max(length, 0)
        alike = (length,) * count if self._pads else ()
        return GatherGroup(self, work_items, rows, shapes, blobs, None, alike, length)

    # ---------------------------------------------------------------------------------- one by one

    def _key(self, pieces: list[list[Array]]) -> tuple[tuple[int, ...] | None, ...]:
        """Returns the key that is equal for requests that stack."""
        if self._pads:
            return tuple(_unpadded(p[0].shape, spec) if p else None for p, spec in zip(pieces, self.specs, strict=True))
        if not self._ragged:
            return tuple(p[0].shape[1:] if p else None for p in pieces)
        return tuple(
            (() if spec.flat else p[0].shape[1:]) if p else None for p, spec in zip(pieces, self.specs, strict=True)
        )

    def _group(self, work_items: Sequence[Work], members: list[tuple[int, list[list[Array]]]]) -> GatherGroup:
        chosen = [work_items[position] for position, _ in members]
        rows = sum(work.rows for work in chosen)
        pieces: list[list[Array]] = []
        shapes: list[tuple[int, ...] | None] = []
        lengths: Sequence[int] = ()
        longest = 0
        if self._pads:
            lengths = tuple(self._length(inputs) for _, inputs in members)
            longest = self._pads[0][1].rounded(max(lengths))
        for index, spec in enumerate(self.specs):
            column = [piece for _, inputs in members for piece in inputs[index]]
            pieces.append(column)
            if not column:
                shapes.append(None)
                continue
            if spec.flat:
                pieces[-1] = column = [piece.reshape(-1) for piece in column]
                shapes.append((sum(map(len, column)),))
                continue
            first = column[0].shape if spec.pad is None else spec.pad.to(longest, column[0].shape)
            length = sum(piece.shape[0] for piece in column) if len(column) > 1 else 0
            shapes.append(spec.inner((length, *first[1:]) if length else first))
        return GatherGroup(self, chosen, rows, shapes, None, pieces, lengths, longest)


class InputReader:
    """Reads the inputs of single requests of one model."""

    def __init__(
        self, model: str, specs: Sequence[Spec], mapped: Mapped, text: bool, on_device: bool, stored: bool
    ) -> None:
        self._model = model
        self._specs = specs
        self._mapped = mapped
        self._text = text
        self._on_device = on_device
        self._stored = stored
        self._index = {spec.name: index for index, spec in enumerate(specs)}

    def pieces(self, work: Work) -> list[list[Array]]:
        """Returns the parts of each input of a request, in the order of the configuration, in the caller's shape."""
        inputs: list[list[Array]] = [[] for _ in self._specs]
        for tensor in work.inputs:
            index = self._index.get(tensor.name)
            if index is None:
                allowed = ", ".join(self._index)
                raise InvalidRequest(
                    f"unexpected inference input '{tensor.name}', allowed inputs are: {allowed} "
                    f"for model '{self._model}'"
                )
            if inputs[index]:
                raise InvalidRequest(f"input '{tensor.name}' is given twice for model '{self._model}'")
            if work.rows and (not tensor.shape or tensor.shape[0] != work.rows):
                raise InvalidRequest(
                    f"input '{tensor.name}' batch size does not match other inputs for '{self._model}': "
                    f"shape {list(tensor.shape)}, {work.rows} rows"
                )
            inputs[index] = self._parts(self._specs[index], tensor)
        if [] in inputs:
            self._check_missing(work, inputs)
        return inputs

    def _check_missing(self, work: Work, inputs: list[list[Array]]) -> None:
        missing = [
            spec.name for spec, parts in zip(self._specs, inputs, strict=True) if not parts and not spec.optional
        ]
        if missing:
            raise InvalidRequest(
                f"expected {sum(not spec.optional for spec in self._specs)} inputs but got {len(work.inputs)} inputs "
                f"for model '{self._model}'. Missing required input(s) {missing}"
            )

    def _parts(self, spec: Spec, tensor: Tensor) -> list[Array]:
        shape, data = tensor.shape, tensor.data
        if tensor.dtype != spec.dtype:
            raise InvalidRequest(
                f"inference input '{spec.name}' data-type is '{tensor.dtype}', but model '{self._model}' "
                f"expects '{spec.dtype}'"
            )
        if shape and min(shape) < 0:
            raise InvalidRequest(f"input '{spec.name}' has a negative dim in its shape {list(shape)}")
        if isinstance(data, int):
            raise InvalidRequest(f"input '{spec.name}' refers to a frame, but workers do not receive frames")
        if not spec.item:
            return [self._strings(spec, shape, data)]
        size = elements(shape) * spec.item
        actual = len(data) if isinstance(data, bytes) else sum(part.size for part in data)
        if actual != size:
            raise InvalidRequest(
                f"input byte size mismatch for input '{spec.name}' for model '{self._model}'. "
                f"Expected {size}, got {actual}"
            )
        if isinstance(data, bytes):
            return [np.ndarray(shape, spec.numpy, data)]
        if len(data) == 1:
            return [self._view(data[0], spec.numpy, shape)]
        if not data:
            return [np.ndarray(shape, spec.numpy)]  # zero bytes in no parts
        return self._stacked(spec, shape, data)

    def _stacked(self, spec: Spec, shape: tuple[int, ...], parts: Sequence[Handle]) -> list[Array]:
        """Returns views of parts along axis 0; each must hold whole rows."""
        row_bytes = elements(shape[1:]) * spec.item
        pieces = []
        for part in parts:
            if not shape or not row_bytes or part.size % row_bytes:
                raise InvalidRequest(
                    f"input '{spec.name}' of shape {list(shape)} is in {len(parts)} parts, one of {part.size} bytes, "
                    f"which is not a whole number of rows of {row_bytes} bytes"
                )
            pieces.append(self._view(part, spec.numpy, (part.size // row_bytes, *shape[1:])))
        return pieces

    def _strings(self, spec: Spec, shape: tuple[int, ...], data: bytes | tuple[Handle, ...]) -> Array:
        """Decodes strings from a private copy, because lengths in shared memory may change while they are read."""
        if not isinstance(data, bytes):
            data = b"".join(self._mapped.memory(part).tobytes() for part in data)
        what = f"inference input '{spec.name}' for model '{self._model}'"
        strings = decode_bytes(data, shape, what)
        if self._stored and spec.pad is None:
            return StoredInput(shape, [np.frombuffer(data, np.uint8)])  # type: ignore[return-value]
        if not self._text:
            return strings
        texts = np.empty(strings.size, object)
        try:
            texts[:] = [element.decode() for element in strings.ravel().tolist()]
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{what}: a string element is not UTF-8: {error.reason}") from None
        return texts.reshape(shape)

    def _view(self, part: Handle, dtype: Any, shape: tuple[int, ...]) -> Array:
        """Returns a view, or a copy if the caller's data is not aligned, because engines require alignment."""
        try:
            view = self._mapped.view(part, dtype, shape)
        except OnDevice:
            return self._from_device(part, dtype, shape)
        return view if view.flags.aligned else view.copy()

    def _from_device(self, part: Handle, dtype: Any, shape: tuple[int, ...]) -> Array:
        from shmserve.workers.gpu.shared import memory_of  # without tensors on a GPU it is not imported

        piece = memory_of(self._mapped).piece(part, dtype, shape)
        # A backend that reads GPU tensors in place checks the type of each piece; all others get arrays.
        return piece if self._on_device else piece.host()  # type: ignore[return-value]


def _stored(spec: Spec, pieces: list[Array]) -> StoredInput:
    first = pieces[0]
    parts = first.parts if isinstance(first, StoredInput) else pieces
    shape = (sum(map(len, pieces)), *first.shape[1:]) if len(pieces) > 1 else first.shape
    return StoredInput(spec.inner(shape) if spec.reshaped else shape, parts)


def _tail(shapes: list[tuple[int, ...]], shares: list[int]) -> tuple[int, ...] | None:
    """Returns the common shape after axis 0 if axis 0 is each request's row count; else None."""
    shape = shapes[0]
    if not shape:
        return None
    tail = shape[1:]
    if tail and min(tail) < 0:
        return None
    if shapes.count(shape) == len(shapes) == shares.count(shape[0]):
        return tail
    for other, share in zip(shapes, shares, strict=True):
        if not other or other[0] != share or other[1:] != tail:
            return None
    return tail


def _unpadded(shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
    """Returns the part of a shape that must be equal within a batch."""
    return shape[1:] if spec.pad is None else spec.pad.to(-1, shape)[1:]


def _pad_to(target: Array, piece: Array, value: Any) -> None:
    """Copies the rows of a request into larger ones and fills the rest."""
    for axis, (own, length) in enumerate(zip(piece.shape, target.shape, strict=True)):
        if own < length:
            before = (slice(None),) * axis
            target[(*before, slice(own, None))] = value
            target = target[(*before, slice(own))]
    target[...] = piece


def _on_host(pieces: list[Array]) -> list[Array]:
    return [piece if isinstance(piece, np.ndarray) else piece.host() for piece in pieces]


def _copy(pieces: list[Array], target: Array) -> None:
    if len(pieces) == 1:
        np.copyto(target.reshape(pieces[0].shape), pieces[0])
        return
    if not target.size:
        return
    start = 0
    flat = target.reshape((-1, *pieces[0].shape[1:]))
    for piece in pieces:
        end = start + piece.shape[0]
        flat[start:end] = piece
        start = end
