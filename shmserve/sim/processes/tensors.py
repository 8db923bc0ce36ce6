"""Tensors without data: names, types, shapes, sizes and the places of their bytes are real.

Small tensors are inside the message, as in a server; larger ones are places in a segment. Invariant: requests of the
same kind share immutable tensors, so that memory does not grow with the number of requests.
"""

from __future__ import annotations

from random import Random

from shmserve.core.policy import ModelPolicy, TensorSpec
from shmserve.dtypes import ITEM_BYTES, elements
from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import INLINE_BYTES, Handle, Tensor
from shmserve.protocol.worker_messages import Work

LENGTH = 4
"""Encoded size of an empty string: its length field."""
SEGMENT_BYTES = 1 << 48
"""Size of each segment: simulated arenas never run out, and no place is used twice."""


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    return elements(shape) * (ITEM_BYTES[dtype] or LENGTH)


class SimInputs:
    """Inputs that the clients of a load send to a model."""

    def __init__(self, policy: ModelPolicy, distinct: int) -> None:
        self._policy = policy
        self._distinct = distinct if policy.cached else 1
        """Contents matter only for the response cache."""
        self._known: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
        self._newest = 0

    def make(self, rows: int, segment: int, random: Random, length: int = 1) -> tuple[Tensor, ...]:
        """The inputs of a request. `segment`: the client's; `length` replaces each -1 dim."""
        if self._distinct != 1:
            return self._various(rows, random, length)
        result = self._known.get((rows, length, segment))
        if result is None:
            result = self._known[rows, length, segment] = self._build(rows, segment, b"", length)
        return result

    def of_key(self, rows: int, key: int) -> tuple[Tensor, ...]:
        """The inputs of the request with this number; the same number gives the same contents."""
        return self._build(rows, 0, key.to_bytes(8, "little"), 1)

    def _various(self, rows: int, random: Random, length: int) -> tuple[Tensor, ...]:
        self._newest += 1
        which = random.randrange(self._distinct) if self._distinct else self._newest
        return self._build(rows, 0, which.to_bytes(8, "little"), length)

    def _build(self, rows: int, segment: int, content: bytes, length: int) -> tuple[Tensor, ...]:
        tensors = []
        offset = 0
        for spec in self._policy.inputs:
            if spec.optional:
                continue
            dims = tuple(length if dim == -1 else dim for dim in spec.dims)
            shape = (rows, *dims) if self._policy.max_batch else dims
            size = size_of(spec.dtype, shape)
            data: bytes | tuple[Handle, ...] = content[:size].ljust(size, b"\0") if size <= INLINE_BYTES else b""
            if size > INLINE_BYTES:
                if content:
                    raise InvalidRequest(
                        f"input '{spec.name}' of '{self._policy.name}' has {size} bytes; only inputs of up to "
                        f"{INLINE_BYTES} bytes can be told apart for a response cache here"
                    )
                data = (Handle(segment, offset, size),)
                offset += size
            elif spec.dtype == "BYTES":
                data = bytes(size)
            tensors.append(Tensor(spec.name, spec.dtype, shape, data))
            content = b"" if size > INLINE_BYTES else content
        return tuple(tensors)


def length_of(policy: ModelPolicy, work: Work) -> int:
    """The size of the first -1 dim of the request's inputs, 1 if there is none."""
    specs = {spec.name: spec.dims for spec in policy.inputs}
    lead = 1 if policy.max_batch else 0
    for tensor in work.inputs:
        if -1 in specs[tensor.name]:
            return tensor.shape[lead + specs[tensor.name].index(-1)]
    return 1


class SimOutputs:
    """Outputs of one worker process, placed in its own arenas, one for each audience."""

    def __init__(self, policy: ModelPolicy, first_segment: int, free_dims: tuple[int, int], true_share: float) -> None:
        self._policy = policy
        self._specs = {spec.name: spec for spec in policy.outputs}
        self._first = first_segment
        self._free_dims = free_dims
        self._true_share = true_share
        self._drawn = free_dims[0] != free_dims[1]
        self._known: dict[int, tuple[Tensor, ...]] = {}
        self._offset = 0
        self.arenas: dict[str, int] = {}
        self.new: list[tuple[int, str]] = []
        """Segments not yet announced to the broker: number and audience."""
        self.out: set[tuple[int, int]] = set()
        """Places that have not been returned."""

    def make(self, work: Work, random: Random) -> tuple[Tensor, ...]:
        if work.outputs is None and work.inline and not self._drawn:
            result = self._known.get(work.rows)
            if result is not None:
                return result
        specs = self._policy.outputs
        if work.outputs is not None:
            specs = tuple(self._specs[wanted.name] for wanted in work.outputs)
        tensors = tuple(self._tensor(spec, work, random) for spec in specs)
        alike = not self._drawn and not any(spec.dtype == "BOOL" for spec in specs)
        if work.outputs is None and alike and all(isinstance(tensor.data, bytes) for tensor in tensors) and work.inline:
            self._known[work.rows] = tensors
        return tensors

    def _tensor(self, spec: TensorSpec, work: Work, random: Random) -> Tensor:
        free_dim = random.randint(*self._free_dims) if self._drawn else self._free_dims[0]
        dims = tuple(dim if dim >= 0 else free_dim for dim in spec.dims)
        shape = (max(work.rows, 1), *dims) if self._policy.max_batch else dims
        size = size_of(spec.dtype, shape)
        if size == 1 and spec.dtype == "BOOL":  # possibly a condition, which is always inside the message
            return Tensor(spec.name, spec.dtype, shape, b"\1" if random.random() < self._true_share else b"\0")
        if size == 0 or (size <= INLINE_BYTES and work.inline):
            return Tensor(spec.name, spec.dtype, shape, bytes(size))
        return Tensor(spec.name, spec.dtype, shape, (self._place(work.audience, size),))

    def _place(self, audience: str, size: int) -> Handle:
        segment = self.arenas.get(audience)
        if segment is None:
            segment = self.arenas[audience] = self._first + len(self.arenas)
            self.new.append((segment, audience))
        handle = Handle(segment, self._offset, size)
        self._offset += size
        self.out.add((segment, handle.offset))
        return handle
