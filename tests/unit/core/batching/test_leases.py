"""Leases as counted, traced and limited; tests/scenarios/lease*.txt tests how they begin and end."""

from __future__ import annotations

import pytest

from shmserve.core.effects import Traced
from shmserve.core.events import LeaseRead
from shmserve.core.ledger import INTERNAL
from shmserve.core.owners import activity
from shmserve.core.owners.recording import Recording
from shmserve.core.owners.trace import Sample
from shmserve.core.policy import ModelPolicy, PaddingPolicy, SequencePolicy, TensorSpec
from shmserve.core.records import CallingWorker
from shmserve.core.service.form import Reason
from shmserve.core.service.lending import ALONE, MAX_ALONE, terms_of
from shmserve.core.stats.latencies import FirstResponses
from shmserve.core.stats.statistics import FailureKind
from shmserve.protocol.messages import INLINE_BYTES, TensorForm
from shmserve.protocol.roles import ALL_ROLES, FORWARD
from shmserve.protocol.worker_messages import Call, LeaseLogged, LeaseOver
from tests.support.cases import cases
from tests.support.core.calling import caller_of
from tests.support.core.fakes.tensors import one_input
from tests.support.core.lent import BATCHES, MS, Lent, X, Y, model
from tests.support.core.policies import plain, step


def test_leased_requests_count_in_the_statistics() -> None:
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


def test_a_lease_is_for_one_caller_of_a_gateway_and_counts_for_it() -> None:
    world = Lent()
    gateway = world.connect("gateway", leases=True, roles=ALL_ROLES | FORWARD)
    for _ in range(ALONE):
        for payer in ("a", "b"):
            world.alone(1, gateway, payer=payer)
    assert not gateway.leases, "the log of a lease does not say who pays"
    world.alone(client=gateway, payer="a")
    assert [effect.of_client.payer for effect in world.started()] == ["a"]
    for _ in range(3):
        world.leased(gateway, payer="a")
        world.serve(2 * MS)
    world.turn([(world.holder().peer, LeaseLogged(world.lease(gateway).number))])
    callers = {one.label.split()[-1]: one for one in world.core.state.known_callers()}
    assert [(callers[name].finished, callers[name].in_flight) for name in ("a", "b")] == [
        (2 * ALONE + 4, 0),
        (ALONE, 0),
    ]
    assert callers["a"].finished_ns - callers["b"].finished_ns >= 6 * MS


def test_log_reads_in_the_middle_of_a_turn_are_counted() -> None:
    world = Lent()
    world.alone()
    lease = world.lease()
    world.leased()
    world.serve()
    world.core.count_leased(lease.read(False))
    assert world.statistics.success_count == ALONE + 2


def wide(size: int) -> ModelPolicy:
    return ModelPolicy("m", 1, 8, X, (TensorSpec("y", "FP32", (size,)),), BATCHES)


@cases(
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
)
def test_models_that_need_the_core_are_not_leased(policy: ModelPolicy) -> None:
    assert terms_of(policy, True) is None


def test_the_rows_of_leased_requests_are_limited_by_the_output_size() -> None:
    assert terms_of(wide(INLINE_BYTES // 12), False) == ((TensorForm("x", "FP32", (1,)),), 3, 0)
    outputs = tuple(TensorSpec(f"y{number}", "FP32", (512,)) for number in range(17))
    assert terms_of(ModelPolicy("m", 1, 8, X, outputs, BATCHES), True) == ((TensorForm("x", "FP32", (1,)),), 1, 1), (
        "all of them together"
    )
    assert terms_of(ModelPolicy("m", 1, 8, X, 2 * outputs, BATCHES), True) is None


@pytest.mark.parametrize("what", ["tensors", "caller", "log"])
def test_leases_end_if_they_would_hide_requests_from_tracing(what: str) -> None:
    """The broker sees neither the tensors nor the batch of a leased request, nor for which one its worker calls."""
    world = Lent()
    world.alone()
    state = world.core.state
    if what == "log":
        state.tracing = True
    else:
        state.observers.traces.change_sampling({"m": Sample(1, tensors=what == "tensors")})
    if what == "caller":
        (instance,) = world.version.instances
        instance.caller = CallingWorker(instance.peer, INTERNAL, "worker", state.ledger)
    world.advance(world.now + 1)
    world.turn([])
    assert world.is_over()
    world.alone(2 * ALONE)
    assert len(world.started()) == 1


def test_leased_requests_are_included_in_trace_sampling() -> None:
    """Every third request: those that came to the broker count, as do those that it sees in the log."""
    world = Lent()
    state = world.core.state
    state.observers.traces.change_sampling({"m": (sample := Sample(3, 9))})
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
    traces = world.of(Traced)
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
    assert sample.remaining == 9 - (seen + 6) // 3


def test_each_leased_request_is_recorded_as_a_batch() -> None:
    world = Lent()
    world.alone()
    world.core.state.observers.recording = recording = Recording((), 100)
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


def test_crashes_of_requests_that_are_not_resent_are_forgotten() -> None:
    world = Lent(instances=2, leases=2)
    lease_suspects = []
    for number in range(4):
        client = world.connect(f"c{number}", leases=True)
        world.lending.needed = ALONE
        world.alone(client=client)
        lease, holder = world.lease(client), world.holder()
        sent = world.leased(client)
        lease.begin(world.now)
        lease_suspects.append((client, sent))
        client.leased.clear()
        client.open.discard(sent.request)
        world.crash(holder)
        world.advance(world.now + 10**9)
        assert not world.core.state.leases
    assert list(world.core.state.lease_suspects) == [
        (client.peer, sent.request) for client, sent in lease_suspects[-2:]
    ]


@pytest.mark.parametrize("read_before", [True, False])
def test_calls_of_leased_requests_do_not_count_as_busy(read_before: bool) -> None:
    """Nor does the time of the request before them, which is not known any more."""
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


def test_a_recorded_request_does_not_exceed_the_execution_limit() -> None:
    world = Lent(execution_ns=100 * MS)
    world.alone()
    lease, holder = world.lease(), world.holder()
    world.leased()
    began = world.now
    world.now += 100 * MS
    holder.run_leased(world.now, 99 * MS, answer=False)
    record = lease.records.pop()
    world.turn([(0, LeaseRead(lease.number, [record], 1, 1, record[0]))])
    world.advance(began + 300 * MS)
    assert not holder.dead


def test_log_reads_of_ended_leases_are_ignored() -> None:
    world = Lent()
    world.alone()
    number = world.lease().number
    world.gone(world.client)
    world.client.leases.clear()
    before = world.statistics.success_count
    world.turn([(0, LeaseRead(number, [(1, 1, 1, 1, 1, 1, 0, 1)], 1, 1, 1, True))])
    world.turn([(world.worker("m_0").peer, LeaseOver(number)), (world.worker("m_0").peer, LeaseLogged(number))])
    assert world.statistics.success_count == before
    assert world.is_over()


def test_a_long_lease_resets_the_threshold_that_others_have_raised() -> None:
    world = Lent()
    world.alone()
    world.lending.needed = MAX_ALONE
    world.lending.ended_by_others()
    assert world.lending.needed == MAX_ALONE
    for _ in range(MAX_ALONE):
        world.leased()
        world.serve()
    world.ask(world.connect("b"))
    world.finish_all()
    assert world.lending.needed == ALONE
