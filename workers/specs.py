"""The inputs and outputs of a model as its worker needs them, made once from the configuration.

The rule: a shape has two sides. Callers see `dims` (behind the batch dimension, if there is one), the backend sees
`shape`, which differs where the configuration says `reshape`; the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from shmserve import dtypes
from shmserve.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np

    from shmserve.repo.schema import ModelConfig, ModelInput, ModelOutput


class Spec(Struct, frozen=True):
    """One input or output. `item` is the bytes of an element, 0 for BYTES. `fixed`: no dim but the batch varies."""

    name: str
    dtype: str
    numpy: Any
    item: int
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    batched: bool
    optional: bool
    reshaped: bool
    fixed: bool

    def inner(self, outer: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the backend sees, for the shape that the caller gave."""
        return _between(outer, self.dims, self.shape, self.batched) if self.reshaped else outer

    def outer(self, inner: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the caller sees, for the shape that the backend gave."""
        return _between(inner, self.shape, self.dims, self.batched) if self.reshaped else inner

    def fits(self, inner: Sequence[int]) -> bool:
        """Whether a shape from the backend is what the configuration says, whatever the batch size."""
        rest = inner[1:] if self.batched else inner
        if len(rest) != len(self.shape) or len(inner) - len(rest) != self.batched:
            return False
        return all(want in (-1, have) for want, have in zip(self.shape, rest, strict=True))

    def expected(self, rows: int) -> list[int]:
        """The backend's shape as the configuration has it, for messages."""
        return [rows, *self.shape] if self.batched else list(self.shape)


def inputs_of(config: ModelConfig) -> tuple[Spec, ...]:
    return tuple(_spec(entry, config.max_batch_size > 0, entry.optional) for entry in config.input)


def outputs_of(config: ModelConfig) -> tuple[Spec, ...]:
    return tuple(_spec(entry, config.max_batch_size > 0, False) for entry in config.output)


def _spec(entry: ModelInput | ModelOutput, batched: bool, optional: bool) -> Spec:
    dtype = dtypes.FROM_CONFIG.get(entry.data_type)
    if dtype is None:
        raise InvalidRequest(f"tensor '{entry.name}' has data type {entry.data_type}, which is none")
    dims = tuple(entry.dims)
    shape = dims if entry.reshape is None else tuple(entry.reshape.shape)
    if dims.count(-1) != shape.count(-1):
        raise InvalidRequest(
            f"tensor '{entry.name}' cannot be reshaped from {list(dims)} to {list(shape)}: "
            "both need the same number of variable dims"
        )
    numpy: np.dtype[Any] = dtypes.to_numpy(dtype)
    return Spec(
        name=entry.name,
        dtype=dtype,
        numpy=numpy,
        item=dtypes.ITEM_BYTES[dtype],
        dims=dims,
        shape=shape,
        batched=batched,
        optional=optional,
        reshaped=dims != shape,
        fixed=-1 not in shape,
    )


def _between(given: tuple[int, ...], old: tuple[int, ...], new: tuple[int, ...], batched: bool) -> tuple[int, ...]:
    """Carries the batch dimension and, in order, the variable dims of `given` over to the pattern `new`."""
    rest = given[1:] if batched else given
    if len(rest) != len(old):
        raise InvalidRequest(f"shape {list(given)} does not have the {len(old) + batched} dims of the configuration")
    variable = iter([dim for dim, pattern in zip(rest, old, strict=True) if pattern == -1])
    return given[: int(batched)] + tuple(next(variable) if dim == -1 else dim for dim in new)
