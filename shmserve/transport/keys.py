"""CURVE key files, written by `shmserve keygen` and read by clients and the gateway.

    NAME.key    public-key = ...        secret, for NAME only
                secret-key = ...
    NAME.pub    PUBLIC-KEY ROLE,ROLE NAME       for its peers; a client's is a line of the gateway's --zmq-keys

Invariant: a secret key is stored in one file that only its owner can read, and is never part of a message or repr.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from msgspec import Struct

from shmserve.errors import InvalidRequest, Unsupported

KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""A public or secret key in its text form (Z85)."""
FILE_BYTES = 1 << 20
_LINE = re.compile(r"(public|secret)-key\s*=\s*\"?([^\s\"]+)\"?")
COMMENT = "# "
"""The space matters: a key may begin with # but contains no space."""


class Pair(Struct, frozen=True):
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"Pair({self.public})"


class Keys(Struct, frozen=True):
    """The keys that a client needs for a tcp endpoint: its own key pair, and the server's expected public key."""

    server: str
    own: Pair


def read(path: str | os.PathLike[str], secret: bool = False) -> str:
    """The text of a key file. It must not be writable by other users or, if `secret`, readable by them."""
    shown = os.fspath(path)
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidRequest(f"{shown} is not a regular file")
            text = file.read(FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequest(f"cannot read keys from {shown}: {reason}") from error
    if secret and status.st_mode & 0o077:
        raise InvalidRequest(f"{shown} contains a secret key and is readable by other users: chmod 600 {shown}")
    if status.st_mode & 0o022:
        raise InvalidRequest(f"{shown} is writable by other users: chmod go-w {shown}")
    if len(text) > FILE_BYTES:
        raise InvalidRequest(f"{shown} exceeds {FILE_BYTES} bytes, the limit for key files")
    return text.decode("utf-8", "replace")


def read_pair(path: str | os.PathLike[str]) -> Pair:
    """Reads a key pair, also one written by zmq.auth. Raises InvalidRequest if the file is not a pair."""
    keys: dict[str, str] = {}
    for line in read(path, secret=True).splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is not None and KEY.fullmatch(match[2]):
            keys[match[1]] = match[2]
    if len(keys) < 2:
        raise InvalidRequest(
            f"{os.fspath(path)} is not a key pair: use the file NAME.key written by `shmserve keygen NAME`"
        )
    import zmq

    if zmq.curve_public(keys["secret"].encode()).decode() != keys["public"]:
        raise InvalidRequest(
            f"the two keys in {os.fspath(path)} do not match; create a new pair with `shmserve keygen NAME`"
        )
    return Pair(keys["public"], keys["secret"])


def read_public(key: str | os.PathLike[str]) -> str:
    """A public key, given as text or as a file that begins with it."""
    text = os.fspath(key)
    if KEY.fullmatch(text):
        return text
    if not os.path.exists(text):
        raise InvalidRequest(f"{text!r} is neither a public key (40 characters) nor a file with one")
    for line in read(key).splitlines():
        word = line.split(None, 1)[0] if line.strip() else ""
        if KEY.fullmatch(word):
            return word
    raise InvalidRequest(f"{text} has no public key: use the file NAME.pub written by `shmserve keygen NAME`")


def check_curve() -> None:
    """Raises Unsupported if libzmq has no CURVE."""
    import zmq

    if not zmq.has("curve"):
        raise Unsupported("this libzmq was built without CURVE; pyzmq's wheels include it: pip install -U pyzmq")


def make_pair() -> Pair:
    """A new key pair."""
    import zmq

    check_curve()
    while True:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        if public[0].isalnum():  # otherwise it looks like an option or a comment
            return Pair(public, secret)


def write_pair(folder: Path, name: str, pair: Pair, roles: str) -> tuple[Path, Path]:
    """Writes NAME.key and NAME.pub. Raises FileExistsError if either exists."""
    key, public = folder / f"{name}.key", folder / f"{name}.pub"
    if public.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(public))
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
