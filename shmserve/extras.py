"""Which extra of this package installs a package that is missing, and the command for it.

`pip install shmserve` is the client alone; everything else is in extras.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

ENVIRONMENT = ".venv"
"""The environment that `make` creates in a source directory."""

EXTRAS: Mapping[str, str] = {"bench": "bench", "tune": "bench"}
"""The extra that a command needs; `server` if it is not listed."""
MODULES = frozenset(("google", "hdrh", "hpack", "httptools", "jinja2", "re2", "rich", "tomli", "uvloop"))
"""Top-level modules of these extras that commands import without a check of their own."""
PACKAGES: Mapping[str, str] = {"google": "protobuf", "hdrh": "hdrhistogram", "re2": "google-re2"}
"""The packages of modules that have another name."""
NEEDED = ("google", "uvloop")
"""Those without which no server starts."""
GATEWAY = ("hpack", "httptools")
"""Those without which a server has no network endpoints."""


def missing(command: str) -> str | None:
    """A text about the first of NEEDED that is not installed; None if all are."""
    return next((missing_text(name, command) for name in NEEDED if find_spec(name) is None), None)


def missing_text(module: str | None, command: str) -> str | None:
    """The text for a module that a command cannot import; None if it is in no extra, which is an internal error."""
    name = (module or "").partition(".")[0]
    extra = EXTRAS.get(command, "server")
    package = PACKAGES.get(name, name)
    return f"the package {package} is not installed: {install_command(extra)}" if name in MODULES else None


def install_command(extra: str, package: Path | None = None, prefix: str = sys.prefix) -> str:
    """In a source directory, from there: an index may not have the package. Contains no path of this machine, as
    callers may see it. `package`: the directory of this module; `prefix`: of the interpreter.
    """
    root = (package or Path(__file__).parent).resolve().parent
    if not (root / "setup.cfg").is_file():
        return f"pip install 'shmserve[{extra}]'"
    pip = f"{ENVIRONMENT}/bin/pip" if Path(prefix).resolve() == root / ENVIRONMENT else "pip"
    return f"{pip} install -e '.[{extra}]' in the source directory"
