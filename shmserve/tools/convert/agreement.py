"""Compares the answers of two models to the same requests: how far outputs differ, and how long answers take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from shmserve.errors import ModelFailed

Array = np.ndarray[Any, np.dtype[Any]]
Answer = Mapping[str, Array]
Ask = Callable[[Mapping[str, Any]], Answer]
MIN_RUNS, MAX_RUNS = 5, 200
TIMED_S = 1.0
"""Time that measuring one kind of request takes, unless MIN_RUNS take longer."""


class OutputDifference(NamedTuple):
    """How far an output differs, over all requests. `largest`: the largest difference of two elements; for outputs
    that are not floats, the share of elements that differ. `value`: the largest absolute value of the original.
    `same_class`: the share of rows whose largest element is at the same place; None if rows have no classes."""

    output: str
    largest: float
    value: float
    same_class: float | None

    def within(self, tolerance: float) -> bool:
        """Whether the output is the same, up to this share of its largest value."""
        return self.largest <= tolerance * max(self.value, 1.0)


def differences(originals: Sequence[Answer], others: Sequence[Answer]) -> list[OutputDifference]:
    """Outputs are matched by name, or by position if one has another name. Raises ModelFailed for outputs that cannot
    be compared."""
    names, new = list(originals[0]), list(others[0])
    if len(names) != len(new):
        raise ModelFailed(f"the original has the outputs {', '.join(names)}, and the new model {', '.join(new)}")
    pairs = [(name, name) for name in names] if set(names) == set(new) else list(zip(names, new, strict=True))
    return [_difference(b, [answer[a] for answer in originals], [answer[b] for answer in others]) for a, b in pairs]


def _difference(name: str, originals: Sequence[Array], others: Sequence[Array]) -> OutputDifference:
    largest, value = 0.0, 0.0
    same = rows = 0
    for a, b in zip(originals, others, strict=True):
        if a.size != b.size:
            raise ModelFailed(f"output '{name}' is {list(b.shape)}, and {list(a.shape)} in the original")
        b = b.reshape(a.shape)
        if a.dtype.kind != "f" or b.dtype.kind != "f":
            largest = max(largest, float(np.mean(a != b)) if a.size else 0.0)
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        unequal = ~((a == b) | (np.isnan(a) & np.isnan(b)))
        with np.errstate(invalid="ignore"):
            distance = np.nan_to_num(np.abs(a - b), nan=np.inf, posinf=np.inf)
        largest = max(largest, float(np.max(distance, where=unequal, initial=0.0)))
        value = max(value, float(np.max(np.abs(a), where=np.isfinite(a), initial=0.0)))
        if a.ndim > 1 and a.shape[-1] > 1:
            agreed = np.argmax(a, axis=-1) == np.argmax(b, axis=-1)
            same, rows = same + int(agreed.sum()), rows + agreed.size
    return OutputDifference(name, largest, value, same / rows if rows else None)


def times(asks: Sequence[Ask], requests: Sequence[Mapping[str, Any]]) -> list[float]:
    """The median seconds of each model, which are asked in turn."""
    taken: list[list[float]] = [[] for _ in asks]
    end = time.monotonic() + TIMED_S
    for run in range(MAX_RUNS):
        if run >= MIN_RUNS and time.monotonic() > end:
            break
        for ask, seconds in zip(asks, taken, strict=True):
            start = time.perf_counter()
            ask(requests[run % len(requests)])
            seconds.append(time.perf_counter() - start)
    return [median(seconds) for seconds in taken]
