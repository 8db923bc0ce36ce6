"""The command that installs an extra of this package, for texts about packages that are missing."""

from __future__ import annotations

import sys
from pathlib import Path

ENVIRONMENT = ".venv"
"""The environment that `make` creates in a source directory."""


def install_command(extra: str, package: Path | None = None, prefix: str = sys.prefix) -> str:
    """In a source directory, from there: an index may not have the package. Contains no path of this machine, as
    callers may see it. `package`: the directory of this module; `prefix`: of the interpreter.
    """
    root = (package or Path(__file__).parent).resolve().parent
    if not (root / "setup.cfg").is_file():
        return f"pip install 'shmserve[{extra}]'"
    pip = f"{ENVIRONMENT}/bin/pip" if Path(prefix).resolve() == root / ENVIRONMENT else "pip"
    return f"{pip} install -e '.[{extra}]' in the source directory"
