"""The model that is converted, as a server runs it: a model directory, made for the file if it has none.

Invariant: nothing is imported and nothing runs here; the server does both.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shmserve.errors import InvalidRequest, NotFound
from shmserve.repo.load import CONFIG_FILE
from shmserve.repo.starters.starter import PICKLES, TORCH_FILES, DescribedTensors, starter_of, write

NAME = "original"
SAVED_MODEL = "saved_model.pb"
FILES = {
    "onnxruntime": ("model.onnx",),
    "pytorch": ("model.pt", "model.pt2"),
    "tensorflow": ("model.savedmodel",),
    "paddle": ("model.json", "model.pdmodel"),
    "python": ("model.joblib",),
}
"""Backend -> the names of its file in a version directory, as the server looks for them."""


class Original(NamedTuple):
    """A model directory, `name` in `repository`, and the file of its framework."""

    repository: Path
    name: str
    file: Path


def original_of(source: Path, scratch: Path, describe: Callable[[], DescribedTensors | None]) -> Original:
    """`scratch`: an empty directory, which gets a model directory if the source is a file. `describe`: returns the
    tensors of a PyTorch file. Raises InvalidRequest and NotFound."""
    if not source.exists():
        raise NotFound(f"{source}: no such file or directory")
    if source.is_dir() and not (source / SAVED_MODEL).exists():
        return Original(source.resolve().parent, source.resolve().name, _file_of(source))
    if source.is_dir():
        return _linked(scratch, "tensorflow", {"model.savedmodel": source})
    weights = source.with_suffix(".pdiparams")
    if source.suffix == ".pdmodel" or (source.suffix == ".json" and weights.exists()):
        beside = {"model.pdiparams": weights} if weights.exists() else {}
        return _linked(scratch, "paddle", {f"model{source.suffix}": source, **beside})
    if source.suffix in (".onnx", *TORCH_FILES, *PICKLES):
        described = describe() if source.suffix in TORCH_FILES else None
        write(starter_of(str(source), described), NAME, scratch)
        return Original(scratch, NAME, _file_of(scratch / NAME))
    known = ", ".join((".onnx", *TORCH_FILES, *PICKLES, ".pdmodel", ".json of PaddlePaddle"))
    raise InvalidRequest(f"{source}: expected a model directory, a SavedModel, or a file with the suffix {known}")


def _file_of(folder: Path) -> Path:
    """The file in the highest version of a model directory."""
    versions = sorted((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    known = [name for names in FILES.values() for name in names]
    for name in known if versions else ():
        if (versions[-1] / name).exists():
            return versions[-1] / name
    raise InvalidRequest(f"{folder}: expected a directory with a {CONFIG_FILE} and a version, such as 1/model.pt")


def _linked(scratch: Path, backend: str, files: dict[str, Path]) -> Original:
    version = scratch / NAME / "1"
    version.mkdir(parents=True)
    (version.parent / CONFIG_FILE).write_text(f'name: "{NAME}" backend: "{backend}"\n')
    for name, path in files.items():
        os.symlink(path.resolve(), version / name)
    return Original(scratch, NAME, version / next(iter(files)))
