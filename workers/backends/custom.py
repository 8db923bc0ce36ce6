"""Backends of the backend directory: a class in `<backend-directory>/<name>/backend.py`, or a `model.py` there.

The rule: it is found, imported and checked when a model needs it, in the worker of that model, and nowhere else.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from shmserve.errors import InvalidRequest
from shmserve.repo.backends import FILE, MODEL, in_directory
from shmserve.workers.backends.base import Backend, Context, SeparateBackend, StackedBackend

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig


def from_directory(directory: str, name: str) -> type[Backend] | None:
    """The backend of that name; None if the directory has none."""
    if name not in in_directory(directory):
        return None
    folder = Path(directory) / name
    if not (folder / FILE).is_file():
        return _python_based(folder)
    return backend_in(_imported(folder / FILE, name), name)


def backend_in(module: ModuleType, name: str) -> type[Backend]:
    """The one class of a module that is a backend. Others may be there for it to derive from."""
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, (StackedBackend, SeparateBackend))
        and value.__module__ == module.__name__
    ]
    last = [kind for kind in found if not any(kind in other.__mro__[1:] for other in found)]
    if len(last) != 1:
        names = f": {', '.join(kind.__name__ for kind in last)}" if last else ""
        raise InvalidRequest(
            f"{FILE} of backend '{name}' must have one class that derives from StackedBackend or SeparateBackend; it "
            f"has {len(last) or 'none'}{names}"
        )
    return last[0]


def _python_based(folder: Path) -> type[Backend]:
    """The backend whose models are all run by one Python model."""
    from shmserve.workers.backends.python.backend import Python
    from shmserve.workers.backends.python.model_file import ModelFile

    class Shared(ModelFile):
        def _file(self, config: ModelConfig) -> str:
            return os.fspath(folder / MODEL)

    class PythonBased(Python):
        def __init__(self, context: Context) -> None:
            super().__init__(context)
            self._file = Shared(context)
            _reach(folder)

        @classmethod
        def chosen(cls, config: ModelConfig) -> type[Backend]:
            return cls

    return PythonBased


def _imported(path: Path, name: str) -> ModuleType:
    """Modules beside the file can be imported by it."""
    _reach(path.parent)
    spec = importlib.util.spec_from_file_location(f"shmserve_backend_{name}", path)
    if spec is None or spec.loader is None:
        raise InvalidRequest(f"{FILE} of backend '{name}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _reach(folder: Path) -> None:
    """Modules of the folder can be imported."""
    if os.fspath(folder) not in sys.path:
        sys.path.insert(0, os.fspath(folder))
