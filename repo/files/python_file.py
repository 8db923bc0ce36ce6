"""Imports a Python file of the user: a model, a pipeline, a backend or a repository agent."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

from shmserve.errors import InvalidRequest


def import_file(
    path: Path, name: str, places: Iterable[Path], what: str, loader: SourceFileLoader | None = None
) -> ModuleType:
    """Imports the file as module `name`, which can import modules from `places`. `what`: the file in the error.

    Bytecode is not written: it would end up in the user's directories, also for modules that the file imports later.
    """
    sys.dont_write_bytecode = True
    for place in map(os.fspath, places):
        if place not in sys.path:
            sys.path.insert(0, place)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or spec.loader is None:
        raise InvalidRequest(f"{what} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def declare_package(folder: Path, name: str) -> None:
    """Makes `folder` the package `name`, whose modules can import each other relatively. Its `__init__.py` runs if it
    has one."""
    sys.dont_write_bytecode = True
    places = [os.fspath(folder)]
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=places)
    if spec is None or not init.is_file():
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = places
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    if spec.loader is not None:
        spec.loader.exec_module(package)
