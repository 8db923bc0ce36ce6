"""Reads and checks the inputs of one request.

Invariant: everything that a request specifies is checked before use, and an invalid request fails alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.dtypes import elements
from shmserve.errors import InvalidRequest
from shmserve.shm.mapped import OnDevice
from shmserve.shm.strings import decode_bytes

if TYPE_CHECKING:
    from shmserve.protocol.messages import Handle, Tensor
    from shmserve.protocol.worker_messages import Work
    from shmserve.shm.mapped import Mapped
    from shmserve.workers.batch.specs import Spec

Array = np.ndarray[Any, np.dtype[Any]]


class InputReader:
    """Reads the requests of one model."""

    def __init__(self, model: str, specs: Sequence[Spec], mapped: Mapped, text: bool, on_device: bool) -> None:
        self._model = model
        self._specs = specs
        self._mapped = mapped
        self._text = text
        self._on_device = on_device
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
        missing = [
            spec.name for spec, parts in zip(self._specs, inputs, strict=True) if not parts and not spec.optional
        ]
        if missing:
            raise InvalidRequest(
                f"expected {sum(not spec.optional for spec in self._specs)} inputs but got {len(work.inputs)} inputs "
                f"for model '{self._model}'. Missing required input(s) {missing}"
            )
        return inputs

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
        given = len(data) if isinstance(data, bytes) else sum(part.size for part in data)
        if given != size:
            raise InvalidRequest(
                f"input byte size mismatch for input '{spec.name}' for model '{self._model}'. "
                f"Expected {size}, got {given}"
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
