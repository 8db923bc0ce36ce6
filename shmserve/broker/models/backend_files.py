"""Files of backends in the backend directory. Each version keeps those of its backend as they were when it was
loaded."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shmserve.errors import InvalidRequest
from shmserve.repo.backends import ENVIRONMENT_FILE, folder_of
from shmserve.repo.storage.generation import FilesChanged, Generation, Generations
from shmserve.repo.storage.snapshot import Snapshot, take

READINGS = 3
"""How often a directory that keeps changing is read. The last attempt takes the files as they are."""


class BackendFiles(NamedTuple):
    """The files of a backend as read from its directory `origin`. Without a `generation`, workers read that
    directory."""

    origin: Path
    snapshot: Snapshot
    generation: Generation | None

    @property
    def folder(self) -> Path:
        """The backend's directory as workers see it."""
        return self.generation.folder if self.generation is not None else self.origin


KnownBackends = dict[str, BackendFiles]
"""The backends read so far in one pass over the models, by name."""


def read_backend(name: str, directory: str, generations: Generations | None) -> BackendFiles | None:
    """The files of a backend; None if it is not in the directory. Raises InvalidRequest if they cannot be copied."""
    origin = folder_of(name, directory)
    if origin is None:
        return None
    try:
        for remaining in reversed(range(READINGS)):
            snapshot = take(origin)
            if generations is None:
                return BackendFiles(origin, snapshot, None)
            try:
                kept = generations.keep(origin, 0, snapshot, str(origin / ENVIRONMENT_FILE), strict=remaining > 0)
                return BackendFiles(origin, snapshot, kept)
            except FilesChanged:
                continue
    except OSError as error:
        text = f"cannot copy the files of backend '{name}' to the runtime directory: {error.strerror}"
        raise InvalidRequest(text) from error
    raise InvalidRequest(f"the files of backend '{name}' changed while they were read")
