"""Ensemble steps that return their inputs unchanged as outputs: nothing is copied, freed too early, or freed twice."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.core.ensembles.graph import handles_of
from shmserve.core.policy import BatchPolicy, ModelPolicy, StepPolicy, TensorSpec
from shmserve.protocol.messages import OWNER_SHIFT, Cancel, Fail, FailHeld, Handle, Infer, Reply, Return, Tensor
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.world import World

SPECS = (TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),)
NAMES = ("one", "two", "three")
SIZE = 40_000


def step(model: str, source: str, target: str) -> StepPolicy:
    return StepPolicy(model, 0, (("x", source),), (("y", target),))


class Chained(World):
    """Three models that pass inputs on where permitted, as the ensemble `chain`, and as `fork`, in which two read the
    same tensor."""

    def __init__(self, aliasing: tuple[str, ...] = NAMES) -> None:
        super().__init__()
        self.aliasing = aliasing
        for name in NAMES:
            self.deploy(ModelPolicy(name, 1, 0, *SPECS, BatchPolicy()), 1, "y")
        chain = step("one", "x", "a"), step("two", "a", "b"), step("three", "b", "y")
        self.deploy(ModelPolicy("chain", 1, 0, *SPECS, None, steps=chain))
        fork = step("one", "x", "a"), step("two", "a", "l"), step("three", "a", "r"), step("two", "l", "y")
        outputs = (*SPECS[1], TensorSpec("r", "FP32", (-1,)))
        self.deploy(ModelPolicy("fork", 1, 0, SPECS[0], outputs, None, steps=fork))
        self.client = self.connect("a")
        message = self.own_segment(self.client, SIZE)
        self.turn([(self.client.peer, message)])
        self.input = Handle(message.segment, 0, SIZE)

    def _spawn(self, effect: Any) -> None:
        super()._spawn(effect)
        worker = self.workers[effect.peer]
        worker.aliasing = worker.policy.name in self.aliasing

    def ask(self, model: str, *data: Handle) -> None:
        self.client.sends(1)
        parts = data or (self.input,)
        tensor = Tensor("x", "FP32", (parts[0].size // 4,), parts)
        self.turn([(self.client.peer, Infer(1, model, 0, (tensor,)))])

    def reads(self, name: str) -> tuple[Handle, ...]:
        """The handles of the inputs of the running batch."""
        worker = self.worker(f"{name}_0")
        assert worker.running is not None
        (work,) = worker.running.works
        data = work.inputs[0].data
        assert isinstance(data, tuple)
        return data

    def finish_step(self, model: str, error: tuple[str, str] | None = None) -> FakeWorker:
        return self.finish(f"{model}_0", error=error)

    def over(self) -> None:
        """Asserts that no handle is held, and that all memory is back with its worker."""
        client: FakeClient = self.client
        if not client.ended:
            for handle, count in list(client.holds.items()):
                for _ in range(count):
                    self.turn([(client.peer, self.back(handle))])
        assert not self.core.state.requests
        assert not self.core.state.ledger.holds
        assert not any(+worker.out for worker in self.workers.values())

    def back(self, handle: Handle) -> Any:
        self.client.holds[handle] -= 1
        return Return((handle,))


def owner(handle: Handle) -> int:
    return handle.segment >> OWNER_SHIFT


def test_forwarded_caller_memory_is_copied_into_the_answer() -> None:
    world = Chained()
    world.ask("chain")
    for name in NAMES:
        assert world.reads(name) == (world.input,)
        last = world.finish_step(name)
    reply = world.client.answers[1]
    assert isinstance(reply, Reply)
    (handle,) = handles_of(reply.outputs)
    assert owner(handle) == last.peer
    world.over()


def test_an_output_of_a_step_is_forwarded_without_a_copy() -> None:
    world = Chained(("two", "three"))
    world.ask("chain")
    first = world.finish_step("one")
    (made,) = world.reads("two")
    assert owner(made) == first.peer
    world.finish_step("two")
    assert world.reads("three") == (made,)
    assert first.out[made] == 1
    world.finish_step("three")
    assert not +first.out
    world.over()


def test_a_tensor_with_two_readers_is_forwarded_by_one_of_them() -> None:
    world = Chained(("two",))
    world.ask("fork")
    first = world.finish_step("one")
    (made,) = world.reads("two")
    world.finish_step("two")
    world.finish_step("three")
    assert world.reads("two") == (made,)
    assert first.out[made] == 1
    world.finish_step("two")
    assert isinstance(world.client.answers[1], Reply)
    world.over()


def test_a_block_held_by_the_caller_is_forwarded() -> None:
    """The input is an earlier answer, which the caller returns while the ensemble runs."""
    world = Chained()
    world.client.sends(2)
    tensor = Tensor("x", "FP32", (SIZE // 4,), (world.input,))
    world.turn([(world.client.peer, Infer(2, "three", 0, (tensor,)))])
    third = world.finish_step("three")
    (held,) = world.client.answers[2].outputs[0].data
    world.ask("chain", Handle(held.segment, held.offset, held.size))
    world.turn([(world.client.peer, world.back(held))])
    world.finish_step("one")
    assert world.reads("two") == (held,)
    world.finish_step("two")
    assert third.out[held] == 1
    world.finish_step("three")
    world.over()


@pytest.mark.parametrize("end", ["failure", "cancel", "death", "caller"])
@pytest.mark.parametrize("at", NAMES)
def test_an_ensemble_that_ends_between_steps_releases_forwarded_tensors(end: str, at: str) -> None:
    world = Chained(("two", "three"))
    world.ask("chain")
    for name in NAMES[: NAMES.index(at)]:
        world.finish_step(name)
    if end == "failure":
        world.finish_step(at, ("MODEL_FAILED", "no"))
    elif end == "cancel":
        world.turn([(world.client.peer, Cancel(1))])
        world.finish_step(at)
    elif end == "death":
        for _ in range(2):  # the request is retried once
            world.crash(world.worker(f"{at}_0"))
            world.advance(world.now + 10**10)
    else:
        world.gone(world.client)
        world.finish_step(at)
    if end != "caller":
        assert isinstance(world.client.answers[1], (Fail, FailHeld))
    world.over()


def test_a_worker_that_forwards_memory_it_did_not_receive_is_stopped() -> None:
    """The worker is stopped, because it has named memory that it did not receive."""
    world = Chained(())
    world.ask("chain")
    first = world.finish_step("one")
    (made,) = world.reads("two")
    worker = world.worker("two_0")
    worker.passes["y"] = Handle(made.segment, made.offset + 4096, made.size)
    world.finish_step("two")
    assert worker.dead
    assert isinstance(world.client.answers[1], Fail)
    assert not +first.out
