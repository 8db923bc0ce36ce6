"""Workers can distinguish sequences of two users with one id. tests/scenarios/sequence_users.txt has the rest."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.core.policy import IdControl, SequencePolicy
from shmserve.protocol.messages import Fail, Options, Reply
from tests.support.core.fakes.client import FakeClient
from tests.support.core.policies import plain
from tests.support.core.world import World

S = 10**9


class Sequenced(World):
    """A world with a sequence model, and a list of the sequences that its worker is sent."""

    def __init__(self, strings: bool) -> None:
        super().__init__()
        self.id: int | str = "seven" if strings else 7
        control = IdControl("ID", "BYTES" if strings else "UINT64")
        self.deploy(plain("m", 4, None, sequence=SequencePolicy(True, 4, S, 0, 0.0, id_control=control)))
        self.executed: list[Any] = []

    def _send(self, effect: Any) -> None:
        self.executed += [work.options.sequence for work in getattr(effect.message, "works", ())]
        super()._send(effect)

    def step(self, client: FakeClient, number: int, start: bool = False, end: bool = False) -> Any:
        options = Options(sequence=self.id, sequence_start=start, sequence_end=end)
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
    ids = world.executed
    assert ids[::2] == [world.id] * 3
    assert len(set(ids[1::2])) == 1
    assert type(ids[1]) is type(world.id)
    assert ids[1] != world.id
    assert not world.core.state.sequences
