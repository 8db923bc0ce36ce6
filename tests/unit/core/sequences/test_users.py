"""Sequence ids belong to users: two users with the same id have two sequences, and workers can tell them apart."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.core.policy import IdControl, ModelPolicy, SequencePolicy, TensorSpec
from shmserve.protocol.messages import Cancel, EndSequences, Fail, Infer, Options, Reply, Tensor
from tests.support.core.fakes import FakeClient
from tests.support.core.world import World

S = 10**9
SPECS = (TensorSpec("x", "FP32", (1,)),), (TensorSpec("y", "FP32", (1,)),)


class Sequenced(World):
    """With a model that keeps states: what its worker is told of sequences, in order."""

    def __init__(self, strings: bool) -> None:
        super().__init__()
        self.id: int | str = "seven" if strings else 7
        control = IdControl("ID", "BYTES" if strings else "UINT64")
        self.deploy(ModelPolicy("m", 1, 4, *SPECS, sequence=SequencePolicy(True, 4, S, 0, 0.0, id_control=control)))
        self.told: list[tuple[Any, bool, bool]] = []
        self.ended: list[Any] = []

    def _send(self, effect: Any) -> None:
        if isinstance(effect.message, EndSequences):
            self.ended += effect.message.sequences
        for work in getattr(effect.message, "works", ()):
            options = work.options
            self.told.append((options.sequence, options.sequence_start, options.sequence_end))
        super()._send(effect)

    def step(self, client: FakeClient, number: int, start: bool = False, end: bool = False, caller: str = "") -> Any:
        client.sends(number)
        options = Options(sequence=self.id, sequence_start=start, sequence_end=end, caller=caller)
        self.turn([(client.peer, Infer(number, "m", 0, (Tensor("x", "FP32", (1, 1), bytes(4)),), None, 0, options))])
        worker = self.worker("m_0")
        while worker.running is not None:
            worker.finish(self.now)
            self.settle()
        return client.answers[number]


@pytest.mark.parametrize("strings", [False, True])
def test_two_users_with_one_id(strings: bool) -> None:
    world = Sequenced(strings)
    one, other = world.connect("one"), world.connect("other", audience="uid:2000")
    refused = world.step(other, 1)
    assert isinstance(refused, Fail)
    for number in (1, 2, 3):
        assert isinstance(world.step(one, number, number == 1, number == 3), Reply)
        assert isinstance(world.step(other, number + 1, number == 1, number == 3), Reply)
    ids = [found for found, _, _ in world.told]
    assert ids[::2] == [world.id] * 3
    assert len(set(ids[1::2])) == 1
    assert type(ids[1]) is type(world.id)
    assert ids[1] != world.id
    assert not world.core.state.sequences


def test_another_user_cannot_continue_a_sequence_and_learns_nothing_of_it() -> None:
    world = Sequenced(False)
    one, other = world.connect("one"), world.connect("other", audience="uid:2000")
    world.step(one, 1, start=True)
    known, unknown = world.step(other, 1), Sequenced(False)
    stranger = unknown.connect("other", audience="uid:2000")
    assert isinstance(known, Fail)
    assert known.text == unknown.step(stranger, 1).text
    assert isinstance(world.step(one, 2, end=True), Reply)


def test_a_connection_of_the_same_user_continues_it() -> None:
    world = Sequenced(False)
    one, two = world.connect("one"), world.connect("two")
    world.step(one, 1, start=True)
    assert isinstance(world.step(two, 1, end=True), Reply)
    assert [found for found, _, _ in world.told] == [7, 7]


def test_the_worker_is_told_of_the_right_one_that_is_over() -> None:
    world = Sequenced(False)
    one, other = world.connect("one"), world.connect("other", audience="uid:2000")
    world.step(one, 1, start=True)
    world.step(other, 1, start=True)
    world.advance(world.now + S // 2)
    world.step(one, 2)
    world.advance(world.now + 3 * S // 4)  # idle for more than a second: the other's
    assert world.ended == [world.told[1][0]]
    assert isinstance(world.step(one, 3, end=True), Reply)


def test_callers_of_one_client_have_ids_of_their_own() -> None:
    """As those of a gateway that knows them by their tokens."""
    world = Sequenced(False)
    gateway = world.connect("gateway")
    begun = [("alice", True), ("bob", False), ("bob", True), ("alice", False), ("", False), ("bob", False)]
    answers = [world.step(gateway, n, start, caller=caller) for n, (caller, start) in enumerate(begun, 1)]
    assert [type(answer) for answer in answers] == [Reply, Fail, Reply, Reply, Fail, Reply]
    alice, bob, again, later = [found for found, _, _ in world.told]
    assert (alice, bob) == (again, later)
    assert alice != bob


def test_users_get_places_in_turn() -> None:
    """However many sequences another user has begun, and abandoned: the next place is for who has waited for none."""
    world = World()
    world.deploy(ModelPolicy("m", 1, 4, *SPECS, sequence=SequencePolicy(True, 2, S, 0, 0.0)))
    crowd, honest = world.connect("crowd"), world.connect("honest", audience="uid:2000")

    def start(client: FakeClient, number: int) -> tuple[int, Infer]:
        client.sends(number)
        options = Options(sequence=number, sequence_start=True)
        return client.peer, Infer(number, "m", 0, (Tensor("x", "FP32", (1, 1), bytes(4)),), None, 0, options)

    world.turn([start(crowd, number) for number in range(1, 101)])
    world.turn([start(honest, 1), start(honest, 2)])
    worker = world.worker("m_0")
    rounds = 0
    while not (1 in honest.answers and 2 in honest.answers):
        rounds += 1
        assert rounds < 5
        while worker.running is not None:
            worker.finish(world.now)
            world.settle()
        world.advance(world.now + S)  # the places of those that were abandoned
    assert len(crowd.answers) <= 6


def test_sequences_of_one_id_wait_for_each_other_and_not_for_those_that_ended_meanwhile() -> None:
    world = Sequenced(False)
    one = world.connect("one")
    for number in range(1, 6):
        one.sends(number)
        options = Options(sequence=7, sequence_start=True, sequence_end=True)
        tensor = Tensor("x", "FP32", (1, 1), bytes(4))
        world.turn([(one.peer, Infer(number, "m", 0, (tensor,), None, 0, options))])
    world.turn([(one.peer, Cancel(3)), (one.peer, Cancel(5))])
    worker = world.worker("m_0")
    while worker.running is not None:
        worker.finish(world.now)
        world.settle()
    assert [type(one.answers[number]) for number in (1, 2, 4)] == [Reply] * 3
    places = world.core.state.ready["m"].places
    assert places is not None
    assert not places.latest
    assert not places.count
    assert isinstance(world.step(one, 6, start=True, end=True), Reply)
