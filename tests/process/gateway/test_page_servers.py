"""--page-servers with a real gateway: exact response headers for pages of other servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from http.client import HTTPMessage
from pathlib import Path

import pytest

from shmserve.gateway.auth import tokens
from shmserve.testing import Server
from tests.support.gateway.running_gateway import Gateway
from tests.support.living import identity

pytestmark = pytest.mark.process

OTHER = "http://gpu1.example:8000"
ALLOWED = "Access-Control-Allow-Origin"


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    identity(repository, "echo")
    with Server(repository) as server:
        yield server


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A token with the role page, and the file with its line."""
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    token, line = tokens.new("viewer", "page")
    file.write_text(f"{line}\n")
    return token, str(file)


@pytest.fixture(scope="module")
def gateway(server: Server, token: tuple[str, str]) -> Iterator[Gateway]:
    gateway = Gateway(server, "--tokens-file", token[1], "--page-servers", f"{OTHER}/,https://gpu2.example:443")
    yield gateway
    gateway.stop()


def head(gateway: Gateway, method: str, path: str, **headers: str) -> tuple[int, HTTPMessage]:
    """Status and headers of the response; the body is not read."""
    with contextlib.closing(gateway.connection()) as made:
        made.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = made.getresponse()
        answer.close()
        return answer.status, answer.headers


def test_the_content_security_policy_allows_the_page_servers(gateway: Gateway) -> None:
    status, headers = head(gateway, "GET", "/")
    assert status == 200
    assert f"connect-src 'self' {OTHER} https://gpu2.example" in headers["Content-Security-Policy"].split("; ")


def test_a_preflight_needs_no_token(gateway: Gateway) -> None:
    asked = {"Access_Control_Request_Method": "GET", "Access_Control_Request_Headers": "authorization"}
    status, headers = head(gateway, "OPTIONS", "/page/events", Origin=OTHER, **asked)
    assert (status, headers[ALLOWED], headers["Access-Control-Allow-Headers"]) == (200, OTHER, "Authorization")
    assert headers["Vary"] == "Origin"
    assert "Access-Control-Allow-Credentials" not in headers
    for path in ("/page/model/echo", "/page/app.js", "/v2", "/v2/models/echo/infer"):
        status, headers = head(gateway, "OPTIONS", path, Origin=OTHER, **asked)
        assert (status, headers[ALLOWED]) == (405, None)
    status, headers = head(gateway, "OPTIONS", "/page/events", Origin="http://evil.example", **asked)
    assert (status, headers[ALLOWED]) == (403, None)


def test_cors_headers_are_sent_only_for_the_event_stream(gateway: Gateway, token: tuple[str, str]) -> None:
    bearer = f"Bearer {token[0]}"
    status, headers = head(gateway, "GET", "/page/events", Origin=OTHER, Authorization=bearer)
    assert (status, headers[ALLOWED], headers["Content-Type"]) == (200, OTHER, "text/event-stream; charset=utf-8")
    for wrong in ({}, {"Authorization": "Bearer wrong"}):
        status, headers = head(gateway, "GET", "/page/events", Origin=OTHER, **wrong)
        assert (status, headers[ALLOWED]) == (401, OTHER)
    status, headers = head(gateway, "GET", "/page/model/echo", Origin=OTHER, Authorization=bearer)
    assert (status, headers[ALLOWED]) == (403, None)
    status, headers = head(gateway, "GET", "/page/events", Authorization=bearer)
    assert (status, headers[ALLOWED]) == (200, None)


def test_an_invalid_page_server_is_refused(server: Server) -> None:
    with pytest.raises(AssertionError, match="'gpu1:8000' is not http://NAME:PORT"):
        Gateway(server, "--page-servers", "gpu1:8000")
