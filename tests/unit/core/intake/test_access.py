"""The roles that each message and each query needs, with every set of roles.

`NEEDED` and `MESSAGES` repeat the table of the core: a message or a query that is not in them fails a test.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, get_args

import pytest

from shmserve.core import events
from shmserve.core.core import Core
from shmserve.core.effects import Close, Effect, Forget, Log, Query, Send
from shmserve.core.policy import BatchPolicy, InstanceSpec, ModelPolicy, TensorSpec
from shmserve.core.state import WORKERS_FROM
from shmserve.protocol import roles as access
from shmserve.protocol.messages import (
    OWNER_SHIFT,
    Ask,
    Bye,
    Cancel,
    ClientMessage,
    Columns,
    Fail,
    Goodbye,
    Handle,
    Hello,
    Infer,
    InferBatch,
    Map,
    More,
    Ping,
    Pong,
    Return,
    Tensor,
    TensorForm,
    Unmap,
)
from shmserve.protocol.roles import INFER, OBSERVE, OPERATE, ROLES
from shmserve.protocol.worker_messages import Execute
from tests.support.core.world import OUTPUTS

CLIENT = 1
SEGMENT = CLIENT << OWNER_SHIFT | 1
SETS = [sum(ROLES[name] for name in names) for size in range(4) for names in combinations(ROLES, size)]
ANY = INFER | OBSERVE | OPERATE
LOOK = OBSERVE | OPERATE

NEEDED = {
    **dict.fromkeys(("live", "ready", "loaded", "metadata"), ANY),
    **dict.fromkeys(("models", "config", "origins", "statistics", "metrics", "activity", "report", "log"), LOOK),
    **dict.fromkeys(("trace", "traffic", "text_models", "service"), LOOK),
    **dict.fromkeys(("logs", "load", "unload", "restart", "rollback", "record"), OPERATE),
    **dict.fromkeys(("set_log", "set_trace", "set_traffic", "set_service"), OPERATE),
}
"""Query -> the roles, any of which is sufficient."""
MESSAGES: dict[type, tuple[str, Any, int]] = {
    Hello: ("either", Hello(1, 0, "again", "memfd"), ANY),
    Infer: ("either", Infer(5, "m", 0, (Tensor("x", "FP32", (1, 1), bytes(4)),)), INFER),
    InferBatch: (
        "either",
        InferBatch("m", 0, Columns((TensorForm("x", "FP32", (1,)),), (5,), (1,), ((bytes(4),),))),
        INFER,
    ),
    Cancel: ("either", Cancel(5), ANY),
    Ask: ("either", Ask(5, "live"), ANY),
    Bye: ("either", Bye(), ANY),
    Map: ("lane", Map(SEGMENT, 4096), INFER),
    Unmap: ("either", Unmap(SEGMENT), ANY),
    Return: ("either", Return((Handle(SEGMENT, 0, 4),)), ANY),
    Ping: ("either", Ping(3), ANY),
    Pong: ("either", Pong(3), ANY),
    More: ("either", More(5, 1), ANY),
}
REGISTER = ("zmq", Map(SEGMENT, 4096, "/memory"), OPERATE)
"""A Map by name, which a worker opens as the server's user."""


def serving(roles: int, plane: str = "lane") -> tuple[Core, list[Effect]]:
    """A core with a ready model, and its effects when a client with these roles connects."""
    core = Core("test")
    core.handle([(0, events.Deploy("m", (events.Target(1, 0, (InstanceSpec("m_0"),)),)))], 0)
    specs = (TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),)
    core.handle([(next(iter(core.state.instances)), events.Compiled(ModelPolicy("m", 1, 8, *specs, BatchPolicy())))], 0)
    hello = Hello(1, 0, "client", OUTPUTS[plane])
    return core, core.handle([(0, events.Opened(CLIENT, "uid:1", plane, roles)), (CLIENT, hello)], 0)


def denials(effects: list[Effect]) -> list[Fail | Goodbye]:
    sent = [effect.message for effect in effects if isinstance(effect, Send) and effect.peer == CLIENT]
    return [message for message in sent if getattr(message, "code", "") == "DENIED"]


def check(effects: list[Effect], action: str, roles: int, needed: int) -> None:
    """Asserts that the action is denied once if no role suffices, with a text that names the roles, and without other
    effects."""
    found = denials(effects)
    assert len(found) == (0 if roles & needed else 1), (action, access.names(roles))
    for denial in found:
        wanted = " or ".join(access.names(needed))
        assert f"'{action}' needs the role {wanted}" in denial.text
        assert "--access" in denial.text
        assert not [effect for effect in effects if isinstance(effect, Query)]
        assert not [effect for effect in effects if isinstance(effect, Send) and effect.peer >= WORKERS_FROM]


@pytest.mark.parametrize("roles", [roles for roles in SETS if roles])
@pytest.mark.parametrize("kind", [*MESSAGES, "register"], ids=lambda kind: getattr(kind, "__name__", kind))
def test_r8_every_message_with_every_set_of_roles(kind: Any, roles: int) -> None:
    plane, message, needed = REGISTER if kind == "register" else MESSAGES[kind]
    for one in OUTPUTS if plane == "either" else [plane]:
        core, _ = serving(roles, one)
        effects = core.handle([(CLIENT, message)], 0)
        action = "live" if kind is Ask else kind if kind == "register" else kind.__name__.lower().removesuffix("batch")
        check(effects, action, roles, needed)
        if isinstance(message, Infer):
            runs = [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Execute)]
            assert len(runs) == bool(roles & INFER)
        elif isinstance(message, Map) and not roles & needed:
            assert Forget(SEGMENT) in effects
            assert Close(CLIENT) in effects
            assert SEGMENT not in core.state.ledger.segments
        core.check()


@pytest.mark.parametrize("roles", [roles for roles in SETS if roles])
def test_r8_every_query_with_every_set_of_roles(roles: int) -> None:
    for what, needed in NEEDED.items():
        for plane in OUTPUTS:
            core, _ = serving(roles, plane)
            effects = core.handle([(CLIENT, Ask(5, what))], 0)
            check(effects, what, roles, needed)
            assert (Query(CLIENT, Ask(5, what)) in effects) is bool(roles & needed)


def test_r8_actions_outside_the_table_are_denied() -> None:
    core, _ = serving(ANY)
    for what in ("Load", "load ", "shutdown", "hello", "infer", "more", "register", "\0"):
        effects = core.handle([(CLIENT, Ask(5, what))], 0)
        assert [effect for effect in effects if isinstance(effect, Query)] == []
        (fail,) = [effect.message for effect in effects if isinstance(effect, Send)]
        assert (fail.request, fail.code) == (5, "INVALID_ARG")
        assert "unknown query" in fail.text
    assert not access.allows("shutdown", ANY)


def test_r8_requests_with_tensors_in_frames() -> None:
    core, _ = serving(LOOK, "zmq")
    infer = MESSAGES[Infer][1]
    effects = core.handle([(CLIENT, events.Framed(infer, ()))], 0)
    check(effects, "infer", LOOK, INFER)


def test_the_table_of_roles_is_complete() -> None:
    assert NEEDED == access.QUERIES
    assert set(MESSAGES) == set(get_args(ClientMessage))


def test_a_client_without_roles_is_disconnected_and_ignored() -> None:
    core, effects = serving(access.NO_ROLES)
    (denial,) = denials(effects)
    assert isinstance(denial, Goodbye)
    assert "--access" in denial.text
    assert Close(CLIENT) in effects
    for message in [entry[1] for entry in MESSAGES.values()] + [Ask(5, what) for what in NEEDED]:
        assert [e for e in core.handle([(CLIENT, message)], 0) if not isinstance(e, (Close, Forget))] == []


def test_any_message_before_hello_closes_the_connection() -> None:
    for kind, (_, message, _) in MESSAGES.items():
        if kind in (Hello, Pong):  # a Pong is ignored from every client
            continue
        core = Core("test")
        core.handle([(0, events.Opened(CLIENT, "uid:1", "lane", ANY))], 0)
        effects = core.handle([(CLIENT, message)], 0)
        text = "the first message of a connection must be Hello"
        goodbye = [Send(CLIENT, Goodbye("CONNECTION_LOST", text))] if kind is not Bye else []
        assert [effect for effect in effects if not isinstance(effect, (Forget, Log))] == [*goodbye, Close(CLIENT)]


def test_the_log_of_denials_is_limited() -> None:
    """Once per connection, and once a second per user, however often the user reconnects."""
    core = Core("test")
    logged = []
    for peer in range(1, 50):
        now = 10**12 + peer * 10**8
        turn = [(0, events.Opened(peer, f"uid:{peer % 2}", "lane", INFER)), (peer, Hello(1, 0, "", "memfd"))]
        for event in [*turn, *[(peer, Ask(5, "load"))] * 3, (0, events.Closed(peer))]:
            logged += [effect for effect in core.handle([event], now) if isinstance(effect, Log)]
    assert len(logged) == 10
    for line in logged:
        assert line.level == "warning"
        assert "'load' needs the role operate" in line.text
    assert {line.fields["user"] for line in logged if line.fields} == {"uid:0", "uid:1"}
