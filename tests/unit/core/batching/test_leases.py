"""How leases begin, are refused and end: nothing is lost or counted twice, and each instance comes back."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.core import events
from shmserve.core.batching.form import Reason
from shmserve.core.batching.lending import ALONE, ALONE_MOST, Lending, lending_of
from shmserve.core.effects import Drained, ReadLease, StartLease, Traced
from shmserve.core.events import LeaseRead
from shmserve.core.ledger import INTERNAL
from shmserve.core.limits import Limits
from shmserve.core.policy import BatchPolicy, ModelPolicy, PaddingPolicy, SequencePolicy, TensorSpec
from shmserve.core.records import Version
from shmserve.core.requests.client import CallingWorker
from shmserve.core.requests.recording import Recording
from shmserve.core.requests.trace import Sample
from shmserve.core.stats import activity
from shmserve.core.stats.latencies import FirstResponses
from shmserve.core.stats.statistics import FailureKind, Statistics
from shmserve.protocol.messages import (
    INLINE_BYTES,
    Call,
    Fail,
    Handle,
    Infer,
    LeaseLogged,
    LeaseOver,
    Lend,
    Reply,
    Revoke,
    TensorForm,
    Unmap,
    Wanted,
)
from tests.support.core.calling import caller_of
from tests.support.core.fakes import FakeClient, FakeWorker, one_input
from tests.support.core.leasing import RECORDS, FakeLease
from tests.support.core.policies import plain, step
from tests.support.core.world import World

MS = 10**6
X, Y = (TensorSpec("x", "FP32", (1,)),), (TensorSpec("y", "FP32", (1,)),)
BATCHES = BatchPolicy()


def model(name: str = "m", max_batch: int = 8, batching: BatchPolicy | None = BATCHES, **more: Any) -> ModelPolicy:
    return ModelPolicy(name, more.pop("version", 1), max_batch, X, Y, batching, **more)


class Lent(World):
    """With the model `m` and a client that accepts leases. Keeps what was said about them."""

    def __init__(self, policy: ModelPolicy | None = None, instances: int = 1, **limits: Any) -> None:
        super().__init__(Limits(**limits))
        self.numbers = 0
        self.effects: list[Any] = []
        self.deploy(policy or model(), instances)
        self.client = self.connect("a", leases=True)

    def tell(self, effect: Any) -> None:
        self.effects.append(effect)

    def infer(self, client: FakeClient, rows: int = 1, model: str = "m", **more: Any) -> Infer:
        """`data`: of its input, in place of bytes."""
        self.numbers += 1
        tensor = one_input(rows)
        tensor.data = more.pop("data", tensor.data)
        return Infer(self.numbers, model, more.pop("version", 0), (tensor,), **more)

    def ask(self, client: FakeClient, rows: int = 1, model: str = "m", **more: Any) -> Infer:
        """Sends a request to the broker."""
        message = self.infer(client, rows, model, **more)
        client.sends(message.request)
        self.turn([(client.peer, message)])
        return message

    def alone(self, count: int = ALONE + 1, client: FakeClient | None = None, **more: Any) -> None:
        """So many requests, one after the other."""
        for _ in range(count):
            self.ask(client or self.client, **more)
            self.finish_running()

    def lease(self, client: FakeClient | None = None) -> FakeLease:
        (lease,) = (client or self.client).leases.values()
        return lease

    def holder(self) -> FakeWorker:
        (worker,) = [worker for worker in self.workers.values() if worker.lease is not None]
        return worker

    def leased(self, client: FakeClient | None = None, rows: int = 1, **more: Any) -> Infer:
        """Sends a request over the lease."""
        client = client or self.client
        message = self.infer(client, rows, **more)
        client.send_leased(self.lease(client), message)
        return message

    def segment(self, client: FakeClient | None = None, name: str | None = None) -> Handle:
        """Four bytes in a new segment of the client."""
        client = client or self.client
        announcement = self.own_segment(client, 4096)
        announcement.name = name
        self.turn([(client.peer, announcement)])
        return Handle(announcement.segment, 128, 4)

    def serve(self, took: int = 0, error: tuple[str, str] | None = None) -> None:
        self.holder().run_leased(self.now, took, error)
        self.settle()

    def started(self) -> list[StartLease]:
        return [effect for effect in self.effects if isinstance(effect, StartLease)]

    @property
    def version(self) -> Version:
        return self.core.state.ready["m"]

    @property
    def statistics(self) -> Statistics:
        return self.version.statistics

    @property
    def lending(self) -> Lending:
        assert self.version.lending is not None
        return self.version.lending

    def is_over(self) -> bool:
        """No lease is left anywhere, and the instances are idle again."""
        version, state = self.version, self.core.state
        workers = [worker for worker in self.workers.values() if worker.lease is not None]
        idle = all(instance in version.idle for instance in version.instances if instance.usable)
        return idle and not (state.leases or self.leases or workers or self.client.leases)


# ---------------------------------------------------------------------------------------------- how one begins


def test_a_client_that_sends_one_request_at_a_time_gets_a_lease() -> None:
    world = Lent()
    world.alone(ALONE)
    assert not world.started()
    world.alone(1)
    (start,) = world.started()
    assert (start.of_client.model, start.of_client.version, start.of_client.rows) == ("m", 1, 8)
    assert start.of_client.default
    assert start.of_worker == Lend(start.of_client.lease, "m", 1, True, (TensorForm("x", "FP32", (1,)),), 8, 1)
    assert not world.version.idle
    before = world.core.state.next_number()
    for _ in range(3):
        message = world.leased()
        world.serve()
        assert isinstance(world.client.answers[message.request], Reply)
    assert world.core.state.next_number() == before + 1, "the core has had work"


def test_leased_requests_are_counted_as_others() -> None:
    """Two requests of 1 and 3 rows that succeed, and one that fails, after those through the broker."""
    world = Lent(first_responses=True)
    assert isinstance(world.statistics.first, FirstResponses)
    world.alone()
    before = world.statistics.success_count
    assert before == ALONE + 1
    for rows, took, error in ((1, 3 * MS, None), (3, 5 * MS, None), (2, 7 * MS, ("MODEL_FAILED", "no"))):
        world.now += 20 * MS
        world.leased(rows=rows)
        world.serve(took, error)
    assert world.statistics.success_count == before, "the log has not been read yet"
    world.turn([(world.holder().peer, LeaseLogged(world.lease().number))])
    found = world.statistics
    assert (found.success_count, found.fail_count) == (before + 2, 1)
    assert found.failures[FailureKind.BACKEND] == 1
    assert (found.inference_count, found.execution_count) == (before + 4, before + 3)
    assert (found.success_ns, found.fail_ns) == (8 * MS, 7 * MS)
    assert found.infer_ns + found.input_ns + found.output_ns == 8 * MS
    assert found.queue_ns == 0
    assert {rows: batch.count for rows, batch in found.batches.items()} == {1: before + 1, 3: 1, 2: 1}
    assert sum(found.request_times) == sum(found.queue_times) == before + 2
    assert found.request_times[(3 * MS).bit_length()] == found.request_times[(5 * MS).bit_length()] == 1
    assert sum(found.batch_times) == before + 3
    assert sum(found.reasons.values()) == found.reasons[Reason.IDLE] == before + 3
    assert found.last_inference_ns == world.now
    assert sum(found.first.counts) == before + 2  # type: ignore[union-attr]
    world.turn([(world.holder().peer, LeaseLogged(world.lease().number))])
    assert (found.success_count, found.fail_count) == (before + 2, 1), "counted twice"


def test_inputs_may_be_in_memory_of_the_client() -> None:
    """In any segment without a name, until the client withdraws it or leaves."""
    world = Lent(instances=2)
    used, unused = world.segment(), world.segment()
    named, foreign = world.segment(name="/named"), world.segment(world.connect("b"))
    world.alone(data=(used,))
    holder = world.holder()
    assert {used.segment, unused.segment} <= holder.mapped
    assert not {named.segment, foreign.segment} & holder.mapped
    for handle in (used, unused):
        message = world.leased(data=(handle,))
        world.serve()
        assert isinstance(world.client.answers[message.request], Reply)
    world.turn([(world.client.peer, Unmap(unused.segment))])
    world.client.withdrawn.add(unused.segment)
    assert used.segment in holder.mapped
    assert unused.segment not in holder.mapped
    assert unused.segment not in world.core.state.ledger.segments
    world.leased(data=(used,))
    world.holder().lease.begin(world.now)  # type: ignore[union-attr]
    world.gone(world.client)
    assert used.segment not in world.core.state.ledger.segments
    world.serve()
    assert used.segment not in holder.mapped
    world.client.leases.clear()
    assert world.is_over()


def test_a_report_in_the_middle_of_a_turn_counts_too() -> None:
    world = Lent()
    world.alone()
    lease = world.lease()
    world.leased()
    world.serve()
    world.core.count_leased(lease.read(False))
    assert world.statistics.success_count == ALONE + 2
    world.core.count_leased(events.LeaseRead(lease.number + 1, [(1, 1, 1, 1, 1, 1, 0)]))
    assert world.statistics.success_count == ALONE + 2


def test_a_model_without_a_batch_dimension() -> None:
    world = Lent(model(max_batch=0, batching=None))
    world.numbers = 100
    for _ in range(ALONE + 1):
        world.numbers += 1
        world.client.sends(world.numbers)
        tensor = one_input(1)
        tensor.shape = (1,)
        world.turn([(world.client.peer, Infer(world.numbers, "m", 1, (tensor,)))])
        world.finish_running()
    (start,) = world.started()
    assert (start.of_client.rows, start.of_worker.rows) == (0, 0)
    world.leased()
    world.serve()
    world.client.leave()
    world.settle()
    found = world.statistics
    assert found.inference_count == found.execution_count == found.reasons[Reason.SINGLE] == ALONE + 2


# ---------------------------------------------------------------------------------------------- who gets none


def wide(size: int) -> ModelPolicy:
    return ModelPolicy("m", 1, 8, X, (TensorSpec("y", "FP32", (size,)),), BATCHES)


@pytest.mark.parametrize(
    "policy",
    [
        plain(),  # any number of outputs
        model(sequence=SequencePolicy(True, 4, 10**9)),
        model(decoupled=True),
        model(padding=PaddingPolicy((("x", (0,)),))),
        ModelPolicy("m", 1, 8, (TensorSpec("x", "FP32", (1,), optional=True),), Y, BATCHES),
        ModelPolicy("m", 1, 8, (TensorSpec("x", "FP32", (1,), ragged=True),), Y, BATCHES),
        ModelPolicy("m", 1, 8, (TensorSpec("x", "BYTES", (1,)),), Y, BATCHES),
        ModelPolicy("m", 1, 8, X, (TensorSpec("y", "BYTES", (1,)),), BATCHES),
        ModelPolicy("m", 1, 8, (), Y, BATCHES),
        ModelPolicy("m", 1, 8, X, (), BATCHES),
        wide(INLINE_BYTES // 4 + 1),
        ModelPolicy("m", 1, 8, X, Y, None, steps=(step("other"),)),
    ],
)
def test_models_that_need_the_core_are_not_lent(policy: ModelPolicy) -> None:
    assert lending_of(policy) is None


def test_rows_are_limited_by_the_outputs() -> None:
    found = lending_of(wide(INLINE_BYTES // 12))
    assert found is not None
    assert found.rows == 3
    outputs = tuple(TensorSpec(f"y{number}", "FP32", (512,)) for number in range(17))
    found = lending_of(ModelPolicy("m", 1, 8, X, outputs, BATCHES))
    assert found is not None
    assert found.rows == 1, "all of them together"
    assert lending_of(ModelPolicy("m", 1, 8, X, 2 * outputs, BATCHES)) is None


@pytest.mark.parametrize("policy", [model(batching=BatchPolicy(preserve_ordering=True)), model(cached=True)])
def test_neither_are_those_whose_answers_are_kept_or_in_order(policy: ModelPolicy) -> None:
    world = Lent(policy, cache_bytes=1 << 20)
    world.alone(2 * ALONE)
    assert world.version.lending is None
    assert not world.started()


def test_without_the_consent_of_the_client_there_is_none() -> None:
    world = Lent()
    for client in (world.connect("b"), world.connect("c", "zmq", leases=True)):
        world.alone(2 * ALONE, client)
    assert not world.started()


def test_with_the_rate_limiter_there_is_none() -> None:
    world = Lent(rate_limit=True, resources=(("cpu", 0, 1),))
    world.alone(2 * ALONE)
    assert not world.started()


@pytest.mark.parametrize(
    "what", ["outputs", "an output", "a named segment", "rows", "two at once", "two clients", "one that waits"]
)
def test_other_requests_are_not_counted(what: str) -> None:
    world = Lent(ModelPolicy("m", 1, 128, X, (TensorSpec("y", "FP32", (INLINE_BYTES // 64,)),), BATCHES))
    other = world.connect("b", leases=True)
    named = world.segment(name="/named")
    world.deploy(model("large"), large="y")
    world.alone(1, model="large")
    (output,) = world.client.holds
    for number in range(3 * ALONE):
        if what == "outputs" and number % ALONE == 0:
            world.alone(1, outputs=(Wanted("y"),))
        elif what == "an output" and number % ALONE == 0:
            world.alone(1, data=(output,))
        elif what == "a named segment":
            world.alone(1, data=(named,))
        elif what == "rows" and number % ALONE == 0:
            world.alone(1, rows=17)
        elif what == "two at once" and number % ALONE == 0:
            world.ask(world.client)
            world.ask(world.client)
            world.finish_all()
        elif what == "two clients" and number % ALONE == 0:
            world.alone(1, other)
        elif what == "one that waits":
            world.ask(world.client)
            world.ask(other)
            world.finish_all()
        else:
            world.alone(1)
    assert not world.started()


def test_a_client_gets_one_lease_of_a_model_however_it_asks() -> None:
    """A leased request runs; meanwhile others go through the broker, each alone there."""
    world = Lent(instances=3)
    world.alone()
    running = world.leased()
    holder = world.holder()
    holder.lease.begin(world.now)  # type: ignore[union-attr]
    for _ in range(2 * ALONE):
        message = world.ask(world.client)
        world.finish_running()
        assert isinstance(world.client.answers[message.request], Reply)
    assert len(world.started()) == 1
    world.crash(holder)
    assert running.request in world.client.open, "it is sent again"
    world.finish_running()
    assert isinstance(world.client.answers[running.request], Reply)


def test_a_client_gets_four_leases() -> None:
    world = Lent()
    for number in range(6):
        world.deploy(model(f"m{number}"))
        world.alone(model=f"m{number}")
    assert [start.of_client.model for start in world.started()] == ["m0", "m1", "m2", "m3"]


def test_if_its_sockets_cannot_be_made_it_is_over() -> None:
    world = Lent()
    world.out_of_descriptors = True
    world.alone()
    assert len(world.started()) == 1
    assert world.is_over()
    world.alone(3)
    assert world.statistics.success_count == ALONE + 4


def test_a_worker_that_cannot_be_lent_says_so_once() -> None:
    world = Lent()
    world.alone()
    worker, lease = world.holder(), world.lease()
    worker.lease = None
    lease.worker_open = False
    world.turn([(worker.peer, LeaseOver(lease.number, True))])
    assert world.is_over()
    world.alone(3 * ALONE)
    assert len(world.started()) == 1


# ---------------------------------------------------------------------------------------------- how one ends


def test_another_client_waits_for_one_leased_request_at_most() -> None:
    world = Lent()
    other = world.connect("b")
    world.alone()
    world.leased()
    holder = world.holder()
    assert holder.lease is not None
    holder.lease.begin(world.now)
    message = world.ask(other)
    assert holder.inbox == [Revoke(world.lease().number)]
    assert message.request in other.open
    world.serve()
    assert holder.running is not None
    assert holder.running.works[0].request
    world.finish_running()
    assert isinstance(other.answers[message.request], Reply)
    assert world.is_over()
    assert world.statistics.success_count == ALONE + 3


def test_a_request_that_has_arrived_is_answered_before_the_lease_ends() -> None:
    world = Lent()
    other = world.connect("b")
    world.alone()
    sent = world.leased()
    world.ask(other)
    assert isinstance(world.client.answers[sent.request], Reply)
    world.finish_running()
    assert world.is_over()


def test_a_request_that_comes_too_late_is_sent_to_the_broker() -> None:
    world = Lent()
    other = world.connect("b")
    world.alone()
    holder = world.holder()
    world.slow_from.add(holder.peer)
    world.ask(other)
    assert holder.lease is None
    sent = world.leased()
    assert sent.request in world.client.open
    world.slow_from.clear()
    world.settle()
    world.finish_all()
    assert isinstance(world.client.answers[sent.request], Reply)
    assert world.is_over()
    assert world.statistics.success_count == ALONE + 3


def test_work_behind_a_batch_of_another_instance_ends_leases() -> None:
    """The broker would rather send ahead to the busy instance than wait for the one that is lent."""
    world = Lent(instances=2)
    other = world.connect("b")
    world.alone()
    for _ in range(3):
        world.ask(other)
    assert world.is_over() is False
    assert all(worker.lease is None for worker in world.workers.values())
    assert not world.core.state.leases
    world.finish_all()
    assert world.is_over()


def test_a_revocation_may_cross_the_end() -> None:
    """The worker ends the lease while it is revoked, and reports it twice; its next lease is another one."""
    world = Lent()
    other = world.connect("b")
    world.alone()
    holder = world.holder()
    world.slow_to.add(holder.peer)
    world.slow_from.add(holder.peer)
    message = world.ask(other)
    assert [type(order) for order in holder.inbox] == [Revoke]
    holder._close_lease()
    world.turn(world.heard(holder))
    assert isinstance(holder.inbox[-1].batch, int)
    world.slow_to.clear()
    world.settle()
    assert [type(report) for report in holder.outbox] == [LeaseOver]
    world.slow_from.clear()
    world.settle()
    world.finish_running()
    assert isinstance(other.answers[message.request], Reply)
    assert world.is_over()
    world.lending.needed = ALONE
    world.alone()
    assert holder.lease is not None


def test_the_one_who_has_a_lease_and_sends_two_at_once_loses_it() -> None:
    world = Lent()
    world.alone()
    world.leased()
    world.holder().lease.begin(world.now)  # type: ignore[union-attr]
    world.ask(world.client)
    world.serve()
    world.finish_all()
    assert world.is_over()
    assert not world.client.open


def test_lending_pays_less_and_less_where_others_wait() -> None:
    world = Lent()
    other = world.connect("b")
    needed = ALONE
    for _ in range(4):
        assert world.lending.needed == needed
        world.alone(needed)
        assert not world.core.state.leases
        world.alone(1)
        assert world.core.state.leases
        world.ask(other)
        world.finish_all()
        assert world.is_over()
        needed *= 2
    world.lending.needed = ALONE_MOST
    world.lending.ended_by_others()
    assert world.lending.needed == ALONE_MOST
    world.lending.client, world.lending.alone = world.core.state.clients[world.client.peer], ALONE_MOST
    world.alone(1)
    for _ in range(ALONE_MOST):
        world.leased()
        world.serve()
    world.ask(other)
    world.finish_all()
    assert world.is_over()
    assert world.lending.needed == ALONE


def test_two_leases_that_end_together_count_once() -> None:
    world = Lent(instances=2)
    second = world.connect("b", leases=True)
    world.alone()
    world.alone(client=second)
    assert len(world.core.state.leases) == 2
    world.ask(world.connect("c"))
    world.finish_all()
    assert world.is_over()
    assert world.lending.needed == 2 * ALONE


def test_what_is_only_considered_costs_nothing() -> None:
    """Another request waits when the lease would begin."""
    world = Lent()
    world.alone(ALONE)
    world.ask(world.client)
    world.core.state.ready["m"].prefetch = False
    other = world.connect("b")
    world.ask(other)
    world.finish_all()
    assert not world.started()
    assert world.lending.needed == ALONE


def test_a_full_log_is_read_in_time_or_ends_the_lease() -> None:
    world = Lent()
    world.alone()
    for _ in range(3 * RECORDS):
        world.leased()
        world.serve()
    assert world.statistics.success_count > ALONE + 1 + RECORDS
    holder = world.holder()
    world.slow_from.add(holder.peer)
    for _ in range(2 * RECORDS):
        if holder.lease is None:
            break
        world.leased()
        world.serve()
    assert holder.lease is None
    sent = world.leased()
    world.slow_from.clear()
    world.settle()
    world.finish_all()
    assert isinstance(world.client.answers[sent.request], Reply)
    assert world.is_over()
    assert world.statistics.success_count == len(world.client.answers)
    assert world.lending.needed == ALONE


@pytest.mark.parametrize("busy", [False, True])
def test_the_client_leaves(busy: bool) -> None:
    world = Lent()
    world.alone()
    holder = world.holder()
    if busy:
        world.leased()
        assert holder.lease is not None
        holder.lease.begin(world.now)
    lease = world.lease()
    world.gone(world.client)
    if busy:
        assert lease.number in world.core.state.leases
        world.serve()
    world.client.leases.clear()
    assert world.is_over()
    assert world.statistics.success_count == ALONE + 1 + busy


def test_the_client_leaves_in_the_turn_in_which_it_would_get_a_lease() -> None:
    world = Lent()
    world.alone(ALONE)
    world.ask(world.client)
    worker = world.worker("m_0")
    worker.finish(world.now)
    world.client.leave()
    world.turn([*world.heard(worker), (0, events.Closed(world.client.peer))])
    world.client.leases.clear()
    assert world.is_over()


OPERATIONS: dict[str, Any] = {
    "unload": events.Unload("m"),
    "unload by force": events.Unload("m", 0, True),
    "restart": events.Restart("m", 0, ""),
    "restart of the instance": events.Restart("m", 0, "m_0"),
    "drain": events.Drain(10**9),
}


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("what", OPERATIONS)
def test_operations_end_leases(what: str, busy: bool) -> None:
    world = Lent()
    world.alone()
    holder, statistics = world.holder(), world.statistics
    sent = world.leased() if busy else None
    if busy:
        assert holder.lease is not None
        holder.lease.begin(world.now)
    world.turn([(0, OPERATIONS[what])])
    if busy and not holder.dead:
        assert world.core.state.leases
        assert not world.drained
        world.serve()
    world.finish_all()
    state = world.core.state
    assert not (state.leases)
    assert not (world.leases)
    assert not (world.client.leases)
    assert holder.dead
    assert world.drained == (what == "drain")
    if sent is not None:
        answer = world.client.answers[sent.request]
        assert isinstance(answer, Fail) == (what == "unload by force")
        if isinstance(answer, Fail):
            assert "unloaded by force" in answer.text
    assert statistics.success_count + statistics.fail_count == ALONE + 1 + busy
    world.core.check()


@pytest.mark.parametrize("what", ["restart", "restart of the instance"])
def test_a_leased_request_has_as_long_as_others_to_finish(what: str) -> None:
    world = Lent(exit_ns=50 * MS)
    world.alone()
    sent = world.leased()
    holder = world.holder()
    assert holder.lease is not None
    holder.lease.begin(world.now)
    world.turn([(0, OPERATIONS[what])])
    world.advance(world.now + 50 * MS - 1)
    assert sent.request in world.client.open
    world.advance(world.now + 1)
    answer = world.client.answers[sent.request]
    assert isinstance(answer, Fail)
    assert "instance 'm_0' was restarted while it ran this request" in answer.text
    assert "did not finish within 0.05 s (--exit-timeout-secs)" in answer.text
    assert world.is_over()


def test_a_leased_request_has_as_long_as_others_when_the_server_stops() -> None:
    world = Lent()
    world.alone()
    sent = world.leased()
    holder = world.holder()
    assert holder.lease is not None
    holder.lease.begin(world.now)
    world.turn([(0, events.Drain(100 * MS))])
    world.advance(world.now + 100 * MS)
    answer = world.client.answers[sent.request]
    assert isinstance(answer, Fail)
    assert answer.code == "UNAVAILABLE"
    assert "(--exit-timeout-secs)" in answer.text
    assert world.drained


def test_what_was_sent_to_a_worker_that_stops_is_sent_to_its_successor() -> None:
    world = Lent()
    world.alone()
    holder = world.holder()
    world.slow_from.add(holder.peer)
    world.turn([(0, OPERATIONS["restart"])])
    sent = world.leased()
    world.slow_from.clear()
    world.settle()
    world.finish_all()
    assert isinstance(world.client.answers[sent.request], Reply)
    assert world.is_over()
    assert world.statistics.success_count == ALONE + 2


def test_the_end_of_the_lease_is_told_before_the_server_stops() -> None:
    """The request arrives after the worker has closed the socket, and fails as any other then."""
    world = Lent()
    world.alone()
    holder = world.holder()
    world.slow_from.add(holder.peer)
    world.turn([(0, events.Drain(10**9))])
    sent = world.leased()
    world.effects.clear()
    world.slow_from.clear()
    world.settle()
    kinds = [type(effect) for effect in world.effects]
    assert kinds.index(ReadLease) < kinds.index(Drained)
    answer = world.client.answers[sent.request]
    assert isinstance(answer, Fail)
    assert answer.code == "UNAVAILABLE"


def test_a_lease_of_the_default_version_ends_when_another_becomes_it() -> None:
    world = Lent()
    world.alone()
    assert world.started()[0].of_client.default
    world.deploy(model(version=2))
    assert world.is_over()
    world.alone(ALONE, version=1)
    start = world.started()[-1]
    assert (start.of_client.version, start.of_client.default) == (1, False)


@pytest.mark.parametrize("what", ["tensors", "caller", "log"])
def test_leases_end_if_they_would_hide_what_is_traced(what: str) -> None:
    """The broker sees neither the tensors nor the batch of a leased request, nor for which one its worker calls."""
    world = Lent()
    world.alone()
    state = world.core.state
    if what == "log":
        state.tracing = True
    else:
        state.traces.samples["m"] = Sample(1, tensors=what == "tensors")
    if what == "caller":
        (instance,) = world.version.instances
        instance.caller = CallingWorker(instance.peer, INTERNAL, "worker")
    world.advance(world.now + 1)
    world.turn([])
    assert world.is_over()
    world.alone(2 * ALONE)
    assert len(world.started()) == 1


def test_leased_requests_are_sampled_with_the_others() -> None:
    """Every third request: those that came to the broker count, as do those that it sees in the log."""
    world = Lent()
    state = world.core.state
    state.traces.samples["m"] = Sample(3, 9)
    world.alone()
    world.effects.clear()
    began = world.now
    for number in range(6):
        world.leased()
        world.now += MS
        world.serve(MS, error=("INVALID_ARG", "no") if number == 4 else None)
    holder = world.holder()
    world.turn([(holder.peer, LeaseLogged(world.lease().number))])
    assert not world.is_over()
    traces = [effect for effect in world.effects if isinstance(effect, Traced)]
    seen = ALONE + 1  # before the lease
    places = [index for index in range(6) if (seen + index + 1) % 3 == 0]
    assert len(traces) == len(places) == 2
    for traced, place in zip(traces, places, strict=True):
        assert traced.arrived >= began
        assert traced.fields["client"] == world.client.peer
        assert (traced.fields["code"], traced.fields["instance"]) == ("INTERNAL" if place == 4 else "OK", "m_0")
        taken, ready, computed, placed = traced.times
        assert traced.arrived <= taken <= ready <= computed <= placed == traced.answered
    assert [traced.number for traced in traces] == [seen // 3 + 1, seen // 3 + 2]
    assert state.traces.samples["m"].left == 9 - (seen + 6) // 3


def test_leased_requests_are_recorded_each_as_a_batch() -> None:
    world = Lent()
    world.alone()
    world.core.state.recording = recording = Recording((), 100)
    world.leased()
    world.serve(MS)
    world.leased(rows=2)
    world.serve(2 * MS, error=("INTERNAL", "no"))
    world.turn([(world.holder().peer, LeaseLogged(world.lease().number))])
    assert not world.is_over()
    first, second, failed = recording.take(100)["records"]
    number = world.lease().number
    assert (first.lease, second.lease, first.instance, first.reason) == (number, number, "m_0", "idle")
    assert [request.client for batch in (first, second) for request in batch.requests] == [world.client.peer] * 2
    assert (second.rows, second.times[2] - second.times[1]) == (2, 2 * MS)
    assert (failed.code, failed.request) == ("INTERNAL", second.requests[0])
    assert first.number < second.number


# ---------------------------------------------------------------------------------------------- deaths


def dies(world: Lent, reason: str = "signal SIGSEGV", recorded: bool = False) -> Infer:
    """The worker dies in the middle of a leased request, or between its record and its answer."""
    sent = world.leased()
    holder = world.holder()
    if recorded:
        holder.run_leased(world.now, 2 * MS, answer=False)
    else:
        assert holder.lease is not None
        holder.lease.begin(world.now - 2 * MS)
    world.crash(holder, reason)
    return sent


def test_a_request_dies_with_its_worker() -> None:
    """There is no other instance to run it."""
    world = Lent()
    world.alone()
    sent = dies(world)
    answer = world.client.answers[sent.request]
    assert isinstance(answer, Fail)
    assert answer.code == "MODEL_FAILED"
    expected = "the worker process of instance 'm_0' ended while it ran this request alone (signal SIGSEGV)"
    assert expected in answer.text
    assert (world.statistics.success_count, world.statistics.fail_count) == (ALONE + 1, 1)
    assert world.statistics.fail_ns == 2 * MS
    assert world.statistics.failures[FailureKind.BACKEND] == 1
    assert world.is_over()
    assert world.version.instances[0].crashes == 1
    world.alone(1)


def test_another_instance_runs_it() -> None:
    world = Lent(instances=2)
    world.alone()
    holder = world.holder()
    sent = dies(world)
    assert sent.request in world.client.open
    other = next(worker for worker in world.workers.values() if worker.running is not None)
    assert other.name != holder.name
    world.finish_running()
    assert isinstance(world.client.answers[sent.request], Reply)
    assert (world.statistics.success_count, world.statistics.fail_count) == (ALONE + 2, 0)


def test_a_request_that_kills_workers_kills_two() -> None:
    """One while it is leased and one while it is retried by itself, which is the cause of both deaths."""
    world = Lent(instances=3)
    world.alone()
    first = world.holder()
    sent = dies(world)
    (second,) = (worker for worker in world.workers.values() if worker.running is not None)
    other = world.ask(world.connect("b"))
    assert second.running is not None
    assert len(second.running.works) == 1, "it is retried alone"
    world.crash(second)
    answer = world.client.answers[sent.request]
    assert isinstance(answer, Fail)
    assert f"so did that of instance '{first.name}' before" in answer.text
    world.finish_all()
    assert other.request not in world.client.open
    assert sum(instance.restarts for instance in world.version.instances) == 2
    assert [instance.crashes for instance in world.version.instances if instance.crashes] in ([], [1])


def test_requests_that_are_not_sent_again_are_forgotten() -> None:
    world = Lent(instances=2, leases=2)
    accused = []
    for number in range(4):
        client = world.connect(f"c{number}", leases=True)
        world.lending.needed = ALONE
        world.alone(client=client)
        lease, holder = world.lease(client), world.holder()
        sent = world.leased(client)
        lease.begin(world.now)
        accused.append((client, sent))
        client.leased.clear()
        client.open.discard(sent.request)
        world.crash(holder)
        world.advance(world.now + 10**9)
        assert not world.core.state.leases
    assert list(world.core.state.accused) == [(client.peer, sent.request) for client, sent in accused[-2:]]


def test_not_if_the_model_forbids_it() -> None:
    world = Lent(model(retry=False), 2)
    world.alone()
    sent = dies(world)
    assert isinstance(world.client.answers[sent.request], Fail)
    assert (world.statistics.success_count, world.statistics.fail_count) == (ALONE + 1, 1)


def test_one_that_is_recorded_is_counted_once() -> None:
    """And must not run again, as the client may have its answer."""
    world = Lent(model(retry=False), 2)
    world.alone()
    sent = dies(world, recorded=True)
    answer = world.client.answers[sent.request]
    assert isinstance(answer, Fail)
    assert answer.code == "MODEL_FAILED"
    assert (world.statistics.success_count, world.statistics.fail_count) == (ALONE + 2, 0)


def test_the_death_of_an_idle_worker_fails_nothing() -> None:
    world = Lent()
    world.alone()
    world.leased()
    world.serve()
    world.crash(world.holder())
    assert (world.statistics.success_count, world.statistics.fail_count) == (ALONE + 2, 0)
    assert world.is_over()
    assert world.version.instances[0].crashes == 1, "what it served before does not undo its death"


def test_one_that_had_not_begun_is_sent_again() -> None:
    world = Lent(model(retry=False))
    world.alone()
    sent = world.leased()
    world.crash(world.holder())
    world.advance(world.now)
    world.finish_running()
    assert isinstance(world.client.answers[sent.request], Reply)
    assert world.is_over()


def test_the_execution_limit_holds_for_leased_requests() -> None:
    world = Lent(instances=2, execution_ns=100 * MS)
    world.alone()
    holder = world.holder()
    for _ in range(5):  # for longer than the limit, none of which takes so long
        world.leased()
        world.advance(world.now + 60 * MS)
        world.serve(60 * MS)
    world.advance(world.now + 500 * MS)
    assert holder.lease is not None
    sent = world.leased()
    holder.lease.begin(world.now)
    alive = []
    for wait in (100 * MS - 1, 1):
        world.advance(world.now + wait)
        alive.append(not holder.dead)
    assert alive == [True, False]
    answer = world.client.answers[sent.request]
    assert isinstance(answer, Fail), "it would hang elsewhere, too"
    assert answer.code == "MODEL_FAILED"
    assert "it has run one batch for more than 0.1 s" in answer.text
    assert world.is_over()


def test_the_execution_limit_does_not_count_calls_of_leased_requests() -> None:
    world = Lent(execution_ns=100 * MS)
    world.deploy(model("n"), 1)
    world.alone()
    world.leased()
    holder = world.holder()
    assert holder.lease is not None
    holder.lease.begin(world.now)
    caller_of(holder).sends(1)
    holder.outbox.append(Call(1, 0, "n", 0, (one_input(),)))
    world.turn(world.heard(holder))
    world.advance(world.now + 90 * MS)
    world.finish_running(90 * MS)
    alive = []
    for wait in (100 * MS - 1, 100 * MS):
        world.advance(world.now + wait)
        alive.append(not holder.dead)
    assert alive == [True, False]


@pytest.mark.parametrize("read_before", [True, False])
def test_calls_of_leased_requests_do_not_count_as_busy(read_before: bool) -> None:
    """Nor does what the request did before them, which is not known any more."""
    world = Lent()
    world.deploy(model("n"), 1)
    world.alone()
    world.leased()
    lease, holder, (instance,) = world.lease(), world.holder(), world.version.instances
    lease.begin(world.now)
    if read_before:
        world.core.count_leased(lease.read(False))
        assert activity.running(instance) == 1
    caller_of(holder).sends(1)
    holder.outbox.append(Call(1, 0, "n", 0, (one_input(),)))
    world.turn(world.heard(holder))
    world.advance(world.now + 100 * activity.BUSY_NS)
    world.finish_running()
    resumed = world.now
    world.core.count_leased(lease.read(False))
    for ran in (activity.BUSY_NS, activity.BUSY_NS + 1):
        assert activity.busy_ns(world.version, instance, resumed + ran) == (ran if ran > activity.BUSY_NS else 0)
    assert activity.running(instance) == 1


def test_a_request_that_is_recorded_does_not_hang() -> None:
    world = Lent(execution_ns=100 * MS)
    world.alone()
    lease, holder = world.lease(), world.holder()
    world.leased()
    began = world.now
    world.now += 100 * MS
    holder.run_leased(world.now, 99 * MS, answer=False)
    record = lease.records.pop()
    world.turn([(0, LeaseRead(lease.number, [record], 1, record[0]))])
    world.advance(began + 300 * MS)
    assert not holder.dead


def test_while_it_runs_for_too_long_it_cannot_be_revoked() -> None:
    world = Lent(execution_ns=100 * MS)
    other = world.connect("b")
    world.alone()
    world.leased()
    assert world.holder().lease is not None
    world.holder().lease.begin(world.now)  # type: ignore[union-attr]
    message = world.ask(other)
    world.advance(world.now + 100 * MS)
    world.finish_running()
    assert isinstance(other.answers[message.request], Reply)
    assert world.is_over()


def test_reads_of_leases_that_are_over_change_nothing() -> None:
    world = Lent()
    world.alone()
    number = world.lease().number
    world.gone(world.client)
    world.client.leases.clear()
    before = world.statistics.success_count
    world.turn([(0, LeaseRead(number, [(1, 1, 1, 1, 1, 1, 0)], 1, 1, True))])
    world.turn([(world.worker("m_0").peer, LeaseOver(number)), (world.worker("m_0").peer, LeaseLogged(number))])
    assert world.statistics.success_count == before
    assert world.is_over()


def test_a_leased_request_may_call_models_while_the_server_stops() -> None:
    world = Lent()
    world.deploy(model("n"))
    world.alone()
    sent = world.leased()
    holder = world.holder()
    assert holder.lease is not None
    holder.lease.begin(world.now)
    world.turn([(0, events.Drain(10**9))])
    caller = caller_of(holder)
    caller.sends(1)
    holder.outbox.append(Call(1, 0, "n", 0, (one_input(),)))
    world.turn(world.heard(holder))
    world.finish_running()
    (answer,) = [message for message in holder.inbox if isinstance(message, (Reply, Fail))]
    assert isinstance(answer, Reply)
    holder.inbox.remove(answer)
    holder.take(answer)
    world.serve()
    world.finish_all()
    assert isinstance(world.client.answers[sent.request], Reply)
    assert world.drained
