"""Runs sliced work without a loop."""

from __future__ import annotations

from typing import Any, TypeVar

from shmserve.gateway.limits.turns import SlicedWork

T = TypeVar("T")


def finished(work: SlicedWork[T]) -> T:
    """Runs all slices and returns the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def slices_of(work: SlicedWork[Any]) -> int:
    """Runs all slices and returns their number, without the last."""
    count = 0
    try:
        while True:
            next(work)
            count += 1
    except StopIteration:
        return count
