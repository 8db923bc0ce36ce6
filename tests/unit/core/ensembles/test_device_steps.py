"""Tensors between steps that stay on a GPU: when the core allows this, and what happens when the worker that made them
ends."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from shmserve.core import events
from shmserve.core.limits import Limits
from shmserve.core.policy import BatchPolicy, InstanceSpec, MemoryEstimate, ModelPolicy, StepPolicy, TensorSpec
from shmserve.protocol.messages import DEVICE, Fail, Infer, Map, Reply, Return, Tensor, Wanted
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.world import World

GPU, CPU = "KIND_GPU", "KIND_CPU"
FIRST, LAST = "first", "last"


class Gpus(World):
    """`places` are the devices of each model's instances. Outputs in `near` are in a segment on the GPU."""

    def __init__(self, places: dict[str, list[tuple[str, int]]], limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.places = places

    def target(self, policy: ModelPolicy, source: int, instances: int) -> events.Target:
        if policy.steps is not None:
            return super().target(policy, source, instances)
        specs = [
            InstanceSpec(f"{policy.name}_{number}", kind, device)
            for number, (kind, device) in enumerate(self.places[policy.name])
        ]
        return events.Target(policy.version, source, tuple(specs))

    def heard(self, worker: FakeWorker, count: int | None = None) -> list[tuple[int, Any]]:
        found = super().heard(worker, count)
        for _, message in found:
            if isinstance(message, Map) and self.places[worker.policy.name][0][0] == GPU:
                message.name = f"{DEVICE}of {worker.name}"
        return found


def model(name: str, there: bool = True, cached: bool = False) -> ModelPolicy:
    x, y = TensorSpec("x", "FP32", (1,)), TensorSpec("y", "FP32", (1,))
    return ModelPolicy(
        name, 1, 8, (x,), (y,), BatchPolicy(), reads_device_memory=there, leaves_on_device=there, cached=cached
    )


def world(
    first: list[tuple[str, int]], last: list[tuple[str, int]], can: tuple[bool, bool] = (True, True)
) -> tuple[Gpus, FakeClient]:
    """An ensemble of two steps: x -> first -> t -> last -> y. Its caller may also ask for t."""
    made = Gpus({FIRST: first, LAST: last})
    deploy(made, can)
    return made, made.connect("a")


def deploy(made: Gpus, can: tuple[bool, bool] = (True, True), stays: bool = False) -> None:
    made.deploy(model(FIRST, can[0]), large="y")
    made.deploy(replace(model(LAST, can[1]), stays_loaded=stays), large="y")
    t, y = TensorSpec("t", "FP32", (1,)), TensorSpec("y", "FP32", (1,))
    steps = (
        StepPolicy(FIRST, 0, (("x", "x"),), (("y", "t"),)),
        StepPolicy(LAST, 0, (("x", "t"),), (("y", "y"),)),
    )
    made.deploy(ModelPolicy("e", 1, 8, (TensorSpec("x", "FP32", (1,)),), (t, y), steps=steps))


def ask(made: Gpus, client: FakeClient, number: int, *outputs: str, name: str = "e") -> None:
    client.sends(number)
    wanted = tuple(Wanted(output) for output in outputs)
    made.turn([(client.peer, Infer(number, name, 0, (Tensor("x", "FP32", (1, 1), bytes(4)),), wanted))])


def busy_one(made: Gpus, model: str) -> FakeWorker:
    (found,) = [worker for worker in made.workers.values() if worker.policy.name == model and worker.running]
    return found


def near(made: Gpus, model: str) -> tuple[str, ...]:
    running = busy_one(made, model).running
    assert running is not None
    (work,) = running.works
    return work.step.near if work.step is not None else ()


def done(made: Gpus, model: str) -> None:
    busy_one(made, model).finish(made.now)
    made.settle()


ON_0, ON_1, ON_BOTH = [(GPU, 0)], [(GPU, 1)], [(GPU, 0), (GPU, 1)]


@pytest.mark.parametrize(
    ("first", "last", "can", "wanted"),
    [
        (ON_0, ON_0, (True, True), ("y",)),
        (ON_0 * 2, ON_0 * 2, (True, True), ("y",)),
        (ON_1, ON_1, (True, True), ("y",)),
        (ON_0, ON_1, (True, True), ()),
        (ON_0, ON_BOTH, (True, True), ()),
        (ON_BOTH, ON_0, (True, True), ()),
        (ON_0, [(CPU, 0)], (True, True), ()),
        ([(CPU, 0)], [(CPU, 0)], (True, True), ()),
        (ON_0, [(GPU, 0), (CPU, 0)], (True, True), ()),
        (ON_0, ON_0, (False, True), ()),
        (ON_0, ON_0, (True, False), ()),
    ],
)
def test_a_tensor_stays_on_the_gpu_only_if_all_its_readers_run_there(
    first: Any, last: Any, can: Any, wanted: tuple[str, ...]
) -> None:
    made, client = world(first, last, can)
    ask(made, client, 1, "y")
    assert near(made, "first") == wanted
    done(made, "first")
    assert near(made, "last") == ()  # the caller reads it
    done(made, "last")
    assert isinstance(client.answers[1], Reply)


def test_outputs_requested_by_the_caller_do_not_stay_on_the_gpu() -> None:
    made, client = world(ON_0, ON_0)
    ask(made, client, 1, "y", "t")
    assert near(made, "first") == ()
    done(made, "first")
    done(made, "last")
    assert isinstance(client.answers[1], Reply)


def test_outputs_of_a_plain_request_do_not_stay_on_the_gpu() -> None:
    made, client = world(ON_0, ON_0)
    ask(made, client, 1, "y", name=FIRST)
    assert near(made, "first") == ()


def begun(first: list[tuple[str, int]], last: list[tuple[str, int]], busy: bool) -> tuple[Gpus, FakeClient]:
    """The first step is done. `busy`: the second step's instance is still running another batch."""
    made, client = world(first, last)
    if busy:
        for number in (100, 101):  # one that runs, and one that waits
            ask(made, client, number, "y", name=LAST)
    ask(made, client, 1, "y")
    done(made, "first")
    return made, client


@pytest.mark.parametrize("busy", [True, False])
def test_a_tensor_on_a_gpu_is_lost_if_its_producer_ends(busy: bool) -> None:
    """Whether it is read now or later. The model that would have read it continues."""
    made, client = begun(ON_0, ON_0, busy)
    made.crash(made.worker("first_0"))
    answer = client.answers[1]
    assert isinstance(answer, Fail)
    assert answer.code == "HANDLE_LOST"
    assert "a tensor was on the GPU of instance 'first_0', whose worker process has ended" in answer.text
    while made.worker("last_0").running is not None:
        done(made, "last")
    if busy:
        assert {type(client.answers[number]) for number in (100, 101)} == {Reply}
    ask(made, client, 2, "y", name=LAST)
    done(made, "last")
    assert isinstance(client.answers[2], Reply)


def test_a_tensor_on_the_host_survives_its_producer() -> None:
    made, client = begun([(CPU, 0)], ON_0, False)
    made.crash(made.worker("first_0"))
    assert 1 not in client.answers
    done(made, "last")
    assert isinstance(client.answers[1], Reply)


def test_a_step_that_has_not_started_fails_if_its_gpu_tensor_is_lost() -> None:
    """Its step has not started when the worker ends: it fails when it would start."""
    made = Gpus({FIRST: ON_0, LAST: ON_0, "other": ON_0})
    for name in (FIRST, "other"):
        made.deploy(model(name), large="y")
    x, y = TensorSpec("x", "FP32", (1,)), TensorSpec("y", "FP32", (1,))
    made.deploy(
        ModelPolicy(
            LAST,
            1,
            8,
            (x, TensorSpec("z", "FP32", (1,))),
            (y,),
            BatchPolicy(),
            reads_device_memory=True,
            leaves_on_device=True,
        )
    )
    steps = (
        StepPolicy(FIRST, 0, (("x", "x"),), (("y", "t"),)),
        StepPolicy("other", 0, (("x", "x"),), (("y", "u"),)),
        StepPolicy(LAST, 0, (("x", "t"), ("z", "u")), (("y", "y"),)),
    )
    made.deploy(ModelPolicy("e", 1, 8, (x,), (y,), steps=steps))
    client = made.connect("a")
    ask(made, client, 1, "y")
    done(made, "first")
    made.crash(made.worker("first_0"))
    assert 1 not in client.answers
    done(made, "other")
    answer = client.answers[1]
    assert isinstance(answer, Fail)
    assert answer.code == "HANDLE_LOST"
    assert made.worker("last_0").running is None


def test_outputs_of_the_caller_are_not_lost_with_a_worker() -> None:
    """Callers never get a tensor on a GPU, so nothing is lost."""
    made, client = begun(ON_0, ON_0, False)
    done(made, "last")
    reply = client.answers[1]
    assert isinstance(reply, Reply)
    (output,) = reply.outputs
    assert isinstance(output.data, tuple)
    made.crash(made.worker("first_0"))
    for handle in output.data:
        client.holds[handle] -= 1
    made.turn([(client.peer, Return(output.data))])
    made.core.check()


class Tight(Gpus):
    """A GPU with 100 bytes, of which each instance needs `size`."""

    def __init__(self, places: dict[str, list[tuple[str, int]]], size: int) -> None:
        super().__init__(places, Limits(gpu_budgets=((0, 100),)))
        self.size = size

    def target(self, policy: ModelPolicy, source: int, instances: int) -> events.Target:
        target = super().target(policy, source, instances)
        return target if policy.steps is not None else replace(target, memory=MemoryEstimate(0, self.size, True))

    def heard(self, worker: FakeWorker, count: int | None = None) -> list[tuple[int, Any]]:
        """Tensors that need not stay there are on the host."""
        return World.heard(self, worker, count)


@pytest.mark.parametrize("size", [60, 40])
def test_with_a_memory_budget_only_models_that_stay_loaded_read_gpu_tensors(size: int) -> None:
    """The model that keeps a tensor on the GPU cannot sleep to make room for the reader."""
    for stays in (False, True):
        made = Tight({FIRST: ON_0, LAST: ON_0}, size)
        deploy(made, stays=stays)
        client = made.connect("a")
        ask(made, client, 1, "y")
        if stays and size == 60:
            assert isinstance(client.answers[1], Fail)  # the first model cannot be woken
            continue
        assert near(made, "first") == (("y",) if stays else ())
        done(made, "first")
        done(made, "last")
        assert isinstance(client.answers[1], Reply)
