"""Roles of clients, and the roles that allow each action of the protocol. The HTTP and gRPC endpoints have other
actions and their own table in `gateway.auth.access`.

Invariant: an action that is not in the table is denied.
"""

from __future__ import annotations

from typing import Any

from shmserve.errors import Denied, InvalidRequest, ServeError

INFER, OBSERVE, OPERATE = 1, 2, 4
NO_ROLES = 0
ALL_ROLES = INFER | OBSERVE | OPERATE
ROLES = {"infer": INFER, "observe": OBSERVE, "operate": OPERATE}
"""Names as in --access. A set of roles is an int with one bit for each."""

PAGE = "page"
"""A role of HTTP callers only, which the broker does not know: access to the web page and its data."""
CALLER_ROLES = (*ROLES, PAGE)
"""Roles of the callers of a gateway."""

_ANY = ALL_ROLES
_READ = OBSERVE | OPERATE
_OWN = dict.fromkeys(("hello", "bye", "ping", "pong", "return", "unmap", "cancel", "more"), _ANY)
"""Messages that affect only the client's own connection and requests; they need any role."""
_OPERATIONS = dict.fromkeys(
    ("load", "unload", "restart", "rollback", "set_log", "set_trace", "set_traffic", "set_service", "record"),
    OPERATE,
)
QUERIES = {
    "live": _ANY,
    "ready": _ANY,
    "loaded": _ANY,
    "metadata": _ANY,
    "models": _READ,
    "config": _READ,
    "origins": _READ,
    "statistics": _READ,
    "metrics": _READ,
    "activity": _READ,
    "report": _READ,
    "log": _READ,
    "trace": _READ,
    "traffic": _READ,
    "text_models": _READ,
    "service": _READ,
    "logs": OPERATE,
    **_OPERATIONS,
}
"""Value of `Ask.what`, for queries and operations -> the roles, any of which is sufficient."""
OPERATIONS = frozenset(_OPERATIONS)
"""The values of `Ask.what` that change something and may have a body."""
ACTIONS = _OWN | {"infer": INFER, "map": INFER, "register": OPERATE} | QUERIES
"""All actions of clients -> the roles, any of which is sufficient. `map` announces memory by descriptor, which proves
that the client may use it; `register` announces memory by name, which a worker opens with the server's rights."""


def allows(action: str, roles: int) -> bool:
    return bool(ACTIONS.get(action, NO_ROLES) & roles)


def unknown(question: str) -> ServeError:
    return InvalidRequest(f"unknown query '{question}'; known queries: {', '.join(QUERIES)}")


GIVEN_BY = "--access when the server is started"


def refusal(action: str, roles: int, given_by: str = GIVEN_BY) -> ServeError:
    """The error for a denied action."""
    enough = ACTIONS.get(action, NO_ROLES)
    return Denied(
        f"'{action}' needs the role {' or '.join(names(enough))}, but this connection has {_have(roles)}; roles are "
        f"granted by {given_by}"
    )


def stranger() -> ServeError:
    """The error for a connection without any role."""
    return Denied("this user has no role; roles are granted by --access when the server is started")


def names(roles: int) -> list[str]:
    return [name for name, bit in ROLES.items() if roles & bit]


def roles_of(text: str) -> int:
    """Parses a list such as `infer,observe`. Raises ValueError."""
    roles = NO_ROLES
    for name in text.split(","):
        if name not in ROLES:
            raise ValueError(f"{name[:40]!r} is not a role; roles are {', '.join(ROLES)}")
        roles |= ROLES[name]
    return roles


def check_caller_roles(text: str) -> None:
    """Checks a list such as `infer,page`. Raises ValueError."""
    for name in text.split(","):
        if name not in CALLER_ROLES:
            raise ValueError(f"{name[:40]!r} is not a role; roles are {', '.join(CALLER_ROLES)}")


def remove_private(what: str, answer: Any) -> None:
    """Removes the fields that only the role operate may see from the answer to the query `what`.

    Models' output may contain data of any user's requests. Users are named only to those who manage them.
    """
    if what == "models":
        for entry in answer:
            for instance in entry.get("instances", ()):
                instance["last_words"] = []
    elif what == "report":
        for error in answer["errors"]:
            error["text"] = ""
    elif what == "activity":
        for client in answer["clients"]:
            client["user"] = ""


def _have(roles: int) -> str:
    return " and ".join(names(roles)) or "none"
