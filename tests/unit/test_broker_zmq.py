"""The keepalive of ZeroMQ clients: who is pinged, and whose connection is given up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from shmserve import wire
from shmserve.broker.backlog import Backlog
from shmserve.broker.turns import Turns
from shmserve.broker.zmqdoor import Outbox, ZmqDoor
from shmserve.core.clients import Client
from shmserve.messages import PROTOCOL, Hello
from tests.fake_loop import Loop

PEER = 7
LIMIT = 1 << 20
PATIENCE_MS = 60_000


class World:
    """A door with one connected client, which has sent Hello. `clients` is what the core knows."""

    def __init__(self, folder: Path) -> None:
        self.clients: dict[int, Client] = {}
        self.delivered: list[Any] = []
        unused: Any = SimpleNamespace()
        self.door = ZmqDoor(
            folder / "sock",
            Loop(),
            unused,
            unused,
            lambda outbox: PEER,
            lambda peer, messages, descriptors: self.delivered.extend(messages),
            lambda peer, reason: None,
            "uid:1",
            LIMIT,
            Turns(lambda: None),
            Backlog(LIMIT, lambda peer, behind: None),
        )
        self.context = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.connect(f"ipc://{folder / 'sock'}")
        self.dealer.send(wire.encode([Hello(PROTOCOL, 0, "test", "posix")]))
        assert self.door._socket.poll(PATIENCE_MS)
        self.door.look()
        assert [type(message) for message in self.delivered] == [Hello]

    def silent(self) -> tuple[list[int], list[int]]:
        asked, lost = self.door.silent(self.clients)
        return peers(asked), peers(lost)

    def close(self) -> None:
        self.dealer.close()
        self.context.term()
        self.door.close()


def peers(outboxes: list[Outbox]) -> list[int]:
    return [outbox.peer for outbox in outboxes]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_a_client_is_not_pinged_before_its_welcome(world: World) -> None:
    """A client takes a server for another program if its first message is not Welcome."""
    assert world.silent() == ([], [])
    world.clients[PEER] = Client(PEER, "uid:1", "zmq")
    assert world.silent() == ([], [])
    world.clients[PEER].outputs = "posix"  # its Hello has been processed
    assert world.silent() == ([PEER], [])
    assert world.silent() == ([], [PEER])
