"""Roles: one table from actions to the roles that allow them, used by all listeners and gateways.

Invariant: an action that is not in the table is denied.
"""

from __future__ import annotations

from shmserve.errors import Denied, InvalidRequest, ServeError

INFER, OBSERVE, OPERATE = 1, 2, 4
NOBODY = 0
EVERYTHING = INFER | OBSERVE | OPERATE
ROLES = {"infer": INFER, "observe": OBSERVE, "operate": OPERATE}
"""Names in --access. Roles are bits, so that the check of each request is a single `and`."""

_ANY = EVERYTHING
_LOOK = OBSERVE | OPERATE
_OWN = dict.fromkeys(("hello", "bye", "ping", "pong", "return", "unmap", "cancel", "more"), _ANY)
"""Actions that concern only the connection itself."""
QUESTIONS = {
    "live": _ANY,
    "ready": _ANY,
    "loaded": _ANY,
    "metadata": _ANY,
    "models": _LOOK,
    "config": _LOOK,
    "origins": _LOOK,
    "statistics": _LOOK,
    "metrics": _LOOK,
    "log": _LOOK,
    "trace": _LOOK,
    "load": OPERATE,
    "unload": OPERATE,
    "restart": OPERATE,
    "rollback": OPERATE,
    "set_log": OPERATE,
    "set_trace": OPERATE,
}
"""Ask.what -> roles, any of which is sufficient."""
OPERATIONS = frozenset(("load", "unload", "restart", "rollback", "set_log", "set_trace"))
"""Queries that change something and may have a body."""
ACTIONS = _OWN | {"infer": INFER, "map": INFER, "register": OPERATE} | QUESTIONS
"""All actions of clients. `map`: map the client's own memory by descriptor. `register`: map memory by name, which a
worker opens with the server's rights."""


def allows(action: str, roles: int) -> bool:
    return bool(ACTIONS.get(action, NOBODY) & roles)


def unknown(question: str) -> ServeError:
    return InvalidRequest(f"unknown question '{question}'; known are: {', '.join(QUESTIONS)}")


GIVEN_BY = "--access when the server is started"


def refusal(action: str, roles: int, given_by: str = GIVEN_BY) -> ServeError:
    """The error for a denied action."""
    enough = ACTIONS.get(action, NOBODY)
    return Denied(
        f"'{action}' needs the role {' or '.join(names(enough))}, and this connection has {_have(roles)}; "
        f"roles are given by {given_by}"
    )


def stranger() -> ServeError:
    """The error for a connection without any role."""
    return Denied("this user has no role here; roles are given by --access when the server is started")


def names(roles: int) -> list[str]:
    return [name for name, bit in ROLES.items() if roles & bit]


def roles_of(text: str) -> int:
    """Parses ROLE,ROLE as written in flags and files. Raises ValueError."""
    roles = NOBODY
    for name in text.split(","):
        if name not in ROLES:
            raise ValueError(f"{name[:40]!r} is no role; roles are {', '.join(ROLES)}")
        roles |= ROLES[name]
    return roles


def _have(roles: int) -> str:
    return " and ".join(names(roles)) or "none"
