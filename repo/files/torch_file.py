"""Determines the kind of program in a file of PyTorch from the names in its archive. Nothing in it is run."""

from __future__ import annotations

import zipfile
from enum import Enum
from pathlib import Path

from shmserve.errors import InvalidRequest


class TorchKind(Enum):
    SCRIPT = "TorchScript"
    EXPORTED = "torch.export"
    COMPILED = "AOTInductor"


def torch_kind(path: Path) -> TorchKind:
    """Raises InvalidRequest if it holds no program, and OSError."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError):  # what `zipfile` raises for a damaged archive
        text = f"'{path.name}' is not a file of PyTorch: neither TorchScript nor a torch.export package"
        raise InvalidRequest(text) from None
    if any("/data/aotinductor/" in name for name in names):
        return TorchKind.COMPILED
    if any(name.endswith("/archive_format") for name in names):
        return TorchKind.EXPORTED
    if any(name.endswith("/constants.pkl") for name in names):
        return TorchKind.SCRIPT
    raise InvalidRequest(
        f"'{path.name}' holds no program: save it with torch.jit.save or torch.export.save (torch.save keeps weights "
        "only, or needs the Python class; `shmserve init NAME --from torch` makes a model.py for these)"
    )
