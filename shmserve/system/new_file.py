"""Writes a file so that it appears complete or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_file(path: Path, mode: int = 0o600) -> Iterator[Path]:
    """A temporary file next to `path`, which replaces it if the block succeeds."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    part = Path(name)
    try:
        yield part
        part.chmod(mode)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
