"""Who has which roles: the one table that every door asks about those who come through it.

The rule of the file: rules are looked up in the machine's lists of users and groups once, at start; what is asked later
is numbers and keys that the kernel, or a handshake, vouches for.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
from collections.abc import Iterable

from msgspec import Struct

from shmserve.access import EVERYTHING, INFER, NOBODY, OBSERVE, ROLES

FORM = "WHO=ROLE,ROLE with WHO one of uid:N, gid:N, user:NAME, group:NAME, key:PUBLIC-KEY, *"
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""A CURVE public key, as it is written."""
_MOST_ID = 2**32 - 2


class Principal(Struct, frozen=True):
    """Who is at the other end. `uid` -1: nobody of this machine, known by the key alone."""

    uid: int = -1
    groups: frozenset[int] = frozenset()
    key: str = ""


class Rule(Struct, frozen=True):
    """`kind` is uid, gid, key or *; `who` the number or the key."""

    kind: str
    who: int | str
    roles: int


class Access:
    """The server's own user and root may do everything, whatever the rules say: the processes are theirs. The members
    of the sockets' group may infer and observe. Others have what rules give them, all of it together."""

    def __init__(self, rules: Iterable[Rule] = (), socket_group: int | None = None) -> None:
        self.socket_group = socket_group
        self._masters = frozenset((0, os.geteuid()))
        self._roles: dict[tuple[str, int | str], int] = {}
        for rule in rules:
            self._add(rule)
        if socket_group is not None:
            self._add(Rule("gid", socket_group, INFER | OBSERVE))

    def _add(self, rule: Rule) -> None:
        place = rule.kind, rule.who
        self._roles[place] = self._roles.get(place, NOBODY) | rule.roles

    @property
    def for_others(self) -> bool:
        """Whether there are rules for users other than those who may do everything anyway."""
        return any(kind != "key" and (kind != "uid" or who not in self._masters) for kind, who in self._roles)

    def roles_of(self, principal: Principal) -> int:
        if principal.uid in self._masters:
            return EVERYTHING
        known = self._roles
        roles = known.get(("*", ""), NOBODY) | known.get(("uid", principal.uid), NOBODY)
        if principal.key:
            roles |= known.get(("key", principal.key), NOBODY)
        for group in principal.groups:
            roles |= known.get(("gid", group), NOBODY)
        return roles


def rule(text: str) -> Rule:
    """A value of --access. Raises ValueError."""
    who, given, roles = text.rpartition("=")
    if not given:
        raise ValueError(f"'{text}' is not {FORM}")
    bits = NOBODY
    for name in roles.split(","):
        if name not in ROLES:
            raise ValueError(f"'{name}' is no role; roles are {', '.join(ROLES)}")
        bits |= ROLES[name]
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
        case "key" if _KEY.fullmatch(name):
            return Rule("key", name, bits)
        case "key":
            raise ValueError(f"'{name}' is not a CURVE public key, which has 40 characters")
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
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) > _MOST_ID:
        raise ValueError(f"'{shown}' has no number of a user or group")
    return int(text)
