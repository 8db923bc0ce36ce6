"""Who may do what: one table from actions to roles. Every action of every door is looked up here, and nowhere else.

The rule of the file: what is not in the table nobody may do.
"""

from __future__ import annotations

from shmserve.errors import Denied, InvalidRequest, ServeError

INFER, OBSERVE, OPERATE = 1, 2, 4
NOBODY = 0
EVERYTHING = INFER | OBSERVE | OPERATE
ROLES = {"infer": INFER, "observe": OBSERVE, "operate": OPERATE}
"""As they are written in --access. Roles are bits, so that the test on the way of each request is one `and`."""

_ANY = EVERYTHING
_LOOK = OBSERVE | OPERATE
_OWN = dict.fromkeys(("hello", "bye", "ping", "pong", "return", "unmap", "cancel", "more"), _ANY)
"""What only concerns what the connection itself has done."""
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
"""Ask.what -> the roles of which one is enough."""
OPERATIONS = frozenset(("load", "unload", "restart", "rollback", "set_log", "set_trace"))
"""Those that change something, and may have a body."""
ACTIONS = _OWN | {"infer": INFER, "map": INFER, "register": OPERATE} | QUESTIONS
"""The same for all that a client can want. `map`: memory by descriptor, which is the client's own. `register`: memory
by its name, which a worker opens in the server's name."""


def allows(action: str, roles: int) -> bool:
    return bool(ACTIONS.get(action, NOBODY) & roles)


def unknown(question: str) -> ServeError:
    return InvalidRequest(f"unknown question '{question}'; known are: {', '.join(QUESTIONS)}")


GIVEN_BY = "--access when the server is started"


def refusal(action: str, roles: int, given_by: str = GIVEN_BY) -> ServeError:
    """The error for one who may not."""
    enough = ACTIONS.get(action, NOBODY)
    return Denied(
        f"'{action}' needs the role {' or '.join(names(enough))}, and this connection has {_have(roles)}; "
        f"roles are given by {given_by}"
    )


def stranger() -> ServeError:
    """For a connection without any role."""
    return Denied("this user has no role here; roles are given by --access when the server is started")


def names(roles: int) -> list[str]:
    return [name for name, bit in ROLES.items() if roles & bit]


def roles_of(text: str) -> int:
    """ROLE,ROLE as it is written in flags and files. ValueError."""
    roles = NOBODY
    for name in text.split(","):
        if name not in ROLES:
            raise ValueError(f"{name[:40]!r} is no role; roles are {', '.join(ROLES)}")
        roles |= ROLES[name]
    return roles


def _have(roles: int) -> str:
    return " and ".join(names(roles)) or "none"
