"""Sequence ids belong to users: two users with the same id have two sequences, which workers can distinguish."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.core.policy import IdControl, SequencePolicy
from shmserve.protocol.messages import Cancel, Fail, Infer, Options, Reply
from shmserve.protocol.worker_messages import EndSequences
from tests.support.core.fakes.client import FakeClient
from tests.support.core.policies import plain
from tests.support.core.world import World

S = 10**9


class Sequenced(World):
    """A world with a sequence model, and a list of the messages to its worker about sequences."""

    def __init__(self, strings: bool) -> None:
        super().__init__()
        self.id: int | str = "seven" if strings else 7
        control = IdControl("ID", "BYTES" if strings else "UINT64")
        self.deploy(plain("m", 4, None, sequence=SequencePolicy(True, 4, S, 0, 0.0, id_control=control)))
        self.executed: list[tuple[Any, bool, bool]] = []
        self.ended: list[Any] = []

    def _send(self, effect: Any) -> None:
        if isinstance(effect.message, EndSequences):
            self.ended += effect.message.sequences
        for work in getattr(effect.message, "works", ()):
            options = work.options
            self.executed.append((options.sequence, options.sequence_start, options.sequence_end))
        super()._send(effect)

    def step(self, client: FakeClient, number: int, start: bool = False, end: bool = False, caller: str = "") -> Any:
        options = Options(sequence=self.id, sequence_start=start, sequence_end=end, caller=caller)
        self.turn([client.infer(number, options=options)])
        self.finish_all()
        return client.answers[number]


@pytest.mark.parametrize("strings", [False, True])
def test_two_users_may_use_the_same_sequence_id(strings: bool) -> None:
    world = Sequenced(strings)
    one, other = world.connect("one"), world.connect("other", audience="uid:2000")
    refused = world.step(other, 1)
    assert isinstance(refused, Fail)
    for number in (1, 2, 3):
        assert isinstance(world.step(one, number, number == 1, number == 3), Reply)
        assert isinstance(world.step(other, number + 1, number == 1, number == 3), Reply)
    ids = [sequence for sequence, _, _ in world.executed]
    assert ids[::2] == [world.id] * 3
    assert len(set(ids[1::2])) == 1
    assert type(ids[1]) is type(world.id)
    assert ids[1] != world.id
    assert not world.core.state.sequences


def test_another_user_cannot_continue_a_sequence_and_gets_the_text_of_an_unknown_one() -> None:
    world = Sequenced(False)
    one, other = world.connect("one"), world.connect("other", audience="uid:2000")
    world.step(one, 1, start=True)
    known, unknown = world.step(other, 1), Sequenced(False)
    stranger = unknown.connect("other", audience="uid:2000")
    assert isinstance(known, Fail)
    assert known.text == unknown.step(stranger, 1).text
    assert isinstance(world.step(one, 2, end=True), Reply)


def test_the_end_of_an_idle_sequence_names_the_sequence_of_its_user() -> None:
    world = Sequenced(False)
    one, other = world.connect("one"), world.connect("other", audience="uid:2000")
    world.step(one, 1, start=True)
    world.step(other, 1, start=True)
    world.advance(world.now + S // 2)
    world.step(one, 2)
    world.advance(world.now + 3 * S // 4)  # idle for more than a second: the other user's sequence
    assert world.ended == [world.executed[1][0]]
    assert isinstance(world.step(one, 3, end=True), Reply)


def test_callers_of_one_client_have_separate_sequence_ids() -> None:
    """For example the callers of a gateway, which distinguishes them by their tokens."""
    world = Sequenced(False)
    gateway = world.connect("gateway")
    begun = [("alice", True), ("bob", False), ("bob", True), ("alice", False), ("", False), ("bob", False)]
    answers = [world.step(gateway, n, start, caller=caller) for n, (caller, start) in enumerate(begun, 1)]
    assert [type(answer) for answer in answers] == [Reply, Fail, Reply, Reply, Fail, Reply]
    alice, bob, again, later = [sequence for sequence, _, _ in world.executed]
    assert (alice, bob) == (again, later)
    assert alice != bob


def test_slots_are_assigned_to_users_in_turn() -> None:
    """A user with many abandoned sequences does not delay the first sequences of another."""
    world = World()
    world.deploy(plain("m", 4, None, sequence=SequencePolicy(True, 2, S, 0, 0.0)))
    crowd, honest = world.connect("crowd"), world.connect("honest", audience="uid:2000")

    def start(client: FakeClient, number: int) -> tuple[int, Infer]:
        return client.infer(number, options=Options(sequence=number, sequence_start=True))

    world.turn([start(crowd, number) for number in range(1, 101)])
    world.turn([start(honest, 1), start(honest, 2)])
    rounds = 0
    while not (1 in honest.answers and 2 in honest.answers):
        rounds += 1
        assert rounds < 5
        world.finish_all()
        world.advance(world.now + S)  # frees the slots of the abandoned sequences
    assert len(crowd.answers) <= 6


def test_sequences_of_one_id_wait_for_each_other_and_not_for_cancelled_ones() -> None:
    world = Sequenced(False)
    one = world.connect("one")
    for number in range(1, 6):
        options = Options(sequence=7, sequence_start=True, sequence_end=True)
        world.turn([one.infer(number, options=options)])
    world.turn([(one.peer, Cancel(3)), (one.peer, Cancel(5))])
    world.finish_all()
    assert [type(one.answers[number]) for number in (1, 2, 4)] == [Reply] * 3
    sequence_slots = world.core.state.ready["m"].sequence_slots
    assert sequence_slots is not None
    assert not sequence_slots.latest
    assert not sequence_slots.count
    assert isinstance(world.step(one, 6, start=True, end=True), Reply)
