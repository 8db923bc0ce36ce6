"""Leases with several requests in flight, which begin with an offer."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.core.batching.leases import DRAINING
from shmserve.core.effects import Send
from shmserve.core.policy import BatchPolicy
from shmserve.core.service.lending import ALONE, SHORT_NS
from shmserve.core.stats.latencies import FirstResponses
from shmserve.protocol.messages import Cancel, LeaseEnd
from shmserve.protocol.worker_messages import LeaseLogged
from tests.support.cases import cases
from tests.support.core.fakes.client import FakeClient
from tests.support.core.lent import MS, Lent, model
from tests.support.core.policies import scaling_of


class Busy(Lent):
    """`several` clients send more than one request at a time."""

    def __init__(self, batching: BatchPolicy | None = None, instances: int = 1, **limits: int) -> None:
        super().__init__(model(batching=batching or BatchPolicy()), instances, **limits)
        self.several = self.connect("b", leases=True, offers=True)

    def send(self, client: FakeClient | None = None, count: int = 2, **more: Any) -> None:
        """Sends requests in one turn."""
        client = client or self.several
        messages = [self.infer(client, **more) for _ in range(count)]
        for message in messages:
            client.sends(message.request)
        self.turn([(client.peer, message) for message in messages])

    def run(self, batches: int = ALONE + 1, client: FakeClient | None = None, took: int = 0, **more: Any) -> None:
        """The client has two requests in flight, and sends two others as soon as they have been answered."""
        for _ in range(batches):
            self.send(client, **more)
            self.finish_running(took)

    def offer(self) -> None:
        """The client gets an offer while its requests are in flight."""
        self.run(ALONE)
        self.send()
        assert list(self.several.offers) == list(self.core.state.offers)


def test_a_lease_is_offered_and_begins_when_all_requests_have_been_answered() -> None:
    """It is for several requests even if the median time of a batch has become long since the offer."""
    world = Busy()
    world.offer()
    (number,) = world.several.offers
    world.statistics.batch_times[(2 * SHORT_NS).bit_length()] += 100
    world.send(count=1)
    world.finish_running()
    assert (world.started(), list(world.several.offers)) == ([], [number]), "a request has arrived meanwhile"
    world.finish_running()
    (lease,) = world.several.leases.values()
    assert lease.number == number
    (message,) = world.several.lent
    assert (message.batch, message.rows, message.offer, world.core.state.offers) == (8, 8, False, {})
    world.ask(world.client)
    world.settle()
    assert world.several.leases == {}, "others need the instance"
    world.finish_running()
    assert world.is_over()


def test_a_lease_begins_when_the_last_requests_have_been_withdrawn() -> None:
    """They were cancelled when the worker had not read them yet."""
    world = Busy()
    world.offer()
    world.slow_to.add(world.worker("m_0").peer)
    message = world.ask(world.several)
    world.turn([(world.several.peer, Cancel(message.request))])
    world.finish_running()
    assert world.started() == []
    world.slow_to.clear()
    world.settle()
    assert len(world.started()) == 1


def test_a_client_that_is_alone_gets_a_lease_for_several_requests_at_once() -> None:
    world = Busy()
    world.alone(client=world.several)
    world.alone()
    assert [effect.of_client.batch for effect in world.started()] == [8]
    assert [effect.of_worker.batch for effect in world.started()] == [8]


@cases(
    (BatchPolicy(delay_ns=MS), 1, 0),
    (BatchPolicy(preferred=(4,)), 1, 0),
    (BatchPolicy(), 2, 0),
    (BatchPolicy(), 1, 2 * SHORT_NS),
)
def test_some_models_are_lent_only_to_one_request_at_a_time(batching: BatchPolicy, instances: int, took: int) -> None:
    """Their batches wait for more, could run beside each other, or take so long that the broker's work is nothing."""
    world = Busy(batching, instances)
    for _ in range(2 * ALONE):
        world.send()
        world.now += MS
        world.advance(world.now)
        world.finish_running(took)
    assert (world.started(), world.several.offers) == ([], {})


def test_a_lease_ends_when_its_batches_take_long() -> None:
    """Those of single requests do not count: the instance has nothing else to do."""
    world = Busy()
    world.offer()
    world.finish_running()
    (lease,) = world.several.leases.values()
    now, took = world.now, 2 * SHORT_NS
    lease.records.append((now, now, now, now + took, now + took, 1, 0, 1))
    world.now += took
    world.turn([(world.worker("m_0").peer, LeaseLogged(lease.number))])
    assert list(world.several.leases) == [lease.number]
    lease.records.append((now, now, now, now + took, now + took, 1, 0, 2))
    world.turn([(world.worker("m_0").peer, LeaseLogged(lease.number))])
    world.settle()
    assert world.several.leases == {}


def test_a_model_that_is_scaled_is_lent_only_to_one_request_at_a_time() -> None:
    """The core would not see how many requests wait."""
    world = Busy()
    world.scalings["m"] = scaling_of("m", "1-4")
    world.deploy(model(version=2), 1)
    world.run(2 * ALONE)
    assert (world.started(), world.several.offers) == ([], {})
    world.alone(client=world.several)
    assert [effect.of_client.batch for effect in world.started()] == [0]


def test_only_requests_of_one_caller_count() -> None:
    world = Busy()
    for _ in range(ALONE):
        world.run(1)
        world.run(1, world.connect(f"c{world.numbers}", leases=True, offers=True))
    world.run(ALONE, world.client)
    assert (world.started(), world.several.offers, world.client.offers) == ([], {}, {})


@pytest.mark.parametrize("leaves", [True, False])
def test_an_offer_ends_when_its_client_leaves_or_its_version_is_no_longer_the_default(leaves: bool) -> None:
    world = Busy()
    world.offer()
    if leaves:
        world.gone(world.several)
        world.several.offers.clear()
    else:
        world.deploy(model(version=2), 1)
    assert (world.several.offers, world.core.state.offers) == ({}, {})


def test_an_offer_ends_if_requests_still_arrive() -> None:
    """The client holds its requests, so those are of others."""
    world = Busy()
    world.offer()
    needed = world.lending.needed
    for _ in range(DRAINING + 1):
        world.send(world.client)
        world.finish("m_0")
    assert (world.several.offers, world.core.state.offers) == ({}, {})
    assert world.lending.needed == 2 * needed
    world.finish_running()
    assert world.started() == []


def test_the_number_of_leases_and_offers_is_limited() -> None:
    world = Busy(leases=1)
    world.deploy(model("n"), 1)
    world.offer()
    other = world.connect("c", leases=True, offers=True)
    world.run(2 * ALONE, other, model="n")
    assert (other.offers, len(world.started())) == ({}, 1)


def test_batches_in_the_log_count_in_the_statistics() -> None:
    """Three requests of two rows, of which one failed."""
    world = Busy(first_responses=True)
    world.offer()
    world.finish_running()
    found, (lease,) = world.statistics, world.several.leases.values()
    before = found.success_count, found.fail_count, found.inference_count, found.execution_count
    now, payer = world.now, world.core.state.clients[world.several.peer]
    lease.records.append((now, now + 1 * MS, now + 2 * MS, now + 4 * MS, now + 5 * MS, 2, 1, 3))
    world.now += 6 * MS
    world.turn([(world.worker("m_0").peer, LeaseLogged(lease.number))])
    after = found.success_count, found.fail_count, found.inference_count, found.execution_count
    assert [new - old for new, old in zip(after, before, strict=True)] == [2, 1, 4, 1]
    assert found.batches[6].count == 1
    assert (found.queue_ns, found.fail_ns) == (2 * MS, 5 * MS)
    assert isinstance(found.first, FirstResponses)
    assert sum(found.first.counts) == found.success_count
    assert payer.in_flight == 0


def test_all_requests_of_a_packet_are_suspects_if_their_worker_dies() -> None:
    """Each runs alone when the client sends it again."""
    world = Busy()
    world.offer()
    world.finish_running()
    (lease,) = world.several.leases.values()
    messages = [world.infer(world.several) for _ in range(3)]
    lease.running, lease.last, lease.since = messages[0], messages[-1].request, world.now
    world.crash(world.worker("m_0"))
    world.advance(world.now + 10**10)
    assert world.several.leases == {}
    for message in messages:
        world.several.sends(message.request)
    world.turn([(world.several.peer, message) for message in messages])
    assert world.core.state.lease_suspects == {}
    sizes = []
    while running := world.version.instances[0].running:
        sizes.append(running.rows)
        world.finish_running()
    assert sizes == [1, 1, 1]


def test_a_lease_that_cannot_be_made_ends_the_offer() -> None:
    world = Busy()
    world.offer()
    world.out_of_descriptors = True
    world.finish_running()
    world.settle()
    assert (world.several.offers, world.several.leases, world.core.state.leases) == ({}, {}, {})
    assert world.is_over()


def test_offers_are_never_left_at_a_client() -> None:
    """LeaseEnd follows each offer that does not become a lease."""
    world = Busy()
    for _ in range(3):
        world.run(2 * ALONE)
        world.run(2 * ALONE, world.client)
    ends = [effect for effect in world.of(Send) if isinstance(effect.message, LeaseEnd)]
    assert ends
    assert (world.several.offers, world.core.state.offers) == ({}, {})
