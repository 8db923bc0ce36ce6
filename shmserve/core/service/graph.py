"""The precomputed graph of an ensemble, and operations on tensors between its steps.

Invariant: everything here is stateless or a cache; the state of a request is in its Run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from struct import unpack_from
from typing import NamedTuple

from msgspec import Struct

from shmserve.core.policy import ModelPolicy, StepPolicy, TensorSpec
from shmserve.dtypes import ITEM_BYTES
from shmserve.errors import InvalidRequest, Unavailable, Unsupported
from shmserve.protocol.messages import INLINE_BYTES, Handle, Tensor, Wanted

ROWS = 4096
"""Maximum number of requests that a mapped step sends for one tensor, and of parts in its result."""

PARTS = 8192
"""Maximum number of handles in one message, for all tensors of a request or response."""
HANDLE_BYTES = 22
"""Maximum size of a handle in a message."""

_LENGTH_BYTES = 4
"""Size of the length before each string."""
_CACHED = 64
"""Maximum number of combinations of outputs, and of decoupled steps, for which results are cached."""


class StepInput(NamedTuple):
    """`own`: its name in the model; `name`: its name in the ensemble. `dims` None: the model has no such input."""

    own: str
    name: str
    dims: tuple[int, ...] | None
    required: bool


class FittedInputs(NamedTuple):
    """The inputs of a step that its model accepts: their shapes for the model, and the results of its check."""

    shapes: list[tuple[int, ...]]
    sizes: list[int]
    rows: int
    signature: object
    length: int


class StepPlan(Struct, eq=False):
    """The part of a step's request that is the same in each run with the same outputs and models."""

    policy: ModelPolicy
    """The model's policy."""
    inputs: tuple[StepInput, ...]
    outputs: tuple[Wanted, ...]
    """Requested from the model, unless the caller wants some of them placed in its memory or as classes."""
    final: bool
    """Some of its outputs are for the caller."""
    fitted: dict[tuple[tuple[str, str, tuple[int, ...]], ...], FittedInputs] = {}
    """By (name, dtype, shape) of each input."""


class EnsembleGraph:
    """Which steps produce and read which tensor. Consistency was checked when the ensemble was loaded."""

    def __init__(self, policy: ModelPolicy) -> None:
        assert policy.steps is not None
        self.steps: tuple[StepPolicy, ...] = policy.steps
        self.batches = policy.max_batch > 0
        self.specs = {spec.name: spec for spec in policy.outputs}
        self.outputs = tuple(self.specs)
        self.maker = {name: index for index, step in enumerate(self.steps) for _, name in step.outputs}
        self.waits = tuple(_waits(step) for step in self.steps)
        """For each step: the tensors that must exist, or be known never to exist, before it starts."""
        self.readers: dict[str, list[int]] = {}
        for index, names in enumerate(self.waits):
            for name in names:
                self.readers.setdefault(name, []).append(index)
        self.reshapes = any(spec.reshape is not None for spec in policy.inputs)
        """Some inputs have a different shape in the steps."""
        self.plans: dict[tuple[object, ...], dict[int, StepPlan]] = {}
        """See `owners.run.plans_of`."""
        self._needed: dict[tuple[str, ...], frozenset[int]] = {}
        self._levels: dict[tuple[frozenset[int], frozenset[int]], Levels] = {}

    def needed(self, wanted: tuple[str, ...]) -> frozenset[int]:
        """The steps required for these outputs of the ensemble."""
        needed = self._needed.get(wanted)
        if needed is None:
            steps: set[int] = set()
            todo = [self.maker[name] for name in wanted]
            while todo:
                index = todo.pop()
                if index not in steps:
                    steps.add(index)
                    todo += [self.maker[name] for name in self.waits[index] if name in self.maker]
            needed = frozenset(steps)
            if len(self._needed) < _CACHED:
                self._needed[wanted] = needed
        return needed

    def levels(self, needed: frozenset[int], many: frozenset[int]) -> Levels:
        """The levels of these steps, `many` of which have decoupled models."""
        levels = self._levels.get((needed, many))
        if levels is None:
            levels = Levels(self, needed, many)
            if len(self._levels) < _CACHED:
                self._levels[needed, many] = levels
        return levels


class Levels:
    """Levels of steps by how often they run. A step with a decoupled model (`many`) is the source of the next level,
    and each of its responses starts one iteration of all steps of that level. A tensor belongs to the level that
    produces it."""

    def __init__(self, graph: EnsembleGraph, needed: frozenset[int], many: frozenset[int]) -> None:
        level_of: dict[int, int] = {}
        self.tensors: dict[str, int] = {}
        """Tensor -> level. Tensors that no step produces are left out; they are at level 0."""
        waiting = sorted(needed)
        while waiting:
            later = []
            for index in waiting:
                makers = [graph.maker[name] for name in graph.waits[index] if name in graph.maker]
                if any(maker not in level_of for maker in makers):
                    later.append(index)
                    continue
                level_of[index] = max((level_of[maker] + (maker in many) for maker in makers), default=0)
                for _, name in graph.steps[index].outputs:
                    self.tensors[name] = level_of[index] + (index in many)
            assert len(later) < len(waiting), "cyclic steps"
            waiting = later
        count = 1 + max([0, *self.tensors.values()])
        self.steps = tuple(
            tuple(index for index in sorted(needed) if level_of[index] == level) for level in range(count)
        )
        self.sources: tuple[int, ...] = ()
        """The decoupled step of each level except the last."""
        for level in range(count):
            sources = [index for index in self.steps[level] if index in many]
            if len(sources) > 1:
                names = " and ".join(f"'{graph.steps[index].model}'" for index in sources)
                raise Unavailable(f"{names} are both decoupled, and the requested outputs depend on both")
            self.sources += tuple(sources)
        self.waits = {index: sum(name in graph.maker for name in graph.waits[index]) for index in needed}
        """For each step: how many of the tensors that it waits for are produced by other steps."""
        self.pending = {index: self.waits[index] for index in self.steps[0]}
        """`waits` of level 0."""
        self.first = tuple(index for index, count in self.pending.items() if not count)
        """The steps of level 0 that wait for no other step."""
        self.readers = [
            {
                name: tuple(index for index in readers if level_of.get(index) == level)
                for name, readers in graph.readers.items()
            }
            for level in range(count)
        ]
        """For each level: tensor -> the steps of this level that read it."""
        self.reads = {name: self._reads(name, level_of, readers) for name, readers in graph.readers.items()}

    def _reads(self, name: str, level_of: dict[int, int], readers: list[int]) -> int:
        """The number of reads after which the tensor can be released. All levels below count as one."""
        level = self.tensors.get(name, 0)
        levels = [level_of[index] for index in readers if index in level_of]
        return levels.count(level) + (max(levels, default=0) > level)


def _waits(step: StepPolicy) -> tuple[str, ...]:
    """The tensors that a step waits for, without duplicates and in a deterministic order."""
    names = [name for _, name in step.inputs]
    return tuple(dict.fromkeys([*names, step.condition] if step.condition else names))


# ---------------------------------------------------------------------------------------------- shapes


def fit(shape: tuple[int, ...], dims: Sequence[int], batches: bool) -> tuple[int, ...]:
    """Adapts the shape to a model with or without batching: adds or removes a leading 1."""
    if batches:
        return (1, *shape) if len(shape) == len(dims) else shape
    return shape[1:] if len(shape) == len(dims) + 1 and shape[0] == 1 else shape


def reshape(
    shape: tuple[int, ...], dims: Sequence[int], reshaped: Sequence[int] | None, batches: bool
) -> tuple[int, ...]:
    """Reshapes from `dims` to `reshaped`, whose nth -1 takes the size of the nth -1 of `dims`. Shapes that do not match
    `dims` are returned unchanged."""
    if reshaped is None:
        return shape
    lead, own = (shape[:1], shape[1:]) if batches else ((), shape)
    if len(own) != len(dims) or any(dim not in (-1, size) for dim, size in zip(dims, own, strict=True)):
        return shape
    free = iter([size for dim, size in zip(dims, own, strict=True) if dim == -1])
    return (*lead, *(next(free) if dim == -1 else dim for dim in reshaped))


def empty(name: str, spec: TensorSpec) -> Tensor:
    """The output for zero rows."""
    dims = tuple(max(dim, 0) for dim in spec.dims)
    return Tensor(name, spec.dtype, (0, *dims), b"")


def is_true(tensor: Tensor) -> bool:
    """The value of a condition, which must be a single BOOL."""
    if tensor.dtype == "BOOL" and not isinstance(tensor.data, bytes):
        raise InvalidRequest(
            f"condition '{tensor.name}' is in shared memory, which the server does not read; send it inside the message"
        )
    if tensor.dtype != "BOOL" or prod(tensor.shape) != 1 or not isinstance(tensor.data, bytes):
        raise InvalidRequest(
            f"condition '{tensor.name}' must be a single BOOL, but is {tensor.dtype} of shape {list(tensor.shape)}"
        )
    return tensor.data != b"\0"


# ---------------------------------------------------------------------------------------------- rows


def rows_of(tensor: Tensor) -> tuple[int, Iterator[Tensor]]:
    """The rows along axis 0, each with a leading 1. Generated lazily, because there may be thousands."""
    if tensor.shape[:1] == (0,):
        return 0, iter(())
    if not tensor.shape:
        raise InvalidRequest(f"'{tensor.name}' is mapped, but has no dimensions")
    count, rest = tensor.shape[0], tensor.shape[1:]
    if count > ROWS:
        raise InvalidRequest(f"'{tensor.name}' has {count} rows; the limit of a mapped step is {ROWS}")
    if count == 1:
        return 1, iter((tensor,))
    item = ITEM_BYTES[tensor.dtype]
    shape = (1, *rest)
    if isinstance(tensor.data, bytes):
        data = tensor.data
        ends = [prod(rest) * item * row for row in range(count + 1)] if item else _string_ends(data, count, prod(rest))
        return count, (Tensor(tensor.name, tensor.dtype, shape, data[start:end]) for start, end in pairwise(ends))
    assert isinstance(tensor.data, tuple)
    if not item:
        raise Unsupported(
            f"'{tensor.name}' is mapped, but has {sum(part.size for part in tensor.data)} bytes of strings in shared "
            f"memory; the limit for mapped strings is {INLINE_BYTES} bytes"
        )
    size = prod(rest) * item
    actual = sum(part.size for part in tensor.data)
    if actual != size * count:
        raise InvalidRequest(f"'{tensor.name}' of shape {list(tensor.shape)} takes {size * count} bytes, not {actual}")
    pieces = _cuts(tensor.data, size, count)
    return count, (Tensor(tensor.name, tensor.dtype, shape, piece) for piece in pieces)


def _string_ends(data: bytes, rows: int, each: int) -> list[int]:
    """The end of each row of strings, preceded by 0."""
    ends, at = [0], 0
    for _ in range(rows):
        for _ in range(each):
            if at + _LENGTH_BYTES > len(data):
                raise InvalidRequest("the mapped strings end inside an element")
            at += _LENGTH_BYTES + unpack_from("<I", data, at)[0]
        ends.append(at)
    if at != len(data):
        raise InvalidRequest(f"the mapped strings take {at} bytes, not {len(data)}")
    return ends


def _cuts(parts: tuple[Handle, ...], size: int, count: int) -> Iterator[tuple[Handle, ...] | bytes]:
    """Cuts the concatenation of these parts into pieces of `size` bytes."""
    at = start = 0
    for _ in range(count):
        remaining = size
        piece = []
        while remaining:
            part = parts[at]
            taken = min(part.size - start, remaining)
            if taken:
                piece.append(Handle(part.segment, part.offset + start, taken))
            remaining -= taken
            start += taken
            if start == part.size:
                at, start = at + 1, 0
        yield tuple(piece) or b""


def together(tensors: Sequence[Tensor], batches: bool) -> Tensor:
    """Concatenates rows along axis 0; `batches`: each has a leading dimension."""
    first = tensors[0]
    shapes = [tensor.shape if batches else (1, *tensor.shape) for tensor in tensors]
    for row, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        if shape[1:] != shapes[0][1:]:
            raise InvalidRequest(
                f"row {row} has shape {list(tensor.shape)} for '{first.name}', and row 0 {list(first.shape)}: they "
                "cannot be combined"
            )
        if tensor.dtype != first.dtype:
            raise InvalidRequest(
                f"row {row} is {tensor.dtype} for '{first.name}', and row 0 {first.dtype}: they cannot be combined"
            )
    shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    if len(tensors) == 1:
        return Tensor(first.name, first.dtype, shape, first.data)
    inside = [tensor.data for tensor in tensors if isinstance(tensor.data, bytes)]
    size = sum(map(len, inside))
    parts = tuple(handles_of(tensors))
    if size and (parts or size > INLINE_BYTES):
        raise InvalidRequest(f"rows of '{first.name}' are inside messages, although shared memory was requested")
    return Tensor(first.name, first.dtype, shape, parts or b"".join(inside))


def check_parts(tensors: Sequence[Tensor]) -> list[int]:
    """The segments of the tensors, one for each part. Raises if there are more parts than fit in a message."""
    segments = [handle.segment for handle in handles_of(tensors)]
    if len(segments) > PARTS:
        names = ", ".join(f"'{tensor.name}'" for tensor in tensors)
        raise Unsupported(
            f"{names} consist of {len(segments)} parts, one per row of a mapped step; the limit is {PARTS}"
        )
    return segments


def handles_of(tensors: Iterable[Tensor]) -> list[Handle]:
    return [handle for tensor in tensors if isinstance(tensor.data, tuple) for handle in tensor.data]
