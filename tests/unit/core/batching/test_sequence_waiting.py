"""Requests of a sequence that wait for their model to load, so many that they are checked in several turns."""

from __future__ import annotations

from shmserve.core import events
from shmserve.core.effects import Send
from shmserve.core.limits import Limits
from shmserve.protocol.messages import Fail
from tests.support.core.scenarios.scenario import Scenario


def test_a_sequence_that_has_begun_continues_when_its_model_is_unloaded() -> None:
    world = Scenario(Limits())
    for line in (
        "model m direct max_batch=2 unloaded",
        "client a",
        "infer a 1 sequence=7 start",
        "infer a 2-600 sequence=8 start",
        "infer a 601 sequence=7",
        "infer a 602-1200 sequence=9 start",
    ):
        world.run(line)
    world.core.handle(world.do_loaded("m_0"), world.now)
    effects = world.core.handle([(0, events.Unload("m"))], world.now)
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
    failed = [message.request for message in sent if isinstance(message, Fail)]
    assert 602 in failed
    assert 601 not in failed
    world.core.check()
