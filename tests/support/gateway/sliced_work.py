"""Runs sliced work without a loop."""

from __future__ import annotations

from typing import TypeVar

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
