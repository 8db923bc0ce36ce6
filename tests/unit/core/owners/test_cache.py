"""Cached responses: for which users, for how long, and how they are distinguished (R19)."""

from __future__ import annotations

import struct
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from shmserve.core import events
from shmserve.core.ledger import INTERNAL
from shmserve.core.limits import Limits
from shmserve.core.owners.cache import Placed
from shmserve.core.policy import BatchPolicy, ModelPolicy, StepPolicy, TensorSpec
from shmserve.core.state import WORKERS_FROM
from shmserve.protocol.messages import OWNER_SHIFT, Handle, Infer, Map, Options, Return, Tensor, Wanted
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.tensors import references
from tests.support.core.world import World

KIB = 1024
INPUTS = (TensorSpec("x", "FP32", (-1,)), TensorSpec("i", "INT32", (-1,), optional=True))
OUTPUTS = (TensorSpec("y", "FP32", (-1,)), TensorSpec("z", "FP32", (-1,)))
FRAMES = 7
"""The broker's own segment."""
POLICY = ModelPolicy("m", 1, 8, INPUTS, OUTPUTS, BatchPolicy(), cached=True)


class Memory:
    """Shared memory of all peers, and the broker's copies in its own."""

    def __init__(self) -> None:
        self.bytes: dict[int, bytearray] = {}
        self.placed: dict[str, list[Handle]] = {}
        self.full = False
        self.reads = 0

    def write(self, segment: int, offset: int, data: bytes) -> None:
        found = self.bytes.setdefault(segment, bytearray())
        found.extend(bytes(max(0, offset + len(data) - len(found))))
        found[offset : offset + len(data)] = data

    def read(self, parts: Any) -> bytes | None:
        self.reads += 1
        found = [self._read(part) for part in parts]
        return None if None in found else b"".join(data for data in found if data is not None)

    def _read(self, part: Handle) -> bytes | None:
        if part.segment >> OWNER_SHIFT >= WORKERS_FROM:  # whatever a fake worker would have made
            return (str(part).encode() * part.size)[: part.size]
        known = self.bytes.get(part.segment)
        return bytes(known[part.offset : part.offset + part.size]) if known is not None else None

    def place(self, data: bytes, audience: str) -> Placed | None:
        if self.full:
            return None
        placed = self.placed.setdefault(audience, [])
        number = 100 + list(self.placed).index(audience)
        handle = Handle(number, sum(handle.size for handle in placed), len(data))
        placed.append(handle)
        self.write(number, handle.offset, data)
        return Placed(handle, Map(number, 1 << 30, None, audience) if len(placed) == 1 else None)


class Caching(World):
    """A world that counts the requests that its workers run, and has the bytes of all tensors in shared memory."""

    def __init__(self, limit: int = 64 * KIB, large: str = "", policy: ModelPolicy = POLICY) -> None:
        super().__init__(Limits(cache_bytes=limit))
        self.deploy(policy, 1, large)
        self.memory = Memory()
        self.core.state.cache.copy_with(self.memory)
        self.turn([(0, events.OwnSegment(Map(FRAMES, 1 << 30)))])
        self.last, self.places = 0, count(0, 1 << 16)

    def ask(self, client: FakeClient, inputs: tuple[Tensor, ...], outputs: Any = None, **options: Any) -> Any:
        """The response, from the cache or from a worker."""
        given = Options(**options) if options else None
        return self._answer(client, Infer(self.last + 1, "m", 0, inputs, outputs, 0, given))

    def ask_in_frames(self, client: FakeClient, inputs: tuple[Tensor, ...]) -> Any:
        """Tensors arrive in frames, in the broker's own memory."""
        framed = tuple(self._place(tensor, FRAMES, next(self.places)) for tensor in inputs)
        blocks = tuple(references(framed))
        freed = len(self.freed)
        found = self._answer(client, events.Framed(Infer(self.last + 1, "m", 0, framed, None), blocks))
        assert self.freed[freed:] == list(blocks), "the cache has its own copy"
        for block in blocks:  # which may now be reused
            self.memory.write(FRAMES, block.offset, b"\xff" * block.size)
        return found

    def _answer(self, client: FakeClient, event: Any) -> Any:
        self.last += 1
        client.sends(self.last)
        self.turn([(client.peer, event)])
        self.finish_all()
        return client.answers[self.last]

    def own(self, client: FakeClient, tensor: Tensor) -> Tensor:
        """The same tensor in memory of the client."""
        if not client.own:
            self.turn([(client.peer, self.own_segment(client, 1 << 20))])
        (segment,) = client.own
        return self._place(tensor, segment, 0)

    def _place(self, tensor: Tensor, segment: int, offset: int) -> Tensor:
        assert isinstance(tensor.data, bytes)
        self.memory.write(segment, offset, tensor.data)
        return Tensor(tensor.name, tensor.dtype, tensor.shape, (Handle(segment, offset, len(tensor.data)),))

    @property
    def runs(self) -> int:
        return sum(len(batch) for worker in self.workers.values() for batch in worker.started)


def x(*values: float, name: str = "x", dtype: str = "FP32", shape: tuple[int, ...] = ()) -> Tensor:
    return Tensor(name, dtype, shape or (1, len(values)), struct.pack(f"<{len(values)}f", *values))


def test_hit_and_miss_durations_are_those_of_lookup_and_insertion() -> None:
    """Measured within a turn, whose own time stands still. Responses that cannot be kept count as neither."""
    world = Caching(large="y")
    world.core.state.cache.copy_with(world.memory, count(0, 10).__next__)
    client = world.connect("a")
    counted = world.core.state.models["m"].versions[1].statistics
    world.ask(client, (x(1),))
    assert (counted.cache_misses, counted.cache_miss_ns) == (1, 20)
    assert counted.cache_hit_ns == 0
    world.ask(client, (x(1),))
    world.ask(client, (x(1),))
    assert (counted.cache_hits, counted.cache_hit_ns) == (2, 20)
    world.ask(client, (x(*range(20_000)),))
    assert (counted.cache_misses, counted.cache_miss_ns) == (1, 20)
    assert counted.success_ns == 20


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
    (((x(1),), None, {"parameters": {"a": 0.0}}), ((x(1),), None, {"parameters": {"a": -0.0}})),
    (((x(1),), None, {"parameters": {"a": "1"}}), ((x(1),), None, {"parameters": {"b": "1"}})),
]


@pytest.mark.parametrize(("one", "another"), DIFFERENT)
def test_r19_everything_that_affects_a_response_is_part_of_the_key(one: Any, another: Any) -> None:
    world = Caching()
    client = world.connect("a")
    for inputs, outputs, options in (one, another, one, another):
        world.ask(client, inputs, outputs, **options)
    assert world.runs == 2


def test_inputs_in_frames_are_compared_byte_by_byte() -> None:
    world = Caching()
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


def test_equal_inputs_in_a_frame_and_inline_share_an_entry() -> None:
    world = Caching()
    client = world.connect("a", "zmq", "frames")
    first = world.ask(client, (x(1), Tensor("i", "INT32", (1, 1), INT)), id="another")
    assert world.ask_in_frames(client, (Tensor("i", "INT32", (1, 1), INT), x(1))).outputs == first.outputs
    assert world.runs == 1


def test_inputs_larger_than_the_cache_are_not_read() -> None:
    world = Caching(limit=4 * KIB)
    client, sharer = world.connect("a", "zmq", "frames"), world.connect("b")
    many = x(*range(2000))
    for _ in range(2):
        world.ask_in_frames(client, (many,))
        world.ask(sharer, (world.own(sharer, many),))
    assert world.runs == 4
    assert not world.memory.reads
    assert not len(world.core.state.cache)


def test_ensemble_steps_with_inputs_in_frames_are_cached() -> None:
    """Including the rows over which a step is mapped."""
    world = Caching(policy=replace(POLICY, name="step"))
    steps = (StepPolicy("step", 0, (("x", "x"),), (("y", "y"),), mapped="x"),)
    world.deploy(ModelPolicy("m", 1, 0, (TensorSpec("x", "FP32", (-1, -1)),), OUTPUTS[:1], steps=steps))
    client = world.connect("a", "zmq", "frames")
    world.ask_in_frames(client, (x(1, 2, 3, 4, shape=(2, 2)),))
    assert world.runs == 2
    world.ask_in_frames(client, (x(5, 6, 1, 2, 3, 4, shape=(3, 2)),))
    assert world.runs == 3


def test_inputs_in_client_memory_are_copied_before_they_are_compared_and_run() -> None:
    """Whatever its owner writes later, the worker and the cache use the copy."""
    world = Caching()
    client, other = world.connect("a"), world.connect("b")
    (worker,) = world.workers.values()
    read: list[Handle] = []
    worker.watch = lambda worker, batch: read.extend(references(batch.work_items[0].inputs))
    first = world.ask(client, (world.own(client, x(1, 2)),))
    assert read == world.memory.placed[INTERNAL]
    assert world.memory.read(read) == x(1, 2).data
    world.own(client, x(8, 9))
    assert world.ask(other, (world.own(other, x(1, 2)),)).outputs == first.outputs
    assert world.ask(other, (x(1, 2),)).outputs == first.outputs
    assert world.runs == 1
    world.ask(client, (world.own(client, x(8, 9)),))
    assert world.runs == 2
    assert world.freed == world.memory.placed[INTERNAL], "copies are for one run, and hits need none"


def test_without_memory_for_a_copy_a_request_runs_uncached() -> None:
    """Even if there was room for one of two inputs."""
    world = Caching()
    client = world.connect("a")
    world.memory.full = True
    for _ in range(2):
        world.ask(client, (world.own(client, x(1)),))
    assert world.runs == 2
    world.memory.full = False
    inputs = world.own(client, x(1)), Tensor("i", "INT32", (1, 1), (Handle(next(iter(client.own)), 64, 4),))
    placed = world.memory.place
    world.memory.place = lambda data, audience: placed(data, audience) if data != INT else None  # type: ignore[method-assign]
    world.memory.write(next(iter(client.own)), 64, INT)
    world.ask(client, inputs)
    assert (world.runs, world.freed) == (3, world.memory.placed[INTERNAL])
    assert not len(world.core.state.cache)


def test_requests_with_unreadable_memory_are_not_cached() -> None:
    """The memory is on a GPU, or has a name."""
    world = Caching()
    client = world.connect("a")
    world.turn([(client.peer, world.own_segment(client, 4096))])
    for _ in range(2):
        world.ask(client, (Tensor("x", "FP32", (1, 1), (Handle(next(iter(client.own)), 0, 4),)),))
    assert world.runs == 2
    assert not len(world.core.state.cache)


def test_responses_are_kept_in_the_memory_of_the_broker() -> None:
    world = Caching(large="y")
    client, other, stranger = world.connect("a"), world.connect("b"), world.connect("c", audience="uid:2000")
    first = world.ask(client, (x(1),))
    (made,) = references(first.outputs)
    world.turn([(client.peer, Return((made,)))])
    client.holds.clear()
    (worker,) = world.workers.values()
    assert not sum(worker.out.values()), "no worker's memory is bound"
    kept = made
    for holder in (client, other):
        (kept,) = references(world.ask(holder, (x(1),)).outputs)
        assert kept == world.memory.placed["uid:1000"][0]
        assert world.memory.read((kept,)) == world.memory.read((made,))
        world.turn([(holder.peer, Return((kept,)))])
        holder.holds.clear()
    world.ask(stranger, (x(1),))
    assert world.runs == 2
    assert kept.segment not in stranger.mapped
    assert not world.freed
    world.turn([(0, events.Deploy("m", ()))])
    assert kept in world.freed
