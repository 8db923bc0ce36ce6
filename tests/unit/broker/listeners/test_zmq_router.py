"""ZeroMQ clients: pings, lost connections, and the messages kept for a client that does not read."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from shmserve.broker.listeners.client_flow import ClientContext
from shmserve.broker.listeners.fair_turns import SHARE, ClientTurns, weight
from shmserve.broker.listeners.output_backlog import BEHIND_BYTES, USERS, OutputBacklog
from shmserve.broker.listeners.zmq_router import ZmqOutbox, ZmqRouter
from shmserve.core.ledger import Ledger
from shmserve.core.records import ClientState
from shmserve.protocol import codec
from shmserve.protocol.messages import BATCH_REQUESTS, PACKET_MESSAGES, PROTOCOL, Hello, Ping
from tests.unit.broker.listeners.test_turns import FULL, PolledLoop, batch

PEER = 7
LIMIT = 1 << 20
PATIENCE_MS = 60_000


class World:
    """A router with one connected client, which has sent Hello. `clients` are the clients of the core; `told` has the
    reported disconnects and clients that fall behind."""

    def __init__(self, folder: Path, client_outbox_bytes: int = LIMIT, outbox_bytes: int = LIMIT) -> None:
        self.loop, self.turns = PolledLoop(), ClientTurns(lambda: None)
        self.outboxes: list[ZmqOutbox] = []
        self.told: list[Any] = []
        self.clients: dict[int, ClientState] = {}
        self.delivered: list[Any] = []
        unused: Any = SimpleNamespace()
        self.door = ZmqRouter(
            folder / "sock",
            unused,
            unused,
            self._opened,
            "uid:1",
            ClientContext(
                self.loop,
                lambda peer, messages, descriptors: self.delivered.extend(messages),
                lambda peer, reason: self.told.append(reason),
                client_outbox_bytes,
                self.turns,
                OutputBacklog(outbox_bytes, lambda peer, behind: self.told.append(behind)),
            ),
        )
        self.context = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.connect(f"ipc://{folder / 'sock'}")
        self.dealer.send(codec.encode([Hello(PROTOCOL, 0, "test", "posix")]))
        self.receive()
        assert [type(message) for message in self.delivered] == [Hello]

    def _opened(self, make: Callable[[int], ZmqOutbox]) -> ZmqOutbox:
        self.outboxes.append(make(PEER))
        return self.outboxes[-1]

    def receive(self) -> None:
        """Reads until messages have been delivered."""
        self.delivered.clear()
        while not self.delivered:
            assert select.select(list(self.loop.readers), [], [], PATIENCE_MS / 1000)[0]
            self.door.read_input()

    def silent(self) -> tuple[list[int], list[int]]:
        asked, lost = self.door.silent(self.clients)
        return [outbox.peer for outbox in asked], [outbox.peer for outbox in lost]

    def close(self) -> None:
        self.dealer.close()
        self.context.term()
        self.door.close()


def client(outputs: str = "") -> ClientState:
    """`outputs` is set when the core has processed its Hello."""
    found = ClientState(PEER, "uid:1", "zmq", Ledger())
    found.outputs = outputs
    return found


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**limits: int) -> World:
        made.append(World(tmp_path, **limits))
        return made[-1]

    yield make
    for world in made:
        world.close()


def test_a_client_is_not_pinged_before_its_welcome(worlds: Callable[..., World]) -> None:
    """A client assumes that the server is another program if its first message is not Welcome."""
    world = worlds()
    assert world.silent() == ([], [])
    world.clients[PEER] = client()
    assert world.silent() == ([], [])
    world.clients[PEER] = client("posix")
    assert world.silent() == ([PEER], [])
    assert world.silent() == ([], [PEER])


@pytest.mark.parametrize("limit", ["client_outbox_bytes", "outbox_bytes"])
def test_a_client_that_does_not_read_is_disconnected(worlds: Callable[..., World], limit: str) -> None:
    """One user may have a quarter of `outbox_bytes`. Bytes in libzmq and the socket do not count."""
    size = 4 * LIMIT
    world = worlds(**{"client_outbox_bytes": 4 * size, "outbox_bytes": 16 * size, limit: size})
    (outbox,) = world.outboxes
    sent = 0
    while not any(type(one) is str for one in world.told):
        world.door.send(outbox, [bytes(LIMIT // 4)])
        sent += 1
        assert sent < 10_000
    most = size if limit == "client_outbox_bytes" else size // USERS
    *behind, reason = world.told
    assert behind == [True] * (most > BEHIND_BYTES)
    assert reason.startswith("it does not read its responses: ")
    assert reason.endswith(f"over the limit of {most} ({limit})")
    world.clients[PEER] = client("posix")
    assert world.silent() == ([], []), "the router has forgotten it"


def delivered(world: World) -> list[list[Any]]:
    """The messages that the core gets, turn by turn."""
    world.receive()
    turns = []
    while world.delivered:
        turns.append(list(world.delivered))
        world.delivered.clear()
        world.turns.begin()
    return turns


def test_infer_batches_are_delivered_in_shares_and_in_order(worlds: Callable[..., World]) -> None:
    world, count = worlds(), BATCH_REQUESTS + 1
    sent = [message for n in range(0, 20 * count, count) for message in (batch(n), Ping(n + BATCH_REQUESTS))]
    world.dealer.send(codec.encode(sent))
    turns = delivered(world)
    assert max(map(weight, turns)) <= SHARE + BATCH_REQUESTS, "exceeded by less than one InferBatch"
    assert [message for turn in turns for message in turn] == sent


def test_a_packet_with_frames_may_have_as_many_requests_as_messages(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.dealer.send_multipart([codec.encode([*[batch()] * FULL, Ping(1)]), b"frame"])
    ((refusal,),) = delivered(world)
    assert f"the limit is {PACKET_MESSAGES}" in refusal.text
    world.dealer.send_multipart([codec.encode([batch()] * FULL), b"frame"])
    assert delivered(world) == [[batch()] * FULL]


def test_a_client_that_reads_again_has_caught_up(worlds: Callable[..., World]) -> None:
    world = worlds(client_outbox_bytes=64 * LIMIT, outbox_bytes=256 * LIMIT)
    (outbox,) = world.outboxes
    sent = 0
    while not world.told:
        world.door.send(outbox, [bytes(LIMIT // 4)])
        sent += 1
    assert world.told == [True]
    for _ in range(sent):
        assert world.dealer.poll(PATIENCE_MS)
        world.dealer.recv()
        world.door.silent(world.clients)
    assert world.told == [True, False]
    assert outbox.unsent_bytes == 0
