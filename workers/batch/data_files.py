"""Data files of tensors that the configuration names: warm-up samples and initial states."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shmserve.dtypes import elements
from shmserve.errors import InvalidRequest
from shmserve.repo.files.safe_paths import open_inside, read_inside

if TYPE_CHECKING:
    from shmserve.workers.batch.specs import Spec

STRINGS_LIMIT = 1 << 30
"""Maximum size of a file of strings. Files of other types have exactly the size of their tensor."""


def read_tensor(folder: Path, place: str, name: str, what: str, spec: Spec, shape: tuple[int, ...]) -> bytes:
    """Returns the bytes of a file in the directory `place` of the model. Those of strings have not been checked."""
    if name.startswith("/"):
        raise InvalidRequest(f"{what}: the name must be that of a file in the model's {place} directory")
    if not spec.item:
        return read_inside(folder, f"{place}/{name}", what, STRINGS_LIMIT)
    size = elements(shape) * spec.item
    with os.fdopen(open_inside(folder, f"{place}/{name}", what), "rb") as file:
        file_size = os.fstat(file.fileno()).st_size
        data = file.read(size) if file_size == size else b""
    if len(data) != size:
        raise InvalidRequest(f"{what} must have {size} bytes for {spec.dtype} {list(shape)}; it has {file_size}")
    return data
