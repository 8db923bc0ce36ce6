"""CURVE keys as files: what `shmserve keygen` writes, and what clients and the gateway read. The rule of the file: a
secret is in one file that nobody but its owner can read, and in no text that is shown.

    NAME.key    public-key = ...        secret, for whoever is NAME
                secret-key = ...
    NAME.pub    PUBLIC-KEY ROLE,ROLE NAME       for the others; of a client it is a line of the gateway's --zmq-keys
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from msgspec import Struct

from shmserve.errors import InvalidRequest, Unsupported

KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""A public or secret key, as it is written (Z85)."""
FILE_BYTES = 1 << 20
_LINE = re.compile(r"(public|secret)-key\s*=\s*\"?([^\s\"]+)\"?")
COMMENT = "# "
"""A key may begin with #, but has no space in it."""


class Pair(Struct, frozen=True):
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"Pair({self.public})"


class Keys(Struct, frozen=True):
    """What a client needs to reach a door on tcp: its own pair, and the public key that the server must have."""

    server: str
    own: Pair


def read(path: str | os.PathLike[str], secret: bool = False) -> str:
    """The text of a file of keys. `secret`: nobody but its owner may be able to read it; else, to write it."""
    shown = os.fspath(path)
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise InvalidRequest(f"{shown} is not a regular file")
            text = file.read(FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequest(f"cannot read keys from {shown}: {reason}") from error
    if secret and found.st_mode & 0o077:
        raise InvalidRequest(f"{shown} contains a secret key and is readable by other users: chmod 600 {shown}")
    if found.st_mode & 0o022:
        raise InvalidRequest(f"{shown} is writable by other users: chmod go-w {shown}")
    if len(text) > FILE_BYTES:
        raise InvalidRequest(f"{shown} exceeds {FILE_BYTES} bytes, the limit for key files")
    return text.decode("utf-8", "replace")


def read_pair(path: str | os.PathLike[str]) -> Pair:
    """InvalidRequest where it is none. Also one that zmq.auth has written."""
    found: dict[str, str] = {}
    for line in read(path, secret=True).splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is not None and KEY.fullmatch(match[2]):
            found[match[1]] = match[2]
    if len(found) < 2:
        raise InvalidRequest(
            f"{os.fspath(path)} is not a key pair: use the file NAME.key written by `shmserve keygen NAME`"
        )
    import zmq

    if zmq.curve_public(found["secret"].encode()).decode() != found["public"]:
        raise InvalidRequest(
            f"the two keys in {os.fspath(path)} do not belong together; create a new pair with shmserve keygen"
        )
    return Pair(found["public"], found["secret"])


def read_public(given: str | os.PathLike[str]) -> str:
    """A public key, which is given itself or as the file that begins with it."""
    text = os.fspath(given)
    if KEY.fullmatch(text):
        return text
    if not os.path.exists(text):
        raise InvalidRequest(f"{text!r} is neither a public key (40 characters) nor a file with one")
    for line in read(given).splitlines():
        word = line.split(None, 1)[0] if line.strip() else ""
        if KEY.fullmatch(word):
            return word
    raise InvalidRequest(f"{text} has no public key: use the file NAME.pub written by `shmserve keygen NAME`")


def check_curve() -> None:
    """Unsupported where there is nothing that could use keys."""
    import zmq

    if not zmq.has("curve"):
        raise Unsupported("this libzmq was built without CURVE; pyzmq's wheels include it: pip install -U pyzmq")


def make_pair() -> Pair:
    """A new one."""
    import zmq

    check_curve()
    while True:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        if public[0].isalnum():  # else it looks like an option, or a comment
            return Pair(public, secret)


def write_pair(folder: Path, name: str, pair: Pair, roles: str) -> tuple[Path, Path]:
    """NAME.key and NAME.pub; neither may be there already (FileExistsError)."""
    key, public = folder / f"{name}.key", folder / f"{name}.pub"
    if public.exists():
        raise FileExistsError(17, "File exists", str(public))
    text = (
        f"# The CURVE keys of {name}. This file is secret: anyone who can read it can impersonate {name}.\n"
        f"public-key = {pair.public}\nsecret-key = {pair.secret}\n"
    )
    _write(key, text, 0o600)
    try:
        _write(public, f"{pair.public} {roles} {name}\n", 0o644)
    except OSError:
        key.unlink()
        raise
    return key, public


def _write(path: Path, text: str, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with open(descriptor, "w") as file:
        file.write(text)
