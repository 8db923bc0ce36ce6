"""What pages in browsers can do at the HTTP endpoint: DNS rebinding and cross-site requests, with the headers that
browsers send."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pytest

from shmserve.errors import Denied
from shmserve.gateway.auth.access import EndpointAccess
from shmserve.gateway.auth.actions import CHANGES, PAGE, SHARED
from shmserve.gateway.auth.browsers import SERVERS, BrowserRules, read_servers
from shmserve.gateway.http.heads import HttpHead, parse
from shmserve.gateway.http.routes import API_ROUTES, METRICS, METRICS_ROUTES, PAGE_PATHS, PATHS, QUERY_PATHS
from shmserve.protocol.actions import Action
from shmserve.protocol.roles import CALLER_ROLES
from tests.support.cases import cases

REBOUND = "evil.example:8000"
OWN = "localhost:8000"
TOKENLESS = "load unload set_trace set_log named_repository restart rollback set_traffic set_service record logs"
"""Actions that a page without a token may never perform, whatever its origin."""


def endpoints() -> Iterator[tuple[str, str, Action]]:
    """Method, path and action of all HTTP routes."""
    for path in [*PATHS, *PAGE_PATHS, *QUERY_PATHS, *METRICS]:
        for method, action in path.actions.items():
            yield method, re.sub(r"{version}", "1", re.sub(r"{(?!version)\w+}", "name", path.template)), action


def head_of(
    rules: BrowserRules, method: str, path: str, host: str, *headers: str, roles: Iterable[str] = CALLER_ROLES
) -> HttpHead:
    block = "\r\n".join((f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, "", "")).encode()
    routes = METRICS_ROUTES if path == "/metrics" else API_ROUTES
    return parse(block, routes, EndpointAccess(roles, browsers=rules))


def refusal(rules: BrowserRules, method: str, path: str, host: str, *headers: str) -> str:
    """Why the request is refused, or "". The caller has all roles."""
    found = head_of(rules, method, path, host, *headers).refusal
    assert found is None or isinstance(found, Denied), found
    return "" if found is None else str(found)


RULES = BrowserRules()
BY_NAME = "a browser may not reach this endpoint by the name"
FOREIGN = "a page of another origin may not do this"


@cases(
    ["Accept-Language: en-US,en;q=0.9"],
    ["Accept-Language: *"],
    ["Accept-Language:"],
    ["Referer: http://evil.example:8000/"],
    ["Origin: http://evil.example:8000"],
    ["Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: cors"],
)
def test_dns_rebinding_is_refused(marks: list[str]) -> None:
    """To the browser, the server is the page's own origin: only the name in Host differs."""
    for method, path, action in endpoints():
        assert BY_NAME in refusal(RULES, method, path, REBOUND, *marks), action


def test_any_host_name_is_allowed_for_programs_but_not_for_the_page() -> None:
    for method, path, action in endpoints():
        for marks in ((), ("Accept-Language: *", "Sec-Fetch-Mode: cors", "User-Agent: node")):
            assert bool(refusal(RULES, method, path, "gpu-7.internal:8000", *marks)) == (action in PAGE), action


@cases(
    (
        True,
        "localhost LocalHost:8000 localhost.:8000 page.localhost 127.0.0.1:8000 127.0.0.1. [::1]:8000 [fe80::1] "
        "192.0.2.7 gpu.example:8000 GPU.example.",
    ),
    (
        False,
        "localhost.evil.example 127.0.0.1.evil.example evillocalhost sub.gpu.example gpu.example.evil 0x7f.1 "
        "2130706433 [::1 [::1].evil.example [::1]evil.example:8000 [::1]:evil.example [::1%25evil.example] "
        "127.0.0.1:8000.evil.example [evil.example] localhost.. page.localhost..:8000 127.0.0.1.. gpu.example.. "
        "gpu.example:evil ::1 :8000",
    ),
)
def test_host_names_of_the_page(allowed: bool, hosts: str) -> None:
    rules = BrowserRules(["other.example", " gpu.example ", ""])
    for host in hosts.split() if allowed else ["", *hosts.split()]:
        assert bool(refusal(rules, "GET", "/", host)) != allowed, host
        assert refusal(BrowserRules(["*"]), "GET", "/", host) == ""


OWN_ORIGINS = [
    "Origin: http://localhost:8000",
    "Origin: http://LOCALHOST:8000",
    "Origin: https://localhost:8000",
    "Sec-Fetch-Site: same-origin",
    "Sec-Fetch-Site: none",
]
FOREIGN_ORIGINS = [
    "Origin: http://localhost:3000", "Origin: http://localhost:80000", "Origin: http://127.0.0.1:8000",
    "Origin: http://evil.example", "Origin: http://localhost:8000.evil.example", "Origin: null", "Origin: ",
    "Origin: http://[::1", "Origin: http://localhost:8000\r\nOrigin: http://evil.example",
    "Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: same-site", "Sec-Fetch-Site: something-new",
]  # fmt: skip


@pytest.mark.parametrize("origin", [*OWN_ORIGINS, *FOREIGN_ORIGINS])
@pytest.mark.parametrize("kind", ["", "application/json", "text/plain", "multipart/form-data; boundary=x"])
def test_changes_come_from_the_same_origin(origin: str, kind: str) -> None:
    more = [f"Content-Type: {kind}"] if kind else []
    for method, path, action in endpoints():
        found = refusal(RULES, method, path, OWN, origin, *more)
        if origin in FOREIGN_ORIGINS and (action in CHANGES or action in PAGE):
            assert FOREIGN in found, action
        elif action in TOKENLESS.split() or action.startswith("memory"):
            assert FOREIGN not in found, action
            assert ("without a token" in found) == origin.startswith("Origin"), action
        else:
            assert found == "", action


def test_every_post_is_a_change_or_an_index_query() -> None:
    posted = {action for method, _, action in endpoints() if method == "POST"}
    assert posted == CHANGES | {Action.MODELS}


def test_a_link_on_another_site_opens_the_page() -> None:
    link = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document")
    assert refusal(RULES, "GET", "/", OWN, *link) == ""
    for path in ("/page/events", "/page/model/m"):
        assert FOREIGN in refusal(RULES, "GET", path, OWN, *link)


def test_with_tls_only_https_pages_have_the_same_origin() -> None:
    rules = BrowserRules(tls=True)
    assert FOREIGN in refusal(rules, "POST", "/v2/models/m/infer", OWN, "Origin: http://localhost:8000")
    assert refusal(rules, "POST", "/v2/models/m/infer", OWN, "Origin: https://localhost:8000") == ""


def test_other_origins_that_are_allowed() -> None:
    rules = BrowserRules(["gpu.example"], ["https://ui.example/", "http://localhost:3000"])
    path = "/v2/models/m/infer"
    for origin in ("https://ui.example", "https://UI.example", "http://localhost:3000", "http://gpu.example"):
        assert refusal(rules, "POST", path, "gpu.example", f"Origin: {origin}", "Sec-Fetch-Site: cross-site") == ""
    for origin in ("http://ui.example", "https://ui.example:444", "https://evil.example", "http://gpu.example:1"):
        assert FOREIGN in refusal(rules, "POST", path, "gpu.example", f"Origin: {origin}")
    assert BY_NAME in refusal(rules, "POST", path, "ui.example", "Origin: https://ui.example")


FLEET = BrowserRules(servers=("http://gpu1:8000", "https://gpu2.example"))


def test_pages_of_listed_servers_read_the_event_stream_and_nothing_else() -> None:
    for origin in ("http://gpu1:8000", "https://gpu2.example", "https://GPU2.example"):
        for method, path, action in endpoints():
            head = head_of(FLEET, method, path, OWN, f"Origin: {origin}", "Sec-Fetch-Site: cross-site")
            if action in SHARED:
                assert (head.refusal, head.reader) == (None, origin.lower())
            else:
                assert head.reader == "", action
                assert (FOREIGN in str(head.refusal)) == (action in CHANGES | PAGE), action


UNLISTED_ORIGINS = (
    "http://gpu1|https://gpu1:8000|http://gpu1:80000|http://gpu1:8001|http://gpu2.example|null||"
    "http://gpu1:8000.evil.example|http://evil.example|http://gpu1:8000, http://gpu1:8000"
)


@cases(*UNLISTED_ORIGINS.split("|"))
def test_pages_of_unlisted_servers_cannot_read_the_event_stream(origin: str) -> None:
    for method in ("GET", "OPTIONS"):
        head = head_of(FLEET, method, "/page/events", OWN, f"Origin: {origin}")
        assert FOREIGN in str(head.refusal)
        assert head.reader == ""


def test_a_page_of_a_listed_server_can_read_the_reason_of_a_refusal() -> None:
    """Without Access-Control-Allow-Origin, it could not distinguish a missing token from a server that is down."""
    origin = "Origin: http://gpu1:8000"
    head = head_of(FLEET, "GET", "/page/events", OWN, origin, roles=["infer"])
    assert "needs the role page" in str(head.refusal)
    assert head.reader == "http://gpu1:8000"
    assert head_of(FLEET, "OPTIONS", "/page/events", OWN, origin, roles=[]).refusal is None


def test_a_list_of_servers() -> None:
    text = " http://GPU1:8000/, https://gpu2.example:443,http://192.0.2.7:80 ,,http://gpu1:8000,http://localhost:1"
    expected = ("http://gpu1:8000", "https://gpu2.example", "http://192.0.2.7", "http://localhost:1")
    assert read_servers(text) == expected
    assert read_servers("") == ()
    many = [f"http://gpu{number}" for number in range(SERVERS + 1)]
    assert len(read_servers(",".join(many[1:]))) == SERVERS
    with pytest.raises(ValueError, match="65 servers"):
        read_servers(",".join(many))
    for host, allowed in (("gpu1:8000", True), ("gpu2.example", True), ("gpu3:8000", False)):
        assert (refusal(FLEET, "GET", "/", host) == "") == allowed


INVALID_SERVERS = (
    "gpu1:8000|ftp://gpu1|http://|http://gpu1/page|http://user@gpu1|http://gpu1:|http://gpu1:0|"
    "http://gpu1:65536|http://[::1]:8000|http://*|http://*.example|http://gpu_1|http://gpu1; *|http://gpu1 *|"
    "http://gpu1?x|http://gpu1#x|http://.gpu1|'self'"
)


@cases(*INVALID_SERVERS.split("|"), "http://gpu1\r\nX: y", "http://gpu\N{CYRILLIC SMALL LETTER A}")
def test_invalid_servers_are_refused(text: str) -> None:
    """Text that would change the meaning of a content security policy, or would never match."""
    with pytest.raises(ValueError, match=r"http://NAME:PORT|has the port"):
        read_servers(f"http://gpu0:8000,{text}")
