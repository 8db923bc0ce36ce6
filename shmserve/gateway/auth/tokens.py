"""Bearer tokens and their roles. Invariant: the file has only the SHA-256 of each token. Tokens are long and random, so
no slower hash is needed, and the time of a lookup by hash tells nothing about them.

A line of the file is `NAME ROLE,ROLE SHA256`; empty lines, and those that begin with #, are ignored.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from typing import NamedTuple

from shmserve.gateway.limits.bounded_cache import BoundedCache
from shmserve.protocol.roles import check_caller_roles

FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_CACHED_HEADERS = 1024


class BadTokens(Exception):
    """The file cannot be used."""


class TokenHolder(NamedTuple):
    """`name`: as in the file; not unique, as a name may have several tokens."""

    name: str
    roles: frozenset[str]


class Tokens:
    """The tokens of one version of the file."""

    def __init__(self, text: str) -> None:
        self._holders: dict[bytes, TokenHolder] = {}
        self._cache: BoundedCache[str, TokenHolder] = BoundedCache(_CACHED_HEADERS)
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip() and not line.startswith("#"):
                try:
                    self._add(line.split())
                except ValueError as error:
                    raise BadTokens(f"line {number}: {error}") from None

    def _add(self, words: list[str]) -> None:
        if len(words) != 3:
            raise ValueError("expected NAME ROLE,ROLE SHA256, separated by spaces")
        name, roles, digest = words
        _check(name, roles)
        if not _DIGEST.fullmatch(digest):
            raise ValueError("expected the SHA-256 of the token, 64 digits of 0-9 and a-f, not the token itself")
        key = bytes.fromhex(digest)
        if key in self._holders:
            raise ValueError("the same token is on another line")
        self._holders[key] = TokenHolder(name, frozenset(roles.split(",")))

    def __len__(self) -> int:
        return len(self._holders)

    def grants(self, role: str) -> bool:
        """True if any token has the role."""
        return any(role in holder.roles for holder in self._holders.values())

    def holder(self, authorization: str) -> TokenHolder | None:
        """The holder of the token in the Authorization header, or None if the token is unknown."""
        cached = self._cache.get(authorization)
        if cached is not None:
            return cached
        scheme, _, token = authorization.strip().partition(" ")
        if scheme.lower() != "bearer":
            return None
        holder = self._holders.get(hashlib.sha256(token.strip().encode(errors="replace")).digest())
        if holder is not None:
            self._cache.put(authorization, holder)
        return holder


def _check(name: str, roles: str) -> None:
    """Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError("a name may have up to 64 letters, digits and _ . @ -")
    check_caller_roles(roles)


def new(name: str, roles: str) -> tuple[str, str]:
    """A new token, and its line for the file. Raises ValueError."""
    _check(name, roles)
    token = secrets.token_urlsafe(32)
    return token, f"{name} {roles} {hashlib.sha256(token.encode()).hexdigest()}"


def load(path: str) -> Tokens:
    """Loads the file. It grants roles, so only its owner may have write access."""
    try:
        with open(path, "rb") as file:
            state = os.fstat(file.fileno())
            content = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise BadTokens(error.strerror or str(error)) from error
    if stat.S_ISREG(state.st_mode):
        if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BadTokens("it is writable by other users: chmod go-w")
        if state.st_uid not in (0, os.geteuid()):
            raise BadTokens(f"it is owned by user {state.st_uid}, which is neither root nor the gateway's user")
    if len(content) > FILE_BYTES:
        raise BadTokens(f"it exceeds {FILE_BYTES} bytes")
    try:
        return Tokens(content.decode())
    except UnicodeDecodeError:
        raise BadTokens("it is not UTF-8") from None
