"""Reverse proxies whose word about the addresses of their callers is taken.

Any caller can send X-Forwarded-For or Forwarded, so these headers count only on connections from `--trusted-proxies`. A
proxy appends the address from which it got the request, so the caller is the last address that is no trusted proxy.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable

HEADERS = ("x-forwarded-for", "forwarded")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def networks_of(text: str) -> tuple[Network, ...]:
    """Parses `10.0.0.0/8,192.0.2.7`. Raises ValueError."""
    return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip())


def named_in(header: Callable[[str], str | None]) -> str:
    """What the request says about its callers; "" if nothing."""
    return header(HEADERS[0]) or header(HEADERS[1]) or ""


class TrustedProxies:
    """The proxies in these networks."""

    def __init__(self, networks: Iterable[Network] = ()) -> None:
        self._networks = tuple(networks)

    def __bool__(self) -> bool:
        return bool(self._networks)

    def trusts(self, address: str) -> bool:
        parsed = parsed_address(address)
        return parsed is not None and self._contains(parsed)

    def caller(self, named: str) -> str:
        """The address of the caller, from the value of a header; "" if it names none."""
        client = ""
        for part in reversed(named.split(",")):
            address = parsed_address(_address_in(part))
            if address is None:
                break
            client = str(address)
            if not self._contains(address):
                break
        return client

    def _contains(self, address: Address) -> bool:
        return any(address in network for network in self._networks)


def _address_in(part: str) -> str:
    """The address in an element of X-Forwarded-For or Forwarded, without its port."""
    for pair in part.split(";"):
        name, equals, value = pair.strip().partition("=")
        text = (value if equals else name).strip().strip('"')
        if equals and name.lower() != "for":
            continue
        if text.startswith("["):
            return text[1:].partition("]")[0]
        return text.partition(":")[0] if text.count(":") == 1 else text
    return ""


def is_local(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parsed_address(text: str) -> Address | None:
    """The address; an IPv4 one if an IPv6 address maps it, None if the text is not an address."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
