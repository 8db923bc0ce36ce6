"""Leases that cannot be started: all that was created for them is removed, and the core is notified once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from shmserve.broker.leases import Leases
from shmserve.broker.link import EagerFlow, PeerLink
from shmserve.core.effects import ReadLease, StartLease
from shmserve.core.events import LeaseRead
from shmserve.protocol import codec
from shmserve.protocol.messages import PACKET_BYTES, BrokerMessage, ClientMessage, Lease, TensorForm
from shmserve.protocol.worker_messages import LeaseOver, Lend, WorkerOrder

CLIENT, WORKER = 1, 2
START = StartLease(
    CLIENT, WORKER, Lease(7, "m", 1, 4, True), Lend(7, "m", 1, True, (TensorForm("x", "FP32", (1,)),), 4, CLIENT)
)
LARGE = bytes(60_000)


class Lender:
    """The leases of a broker with two links, whose other ends are `peers`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.links: dict[int, PeerLink] = {}
        self.ours: dict[int, socket.socket] = {}
        self.peers: dict[int, socket.socket] = {}
        self.events: list[tuple[int, Any]] = []
        for peer in (CLIENT, WORKER):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.setblocking(False)
            self.ours[peer], self.peers[peer] = ours, theirs
            self.links[peer] = PeerLink(
                ours, peer, codec.Codec(ClientMessage), partial(EagerFlow, deliver=_no), _no, loop
            )
        self.leases = Leases(self.links, lambda peer, event: self.events.append((peer, event)), _no)

    def fill(self, peer: int) -> None:
        """Fills the socket: later messages to this peer must wait, and need copies of their descriptors."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.ours[peer].send(LARGE, socket.MSG_DONTWAIT)

    def received(self, peer: int, union: Any) -> tuple[list[Any], list[int]]:
        """The next message, and its descriptors."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.peers[peer], PACKET_BYTES, 4)
            except BlockingIOError:
                return [], []
            if data != LARGE:
                return codec.Codec(union).decode(data), descriptors

    def close(self) -> None:
        self.leases.close()
        for peer, link in self.links.items():
            link.close("")
            self.peers[peer].close()


def _no(*_: Any) -> None:
    pass


@pytest.fixture
def lender() -> Iterator[Lender]:
    loop = asyncio.new_event_loop()
    made = Lender(loop)
    yield made
    made.close()
    loop.close()


def out_of_descriptors(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Makes os.dup fail after this many calls."""
    left = iter(range(after))
    dup = os.dup

    def fail(fd: int) -> int:
        if next(left, None) is None:
            raise OSError(errno.EMFILE, "Too many open files")
        return dup(fd)

    monkeypatch.setattr(os, "dup", fail)


@pytest.mark.parametrize(("full", "copies"), [(CLIENT, 0), (WORKER, 0), (WORKER, 1)])
def test_a_lease_that_cannot_be_started_leaves_nothing_behind(
    lender: Lender, full: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender.leases.start(START)
    (lease,), (end,) = lender.received(CLIENT, BrokerMessage)
    (lend,), (other, log) = lender.received(WORKER, WorkerOrder)
    assert (lease, lend, lender.events) == (START.of_client, START.of_worker, [])
    with socket.socket(fileno=end) as client, socket.socket(fileno=other) as worker:
        client.send(b"there")
        assert worker.recv(10) == b"there"
    os.close(log)
    lender.leases.read(ReadLease(7, True))
    lender.events.clear()
    lender.fill(full)
    before = len(os.listdir("/proc/self/fd"))
    out_of_descriptors(monkeypatch, copies)
    lender.leases.start(START)
    assert lender.events == [(WORKER, LeaseOver(7))]
    assert lender.received(WORKER, WorkerOrder) == ([], []), "the worker would report the end of the lease, too"
    messages, descriptors = lender.received(CLIENT, BrokerMessage)
    assert (messages, len(descriptors)) == ([START.of_client] * len(descriptors), int(full == WORKER))
    for descriptor in descriptors:
        with socket.socket(fileno=descriptor) as client:
            assert client.recv(1) == b"", "its other end is closed"
    lender.leases.read(ReadLease(7, True))
    assert lender.events[1:] == [(0, LeaseRead(7, [], final=True))]
    assert lender.leases.read_all() == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("gone", [CLIENT, WORKER])
def test_a_lease_whose_client_or_worker_has_disconnected(lender: Lender, gone: int) -> None:
    link = lender.links.pop(gone)
    lender.leases.start(START)
    assert lender.events == [(WORKER, LeaseOver(7))]
    assert lender.received(CLIENT, BrokerMessage) == lender.received(WORKER, WorkerOrder) == ([], [])
    lender.leases.read(ReadLease(7, True))
    assert lender.events[1:] == [(0, LeaseRead(7, [], final=True))], "the core waits for it"
    lender.links[gone] = link
