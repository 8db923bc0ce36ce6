"""The agent `signature`: refuses a model whose files are not those that the owner of a key has signed.

The model's directory has a manifest in the format of sha256sum, and its ed25519 signature:

    cd NAME && find . -type f ! -name 'SHA256SUMS*' -exec sha256sum {} + > SHA256SUMS
    openssl pkeyutl -sign -rawin -inkey key.pem -in SHA256SUMS -out SHA256SUMS.sig
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from shmserve.errors import InvalidRequest
from shmserve.repo.agents import Agent, AgentModel, Refused
from shmserve.repo.agents.built_in import digest_of, server_file
from shmserve.repo.files.safe_paths import open_inside

MANIFEST = "SHA256SUMS"
SIGNATURE = "SHA256SUMS.sig"
KEY = "public_key_file"
MANIFEST_BYTES = 16 << 20
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


class Signature(Agent):
    def load(self, model: AgentModel) -> None:
        key = _public_key(server_file(model, KEY))
        manifest = _content(model.folder, MANIFEST)
        try:
            key.verify(_content(model.folder, SIGNATURE), manifest)
        except InvalidSignature:
            raise Refused(f"{SIGNATURE} is not a signature of {MANIFEST} by the key of {KEY}") from None
        expected = _expected(manifest)
        present = set(_files(model.folder))
        if unsigned := sorted(present - set(expected)):
            others = f", and neither are {len(unsigned) - 1} others" if len(unsigned) > 1 else ""
            raise Refused(f"'{unsigned[0]}' is not in {MANIFEST}{others}")
        for name, digest in expected.items():
            if digest_of(model.folder, name, "sha256") != digest:
                raise Refused(f"'{name}' differs from what was signed")


def _public_key(path: Path) -> Ed25519PublicKey:
    try:
        key = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Refused(f"{KEY} cannot be read: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        text = f"{KEY} has a key of another kind than ed25519"
        raise Refused(f"{text}, which `openssl genpkey -algorithm ed25519` makes")
    return key


def _content(folder: Path, name: str) -> bytes:
    try:
        with os.fdopen(open_inside(folder, name, f"file '{name}'"), "rb") as file:
            content = file.read(MANIFEST_BYTES + 1)
    except InvalidRequest as error:
        raise Refused(error.message) from None
    if len(content) > MANIFEST_BYTES:
        raise Refused(f"'{name}' is larger than {MANIFEST_BYTES} bytes")
    return content


def _expected(manifest: bytes) -> dict[str, str]:
    """File -> digest."""
    expected = {}
    for number, line in enumerate(manifest.decode("utf-8", "surrogateescape").splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise Refused(f"line {number} of {MANIFEST} is not a line of sha256sum")
        expected[match[2].removeprefix("./")] = match[1]
    return expected


def _files(folder: Path) -> Iterator[str]:
    """All files that a model could read. Compiled Python files are never served."""
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in folders:
            if os.path.islink(os.path.join(here, name)):
                raise Refused(f"'{name}' is a link to a directory, which cannot be signed")
        for name in files:
            path = os.path.relpath(os.path.join(here, name), folder)
            if path not in (MANIFEST, SIGNATURE):
                yield path
