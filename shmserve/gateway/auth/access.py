"""Who may do what at a door. The rule of the file: it is decided by what is wanted, never by the path or the method
that leads there, and every door asks here; what is not in the table nobody may do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shmserve.errors import Denied
from shmserve.gateway.auth.restricted_apis import Restrictions
from shmserve.gateway.auth.tokens import Tokens
from shmserve.protocol.roles import ROLES

INFER, OBSERVE, OPERATE = ROLES
_ANY = tuple(ROLES)
NEEDS = {
    "live": _ANY,
    "ready": _ANY,
    "model_ready": _ANY,
    "metadata": _ANY,
    "model_metadata": _ANY,
    "config": (OBSERVE, OPERATE),
    "statistics": (OBSERVE, OPERATE),
    "index": (OBSERVE, OPERATE),
    "metrics": (OBSERVE, OPERATE),
    "infer": (INFER,),
    "generate": (INFER,),
    "generate_stream": (INFER,),
    "load": (OPERATE,),
    "unload": (OPERATE,),
    "trace": (OBSERVE, OPERATE),
    "set_trace": (OPERATE,),
    "log": (OBSERVE, OPERATE),
    "set_log": (OPERATE,),
    "memory_status": (INFER, OPERATE),
    "memory_register": (INFER, OPERATE),
    "memory_unregister": (INFER, OPERATE),
    "named_repository": (OPERATE,),
    "openapi": _ANY,
}
"""What is wanted -> the roles of which the door has to give one. What is not here nobody gets."""
OPEN = ("live", "ready")
"""Whoever watches over the process may ask this without a token: it says yes or no, and nothing else."""
_NOBODY = ("of nobody",)
_NO_RESTRICTIONS = Restrictions()


class Unauthenticated(Denied):
    """With a token it might be another thing."""

    code = "UNAUTHENTICATED"


class Access:
    """`roles`: of callers without a token. Where there are `tokens`, one that is not among them is refused, whatever
    the door gives."""

    def __init__(
        self, roles: Iterable[str], tokens: Tokens | None = None, restrictions: Restrictions = _NO_RESTRICTIONS,
        knob: str = "--http-roles",
    ) -> None:  # fmt: skip
        self._roles = frozenset(roles)
        self.tokens = tokens
        """Set anew when their file has been read again."""
        self._restrictions = restrictions
        self._knob = knob

    def __str__(self) -> str:
        whom = "roles " + " and ".join(sorted(self._roles)) if self._roles else ""
        if self.tokens is None:
            return whom or "no roles"
        return f"{whom + ', ' if whom else ''}tokens: {len(self.tokens)}"

    def check(self, action: str, header: Callable[[str], str | None]) -> str:
        """`header` gives the value of a header, whose name is in lower case. Raises what the caller is told; returns
        the name of the token that came, or ""."""
        roles, needs, tokens, name = self._roles, NEEDS.get(action, _NOBODY), self.tokens, ""
        if tokens is not None and action not in OPEN:
            given = header("authorization")
            if given is not None:
                found = tokens.holder(given)
                if found is None:
                    raise Unauthenticated("unknown token; send Authorization: Bearer TOKEN")
                roles = roles | found.roles
                name = found.name
            elif not roles.intersection(needs):
                raise Unauthenticated("this request needs a token: Authorization: Bearer TOKEN")
        if not roles.intersection(needs) and not (tokens is not None and action in OPEN):
            whose = f"this endpoint does not grant; {self._knob} of the gateway sets its roles"
            if roles is not self._roles:
                whose = "neither this token nor this endpoint grants"
            raise Denied(f"this request needs the role {' or '.join(needs)}, which {whose}")
        if OPERATE in needs and OBSERVE not in needs and header("origin") is not None:
            if tokens is None or header("authorization") is None:
                raise Denied("requests from web pages (with the header Origin) may not do this without a token")
        refusal = self._restrictions.refusal(action, header)
        if refusal is not None:
            raise Denied(refusal)
        return name
