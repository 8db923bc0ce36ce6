"""Access to the OpenAI-compatible endpoints: TLS, tokens, restricted APIs, browsers; and forwarded headers."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from shmserve.testing import Server
from tests.support.gateway.language_models import openai_client, write_language_models
from tests.support.gateway.running_gateway import Gateway
from tests.support.optional import optional

pytestmark = pytest.mark.process

openai = optional("openai")
Start = Callable[..., Gateway]


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    write_language_models(repository)
    with Server(repository, "--exit-on-error", "true") as running:
        yield running


@pytest.fixture
def start(server: Server) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def started(*options: str) -> Gateway:
            made = Gateway(server, *options)
            stack.callback(made.stop)
            return made

        yield started


def client_of(gateway: Gateway, token: str = "none", **more: Any) -> Any:
    return openai_client(f"127.0.0.1:{gateway.http}", token, **more)


def said(client: Any, prompt: str = "a b", model: str = "talk") -> str:
    return "".join([chunk.choices[0].text for chunk in client.completions.create(
        model=model, prompt=prompt, stream=True)])  # fmt: skip


def test_tokens_over_tls(start: Start, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, tokens = tmp_path / "certificate", tmp_path / "tokens"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    certificate.chmod(0o600)
    roles = {"user": "infer", "watcher": "observe"}
    tokens.write_text("".join(
        f"{name} {role} {hashlib.sha256(name.encode()).hexdigest()}\n" for name, role in roles.items()
    ))  # fmt: skip
    tokens.chmod(0o600)
    gateway = start("--tls-cert", str(certificate), "--tokens-file", str(tokens))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    def connect(token: str) -> Any:
        return client_of(gateway, token, http_client=openai.DefaultHttpxClient(verify=trusting))

    with connect("user") as user:
        assert said(user) == "a b"
        assert user.models.retrieve("talk").id == "talk"
    with connect("watcher") as watcher:
        assert {"talk", "embed"} < {model.id for model in watcher.models.list()}
        with pytest.raises(openai.PermissionDeniedError, match="needs the role infer") as denied:
            said(watcher)
        assert denied.value.code == "insufficient_permissions"
    with connect("nobody") as nobody, pytest.raises(openai.AuthenticationError, match="unknown token") as unknown:
        nobody.models.list()
    assert unknown.value.code == "invalid_api_key"


def test_restricted_apis(start: Start) -> None:
    gateway = start("--http-restricted-api", "inference,model-repository:admin-key=open sesame")
    with client_of(gateway) as without:
        for call in (
            lambda: said(without),
            without.models.list,
            lambda: without.embeddings.create(model="embed", input="a"),
        ):
            with pytest.raises(openai.PermissionDeniedError, match="expecting header 'admin-key'"):
                call()
    with client_of(gateway, default_headers={"admin-key": "open sesame"}) as knowing:
        assert said(knowing) == "a b"
        assert knowing.embeddings.create(model="embed", input="a").data[0].embedding[0] == 1


def test_allow_openai_false_removes_the_endpoints(start: Start) -> None:
    gateway = start("--allow-openai=false")
    assert gateway.ask("GET", "/v1/models")[0] == 404
    assert gateway.ask("POST", "/v1/completions", {"model": "talk", "prompt": "a"})[0] == 404
    paths = json.loads(gateway.ask("GET", "/v2/openapi.json")[1])["paths"]
    assert "/v2/models/{model}/infer" in paths
    assert not any(path.startswith("/v1") for path in paths)


def test_connection_shares_forwarded_headers_and_compressed_bodies(start: Start) -> None:
    """A request whose prompts exceed the share of its connection sends them one after another."""
    gateway = start("--connection-share=0.0003", "--http-header-forward-pattern", "x-.*")
    with client_of(gateway, default_headers={"x-tenant": "me"}) as client:
        found = client.completions.create(model="bare", prompt=["a"] * 50)
        assert [choice.text for choice in found.choices] == ["a"] * 50
        vectors = client.embeddings.create(model="embed", input=["a"] * 100)
        assert [vector.index for vector in vectors.data] == list(range(100))
        assert json.loads(said(client, "PARAMETERS", "bare"))["x-tenant"] == "me"
    body = gzip.compress(json.dumps({"model": "talk", "prompt": "a"}).encode())
    status, text = gateway.ask("POST", "/v1/completions", body, Content_Encoding="gzip")
    assert (status, json.loads(text)["choices"][0]["text"]) == (200, "a")
    status, text = gateway.ask("POST", "/v1/completions", body, Content_Encoding="br")
    assert (status, json.loads(text)["error"]["code"]) == (400, "unsupported")


def test_other_origins_and_streams_over_http_1_0_are_refused(start: Start) -> None:
    gateway = start("--http-allowed-origins", "https://friend.example")
    body = {"model": "talk", "prompt": "a", "stream": True}
    for origin, expected in (("https://friend.example", 200), ("https://evil.example", 403)):
        assert gateway.ask("POST", "/v1/completions", body, Origin=origin)[0] == expected
    with socket.create_connection(("127.0.0.1", gateway.http), 60) as made:
        text = json.dumps(body).encode()
        made.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))
        answer = b"".join(iter(lambda: made.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"a stream requires HTTP/1.1" in answer
