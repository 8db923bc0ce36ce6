"""Workers that answer with memory they do not own, and clients that violate the protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shmserve.core import events
from shmserve.core.effects import Close, Kill, Log, Send
from shmserve.core.limits import Limits
from shmserve.core.state import WORKERS_FROM
from shmserve.protocol.messages import (
    OWNER_SHIFT,
    Ask,
    Cancel,
    Goodbye,
    Handle,
    Hello,
    Infer,
    Map,
    Pong,
    Reply,
    Return,
    Tensor,
    Welcome,
)
from shmserve.protocol.roles import ALL_ROLES, INFER, OBSERVE
from shmserve.protocol.worker_messages import Done, Row
from tests.support.cases import cases
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.policies import plain
from tests.support.core.world import Recorded

POLICY = plain()
LAST = 2**63 - 1


def sent(world: Recorded, peer: int, kind: type) -> list[Any]:
    found = [effect.message for effect in world.of(Send) if effect.peer == peer]
    return [message for message in found if isinstance(message, kind)]


def own(worker: FakeWorker, offset: int, size: int = 4, index: int = 1) -> Handle:
    return Handle((worker.peer << 32) + index, offset, size)


WRONG: dict[str, Callable[[Recorded, FakeWorker, FakeWorker], Any]] = {
    "an unknown segment of its own": lambda world, worker, other: (own(worker, 0, 4, 99),),
    "another worker's": lambda world, worker, other: (own(other, 0),),
    "outside of its segment": lambda world, worker, other: (own(worker, 4093),),
    "far outside": lambda world, worker, other: (own(worker, LAST, LAST),),
    "for another audience": lambda world, worker, other: (own(worker, 0, 4, 2),),
    "another client's": lambda world, worker, other: (Handle((2 << 32) + 1, 0, 4),),
    "the broker's": lambda world, worker, other: (Handle(1, 0, 4),),
    "what is held already": lambda world, worker, other: (own(worker, 64),),
    "one block twice": lambda world, worker, other: (own(worker, 128), own(worker, 128)),
    "a frame": lambda world, worker, other: 3,
}


@pytest.mark.parametrize("case", WRONG)
def test_a_worker_that_answers_with_foreign_memory_is_killed(case: str) -> None:
    world = Recorded()
    client, _ = world.connect("a"), world.connect("b")
    world.deploy(POLICY, 2)
    worker, other = world.worker("m_1"), world.worker("m_0")
    maps = [Map(own(who, 0).segment, 4096, None, "uid:1000") for who in (worker, other)]
    world.turn([(worker.peer, maps[0]), (other.peer, maps[1])])
    world.turn([(worker.peer, Map(own(worker, 0, 4, 2).segment, 4096, None, "uid:2000"))])

    def answer(*data: Any) -> None:
        assert worker.running is not None
        done, worker.running = worker.running, None
        pairs = zip(done.work_items, data, strict=True)
        rows = tuple(Row(work.request, (Tensor("y", "FP32", (1, 1), value),)) for work, value in pairs)
        world.turn([(worker.peer, Done(done.number, rows, (0, 0, 0, 0)))])

    world.turn([client.infer(1)])
    answer((own(worker, 64),))
    assert isinstance(client.answers[1], Reply)
    world.turn([client.infer(2), client.infer(3)])
    answer(bytes(4), WRONG[case](world, worker, other))
    assert isinstance(client.answers[2], Reply), "the others of its batch are answered"
    failed = client.answers[3]
    assert (failed.code, failed.text) == (
        "INTERNAL",
        "model 'm' version 1 sent a response with memory that it does not own",
    )
    assert [effect.peer for effect in world.of(Kill)] == [worker.peer]


@cases(
    (Hello(2, 1, "a", "memfd"), "protocol 2 is not supported, only 1"),
    (Hello(0, 1, "a", "memfd"), "protocol 0 is not supported"),
    (Hello(1, 1, "a", "posix"), "outputs 'posix' are not possible over this kind of link; use memfd"),
    (Hello(1, 1, "a", ""), "outputs '' are not possible"),
)
def test_an_invalid_hello_closes_the_connection(hello: Hello, text: str) -> None:
    world = Recorded()
    effects = world.core.handle([(0, events.Opened(1, "uid:1000", "lane", ALL_ROLES)), (1, hello)], world.now)
    goodbye, close = [effect for effect in effects if not isinstance(effect, Log)]
    assert isinstance(goodbye, Send)
    assert isinstance(goodbye.message, Goodbye)
    assert goodbye.message.code == "PROTOCOL"
    assert text in goodbye.message.text
    assert close == Close(1)


def test_frames_of_unknown_clients_are_freed() -> None:
    world = Recorded()
    block = Handle(1, 64, 4)
    framed = events.Framed(Infer(1, "m", 0, ()), (block,))
    world.turn([(0, events.Opened(1, "uid:1000", "zmq", ALL_ROLES))])
    world.clients[1] = FakeClient(1, "a", "zmq", "frames")
    world.turn([(1, framed), (99, framed)])
    assert world.freed == [block, block]


@pytest.mark.parametrize(
    ("plane", "roles", "named", "on_gpu"),
    [("lane", ALL_ROLES, 1, 1), ("lane", INFER | OBSERVE, 0, 0), ("zmq", ALL_ROLES, 1, 0)],
)
def test_welcome_contains_the_limits(plane: str, roles: int, named: int, on_gpu: int) -> None:
    world = Recorded(Limits(client_requests=5, client_segments=6, client_held_bytes=7))
    client = world.connect("a", plane, roles=roles)
    welcome = sent(world, client.peer, Welcome)[0]
    assert (welcome.protocol, welcome.owner, welcome.server) == (1, client.peer, "test")
    assert welcome.limits == {
        "packet_bytes": 192 * 1024,
        "inline_bytes": 4096,
        "frame_bytes": 1 << 20,
        "batch_requests": 64,
        "client_requests": 5,
        "client_questions": 1024,
        "client_segments": 6,
        "client_held_bytes": 7,
        "device_memory": on_gpu,
        "named_memory": named,
        "trace_context": 0,
    }


def test_memory_of_a_worker_cannot_be_announced_by_its_name() -> None:
    """Although the worker made it for this user."""
    world = Recorded()
    client = world.connect("a", "zmq")
    made = Map(WORKERS_FROM << OWNER_SHIFT | 1, 4096, "/made")
    world.core.state.ledger.announce(WORKERS_FROM, made, "posix:uid:1000")
    world.turn([(client.peer, Map(client.peer << OWNER_SHIFT | 1, 4096, "/made"))])
    assert "has already been announced" in sent(world, client.peer, Goodbye)[0].text


def test_messages_of_peers_that_have_ended_are_ignored() -> None:
    world = Recorded()
    world.deploy(POLICY)
    worker = world.worker("m_0")
    world.crash(worker)
    before = len(world.effects)
    echoes = [Done(1, (), (0, 0, 0, 0)), Map(own(worker, 0).segment, 64, None, "uid:1000"), Pong(1)]
    world.core.handle([(worker.peer, message) for message in echoes], world.now)
    client_echoes = [Infer(1, "m", 0, ()), Cancel(1), Return(()), Ask(1, "live"), Hello(1, 1, "a", "memfd")]
    assert world.core.handle([(55, message) for message in client_echoes], world.now) == []
    world.core.handle([(0, events.Closed(55)), (0, events.Exited(worker.peer, "again"))], world.now)
    world.core.check()
    assert len(world.effects) == before
