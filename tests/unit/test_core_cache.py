"""Answers that are kept: for whom, for how long, and how they are told apart (R19)."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from msgspec.structs import replace

from shmserve.core import events
from shmserve.core.limits import Limits
from shmserve.core.policy import BatchPolicy, ModelPolicy, StepPolicy, TensorSpec
from shmserve.messages import OWNER_SHIFT, Handle, Infer, Map, Options, Reply, Return, Tensor, Wanted
from tests.unit.core_fakes import FakeClient, references
from tests.unit.core_world import World

KIB = 1024
INPUTS = (TensorSpec("x", "FP32", (-1,)), TensorSpec("i", "INT32", (-1,), optional=True))
OUTPUTS = (TensorSpec("y", "FP32", (-1,)), TensorSpec("z", "FP32", (-1,)))
POLICY = ModelPolicy("m", 1, 8, INPUTS, OUTPUTS, BatchPolicy(), cached=True)


class Caching(World):
    """Counts what its workers run."""

    def __init__(self, limit: int = 64 * KIB, large: str = "", policy: ModelPolicy = POLICY) -> None:
        super().__init__(Limits(cache_bytes=limit))
        self.deploy(policy, 1, large)
        self.last = 0

    def ask(self, client: FakeClient, inputs: tuple[Tensor, ...], outputs: Any = None, **options: Any) -> Any:
        """The answer, whoever gives it."""
        self.last += 1
        client.sends(self.last)
        given = Options(**options) if options else None
        self.turn([(client.peer, Infer(self.last, "m", 0, inputs, outputs, 0, given))])
        for worker in list(self.workers.values()):
            if worker.running is not None:
                worker.finish(self.now)
                self.settle()
        return client.answers[self.last]

    @property
    def runs(self) -> int:
        return sum(len(batch) for worker in self.workers.values() for batch in worker.started)


def x(*values: float, name: str = "x", dtype: str = "FP32", shape: tuple[int, ...] = ()) -> Tensor:
    return Tensor(name, dtype, shape or (1, len(values)), struct.pack(f"<{len(values)}f", *values))


def test_the_same_is_run_once() -> None:
    world = Caching()
    client, other = world.connect("a"), world.connect("b")
    first = world.ask(client, (x(1),))
    assert world.ask(client, (x(1),)).outputs == first.outputs
    assert world.ask(other, (x(1),)).outputs == first.outputs
    assert world.ask(other, (x(1),), id="another", priority=3).outputs == first.outputs
    assert world.runs == 1
    counted = world.core.state.models["m"].versions[1].statistics
    assert (counted.cache_hits, counted.cache_misses) == (3, 1)
    assert (counted.success_count, counted.inference_count, counted.execution_count) == (4, 1, 1)


INT = struct.pack("<i", 1)
DIFFERENT: list[tuple[Any, Any]] = [
    (((x(1),), None, {}), ((x(2),), None, {})),
    (((x(1, 2),), None, {}), ((x(1, 2, shape=(2, 1)),), None, {})),
    (((x(1),), None, {}), ((x(1), Tensor("i", "INT32", (1, 1), INT)), None, {})),
    (((x(1),), None, {}), ((x(1),), (Wanted("y"),), {})),
    (((x(1),), (Wanted("z"),), {}), ((x(1),), (Wanted("y"),), {})),
    (((x(1),), (Wanted("y"),), {}), ((x(1),), (Wanted("y", None, 2),), {})),
    (((x(1),), None, {}), ((x(1),), None, {"parameters": {"a": 1}})),
    (((x(1),), None, {"parameters": {"a": 1}}), ((x(1),), None, {"parameters": {"a": 2}})),
    (((x(1),), None, {"parameters": {"a": 1}}), ((x(1),), None, {"parameters": {"a": True}})),
    (((x(1),), None, {"parameters": {"a": 1}}), ((x(1),), None, {"parameters": {"a": 1.0}})),
    (((x(1),), None, {"parameters": {"a": "1"}}), ((x(1),), None, {"parameters": {"b": "1"}})),
]


@pytest.mark.parametrize(("one", "another"), DIFFERENT)
def test_r19_whatever_an_answer_depends_on_is_in_the_key(one: Any, another: Any) -> None:
    world = Caching()
    client = world.connect("a")
    for inputs, outputs, options in (one, another, one, another):
        world.ask(client, inputs, outputs, **options)
    assert world.runs == 2


def test_r19_answers_are_for_one_audience() -> None:
    world = Caching(large="y")
    client, stranger = world.connect("a"), world.connect("b", audience="uid:2000")
    world.ask(client, (x(1),))
    world.ask(stranger, (x(1),))
    world.ask(stranger, (x(1),))
    assert world.runs == 2
    assert not set(client.holds) & set(stranger.holds)


def test_large_answers_stay_where_they_are() -> None:
    """One block, held by all who were given it, and by the cache when they have given it back."""
    world = Caching(large="y")
    client, other = world.connect("a"), world.connect("b")
    first, second = world.ask(client, (x(1),)), world.ask(other, (x(1),))
    assert isinstance(first.outputs[0].data[0], Handle)
    assert first.outputs == second.outputs
    (worker,) = world.workers.values()
    for holder in (client, other):
        world.turn([(holder.peer, Return(tuple(holder.holds.elements())))])
        holder.holds.clear()
    assert sum(worker.out.values()) == 1, "the cache holds it"
    assert world.ask(client, (x(1),)).outputs == first.outputs
    assert world.runs == 1


def test_what_was_used_longest_ago_goes_first() -> None:
    world = Caching(limit=3 * 600, large="y")
    client = world.connect("a")
    for value in (1, 2, 3, 1, 4):
        world.ask(client, (x(value),))
    assert world.runs == 4
    assert world.core.state.cache.evictions == 1
    for value in (1, 3, 4):
        world.ask(client, (x(value),))
    assert world.runs == 4
    world.ask(client, (x(2),))
    assert world.runs == 5


class Framing(Caching):
    """Tensors come in frames: in the broker's own memory, which the core can look into."""

    def __init__(self, limit: int = 64 * KIB, large: str = "", policy: ModelPolicy = POLICY) -> None:
        super().__init__(limit, large, policy)
        self.own = bytearray()
        self.turn([(0, events.OwnSegment(Map(7, 1 << 30)))])
        self.core.look_with(lambda handle: memoryview(self.own)[handle.offset : handle.offset + handle.size])

    def frame(self, tensor: Tensor) -> Tensor:
        assert isinstance(tensor.data, bytes)
        handle = Handle(7, len(self.own), len(tensor.data))
        self.own += tensor.data
        return Tensor(tensor.name, tensor.dtype, tensor.shape, (handle,))

    def ask_in_frames(self, client: FakeClient, inputs: tuple[Tensor, ...]) -> Any:
        framed = tuple(self.frame(tensor) for tensor in inputs)
        blocks = tuple(references(framed))
        self.last += 1
        client.sends(self.last)
        freed = len(self.freed)
        self.turn([(client.peer, events.Framed(Infer(self.last, "m", 0, framed, None), blocks))])
        for worker in [worker for worker in self.workers.values() if worker.running is not None]:
            worker.finish(self.now)
            self.settle()
        assert self.freed[freed:] == list(blocks), "the cache has its own copy"
        for block in blocks:  # which something else may be written to now
            self.own[block.offset : block.offset + block.size] = b"\xff" * block.size
        return client.answers[self.last]


def test_what_comes_in_frames_is_compared_byte_by_byte() -> None:
    world = Framing()
    client = world.connect("a", "zmq", "frames")
    many = x(*range(2000))
    first = world.ask_in_frames(client, (many,))
    assert world.ask_in_frames(client, (many,)).outputs == first.outputs
    assert world.runs == 1
    for other in (x(*range(1999), 5), x(5, *range(1, 2000)), x(*range(2000), shape=(2, 1000)), x(*range(1999))):
        world.ask_in_frames(client, (other,))
    assert world.runs == 5
    world.ask_in_frames(client, (many,))
    assert world.runs == 5
    assert world.core.state.cache.bytes > 5 * 2000 * 4


def test_it_is_the_same_in_a_frame_and_inside_of_the_message() -> None:
    world = Framing()
    client = world.connect("a", "zmq", "frames")
    first = world.ask(client, (x(1), Tensor("i", "INT32", (1, 1), INT)))
    assert world.ask_in_frames(client, (Tensor("i", "INT32", (1, 1), INT), x(1))).outputs == first.outputs
    assert world.runs == 1


def test_frames_larger_than_the_cache_are_not_copied() -> None:
    world = Framing(limit=4 * KIB)
    client = world.connect("a", "zmq", "frames")
    looked = world.core.state.cache.look
    world.core.look_with(lambda handle: pytest.fail("nobody has to look"))
    for _ in range(2):
        world.ask_in_frames(client, (x(*range(2000)),))
    assert looked is not None
    assert world.runs == 2
    assert not len(world.core.state.cache)


def test_steps_with_what_came_in_frames() -> None:
    """Also the rows of it, over which a step is mapped."""
    world = Framing(policy=replace(POLICY, name="step"))
    steps = (StepPolicy("step", 0, (("x", "x"),), (("y", "y"),), mapped="x"),)
    world.deploy(ModelPolicy("m", 1, 0, (TensorSpec("x", "FP32", (-1, -1)),), OUTPUTS[:1], steps=steps))
    client = world.connect("a", "zmq", "frames")
    world.ask_in_frames(client, (x(1, 2, 3, 4, shape=(2, 2)),))
    assert world.runs == 2
    world.ask_in_frames(client, (x(5, 6, 1, 2, 3, 4, shape=(3, 2)),))
    assert world.runs == 3


def test_memory_that_others_can_write_to_is_not_looked_at() -> None:
    """A client could change its own while it is hashed, and after. The broker does not map what workers make."""
    world = Framing(large="y")
    world.core.look_with(lambda handle: pytest.fail("nobody may look"))
    client = world.connect("a")
    world.turn([(client.peer, world.own_segment(client, 4096))])
    (own,) = client.own
    for _ in range(2):
        made = world.ask(client, (Tensor("x", "FP32", (1, 1), (Handle(own, 0, 4),)),))
    assert world.runs == 2
    (given,) = references(made.outputs)
    assert given.segment >> OWNER_SHIFT not in (0, client.peer)
    for _ in range(2):
        world.ask(client, (Tensor("x", "FP32", (1, 1), (given,)),))
    assert world.runs == 4
    assert not len(world.core.state.cache)


def test_failures_and_placed_outputs_are_not_kept() -> None:
    world = Caching()
    client = world.connect("a")
    segment = world.own_segment(client, 4096)
    world.turn([(client.peer, segment)])
    for _ in range(2):
        world.ask(client, (x(1),), (Wanted("y", Handle(segment.segment, 64, 4)),))
    assert world.runs == 2
    (worker,) = world.workers.values()
    for expected in (3, 4):
        world.last += 1
        client.sends(world.last)
        world.turn([(client.peer, Infer(world.last, "m", 0, (x(9),)))])
        worker.finish(world.now, error=("MODEL_FAILED", "no"))
        world.settle()
        assert world.runs == expected
    assert not len(world.core.state.cache)


def test_another_generation_answers_anew_and_nothing_of_the_old_one_stays() -> None:
    world = Caching(large="y")
    client = world.connect("a")
    world.ask(client, (x(1),))
    world.turn([(0, events.Deploy("m", (world.target(POLICY, 1, 1),)))])
    returned = Return(tuple(client.holds.elements()))
    client.holds.clear()
    world.turn([(client.peer, returned)])
    assert not world.core.state.ledger.holds
    assert not len(world.core.state.cache)
    before = world.runs
    world.ask(client, (x(1),))
    assert world.runs == before + 1


def test_a_worker_that_dies_leaves_its_answers() -> None:
    """Their pages live as long as somebody may map them."""
    world = Caching(large="y")
    client = world.connect("a")
    first = world.ask(client, (x(1),))
    (worker,) = world.workers.values()
    world.crash(worker)
    world.advance(world.now + 10**9)
    assert world.ask(client, (x(1),)).outputs == first.outputs


@pytest.mark.parametrize("limit", [0, 100])
def test_a_cache_that_is_too_small_or_none(limit: int) -> None:
    world = Caching(limit)
    client = world.connect("a")
    for _ in range(2):
        assert isinstance(world.ask(client, (x(1),)), Reply)
    assert world.runs == 2


def test_ensembles() -> None:
    """The answer of the whole is kept; with another model behind a step it is another one."""
    world = Caching(policy=ModelPolicy("step", 1, 8, INPUTS, OUTPUTS, BatchPolicy()))
    steps = (StepPolicy("step", 0, (("x", "x"),), (("y", "y"),)),)
    world.deploy(ModelPolicy("m", 1, 8, INPUTS[:1], OUTPUTS[:1], steps=steps, cached=True))
    client = world.connect("a")
    for _ in range(3):
        world.ask(client, (x(1),))
    assert world.runs == 1
    policy = world.policies["step", 1]
    world.turn([(0, events.Deploy("step", (world.target(policy, 7, 1),)))])
    before = world.runs
    for _ in range(3):
        world.ask(client, (x(1),))
    assert world.runs == before + 1
