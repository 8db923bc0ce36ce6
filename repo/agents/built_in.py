"""The agent `checksum`, and what it shares with the other built-in agents.

It refuses a model whose files are not those that its configuration names:
parameters { key: "SHA256:1/model.onnx" value: "9f86d0..." }
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from shmserve.errors import InvalidRequest
from shmserve.repo.agents import Agent, AgentModel, Refused
from shmserve.repo.files.safe_paths import open_inside

_PIECE = 1 << 20
ALGORITHMS = {"MD5": "md5", "SHA256": "sha256", "SHA512": "sha512"}


class Checksum(Agent):
    def load(self, model: AgentModel) -> None:
        if not model.parameters:
            raise Refused('it has no parameters; expected key: "SHA256:FILE" and the checksum as value')
        for key, expected in model.parameters.items():
            algorithm, _, name = key.partition(":")
            if algorithm not in ALGORITHMS or not name:
                raise Refused(f"parameter '{key}': expected ALGORITHM:FILE, with one of {', '.join(ALGORITHMS)}")
            digest = digest_of(model.folder, name, ALGORITHMS[algorithm])
            if not hmac.compare_digest(digest.encode(), expected.strip().lower().encode()):
                raise Refused(f"{algorithm} of '{name}' is {digest}, expected {expected}")


def digest_of(folder: Path, name: str, algorithm: str) -> str:
    """The digest of a file of the model, in hexadecimal."""
    try:
        with os.fdopen(open_inside(folder, name, f"file '{name}'"), "rb") as file:
            digest = hashlib.new(algorithm, usedforsecurity=algorithm != "md5")
            while piece := file.read(_PIECE):
                digest.update(piece)
            return digest.hexdigest()
    except InvalidRequest as error:
        raise Refused(error.message) from None


def server_file(model: AgentModel, key: str) -> Path:
    """The path that a parameter names. It cannot be in the model's directory: whoever writes there must not also choose
    the key.
    """
    value = model.parameters.get(key, "")
    if not value:
        raise Refused(f"parameter '{key}' is missing: the absolute path of a file (--repoagent-config)")
    path = Path(value)
    if not path.is_absolute():
        raise Refused(f"parameter '{key}': found '{value}', expected an absolute path")
    if any(path.resolve().is_relative_to(folder.resolve()) for folder in (model.folder, model.origin)):
        raise Refused(f"parameter '{key}': '{value}' is in the model's own directory")
    return path


def linked(model: AgentModel, names: Iterable[str], without: Collection[str]) -> Path:
    """Makes a directory in `work` with links to the files of the model, except those in `without`. `names`: files and,
    before what is in them, directories, which end with /.
    """
    target = model.work / model.name
    target.mkdir(mode=0o700)
    for name in names:
        if name.endswith("/"):
            (target / name).mkdir(mode=0o700)
        elif name not in without:
            (target / name).symlink_to((model.folder / name).resolve())
    return target
