"""Access control from the flags of the gateway: roles, tokens and certificates, their files and the errors in them."""

from __future__ import annotations

import argparse
import re
import ssl
from pathlib import Path

import pytest

from shmserve.clients.cli import main, parser
from shmserve.errors import Denied
from shmserve.gateway.auth import tls, tokens
from shmserve.gateway.auth.access import Unauthenticated
from shmserve.gateway.auth.gate import Guards
from shmserve.gateway.auth.tls import Files, FlagFile
from shmserve.protocol.actions import Action
from shmserve.terminal.errors import Failed, Misuse
from tests.support.cases import cases
from tests.support.gateway.credentials import digest, nothing


def arguments(*words: str) -> argparse.Namespace:
    return parser.parser().parse_args(["gateway", *words])


def test_endpoints_without_access_control() -> None:
    guards = Guards(arguments())
    assert guards.http.tls is guards.metrics.tls is guards.rpc.tls is None
    assert guards.http.exposure("127.0.0.1") is guards.http.exposure("localhost") is guards.http.exposure("::1") is None
    warning = guards.http.exposure("0.0.0.0") or ""
    assert "any client can use it" in warning
    assert "not encrypted" in warning
    guards.http.access.check(Action.INFER, nothing)
    guards.metrics.access.check(Action.METRICS, nothing)
    with pytest.raises(Denied):
        guards.metrics.access.check(Action.INFER, nothing)


def test_the_page_is_shown_by_default_only_on_loopback_addresses(tokens_file: Path) -> None:
    def shown(*words: str) -> bool:
        try:
            Guards(arguments(*words)).http.access.check(Action.PAGE_FILE, nothing)
        except Denied:
            return False
        return True

    assert shown()
    assert shown("--http-address", "::1")
    assert not shown("--http-address", "0.0.0.0")
    assert not shown("--http-address", "example.org")
    assert shown("--http-address", "0.0.0.0", "--http-roles", "infer,page")
    assert not shown("--http-roles", "infer,observe,operate"), "roles that are given are complete"
    assert not shown("--tokens-file", str(tokens_file)), "no token has the role"
    tokens_file.write_text(f"{tokens_file.read_text()}\nviewer page {digest('viewer')}\n")
    assert shown("--tokens-file", str(tokens_file)), "the page asks for the token"
    with pytest.raises(Unauthenticated):
        Guards(arguments("--tokens-file", str(tokens_file))).http.access.check(Action.PAGE_EVENTS, nothing)


def test_the_roles_of_grpc_default_to_those_of_http() -> None:
    for words in (["--http-roles", "infer"], ["--http-roles", "observe", "--grpc-roles", "infer"]):
        guards = Guards(arguments(*words))
        guards.rpc.access.check(Action.INFER, nothing)
        with pytest.raises(Denied):
            guards.rpc.access.check(Action.STATISTICS, nothing)


def test_missing_protection_on_other_interfaces(files: dict[str, str], tokens_file: Path) -> None:
    secure, known = ("--tls-cert", files["both"]), ("--tokens-file", str(tokens_file))
    for words in ((*secure, *known), (*secure, "--tls-client-ca", files["ca"])):
        assert Guards(arguments(*words)).http.exposure("0.0.0.0") is None
    assert "not encrypted" not in (Guards(arguments(*secure)).http.exposure("::") or "")
    warning = Guards(arguments(*known)).http.exposure("example.org") or ""
    assert "can use it" not in warning
    assert "including tokens, is not encrypted" in warning


def test_tritons_tls_flags_are_for_grpc_only(files: dict[str, str]) -> None:
    words = ("--grpc-use-ssl", "true", "--grpc-server-cert", files["cert"], "--grpc-server-key", files["key"])
    guards = Guards(arguments(*words))
    assert guards.http.tls is None
    assert guards.rpc.tls is not None
    assert guards.rpc.tls.verify_mode == ssl.CERT_NONE
    mutual = Guards(arguments(*words, "--grpc-use-ssl-mutual=true", "--grpc-root-cert", files["ca"]))
    assert mutual.rpc.tls is not None
    assert mutual.rpc.tls.verify_mode == ssl.CERT_REQUIRED


@cases(
    (("--tls-key", "x"), "--tls-key requires --tls-cert"),
    (("--tls-client-ca", "x"), "--tls-client-ca requires --tls-cert"),
    (("--grpc-server-cert", "x"), "require --grpc-use-ssl"),
    (("--grpc-use-ssl",), "--grpc-use-ssl requires --grpc-server-cert"),
    (("--grpc-use-ssl-mutual", "--grpc-server-cert", "x"), "requires --grpc-root-cert"),
    (("--http-header-forward-pattern", "(a"), "--http-header-forward-pattern: missing"),
    (("--http-restricted-api", "health:a=b", "--http-restricted-api", "health:a=b"), "more than once"),
    (("--tls-cert", "/none"), "--tls-cert /none: No such file or directory"),
    (("--tokens-file", "/none"), "--tokens-file /none: No such file or directory"),
)
def test_inconsistent_flags_and_missing_files_are_refused(words: tuple[str, ...], text: str) -> None:
    with pytest.raises((Misuse, Failed), match=re.escape(text)):
        Guards(arguments(*words))


def test_credentials_are_not_forwarded(tokens_file: Path) -> None:
    words = ["--tokens-file", str(tokens_file)]
    words += ["--http-restricted-api", "health:admin=x", "--http-header-forward-pattern", ".*"]
    words += ["--grpc-restricted-protocol", "health:k=x", "--grpc-header-forward-pattern", ".*"]
    guards = Guards(arguments(*words))
    for guard in (guards.http, guards.rpc):
        assert guard.forward is not None
        secret = [("Authorization", "Bearer x"), ("Admin", "x"), ("triton-grpc-protocol-k", "x")]
        assert guard.forward.of([*secret, ("y", "z")]) == {"y": "z"}


def test_a_new_token_and_its_line() -> None:
    token, line = tokens.new("alice", "infer,observe")
    assert token not in line
    assert len(token) >= 40
    holder = tokens.Tokens(f"# people\n\n{line}\n").holder(f"Bearer {token}")
    assert holder == ("alice", frozenset({"infer", "observe"}))
    assert tokens.new("alice", "infer")[0] != token
    with pytest.raises(ValueError, match=r"^a name may have up to 64 letters"):
        tokens.new("a b", "infer")


def test_the_command_for_a_new_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["gateway", "--new-token", "alice=infer"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"alice infer {digest(printed.err.split()[-1])}\n"


@cases(
    ("alice infer", "NAME ROLE,ROLE SHA256"),
    ("alice infer secret", "not the token itself"),
    (f"alice root {digest('x')}", "'root' is not a role"),
    (f"al/ce infer {digest('x')}", "a name may have"),
    (f"a infer {digest('x')}\nb infer {digest('x')}", "line 2: the same token"),
)
def test_invalid_lines_of_tokens_are_refused(line: str, text: str) -> None:
    with pytest.raises(tokens.BadTokens, match=text) as caught:
        tokens.Tokens(line)
    assert "secret" not in str(caught.value)


def test_an_invalid_file_of_tokens_is_refused(tokens_file: Path) -> None:
    path = tokens_file
    path.chmod(0o640)
    assert len(tokens.load(str(path))) == 1
    valid = path.read_bytes()
    for mode, content, text in (
        (0o660, valid, "chmod go-w"),
        (0o600, b"\xff", "UTF-8"),
        (0o600, b"#" * (tokens.FILE_BYTES + 1), "exceeds"),
    ):
        path.chmod(mode)
        path.write_bytes(content)
        with pytest.raises(tokens.BadTokens, match=text):
            tokens.load(str(path))
    with pytest.raises(tokens.BadTokens, match="No such file"):
        tokens.load(f"{path}.none")


def chosen(files: dict[str, str], cert: str, key: str | None, ca: str | None = None) -> Files:
    return Files(
        FlagFile(files[cert], "--c"),
        FlagFile(files[key], "--k") if key else None,
        FlagFile(files[ca], "--a") if ca else None,
    )


def test_the_context_of_certificates(files: dict[str, str]) -> None:
    separate = chosen(files, "cert", "key")
    context = tls.context(separate, "h2")
    assert (context.minimum_version, context.verify_mode) == (ssl.TLSVersion.TLSv1_2, ssl.CERT_NONE)
    assert tls.context(chosen(files, "both", None, "ca"), "h2").verify_mode == ssl.CERT_REQUIRED
    assert tls.exposed(separate) is None
    Path(files["key"]).chmod(0o644)
    assert "chmod 600" in (tls.exposed(separate) or "")


@cases(
    ("none", "key", None, "--c", "No such file"),
    ("cert", "none", None, "--k", "No such file"),
    ("cert", "key", "none", "--a", "No such file"),
    ("noise", "key", None, "--c", "no certificate in it"),
    ("cert", "noise", None, "--k", "no readable private key"),
    ("cert", "locked", None, "--k", "encrypted"),  # without a prompt
    ("cert", "other", None, "--k", "does not match the certificate"),
    ("cert", None, None, "--c", "no readable private key"),
    ("cert", "key", "noise", "--a", "no certificate"),
)
def test_invalid_certificates_are_refused(
    cert: str, key: str | None, ca: str | None, flag: str, text: str, files: dict[str, str]
) -> None:
    with pytest.raises(tls.BadCertificate, match=text) as caught:
        tls.context(chosen(files, cert, key, ca), "h2")
    assert flag in str(caught.value)
