"""Workers that die or hang during a leased request."""

from __future__ import annotations

import pytest

from shmserve.core import events
from shmserve.core.batching.lending import ALONE
from shmserve.core.events import LeaseRead
from shmserve.core.stats import activity
from shmserve.core.stats.statistics import FailureKind
from shmserve.protocol.messages import Fail, Infer, Reply
from shmserve.protocol.worker_messages import Call, LeaseLogged, LeaseOver
from tests.support.core.calling import caller_of
from tests.support.core.fakes.tensors import one_input
from tests.support.core.lent import MS, Lent, model


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


def test_a_leased_request_is_not_retried_if_the_model_disables_retries() -> None:
    world = Lent(model(retry=False))
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


def test_a_leased_request_is_retried_by_the_next_process() -> None:
    world = Lent()
    world.alone()
    sent = dies(world)
    world.advance(world.now)
    world.finish_running()
    assert isinstance(world.client.answers[sent.request], Reply)
    assert (world.statistics.success_count, world.statistics.fail_count) == (ALONE + 2, 0)


def test_a_leased_request_is_retried_on_another_instance() -> None:
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


def test_a_request_that_crashes_workers_crashes_at_most_two() -> None:
    """One while the request is leased and one while it is retried alone; the request causes both deaths."""
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


def test_crashes_of_requests_that_are_not_resent_are_forgotten() -> None:
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


def test_a_recorded_request_is_counted_once_if_its_worker_crashes() -> None:
    """It must not run again, because the client may have its answer."""
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


def test_a_leased_request_that_had_not_started_is_resent() -> None:
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
    for _ in range(5):  # longer than the limit in total, although none takes that long
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
    world.turn([(0, LeaseRead(lease.number, [record], 1, record[0]))])
    world.advance(began + 300 * MS)
    assert not holder.dead


def test_a_lease_cannot_be_revoked_while_its_request_exceeds_the_execution_limit() -> None:
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


def test_log_reads_of_ended_leases_are_ignored() -> None:
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
