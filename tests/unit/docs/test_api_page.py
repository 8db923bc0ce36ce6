"""The page on the Python API names everything public, and everything that it names has a docstring."""

from __future__ import annotations

import importlib
import inspect
import re

import shmserve
from tests.support.docs import pages

NAMES = re.findall(r"^::: ([\w.]+)$", pages.page("api"), re.MULTILINE)


def test_the_page_has_all_public_names() -> None:
    public = {f"shmserve.{name}" for name in shmserve.__all__ if name != "__version__"}
    assert {*NAMES} - {"shmserve.testing.Server"} == public
    assert len(NAMES) == len({*NAMES})


def test_everything_public_has_a_docstring() -> None:
    for name in NAMES:
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
        assert found.__doc__, name
        if name in ("shmserve.Client", "shmserve.AsyncClient", "shmserve.testing.Server"):
            methods = {key: value for key, value in inspect.getmembers(found, inspect.isfunction) if key[0] != "_"}
            assert methods
            assert [key for key, value in methods.items() if not value.__doc__] == []
