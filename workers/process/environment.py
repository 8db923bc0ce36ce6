"""Starts a model's own interpreter: a directory, or an archive that is unpacked once.

Invariant: the process stays the same from start to exit; only its interpreter is replaced (exec).
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from shmserve.errors import InvalidRequest, NotFound
from shmserve.workers.process.environment_archive import unpacked
from shmserve.workers.process.log import log_message

SETTING = "EXECUTION_ENV_PATH"
PYTHONS = ("bin/python3", "bin/python")
NEEDED = {"msgspec": "0.18.6", "numpy": "1.26", "posix_ipc": "1.1"}
"""Packages that a worker requires, with their minimum versions."""


def replace_interpreter(place: str, cache: str, target: str, arguments: list[str]) -> NoReturn:
    """Replaces this process by the model's interpreter, which calls `target` ("module:function") with the arguments.
    Raises if it is not an interpreter."""
    path = Path(place)
    log_message(f"{SETTING}: the interpreter is at {place}", "info")  # for operators; callers must not learn the path
    if not path.exists():
        raise NotFound(f"{SETTING}: there is no such directory or archive")
    root = path if path.is_dir() else unpacked(path, Path(cache), find_python)
    python = find_python(root)
    try:
        os.execve(python, [python, "-I", "-u", *command([target, *arguments])], _variables(root))
    except OSError as error:
        raise InvalidRequest(f"{SETTING}: its {Path(python).name} cannot be run: {error.strerror}") from None


def find_python(root: Path) -> str:
    for name in PYTHONS:
        if os.access(root / name, os.X_OK):
            return str(root / name)
    raise InvalidRequest(f"{SETTING}: neither {' nor '.join(PYTHONS)} in it can be run; is it an environment?")


def command(arguments: list[str]) -> list[str]:
    """Returns the bootstrap script with its arguments: where this server's packages are, and where to find the packages
    that they require, which fit an interpreter with the same ABI."""
    folder = Path(__file__).parents[2]
    packages = [f"{name}={minimum}={_place(name)}" for name, minimum in NEEDED.items()]
    ours = [str(folder.parent), EXTENSION_SUFFIXES[0], *packages]
    return [str(folder / "workers" / "bootstrap.py"), str(len(ours)), *ours, *arguments]


def _place(name: str) -> str:
    spec = find_spec(name)
    origin = Path(spec.origin) if spec is not None and spec.origin else Path(sys.prefix)
    return str(origin.parent.parent if origin.name.startswith("__init__.") else origin.parent)


def _variables(root: Path) -> dict[str, str]:
    """Returns the environment variables that the environment's `activate` would set."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    kept["PATH"] = os.pathsep.join(filter(None, (str(root / "bin"), kept.get("PATH", ""))))
    kept["CONDA_PREFIX" if (root / "conda-meta").is_dir() else "VIRTUAL_ENV"] = str(root)
    return kept
