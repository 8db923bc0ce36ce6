"""Finds a backend by its name: built in, in the backend directory, or in an installed package; or the library of one.

A backend in the directory is a class in `<backend-directory>/<name>/backend.py`, or a `model.py` there. Packages
register backends as entry points of the group "shmserve.backends". A backend is imported only in workers of models that
need it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.extras import install_command, outdated
from shmserve.repo.backends import DIRECTORY, FILE, GROUP, MODEL, NATIVE, in_directory, is_built_in, library_of
from shmserve.repo.files.python_file import import_file
from shmserve.workers.backends.base import Backend, Context

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig


class KnownBackend(NamedTuple):
    """The location of a backend, and the extra of this package that installs its engine ("" for none)."""

    target: str
    extra: str


BACKENDS = {
    "dali": KnownBackend("shmserve.workers.backends.dali:Dali", "dali"),
    "fil": KnownBackend("shmserve.workers.backends.trees:Trees", "trees"),
    "identity": KnownBackend("shmserve.workers.backends.identity:Identity", ""),
    "llamacpp": KnownBackend("shmserve.workers.backends.llamacpp.backend:LlamaCpp", "llm"),
    "onnxruntime": KnownBackend("shmserve.workers.backends.onnx.backend:Onnx", "server"),
    "openvino": KnownBackend("shmserve.workers.backends.openvino:OpenVino", "openvino"),
    "paddle": KnownBackend("shmserve.workers.backends.paddle:Paddle", "paddle"),
    "python": KnownBackend("shmserve.workers.backends.python.backend:Python", ""),
    "tensorrt": KnownBackend("shmserve.workers.backends.tensorrt.backend:TensorRT", "gpu"),
    "tensorflow": KnownBackend("shmserve.workers.backends.tensorflow.backend:TensorFlow", "tensorflow"),
    "tflite": KnownBackend("shmserve.workers.backends.tflite:TfLite", "tflite"),
    "pytorch": KnownBackend("shmserve.workers.backends.pytorch.backend:Torch", "torch"),
    "vllm": KnownBackend("shmserve.workers.backends.vllm.backend:Vllm", "vllm"),
}


def kind_of(config: ModelConfig, context: Context) -> type[Backend]:
    """Returns the class that runs a model: that of libraries, if there is one, and the backend is not built in or the
    operator prefers its library."""
    directory = context.settings.get(DIRECTORY, "")
    native = config.backend not in BACKENDS or config.backend in context.setting(NATIVE, "prefer").split(",")
    if native and library_of(config, context.version_folder, directory) is not None:
        from shmserve.workers.backends.native.backend import Native  # few models need it

        return Native
    return find(config.backend, directory).chosen(config)


def find(name: str, directory: str = "") -> type[Backend]:
    """Returns the class of a backend, from the directory if it is not built in. The error for a missing engine names
    the extra to install."""
    known = BACKENDS.get(name)
    if known is None or not is_built_in(name, directory):
        return from_directory(directory, name) or _from_entry_point(name, directory)
    if known.extra and (old := outdated(known.extra)):
        raise Unsupported(f"backend '{name}' cannot be used: {old}")
    module, _, attribute = known.target.partition(":")
    try:
        kind: type[Backend] = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        if not known.extra:
            raise
        raise Unsupported(
            f"backend '{name}' needs a package that is not installed ({error}): {install_command(known.extra)}"
        ) from error
    return kind


def _from_entry_point(name: str, directory: str) -> type[Backend]:
    from importlib.metadata import entry_points  # slow to import and rarely needed

    points = entry_points(group=GROUP)
    for point in points:
        if point.name == name:
            kind = point.load()
            if not (isinstance(kind, type) and issubclass(kind, Backend)):
                raise InvalidRequest(f"backend '{name}' is not a subclass of Backend")
            return kind
    known = ", ".join(sorted({*BACKENDS, *(point.name for point in points), *in_directory(directory)}))
    what = f"unknown backend '{name}'" if name else "the configuration names no backend"
    raise Unsupported(f"{what}; known are: {known}")


def from_directory(directory: str, name: str) -> type[Backend] | None:
    """Returns the backend of this name in the directory, or None."""
    if name not in in_directory(directory):
        return None
    folder = Path(directory) / name
    if not (folder / FILE).is_file():
        return _python_based(folder)
    module = import_file(folder / FILE, f"shmserve_backend_{name}", [folder], f"{FILE} of backend '{name}'")
    return backend_in(module, name)


def backend_in(module: ModuleType, name: str) -> type[Backend]:
    """Returns the only backend class of a module. The module may also define base classes of it."""
    kinds = [
        value
        for value in vars(module).values()
        # The module is compared first, because list[int] is a type in Python 3.10, which issubclass refuses.
        if isinstance(value, type) and value.__module__ == module.__name__ and issubclass(value, Backend)
    ]
    last = [kind for kind in kinds if not any(kind in other.__mro__[1:] for other in kinds)]
    if len(last) != 1:
        names = f": {', '.join(kind.__name__ for kind in last)}" if last else ""
        raise InvalidRequest(
            f"{FILE} of backend '{name}' must have one class that derives from Backend; it has "
            f"{len(last) or 'none'}{names}"
        )
    return last[0]


def _python_based(folder: Path) -> type[Backend]:
    """Returns a backend that runs all its models with one Python model."""
    from shmserve.workers.backends.python.backend import Python

    class PythonBased(Python):
        source = folder / MODEL

    return PythonBased
