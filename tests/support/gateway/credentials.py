"""Endpoints with access control, and their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from shmserve.gateway.auth import tokens
from shmserve.gateway.auth.access import EndpointAccess
from shmserve.protocol.roles import ROLES


def nothing(name: str) -> None:
    return None


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def with_token(roles: Iterable[str] = ROLES, token: str = "t", role: str = "infer") -> EndpointAccess:
    """An endpoint that grants `roles` without a token, and `role` to a token."""
    return EndpointAccess(roles, tokens.Tokens(f"a {role} {digest(token)}"))
