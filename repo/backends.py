"""Available backends: built-in ones, those of other packages, and those of the backend directory.

Backends are only looked up by name here; the worker imports them. Workers import this module too, so it imports little.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shmserve.repo.files.safe_paths import MODEL_NAME

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig

BACKENDS = frozenset(
    {
        "dali",
        "fil",
        "identity",
        "llamacpp",
        "onnxruntime",
        "openvino",
        "paddle",
        "python",
        "pytorch",
        "tensorflow",
        "tensorrt",
        "tflite",
        "vllm",
    }
)
"""Built-in backends."""
REPLACEABLE = frozenset({"vllm"})
"""Built-in backends that a backend in the directory replaces, because Triton has one of that name in Python."""
GROUP = "shmserve.backends"
"""The entry point group by which packages provide backends."""
DIRECTORY = "backend-directory"
"""The setting in a load order with the path of the backend directory."""
VERBOSE = "log-verbose"
"""The setting in a load order with the level of --log-verbose, if it is not 0."""
NO_COMPLETION = "disable-auto-complete-config"
"""The setting in a load order that is "true" if workers do not complete configurations."""
OUTPUT_LIMIT = "worker-output-bytes"
CUDA_POOL_LIMIT = "cuda-memory-pool-byte-size"
PINNED_LIMIT = "pinned-memory-pool-byte-size"
"""The settings in a load order with these limits."""
PINS = "pins"
"""The setting in a load order with the path of pins.json, with the size and time of model files that were linked, not
copied."""
BACKEND_PINS = "backend-pins"
"""The same for the files of the model's backend."""
LANE_ADDRESS = "lane-address"
"""The setting in a load order with the address of the server, for processes that a model forks."""
SOURCE_FILE = "source-file"
"""The setting in a load order with the path of the file that the user serves as a model, if it is in no repository."""
FILE = "backend.py"
LIBRARY = "libtriton_{}.so"
"""The library of a backend that was written for Triton in C or C++."""
NATIVE = "native"
"""The name of the setting with native backends that replace built-in ones: `--backend-config=native,prefer=NAME`."""
MODEL = "model.py"
"""A Python model that implements a backend: it runs all models of that backend, each with its own files."""
NETWORK = "config.json"
"""A file of every directory that is a language model in Hugging Face's format, which vLLM runs."""
NETWORK_CONFIG = 'backend: "vllm"\n'
"""The configuration of such a directory that is served as a model."""
ENVIRONMENT_FILE = "pb_exec_env_model.py.tar.gz"
"""A file beside such a model.py: the Python environment of models that name no other, as in Triton."""


def in_directory(directory: str | Path) -> frozenset[str]:
    """The backends in a directory: subdirectories that have a backend.py, model.py or library. Empty for ""."""
    if not directory:
        return frozenset()
    return frozenset(entry.name for entry in os.scandir(directory) if _is_backend(entry.name, directory))


def has_library(config: ModelConfig, folder: Path) -> bool:
    """Whether a model, in this directory, has a library of its own."""
    if not config.backend or config.backend in BACKENDS:
        return False
    return any(entry.is_dir() and library_of(config, entry) is not None for entry in folder.iterdir())


def folder_of(name: str, directory: str | Path) -> Path | None:
    """The directory of a backend in the backend directory; None if it is not there."""
    is_there = directory and not is_built_in(name, directory) and _is_backend(name, directory)
    return Path(directory) / name if is_there else None


def is_built_in(name: str, directory: str | Path) -> bool:
    """True if a backend is built in, and not replaced by one in the directory."""
    return name in BACKENDS and not (name in REPLACEABLE and directory and _is_backend(name, directory))


def _is_backend(name: str, directory: str | Path) -> bool:
    if not MODEL_NAME.fullmatch(name):
        return False
    return any(os.path.isfile(os.path.join(directory, name, file)) for file in (FILE, MODEL, LIBRARY.format(name)))


def library_of(config: ModelConfig, version_folder: Path, directory: str | Path = "") -> Path | None:
    """The library that runs a model: in the directory of its version, of the model or of its backend. None: there is
    none, and another kind of backend runs it."""
    chosen = [name for name in (config.runtime, config.default_model_filename) if name.endswith(".so")]
    folders = [version_folder, version_folder.parent]
    if directory:
        folders.append(Path(directory) / config.backend)
    paths = (folder / name for folder in folders for name in (*chosen, LIBRARY.format(config.backend)))
    return next((path for path in paths if path.is_file()), None)


def installed(directory: str | Path = "") -> frozenset[str]:
    """All backends. Raises OSError for a directory that cannot be read."""
    from importlib.metadata import entry_points

    return BACKENDS | {entry.name for entry in entry_points(group=GROUP)} | in_directory(directory)


def backend_directory_problem(directory: Path) -> str:
    """The problem of a backend directory; "" if there is none. A model.py under the name of a built-in backend, as in
    an installation of Triton, is never used, and not a problem."""
    if not directory.is_dir():
        return f"{directory} is not a directory"
    try:
        conflicts = sorted(
            name for name in (BACKENDS - REPLACEABLE) & in_directory(directory) if (directory / name / FILE).is_file()
        )
    except OSError as error:
        return f"{directory} cannot be read: {error.strerror}"
    if conflicts:
        return f"{directory} has a backend '{conflicts[0]}', the name of a built-in backend; rename it"
    return ""
