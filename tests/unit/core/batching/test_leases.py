"""Which clients and models get leases, and that leased requests are counted like others."""

from __future__ import annotations

import pytest

from shmserve.core import events
from shmserve.core.batching.form import Reason
from shmserve.core.batching.lending import ALONE, lending_of
from shmserve.core.policy import BatchPolicy, ModelPolicy, PaddingPolicy, SequencePolicy, TensorSpec
from shmserve.core.stats.latencies import FirstResponses
from shmserve.core.stats.statistics import FailureKind
from shmserve.protocol.messages import INLINE_BYTES, Infer, Reply, TensorForm, Unmap, Wanted
from shmserve.protocol.worker_messages import LeaseLogged, LeaseOver, Lend
from tests.support.core.fakes.tensors import one_input
from tests.support.core.lent import BATCHES, MS, Lent, X, Y, model
from tests.support.core.policies import plain, step

# ---------------------------------------------------------------------------------------------- how one begins


def test_a_client_that_sends_one_request_at_a_time_gets_a_lease() -> None:
    world = Lent()
    world.alone(ALONE)
    assert not world.started()
    world.alone(1)
    (start,) = world.started()
    assert (start.of_client.model, start.of_client.version, start.of_client.rows) == ("m", 1, 8)
    assert start.of_client.default
    assert start.of_worker == Lend(start.of_client.lease, "m", 1, True, (TensorForm("x", "FP32", (1,)),), 8, 1, 2 << 30)
    assert not world.version.idle
    before = world.core.state.next_number()
    for _ in range(3):
        message = world.leased()
        world.serve()
        assert isinstance(world.client.answers[message.request], Reply)
    assert world.core.state.next_number() == before + 1, "the core has had work"


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


def test_leased_inputs_may_be_in_a_segment_of_the_client() -> None:
    """Inputs may be in any segment without a name, until the client withdraws it or disconnects."""
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


def test_log_reads_in_the_middle_of_a_turn_are_counted() -> None:
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
def test_models_that_need_the_core_are_not_leased(policy: ModelPolicy) -> None:
    assert lending_of(policy) is None


def test_the_rows_of_leased_requests_are_limited_by_the_output_size() -> None:
    found = lending_of(wide(INLINE_BYTES // 12))
    assert found is not None
    assert found.rows == 3
    outputs = tuple(TensorSpec(f"y{number}", "FP32", (512,)) for number in range(17))
    found = lending_of(ModelPolicy("m", 1, 8, X, outputs, BATCHES))
    assert found is not None
    assert found.rows == 1, "all of them together"
    assert lending_of(ModelPolicy("m", 1, 8, X, 2 * outputs, BATCHES)) is None


@pytest.mark.parametrize("policy", [model(batching=BatchPolicy(preserve_ordering=True)), model(cached=True)])
def test_cached_and_ordered_models_are_not_leased(policy: ModelPolicy) -> None:
    world = Lent(policy, cache_bytes=1 << 20)
    world.alone(2 * ALONE)
    assert world.version.lending is None
    assert not world.started()


def test_clients_that_do_not_support_leases_get_none() -> None:
    world = Lent()
    for client in (world.connect("b"), world.connect("c", "zmq", leases=True)):
        world.alone(2 * ALONE, client)
    assert not world.started()


def test_rate_limited_models_are_not_leased() -> None:
    world = Lent(rate_limit=True, resources=(("cpu", 0, 1),))
    world.alone(2 * ALONE)
    assert not world.started()


@pytest.mark.parametrize(
    "what", ["outputs", "an output", "a named segment", "rows", "two at once", "two clients", "one that waits"]
)
def test_requests_that_cannot_be_leased_do_not_count_towards_a_lease(what: str) -> None:
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


def test_a_client_gets_at_most_one_lease_per_model() -> None:
    """While a leased request runs, others go through the broker, each alone."""
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


def test_a_client_gets_at_most_four_leases() -> None:
    world = Lent()
    for number in range(6):
        world.deploy(model(f"m{number}"))
        world.alone(model=f"m{number}")
    assert [start.of_client.model for start in world.started()] == ["m0", "m1", "m2", "m3"]


def test_a_lease_ends_if_its_sockets_cannot_be_created() -> None:
    world = Lent()
    world.out_of_descriptors = True
    world.alone()
    assert len(world.started()) == 1
    assert world.is_over()
    world.alone(3)
    assert world.statistics.success_count == ALONE + 4


def test_a_worker_that_cannot_be_leased_is_asked_once() -> None:
    world = Lent()
    world.alone()
    worker, lease = world.holder(), world.lease()
    worker.lease = None
    lease.worker_open = False
    world.turn([(worker.peer, LeaseOver(lease.number, True))])
    assert world.is_over()
    world.alone(3 * ALONE)
    assert len(world.started()) == 1
