"""Roles of local users: the table that the broker's listeners consult for each connection.

Invariant: names of users and groups are resolved once, at startup; later lookups use only the numeric IDs that the
kernel reports. The gateway handles network clients and their keys.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
from collections.abc import Container, Iterable

from msgspec import Struct

from shmserve.protocol.roles import ALL_ROLES, FORWARD, INFER, NO_ROLES, OBSERVE, roles_of

FORM = "WHO=ROLE,ROLE with WHO one of uid:N, gid:N, user:NAME, group:NAME, *"
_MAX_ID = 2**32 - 2


class Principal(Struct, frozen=True):
    """Identity of the process at the other end of a connection."""

    uid: int
    groups: frozenset[int] = frozenset()
    pid: int = 0


class Rule(Struct, frozen=True):
    """`kind` is uid, gid or *; `who` is the numeric ID."""

    kind: str
    who: int | str
    roles: int


class AccessRules:
    """Root and the server's own user always have all roles, as they control the processes anyway. Members of the socket
    group may infer and observe. Other users have the union of the roles of all rules that match them."""

    def __init__(
        self, rules: Iterable[Rule] = (), socket_group: int | None = None, gateways: Container[int] = ()
    ) -> None:
        """`gateways`: pids of the server's own gateways, which name the callers who pay for their requests."""
        self.socket_group = socket_group
        self._gateways = gateways
        self._privileged = frozenset((0, os.geteuid()))
        self._roles: dict[tuple[str, int | str], int] = {}
        for rule in rules:
            self._add(rule)
        if socket_group is not None:
            self._add(Rule("gid", socket_group, INFER | OBSERVE))

    def _add(self, rule: Rule) -> None:
        place = rule.kind, rule.who
        self._roles[place] = self._roles.get(place, NO_ROLES) | rule.roles

    @property
    def for_others(self) -> bool:
        """Whether there are rules for users other than root and the server's own user."""
        return any(kind != "uid" or who not in self._privileged for kind, who in self._roles)

    def roles_of(self, principal: Principal) -> int:
        if principal.uid in self._privileged:
            return ALL_ROLES | FORWARD if principal.pid in self._gateways else ALL_ROLES
        known = self._roles
        roles = known.get(("*", ""), NO_ROLES) | known.get(("uid", principal.uid), NO_ROLES)
        for group in principal.groups:
            roles |= known.get(("gid", group), NO_ROLES)
        return roles


def rule(text: str) -> Rule:
    """Parses a value of --access. Raises ValueError."""
    who, equals, roles = text.rpartition("=")
    if not equals:
        raise ValueError(f"'{text}' is not {FORM}")
    bits = roles_of(roles)
    if who == "*":
        return Rule("*", "", bits)
    kind, _, name = who.partition(":")
    match kind:
        case "uid" | "gid":
            return Rule(kind, _id(name, who), bits)
        case "user":
            return Rule("uid", user_id(name), bits)
        case "group":
            return Rule("gid", group_id(name), bits)
        case "key":
            raise ValueError(f"'{text}': ZeroMQ keys and their roles are set by --zmq-keys of the gateway")
    raise ValueError(f"'{text}' is not {FORM}")


def user_id(name: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        raise ValueError(f"this machine has no user '{name}'") from None


def group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):
        raise ValueError(f"this machine has no group '{name}'") from None


def _id(text: str, shown: str) -> int:
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) > _MAX_ID:
        raise ValueError(f"'{shown}' has no valid user or group ID")
    return int(text)
