"""A table of test cases, one row each, which the formatter leaves one line long."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

F = TypeVar("F", bound=Callable[..., Any])


def cases(*rows: Any, ids: Iterable[Any] | Callable[[Any], Any] | None = None) -> Callable[[F], F]:
    """`pytest.mark.parametrize` for the first parameters of a test: as many as a row has values. A row that is not a
    tuple is one value."""
    count = len(rows[0]) if isinstance(rows[0], tuple) else 1

    def parametrized(test: F) -> F:
        names = list(inspect.signature(test).parameters)[:count]
        marked: F = pytest.mark.parametrize(names if count > 1 else names[0], rows, ids=ids)(test)
        return marked

    return parametrized
