"""The header of the PROXY protocol, versions 1 and 2, in which a proxy of connections names the client for which it has
opened one. HAProxy's file proxy-protocol.txt defines it.

Only the client's address is used; the proxy's own connections (LOCAL) and other kinds of sockets name none. Extensions
of version 2 (TLVs) are skipped.
"""

from __future__ import annotations

import ipaddress
import re

HEADER_BYTES = 4096
"""Maximum size of a header."""
_TEXT = b"PROXY "
_TEXT_BYTES = 107
"""Maximum size of a header of version 1."""
_BINARY = b"\r\n\r\n\0\r\nQUIT\n"
_FIXED = len(_BINARY) + 4
"""Bytes of a header of version 2 before its addresses."""
_LOCAL, _PROXY = 0x20, 0x21
_UNSPECIFIED, _IPV4, _IPV6, _UNIX = range(4)
"""Families of version 2."""
_ADDRESS_BYTES = {_UNSPECIFIED: 0, _IPV4: 4, _IPV6: 16, _UNIX: 108}
"""Family -> size of an address."""
_PORT_BYTES = {_UNSPECIFIED: 0, _IPV4: 2, _IPV6: 2, _UNIX: 0}
_LINE = re.compile(rb"PROXY (?:UNKNOWN(?: [^\r\n]*)?|TCP([46]) (\S+) (\S+) ([0-9]{1,5}) ([0-9]{1,5}))\r\n")


class BadProxyHeader(Exception):
    """The header is malformed, or its sender may not send one."""


def size_of(start: bytes) -> int:
    """The size of the header with which a connection starts; 0 if it has none. A size above that of `start` is only a
    lower bound: the header, or what distinguishes it from other data, has not arrived as a whole."""
    if start.startswith(_TEXT):
        end = start.find(b"\r\n", 0, _TEXT_BYTES) + 2
        if end >= 2:
            return end
        if len(start) >= _TEXT_BYTES:
            raise BadProxyHeader(f"the first line exceeds {_TEXT_BYTES} bytes")
        return len(start) + 1
    if start.startswith(_BINARY):
        size = _FIXED + int.from_bytes(start[_FIXED - 2 : _FIXED], "big") if len(start) >= _FIXED else _FIXED
        if size > HEADER_BYTES:
            raise BadProxyHeader(f"{size} bytes exceed {HEADER_BYTES}")
        return size
    return len(start) + 1 if _TEXT.startswith(start) or _BINARY.startswith(start) else 0


def client_in(header: bytes) -> str:
    """The client's address; "" if the header names none. `header` is complete."""
    return _client_in_text(header) if header.startswith(_TEXT) else _client_in_binary(header)


def _client_in_text(header: bytes) -> str:
    line = _LINE.fullmatch(header)
    if line is None:
        raise BadProxyHeader("the first line is malformed")
    version, *addresses, from_port, to_port = line.groups()
    if version is None:
        return ""
    parse = ipaddress.IPv4Address if version == b"4" else ipaddress.IPv6Address
    try:
        client, _ = (parse(address.decode("ascii")) for address in addresses)
    except ValueError as error:
        raise BadProxyHeader("an address is malformed") from error
    if max(int(from_port), int(to_port)) > 0xFFFF:
        raise BadProxyHeader("a port exceeds 65535")
    return str(client)


def _client_in_binary(header: bytes) -> str:
    command, family = header[len(_BINARY)], header[len(_BINARY) + 1] >> 4
    if command == _LOCAL:
        return ""
    size = _ADDRESS_BYTES.get(family)
    if command != _PROXY or size is None:
        raise BadProxyHeader(f"command 0x{command:02x} with family {family} is not defined")
    if len(header) < _FIXED + 2 * (size + _PORT_BYTES[family]):
        raise BadProxyHeader(f"{len(header)} bytes are too few for addresses of family {family}")
    client = header[_FIXED : _FIXED + size]
    return str(ipaddress.ip_address(client)) if family in (_IPV4, _IPV6) else ""
