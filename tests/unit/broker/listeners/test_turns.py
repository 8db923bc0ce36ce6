"""Clients' links take turns. Counts the messages that each delivers per turn, with real sockets and a loop that the
test runs."""

from __future__ import annotations

import os
import select
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.broker.link import PeerLink
from shmserve.broker.listeners import fair_turns
from shmserve.broker.listeners.client_flow import ClientContext, ClientFlow
from shmserve.broker.listeners.fair_turns import MESSAGES, SHARE, ClientTurns, split, weight
from shmserve.broker.listeners.output_backlog import BEHIND_BYTES, USERS, OutputBacklog
from shmserve.protocol import codec
from shmserve.protocol.messages import (
    BATCH_REQUESTS,
    PACKET_BYTES,
    PACKET_MESSAGES,
    Answer,
    BrokerMessage,
    ClientMessage,
    Columns,
    Goodbye,
    InferBatch,
    Map,
    Ping,
    TensorForm,
)
from tests.support.manual_loop import ManualLoop

FULL = PACKET_MESSAGES // BATCH_REQUESTS
CODEC = codec.Codec(ClientMessage, PACKET_MESSAGES)
ANSWERS = codec.Codec(BrokerMessage)


def batch(first: int = 1, count: int = BATCH_REQUESTS) -> InferBatch:
    """It counts as one message per request."""
    numbers = tuple(range(first, first + count))
    return InferBatch("m", 0, Columns((TensorForm("x", "UINT8", ()),), numbers, (0,) * count, ((b"",),) * count))


class PolledLoop(ManualLoop):
    """Runs one iteration at a time: the callbacks of readable sockets, then the turn."""

    def __init__(self) -> None:
        super().__init__()
        self.writers: dict[int, Callable[[], None]] = {}

    def add_writer(self, number: int, call: Callable[[], None]) -> None:
        self.writers[number] = call

    def remove_writer(self, number: int) -> None:
        self.writers.pop(number, None)

    def call_soon(self, call: Callable[[], None]) -> None:
        self.call_later(0, call)


class World:
    def __init__(
        self, links: int, users: dict[int, str] | None = None, outbox_bytes: int = 256 << 20, own_bytes: int = 64 << 20
    ) -> None:
        self.loop = PolledLoop()
        self.behind: list[tuple[int, bool]] = []
        self.backlog = OutputBacklog(outbox_bytes, lambda peer, behind: self.behind.append((peer, behind)))
        self.turns = ClientTurns(self._due)
        self.due = False
        self.inbox: list[tuple[int, Any]] = []
        self.descriptors = 0
        self.heard: list[tuple[int, Any]] = []
        """Messages that the core received while a client read."""
        self.ended: list[int] = []
        self.ours: dict[int, socket.socket] = {}
        self.theirs: dict[int, socket.socket] = {}
        self.links: dict[int, PeerLink] = {}
        context = ClientContext(
            self.loop, self._deliver, lambda peer, _: self.ended.append(peer), own_bytes, self.turns, self.backlog
        )
        for peer in range(1, links + 1):
            ours, self.theirs[peer] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.ours[peer] = ours
            self.links[peer] = context.link(ours, peer, (users or {}).get(peer, "uid:1"), CODEC)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)  # two packets, then it is full

    def _due(self) -> None:
        self.due = True

    def _deliver(self, peer: int, messages: list[Any], descriptors: list[int]) -> None:
        self.inbox += [(peer, message) for message in messages]
        self.descriptors += len(descriptors)
        for number in descriptors:
            os.close(number)
        self.due = True

    def send(self, peer: int, count: int, start: int = 0) -> None:
        self.theirs[peer].send(codec.encode([Ping(start + n) for n in range(count)]))

    def flood(self, peers: Iterable[int], packets: int = 1) -> None:
        for _ in range(packets):
            for peer in peers:
                self.send(peer, PACKET_MESSAGES)

    def turn(self) -> list[tuple[int, Any]]:
        """Runs an iteration of the loop. Returns the messages that the core gets in its turn."""
        self.due = False
        readable = select.select(list(self.loop.readers), [], [], 0)[0]
        for call in [self.loop.readers[number] for number in readable]:
            call()
        for call in list(self.loop.writers.values()):
            call()
        self.due = self.turns.begin() or self.due
        inbox, self.inbox = self.inbox, []
        return inbox

    def turns_until_quiet(self) -> list[tuple[int, Any]]:
        """The messages that the core gets until there are no more."""
        found: list[tuple[int, Any]] = []
        while got := self.turn():
            found += got
        return found

    def answer(self, peer: int, size: int) -> None:
        """Sends an answer in pieces of the usual size."""
        self.links[peer].outbox += [Answer(1, bytes(32_768), True)] * (size // 32_768)
        self.links[peer].flush(lambda segment: None)

    def pause(self, peer: int, until: int) -> None:
        flow = self.links[peer].flow
        assert isinstance(flow, ClientFlow)
        flow.pause(until)

    def read(self, peer: int) -> list[Any]:
        """The messages that the client can read without waiting."""
        found: list[Any] = []
        while True:
            try:
                packet = self.theirs[peer].recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            if not packet:
                return found
            found += ANSWERS.decode(packet)

    def read_all(self, peer: int) -> list[Any]:
        """Reads, alternating with turns of the broker."""
        found: list[Any] = []
        while got := self.read(peer):
            found += got
            self.heard += self.turn()
        return found

    def close(self) -> None:
        for link in self.links.values():
            link.close("")
        for theirs in self.theirs.values():
            theirs.close()


Worlds = Callable[..., World]


@pytest.fixture
def worlds() -> Iterator[Worlds]:
    made: list[World] = []

    def make(*arguments: Any, **more: Any) -> World:
        made.append(World(*arguments, **more))
        return made[-1]

    yield make
    for world in made:
        world.close()


def numbers(messages: list[tuple[int, Any]]) -> list[int]:
    return [message.number for _, message in messages]


def test_a_large_packet_is_delivered_in_shares_and_in_order(worlds: Worlds) -> None:
    world = worlds(1)
    readers = list(world.loop.readers)
    world.send(1, PACKET_MESSAGES)
    world.send(1, 3, PACKET_MESSAGES)
    heard: list[int] = []
    while len(heard) < PACKET_MESSAGES + 3:
        got = world.turn()
        assert 0 < len(got) <= 2 * SHARE
        heard += numbers(got)
    assert heard == list(range(PACKET_MESSAGES + 3))
    assert list(world.loop.readers) == readers
    assert world.turn() == []
    assert not world.due


@pytest.mark.parametrize("flooders", [1, 40, 300])
def test_a_flood_delays_other_clients_by_a_few_turns(worlds: Worlds, flooders: int) -> None:
    world = worlds(flooders + 1)
    world.flood(range(1, flooders + 1), packets=4)
    world.turn()
    world.send(flooders + 1, 1)
    for _ in range(flooders * SHARE // MESSAGES + 2 + flooders // 8):
        got = world.turn()
        assert len(got) <= 2 * (MESSAGES + SHARE)
        if flooders + 1 in (sender for sender, _ in got):
            return
    raise AssertionError("it was not delivered")


def test_nothing_is_delivered_from_a_paused_or_closed_link(worlds: Worlds) -> None:
    world = worlds(2)
    world.flood(world.theirs)
    world.turn()
    world.pause(1, 0)
    world.links[2].close("enough")
    assert world.ended == [2]
    assert world.turn() == []
    assert not world.loop.readers
    world.loop.fire()
    assert world.due
    heard = world.turns_until_quiet()
    assert {peer for peer, _ in heard} == {1}
    assert len(heard) >= PACKET_MESSAGES - 2 * SHARE


def test_a_pause_lasts_until_the_latest_time_or_the_end(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    world = worlds(1)
    monkeypatch.setattr(fair_turns, "time", SimpleNamespace(monotonic_ns=lambda: round(world.loop.now * 1e9)))
    world.send(1, 3)
    for until_ms in (10, 50, 20):
        world.pause(1, until_ms * 1_000_000)
    for after in (0.01, 0.04):
        assert world.turn() == []
        assert world.loop.fire() == pytest.approx(after)
    assert len(world.turn()) == 3
    world.send(1, 3)
    world.pause(1, 10**9)
    world.links[1].close("enough")
    assert not world.loop.timers
    assert world.turn() == []


def test_the_last_packets_before_a_connection_reset_are_delivered(worlds: Worlds) -> None:
    """Even behind a large packet. Event loops no longer report such sockets."""
    world = worlds(1)
    world.ours[1].send(b"unread")
    for start in (0, 1000, 2000):
        world.send(1, 1000, start)
    world.theirs[1].close()
    heard: list[int] = []
    while not world.ended:
        heard += numbers(world.turn())
    assert heard == list(range(3000))
    assert not world.loop.readers


@given(st.lists(st.integers(-1, 70), max_size=30), st.integers(1, 200))
def test_a_share_is_split_off_by_weight_and_nothing_is_lost(sizes: list[int], share: int) -> None:
    """-1: a Ping; 0: an InferBatch without requests, which is refused but must still be read."""
    messages = [Ping(0) if size < 0 else batch(1, size) for size in sizes]
    weights = [max(size, 1) for size in sizes]
    assert weight(messages) == sum(weights)
    head, rest = split(messages, share)
    assert head + rest == messages
    assert bool(head) == bool(messages)
    assert sum(weights[: max(len(head) - 1, 0)]) < share  # without its last message, the share is not used up
    if rest:
        assert sum(weights[: len(head)]) >= share


@pytest.mark.parametrize(
    ("messages", "descriptors", "refusal"),
    [
        ([Ping(n) for n in range(PACKET_MESSAGES - 1)], 1, ""),
        ([Ping(n) for n in range(PACKET_MESSAGES)], 1, f"more than {PACKET_MESSAGES} messages"),
        ([batch()] * (FULL - 1), 1, ""),
        ([batch()] * FULL, 0, f"{PACKET_MESSAGES + 1} requests and other messages, the limit is {PACKET_MESSAGES}"),
    ],
    ids=["messages", "a message too many", "requests", "requests too many"],
)
def test_a_packet_with_descriptors_stays_whole_and_has_a_limit(
    worlds: Worlds, messages: list[Any], descriptors: int, refusal: str
) -> None:
    world = worlds(1)
    messages = [*messages, Map(1 << 32, 4096)]
    with open(os.devnull) as file:
        socket.send_fds(world.theirs[1], [codec.encode(messages)], [file.fileno()])
    got = [message for _, message in world.turn()]
    if refusal:
        assert refusal in got[0].text
    else:
        assert got == messages
    assert world.descriptors == descriptors


@pytest.mark.parametrize(("user", "count"), [("uid:2", 40), ("uid:1", 1)], ids=["another user", "a small packet"])
def test_many_connections_of_a_user_delay_another_user_by_one_of_them(worlds: Worlds, user: str, count: int) -> None:
    """A small packet of the same user goes before the large ones."""
    last = 301
    world = worlds(last, {last: user})
    world.flood(range(1, last))
    world.turn()
    world.send(last, count)
    found = Counter(peer for _ in range(2) for peer, _ in world.turn())
    assert found[last] == count


def test_small_packets_do_not_starve_large_ones(worlds: Worlds) -> None:
    world = worlds(200)
    world.flood(range(1, 100))
    heard: Counter[int] = Counter()
    for _ in range(20):
        for peer in range(100, 201):
            world.send(peer, 20)
        heard.update(peer for peer, _ in world.turn())
    assert sum(count for peer, count in heard.items() if peer < 100) >= 20 * MESSAGES // 100


def test_input_of_a_client_that_does_not_read_waits(worlds: Worlds) -> None:
    world = worlds(2)
    world.answer(1, 2 * BEHIND_BYTES)
    world.answer(2, BEHIND_BYTES // 2)
    assert world.behind == [(1, True)]
    world.send(1, 10)
    world.send(2, 10)
    assert {peer for peer, _ in world.turn()} == {2}
    assert world.turn() == []
    assert len(world.read_all(1)) == 2 * BEHIND_BYTES // 32_768
    assert world.behind == [(1, True), (1, False)]
    assert numbers(world.heard) == list(range(10))
    world.send(1, 1, 10)
    assert world.turn() == [(1, Ping(10))]


def test_a_client_that_falls_behind_in_its_share_keeps_the_rest_for_later(worlds: Worlds) -> None:
    world = worlds(1)
    world.flood([1])
    heard = world.turn()
    world.answer(1, 2 * BEHIND_BYTES)
    assert world.turn() == []
    assert not world.due
    world.read_all(1)
    assert numbers(heard + world.heard + world.turns_until_quiet()) == list(range(PACKET_MESSAGES))


def test_a_client_that_ends_while_it_is_behind(worlds: Worlds) -> None:
    world = worlds(2, outbox_bytes=USERS * 3 * BEHIND_BYTES)
    world.answer(1, 2 * BEHIND_BYTES)
    world.send(1, 3)
    world.theirs[1].close()
    heard = []
    for _ in range(4):
        heard += world.turn()
        while world.loop.timers:
            world.loop.timers.pop(0).callback()
    assert numbers(heard) == [0, 1, 2]
    assert (world.ended, len(world.loop.readers), world.loop.writers) == ([1], 1, {})
    world.answer(2, 2 * BEHIND_BYTES)
    assert world.ended == [1], "what the first had not read no longer counts for its user"


def test_a_broken_link_drops_its_queue_at_the_first_packet(worlds: Worlds) -> None:
    """One system call and one callback for each of thousands of queued packets would stall the broker."""
    world = worlds(1)
    world.answer(1, 100 * PACKET_BYTES)
    world.theirs[1].close()
    (write,) = world.loop.writers.values()
    write()
    assert (len(world.loop.timers), world.loop.writers) == (1, {})


def test_over_its_own_backlog_limit_a_client_that_does_not_read_is_disconnected(worlds: Worlds) -> None:
    world = worlds(2, own_bytes=1 << 20)
    for peer, size in ((1, 1 << 19), (2, 2 << 20)):
        world.answer(peer, size)
    assert world.ended == [2]
    (goodbye,) = [message for message in world.read_all(2) if isinstance(message, Goodbye)]
    assert (goodbye.code, "(client_outbox_bytes)" in goodbye.text) == ("UNAVAILABLE", True)


def test_over_the_backlog_limit_of_a_user_a_client_that_does_not_read_is_disconnected(worlds: Worlds) -> None:
    world = worlds(4, {4: "uid:2"}, USERS * (4 << 20))
    for peer in (4, 1, 2, 3):
        world.answer(peer, 1 << 20)
    assert not world.ended
    world.read_all(1)
    world.answer(1, 7 << 19)
    assert world.ended == [2]
    (goodbye,) = [message for message in world.read_all(2) if isinstance(message, Goodbye)]
    assert "(outbox_bytes)" in goodbye.text


def test_over_the_total_backlog_limit_a_client_that_does_not_read_is_disconnected(worlds: Worlds) -> None:
    world = worlds(8, {peer: f"uid:{peer}" for peer in range(1, 9)}, USERS * (4 << 20))
    for peer in range(1, 9):
        world.answer(peer, 3 << 20)
    assert world.ended in ([1, 2], [1, 2, 3]), "those that have read nothing for the longest time"
