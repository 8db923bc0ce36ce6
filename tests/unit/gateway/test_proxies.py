"""Which caller a request is charged to, if it came through a reverse proxy; and the headers of the PROXY
protocol."""

from __future__ import annotations

import ipaddress
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.gateway.limits.caller_shares import PAYERS, CallerShares, ShareBounds
from shmserve.gateway.limits.proxies import TrustedProxies, named_in, networks_of
from shmserve.gateway.listeners.proxy_header import HEADER_BYTES, BadProxyHeader, client_in, size_of
from tests.support.cases import cases
from tests.support.hypothesis_profiles import examples

PROXIES = TrustedProxies(networks_of("10.0.0.0/8, 192.0.2.7, 2001:db8::/32"))


@cases(
    ("203.0.113.9", "203.0.113.9"),
    ("203.0.113.9:41000", "203.0.113.9"),
    ("1.2.3.4, 203.0.113.9", "203.0.113.9"),
    ("203.0.113.9, 10.1.2.3, 192.0.2.7", "203.0.113.9"),
    ("10.1.2.3", "10.1.2.3"),
    ("203.0.113.9, nonsense, 10.1.2.3", "10.1.2.3"),
    ("unknown", ""),
    ("", ""),
    ("2001:0:0::5", "2001::5"),
    ("[2001:0:0::5]:443", "2001::5"),
    ("::ffff:203.0.113.9", "203.0.113.9"),
    ('for=1.2.3.4, For="[2001:0:0::5]:443";proto=https;by=10.0.0.1', "2001::5"),
    ("proto=https", ""),
)
def test_the_caller_is_the_last_address_that_is_no_trusted_proxy(named: str, caller: str) -> None:
    assert PROXIES.caller(named) == caller


def test_either_header_names_the_caller() -> None:
    assert named_in({"x-forwarded-for": "1.2.3.4", "forwarded": "for=5.6.7.8"}.get) == "1.2.3.4"
    assert named_in({"forwarded": "for=5.6.7.8"}.get) == "for=5.6.7.8"
    nothing: dict[str, str] = {}
    assert named_in(nothing.get) == ""
    with pytest.raises(ValueError, match="ten"):
        networks_of("10.0.0.0/ten")


def test_only_a_trusted_proxy_names_callers() -> None:
    shares = CallerShares(ShareBounds(proxies=PROXIES))
    proxy, other = shares.connect("10.0.0.1"), shares.connect("203.0.113.1")
    for named, name in (("203.0.113.9", "203.0.113.9"), ("203.0.113.8", "203.0.113.8"), ("", "10.0.0.1")):
        assert proxy.payer("", named).name == name
    assert proxy.payer("alice", "203.0.113.9").name == "token alice"
    assert proxy.payer("", "203.0.113.9") is proxy.payer("", "203.0.113.9")
    assert other.payer("", "203.0.113.9").name == "203.0.113.1", "any caller could send the header"
    assert (proxy.address("203.0.113.9"), other.address("203.0.113.9")) == ("203.0.113.9", "203.0.113.1")
    assert shares.ignored == 1
    assert "shmserve_gateway_forwarded_ignored_total 1" in shares.metrics()
    plain = CallerShares()
    assert plain.connect("10.0.0.1").payer("", "203.0.113.9").name == "10.0.0.1"
    assert plain.ignored == 0, "the header is not expected"


def test_the_callers_of_a_proxy_are_forgotten_when_idle() -> None:
    shares = CallerShares(ShareBounds(proxies=PROXIES))
    proxy = shares.connect("10.0.0.1")
    busy = proxy.payer("", "203.0.113.9")
    busy.take(0)
    idle = proxy.payer("", "203.0.113.8")
    for number in range(PAYERS):
        proxy.payer("", f"198.51.{number // 200}.{number % 200}")
    assert proxy.payer("", "203.0.113.9") is busy
    assert proxy.payer("", "203.0.113.8") is not idle


SIGNATURE = bytes.fromhex("0d0a0d0a000d0a515549540a")
V4, V6 = socket.inet_aton("203.0.113.9"), socket.inet_pton(socket.AF_INET6, "2001:db8::9")
PORTS = struct.pack("!HH", 41000, 8000)
TLV = b"\x05\x00\x03abc"


def binary(command: int, family: int, rest: bytes) -> bytes:
    return SIGNATURE + struct.pack("!BBH", command, family, len(rest)) + rest


GOOD = {
    b"PROXY TCP4 203.0.113.9 10.0.0.1 41000 8000\r\n": "203.0.113.9",
    b"PROXY TCP6 2001:db8:0::9 ::1 41000 65535\r\n": "2001:db8::9",
    b"PROXY TCP6 ::ffff:203.0.113.9 ::1 1 2\r\n": "::ffff:cb00:7109",
    b"PROXY UNKNOWN\r\n": "",
    b"PROXY UNKNOWN ffff::1 ffff::2 65535 65535\r\n": "",
    binary(0x21, 0x11, V4 + V4 + PORTS): "203.0.113.9",
    binary(0x21, 0x12, V4 + V4 + PORTS): "203.0.113.9",
    binary(0x21, 0x11, V4 + V4 + PORTS + TLV): "203.0.113.9",
    binary(0x21, 0x11, V4 + V4 + PORTS + bytes(HEADER_BYTES - 28)): "203.0.113.9",
    binary(0x21, 0x21, V6 + V6 + PORTS): "2001:db8::9",
    binary(0x21, 0x31, b"/run/client".ljust(108, b"\0") + bytes(108)): "",
    binary(0x21, 0x00, b""): "",
    binary(0x20, 0x11, V4 + V4 + PORTS): "",
    binary(0x20, 0x00, TLV): "",
}
"""Header -> the client that it names."""

MALFORMED = [
    b"PROXY TCP4 2001:db8::9 ::1 41000 8000\r\n",
    b"PROXY TCP6 203.0.113.9 10.0.0.1 41000 8000\r\n",
    b"PROXY TCP4 203.0.113.9 10.0.0.1 65536 8000\r\n",
    b"PROXY TCP4 203.0.113.9 10.0.0.1 41000\r\n",
    b"PROXY TCP4 203.0.113.009 10.0.0.1 41000 8000\r\n",
    b"PROXY TCP4  203.0.113.9 10.0.0.1 41000 8000\r\n",
    b"PROXY TCP5 203.0.113.9 10.0.0.1 41000 8000\r\n",
    b"PROXY \xff\xfe\r\n",
    b"PROXY UNKNOWN " + b"x" * 93,
    binary(0x11, 0x11, V4 + V4 + PORTS),
    binary(0x22, 0x11, V4 + V4 + PORTS),
    binary(0x21, 0x41, V6 + V6 + PORTS),
    binary(0x21, 0x11, V4 + V4 + PORTS[:3]),
    binary(0x21, 0x21, V4 + V4 + PORTS),
    binary(0x21, 0x11, bytes(HEADER_BYTES - 15)),
]


def client_of(start: bytes) -> str:
    size = size_of(start)
    assert 0 < size <= len(start)
    return client_in(start[:size])


@pytest.mark.parametrize(("header", "client"), GOOD.items())
@pytest.mark.parametrize("after", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"])
def test_a_header_ends_where_it_says_and_names_the_client(header: bytes, client: str, after: bytes) -> None:
    assert size_of(header + after) == len(header)
    assert client_in(header) == client
    for end in range(len(header)):
        assert end < size_of(header[:end]) <= len(header), "it is incomplete"


@pytest.mark.parametrize("header", MALFORMED)
def test_a_malformed_header_is_refused(header: bytes) -> None:
    with pytest.raises(BadProxyHeader):
        client_of(header)


@pytest.mark.parametrize(
    "start", [b"POST / HTTP/1.1", b"PRI * HTTP/2.0\r\n", b"\x16\x03\x01", b"\r\n\r\nGET", b"proxy "]
)
def test_other_data_is_no_header(start: bytes) -> None:
    assert size_of(start) == 0


@given(st.sampled_from([b"", b"PROXY ", b"PROXY TCP4 ", SIGNATURE, SIGNATURE + b"\x21"]), st.binary(max_size=300))
@settings(max_examples=examples(60))
def test_any_bytes_are_a_header_or_refused_or_something_else(start: bytes, rest: bytes) -> None:
    data = start + rest
    try:
        size = size_of(data)
        assert size <= HEADER_BYTES
        if 0 < size <= len(data):
            ipaddress.ip_address(client_in(data[:size]) or "::")
    except BadProxyHeader:
        assert start
