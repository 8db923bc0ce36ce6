"""Access rules of an endpoint: roles, restricted APIs, and both for each request head of a connection."""

from __future__ import annotations

import itertools
import re
from contextlib import nullcontext
from typing import Any

import pytest

from shmserve.errors import Denied
from shmserve.gateway.auth import header_forwarding, restricted_apis, tokens
from shmserve.gateway.auth.access import OPEN, WITHOUT_CREDENTIALS, EndpointAccess, Unauthenticated
from shmserve.gateway.auth.actions import PAGE
from shmserve.gateway.auth.header_forwarding import HeaderParameters
from shmserve.gateway.http.heads import HttpHeads
from shmserve.gateway.http.routes import PATHS, QUERY_PATHS
from shmserve.protocol.actions import Action
from shmserve.protocol.roles import CALLER_ROLES
from tests.support.cases import cases
from tests.support.gateway.credentials import digest, nothing, with_token
from tests.support.gateway.http_connection import lines

SERVED = [action for action in Action if action.row.http]


@pytest.mark.parametrize("action", [Action.NONE, *SERVED])
def test_an_action_needs_one_of_its_roles(action: Action) -> None:
    """Of the endpoint, with every set of roles, or of a token. An action that is not in the table is denied."""
    for roles in (set(some) for count in range(5) for some in itertools.combinations(CALLER_ROLES, count)):
        access = EndpointAccess(roles)
        if roles & set(action.row.roles) or action in WITHOUT_CREDENTIALS:
            access.check(action, nothing)
        else:
            with pytest.raises(Denied, match="needs the role"):
                access.check(action, nothing)
    known = tokens.Tokens("\n".join(f"x{role} {role} {digest(role)}" for role in CALLER_ROLES))
    access = EndpointAccess((), known)
    always = action in (*OPEN, *WITHOUT_CREDENTIALS, Action.PAGE_FILE)  # the page itself asks for a token
    for role in CALLER_ROLES:
        denied = pytest.raises(Denied, match="neither this token nor this endpoint grants")
        with nullcontext() if always or role in action.row.roles else denied:
            access.check(action, {"authorization": f"Bearer {role}"}.get)
    for invalid in (None, "", "Bearer", "Bearer infe", "Basic infer", "infer", f"Bearer {digest('infer')}"):
        headers: dict[str, Any] = {"authorization": invalid}
        with nullcontext() if always else pytest.raises(Unauthenticated):
            access.check(action, headers.get)


def test_a_token_adds_to_the_roles_of_the_endpoint_and_an_unknown_one_is_refused() -> None:
    access = with_token(["observe"])
    access.check(Action.STATISTICS, nothing)
    access.check(Action.STATISTICS, {"authorization": "bearer t"}.get)
    access.check(Action.INFER, {"authorization": "BEARER  t"}.get)
    access.check(Action.STATISTICS, {"x-api-key": "t"}.get)
    with pytest.raises(Unauthenticated):
        access.check(Action.STATISTICS, {"authorization": "Bearer u"}.get)
    with pytest.raises(Denied, match="operate"):
        access.check(Action.LOAD, {"authorization": "Bearer t"}.get)
    assert str(access) == "roles observe, tokens: 1"


def test_without_a_token_only_the_server_is_asked_whether_it_is_ready() -> None:
    """Over all paths: whether a model is ready, or exists, is for callers with a role."""
    heads = HttpHeads(with_token([]))
    for path in [*PATHS, *QUERY_PATHS]:
        for method, action in path.actions.items():
            target = re.sub(r"{(\w+)}", "1", path.template)
            refusal = heads.head(lines(first=f"{method} {target} HTTP/1.1")).refusal
            if action is Action.LIVE or (action in OPEN and "{model}" not in path.template):
                assert refusal is None, target
            else:
                assert isinstance(refusal, Unauthenticated), target


def test_the_roles_of_a_caller_decide_what_the_answer_to_a_query_has() -> None:
    heads = HttpHeads(with_token(["observe"], role="operate"))
    block = "GET /shmserve/models HTTP/1.1"
    assert heads.head(lines(first=block)).roles == {"observe"}
    assert heads.head(lines("Authorization: Bearer t", first=block)).roles == {"observe", "operate"}


def test_web_pages_cannot_change_anything_without_a_token() -> None:
    """Browsers let any page send a POST to this machine, with the page as its origin."""
    page = {"origin": "http://example.org", "authorization": "Bearer t"}
    changing = {"load", "unload", "set_trace", "set_log", "named_repository"}
    assert {action for action in SERVED if action.row.roles == ("operate",)} == changing
    changing |= {"memory_register", "memory_unregister", "memory_status"}
    for action in SERVED:
        with_token(CALLER_ROLES, role="operate").check(action, page.get)
        if action in changing:
            with pytest.raises(Denied, match="requests from web pages"):
                EndpointAccess(CALLER_ROLES).check(action, page.get)
        else:
            EndpointAccess(CALLER_ROLES).check(action, page.get)


def test_every_action_is_in_one_group() -> None:
    for action in set(SERVED) - {Action.METRICS} - PAGE:
        assert len(action.row.groups) == 1, action
    assert {group for action in Action for group in action.row.groups} == set(restricted_apis.GROUPS)


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


INVALID_RESTRICTIONS = (
    "|health|health:k|health:=v|health:k=|cooking:k=v|:k=v|health,:k=v|health:a b=v|health:k=\x01|health:k= v"
)


@cases(*INVALID_RESTRICTIONS.split("|"), "health:k=é")
def test_invalid_restrictions_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        restricted_apis.read(text)
    with pytest.raises(ValueError, match="health is restricted more than once"):
        restricted_apis.Restrictions([restricted_apis.read(text) for text in ("health:a=b", "trace,health:c=d")])


def test_roles_and_restrictions_are_both_checked() -> None:
    restricted = restricted_apis.Restrictions([restricted_apis.read("inference,statistics:k=v")])
    access = EndpointAccess(["infer"], None, restricted)
    access.check(Action.INFER, {"k": "v"}.get)
    with pytest.raises(Denied, match="restricted, expecting header 'k'"):
        access.check(Action.INFER, nothing)
    with pytest.raises(Denied, match="needs the role"):
        access.check(Action.STATISTICS, {"k": "v"}.get)


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
    for other in "tu":
        twice = heads.head(lines("Authorization: Bearer t", f"authorization: Bearer {other}"))
        assert isinstance(twice.refusal, Unauthenticated)
    assert heads.head(bad) is not refused
    assert heads.head(lines(first="GET /v2 HTTP/1.1")).refusal is not None
    assert heads.head(lines(first="GET /v2/health/live HTTP/1.1")).refusal is None
    access.tokens = tokens.Tokens("")
    heads.forget()
    assert isinstance(heads.head(good).refusal, Unauthenticated)
