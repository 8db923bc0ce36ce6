"""The agent `checksum`: refuses a model whose files are not those that its configuration names.

parameters { key: "SHA256:1/model.onnx" value: "9f86d0..." }
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from shmserve.errors import InvalidRequest
from shmserve.repo.agents.model import Agent, AgentModel, Refused
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
            found = digest_of(model.folder, name, ALGORITHMS[algorithm])
            if not hmac.compare_digest(found.encode(), expected.strip().lower().encode()):
                raise Refused(f"{algorithm} of '{name}' is {found}, expected {expected}")


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
