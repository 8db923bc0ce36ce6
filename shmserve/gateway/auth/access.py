"""Access rules of the HTTP, gRPC and Prometheus endpoints. Invariant: access depends on the action, never on the path
or method of the request, and each of these endpoints checks here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shmserve.errors import Denied
from shmserve.gateway.auth.browsers import BrowserRules
from shmserve.gateway.auth.restricted_apis import Restrictions
from shmserve.gateway.auth.tokens import Tokens
from shmserve.protocol.actions import Action
from shmserve.protocol.roles import PAGE, ROLES

_, OBSERVE, OPERATE = ROLES
OPEN = (Action.LIVE, Action.READY)
"""Actions that need no token, for process monitoring. The response is only yes or no."""
WITHOUT_CREDENTIALS = (Action.PAGE_PREFLIGHT,)
"""Actions for which browsers never send a token and whose responses carry no data. Only the rules for browsers
apply."""
_NO_RESTRICTIONS = Restrictions()
_NO_BROWSER_RULES = BrowserRules()


class Unauthenticated(Denied):
    """A token might allow the request."""

    code = "UNAUTHENTICATED"


def _authorization(header: Callable[[str], str | None]) -> str | None:
    """The credentials of a request. Anthropic's clients send the token alone, in a header of their own."""
    authorization = header("authorization")
    if authorization is None and (key := header("x-api-key")) is not None:
        return f"Bearer {key}"
    return authorization


class EndpointAccess:
    """`roles`: those of clients without a token. With `tokens`, an unknown token is refused even if the endpoint grants
    the role."""

    def __init__(
        self,
        roles: Iterable[str],
        tokens: Tokens | None = None,
        restrictions: Restrictions = _NO_RESTRICTIONS,
        option: str = "--http-roles",
        browsers: BrowserRules = _NO_BROWSER_RULES,
    ) -> None:
        self._roles = frozenset(roles)
        self.tokens = tokens
        self._restrictions = restrictions
        self._option = option
        self.browsers = browsers

    def renew(self, tokens: Tokens | None) -> None:
        """Applies the file of tokens, which was read again."""
        self.tokens = tokens

    def __str__(self) -> str:
        whom = "roles " + " and ".join(sorted(self._roles)) if self._roles else ""
        if self.tokens is None:
            return whom or "no roles"
        return f"{whom + ', ' if whom else ''}tokens: {len(self.tokens)}"

    def roles(self, header: Callable[[str], str | None]) -> frozenset[str]:
        """The roles of a request, including those that its token grants."""
        authorization = _authorization(header)
        if self.tokens is None or authorization is None:
            return self._roles
        holder = self.tokens.holder(authorization)
        return self._roles if holder is None else self._roles | holder.roles

    def check(self, action: Action, header: Callable[[str], str | None]) -> str:
        """Checks access and returns the token's name, or "". `header` takes a header's name in lower case and returns
        its value. Raises the errors that the client receives."""
        roles, needs, tokens, name = self._roles, action.row.roles, self.tokens, ""
        if action in WITHOUT_CREDENTIALS:
            return name
        if action is Action.PAGE_FILE and tokens is not None and tokens.grants(PAGE):
            return name  # browsers cannot attach a token here; the page asks its user for one
        if tokens is not None and action not in OPEN:
            authorization = _authorization(header)
            if authorization is not None:
                holder = tokens.holder(authorization)
                if holder is None:
                    raise Unauthenticated("unknown token; send Authorization: Bearer TOKEN")
                roles = roles | holder.roles
                name = holder.name
            elif not roles.intersection(needs):
                raise Unauthenticated("this request needs a token: Authorization: Bearer TOKEN")
        if not roles.intersection(needs) and not (tokens is not None and action in OPEN):
            why = f"this endpoint does not grant; {self._option} of the gateway sets its roles"
            if roles is not self._roles:
                why = "neither this token nor this endpoint grants"
            raise Denied(f"this request needs the role {' or '.join(needs)}, which {why}")
        if OPERATE in needs and OBSERVE not in needs and header("origin") is not None:
            if tokens is None or _authorization(header) is None:
                raise Denied("requests from web pages (with the header Origin) may not do this without a token")
        refusal = self._restrictions.refusal(action, header)
        if refusal is not None:
            raise Denied(refusal)
        return name
