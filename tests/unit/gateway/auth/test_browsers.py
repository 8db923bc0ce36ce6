"""What pages in browsers can do at the HTTP endpoint: DNS rebinding and cross-site requests, with the headers that
browsers send."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from shmserve.errors import Denied
from shmserve.gateway.auth.access import EndpointAccess
from shmserve.gateway.auth.actions import CHANGES, PAGE, Action
from shmserve.gateway.auth.browsers import BrowserRules
from shmserve.gateway.http.heads import parse
from shmserve.gateway.http.routes import API_ROUTES, METRICS, METRICS_ROUTES, PAGE_PATHS, PATHS
from shmserve.protocol.roles import CALLER_ROLES

REBOUND = "evil.example:8000"
OWN = "localhost:8000"
TOKENLESS = ("load", "unload", "set_trace", "set_log", "named_repository")
"""Actions that a page without a token may never do, of whatever origin."""


def endpoints() -> Iterator[tuple[str, str, Action]]:
    """Method, path and action of everything that HTTP has."""
    for path in [*PATHS, *PAGE_PATHS, *METRICS]:
        for method, action in path.wants.items():
            yield method, re.sub(r"{version}", "1", re.sub(r"{(?!version)\w+}", "name", path.template)), action


def refusal(rules: BrowserRules, method: str, path: str, host: str, *headers: str) -> str:
    """Why the request is refused; "" if it is not. The caller has all roles."""
    block = "\r\n".join((f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, "", "")).encode()
    routes = METRICS_ROUTES if path == "/metrics" else API_ROUTES
    found = parse(block, routes, EndpointAccess(CALLER_ROLES, browsers=rules)).refusal
    assert found is None or isinstance(found, Denied), found
    return "" if found is None else str(found)


RULES = BrowserRules()
BY_NAME = "a browser may not reach this endpoint by the name"
FOREIGN = "a page of another origin may not do this"


@pytest.mark.parametrize(
    "marks",
    [
        ["Accept-Language: en-US,en;q=0.9"],
        ["Accept-Language: *"],
        ["Accept-Language:"],
        ["Referer: http://evil.example:8000/"],
        ["Origin: http://evil.example:8000"],
        ["Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: cors"],
    ],
)
def test_a_page_whose_name_was_rebound_reaches_nothing(marks: list[str]) -> None:
    """For the browser, the server is the page's own origin: only the name in Host tells."""
    for method, path, action in endpoints():
        assert BY_NAME in refusal(RULES, method, path, REBOUND, *marks), action


def test_programs_may_use_any_name_and_the_page_none_but_its_own() -> None:
    for method, path, action in endpoints():
        for marks in ((), ("Accept-Language: *", "Sec-Fetch-Mode: cors", "User-Agent: node")):
            assert bool(refusal(RULES, method, path, "gpu-7.internal:8000", *marks)) == (action in PAGE), action


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LocalHost:8000", True),
        ("localhost.:8000", True),
        ("page.localhost", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("[fe80::1]", True),
        ("192.0.2.7", True),
        ("gpu.example:8000", True),
        ("GPU.example.", True),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evillocalhost", False),
        ("sub.gpu.example", False),
        ("gpu.example.evil", False),
        ("0x7f.1", False),
        ("2130706433", False),
        ("[::1", True),
        ("[evil.example]", False),
        ("", False),
        (":8000", False),
    ],
)
def test_names_by_which_the_page_is_reached(host: str, allowed: bool) -> None:
    rules = BrowserRules(["other.example", " gpu.example ", ""])
    assert bool(refusal(rules, "GET", "/", host)) != allowed
    assert refusal(BrowserRules(["*"]), "GET", "/", host) == ""


@pytest.mark.parametrize(
    ("headers", "foreign"),
    [
        (["Origin: http://localhost:8000"], False),
        (["Origin: http://LOCALHOST:8000"], False),
        (["Origin: https://localhost:8000"], False),
        (["Sec-Fetch-Site: same-origin"], False),
        (["Sec-Fetch-Site: none"], False),
        (["Origin: http://localhost:3000"], True),
        (["Origin: http://localhost:80000"], True),
        (["Origin: http://127.0.0.1:8000"], True),
        (["Origin: http://evil.example"], True),
        (["Origin: http://localhost:8000.evil.example"], True),
        (["Origin: null"], True),
        (["Origin: "], True),
        (["Origin: http://[::1"], True),
        (["Origin: http://localhost:8000", "Origin: http://evil.example"], True),
        (["Sec-Fetch-Site: cross-site"], True),
        (["Sec-Fetch-Site: same-site"], True),
        (["Sec-Fetch-Site: something-new"], True),
    ],
)
@pytest.mark.parametrize("kind", ["", "application/json", "text/plain", "multipart/form-data; boundary=x"])
def test_changes_come_from_the_same_origin(headers: list[str], foreign: bool, kind: str) -> None:
    more = [f"Content-Type: {kind}"] if kind else []
    for method, path, action in endpoints():
        found = refusal(RULES, method, path, OWN, *headers, *more)
        if foreign and (action in CHANGES or action in PAGE):
            assert FOREIGN in found, action
        elif action.value in TOKENLESS or action.value.startswith("memory"):
            assert FOREIGN not in found, action
            assert ("without a token" in found) == any(header.startswith("Origin") for header in headers), action
        else:
            assert found == "", action


def test_everything_that_is_posted_is_a_change_or_a_list() -> None:
    posted = {action for method, _, action in endpoints() if method == "POST"}
    assert posted == CHANGES | {Action.INDEX}


def test_a_link_on_another_site_opens_the_page() -> None:
    link = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document")
    assert refusal(RULES, "GET", "/", OWN, *link) == ""
    for path in ("/page/events", "/page/model/m"):
        assert FOREIGN in refusal(RULES, "GET", path, OWN, *link)


def test_with_tls_only_pages_with_tls_have_the_same_origin() -> None:
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
