"""Roles of clients, and the roles that allow each message, query and operation of the protocol.

Invariant: an action that is not in a table is denied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shmserve.errors import Denied, InvalidRequest, ServeError
from shmserve.protocol.actions import Action

INFER, OBSERVE, OPERATE = 1, 2, 4
FORWARD = 8
"""The right of the server's gateways to name the callers who pay for requests. Not a role: no user can have it."""
NO_ROLES = 0
ALL_ROLES = INFER | OBSERVE | OPERATE
ROLES = {"infer": INFER, "observe": OBSERVE, "operate": OPERATE}
"""Names as in --access. A set of roles is an int with one bit for each."""

PAGE = "page"
"""A role of HTTP callers only, which the broker does not know: access to the web page and its data."""
CALLER_ROLES = (*ROLES, PAGE)
"""Roles of the callers of a gateway."""

_OWN = dict.fromkeys(("hello", "bye", "ping", "pong", "return", "unmap", "cancel", "more"), ALL_ROLES)
"""Messages that affect only the client's own connection and requests; they need any role."""
_QUERY_ROWS = [action.row for action in Action if action and action.row.query == action]
QUERIES = {row.query: sum(ROLES[role] for role in row.roles) for row in _QUERY_ROWS}
"""Value of `Ask.what`, for queries and operations -> the roles, any of which is sufficient."""
OPERATIONS = frozenset(row.query for row in _QUERY_ROWS if row.changes)
"""The values of `Ask.what` that change something and may have a body."""
ACTIONS = _OWN | {"infer": INFER, "map": INFER, "register": OPERATE} | QUERIES
"""All actions of clients -> the roles, any of which is sufficient. `map` announces memory by descriptor, which proves
that the client may use it; `register` announces memory by name, which a worker opens with the server's rights."""


def allows(action: str, roles: int) -> bool:
    return bool(ACTIONS.get(action, NO_ROLES) & roles)


def unknown(question: str) -> ServeError:
    return InvalidRequest(f"unknown query '{question}'; known queries: {', '.join(QUERIES)}")


GIVEN_BY = "--access when the server is started"
"""What grants roles to connections of the broker, unless the refusal names another source."""


def refusal(action: str, roles: int, source: str = GIVEN_BY) -> ServeError:
    """The error for a denied action."""
    enough, granted = ACTIONS.get(action, NO_ROLES), " and ".join(names(roles)) or "none"
    return Denied(
        f"'{action}' needs the role {' or '.join(names(enough))}, but this connection has {granted}; roles are "
        f"granted by {source}"
    )


def no_role() -> ServeError:
    """The error for a connection without any role."""
    return Denied(f"this user has no role; roles are granted by {GIVEN_BY}")


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


def is_operator(roles: Iterable[str]) -> bool:
    """Whether names of roles, as in a token, include the role operate."""
    return any(ROLES.get(role) == OPERATE for role in roles)


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
        for journey in answer["slow"] + answer["failed"]:
            for one in (journey, *journey["steps"]):
                one["text"] = one["id"] = ""
    elif what == "activity":
        for client in answer["clients"]:
            client["user"] = ""
