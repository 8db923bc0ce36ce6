"""Slow and failed requests: which are kept, and where the time of each went."""

from __future__ import annotations

from msgspec.structs import replace

from shmserve.core.policy import BatchPolicy
from shmserve.core.stats.journeys import KEPT, SAMPLED_NS, WINDOW_NS, Journey, Journeys
from shmserve.protocol.messages import Options
from tests.support.core.policies import plain, step
from tests.support.core.world import World

MS = 1_000_000
POLICY = plain(max_batch=256)


def journey(took: int, ended: int = 0) -> Journey:
    return Journey("m", 1, ended - took, ended, 1)


def test_the_slowest_of_two_windows_are_kept() -> None:
    kept = Journeys()
    for took in [5, 1, 9, *range(20, 40), 3]:
        if kept.is_slow(100 - took, 100):
            kept.add_slow(journey(took), 100)
    expected = [39, 38, 37, 36, 35, 34, 33, 32]
    assert [one.took_ns for one in kept.recent_slow()] == expected
    assert len(expected) == KEPT
    later = 101 + WINDOW_NS
    assert kept.is_slow(later - 2, later), "a new window begins"
    kept.add_slow(journey(50), later)
    assert [one.took_ns for one in kept.recent_slow()] == [50, *expected[:-1]]
    kept.add_slow(journey(1), later + 2 * WINDOW_NS + 1)
    assert [one.took_ns for one in kept.recent_slow()] == [1], "the window before had none"


def served() -> World:
    world = World()
    world.deploy(POLICY)
    return world


def journeys(world: World, model: str = "m") -> Journeys:
    return world.core.state.models[model].versions[1].statistics.journeys


def test_a_slow_request_and_a_failed_one() -> None:
    world = served()
    client = world.connect("c")
    began = world.now
    world.turn([client.infer(1, "m", 1, 0, Options(id="mine"))])
    world.now += 5 * MS
    world.finish(took=3 * MS)
    (slow,) = journeys(world).recent_slow()
    times = (began + 2 * MS, began + 2 * MS, began + 5 * MS, began + 5 * MS)
    assert slow == Journey("m", 1, began, began + 5 * MS, 1, "mine", "", "", "m_0", 1, "idle", times)
    world.turn([client.infer(2, "m", 1, 0, None)])
    world.finish(error=("MODEL_FAILED", "no luck"))
    world.turn([client.infer(3, "m", 1, 0, None)])
    world.turn([client.infer(4, "m", 1, 1000, None)])
    world.advance(world.now + 2 * MS)
    expired, failed = journeys(world).recent_failed()
    assert (failed.code, failed.text, failed.instance) == ("MODEL_FAILED", "no luck", "m_0")
    assert (expired.code, expired.times, expired.text[:23]) == ("DEADLINE_EXCEEDED", (), "Request timeout expired")


def test_a_failure_that_is_delivered_later_keeps_its_text() -> None:
    world = World()
    world.deploy(plain(max_batch=1, batching=BatchPolicy(preserve_ordering=True)), instances=2)
    client = world.connect("c")
    world.turn([client.infer(number, "m", 1, 0, None) for number in (1, 2, 3)])
    world.finish("m_0", error=("MODEL_FAILED", "the second one"))
    world.turn([client.infer(4, "m", 1, 1000, None)])
    world.advance(world.now + 2 * MS)
    world.finish("m_1")
    assert "the second one" in [one.text for one in journeys(world).recent_failed()]


def test_one_run_of_an_ensemble_at_a_time_is_followed_with_its_steps() -> None:
    world = served()
    world.deploy(replace(POLICY, name="e", batching=None, steps=(step("m"),)))
    client = world.connect("c")
    for number in range(1, 4):
        world.turn([client.infer(number, "e", 1, 0, None)])
        world.now += number * MS
        world.finish_all()
    (slow,) = journeys(world, "e").recent_slow()
    assert [(one.model, one.took_ns, len(one.times)) for one in slow.steps] == [("m", MS, 4)]
    world.now += SAMPLED_NS
    world.turn([client.infer(9, "e", 1, 0, None)])
    world.now += 7 * MS
    world.finish_all()
    assert [one.took_ns for one in journeys(world, "e").recent_slow()] == [7 * MS, MS]


def test_a_failed_run_that_is_not_followed_has_the_step_that_failed() -> None:
    world = served()
    world.deploy(replace(POLICY, name="e", batching=None, steps=(step("m"),)))
    client = world.connect("c")
    for number in (1, 2):
        world.turn([client.infer(number, "e", 1, 0, None)])
        world.now += MS
        world.finish("m_0", error=("MODEL_FAILED", "no luck"))
    for failed in journeys(world, "e").recent_failed():
        assert [(one.model, one.code, one.text, len(one.times)) for one in failed.steps] == [
            ("m", "MODEL_FAILED", "no luck", 4)
        ]
    assert len(journeys(world, "e").recent_failed()) == 2
