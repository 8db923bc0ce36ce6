"""A state machine that performs, in any order, everything that clients, workers, links and time can do to the core.

Every message between broker and workers is held back until a rule delivers it, so all crossings happen. `check()` runs
after every turn; the fakes assert that they get everything that they must get. At the end all work is finished, all
blocks are returned and the server is drained: then every request has been answered once, and every block is back with
its owner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from shmserve.core import events
from shmserve.core.effects import Kill, Send
from shmserve.core.limits import Limits
from shmserve.core.policy import (
    BatchPolicy,
    ModelPolicy,
    PaddingPolicy,
    QueuePolicy,
    StepPolicy,
    TensorSpec,
    TimeoutAction,
)
from shmserve.protocol.messages import (
    Cancel,
    Fail,
    FailHeld,
    Handle,
    Infer,
    Map,
    Options,
    Reply,
    Return,
    Tensor,
    Unmap,
    Wanted,
)
from shmserve.protocol.roles import ALL_ROLES, FORWARD
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.tensors import references
from tests.support.core.machine import MS, WorldMachine, in_batches, run_machine
from tests.support.core.policies import OUTPUTS, model
from tests.support.core.world import World

LIMITS = Limits(
    client_requests=30,
    client_segments=5,
    client_held_bytes=400,
    backoff_ns=2 * MS,
    backoff_max_ns=8 * MS,
    execution_ns=0,
    load_ns=0,
    exit_ns=30 * MS,
)
BROKER_SEGMENT = 1
FIXED = TensorSpec("x", "FP32", (1,))
VARIES = TensorSpec("x", "FP32", (-1,))
RAGGED = TensorSpec("x", "FP32", (-1,), ragged=True)
MAYBE = TensorSpec("z", "FP32", (-1,), optional=True)
CHAIN = (
    StepPolicy("plain", 0, (("x", "x"),), (("w", "w"), ("y", "t"))),
    StepPolicy("ordered", 0, (("x", "x"),), (("y", "u"),)),
    StepPolicy("single", 0, (("x", "t"),), (("y", "y"),)),
    StepPolicy("ordered", 0, (("x", "u"),), (("w", "v"),)),
)
NESTED = (
    StepPolicy("chain", 0, (("x", "x"),), (("w", "w"), ("y", "t"))),
    StepPolicy("plain", 0, (("x", "t"),), (("y", "y"),)),
)
EXPIRES = QueuePolicy(TimeoutAction.REJECT, 9 * MS, True, 3)
DELAYS = QueuePolicy(TimeoutAction.DELAY, 4 * MS, True)
PADDING = PaddingPolicy((("x", (0,)),), lookahead=5, multiple=2, batch_cost=3)
MODELS = (
    (model("plain", 8, (FIXED,), BatchPolicy()), 1, "y"),
    (model("pair", 6, (VARIES,), BatchPolicy()), 2, ""),
    (model("timed", 6, (RAGGED, MAYBE), BatchPolicy(preferred=(2, 4), delay_ns=10 * MS)), 1, "w"),
    (model("ranked", 4, (VARIES,), BatchPolicy((), 5 * MS, False, 3, 2, DELAYS, {1: EXPIRES})), 1, "y"),
    (model("ordered", 4, (FIXED,), BatchPolicy(preserve_ordering=True)), 2, "y w"),
    (model("strict", 2, (FIXED,), BatchPolicy((), 0, True, 0, 0, EXPIRES)), 2, ""),
    (model("single", 3, (FIXED,), None), 1, "y"),
    (model("padded", 3, (VARIES,), BatchPolicy(), padding=PADDING), 1, "y"),
    (model("patient", 4, (VARIES,), BatchPolicy((3,), 6 * MS), padding=PADDING), 2, ""),
    (model("levelled", 3, (VARIES,), BatchPolicy((), 0, False, 2, 1, DELAYS), padding=PADDING), 1, ""),
    (model("flat", 0, (VARIES,), BatchPolicy()), 1, "y"),
    (ModelPolicy("chain", 1, 3, (FIXED,), (*OUTPUTS, TensorSpec("v", "FP32", (-1,))), steps=CHAIN), 0, ""),
    (ModelPolicy("nested", 1, 3, (FIXED,), OUTPUTS, steps=NESTED), 0, ""),
)
MEMBERS = {"chain": {"plain", "ordered", "single"}, "nested": {"chain", "plain", "ordered", "single"}}

NAMES = [policy.name for policy, _, _ in MODELS]
AHEAD = ["plain", "pair", "timed", "ordered", "padded"]
PAYERS = ["", "alice", "bob"]
"""The callers for whom clients speak."""


class Slow(World):
    """A world with slow links: nothing arrives unless it is delivered."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        super().__init__(limits)
        self.asked_in_order: dict[tuple[int, int], int] = {}
        self.last_in_order = -1

    def _spawn(self, effect: Any) -> None:
        super()._spawn(effect)
        self.slow_to.add(effect.peer)
        self.slow_from.add(effect.peer)
        self.workers[effect.peer].in_columns = True

    def tell(self, effect: Any) -> None:
        if isinstance(effect, Kill):
            raise AssertionError(f"the workers here keep to the protocol, and one is killed: {effect.reason}")
        if isinstance(effect, Send) and isinstance(effect.message, (Fail, FailHeld)):
            assert effect.message.code != "INTERNAL", effect.message.text
        if isinstance(effect, Send) and isinstance(effect.message, Reply):
            place = self.asked_in_order.get((effect.peer, effect.message.request))
            if place is not None:
                assert place > self.last_in_order, "preserve_ordering"
                self.last_in_order = place


class CoreMachine(WorldMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world: Slow = Slow()
        self.names = NAMES
        self.next_offset = 0
        self.all_clients: list[FakeClient] = []
        self.blocks: list[Handle] = []
        self.deadlines: dict[tuple[int, int], int] = {}

    # ------------------------------------------------------------------------------------ tools

    def choose_client(self, which: int) -> FakeClient:
        return self.clients[which % len(self.clients)]

    def enter(self, plane: str, outputs: str, other: bool, **more: Any) -> FakeClient:
        """A new client, perhaps of the other user."""
        audience = "uid:2000" if other else "uid:1000"
        client = self.world.connect(f"c{len(self.all_clients)}", plane, outputs, audience, **more)
        self.clients.append(client)
        self.all_clients.append(client)
        return client

    # ------------------------------------------------------------------------------------ rules

    @initialize(names=st.lists(st.sampled_from(NAMES), max_size=2), ahead=st.sampled_from(AHEAD))
    def begin(self, names: list[str], ahead: str) -> None:
        self.set_out(names, ahead)

    def set_out(self, names: list[str], ahead: str) -> None:
        """Few models at a time, so that more happens to each; one of them has batches that wait at the worker and
        grow."""
        self.begin_with({*names, ahead}.union(*(MEMBERS.get(name, ()) for name in names)), MODELS)

    def begin_with(self, names: Collection[str], models: Iterable[tuple[ModelPolicy, int, str]]) -> None:
        """Starts with two clients, and the models (policy, instances, large output) with these names."""
        self.names = sorted(names)
        self.world.turn([(0, events.OwnSegment(Map(BROKER_SEGMENT, 1 << 40)))])
        for policy, instances, large in models:
            if policy.name in names:
                self.world.deploy(policy, instances, large)
        for worker in self.workers(bool):
            self.world.turn(self.world.heard(worker))
        self.connect(0, False)
        self.connect(1, False)

    @precondition(lambda self: len(self.clients) < 5)
    @rule(kind=st.integers(0, 3), other=st.booleans())
    def connect(self, kind: int, other: bool) -> None:
        plane, outputs = (("lane", "memfd"), ("lane", "memfd"), ("zmq", "posix"), ("zmq", "frames"))[kind]
        self.enter(plane, outputs, other, roles=ALL_ROLES if other else ALL_ROLES | FORWARD)

    @precondition(lambda self: len(self.clients) > 1)
    @rule(which=st.integers(0, 9), really=st.integers(0, 3))
    def gone(self, which: int, really: int) -> None:
        if really:
            return
        client = self.choose_client(which)
        self.send([])
        self.clients.remove(client)
        self.world.gone(client)

    @precondition(lambda self: self.clients)
    @rule(which=st.integers(0, 9), together=st.booleans())
    def segment(self, which: int, together: bool) -> None:
        client = self.choose_client(which)
        if len(client.own) < 4:
            self.send([(client.peer, self.world.own_segment(client, 4096))], together)

    @precondition(lambda self: self.clients)
    @rule(which=st.integers(0, 9), together=st.booleans())
    def unmap(self, which: int, together: bool) -> None:
        """Handles into the segment may have been sent; no more will follow."""
        client = self.choose_client(which)
        known = [number for number in client.own if number not in client.withdrawn]
        if known:
            client.withdrawn.add(known[0])
            self.send([(client.peer, Unmap(known[0]))], together)

    @precondition(lambda self: self.clients)
    @rule(
        which=st.integers(0, 9),
        which_model=st.integers(0, 5),
        count=st.integers(1, 5),
        rows=st.integers(0, 3),
        where=st.sampled_from(["inline", "own", "own", "held", "forged", "frame"]),
        shape=st.sampled_from([1, 2, 9]),
        optional=st.booleans(),
        options=st.sampled_from([None, Options(priority=1), Options(priority=3), Options(queue_timeout_us=2000)]),
        timeout_ms=st.sampled_from([0, 0, 0, 1, 3, 9]),
        wanted=st.sampled_from([None, None, ("w",), ("y", "w"), ("placed",)]),
        together=st.booleans(),
        batched=st.booleans(),
        payer=st.sampled_from(["", *PAYERS]),
    )
    def infer(
        self, which: int, which_model: int, count: int, rows: int, where: str, shape: int, optional: bool,
        options: Options | None, timeout_ms: int, wanted: tuple[str, ...] | None, together: bool, batched: bool = False,
        payer: str = "",
    ) -> None:  # fmt: skip
        client = self.choose_client(which)
        model = self.world.policies[self.names[which_model % len(self.names)], 1]
        happened: list[tuple[int, Any]] = []
        for _ in range(count):
            message = self.make_request(client, model, rows, where, shape, optional, wanted)
            message.options, message.timeout_us, message.payer = options, timeout_ms * 1000, payer
            client.sends(message.request)
            if timeout_ms:
                self.deadlines[client.peer, message.request] = self.world.now + timeout_ms * MS
            if model.name == "ordered":
                self.world.asked_in_order[client.peer, message.request] = message.request
            if where == "frame":
                blocks = tuple(references(message.inputs))
                self.blocks += blocks
                happened.append((client.peer, events.Framed(message, blocks)))
            else:
                happened.append((client.peer, message))
        self.send(in_batches(happened) if batched else happened, together)

    def _simple(self, client: FakeClient, name: str, rows: int) -> tuple[int, Infer]:
        message = self.make_request(client, self.world.policies[name, 1], rows, "inline", 1, True, None)
        message.payer = PAYERS[message.request % len(PAYERS)]
        client.sends(message.request)
        if name == "ordered":
            self.world.asked_in_order[client.peer, message.request] = message.request
        return client.peer, message

    @precondition(lambda self: self.clients)
    @rule(
        which=st.integers(0, 9),
        which_model=st.integers(0, 5),
        counts=st.lists(st.integers(1, 3), max_size=4),
        batched=st.booleans(),
    )
    def load(self, which: int, which_model: int, counts: list[int], batched: bool = False) -> None:
        """Several turns of valid requests for one model, so that batches wait at workers and are extended."""
        client, name = self.choose_client(which), self.names[which_model % len(self.names)]
        for count in counts:
            happened = [self._simple(client, name, 1) for _ in range(count)]
            self.send(in_batches(happened) if batched else happened, False)

    @precondition(lambda self: self.clients and self.workers(lambda worker: worker.running))
    @rule(which=st.integers(0, 9), counts=st.lists(st.integers(1, 2), min_size=1, max_size=3), cancel=st.booleans())
    def cross(self, which: int, counts: list[int], cancel: bool) -> None:
        """A worker finishes and starts the waiting batch; the broker extends or withdraws that before it reads the
        report."""
        running = self.workers(lambda worker: worker.running)
        worker, client = running[which % len(running)], self.choose_client(which)
        worker.read()
        worker.finish(self.world.now)
        for count in counts:
            self.send([self._simple(client, worker.policy.name, 1) for _ in range(count)], False)
        if cancel and client.open:
            self.send([(client.peer, Cancel(max(client.open)))], False)

    def make_request(
        self, client: FakeClient, model: ModelPolicy, rows: int, where: str, shape: int, optional: bool,
        wanted: tuple[str, ...] | None,
    ) -> Infer:  # fmt: skip
        self.numbers += 1
        tensors = []
        for spec in model.inputs:
            if spec.optional and not optional:
                continue
            tail = (shape,) if spec.dims == (-1,) else spec.dims
            whole = (rows, *tail) if model.max_batch else tail
            size = 4 * whole[0] * (whole[1] if model.max_batch else 1)
            tensors.append(Tensor(spec.name, "FP32", whole, self._data(client, where, size)))
        outputs: tuple[Wanted, ...] | None = None
        if wanted == ("placed",):
            own = [number for number in client.own if number not in client.withdrawn]
            outputs = (Wanted("w", Handle(own[0], 0, 64) if own else None),)
        elif wanted is not None:
            outputs = tuple(Wanted(name) for name in wanted)
        return Infer(self.numbers, model.name, 0, tuple(tensors), outputs)

    def _data(self, client: FakeClient, where: str, size: int) -> Any:
        if where == "frame":
            offset, self.next_offset = self.next_offset, self.next_offset + max(64, size)
            return (Handle(BROKER_SEGMENT, offset, size),)
        if where == "own" and client.own:
            return (Handle(min(client.own), 128, size),)
        if where == "held" and client.holds:
            held = min(client.holds, key=lambda handle: handle.offset)
            return (Handle(held.segment, held.offset, size),)  # often of the wrong size, and then refused
        if where == "forged":
            others = [handle for other in self.clients for handle in other.holds]
            return tuple(others[:1]) or (Handle((1 << 62) + 5, 2**63 - 1, size),)
        return bytes(size)

    @precondition(lambda self: self.clients)
    @rule(which=st.integers(0, 9), pick=st.integers(0, 30), together=st.booleans())
    def cancel(self, which: int, pick: int, together: bool) -> None:
        client = self.choose_client(which)
        known = sorted(client.open) + [self.numbers]
        self.send([(client.peer, Cancel(known[pick % len(known)]))], together)

    @precondition(lambda self: any(client.holds for client in self.clients))
    @rule(which=st.integers(0, 9), count=st.integers(1, 4), twice=st.booleans(), together=st.booleans())
    def give_back(self, which: int, count: int, twice: bool, together: bool) -> None:
        holders = [client for client in self.clients if client.holds]
        client = holders[which % len(holders)]
        handles = list(client.holds)[:count]
        for handle in handles:
            client.give_back(handle)
        if twice:  # an error, and nothing else
            handles.append(handles[0])
        self.send([(client.peer, Return(tuple(handles)))], together)

    @precondition(lambda self: self.workers(lambda worker: worker.running))
    @rule(which=st.integers(0, 30), rows_first=st.integers(0, 1), error=st.booleans(), took=st.integers(0, 9))
    def finish(self, which: int, rows_first: int, error: bool, took: int) -> None:
        running = self.workers(lambda worker: worker.running)
        failure = ("MODEL_FAILED", "no") if error and took == 1 else None
        running[which % len(running)].finish(self.world.now, took * MS, rows_first, failure)

    @rule(us=st.sampled_from([1, 500, 1000, 4000, 20000]), late=st.booleans())
    def time(self, us: int, late: bool) -> None:
        """`late`: the timer fires only after all that time, for everything that has become due."""
        self.send([])
        until = self.world.now + us * 1000
        if late:
            self.world.now = until
        self.world.advance(until)

    @rule(which=st.integers(0, 99))
    def crash(self, which: int) -> None:
        workers = self.workers(bool)
        if which < 10 and workers:
            self.send([])
            self.world.crash(workers[which % len(workers)])

    # ------------------------------------------------------------------------------------ what must be true

    @invariant()
    def deadlines_are_kept(self) -> None:
        open_requests = {(client.peer, request) for client in self.clients for request in client.open}
        unsent = {(peer, message.request) for peer, message in self.unsent if isinstance(message, Infer)}
        unsent |= {(peer, m.infer.request) for peer, m in self.unsent if isinstance(m, events.Framed)}
        for request in open_requests & self.deadlines.keys() - unsent:
            assert self.world.now < self.deadlines[request], f"{request} is late"

    def teardown(self) -> None:
        world = self.world
        self.send([])
        self.finish_everything()
        for client in self.clients:
            assert not client.open, f"never answered: {client.open}"
            assert not client.held_inputs, f"never released: {client.held_inputs}"
            if client.holds:
                held = tuple(client.holds.elements())
                client.holds.clear()
                self.send([(client.peer, Return(held))], False)
        self.finish_everything()
        assert not world.core.state.requests
        assert not world.core.state.ledger.holds
        for worker in world.workers.values():
            assert not worker.out, f"never went back to {worker.name}: {worker.out}"
        freed = sorted(world.freed, key=lambda handle: (handle.segment, handle.offset))
        assert freed == self.blocks + self.copies(), "what the broker had in its own memory"
        world.turn([(0, events.Drain(10 * MS))])
        self.finish_everything()
        assert world.drained
        assert not world.workers
        for client in list(self.clients):
            world.gone(client)
        assert set(world.core.state.ledger.segments) == {BROKER_SEGMENT, *(copy.segment for copy in self.copies())}
        assert len(set(world.forgotten)) == len(world.forgotten)

    def copies(self) -> list[Handle]:
        """Everything that the broker has copied, in order."""
        return []


@pytest.mark.hypothesis
def test_the_ledger_balances_under_random_events() -> None:
    run_machine(CoreMachine, 120)
