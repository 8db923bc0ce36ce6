"""Which backends there are: our own, those that other packages bring, and those of the backend directory.

The rule: here they are only found by their names. What is in them, the worker that needs it knows. Workers import
this, so it imports little.
"""

from __future__ import annotations

import os
from pathlib import Path

from shmserve.repo.files.safe_paths import MODEL_NAME

BACKENDS = frozenset({"identity", "onnxruntime", "openvino", "python", "pytorch", "tensorrt"})
"""Our own."""
GROUP = "shmserve.backends"
"""The entry points by which packages bring backends."""
DIRECTORY = "backend-directory"
"""The setting of a load order that says where others are."""
FILE = "backend.py"
MODEL = "model.py"
"""A Python model that runs all models of a backend, each with its own files."""


def in_directory(directory: str | Path) -> frozenset[str]:
    """The backends in a directory: each is a sub-directory of its name, with a backend.py or model.py. None for ""."""
    if not directory:
        return frozenset()
    return frozenset(
        entry.name
        for entry in os.scandir(directory)
        if MODEL_NAME.fullmatch(entry.name)
        and any(os.path.isfile(os.path.join(entry.path, file)) for file in (FILE, MODEL))
    )


def installed(directory: str | Path = "") -> frozenset[str]:
    """All backends. A directory that cannot be read is an OSError."""
    from importlib.metadata import entry_points

    return BACKENDS | {entry.name for entry in entry_points(group=GROUP)} | in_directory(directory)


def not_usable(directory: Path) -> str:
    """What is wrong with a backend directory; "" if nothing is."""
    if not directory.is_dir():
        return f"{directory} is not a directory"
    try:
        ours = sorted(BACKENDS & in_directory(directory))
    except OSError as error:
        return f"{directory} cannot be read: {error.strerror}"
    if ours:
        return f"{directory} has a backend '{ours[0]}', which is the name of one of our own; give it another name"
    return ""
