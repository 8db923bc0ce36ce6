"""Which caller a request is charged to, if it came through a reverse proxy."""

from __future__ import annotations

import pytest

from shmserve.gateway.limits.caller_shares import PAYERS, ShareBounds, Shares
from shmserve.gateway.limits.proxies import TrustedProxies, named_in, networks_of

PROXIES = TrustedProxies(networks_of("10.0.0.0/8, 192.0.2.7, 2001:db8::/32"))


@pytest.mark.parametrize(
    ("named", "caller"),
    [
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
    ],
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
    shares = Shares(ShareBounds(proxies=PROXIES))
    proxy, other = shares.connect("10.0.0.1"), shares.connect("203.0.113.1")
    assert [proxy.payer("", named).name for named in ("203.0.113.9", "203.0.113.8", "")] == [
        "203.0.113.9",
        "203.0.113.8",
        "10.0.0.1",
    ]
    assert proxy.payer("alice", "203.0.113.9").name == "token alice"
    assert proxy.payer("", "203.0.113.9") is proxy.payer("", "203.0.113.9")
    assert other.payer("", "203.0.113.9").name == "203.0.113.1", "any caller could send the header"
    assert (proxy.address("203.0.113.9"), other.address("203.0.113.9")) == ("203.0.113.9", "203.0.113.1")
    assert shares.ignored == 1
    assert "shmserve_gateway_forwarded_ignored_total 1" in shares.metrics()
    plain = Shares()
    assert plain.connect("10.0.0.1").payer("", "203.0.113.9").name == "10.0.0.1"
    assert plain.ignored == 0, "the header is not expected"


def test_the_callers_of_a_proxy_are_forgotten_when_idle() -> None:
    shares = Shares(ShareBounds(proxies=PROXIES))
    proxy = shares.connect("10.0.0.1")
    busy = proxy.payer("", "203.0.113.9")
    busy.take(0)
    idle = proxy.payer("", "203.0.113.8")
    for number in range(PAYERS):
        proxy.payer("", f"198.51.{number // 200}.{number % 200}")
    assert proxy.payer("", "203.0.113.9") is busy
    assert proxy.payer("", "203.0.113.8") is not idle
