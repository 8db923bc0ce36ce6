"""Rules for requests that a browser sends, possibly on behalf of a page of somebody else.

Any page that a user opens can make the browser send requests to this machine and to machines behind the same firewall.
Two rules keep it from using the server with the user's access:

- DNS rebinding: the name in the page's own address is changed to an address of the server, so that the browser takes
  the server for the page's own. The header Host still has that name. So Host must be localhost, a literal address (an
  address cannot be rebound), or a name that the operator has allowed.
- Cross-site requests: the browser sends, but does not show the answer to the page. So what changes something must come
  from a page of the same origin, whatever its content type.

Invariant: no header that a script of a page can set or leave out turns these rules off.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable

from shmserve.errors import Denied
from shmserve.gateway.auth.actions import CHANGES, PAGE, Action

MARKS = frozenset((b"origin", b"sec-fetch-site", b"referer", b"accept-language"))
"""Headers by which a browser is recognised. To a server without TLS under a name that is not localhost, browsers send
neither Origin nor Sec-Fetch-Site with a GET, and a page can suppress Referer, but not Accept-Language."""
_ANY = "*"
_SHOWN = 80
Header = Callable[[str], "str | None"]


class BrowserRules:
    """`hosts`: names that the operator allows, or "*". `origins`: other origins whose pages may use the endpoint.
    `tls`: whether browsers reach it only by https."""

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = (), tls: bool = False) -> None:
        self._hosts = frozenset(host.strip().lower().rstrip(".") for host in hosts) - {""}
        self._origins = frozenset(origin.strip().lower().rstrip("/") for origin in origins) - {""}
        self._tls = tls

    def check(self, action: Action, header: Header) -> None:
        """`header` returns the value of a header, given its name in lower case. Raises Denied."""
        host = header("host") or ""
        if not (_ANY in self._hosts or self._is_allowed(host)):
            raise Denied(
                f"a browser may not reach this endpoint by the name '{host[:_SHOWN]}'; names are allowed by "
                "--http-allowed-hosts of the gateway"
            )
        if (action in CHANGES or action in PAGE) and self._is_foreign(action, header, host):
            raise Denied("a page of another origin may not do this; --http-allowed-origins of the gateway allows it")

    def _is_allowed(self, host: str) -> bool:
        name = _name(host)
        if name in self._hosts or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_foreign(self, action: Action, header: Header, host: str) -> bool:
        origin = header("origin")
        if origin is None:
            site = header("sec-fetch-site")
            is_link = action is Action.PAGE_FILE and header("sec-fetch-mode") == "navigate"
            return site not in (None, "same-origin", "none") and not is_link
        origin = origin.lower()
        schemes = ("https",) if self._tls else ("https", "http")  # without TLS, a proxy may provide it
        own = [f"{scheme}://{host.strip().lower()}" for scheme in schemes]
        return origin not in own and origin not in self._origins


def _name(host: str) -> str:
    """The name or address in HOST:PORT."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")
