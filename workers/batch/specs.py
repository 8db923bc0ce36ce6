"""The inputs and outputs of a model, built once from the configuration.

A tensor has two shapes. Callers see `dims` (after the batch dimension, if there is one), the backend sees `shape`,
which differs if the configuration has `reshape`; the bytes are the same.

A model may get inputs that callers do not provide, in this order: the controls of its sequences, their states, and
inputs computed from a ragged batch. It may produce outputs that callers do not get: states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, structs

from shmserve import dtypes
from shmserve.errors import InvalidRequest
from shmserve.repo.rules.padding import Padding, number_of, padding_of

if TYPE_CHECKING:
    from shmserve.repo.config.schema import (
        BatchInput,
        ModelConfig,
        ModelInput,
        ModelOutput,
        ModelSequenceBatchingControl,
        ModelSequenceBatchingControlInput,
    )


class Pad(Struct, frozen=True):
    """How an input is padded: along `axes`, where axis 0 is the batch, with `value`, to a multiple of `multiple`."""

    axes: tuple[int, ...]
    value: Any
    multiple: int

    def rounded(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple

    def to(self, length: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the padded shape."""
        return tuple(length if axis in self.axes else dim for axis, dim in enumerate(shape))


class Spec(Struct, frozen=True):
    """One input or output. `item` is the bytes of an element, 0 for BYTES. `fixed`: only the batch dimension varies.
    `flat`: the backend sees the elements of all requests one after another, in one dimension for an input. `pad`:
    set for padded inputs. `cut`: the axes, with axis 0 for the batch, along which an output of a padded batch is cut
    back."""

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
    flat: bool = False
    pad: Pad | None = None
    cut: tuple[int, ...] = ()

    def inner(self, outer: tuple[int, ...]) -> tuple[int, ...]:
        """Converts the caller's shape to the backend's."""
        return _reshaped(outer, self.dims, self.shape, self.batched) if self.reshaped else outer

    def outer(self, inner: tuple[int, ...]) -> tuple[int, ...]:
        """Converts the backend's shape to the caller's."""
        return _reshaped(inner, self.shape, self.dims, self.batched) if self.reshaped else inner

    def fits(self, inner: Sequence[int]) -> bool:
        """Whether a shape from the backend matches the configuration, at any batch size."""
        rest = inner[1:] if self.batched else inner
        if len(inner) - len(rest) != self.batched:
            return False
        return rest == self.shape or matches(rest, self.shape)

    def hollow(self, shape: tuple[int, ...]) -> Any:
        """Returns an array without memory of its own for an output on a device: only its shape and size are used."""
        return np.broadcast_to(np.zeros((), self.numpy), shape)

    def expected(self, rows: int) -> list[int]:
        """The backend's shape in the configuration, for messages."""
        return [rows, *self.shape] if self.batched else list(self.shape)


def matches(dims: Sequence[int], pattern: Sequence[int]) -> bool:
    """Whether dims are those of a configuration or a model file, where -1 allows any size."""
    return len(dims) == len(pattern) and all(want in (-1, dim) for want, dim in zip(pattern, dims, strict=True))


def inputs_of(config: ModelConfig) -> tuple[Spec, ...]:
    """The inputs that callers provide."""
    batched = config.max_batch_size > 0
    specs = tuple(_spec(entry, batched, entry.optional, entry.allow_ragged_batch) for entry in config.input)
    padding = padding_of(config)
    return specs if padding is None else _with_pads(specs, padding)


def _with_pads(specs: tuple[Spec, ...], padding: Padding) -> tuple[Spec, ...]:
    padded = {entry.name: entry for entry in padding.inputs}
    padded_specs = []
    for spec in specs:
        entry = padded.get(spec.name)
        if entry is not None:
            pad = Pad(tuple(axis + 1 for axis in entry.axes), _pad_value(entry.value, spec), padding.multiple)
            spec = structs.replace(spec, pad=pad)
        padded_specs.append(spec)
    return tuple(padded_specs)


def _pad_value(text: str, spec: Spec) -> Any:
    if spec.dtype == "BYTES":
        return text.encode()
    value = number_of(text, f"TYPE_{spec.dtype}")
    if spec.dtype == "BF16" and spec.numpy == np.uint16:  # the upper half of an FP32
        return np.array(value, np.float32).view(np.uint32) >> 16
    return value


def outputs_of(config: ModelConfig) -> tuple[Spec, ...]:
    """The outputs that callers get."""
    cut = {name for entry in config.batch_output for name in entry.target_name}
    specs = tuple(_spec(entry, config.max_batch_size > 0, False, entry.name in cut) for entry in config.output)
    padding = padding_of(config)
    if padding is None:
        return specs
    axes = {entry.name: tuple(axis + 1 for axis in entry.axes) for entry in padding.outputs}
    return tuple(structs.replace(spec, cut=axes.get(spec.name, ())) for spec in specs)


def controls_of(config: ModelConfig) -> tuple[Spec, ...]:
    """The control inputs, which describe the sequences of the rows to the model."""
    if config.sequence_batching is None:
        return ()
    return tuple(
        _plain_spec(entry.name, _control_type(control_of(entry)), (1,), config.max_batch_size > 0)
        for entry in config.sequence_batching.control_input
    )


def states_of(config: ModelConfig) -> tuple[Spec, ...]:
    states = config.sequence_batching.state if config.sequence_batching is not None else ()
    return tuple(_plain_spec(s.input_name, s.data_type, tuple(s.dims), config.max_batch_size > 0) for s in states)


def new_states_of(config: ModelConfig) -> tuple[Spec, ...]:
    states = config.sequence_batching.state if config.sequence_batching is not None else ()
    return tuple(_plain_spec(s.output_name, s.data_type, tuple(s.dims), config.max_batch_size > 0) for s in states)


def batch_inputs_of(config: ModelConfig) -> tuple[Spec, ...]:
    """The inputs computed from the shapes in a batch. Their first dim counts requests or items; it is never batched."""
    ranks = {entry.name: len(entry.dims if entry.reshape is None else entry.reshape.shape) for entry in config.input}
    return tuple(
        _plain_spec(name, entry.data_type, _batch_input_dims(entry, ranks), False)
        for entry in config.batch_input
        for name in entry.target_name
    )


def _batch_input_dims(entry: BatchInput, ranks: dict[str, int]) -> tuple[int, ...]:
    if entry.kind != "BATCH_ITEM_SHAPE":
        return (-1,)
    return (-1, ranks.get(entry.source_input[0], -1) if entry.source_input else -1)


def request_inputs_of(config: ModelConfig) -> tuple[Spec, ...]:
    """The inputs of a backend that runs requests one by one."""
    return (*inputs_of(config), *controls_of(config), *states_of(config))


def model_inputs_of(config: ModelConfig) -> tuple[Spec, ...]:
    """The inputs of a backend that runs a whole batch."""
    return (*request_inputs_of(config), *batch_inputs_of(config))


def model_outputs_of(config: ModelConfig) -> tuple[Spec, ...]:
    """The outputs of a backend: those of callers, and states that are not among them."""
    outputs = outputs_of(config)
    names = {spec.name for spec in outputs}
    return (*outputs, *(spec for spec in new_states_of(config) if spec.name not in names))


def control_of(entry: ModelSequenceBatchingControlInput) -> ModelSequenceBatchingControl:
    if len(entry.control) != 1:
        raise InvalidRequest(
            f"control tensor '{entry.name}' of the sequences has {len(entry.control)} controls: a tensor can carry one"
        )
    return entry.control[0]


def _control_type(control: ModelSequenceBatchingControl) -> str:
    if control.int32_false_true:
        return "TYPE_INT32"
    if control.fp32_false_true:
        return "TYPE_FP32"
    return "TYPE_BOOL" if control.bool_false_true else control.data_type


def _spec(entry: ModelInput | ModelOutput, batched: bool, optional: bool, flat: bool) -> Spec:
    dims = tuple(entry.dims)
    shape = dims if entry.reshape is None else tuple(entry.reshape.shape)
    if dims.count(-1) != shape.count(-1):
        raise InvalidRequest(
            f"tensor '{entry.name}' cannot be reshaped from {list(dims)} to {list(shape)}: "
            "both need the same number of variable dims"
        )
    plain = _plain_spec(entry.name, entry.data_type, dims, batched)
    fixed = -1 not in shape and not flat
    return structs.replace(plain, shape=shape, optional=optional, reshaped=dims != shape, fixed=fixed, flat=flat)


def _plain_spec(name: str, data_type: str, dims: tuple[int, ...], batched: bool) -> Spec:
    dtype = dtypes.FROM_CONFIG.get(data_type)
    if dtype is None:
        raise InvalidRequest(f"tensor '{name}' has the data type {data_type}, which does not exist")
    return Spec(
        name=name,
        dtype=dtype,
        numpy=dtypes.to_numpy(dtype),
        item=dtypes.ITEM_BYTES[dtype],
        dims=dims,
        shape=dims,
        batched=batched,
        optional=False,
        reshaped=False,
        fixed=-1 not in dims,
    )


def _reshaped(actual: tuple[int, ...], old: tuple[int, ...], new: tuple[int, ...], batched: bool) -> tuple[int, ...]:
    """Applies the batch dimension and, in order, the variable dims of `actual` to the pattern `new`."""
    rest = actual[1:] if batched else actual
    if len(rest) != len(old):
        raise InvalidRequest(f"shape {list(actual)} does not have the {len(old) + batched} dims of the configuration")
    variable = iter([dim for dim, pattern in zip(rest, old, strict=True) if pattern == -1])
    return actual[: int(batched)] + tuple(next(variable) if dim == -1 else dim for dim in new)
