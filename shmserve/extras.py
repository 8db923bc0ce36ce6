"""Maps missing packages to the extra that installs them, and to the command for it.

`pip install shmserve` installs only the client; everything else is in extras.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

ENVIRONMENT = ".venv"
"""The environment that `make` creates in a source directory."""

EXTRAS: Mapping[str, str] = {"bench": "bench", "tune": "bench"}
"""Command -> the extra that it needs; `server` for commands that are not listed."""
MODULES = frozenset(("google", "hdrh", "hpack", "httptools", "jinja2", "re2", "rich", "tomli", "uvloop"))
"""Top-level modules of these extras that commands import without checking for them."""
PACKAGES: Mapping[str, str] = {"google": "protobuf", "hdrh": "hdrhistogram", "re2": "google-re2"}
"""Module -> its package, if the names differ."""
NEEDED = ("google", "uvloop")
"""Modules that every server needs."""
GATEWAY = ("hpack", "httptools")
"""Modules that network endpoints need."""


def missing(command: str) -> str | None:
    """The text for the first module of NEEDED that is not installed; None if all are."""
    return next((missing_text(name, command) for name in NEEDED if find_spec(name) is None), None)


def missing_text(module: str | None, command: str) -> str | None:
    """The text for a module that a command cannot import; None if no extra contains it, which is an internal error."""
    name = (module or "").partition(".")[0]
    extra = EXTRAS.get(command, "server")
    package = PACKAGES.get(name, name)
    return f"the package {package} is not installed: {install_command(extra)}" if name in MODULES else None


def install_command(extra: str, package: Path | None = None, prefix: str = sys.prefix) -> str:
    """The command that installs an extra. In a source directory it installs from there, as an index may not have the
    package. Callers may see it, so it contains no path of this machine. `package`: the directory of this module.
    `prefix`: that of the interpreter.
    """
    root = (package or Path(__file__).parent).resolve().parent
    if not (root / "setup.cfg").is_file():
        return f"pip install 'shmserve[{extra}]'"
    pip = f"{ENVIRONMENT}/bin/pip" if Path(prefix).resolve() == root / ENVIRONMENT else "pip"
    return f"{pip} install -e '.[{extra}]' in the source directory"
