"""Reads and parses the source of Python models.

Invariant: it is never run.
"""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

SOURCE_BYTES = 4 * 1024 * 1024
"""Maximum size of a file that is parsed."""
CLASS = "TritonPythonModel"


def read_source(path: Path) -> bytes | None:
    """None: the file has more than SOURCE_BYTES. Raises OSError."""
    with path.open("rb") as file:
        source = file.read(SOURCE_BYTES + 1)
    return source if len(source) <= SOURCE_BYTES else None


def parse_source(source: bytes) -> ast.Module:
    """Raises SyntaxError, and ValueError for what contains NUL or is nested too deeply."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error
