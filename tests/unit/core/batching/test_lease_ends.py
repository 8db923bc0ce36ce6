"""How leases end: nothing is lost or counted twice, and each instance is returned."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.core import events
from shmserve.core.batching.lending import ALONE, ALONE_MOST
from shmserve.core.effects import Drained, ReadLease, Traced
from shmserve.core.ledger import INTERNAL
from shmserve.core.requests.client import CallingWorker
from shmserve.core.requests.recording import Recording
from shmserve.core.requests.trace import Sample
from shmserve.protocol.messages import Fail, Reply
from shmserve.protocol.worker_messages import LeaseLogged, LeaseOver, Revoke
from tests.support.core.fakes.lease import RECORDS
from tests.support.core.lent import MS, Lent, model


def test_another_client_waits_for_at_most_one_leased_request() -> None:
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


def test_a_leased_request_that_has_arrived_is_answered_before_the_lease_ends() -> None:
    world = Lent()
    other = world.connect("b")
    world.alone()
    sent = world.leased()
    world.ask(other)
    assert isinstance(world.client.answers[sent.request], Reply)
    world.finish_running()
    assert world.is_over()


def test_a_request_sent_after_the_end_of_the_lease_goes_to_the_broker() -> None:
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


def test_requests_queued_behind_a_busy_instance_end_leases() -> None:
    """Otherwise the broker would send ahead to the busy instance instead of waiting for the lent one."""
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


def test_a_revocation_may_cross_the_end_reported_by_the_worker() -> None:
    """The worker ends the lease while it is being revoked, and reports the end twice; its next lease is unaffected."""
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


def test_a_client_that_sends_two_requests_at_once_loses_its_lease() -> None:
    world = Lent()
    world.alone()
    world.leased()
    world.holder().lease.begin(world.now)  # type: ignore[union-attr]
    world.ask(world.client)
    world.serve()
    world.finish_all()
    assert world.is_over()
    assert not world.client.open


def test_the_threshold_for_a_lease_doubles_when_other_clients_end_it() -> None:
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


def test_two_leases_that_end_together_double_the_threshold_once() -> None:
    world = Lent(instances=2)
    second = world.connect("b", leases=True)
    world.alone()
    world.alone(client=second)
    assert len(world.core.state.leases) == 2
    world.ask(world.connect("c"))
    world.finish_all()
    assert world.is_over()
    assert world.lending.needed == 2 * ALONE


def test_a_lease_that_never_began_does_not_raise_the_threshold() -> None:
    """Another request is waiting when the lease would begin."""
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
def test_a_disconnected_client_ends_its_lease(busy: bool) -> None:
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


def test_a_client_that_disconnects_before_its_lease_begins_gets_none() -> None:
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
def test_operations_give_a_leased_request_the_exit_timeout(what: str) -> None:
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


def test_shutdown_gives_a_leased_request_the_exit_timeout() -> None:
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


def test_a_leased_request_to_a_stopping_worker_is_resent_to_its_successor() -> None:
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


def test_shutdown_ends_leases_before_the_server_reports_drained() -> None:
    """The request arrives after the worker has closed the socket, and then fails like any other."""
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


def test_a_lease_of_the_default_version_ends_when_the_default_changes() -> None:
    world = Lent()
    world.alone()
    assert world.started()[0].of_client.default
    world.deploy(model(version=2))
    assert world.is_over()
    world.alone(ALONE, version=1)
    start = world.started()[-1]
    assert (start.of_client.version, start.of_client.default) == (1, False)


@pytest.mark.parametrize("what", ["tensors", "caller", "log"])
def test_leases_end_if_they_would_hide_requests_from_tracing(what: str) -> None:
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


def test_no_leases_are_granted_while_out_of_service() -> None:
    """They show that the server is not empty. Once it is back in service, leases begin as before."""
    world = Lent()
    world.alone()
    world.turn([(0, events.SetService(True))])
    world.advance(world.now + 1)
    world.turn([])
    assert world.is_over()
    world.alone(2 * ALONE)
    assert len(world.started()) == 1
    world.turn([(0, events.SetService(False))])
    world.alone(ALONE + 1)
    assert len(world.started()) == 2


def test_leased_requests_are_included_in_trace_sampling() -> None:
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


def test_each_leased_request_is_recorded_as_a_batch() -> None:
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
