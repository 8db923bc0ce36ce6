"""Access control of the gateway: roles, tokens, restricted APIs, forwarded headers and certificates."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import re
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from shmserve.clients.cli import main, parser
from shmserve.errors import Denied, InvalidRequest
from shmserve.gateway.auth import header_forwarding, restricted_apis, tls, tokens
from shmserve.gateway.auth.access import NEEDS, OPEN, WITHOUT_CREDENTIALS, EndpointAccess, Unauthenticated
from shmserve.gateway.auth.actions import PAGE, Action
from shmserve.gateway.auth.gate import Guards
from shmserve.gateway.auth.header_forwarding import HeaderParameters
from shmserve.gateway.auth.tls import Files, FlagFile
from shmserve.gateway.http.heads import HttpHeads, parse
from shmserve.protocol.messages import PARAMETERS
from shmserve.protocol.roles import CALLER_ROLES, ROLES
from shmserve.terminal.errors import Failed, Misuse
from tests.support.gateway.http_connection import lines


def nothing(name: str) -> None:
    return None


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def with_token(roles: Iterable[str] = ROLES, token: str = "t", role: str = "infer") -> EndpointAccess:
    """An endpoint that grants `roles` without a token, and `role` to a token."""
    return EndpointAccess(roles, tokens.Tokens(f"a {role} {digest(token)}"))


# ---------------------------------------------------------------------------------------- roles


@pytest.mark.parametrize("action", NEEDS)
def test_an_action_needs_one_of_its_roles(action: Action) -> None:
    """Every action with every set of roles. An action that is not in the table is denied."""
    for roles in (set(some) for count in range(5) for some in itertools.combinations(CALLER_ROLES, count)):
        access = EndpointAccess(roles)
        if roles & set(NEEDS[action]) or action in WITHOUT_CREDENTIALS:
            access.check(action, nothing)
        else:
            with pytest.raises(Denied, match="needs the role"):
                access.check(action, nothing)


@pytest.mark.parametrize("action", NEEDS)
def test_tokens_grant_their_roles_and_no_others(action: Action) -> None:
    known = tokens.Tokens("\n".join(f"x{role} {role} {digest(role)}" for role in CALLER_ROLES))
    access = EndpointAccess((), known)
    always = (*OPEN, *WITHOUT_CREDENTIALS, Action.PAGE_FILE)  # the page itself asks for a token
    for role in CALLER_ROLES:
        bearer = {"authorization": f"Bearer {role}"}
        if role in NEEDS[action] or action in always:
            access.check(action, bearer.get)
        else:
            with pytest.raises(Denied, match="neither this token nor this endpoint grants"):
                access.check(action, bearer.get)
    for invalid in (None, "", "Bearer", "Bearer infe", "Basic infer", "infer", f"Bearer {digest('infer')}"):
        headers: dict[str, Any] = {"authorization": invalid}
        if action in always:
            access.check(action, headers.get)
        else:
            with pytest.raises(Unauthenticated):
                access.check(action, headers.get)


def test_a_token_adds_to_the_roles_of_the_endpoint_and_an_unknown_one_is_refused() -> None:
    access = with_token(["observe"])
    access.check(Action.STATISTICS, nothing)
    access.check(Action.STATISTICS, {"authorization": "bearer t"}.get)
    access.check(Action.INFER, {"authorization": "BEARER  t"}.get)
    with pytest.raises(Unauthenticated):
        access.check(Action.STATISTICS, {"authorization": "Bearer u"}.get)
    with pytest.raises(Denied, match="operate"):
        access.check(Action.LOAD, {"authorization": "Bearer t"}.get)
    assert str(access) == "roles observe, tokens: 1"


def test_web_pages_change_nothing_without_a_token() -> None:
    """Browsers let any page send a POST to this machine, with the page as its origin."""
    page = {"origin": "http://example.org", "authorization": "Bearer t"}
    changing = {"load", "unload", "set_trace", "set_log", "named_repository"}
    changing |= {"memory_register", "memory_unregister", "memory_status"}
    for action in set(NEEDS) - {Action.NONE}:
        with_token(CALLER_ROLES, role="operate").check(action, page.get)
        if action in changing:
            with pytest.raises(Denied, match="requests from web pages"):
                EndpointAccess(CALLER_ROLES).check(action, page.get)
        else:
            EndpointAccess(CALLER_ROLES).check(action, page.get)


# ---------------------------------------------------------------------------------------- tokens


def test_a_new_token_and_its_line() -> None:
    token, line = tokens.new("alice", "infer,observe")
    assert token not in line
    assert len(token) >= 40
    holder = tokens.Tokens(f"# people\n\n{line}\n").holder(f"Bearer {token}")
    assert holder == ("alice", frozenset({"infer", "observe"}))
    assert tokens.new("alice", "infer")[0] != token
    with pytest.raises(tokens.BadTokens):
        tokens.new("a b", "infer")


def test_the_command_for_a_new_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["gateway", "--new-token", "alice=infer"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"alice infer {digest(printed.err.split()[-1])}\n"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("alice infer", "NAME ROLE,ROLE SHA256"),
        ("alice infer secret", "not the token itself"),
        (f"alice root {digest('x')}", "'root' is not a role"),
        (f"al/ce infer {digest('x')}", "a name may have"),
        (f"a infer {digest('x')}\nb infer {digest('x')}", "line 2: the same token"),
    ],
)
def test_invalid_lines_of_tokens_are_refused(line: str, text: str) -> None:
    with pytest.raises(tokens.BadTokens, match=text) as caught:
        tokens.Tokens(line)
    assert "secret" not in str(caught.value)


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"a infer {digest('x')}\n")
    return path


def test_an_invalid_file_of_tokens_is_refused(tokens_file: Path) -> None:
    path = tokens_file
    path.chmod(0o640)
    assert len(tokens.load(str(path))) == 1
    path.chmod(0o660)
    with pytest.raises(tokens.BadTokens, match="chmod go-w"):
        tokens.load(str(path))
    path.chmod(0o600)
    path.write_bytes(b"\xff")
    with pytest.raises(tokens.BadTokens, match="UTF-8"):
        tokens.load(str(path))
    path.write_bytes(b"#" * (tokens.FILE_BYTES + 1))
    with pytest.raises(tokens.BadTokens, match="exceeds"):
        tokens.load(str(path))
    with pytest.raises(tokens.BadTokens, match="No such file"):
        tokens.load(f"{path}.none")


@given(st.text(max_size=200))
def test_any_text_is_a_file_of_tokens_or_refused(text: str) -> None:
    with contextlib.suppress(tokens.BadTokens):
        assert tokens.Tokens(text).holder("Bearer x") is None


# ---------------------------------------------------------------------------------------- restricted APIs


def test_every_action_is_in_one_group() -> None:
    grouped = [action for actions in restricted_apis.GROUPS.values() for action in actions]
    assert sorted(grouped) == sorted(set(NEEDS) - {Action.NONE, Action.METRICS} - PAGE)


@pytest.mark.parametrize("group", ["metadata", "model-config", "statistics", "model-repository"])
def test_the_page_does_not_show_what_is_restricted(group: str) -> None:
    restricted = restricted_apis.Restrictions([restricted_apis.read(f"{group}:key=secret")])
    assert restricted.refusal(Action.PAGE_MODEL, nothing) is not None
    assert restricted.refusal(Action.PAGE_MODEL, {"key": "secret"}.get) is None
    assert (restricted.refusal(Action.PAGE_EVENTS, nothing) is None) == (group in ("metadata", "model-config"))


def test_a_restricted_group_needs_its_header() -> None:
    options = ["health,model-repository:Admin-Key=a=b", "inference:user=u"]
    restricted = restricted_apis.Restrictions(list(map(restricted_apis.read, options)))
    assert restricted.headers == {"admin-key", "user"}
    assert restricted.refusal(Action.LIVE, {"admin-key": "a=b"}.get) is None
    assert restricted.refusal(Action.INFER, {"user": "u"}.get) is None
    assert restricted.refusal(Action.CONFIG, nothing) is None
    text = "This API is restricted, expecting header 'Admin-Key'"
    for wrong in ({}, {"admin-key": "a"}, {"admin-key": "a=b "}, {"user": "u"}, {"admin-key": "é\udc80"}):
        assert restricted.refusal(Action.LOAD, wrong.get) == text
    rpc = restricted_apis.Restrictions([restricted_apis.read("inference:k=v", restricted_apis.RPC_PREFIX)], "protocol")
    assert rpc.refusal(Action.INFER, {"triton-grpc-protocol-k": "v"}.get) is None
    text = "This protocol is restricted, expecting header 'triton-grpc-protocol-k'"
    assert rpc.refusal(Action.INFER, {"k": "v"}.get) == text


@pytest.mark.parametrize(
    "text", ["", "health", "health:k", "health:=v", "health:k=", "cooking:k=v", ":k=v", "health,:k=v", "health:a b=v",
             "health:k=\x01", "health:k= v", "health:k=é"],
)  # fmt: skip
def test_invalid_restrictions_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        restricted_apis.read(text)


def test_a_group_can_be_restricted_once() -> None:
    with pytest.raises(ValueError, match="health is restricted more than once"):
        restricted_apis.Restrictions([restricted_apis.read("health:a=b"), restricted_apis.read("trace,health:c=d")])


def test_roles_and_restrictions_are_both_checked() -> None:
    restricted = restricted_apis.Restrictions([restricted_apis.read("inference,statistics:k=v")])
    access = EndpointAccess(["infer"], None, restricted)
    access.check(Action.INFER, {"k": "v"}.get)
    with pytest.raises(Denied, match="restricted, expecting header 'k'"):
        access.check(Action.INFER, nothing)
    with pytest.raises(Denied, match="needs the role"):
        access.check(Action.STATISTICS, {"k": "v"}.get)


# ---------------------------------------------------------------------------------------- forwarded headers


def test_matching_headers_are_forwarded() -> None:
    forward = header_forwarding.Forward("x-.*|User", ["x-key"])
    assert forward.of([("X-A", "1"), ("x-key", "2"), ("x-a", "3"), ("USER", "4"), ("ax-b", "5")]) == {
        "X-A": "1, 3", "USER": "4",
    }  # fmt: skip
    assert forward.of([("Host", "x")]) is None
    assert header_forwarding.Forward("(?-i)X-.*").of([("x-a", "1"), ("X-a", "2")]) == {"X-a": "2"}


def test_reserved_headers_are_refused() -> None:
    forward = header_forwarding.Forward(".*")
    names = ["Timeout", "priority", "sequence_id", "Sequence_Start", "sequence_end", "triton_x", "headers",
             "binary_data_output"]  # fmt: skip
    for name in names:
        with pytest.raises(InvalidRequest, match=f"header '{name}' is reserved for Triton usage"):
            forward.of([("a", "1"), (name, "1")])
    assert forward.of([("n" * 129, "1"), ("triton_grpc_error", "true")]) is None
    assert header_forwarding.Forward("x-.*").of((name, "1") for name in names) is None
    with pytest.raises(InvalidRequest, match="headers would be forwarded to the model"):
        forward.of((f"a{number}", "") for number in range(PARAMETERS + 1))


def test_a_hostile_name_takes_no_longer_than_another() -> None:
    """With the module `re` this would not end."""
    forward = header_forwarding.Forward("(a+)+(b+)+(.*.*.*.*.*.*)+c")
    assert forward.of([("a" * 120, "")]) is None
    with pytest.raises(ValueError, match="the limit is"):
        header_forwarding.Forward("a" * 2000)
    with pytest.raises(ValueError, match="missing"):
        header_forwarding.Forward("(a")
    with pytest.raises(ValueError):
        header_forwarding.Forward("(((((a{100}){100}){100}){100}){100})")


def test_a_header_replaces_the_parameter_of_its_name() -> None:
    parameters = {"a": 1, "x-user": "of the body"}
    assert header_forwarding.merged(parameters, None) is parameters
    assert header_forwarding.merged(None, {"b": "c"}) == {"b": "c"}
    assert header_forwarding.merged(parameters, {"X-User": "of the head"}) == {"a": 1, "X-User": "of the head"}
    assert parameters == {"a": 1, "x-user": "of the body"}
    with pytest.raises(InvalidRequest, match="including forwarded headers"):
        header_forwarding.merged({f"a{number}": 1 for number in range(PARAMETERS)}, {"b": "c"})


PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_sampled_trace_context_is_passed_on_while_it_is_wanted() -> None:
    wanted: list[bool] = []
    headers = HeaderParameters(None, lambda: bool(wanted))
    both = HeaderParameters(header_forwarding.Forward("x-.*"), lambda: bool(wanted))
    given = [("TraceParent", PARENT), ("x-a", "1"), ("tracestate", "a=1"), ("Tracestate", "b=2")]
    assert (headers.active, both.active) == (False, True)
    assert both.of(given) == {"x-a": "1"}
    wanted.append(True)
    assert (headers.active, both.active) == (True, True)
    assert headers.of(given) == {"traceparent": PARENT, "tracestate": "a=1,b=2"}
    assert headers.of(given[:2]) == {"traceparent": PARENT}
    assert both.of(given[:2]) == {"x-a": "1", "traceparent": PARENT}


@pytest.mark.parametrize("parents", [[], ["00-1-1-1"], [PARENT[:-1] + "0"], [PARENT, PARENT]])
def test_other_trace_contexts_are_left_out(parents: list[str]) -> None:
    """Those that are missing, invalid, not sampled or ambiguous."""
    given = [("traceparent", parent) for parent in parents] + [("tracestate", "a=1")]
    assert HeaderParameters(None, lambda: True).of(given) is None


# ---------------------------------------------------------------------------------------- heads


def test_heads_have_the_result_of_the_access_check() -> None:
    access = with_token(())
    heads = HttpHeads(access, forward=HeaderParameters(header_forwarding.Forward("x-.*")))
    good = lines("Authorization: Bearer t", "X-User: J\xf6rg", "x-user: b")
    head = heads.head(good)
    assert head.refusal is None
    assert head.forwarded == {"X-User": "J\xf6rg, b"}
    assert heads.head(good) is head
    bad = lines("Authorization: Bearer u")
    refused = heads.head(bad)
    assert isinstance(refused.refusal, Unauthenticated)
    assert refused.refusal.__traceback__ is None
    assert heads.head(bad) is not refused
    assert heads.head(lines(first="GET /v2 HTTP/1.1")).refusal is not None
    assert heads.head(lines(first="GET /v2/health/live HTTP/1.1")).refusal is None
    access.tokens = tokens.Tokens("")
    heads.forget()
    assert isinstance(heads.head(good).refusal, Unauthenticated)


def test_two_authorizations_are_refused() -> None:
    access = EndpointAccess(ROLES, tokens.Tokens(f"a infer {digest('a')}\nb infer {digest('b')}"))
    for other in "ab":
        head = parse(lines("Authorization: Bearer a", f"authorization: Bearer {other}"), access=access)
        assert isinstance(head.refusal, Unauthenticated)


# ---------------------------------------------------------------------------------------- certificates


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(str(tmp_path / "key"))
    (tmp_path / "key").chmod(0o600)
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert"))
    authority.issue_cert("localhost").private_key_pem.write_to_path(str(tmp_path / "other"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca"))
    (tmp_path / "noise").write_bytes(b"noise")
    return {path.name: str(path) for path in tmp_path.iterdir()} | {"none": str(tmp_path / "none")}


def chosen(files: dict[str, str], cert: str, key: str | None, ca: str | None = None) -> Files:
    return Files(
        FlagFile(files[cert], "--c"),
        FlagFile(files[key], "--k") if key else None,
        FlagFile(files[ca], "--a") if ca else None,
    )


def test_the_context_of_certificates(files: dict[str, str]) -> None:
    separate = chosen(files, "cert", "key")
    context = tls.context(separate, "h2")
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_NONE
    assert tls.context(chosen(files, "both", None, "ca"), "h2").verify_mode == ssl.CERT_REQUIRED
    assert tls.exposed(separate) is None
    Path(files["key"]).chmod(0o644)
    assert "chmod 600" in (tls.exposed(separate) or "")


@pytest.mark.parametrize(
    ("cert", "key", "ca", "flag", "text"),
    [
        ("none", "key", None, "--c", "No such file"),
        ("cert", "none", None, "--k", "No such file"),
        ("cert", "key", "none", "--a", "No such file"),
        ("noise", "key", None, "--c", "no certificate in it"),
        ("cert", "noise", None, "--k", "no readable private key"),
        ("cert", "other", None, "--k", "does not match the certificate"),
        ("cert", None, None, "--c", "no readable private key"),
        ("cert", "key", "noise", "--a", "no certificate"),
    ],
)
def test_invalid_certificates_are_refused(
    files: dict[str, str], cert: str, key: str | None, ca: str | None, flag: str, text: str
) -> None:
    with pytest.raises(tls.BadCertificate, match=text) as caught:
        tls.context(chosen(files, cert, key, ca), "h2")
    assert flag in str(caught.value)


def test_an_encrypted_key_is_refused_without_a_prompt(files: dict[str, str], tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(files["key"]).read_bytes(), None)
    locked = tmp_path / "locked"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
        )
    )
    with pytest.raises(tls.BadCertificate, match="encrypted"):
        tls.context(Files(FlagFile(files["cert"], "--c"), FlagFile(str(locked), "--k")), "h2")


# ---------------------------------------------------------------------------------------- flags


def arguments(*words: str) -> argparse.Namespace:
    return parser.parser().parse_args(["gateway", *words])


def test_endpoints_without_access_control() -> None:
    guards = Guards(arguments())
    assert guards.http.tls is guards.metrics.tls is guards.rpc.tls is None
    assert guards.http.lack("127.0.0.1") is guards.http.lack("localhost") is guards.http.lack("::1") is None
    warning = guards.http.lack("0.0.0.0") or ""
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
    assert Guards(arguments(*secure, *known)).http.lack("0.0.0.0") is None
    assert Guards(arguments(*secure, "--tls-client-ca", files["ca"])).http.lack("::") is None
    assert "not encrypted" not in (Guards(arguments(*secure)).http.lack("0.0.0.0") or "")
    warning = Guards(arguments(*known)).http.lack("example.org") or ""
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


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--tls-key", "x"), "--tls-key requires --tls-cert"),
        (("--tls-client-ca", "x"), "--tls-client-ca requires --tls-cert"),
        (("--grpc-server-cert", "x"), "require --grpc-use-ssl"),
        (("--grpc-use-ssl",), "--grpc-use-ssl requires --grpc-server-cert"),
        (("--grpc-use-ssl-mutual", "--grpc-server-cert", "x"), "requires --grpc-root-cert"),
        (("--http-header-forward-pattern", "(a"), "--http-header-forward-pattern: missing"),
        (("--http-restricted-api", "health:a=b", "--http-restricted-api", "health:a=b"), "more than once"),
    ],
)
def test_inconsistent_flags_are_refused(words: tuple[str, ...], text: str) -> None:
    with pytest.raises(Misuse, match=re.escape(text)):
        Guards(arguments(*words))


def test_the_error_of_a_missing_file_names_its_flag(tmp_path: Path) -> None:
    for flag in ("--tls-cert", "--tokens-file"):
        with pytest.raises(Failed, match=re.escape(f"{flag} {tmp_path / 'none'}: No such file or directory")):
            Guards(arguments(flag, str(tmp_path / "none")))


def test_files_are_reloaded_only_if_all_are_valid(files: dict[str, str], tokens_file: Path) -> None:
    guards = Guards(arguments("--tls-cert", files["both"], "--tokens-file", str(tokens_file)))
    before, known = guards.http.tls, guards.http.access.tokens
    tokens_file.write_text(f"a infer {digest('y')}\n")
    certificate = Path(files["both"]).read_bytes()
    Path(files["both"]).write_bytes(b"")
    with pytest.raises(Failed, match="--tls-cert"):
        guards.read_again()
    assert guards.http.tls is before
    assert guards.http.access.tokens is known
    Path(files["both"]).write_bytes(certificate)
    guards.read_again()
    assert guards.http.tls is not before
    guards.http.access.check(Action.INFER, {"authorization": "Bearer y"}.get)
    with pytest.raises(Unauthenticated):
        guards.http.access.check(Action.INFER, {"authorization": "Bearer x"}.get)


def test_credentials_are_not_forwarded(tokens_file: Path) -> None:
    words = ["--tokens-file", str(tokens_file)]
    words += ["--http-restricted-api", "health:admin=x", "--http-header-forward-pattern", ".*"]
    words += ["--grpc-restricted-protocol", "health:k=x", "--grpc-header-forward-pattern", ".*"]
    guards = Guards(arguments(*words))
    for guard in (guards.http, guards.rpc):
        assert guard.forward is not None
        secret = [("Authorization", "Bearer x"), ("Admin", "x"), ("triton-grpc-protocol-k", "x")]
        assert guard.forward.of([*secret, ("y", "z")]) == {"y": "z"}
