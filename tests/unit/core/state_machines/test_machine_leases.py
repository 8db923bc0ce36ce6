"""The state machine of test_machine_operations.py with clients that get and use leases, while workers end them, die
during leased requests, hang or cannot be lent.

Additional invariants: each leased request is answered once, or its lease ends and the request is sent to the broker or
fails with its worker. The statistics count exactly the batches and leased requests that workers have run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from msgspec.structs import replace

from shmserve.core.effects import Kill
from shmserve.core.policy import BatchPolicy, ModelPolicy, TensorSpec
from shmserve.core.states import InstanceState
from shmserve.core.stats.statistics import Statistics
from shmserve.protocol.messages import Infer
from shmserve.protocol.worker_messages import Done, LeaseOver
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.machine import MS, not_a_rule, run_machine
from tests.unit.core.state_machines.test_machine import FIXED, LIMITS, PAYERS
from tests.unit.core.state_machines.test_machine_operations import Operated, OperatedMachine

Y = (TensorSpec("y", "FP32", (1,)), TensorSpec("w", "FP32", (1,)))
MODELS = (
    (ModelPolicy("lone", 1, 4, (FIXED,), Y, BatchPolicy()), 1, ""),
    (ModelPolicy("pair", 1, 3, (FIXED,), Y, BatchPolicy()), 2, ""),
    (ModelPolicy("once", 1, 3, (FIXED,), Y, None, retry=False), 2, ""),
    (ModelPolicy("patient", 1, 4, (FIXED,), Y, BatchPolicy((3,), 3 * MS)), 1, ""),
)
NAMES = [policy.name for policy, _, _ in MODELS]
NEEDED = 2
"""Number of consecutive single requests after which a client gets a lease: small, so that there are many leases."""


class LentWorld(Operated):
    def __init__(self, **limits: int) -> None:
        super().__init__(replace(LIMITS, execution_ns=30 * MS, leases=3, **limits))
        self.all_workers: list[FakeWorker] = []
        self.statistics: dict[int, Statistics] = {}
        self.batches = 0
        """Number of requests reported to the core as done."""

    def tell(self, effect: Any) -> None:
        if not (isinstance(effect, Kill) and effect.reason.startswith("it has run one batch for more than")):
            super().tell(effect)

    def _spawn(self, effect: Any) -> None:
        super()._spawn(effect)
        self.all_workers.append(self.workers[effect.peer])

    def delivered(self, happened: list[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        known = self.core.state.instances
        for peer, event in happened:
            if isinstance(event, Done) and peer in known and known[peer][1].state is not InstanceState.KILLED:
                self.batches += 1
            yield peer, event

    def _handle(self, happened: list[tuple[int, Any]]) -> None:
        super()._handle(happened)
        for model in self.core.state.models.values():
            for version in model.generations():
                self.statistics[id(version.statistics)] = version.statistics
                if version.service.lending is not None:
                    version.service.lending.needed = min(version.service.lending.needed, NEEDED)


class LeaseMachine(OperatedMachine):
    world: LentWorld
    served = 0
    """Number of requests over leases, in all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.world = LentWorld()

    @initialize(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True))
    def begin(self, names: list[str]) -> None:
        self.begin_with(set(names), MODELS)
        self.alone(0, 0, NEEDED + 1)
        for worker in self.workers(bool):
            worker.read()

    # Leased requests use only the inputs of their clients, each of which has a segment.

    segment = not_a_rule(OperatedMachine.segment)
    unmap = not_a_rule(OperatedMachine.unmap)
    give_back = not_a_rule(OperatedMachine.give_back)
    infer = not_a_rule(OperatedMachine.infer)

    @precondition(lambda self: len(self.clients) < 5)
    @rule(kind=st.integers(0, 3), other=st.booleans())
    def connect(self, kind: int, other: bool) -> None:
        plane, outputs = (("lane", "memfd"), ("lane", "memfd"), ("lane", "memfd"), ("zmq", "posix"))[kind]
        client = self.enter(plane, outputs, other, leases=plane == "lane")
        if plane == "lane":
            self.send([(client.peer, self.world.own_segment(client, 4096))], False)

    # ------------------------------------------------------------------------------------ leases

    def _simple(self, client: FakeClient, name: str, rows: int) -> tuple[int, Infer]:
        """Each client speaks for one caller: requests for several callers in turn lead to no lease."""
        peer, message = super()._simple(client, name, rows)
        message.payer = PAYERS[client.peer % len(PAYERS)]
        return peer, message

    @precondition(lambda self: any(not client.open for client in self.clients))
    @rule(which=st.integers(0, 9), which_model=st.integers(0, 5), count=st.integers(NEEDED, NEEDED + 2))
    def alone(self, which: int, which_model: int, count: int) -> None:
        """Sends requests one after the other, through the broker."""
        resting = [client for client in self.clients if not client.open]
        client, name = resting[which % len(resting)], self.names[which_model % len(self.names)]
        for _ in range(count):
            if client.open or any(lease.model == name for lease in client.leases.values()):
                return
            self.send([self._simple(client, name, 1)], False)
            for _ in range(2):
                for worker in self.workers(bool):
                    self._run(worker)
                if not client.open:
                    break
                self.world.advance(self.world.now + 3 * MS)

    def _run(self, worker: FakeWorker) -> None:
        worker.read()
        self.world.let_start(worker)
        if worker.running:
            worker.finish(self.world.now)
        self.send(self.world.heard(worker), False)

    @precondition(lambda self: any(client.leases and not client.open for client in self.clients))
    @rule(which=st.integers(0, 9), rows=st.lists(st.integers(1, 3), max_size=6))
    def converse(self, which: int, rows: list[int]) -> None:
        """Sends requests one after the other, over a lease."""
        for count in rows:
            if any(client.leases and not client.open for client in self.clients):
                self.leased(which, count, True)

    @precondition(lambda self: any(client.leases and not client.open for client in self.clients))
    @rule(
        which=st.integers(0, 9), rows=st.integers(1, 3), serve=st.booleans(), where=st.sampled_from(["inline", "own"])
    )
    def leased(self, which: int, rows: int, serve: bool, where: str = "inline") -> None:
        able = [client for client in self.clients if client.leases and not client.open]
        client = able[which % len(able)]
        lease = client.leases[sorted(client.leases)[which % len(client.leases)]]
        policy = self.world.policies[lease.model, 1]
        client.send_leased(lease, self.make_request(client, policy, rows, where, 1, True, None))
        for worker in self.workers(lambda worker: serve and lease.number in worker.offered):
            worker.read()
        for worker in self.workers(lambda worker: serve and worker.lease is lease):
            worker.run_leased(self.world.now)
            self.send([], False)

    @precondition(lambda self: self.workers(_is_asked))
    @rule(which=st.integers(0, 9), how=st.sampled_from(["begin", "answer", "answer", "error", "end"]))
    def serve(self, which: int, how: str) -> None:
        asked = self.workers(_is_asked)
        worker = asked[which % len(asked)]
        lease = worker.lease
        assert lease is not None
        if how == "begin" or (how == "end" and lease.running is not None):
            if lease.running is None:
                lease.begin(self.world.now)
        elif how == "end":
            worker.end_lease(0, self.world.now)
        else:
            worker.run_leased(self.world.now, error=("MODEL_FAILED", "no") if how == "error" else None)
        self.send([], False)

    @precondition(lambda self: self.workers(lambda worker: worker.lease))
    @rule(which=st.integers(0, 9), unfit=st.booleans())
    def end_lease(self, which: int, unfit: bool) -> None:
        """The worker ends the lease by itself."""
        lent = self.workers(lambda worker: worker.lease)
        worker = lent[which % len(lent)]
        lease = worker.lease
        assert lease is not None
        if lease.running is None:
            worker.end_lease(0, self.world.now)
            over = worker.outbox[-1]
            assert isinstance(over, LeaseOver)
            over.unfit = unfit and which == 9

    @precondition(lambda self: self.workers(_is_asked))
    @rule(which=st.integers(0, 9), recorded=st.booleans())
    def die_with_request(self, which: int, recorded: bool) -> None:
        asked = self.workers(_is_asked)
        worker = asked[which % len(asked)]
        self.send([])
        if worker.dead or worker.lease is None:
            return
        if recorded and (worker.lease.running or worker.lease.requests):
            worker.run_leased(self.world.now, answer=False)
        elif worker.lease.running is None and worker.lease.requests:
            worker.lease.begin(self.world.now)
        self.world.crash(worker)

    @rule(out=st.booleans())
    def descriptors(self, out: bool) -> None:
        self.world.out_of_descriptors = out

    # ------------------------------------------------------------------------------------ the end

    def let_run(self, worker: FakeWorker) -> None:
        """Serves the requests that have arrived over its lease, which its client then abandons."""
        lease = worker.lease
        while worker.lease is not None and _is_asked(worker):
            worker.run_leased(self.world.now)
        if lease is not None:
            lease_client = next((client for client in self.clients if lease.number in client.leases), None)
            if lease_client is not None:
                lease_client.read_leases()
            lease.client_open = False
            worker.notice()
        super().let_run(worker)

    def is_quiet(self) -> bool:
        return super().is_quiet() and not self.world.core.state.leases

    def teardown(self) -> None:
        world = self.world
        super().teardown()
        assert not world.leases
        assert not any(client.unsent for client in self.clients)
        counted = sum(statistics.execution_count for statistics in world.statistics.values())
        leased = sum(worker.leased for worker in world.all_workers)
        assert counted == world.batches + leased
        LeaseMachine.served += leased


def _is_asked(worker: FakeWorker) -> bool:
    return worker.lease is not None and (worker.lease.running is not None or bool(worker.lease.requests))


@pytest.mark.hypothesis
def test_the_ledger_balances_with_leases() -> None:
    LeaseMachine.served = 0
    run_machine(LeaseMachine, 200)
    assert LeaseMachine.served
