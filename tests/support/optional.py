"""Packages that not every environment has."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class OnDemand:
    """A module that is imported when a name of it is used for the first time."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks all that a test module contains for `__test__`, `_mock_name` and others
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def optional(name: str) -> Any:
    """`pytest.importorskip` for a package that takes long to import: each process of `make test` collects all files,
    but runs only some of them."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return OnDemand(name)
