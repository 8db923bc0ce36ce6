"""The file of a Python model: finds and imports it, and reads its class.

Invariants: nothing is written to the file's directory, and the module's name cannot collide with another module.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from shmserve.errors import InvalidRequest
from shmserve.repo.backends import FUNCTION, MODEL, SOURCE_FILE
from shmserve.repo.config.schema import as_triton_json
from shmserve.repo.gpus import VISIBLE
from shmserve.workers.backends.python import pb_utils
from shmserve.workers.process.device import device_of, visible_number

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.base import Context


class ModelFile:
    def __init__(self, context: Context, path: Path | None = None) -> None:
        """`path`: one file for all models of a backend, instead of a file in the version's directory."""
        self.context = context
        self._path = path
        self._module: ModuleType | None = None

    def kind(self, config: ModelConfig) -> Any:
        if self._module is None:
            self._module = self._import(config)
        if (function := config.parameters.get(FUNCTION)) is not None:
            from shmserve.workers.backends.python.function_model import kind_of  # few models need it

            name = Path(self.context.settings.get(SOURCE_FILE, self._name(config))).name
            return kind_of(self._module, function.string_value, name, config.max_batch_size > 0)
        kind = getattr(self._module, "TritonPythonModel", None)
        if kind is None:
            raise InvalidRequest(f"'{self._name(config)}' of model '{config.name}' has no class TritonPythonModel")
        return kind

    def _name(self, config: ModelConfig) -> str:
        return str(self._path or config.default_model_filename or MODEL)

    def _import(self, config: ModelConfig) -> ModuleType:
        """Imports the file under a unique name, because a model may have the name of any module. Modules beside it can
        be imported.

        Bytecode is not written: it would end up in the user's repository, also for modules that the model imports
        later.
        """
        sys.dont_write_bytecode = True
        sys.argv = [""]  # as in Triton: libraries that parse it must not see the worker's arguments
        folder = self.context.version_folder
        path = self._path or self.context.model_file(config, MODEL)
        for name in ("triton_python_backend_utils", "c_python_backend_utils"):
            sys.modules[name] = pb_utils
        places, loader, name = [self.context.folder, folder], None, f"shmserve_model_{self.context.version}"
        if original := self.context.settings.get(SOURCE_FILE, ""):
            places.append(Path(original).parent)
            loader, path = _CopyLoader(name, original, path), Path(original)
        for place in map(str, places):
            if place not in sys.path:
                sys.path.insert(0, place)
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        if spec is None or spec.loader is None:
            raise InvalidRequest(f"'{self._name(config)}' of model '{config.name}' is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    def arguments(self, config: ModelConfig) -> dict[str, str]:
        kind, number = device_of(config, self.context.instance)
        number = visible_number(number, os.environ.get(VISIBLE, ""))
        return {
            "model_config": json.dumps(as_triton_json(config)),
            "model_instance_kind": kind,
            "model_instance_name": self.context.instance,
            "model_instance_device_id": str(number),
            "model_repository": str(self.context.folder),
            "model_version": str(self.context.version),
            "model_name": self.context.model,
        }


class _CopyLoader(SourceFileLoader):
    """Loads the version's copy of a file. For the code it is the user's file, beside which it finds others."""

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


def flag(config: ModelConfig, name: str, default: bool) -> bool:
    given = config.parameters.get(name)
    if given is None:
        return default
    text = given.string_value.lower()
    if text not in ("true", "false"):
        raise InvalidRequest(
            f"parameter '{name}' of model '{config.name}' is '{given.string_value}', not true or false"
        )
    return text == "true"
