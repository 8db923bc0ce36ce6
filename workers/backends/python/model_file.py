"""The file of a Python model: finds and imports it, and reads its class.

Invariants: nothing is written to the file's directory, and the module's name cannot collide with another module.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.repo.backends import MODEL, SOURCE_FILE
from shmserve.repo.config.schema import as_triton_json
from shmserve.repo.files.python_file import declare_package, import_file
from shmserve.repo.parameters import FUNCTION
from shmserve.workers.backends.python import pb_utils
from shmserve.workers.process.device import device_of, visible_number
from shmserve.workers.process.log import missing_module

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.base import Context


class PythonModelFile:
    def __init__(self, context: Context, path: Path | None) -> None:
        """`path`: one file for all models of a backend, instead of a file in the version's directory."""
        self.context = context
        self._path = path
        self._module: ModuleType | None = None

    def kind(self, config: ModelConfig) -> Any:
        if self._module is None:
            self._module = self._import(config)
        if FUNCTION.is_set(config):
            from shmserve.workers.backends.python.function_model import kind_of  # few models need it

            name = Path(self.context.settings.get(SOURCE_FILE, self._name(config))).name
            return kind_of(self._module, FUNCTION.read(config), name, config.max_batch_size > 0)
        kind = getattr(self._module, "TritonPythonModel", None)
        if kind is None:
            raise InvalidRequest(f"'{self._name(config)}' of model '{config.name}' has no class TritonPythonModel")
        return kind

    def _name(self, config: ModelConfig) -> str:
        return str(self._path or config.default_model_filename or MODEL)

    def _import(self, config: ModelConfig) -> ModuleType:
        """Imports the file as a module of the version's package, such as `1.model`: as in Triton, it can import modules
        beside it relatively and absolutely. The file of a backend is the module `model`: modules beside it can import
        it.
        """
        sys.argv = [""]  # as in Triton: libraries that parse it must not see the worker's arguments
        for name in ("triton_python_backend_utils", "c_python_backend_utils"):
            sys.modules[name] = pb_utils
        what = f"'{self._name(config)}' of model '{config.name}'"
        if self._path is not None:
            with _explained(config.backend):
                return import_file(self._path, self._path.stem, [self._path.parent], what)
        path = self.context.model_file(config, MODEL)
        package, places = str(self.context.version), [self.context.folder, self.context.version_folder]
        original = Path(self.context.settings.get(SOURCE_FILE, "") or path)
        name = f"{package}.{original.stem.replace('.', '_')}"
        loader = None
        if original != path:
            places.append(original.parent)
            loader = _CopyLoader(name, str(original), path)
        declare_package(original.parent, package)
        return import_file(original, name, places, what, loader)

    def arguments(self, config: ModelConfig) -> dict[str, str]:
        kind, number = device_of(config, self.context.instance)
        return {
            "model_config": json.dumps(as_triton_json(config)),
            "model_instance_kind": kind,
            "model_instance_name": self.context.instance,
            "model_instance_device_id": str(visible_number(number)),
            "model_repository": str(self.context.folder),
            "model_version": str(self.context.version),
            "model_name": self.context.model,
        }


@contextmanager
def _explained(backend: str) -> Iterator[None]:
    """Converts the exception for a missing module into an error that says what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise Unsupported(f"backend '{backend}' cannot be loaded: {missing_module(error)}") from error


class _CopyLoader(SourceFileLoader):
    """Loads the version's copy of a file. To the code it looks like the user's file, so that it finds files beside
    it."""

    def __init__(self, name: str, original: str, copy: Path) -> None:
        super().__init__(name, original)
        self._copy = copy

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._copy.read_bytes(), self.path)


def has_generator(kind: Any, model: str, decoupled: bool) -> bool:
    """Whether the class answers request by request with `async def stream(self, request)`, which yields responses."""
    function = getattr(kind, "stream", None)
    if not inspect.isasyncgenfunction(function):
        return False
    if not decoupled and not callable(getattr(kind, "execute", None)):
        raise InvalidRequest(
            f"class TritonPythonModel of model '{model}' has a stream method and no execute: such a model needs "
            "model_transaction_policy { decoupled: true }"
        )
    return decoupled
