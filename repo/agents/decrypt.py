"""The agent `decrypt`: decrypts the files of a model that end with .age, in memory.

age -r age1... -o 1/model.onnx.age model.onnx
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyrage

from shmserve.repo.agents import Agent, AgentModel, Refused
from shmserve.repo.agents.built_in import linked, server_file
from shmserve.repo.storage.snapshot import take
from shmserve.system.files import is_tmpfs

SUFFIX = ".age"
KEY = "identity_file"
SSH_KEY = b"-----BEGIN"


class Decrypt(Agent):
    def load(self, model: AgentModel) -> Path:
        identities = _identities(server_file(model, KEY))
        if not _is_in_memory(model.work):
            text = "decrypted files would be written to a disk, as the runtime directory is not on a tmpfs"
            raise Refused(f"{text}; use a --runtime-dir below /run or /dev/shm")
        names = sorted(take(model.folder).files)
        encrypted = {name.removesuffix(SUFFIX): name for name in names if name.endswith(SUFFIX)}
        if not encrypted:
            raise Refused(f"no file ends with {SUFFIX}")
        target = linked(model, names, {*encrypted, *encrypted.values()})
        for plain, name in encrypted.items():
            _decrypt(model.folder / name, target / plain, identities)
        return target


def _is_in_memory(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return is_tmpfs(descriptor)
    finally:
        os.close(descriptor)


def _identities(path: Path) -> Sequence[Any]:
    """The secret keys of a file made by age-keygen, or an SSH key."""
    try:
        content = path.read_bytes()
        if content.startswith(SSH_KEY):
            return [pyrage.ssh.Identity.from_buffer(content)]
        lines = [line.strip() for line in content.decode().splitlines()]
        identities = [pyrage.x25519.Identity.from_str(line) for line in lines if line and not line.startswith("#")]
    except (OSError, ValueError, pyrage.IdentityError) as error:
        raise Refused(f"{KEY} cannot be read: {error}") from None
    if not identities:
        raise Refused(f"{KEY} has no key; `age-keygen -o FILE` makes one")
    return identities


def _decrypt(source: Path, target: Path, identities: Sequence[Any]) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with source.open("rb") as encrypted, os.fdopen(descriptor, "wb") as plain:
            pyrage.decrypt_io(encrypted, plain, identities)
    except (OSError, pyrage.DecryptError) as error:
        raise Refused(f"'{source.name}' cannot be decrypted: {error}") from None
