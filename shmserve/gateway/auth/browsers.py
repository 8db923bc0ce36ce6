"""Rules for requests that a browser sends, possibly on behalf of a foreign page.

Any page that a user opens can make the browser send requests to this machine and to machines behind the same firewall.
Two rules keep it from using the server with the user's access:

- DNS rebinding: an attacker points the host name of a page at the server's address, so that the browser treats the
  server as the page's own origin. The Host header still has that name. Therefore Host must be localhost, a literal
  address (an address cannot be rebound), or a name that the operator has allowed.
- Cross-site requests: the browser sends the request but hides the response from the page. Therefore a request that
  changes something must come from a page of the same origin, whatever its content type.

The web page of one server can show the state of other servers. The pages of servers that the operator lists
(`--page-servers`) may read the page's event stream (CORS), and nothing else.

Invariant: no header that a script of a page can set or leave out turns these rules off.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence

from shmserve.errors import Denied
from shmserve.gateway.auth.actions import CHANGES, PAGE, SHARED
from shmserve.protocol.actions import Action

BROWSER_HEADERS = frozenset((b"origin", b"sec-fetch-site", b"referer", b"accept-language"))
"""Headers that identify a browser. With a GET to a server without TLS that is not named localhost, browsers send
neither Origin nor Sec-Fetch-Site. A page can suppress Referer, but not Accept-Language."""
SERVERS = 64
"""Maximum number of servers in one list."""
_SERVER = re.compile(r"(https?)://([a-z0-9-]+(?:\.[a-z0-9-]+)*)(?::([0-9]{1,5}))?/?", re.ASCII)
_DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:%]*[^\[\]:%.])\.?)(?::[0-9]*)?")
_ANY = "*"
_SHOWN = 80
Header = Callable[[str], "str | None"]


def read_servers(text: str) -> tuple[str, ...]:
    """The origins of servers, from a list of URLs. Raises ValueError. Invariant: an origin has no character that ends a
    source in a content security policy, nor a port that browsers leave out."""
    origins: dict[str, None] = {}
    for url in filter(None, map(str.strip, text.split(","))):
        match = _SERVER.fullmatch(url.lower())
        if match is None:
            raise ValueError(
                f"{url[:_SHOWN]!r} is not http://NAME:PORT or https://NAME:PORT; a content security policy cannot name "
                "IPv6 addresses, nor names with '_'"
            )
        scheme, name, port = match.groups()
        number = int(port or _DEFAULT_PORTS[scheme])
        if not 0 < number < 65536:
            raise ValueError(f"{url[:_SHOWN]!r} has the port {number}, which is not one from 1 to 65535")
        origins[f"{scheme}://{name}" + (f":{number}" if number != _DEFAULT_PORTS[scheme] else "")] = None
    if len(origins) > SERVERS:
        raise ValueError(f"{len(origins)} servers, expected at most {SERVERS}")
    return tuple(origins)


class BrowserRules:
    """`hosts`: names that the operator allows, or "*". `origins`: other origins whose pages may use the endpoint.
    `tls`: browsers reach the endpoint only over https. `servers`: origins of the servers that show each other's state.
    Their names are allowed in Host, since the list may include this server."""

    def __init__(
        self, hosts: Iterable[str] = (), origins: Iterable[str] = (), tls: bool = False, servers: Sequence[str] = ()
    ) -> None:
        names = [*hosts, *(_name(server.partition("://")[2]) for server in servers)]
        self.servers = servers
        self._hosts = frozenset(name.strip().lower().rstrip(".") for name in names) - {""}
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

    def reader(self, action: Action, header: Header) -> str:
        """The origin of another server whose page may read the response; "" if there is none."""
        origin = (header("origin") or "").lower()
        return origin if action in SHARED and origin in self.servers else ""

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
        if self.reader(action, header):
            return False
        origin = origin.lower()
        schemes = ("https",) if self._tls else ("https", "http")  # without TLS, a proxy may provide it
        own = [f"{scheme}://{host.strip().lower()}" for scheme in schemes]
        return origin not in own and origin not in self._origins


def _name(host: str) -> str:
    """The name or address in HOST:PORT; "" if `host` has another form. One dot may end the name, which marks it as
    absolute. For "localhost..", a browser would ask a resolver."""
    match = _HOST.fullmatch(host.strip().lower())
    return "" if match is None else match[1] or match[2]
