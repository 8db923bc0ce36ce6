"""A world with every kind of model at once, whose workers compute, so that a response identifies its request.

Every tensor is filled with one byte value, and every model passes on the byte of its first input. Clients therefore
detect answers or rows of other requests, and cached answers with a wrong key.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from shmserve.core import events
from shmserve.core.effects import Send, Spawn
from shmserve.core.limits import Limits
from shmserve.core.owners.cache import Placed
from shmserve.core.owners.rate_limiter import SHARED
from shmserve.core.policy import (
    BatchPolicy,
    InstanceSpec,
    ModelPolicy,
    QueuePolicy,
    Resource,
    SequencePolicy,
    TensorSpec,
    TimeoutAction,
)
from shmserve.protocol.batch_queue import QueuedBatch
from shmserve.protocol.messages import OWNER_SHIFT, Fail, FailHeld, Handle, Infer, Map, Part, Reply, Tensor
from shmserve.protocol.worker_messages import EndSequences, Row, Work
from tests.support.core.fakes.tensors import replies_of
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.policies import model, step_of
from tests.unit.core.state_machines.test_machine_operations import Operated

MS = 10**6
FIRST_HOME = 1000
"""The first segment of memory for the broker's copies."""
OWN_VALUE = 7
"""The byte that fills clients' own segments."""

FIXED = (TensorSpec("x", "FP32", (1,)),)
VARIES = (TensorSpec("x", "FP32", (-1,)),)
PAIR = (TensorSpec("x", "FP32", (2,)),)
BOXES = (TensorSpec("y", "FP32", (-1, 2)),)
FLAG = (TensorSpec("y", "BOOL", (1,)),)
Z = (TensorSpec("z", "FP32", (-1,)),)
ROWS = (TensorSpec("z", "FP32", (-1, -1)),)
TWO = (*Z, TensorSpec("v", "FP32", (-1,)))
EXPIRES = QueuePolicy(TimeoutAction.REJECT, 9 * MS, True, 3)
DELAYS = QueuePolicy(TimeoutAction.DELAY, 4 * MS, True)
BATCH = BatchPolicy()
DIRECT = SequencePolicy(True, 4, 30 * MS, 3 * MS, 0.5)
OLDEST = SequencePolicy(False, 2, 30 * MS, batching=BatchPolicy((), 2 * MS))
ITERATIVE = SequencePolicy(False, 3, 30 * MS, iterative=True)


@dataclass(frozen=True)
class Served:
    policy: ModelPolicy
    instances: int = 1
    large: str = ""


def _ensemble(name: str, most: int, inputs: tuple[TensorSpec, ...], *steps: str, **more: Any) -> ModelPolicy:
    found = tuple(step_of(step) for step in steps)
    return ModelPolicy(name, 1, most, inputs, more.pop("outputs", Z), None, steps=found, **more)


_ALL = (
    Served(model("plain", 8, FIXED, BATCH), 1, "y"),
    Served(model("pair", 6, VARIES, BATCH), 2),
    Served(model("ranked", 4, VARIES, BatchPolicy((), 5 * MS, False, 3, 2, DELAYS, {1: EXPIRES})), 1, "y"),
    Served(model("ordered", 4, FIXED, BatchPolicy(preserve_ordering=True)), 2, "y w"),
    Served(model("flat", 0, VARIES, None), 1, "w"),
    Served(model("kept", 4, FIXED, BATCH, cached=True), 2, "w"),
    Served(model("det", 0, VARIES, BATCH, outputs=BOXES), 1),
    Served(model("rec", 4, PAIR, BATCH, cached=True), 2),
    Served(model("flag", 0, VARIES, BATCH, outputs=FLAG), 1),
    Served(model("direct", 4, FIXED, None, sequence=DIRECT), 2, "w"),
    Served(model("oldest", 4, FIXED, None, sequence=OLDEST), 1),
    Served(model("iterative", 4, FIXED, None, sequence=ITERATIVE), 1, "y"),
    Served(model("saying", 0, FIXED, None, sequence=OLDEST, decoupled=True), 1),
    Served(model("stream", 4, FIXED, BATCH, decoupled=True, prompt_inputs=(FIXED[0].name,), queue_tokens=9), 2, "y"),
    Served(model("joined", 0, FIXED, None, decoupled=True, streams=3), 2, "y"),
    Served(model("turn", 4, FIXED, BATCH), 1),
    Served(_ensemble("e_chain", 4, FIXED, "plain(x:x)->(y:t)", "pair(x:t)->(y:z)", cached=True)),
    Served(_ensemble("e_nest", 4, FIXED, "e_chain(x:x)->(z:t)", "pair(x:t)->(y:z)")),
    Served(_ensemble("e_map", 0, VARIES, "det(x:x)->(y:b)", "rec(x:b)->(y:z)/map:b", outputs=ROWS)),
    Served(_ensemble("e_if", 0, VARIES, "flag(x:x)->(y:f)", "flat(x:x)->(y:z)/if:f", "flat(x:x)->(w:v)", outputs=TWO)),
    Served(_ensemble("e_seq", 4, FIXED, "direct(x:x)->(y:z)")),
    Served(_ensemble("e_stream", 4, FIXED, "stream(x:x)->(y:t)", "plain(x:x)->(y:v)", "pair(x:t)->(y:z)", outputs=TWO)),
    Served(_ensemble("e_deep", 4, FIXED, "e_stream(x:x)->(z:t)", "stream(x:t)->(y:u)", "ordered(x:u)->(w:z)", ahead=2)),
    Served(_ensemble("e_turn", 4, FIXED, "turn(x:x)->(y:z)", "plain(x:z)->(y:v)", outputs=TWO)),
)
MODELS = {served.policy.name: served for served in _ALL}
SEQUENCES = [name for name, served in MODELS.items() if served.policy.sequence is not None] + ["e_seq"]
STREAMS = ["saying", "stream", "joined", "turn", "e_stream", "e_deep"]
RESOURCES = {
    "plain": (Resource("cpu", 1, True),),
    "pair": (Resource("cpu", 2, True),),
    "direct": (Resource("cpu", 1, True), Resource("disk", 1)),
    "stream": (Resource("disk", 1),),
    "kept": (Resource("cpu", 1, True),),
    "rec": (Resource("cpu", 1, True),),
}


def with_members(names: list[str]) -> list[str]:
    """The models with those of their steps, which precede ensembles."""
    found: dict[str, None] = {}

    def add(name: str) -> None:
        for step in MODELS[name].policy.steps or ():
            add(step.model)
        found[name] = None

    for name in names:
        add(name)
    return list(found)


class NoBlock(Exception):
    """The bytes are not those of one block."""


class OwnMemory:
    """The broker's memory for copies. Each block has one byte value; now and then an allocation fails."""

    def __init__(self, world: Everything) -> None:
        self._world = world
        self._homes: dict[str, int] = {}
        self.placed: list[Handle] = []
        self._offset = 0
        self._tries = 0

    def read(self, parts: Sequence[Handle]) -> bytes | None:
        try:
            value = self._world.value(Tensor("", "UINT8", (), tuple(parts))) or 0
        except NoBlock:
            return None
        return bytes([value]) * sum(part.size for part in parts)

    def place(self, data: bytes, audience: str) -> Placed | None:
        self._tries += 1
        if self._tries % 7 == 0 or audience.startswith("posix:"):
            return None
        known = audience in self._homes
        number = self._homes.setdefault(audience, FIRST_HOME + len(self._homes))
        handle = Handle(number, self._offset, len(data))
        self._offset += max(64, len(data))
        self.placed.append(handle)
        self._world.put(number, handle.offset, handle.size, data[0] if data else 0)
        return Placed(handle, None if known else Map(number, 1 << 40, None, audience))


class Everything(Operated):
    """`limited`: with the rate limiter."""

    def __init__(self, limits: Limits, limited: bool) -> None:
        if limited:
            limits = replace(limits, rate_limit=True, resources=(("cpu", SHARED, 2), ("disk", 0, 1)))
        super().__init__(limits)
        self.expected: dict[tuple[int, int], int] = {}
        """Request -> the byte that its answer must have."""
        self.contents: dict[int, list[tuple[int, int, int]]] = {}
        """Segment -> offset, size and value of each block, in ascending order."""
        self.going: dict[int, set[int | str]] = {}
        """Worker -> the sequences for which it keeps state."""
        self.own_memory = OwnMemory(self)
        self.core.state.cache.copy_with(self.own_memory)

    # ------------------------------------------------------------------------------------ values

    def put(self, segment: int, offset: int, size: int, value: int) -> None:
        self.contents.setdefault(segment, []).append((offset, size, value))

    def value(self, tensor: Tensor) -> int | None:
        """None: the tensor is empty."""
        if isinstance(tensor.data, bytes):
            assert len(set(tensor.data)) <= 1
            return tensor.data[0] if tensor.data else None
        assert isinstance(tensor.data, tuple)
        found = {self._in_block(part.segment, part.offset, part.size) for part in tensor.data if part.size}
        assert len(found) <= 1, f"parts of different requests: {tensor}"
        return found.pop() if found else None

    def _in_block(self, segment: int, offset: int, size: int) -> int:
        if segment >> OWNER_SHIFT in range(1, 1 << 30):
            return OWN_VALUE
        blocks = self.contents[segment]
        start, length, value = blocks[bisect_right(blocks, offset, key=lambda block: block[0]) - 1]
        if start <= offset and offset + size <= start + length:
            return value
        raise NoBlock

    def first_value(self, inputs: tuple[Tensor, ...]) -> int | None:
        return self.value(min(inputs, key=lambda tensor: tensor.name)) if inputs else None

    def expect(self, peer: int, message: Infer) -> None:
        try:
            expected = self.first_value(message.inputs)
        except NoBlock:  # the request will be refused
            return
        if expected is not None:
            self.expected[peer, message.request] = expected

    # ------------------------------------------------------------------------------------ answers

    def tell(self, effect: Any) -> None:
        super().tell(effect)
        if not isinstance(effect, Send):
            return
        for message in replies_of(effect.message):
            self._tell_message(effect.peer, message)

    def _tell_message(self, peer: int, message: Any) -> None:
        if isinstance(message, (Reply, Part)):
            expected = self.expected.get((peer, message.request))
            for tensor in message.outputs:
                own = isinstance(tensor.data, tuple) and tensor.data[0].segment >> OWNER_SHIFT == peer
                if tensor.dtype != "BOOL" and not own and expected is not None:
                    assert self.value(tensor) in (expected, None), f"not what was asked: {message}, {expected}"
        elif isinstance(message, EndSequences):
            assert message.sequences
        elif isinstance(message, (Fail, FailHeld)):
            assert "unexpected deadlock" not in message.text

    # ------------------------------------------------------------------------------------ workers

    def target(self, policy: ModelPolicy, source: int, instances: int) -> events.Target:
        if policy.steps is not None:
            return events.Target(policy.version, source, (), policy)
        needs = RESOURCES.get(policy.name, ())
        names = [f"{policy.name}_{index}" for index in range(instances)]
        return events.Target(policy.version, source, tuple(InstanceSpec(n, resources=needs) for n in names))

    def _spawn(self, effect: Spawn) -> None:
        super()._spawn(effect)
        worker = self.workers[effect.peer]
        if effect.model == "turn" and effect.source % 2:
            worker.policy = replace(worker.policy, decoupled=True)
            worker.outbox = [events.Compiled(worker.policy)]
        worker.compute = self._compute
        worker.watch = self._follow

    def _compute(self, worker: FakeWorker, work: Work) -> Row:
        value = self.first_value(work.inputs)
        name = worker.policy.name
        if name == "det":
            worker.says = {"y": f"[{(value or 0) % 4},2]"}
        elif name == "flag":
            worker.says = {"y": "true" if (value or 0) % 2 else "false"}
        worker.compute = None
        row = worker.answer_row(work, None)
        worker.compute = self._compute
        for tensor in row.outputs:
            if isinstance(tensor.data, bytes):
                if tensor.dtype != "BOOL":
                    tensor.data = bytes([value or 0]) * len(tensor.data)
            else:
                assert isinstance(tensor.data, tuple)
                for part in tensor.data:
                    if part.segment >> OWNER_SHIFT == worker.peer:
                        self.put(part.segment, part.offset, part.size, value or 0)
        return row

    def _follow(self, worker: FakeWorker, batch: QueuedBatch) -> None:
        """Asserts that sequences have a start, and that their state exists until their end."""
        sequence = worker.policy.sequence
        if sequence is None:
            return
        kept = self.kept_by(worker)
        for work in batch.work_items:
            options = work.options
            assert options is not None
            if options.sequence_start:
                kept.add(options.sequence)
            assert options.sequence in kept, f"{worker.name} knows nothing of sequence {options.sequence}"
            if options.sequence_end and not sequence.iterative:  # otherwise the request may be run again
                kept.remove(options.sequence)

    def kept_by(self, worker: FakeWorker) -> set[int | str]:
        """Sequences whose end the worker has not been sent."""
        kept = self.going.setdefault(worker.peer, set())
        for ended in worker.ended:
            kept.discard(ended)
        worker.ended.clear()
        return kept
