"""Classification: the largest values of an output, for requests that ask for classes instead of the tensor.

Each is written "value:index", or "value:index:label" if the class has a label: floats with six decimals, integers as
they are. Invariant: the order is total, so that equal tensors give equal results on every machine: larger values first,
equal ones by index, NaN after all numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from shmserve.dtypes import elements, from_bfloat16
from shmserve.errors import InvalidRequest
from shmserve.repo.files.companions import read_labels

if TYPE_CHECKING:
    from shmserve.errors import ServeError
    from shmserve.protocol.messages import Wanted
    from shmserve.protocol.worker_messages import LabelFile
    from shmserve.workers.batch.specs import Spec

Array = np.ndarray[Any, np.dtype[Any]]

LIMIT = 1_000_000
"""Maximum number of elements of an output to classify. Each class becomes a string."""
_NOT_NUMBERS = ("BYTES", "BOOL")


class Top(Struct, frozen=True):
    """A request for the `count` largest values of each batch item. `labels`: those of an ensemble, if given."""

    count: int
    labels: tuple[str, ...] | None = None


def top(model: str, spec: Spec, wanted: Wanted, labels: Sequence[LabelFile]) -> Top:
    """Returns the Top for an output. `labels`: label files of an ensemble. Raises if it cannot be classified."""
    if (error := refusal(model, spec, wanted)) is not None:
        raise error
    for file in labels:
        if file.output == wanted.name:
            return Top(wanted.classes, _labels_in(file.folder, file.file))
    return Top(wanted.classes)


@lru_cache(maxsize=64)
def _labels_in(folder: str, file: str) -> tuple[str, ...]:
    """Reads the labels of an ensemble. Cached, because the files of a served version do not change."""
    return read_labels(Path(folder), file)


def refusal(model: str, spec: Spec, wanted: Wanted) -> ServeError | None:
    """Returns the reason why an output cannot be classified, or None."""
    if spec.dtype in _NOT_NUMBERS:
        return InvalidRequest(
            f"class result not available for output due to unsupported type '{spec.dtype}': output '{spec.name}' of "
            f"model '{model}' must be of numbers"
        )
    if wanted.place is not None:
        return InvalidRequest(
            f"output '{spec.name}' of model '{model}' is wanted as {wanted.classes} classes, which are strings: they "
            "cannot be written into shared memory of the caller"
        )
    return None


def classify(spec: Spec, array: Array, count: int, labels: Sequence[str]) -> Array:
    """Returns the classes of one request's share of an output: [rows, classes], or [classes] without a
    batch dimension."""
    rows = array.shape[0] if spec.batched else 1
    items = array.reshape(rows, elements(array.shape[int(spec.batched) :]))
    if items.size > LIMIT:
        raise InvalidRequest(
            f"classification output tensor too large: output '{spec.name}' has {items.size} elements; the "
            f"limit is {LIMIT}"
        )
    kept = min(count, items.shape[1])
    classes: list[bytes] = []
    for values in _numbers(items, spec.dtype):
        classes += _texts(values, largest(values, kept), labels)
    texts = np.empty(rows * kept, object)
    texts[:] = classes
    return texts.reshape((rows, kept) if spec.batched else (kept,))


def largest(values: Array, count: int) -> Array:
    """Returns the indices of the `count` largest of a row of values, in order."""
    if values.dtype.kind == "f":
        nan = np.isnan(values)
        if nan.any():
            numbers = np.flatnonzero(~nan)
            first = numbers[largest(values[numbers], min(count, len(numbers)))]
            return np.concatenate([first, np.flatnonzero(nan)[: count - len(first)]])
    chosen = None
    if 0 < count < len(values):
        smallest = np.partition(values, len(values) - count)[len(values) - count]
        chosen = np.flatnonzero(values >= smallest)
        values = values[chosen]
    # Stable sort of the reversed row, reversed again: descending, with equal values by index.
    order = (len(values) - 1 - np.argsort(values[::-1], kind="stable"))[::-1][:count]
    return order if chosen is None else chosen[order]


def _numbers(items: Array, dtype: str) -> Array:
    """Returns the values in a type that sorts fast and can be printed."""
    if dtype not in ("BF16", "FP16"):
        return items
    return from_bfloat16(items) if dtype == "BF16" else items.astype(np.float32)


def _texts(values: Array, indices: Array, labels: Sequence[str]) -> list[bytes]:
    pattern = "%f:%d" if values.dtype.kind == "f" else "%d:%d"
    known = len(labels)
    texts = []
    for value, index in zip(values[indices].tolist(), indices.tolist(), strict=True):
        text = pattern % (value, index)
        if index < known and labels[index]:
            text = f"{text}:{labels[index]}"
        texts.append(text.encode())
    return texts
