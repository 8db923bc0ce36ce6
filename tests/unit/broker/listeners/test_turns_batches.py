"""In a client's turn, an InferBatch counts as one message per request."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.broker.listeners.fair_turns import SHARE, split, weight
from shmserve.protocol import codec
from shmserve.protocol.messages import BATCH_REQUESTS, PACKET_MESSAGES, Columns, InferBatch, Map, Ping, TensorForm
from tests.unit.broker.listeners.test_turns import Worlds, worlds
from tests.unit.broker.listeners.test_zmq_router import World as ZmqWorld

__all__ = ["worlds"]
FORMS = (TensorForm("x", "UINT8", ()),)
MOST = SHARE + BATCH_REQUESTS
"""Maximum weight in one turn: the share is exceeded by less than one InferBatch."""


def batch(first: int, count: int = BATCH_REQUESTS) -> InferBatch:
    numbers = tuple(range(first, first + count))
    return InferBatch("m", 0, Columns(FORMS, numbers, (0,) * count, ((b"",),) * count))


def numbers_of(messages: list[Any]) -> list[int]:
    found: list[int] = []
    for message in messages:
        found += message.columns.requests if isinstance(message, InferBatch) else [message.number]
    return found


def flood(count: int) -> list[Any]:
    """InferBatches, and a Ping after every third one. Numbers ascend."""
    found: list[Any] = []
    number = 1
    for index in range(count):
        found.append(batch(number))
        number += BATCH_REQUESTS
        if index % 3 == 2:
            found.append(Ping(number))
            number += 1
    return found


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


def test_a_packet_with_descriptors_may_have_as_many_requests_as_messages(worlds: Worlds) -> None:
    """Such a packet is always delivered as a whole."""
    world = worlds(1)
    most = PACKET_MESSAGES // BATCH_REQUESTS
    for count, refused in ((most, True), (most - 1, False)):
        messages = [*[batch(1)] * count, Map(1 << 32 | count, 4096)]
        with open(os.devnull) as file:
            socket.send_fds(world.theirs[1], [codec.encode(messages)], [file.fileno()])
        got = [message for _, message in world.turn()]
        if refused:
            (refusal,) = got
            assert isinstance(refusal, codec.Refused)
            assert f"{PACKET_MESSAGES + 1} requests and other messages, the limit is {PACKET_MESSAGES}" in refusal.text
            assert not world.descriptors
        else:
            assert got == messages
            assert world.descriptors == 1
        while world.turn():
            pass


@pytest.fixture
def router(tmp_path: Path) -> Iterator[ZmqWorld]:
    world = ZmqWorld(tmp_path)
    yield world
    world.close()


def zmq_turns(world: ZmqWorld) -> list[list[Any]]:
    """The messages that the core gets, turn by turn."""
    world.receive()
    turns = []
    while world.delivered:
        turns.append(list(world.delivered))
        world.delivered.clear()
        world.turns.begin()
    return turns


def test_infer_batches_over_zeromq_are_delivered_in_shares_and_in_order(router: ZmqWorld) -> None:
    sent = flood(40)
    router.dealer.send(codec.encode(sent))
    turns = zmq_turns(router)
    assert max(map(weight, turns)) <= MOST
    assert len(turns) >= weight(sent) // MOST
    assert numbers_of([message for turn in turns for message in turn]) == numbers_of(sent)


def test_a_zeromq_packet_with_frames_may_have_as_many_requests_as_messages(router: ZmqWorld) -> None:
    most = PACKET_MESSAGES // BATCH_REQUESTS
    router.dealer.send_multipart([codec.encode([*[batch(1)] * most, Ping(1)]), b"frame"])
    ((refusal,),) = zmq_turns(router)
    assert isinstance(refusal, codec.Refused)
    assert f"the limit is {PACKET_MESSAGES}" in refusal.text
    good = [batch(1)] * most
    router.dealer.send_multipart([codec.encode(good), b"frame"])
    assert zmq_turns(router) == [good]
