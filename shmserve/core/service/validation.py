"""Validates requests against a model. Error texts start with the wording that Triton's users know.

Valid inputs are memoized by (name, dtype, shape), so a common request costs one lookup per input.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from msgspec import Struct

from shmserve.core.policy import ModelPolicy, TensorSpec
from shmserve.dtypes import ITEM_BYTES, elements
from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import FIELD_BYTES, Options, Tensor, TensorForm, Wanted, WantedOutputs, tensors_of

_REMEMBERED = 4096
"""Memoized shapes per model version. Further shapes are checked again each time."""
_FORMS = 256
"""Memoized forms per model version; beyond that, the cache is cleared."""
_MAX_BYTES = 1 << 46
"""Upper bound for tensors: more than a process can map. Larger products of dims are rejected before use."""


class ValidInput(NamedTuple):
    """The result for a valid input. `size` -1: unknown, elements vary in length (BYTES)."""

    bit: int
    rows: int
    size: int


Checked = tuple[int, object, int, bool, int]
"""(rows, signature, inline bytes, has handles, length). Requests with equal signatures may share a batch. Padded
dimensions are not part of the signature; `length` is their size."""


class CheckedRows(NamedTuple):
    """The result for requests of a form with a number of rows. `sizes`: the bytes of each of their tensors."""

    sizes: list[int]
    inline: int
    signature: object
    length: int


class CheckedForm(Struct, eq=False):
    """A form of inputs that a version has accepted, with the results by number of rows."""

    forms: tuple[TensorForm, ...]
    by_rows: dict[int, CheckedRows] = {}


VALUE_BYTES = 9
"""Maximum size of an encoded number."""


def options_bytes(options: Options) -> int:
    """The approximate size of options inside the message. Raises if a parameter's value exceeds the limit of a
    field."""
    total = len(options.id) + VALUE_BYTES
    if type(options.sequence) is str:
        total += len(options.sequence)
    for name, value in options.parameters.items():
        total += len(name) + VALUE_BYTES
        if type(value) is str:
            size = len(value) if value.isascii() else len(value.encode())
            if size > FIELD_BYTES:
                raise InvalidRequest(
                    f"the value of parameter '{name}' has {size} bytes, over the limit of {FIELD_BYTES}; send large "
                    "values as tensors"
                )
            total += size
    return total


class Checker:
    """Validates requests against one model version."""

    def __init__(self, policy: ModelPolicy) -> None:
        self._policy = policy
        self._specs = {spec.name: spec for spec in policy.inputs}
        self._outputs = {spec.name: spec.dtype for spec in policy.outputs}
        self._bits = {spec.name: 1 << index for index, spec in enumerate(policy.inputs)}
        self._min_inputs = sum(not spec.optional for spec in policy.inputs)
        self._required = sum(self._bits[spec.name] for spec in policy.inputs if not spec.optional)
        self._valid_inputs: dict[tuple[str, str, tuple[int, ...]], ValidInput] = {}
        self._forms: dict[tuple[TensorForm, ...], CheckedForm] = {}
        self.varies = any(spec.optional or (-1 in spec.dims and not spec.ragged) for spec in policy.inputs)
        """Requests may differ in shapes or optional inputs."""
        self._ragged = {spec.name for spec in policy.inputs if spec.ragged}
        lead = 1 if policy.max_batch else 0
        padded = policy.padding.inputs if policy.padding is not None else ()
        self._padded = {name: tuple(axis + lead for axis in axes) for name, axes in padded}
        self._alike = not (self.varies or self._padded)
        """Requests differ in their rows only."""

    def check(self, inputs: tuple[Tensor, ...], outputs: WantedOutputs | None) -> Checked:
        mask = inline = 0
        rows = -1
        shared = False
        if outputs is not None:  # before the inputs, as in Triton
            self._check_outputs(outputs)
            shared = any(wanted.place is not None for wanted in outputs)
        if len(inputs) < self._min_inputs:  # before errors of single inputs, as in Triton
            self._missing(inputs)
        known = self._valid_inputs
        for tensor in inputs:
            name = tensor.name
            bit, its_rows, expected = known.get((name, tensor.dtype, tensor.shape)) or self._validate_input(tensor)
            if mask & bit:
                raise InvalidRequest(f"input '{name}' already exists in request to model '{self._policy.name}'")
            mask |= bit
            if rows < 0:
                rows = its_rows
            elif its_rows != rows:
                self._different_rows(rows, its_rows, name)
            data = tensor.data
            if isinstance(data, bytes):
                size = len(data)
                inline += size
            else:
                shared = True
                size = self._size_of_parts(tensor)
            if size != expected:
                self._wrong_size(tensor, size, expected)
        if mask & self._required != self._required:
            self._missing(inputs)
        if inline > FIELD_BYTES:
            raise InvalidRequest(
                f"{inline} bytes of tensors are inside the message, over the limit of {FIELD_BYTES}; "
                "put large ones into shared memory"
            )
        rows = rows if rows > 0 else 0
        if self._alike:
            return rows, None, inline, shared, 0
        if self._padded:
            return rows, self._padded_signature(inputs), inline, shared, self._length(inputs)
        return rows, self._signature(inputs), inline, shared, 0

    def form(self, forms: tuple[TensorForm, ...]) -> CheckedForm:
        """The results for a form, initially empty. Once it has results, the same object is returned each time, so that
        requests can be compared by identity."""
        return self._forms.get(forms) or CheckedForm(forms)

    def check_rows(self, form: CheckedForm, rows: int, data: tuple[bytes, ...]) -> CheckedRows | None:
        """Checks one request of a form and memoizes the result. Raises if it is invalid. None: it has no inputs (and
        thus no rows), or its validity says nothing about other requests of this form and row count, as with strings."""
        forms = form.forms
        if not self._policy.max_batch or not forms or any(not ITEM_BYTES.get(one.dtype) for one in forms):
            return None
        _, signature, inline, _, length = self.check(tensors_of(forms, rows, data), None)
        if forms not in self._forms:  # not in `form`: a client could fill it with forms that are invalid and large
            if len(self._forms) >= _FORMS:
                self._forms.clear()
            self._forms[forms] = form
        checked = form.by_rows[rows] = CheckedRows(list(map(len, data)), inline, signature, length)
        return checked

    def _signature(self, inputs: tuple[Tensor, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What must be equal within a batch, sorted: the names of the inputs and, for inputs that may not be ragged,
        the shapes without the batch dimension."""
        lead = 1 if self._policy.max_batch else 0
        ragged = self._ragged
        return tuple(sorted((t.name, () if t.name in ragged else t.shape[lead:]) for t in inputs))

    def _padded_signature(self, inputs: tuple[Tensor, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        padded = self._padded
        return tuple(
            (name, tuple(-1 if axis in padded.get(name, ()) else dim for axis, dim in enumerate(shape, 1)))
            for name, shape in self._signature(inputs)
        )

    def _length(self, inputs: tuple[Tensor, ...]) -> int:
        """The common length of all padded inputs; 0 if the request has none."""
        length, first = -1, ""
        for tensor in inputs:
            for axis in self._padded.get(tensor.name, ()):
                own = tensor.shape[axis]
                if length == -1:
                    length, first = own, tensor.name
                elif own != length:
                    raise InvalidRequest(
                        f"input '{tensor.name}' of shape {_dims(tensor.shape)} has length {own} on padded axis "
                        f"{axis}, but input '{first}' has {length}; the padded inputs of a request to model "
                        f"'{self._policy.name}' must have one length"
                    )
        return max(length, 0)

    # ------------------------------------------------------------------------------------ one input

    def _validate_input(self, tensor: Tensor) -> ValidInput:
        """The full check of name, type and shape; memoized if valid."""
        policy, name, shape = self._policy, tensor.name, tensor.shape
        spec = self._specs.get(name)
        if spec is None:
            allowed = ", ".join(self._specs) or "none"
            raise InvalidRequest(
                f"unexpected inference input '{name}', allowed inputs are: {allowed} (model '{policy.name}')"
            )
        if tensor.dtype != spec.dtype:
            raise InvalidRequest(
                f"inference input '{name}' data-type is '{tensor.dtype}', but model '{policy.name}' expects "
                f"'{spec.dtype}'"
            )
        self._check_shape(spec, shape)
        rows = shape[0] if policy.max_batch else 0
        if policy.max_batch and rows > policy.max_batch:
            raise InvalidRequest(
                f"inference request batch-size must be <= {policy.max_batch} for '{policy.name}' (input '{name}' has "
                f"{rows} rows; max_batch_size in the model's configuration is the limit)"
            )
        item = ITEM_BYTES[spec.dtype]
        count = elements(shape)
        if count * max(item, 4) > _MAX_BYTES:
            raise InvalidRequest(
                f"input '{name}' of shape {_dims(shape)} has {count} elements, more than any memory can hold"
            )
        result = ValidInput(self._bits[name], rows if policy.max_batch else -1, count * item if item else -1)
        if len(self._valid_inputs) < _REMEMBERED:
            self._valid_inputs[name, tensor.dtype, shape] = result
        return result

    def _check_shape(self, spec: TensorSpec, shape: tuple[int, ...]) -> None:
        policy = self._policy
        if any(dim < 0 for dim in shape):
            raise InvalidRequest(
                f"input '{spec.name}' for model '{policy.name}' has shape {_dims(shape)}: no dimension can be negative"
            )
        expected = (-1, *spec.dims) if policy.max_batch else spec.dims
        if len(shape) == len(expected) and all(e in (-1, d) for e, d in zip(expected, shape, strict=True)):
            return
        note = ""
        if policy.max_batch and len(shape) == len(spec.dims):
            note = (
                " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
                "prepended to each input shape."
            )
        raise InvalidRequest(
            f"unexpected shape for input '{spec.name}' for model '{policy.name}'. Expected {_dims(expected)}, "
            f"got {_dims(shape)}.{note}"
        )

    def _different_rows(self, before: int, rows: int, name: str) -> NoReturn:
        raise InvalidRequest(
            f"input '{name}' batch size does not match other inputs for '{self._policy.name}': {rows} here, "
            f"{before} before"
        )

    def _size_of_parts(self, tensor: Tensor) -> int:
        if isinstance(tensor.data, int):
            raise InvalidRequest(
                f"input '{tensor.name}' refers to frame {tensor.data}, but the message has no such frame; frames are "
                "only for ZeroMQ"
            )
        assert isinstance(tensor.data, tuple)
        return sum(handle.size for handle in tensor.data)

    def _wrong_size(self, tensor: Tensor, size: int, expected: int) -> None:
        """Checks a size that differs from the expected one. Not on the fast path, except for BYTES (expected -1), where
        only the minimum size is known."""
        if expected == -1:
            minimum = 4 * elements(tensor.shape)
            if size >= minimum and not (size and not minimum):
                return
            raise InvalidRequest(
                f"expected {elements(tensor.shape)} string elements for inference input '{tensor.name}' for model "
                f"'{self._policy.name}', which take at least {minimum} bytes, got {size} bytes"
            )
        raise InvalidRequest(
            f"input byte size mismatch for input '{tensor.name}' for model '{self._policy.name}'. "
            f"Expected {expected}, got {size}"
        )

    # ------------------------------------------------------------------------------------ the whole request

    def _missing(self, inputs: tuple[Tensor, ...]) -> NoReturn:
        required = [spec.name for spec in self._policy.inputs if not spec.optional]
        sent = [tensor.name for tensor in inputs]
        missing = [name for name in required if name not in sent]
        total = len(self._policy.inputs)
        count = f"{total} inputs" if len(required) == total else f"number of inputs between {len(required)} and {total}"
        raise InvalidRequest(
            f"expected {count} but got {len(sent)} inputs for model '{self._policy.name}'. Got input(s) "
            f"{_names(sent)}, but missing required input(s) {_names(missing)}. Please provide all required input(s)."
        )

    def _check_outputs(self, outputs: WantedOutputs) -> None:
        seen = set()
        for wanted in outputs:
            if wanted.name not in self._outputs:
                allowed = ", ".join(sorted(self._outputs))
                raise InvalidRequest(
                    f"unexpected inference output '{wanted.name}' for model '{self._policy.name}', "
                    f"its outputs are: {allowed}"
                )
            if wanted.name in seen:
                raise InvalidRequest(f"output '{wanted.name}' already exists in request to model '{self._policy.name}'")
            seen.add(wanted.name)
            if wanted.classes:
                self._check_classes(wanted)

    def _check_classes(self, wanted: Wanted) -> None:
        dtype = self._outputs[wanted.name]
        if dtype in ("BYTES", "BOOL"):
            raise InvalidRequest(
                f"class result not available for output due to unsupported type '{dtype}': output '{wanted.name}' of "
                f"model '{self._policy.name}'; it must be of numbers"
            )
        if wanted.place is not None:
            raise InvalidRequest(
                f"output '{wanted.name}' of model '{self._policy.name}' is requested as {wanted.classes} classes, "
                "which are strings: they cannot be written to shared memory of the caller"
            )


def _dims(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def _names(names: list[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"
