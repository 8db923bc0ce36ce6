"""Requests in columns have the same effects as the same requests one by one.

Twins get the same requests, one as InferBatch and the other as Infer, and everything else in the same way.
After each step all messages to clients, the batches of workers, the statistics and the clocks of both twins are equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from shmserve.core import events
from shmserve.core.effects import Spawn
from shmserve.core.limits import Limits
from shmserve.core.owners.cache import Placed
from shmserve.core.policy import BatchPolicy, PaddingPolicy, QueuePolicy, SequencePolicy, TensorSpec, TimeoutAction
from shmserve.protocol.batch_queue import QueuedBatch
from shmserve.protocol.messages import (
    Cancel,
    Columns,
    Fail,
    FailHeld,
    Infer,
    InferBatch,
    Options,
    Reply,
    ReplyBatch,
    Return,
    Tensor,
    TensorForm,
    Wanted,
)
from shmserve.protocol.roles import ALL_ROLES, INFER, OBSERVE
from shmserve.protocol.worker_messages import Row, Work
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.tensors import one_by_one, references, replies_of
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.policies import OUTPUTS, model, step_of
from tests.support.core.world import World
from tests.support.hypothesis_profiles import examples

MS = 10**6
X = TensorSpec("x", "FP32", (1,))
VARIES = TensorSpec("x", "FP32", (-1,))
MAYBE = TensorSpec("z", "FP32", (-1,), optional=True)
STRINGS = TensorSpec("x", "BYTES", (1,))
EXPIRES = QueuePolicy(TimeoutAction.REJECT, 9 * MS, True, 3)
PADDING = PaddingPolicy((("x", (0,)),), lookahead=5, multiple=2, batch_cost=3)


_CHAIN = (step_of("plain(x:x)->(y:t)"), step_of("pair(x:t)->(y:y)"))
MODELS = {
    served.name: (served, instances, large)
    for served, instances, large in (
        (model("plain", 8, (X,), BatchPolicy()), 1, ""),
        (model("pair", 6, (VARIES,), BatchPolicy()), 2, "w"),
        (model("maybe", 6, (MAYBE,), BatchPolicy()), 1, ""),
        (model("both", 6, (VARIES, MAYBE), BatchPolicy()), 1, ""),
        (model("ragged", 6, (replace(VARIES, ragged=True),), BatchPolicy()), 1, ""),
        (model("strings", 6, (STRINGS,), BatchPolicy()), 1, ""),
        (model("flat", 0, (VARIES,), BatchPolicy()), 1, ""),
        (model("single", 4, (X,), None), 1, ""),
        (model("delayed", 6, (X,), BatchPolicy((4,), 5 * MS)), 1, ""),
        (model("ranked", 4, (VARIES,), BatchPolicy((), 5 * MS, False, 3, 2, EXPIRES)), 1, ""),
        (model("ordered", 4, (X,), BatchPolicy(preserve_ordering=True)), 2, ""),
        (model("padded", 4, (VARIES,), BatchPolicy(), padding=PADDING), 1, ""),
        (model("kept", 4, (X,), BatchPolicy(), cached=True), 1, ""),
        (model("stream", 4, (X,), BatchPolicy(), decoupled=True), 1, ""),
        (model("sequence", 4, (X,), None, sequence=SequencePolicy(True, 4, 30 * MS, 0, 0.5)), 1, ""),
        (model("chain", 4, (X,), None, outputs=OUTPUTS[:1], steps=_CHAIN), 0, ""),
    )
}
NAMES = [*MODELS, "nobody"]
LIMITS = Limits(
    client_requests=40,
    client_held_bytes=60,
    backoff_ns=2 * MS,
    backoff_max_ns=8 * MS,
    execution_ns=0,
    load_ns=0,
    exit_ns=30 * MS,
    cache_bytes=4000,
)
TIGHT = (LIMITS, replace(LIMITS, client_requests=5), replace(LIMITS, model_queue=6), replace(LIMITS, queue_bytes=40))


class Listener(FakeClient):
    """A client that sends invalid messages, and records all that it receives."""

    def __init__(self, client: FakeClient) -> None:
        super().__init__(client.peer, client.name, client.plane, client.outputs)
        self.heard: list[str] = []
        self.in_batches: set[int] = set()
        """Requests that it sent in columns. Only these may be answered in columns."""

    def receive(self, message: Any) -> None:
        if isinstance(message, ReplyBatch):
            assert set(message.columns.requests) <= self.in_batches
        for one in replies_of(message):
            self.heard.append(repr(one))
            if isinstance(one, Reply):
                for handle in references(one.outputs):
                    self.holds[handle] += 1
                self.open.discard(one.request)
            elif isinstance(one, (Fail, FailHeld)):
                self.open.discard(one.request)


class OwnMemory:
    """The memory in which the broker keeps answers."""

    def read(self, parts: Any) -> bytes | None:
        return bytes(sum(part.size for part in parts))

    def place(self, data: bytes, audience: str) -> Placed | None:
        return None


class Computing(World):
    """A world whose workers answer each request with the first byte of its first input, and record their requests."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.given: list[Any] = []

    def _spawn(self, effect: Spawn) -> None:
        super()._spawn(effect)
        worker = self.workers[effect.peer]
        worker.compute = self._compute
        worker.watch = self._note

    def _note(self, worker: FakeWorker, batch: QueuedBatch) -> None:
        self.given.append((worker.peer, repr([*batch.work_items])))

    def _compute(self, worker: FakeWorker, work: Work) -> Row:
        worker.compute = None
        row = worker.answer_row(work, None)
        worker.compute = self._compute
        first = work.inputs[0].data if work.inputs else b""
        value = first[:1] if isinstance(first, bytes) else b""
        for tensor in row.outputs:
            if isinstance(tensor.data, bytes) and value:
                tensor.data = value * len(tensor.data)
        return row


class Twin:
    """One of the two worlds. `batched`: requests arrive as InferBatch."""

    def __init__(self, names: list[str], limits: Limits, batched: bool) -> None:
        self.batched = batched
        self.world = Computing(limits)
        self.world.core.state.cache.copy_with(OwnMemory())
        self.names = names
        for name in names:
            self.world.deploy(*MODELS[name])
        self.clients: list[Listener] = []
        for audience, plane, roles in (
            ("uid:1", "lane", ALL_ROLES),
            ("uid:1", "zmq", ALL_ROLES),
            ("uid:2", "lane", INFER),
            ("uid:3", "lane", OBSERVE),
        ):
            self._add(self.world.connect("c", plane, "", audience, roles))

    def _add(self, client: FakeClient) -> None:
        listener = Listener(client)
        self.clients.append(listener)
        self.world.clients[client.peer] = listener

    # ------------------------------------------------------------------------------------ steps

    def client(self, which: int) -> Listener:
        going = [client for client in self.clients if not client.ended]
        return going[which % len(going)]

    def workers(self) -> list[FakeWorker]:
        return [worker for worker in self.world.workers.values() if not worker.dead]

    def send(self, groups: list[tuple[int, list[Any]]]) -> None:
        happened: list[tuple[int, Any]] = []
        for which, messages in groups:
            peer = self.client(which).peer
            for message in messages:
                if isinstance(message, InferBatch) and not self.batched:
                    happened += [(peer, infer) for infer in split_up(message)]
                else:
                    happened.append((peer, message))
        for peer, message in happened:
            client = self.clients[peer - 1]
            for infer in split_up(message) if isinstance(message, InferBatch) else [message]:
                client.open.add(infer.request)
                if isinstance(message, InferBatch):
                    client.in_batches.add(infer.request)
        self.world.turn(happened)

    def finish(self, which: int, error: bool, took: int, columns: bool, rows_first: int) -> None:
        running = [worker for worker in self.workers() if worker.running is not None]
        if running:
            worker = running[which % len(running)]
            worker.in_columns = columns
            worker.finish(self.world.now, took * MS, rows_first, ("MODEL_FAILED", "no") if error else None)
            self.world.settle()

    def crash(self, which: int) -> None:
        if workers := self.workers():
            self.world.crash(workers[which % len(workers)])

    def slow(self, which: int, to: bool) -> None:
        """Holds back messages to or from a worker, or releases them."""
        if workers := self.workers():
            (self.world.slow_to if to else self.world.slow_from).symmetric_difference_update(
                {workers[which % len(workers)].peer}
            )
            self.world.settle()

    def cancel(self, which: int, pick: int) -> None:
        client = self.client(which)
        known = [*sorted(client.open), 999]
        self.world.turn([(client.peer, Cancel(known[pick % len(known)]))])

    def give_back(self, which: int) -> None:
        client = self.client(which)
        held = tuple(client.holds.elements())
        client.holds.clear()
        if held:
            self.world.turn([(client.peer, Return(held))])

    def gone(self, which: int) -> None:
        client = self.client(which)
        client.holds.clear()
        client.open.clear()
        self.world.gone(client)
        self._add(self.world.connect("new", client.plane, "", "uid:2"))

    def wait(self, milliseconds: int) -> None:
        self.world.advance(self.world.now + milliseconds * MS)

    def deploy(self, which: int, source: int) -> None:
        """Deploys another generation of a model."""
        name = self.names[which % len(self.names)]
        served, instances, _ = MODELS[name]
        self.world.turn([(0, events.Deploy(name, (self.world.target(served, source, instances),)))])

    def drain(self) -> None:
        if not self.world.core.state.draining:
            self.world.turn([(0, events.Drain(3600 * 1000 * MS))])

    # ------------------------------------------------------------------------------------ the end

    def end(self) -> None:
        """Ends everything, and asserts that nothing is left."""
        world = self.world
        world.slow_to.clear()
        world.slow_from.clear()
        world.settle()
        for _ in range(50):
            world.finish_all()
            for worker in self.workers():
                worker.end_streams()
            world.settle()
            self.wait(40)
            if not world.core.state.requests:
                break
        assert not world.core.state.requests
        for client in self.clients:
            assert not client.open, f"never answered: {client.open}"
            if not client.ended:
                state = world.core.state.clients[client.peer]
                assert not state.requests
                assert not state.bytes
                held = tuple(client.holds.elements())
                if held:
                    self.world.turn([(client.peer, Return(held))])
                world.gone(client)
        world.settle()
        assert not world.core.state.ledger.holds
        for worker in self.workers():
            assert not worker.out

    def seen(self) -> Any:
        """Everything that must be equal for both."""
        state = self.world.core.state
        return {
            "heard": [sorted(client.heard) for client in self.clients],
            "ran": [(worker.name, worker.dead, worker.started) for worker in self.world.workers.values()],
            "given": self.world.given,
            "clock": (self.world.now, self.world.core.deadline()),
            "requests": [
                (number, request.client_number, request.state, request.deadline, request.tag, request.cost,
                 request.inline, request.signature, request.rows, request.length, request.tensors())
                for number, request in state.requests.items()
            ],
            "clients": [
                (peer, client.bytes, {number: request.number for number, request in client.requests.items()})
                for peer, client in state.clients.items()
            ],
            "queues": {
                version.label: (version.service.queue.count, version.service.queue.bytes, version.service.queue.timed)
                for model in state.models.values()
                for version in model.versions.values()
            },
            "statistics": {
                version.label: _flat(version.statistics)
                for model in state.models.values()
                for version in model.versions.values()
            },
        }  # fmt: skip


def _flat(statistics: Any) -> dict[str, str]:
    return {name: repr(value) for name, value in asdict(statistics).items() if "object at" not in repr(value)}


def split_up(message: InferBatch) -> list[Infer]:
    """The requests one by one."""
    return [
        Infer(number, message.model, message.version, inputs, None, message.timeout_us)
        for number, inputs in one_by_one(message.columns)
    ]


class Item(NamedTuple):
    rows: int
    fault: str
    """new, zero or same: fault of the number; short, long or empty: fault of the bytes."""
    value: int


ITEMS = st.builds(
    Item,
    st.sampled_from([1, 1, 1, 2, 3, 4, 9, 0]),
    st.sampled_from([*[""] * 14, "zero", "same", "old", "short", "long", "empty"]),
    st.integers(0, 3),
)
_ODD_FORMS = ("name", "dtype", "rank", "negative", "twice", "none", "wide", "strings")


class Group(NamedTuple):
    client: int
    model: int
    version: int
    width: int
    optional: bool
    odd: str
    items: list[Item]
    timeout_ms: int
    alone: str
    """An additional request that cannot be in columns."""


GROUPS = st.builds(
    Group,
    st.sampled_from([0, 0, 0, 1, 2, 3, 4]),
    st.sampled_from([*[0] * 6, 1, 1, 1, 2, 2, -1]),
    st.sampled_from([*[0] * 10, 1, 9]),
    st.sampled_from([1, 1, 1, 2, 0]),
    st.booleans(),
    st.sampled_from([*[""] * 24, *_ODD_FORMS]),
    st.lists(ITEMS, min_size=1, max_size=9),
    st.sampled_from([0, 0, 0, 1, 5]),
    st.sampled_from(["", "", "plain", "wanted", "options"]),
)
STEPS = st.one_of(
    st.tuples(st.just("send"), st.lists(GROUPS, min_size=1, max_size=3)),
    st.tuples(st.just("send"), st.lists(GROUPS, min_size=1, max_size=3)),
    st.tuples(st.just("finish"), st.integers(0, 5), st.booleans(), st.integers(0, 3), st.booleans(), st.just(0)),
    st.tuples(st.just("finish"), st.integers(0, 5), st.just(False), st.just(0), st.just(True), st.integers(0, 2)),
    st.tuples(st.just("cancel"), st.integers(0, 4), st.integers(0, 20)),
    st.tuples(st.just("give_back"), st.integers(0, 4)),
    st.tuples(st.just("wait"), st.sampled_from([0, 1, 5, 40])),
    st.tuples(st.just("slow"), st.integers(0, 5), st.booleans()),
    st.tuples(st.sampled_from(["crash", "gone"]), st.integers(0, 5)),
    st.tuples(st.just("deploy"), st.integers(0, 3), st.integers(0, 2)),
    st.tuples(st.just("drain")),
)


class Writer:
    """Makes the messages of a group. `numbers` counts the requests of all clients."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.numbers = 0

    def messages(self, group: Group) -> list[Any]:
        name = "nobody" if group.model < 0 else self.names[group.model % len(self.names)]
        inputs = MODELS[name][0].inputs if name in MODELS else (X,)
        specs = [spec for spec in inputs if group.optional or not spec.optional]
        forms = [self._form(spec, group) for spec in specs]
        if group.odd == "twice":
            forms *= 2
        elif group.odd == "none":
            forms = []
        found: list[Any] = []
        if group.alone:
            found.append(self._alone(name, group))
        first = self.numbers
        numbers, rows, data = [], [], []
        for item in group.items:
            self.numbers += 1
            number = {"zero": 0, "same": max(self.numbers - 1, 1), "old": max(first - 2, 1)}.get(
                item.fault, self.numbers
            )
            numbers.append(number)
            rows.append(item.rows)
            data.append(tuple(self._bytes(form, item) for form in forms))
        columns = Columns(tuple(forms), tuple(numbers), tuple(rows), tuple(data))
        return [*found, InferBatch(name, group.version, columns, group.timeout_ms * 1000)]

    def _alone(self, name: str, group: Group) -> Infer:
        self.numbers += 1
        tensor = Tensor("x", "FP32", (1, 1), bytes(4))
        outputs = (Wanted("y"),) if group.alone == "wanted" else None
        options = Options(priority=1) if group.alone == "options" else None
        return Infer(self.numbers, name, 0, (tensor,), outputs, group.timeout_ms * 1000, options)

    def _form(self, spec: TensorSpec, group: Group) -> TensorForm:
        whole: tuple[int, ...] = tuple(group.width if dim < 0 else dim for dim in spec.dims)
        name = "unknown" if group.odd == "name" else spec.name
        dtype = {"dtype": "INT64", "strings": "BYTES"}.get(group.odd, spec.dtype)
        dims = {"rank": (*whole, 2), "negative": (-1,), "wide": (2**62, 4)}.get(group.odd, whole)
        return TensorForm(name, dtype, dims)

    def _bytes(self, form: TensorForm, item: Item) -> bytes:
        count = item.rows
        for dim in form.dims:
            count *= max(dim, 0)
        size = min(4 * count, 400)
        size = {"short": max(size - 4, 0), "long": size + 4, "empty": 0}.get(item.fault, size)
        if form.dtype == "BYTES":
            return (b"\1\0\0\0a" * size)[: 5 * count + {"short": -5, "long": 5}.get(item.fault, 0)][:400]
        return bytes([item.value]) * size


class Pair:
    def __init__(self, names: list[str], limits: Limits) -> None:
        order = names
        if "chain" in names:
            names = ["chain", *[name for name in names if name != "chain"]]
            order = ["plain", "pair", *[name for name in names if name not in ("plain", "pair")]]
        self.batched, self.single = Twin(order, limits, True), Twin(order, limits, False)
        self.writer = Writer(names)

    def step(self, step: tuple[Any, ...]) -> None:
        kind, *arguments = step
        if kind == "send":
            arguments = [[(group.client, self.writer.messages(group)) for group in arguments[0]]]
        for twin in (self.batched, self.single):
            getattr(twin, kind)(*arguments)
        self.compare()

    def compare(self) -> None:
        found, expected = self.batched.seen(), self.single.seen()
        for part, value in expected.items():
            assert found[part] == value, part

    def end(self) -> None:
        for twin in (self.batched, self.single):
            twin.end()
        self.compare()


@pytest.mark.hypothesis
@settings(max_examples=examples(300, quick=40))
@given(
    st.lists(st.sampled_from(sorted(MODELS)), min_size=1, max_size=3, unique=True),
    st.sampled_from(TIGHT),
    st.lists(STEPS, min_size=8, max_size=25),
)
def test_requests_in_columns_have_the_same_outcomes_as_single_requests(
    names: list[str], limits: Limits, steps: list[tuple[Any, ...]]
) -> None:
    pair = Pair(names, limits)
    for step in steps:
        pair.step(step)
    pair.end()
