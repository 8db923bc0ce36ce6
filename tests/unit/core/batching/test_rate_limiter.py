"""The rate limiter: resources are never exceeded, no starvation, and turns by priority."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.core import events
from shmserve.core.batching.rate_limiter import ANY, SHARED, lacking
from shmserve.core.limits import Limits
from shmserve.core.policy import BatchPolicy, InstanceSpec, ModelPolicy, Resource, TensorSpec
from shmserve.protocol.messages import Infer, Tensor
from shmserve.protocol.worker_messages import Call
from tests.support.core.calling import caller_of
from tests.support.core.world import World
from tests.support.hypothesis_profiles import examples

SPECS = (TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),)


class Limited(World):
    """`models`: name -> the resources and turn of each instance."""

    def __init__(self, models: dict[str, list[InstanceSpec]], given: tuple[tuple[str, int, int], ...] = ()) -> None:
        super().__init__(Limits(rate_limit=True, resources=given))
        self.last = 0
        self.ran: Counter[str] = Counter()
        for name, specs in models.items():
            policy = ModelPolicy(name, 1, 1, *SPECS, BatchPolicy())
            self.policies[name, 1], self.large[name], self.loads_itself[name] = policy, frozenset(), True
            self.turn([(0, events.Deploy(name, (events.Target(1, 0, tuple(specs)),)))])
        self.client = self.connect("a")

    def infers(self, model: str, count: int) -> list[tuple[int, Any]]:
        found = []
        for _ in range(count):
            self.last += 1
            self.client.sends(self.last)
            found.append((self.client.peer, Infer(self.last, model, 0, (Tensor("x", "FP32", (1, 1), bytes(4)),))))
        return found

    def running(self) -> list[str]:
        return sorted(worker.name for worker in self.workers.values() if worker.running is not None)

    def done(self, name: str) -> None:
        self.ran[name] += 1
        self.worker(name).finish(self.now)
        self.settle()


def spec(name: str, *resources: Resource, turn: int = 1, device: int = 0) -> InstanceSpec:
    return InstanceSpec(name, device=device, resources=resources, turn=turn)


def test_instances_that_share_a_resource_run_one_at_a_time() -> None:
    gpu = Resource("memory", 4)
    world = Limited({"m": [spec("m_0", gpu), spec("m_1", gpu)], "free": [spec("free_0")]})
    world.turn(world.infers("m", 3) + world.infers("free", 1))
    assert len(world.running()) == 2
    assert "free_0" in world.running()
    world.done("free_0")
    seen = []
    while world.running():
        (name,) = world.running()
        seen.append(name)
        world.done(name)
    assert len(seen) == 3
    assert set(seen) == {"m_0", "m_1"}, "the one with the fewest batches goes first"
    assert len(world.client.answers) == 4


def test_instances_with_the_smaller_turn_run_first() -> None:
    gpu = Resource("memory", 4)
    models = {"b": [spec("b_0", gpu, turn=2)], "a": [spec("a_0", gpu)]}
    world = Limited(models, (("memory", ANY, 4),))
    world.turn(world.infers("b", 4) + world.infers("a", 4))
    order = []
    while world.running():
        (name,) = world.running()
        order.append(name[0])
        world.done(name)
    assert "".join(order) == "aabaabbb"


def test_each_device_has_its_own_resource_unless_it_is_shared() -> None:
    own, shared = Resource("memory", 4), Resource("licence", 1, shared=True)
    world = Limited({"m": [spec("m_0", own), spec("m_1", own, device=1)]})
    world.turn(world.infers("m", 2))
    assert world.running() == ["m_0", "m_1"]
    world = Limited({"m": [spec("m_0", shared), spec("m_1", shared, device=1)]})
    world.turn(world.infers("m", 2))
    assert len(world.running()) == 1


def test_a_crashed_worker_releases_its_resources() -> None:
    one = Resource("r", 1)
    world = Limited({"m": [spec("m_0", one)], "n": [spec("n_0", one)]})
    world.turn(world.infers("m", 1) + world.infers("n", 1))
    (first,) = world.running()
    world.crash(world.worker(first))
    world.advance(world.now + 10**9)
    for _ in range(2):
        (running,) = world.running()
        world.done(running)
    assert len(world.client.answers) == 2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((), ""),
        ((("r", ANY, 4),), ""),
        ((("r", ANY, 3),), "3"),
        ((("r", ANY, 3), ("r", 0, 4)), ""),
        ((("r", ANY, 4), ("r", 0, 3)), ""),
        ((("r", 1, 9),), "0"),
        ((("r", SHARED, 9),), "0"),
        ((("other", ANY, 9),), ""),
    ],
)
def test_insufficient_resources_are_reported(given: tuple[tuple[str, int, int], ...], text: str) -> None:
    if text:
        text = (
            f'Resource count for "r" is limited to {text} which will prevent scheduling of one or more model '
            "instances, the minimum required count is 4 (--rate-limit-resource, instance 'm_0')"
        )
    assert lacking([spec("m_0", Resource("r", 4))], given) == text


@pytest.mark.parametrize("given", [("r", ANY, 2), ("r", 1, 2), ("r", SHARED, 2)], ids=str)
def test_an_amount_without_a_device_counts_for_a_shared_resource(given: tuple[str, int, int]) -> None:
    shared = Resource("r", 1, shared=True)
    world = Limited({"m": [spec(f"m_{number}", shared, device=number) for number in range(3)]}, (given,))
    world.turn(world.infers("m", 3))
    assert len(world.running()) == 2


def test_a_resource_is_either_shared_or_of_each_device() -> None:
    own, shared = spec("own", Resource("r", 1)), spec("shared", Resource("r", 1, shared=True))
    text = (
        'Resource "r" is present as both global and device-specific resource in the model configuration. It is global '
        "for instance 'shared' and device-specific for instance 'own'"
    )
    assert lacking([own, shared], ()) == lacking([own], (), [shared]) == lacking([shared], (), [own]) == text
    assert not lacking([own], (), [own, spec("other", Resource("s", 1, shared=True))])


RESOURCES = st.lists(st.sampled_from([Resource("a", 1), Resource("a", 2), Resource("b", 1, shared=True)]), max_size=2)


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(RESOURCES, st.integers(1, 3), st.integers(0, 1)), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)
def test_every_request_runs_and_no_resource_is_exceeded(
    instances: list[tuple[list[Resource], int, int]], wanted: list[int], random: Any
) -> None:
    """check() asserts after every turn that no resource is exceeded."""
    unique = [(tuple({r.name: r for r in resources}.values()), turn, device) for resources, turn, device in instances]
    models = {
        f"m{index}": [spec(f"m{index}_0", *resources, turn=turn, device=device)]
        for index, (resources, turn, device) in enumerate(unique)
    }
    world = Limited(models)
    for number in wanted:
        world.turn(world.infers(f"m{number % len(models)}", 1))
        if random.random() < 0.3 and world.running():
            world.done(random.choice(world.running()))
    while world.running():
        world.done(random.choice(world.running()))
    assert len(world.client.answers) == len(wanted)


def test_an_instance_that_waits_for_a_call_releases_its_resources() -> None:
    """Otherwise the other model could not run. When the waiting model continues, resources may be exceeded temporarily,
    and no other model starts."""
    disk = Resource("disk", 1, True)
    more = [spec(f"m_{index}", disk) for index in range(3)]
    world = Limited({"m": more, "n": [spec("n_0", disk)], "k": [spec("k_0")]})
    world.turn(world.infers("m", 1))
    caller = world.worker(world.running()[0])
    assert caller.running is not None
    parent, asked = caller.running.works[0].request, caller_of(caller)
    for number, model in enumerate("nk", 1):
        asked.sends(number)
        caller.waits_for.add(number)
        call = Call(number, parent, model, 0, (Tensor("x", "FP32", (1, 1), bytes(4)),))
        world.turn([(caller.peer, call)])
    assert world.running() == ["k_0", caller.name, "n_0"]
    world.turn(world.infers("m", 2))
    assert len(world.running()) == 3, "one of them at a time"
    world.done("n_0")
    (other,) = set(world.running()) - {caller.name, "k_0"}
    world.done("k_0")
    assert not asked.open
    assert world.running() == sorted([caller.name, other]), "it goes on, though another one has what it lent"
    world.done(other)
    assert world.running() == [caller.name], "and nobody else begins"
    world.done(caller.name)
    (last,) = world.running()
    world.done(last)
    assert not world.core.state.requests
