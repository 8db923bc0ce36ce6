"""Leases: an idle instance is lent to a client that sends one request at a time, or all requests of the version. Its
requests then bypass the broker.

    (offered) -> lent -> (revoked) -> ended by the worker -> log read, client notified

The core lends an instance after `Lending.needed` consecutive batches of one client, and revokes the lease as soon as
it needs the instance. A client with several requests in flight is offered the lease: it holds further requests, and the
lease begins when all others have been answered. Client, worker and core can end a lease; it is over when the worker has
reported LeaseOver or died. Then its log is read for the last time, and only after that is the client notified
(LeaseEnd), with the error of the requests that died with the worker.
"""

from __future__ import annotations

from shmserve.core.effects import ReadLease, StartLease
from shmserve.core.events import LeaseRead
from shmserve.core.records import Batch, ClientState, Instance, Lease, Lending, Request, Version
from shmserve.core.service.form import Reason
from shmserve.core.service.lending import SHORT_NS
from shmserve.core.state import State
from shmserve.core.states import InstanceState, VersionState
from shmserve.core.stats.callers import Caller
from shmserve.core.stats.statistics import FailureKind
from shmserve.core.termination import kill_hung, watch
from shmserve.histogram import quantile
from shmserve.protocol import messages
from shmserve.protocol.messages import Failure, LeaseEnd
from shmserve.protocol.worker_messages import LeaseLogged, LeaseOver, Lend, Revoke

CLIENT_LEASES = 4
"""Limit of leases per client."""
DRAINING = 16
"""Number of batches within which all requests of a client that was offered a lease must have run."""


def count(state: State, version: Version, lending: Lending, requests: list[Request]) -> None:
    """Counts a client's consecutive batches. Called with each batch that is sent to an idle instance."""
    request = requests[0]
    client, payer = request.client, request.payer
    if lending.offered:
        if lending.count_draining() > DRAINING:
            withdraw(state, state.offers[lending.offered])
        return
    alone = len(requests) == 1 and len(client.requests) == 1 and not version.service.queue.count
    if not client.leases or not (_plain(state, lending, request) if alone else _agree(state, lending, requests)):
        if lending.client is not None:
            lending.start_again()
        return
    lending.count(client, payer, alone)
    if not alone and lending.together >= lending.needed:
        _offer(state, version, lending)


def count_waiting(state: State, version: Version, lending: Lending, batch: Batch) -> None:
    """Like `count`, for each batch that has waited at its instance: its requests arrived while others ran."""
    if lending.batch > 1:
        count(state, version, lending, batch.requests())
    else:
        lending.start_again()


def _agree(state: State, lending: Lending, requests: list[Request]) -> bool:
    """True if the requests of a batch could have been sent over a lease with several requests in flight."""
    client, payer = requests[0].client, requests[0].payer
    if not _may_be_shared(requests[0].version, client, lending):
        return False
    for request in requests:
        if request.client is not client or request.payer is not payer or not _plain(state, lending, request):
            return False
    return True


def _may_be_shared(version: Version, client: ClientState, lending: Lending) -> bool:
    """True if a lease may have several requests in flight. The core, which does not see them, neither lets them run
    beside each other nor starts instances for them."""
    return client.offers and lending.batch > 1 and len(version.instances) == 1 and version.scaler is None


def _is_short(version: Version) -> bool:
    return quantile(version.statistics.batch_times, 0.5) <= SHORT_NS


def _plain(state: State, lending: Lending, request: Request) -> bool:
    """True if the request could be sent over a lease."""
    special = request.outputs is not None or request.options is not None or request.suspect
    if special or request.rows > lending.rows:
        return False
    segments = request.segments
    return not segments or all(_is_lendable(state, request.client, number) for number in segments)


def _is_lendable(state: State, client: ClientState, segment: int) -> bool:
    """True if leased requests of the client may refer to this segment. Requests with named segments go through the
    broker, because a worker may fail to open them."""
    return segment in client.segments and state.ledger.segments[segment].announcement.name is None


def _offer(state: State, version: Version, lending: Lending) -> None:
    """Offers the client a lease of the only instance, if nothing forbids it."""
    lease = None
    if _is_short(version):
        lease = _possible(state, version, lending, version.instances[0])
    lending.offer(lease.number if lease is not None else 0)
    if lease is not None:
        state.offers[lease.number] = lease
        state.send(lease.client.number, _message(lease, lending, True))


def withdraw(state: State, lease: Lease) -> None:
    """Ends an offer: the client sends its requests to the broker again."""
    del state.offers[lease.number]
    lending = lease.version.service.lending
    if lending is not None and lending.offered == lease.number:
        lending.offer(0)
        lending.ended_by_others()
    if not lease.client.gone:
        state.send(lease.client.number, LeaseEnd(lease.number))


def settle_offers(state: State) -> None:
    """At the end of each turn: ends offers, or begins their leases when no requests of their versions are left."""
    for lease in list(state.offers.values()):
        version, lending = lease.version, lease.version.service.lending
        if lending is None or lending.offered != lease.number or _forbidden(state, lease):
            withdraw(state, lease)
        elif lease.instance in version.idle and not _is_needed(version):
            del state.offers[lease.number]
            lending.offer(0)
            _begin(state, lease, lending)


def lend(state: State, version: Version, lending: Lending, instance: Instance) -> None:
    """Lends an instance that has become idle to a client that sends one request at a time, if nothing forbids it."""
    client = lending.take_turn()
    if client is None or client.requests or client.steps or _is_needed(version):
        return
    lease = _possible(state, version, lending, instance)
    if lease is not None:
        _begin(state, lease, lending)


def _begin(state: State, lease: Lease, lending: Lending) -> None:
    """Lends an idle instance. Its execution limit timer, which usually still runs, is for leased requests as well."""
    client, version, instance = lease.client, lease.version, lease.instance
    state.leases[lease.number] = lease
    instance.lease = lease.number
    version.idle.remove(instance)
    watch(state, version, instance, state.now)
    # The ledger need not track leased requests: the client keeps their inputs until it has the response or LeaseEnd,
    # and the memory that a worker reads stays mapped even if the client or its segment is gone.
    for number in sorted(client.segments):
        if _is_lendable(state, client, number):
            state.ledger.show(number, instance.peer)
    state.effects.append(
        StartLease(
            client.number,
            instance.peer,
            _message(lease, lending, False),
            Lend(
                lease.number,
                version.model,
                version.number,
                lease.default,
                lending.inputs,
                lending.rows,
                client.number,
                state.limits.client_input_bytes,
                lease.batch,
            ),
        )
    )


def _possible(state: State, version: Version, lending: Lending, instance: Instance) -> Lease | None:
    client, payer = lending.client, lending.payer
    if client is None or payer is None or state.limiter is not None or version.suspects or instance.quarantined:
        return None
    if len(state.leases) + len(state.offers) >= state.limits.leases:
        return None
    leases = (*state.leases.values(), *state.offers.values())
    own = [lease.version.model for lease in leases if lease.client is client]
    if len(own) >= CLIENT_LEASES or version.model in own:  # a client identifies its leases by model
        return None
    if version.model in state.splits or version.model in state.shadows:  # the next request may be for another version
        return None
    default = state.ready.get(version.model) is version
    batch = lending.batch if _may_be_shared(version, client, lending) and _is_short(version) else 0
    lease = Lease(state.next_number(), client, payer, version, instance, default, batch)
    return None if _forbidden(state, lease) else lease


def _message(lease: Lease, lending: Lending, offer: bool) -> messages.Lease:
    version, payer = lease.version, lease.payer
    name = payer.name if type(payer) is Caller else ""
    return messages.Lease(
        lease.number, version.model, version.number, lending.rows, lease.default, name, lease.batch, offer
    )


def revoke_unfit(state: State) -> None:
    """At the end of each turn: revokes leases whose instance is needed or has to stop, or whose client is gone."""
    ended_by_others: set[Lending] = set()
    for lease in state.leases.values():
        version, instance = lease.version, lease.instance
        if lease.revoked or instance.lease != lease.number:
            continue
        if not _is_needed(version) and not _forbidden(state, lease):
            continue
        lease.revoked = True
        if version.service.lending is not None and _is_needed(version):
            ended_by_others.add(version.service.lending)
        if instance.state is not InstanceState.KILLED:
            state.send(instance.peer, Revoke(lease.number))
    for lending in ended_by_others:
        lending.ended_by_others()


def _forbidden(state: State, lease: Lease) -> bool:
    version, instance = lease.version, lease.instance
    return (
        lease.client.gone
        or lease.client.disconnecting
        or lease.slow
        or not instance.usable
        or instance.retiring
        or version.state is not VersionState.READY
        or version in state.changes.to_sleep
        or version.yielding
        or state.models[version.model].operation is not None  # its outcome applies to all requests after it
        or state.draining
        or state.out_of_service
        or state.tracing
        or (state.observers.watching and _hides_traces(state, instance))
        or (lease.default and _goes_elsewhere(state, version))
    )


def _goes_elsewhere(state: State, version: Version) -> bool:
    """True if requests that name no version go to other versions, or also to other versions."""
    model = version.model
    return state.ready.get(model) is not version or model in state.splits or model in state.shadows


def _hides_traces(state: State, instance: Instance) -> bool:
    """True if a lease would hide requests from traces: the broker sees neither the tensors of a leased request nor its
    number, by which the model's calls refer to it."""
    return instance.caller is not None or state.observers.traces.with_tensors


def _is_needed(version: Version) -> bool:
    """True if other requests wait for an instance of the model, in its queue or behind a running batch."""
    return version.waits > 0 or any(instance.waiting is not None for instance in version.instances)


def on_over(state: State, version: Version, instance: Instance, message: LeaseOver, now: int) -> None:
    """The worker has ended a lease. If it did so by itself while a Revoke was in transit, it reports the end twice."""
    if message.lease != instance.lease:
        return
    if message.unfit:
        version.service.stop_lending()
    detach(state, instance)
    if instance.idle and instance.usable:
        version.idle.append(instance)
    state.to_dispatch[version] = None


def detach(state: State, instance: Instance, error: Failure | None = None) -> None:
    """The worker has ended the lease, or is dead. `error`: for the request that it was running, if that must not be
    retried."""
    lease = state.leases[instance.lease]
    lease.error = lease.error or error
    instance.lease = instance.leased_since = 0
    state.effects.append(ReadLease(lease.number, True))


def fail(state: State, instance: Instance, code: str, text: str) -> None:
    """The worker is about to be killed: the leased request that it is running fails, and the client does not retry
    it."""
    if instance.lease:
        state.leases[instance.lease].error = Failure(code, text)


def on_half_full(state: State, version: Version, instance: Instance, message: LeaseLogged, now: int) -> None:
    if message.lease == instance.lease:
        ask_for_log(state, instance)


def ask_for_log(state: State, instance: Instance) -> None:
    state.effects.append(ReadLease(instance.lease))


def on_log_read(state: State, peer: int, event: LeaseRead, now: int) -> None:
    """The log of a lease was read: counts its requests, checks whether one hangs, and finishes a lease that is over."""
    lease = state.leases.get(event.lease)
    if lease is None:
        return
    count_logged(state, event)
    version, instance = lease.version, lease.instance
    if event.final:
        _remove(state, lease, event, now)
    elif instance.lease == lease.number and version.limit_ns and not instance.watched:
        runs = event.running and event.since != lease.recorded
        _check_hang(state, version, instance, max(event.since, lease.resumed) if runs else now, now)


def _check_hang(state: State, version: Version, instance: Instance, since: int, now: int) -> None:
    """`since`: when the worker began or last resumed the request that it is running; now if it runs none."""
    if instance.waits:  # for other models, which does not count
        since = now
    if since + version.limit_ns > now:
        watch(state, version, instance, since)
    elif instance.state is not InstanceState.KILLED:
        kill_hung(state, version, instance)


def _remove(state: State, lease: Lease, event: LeaseRead, now: int) -> None:
    del state.leases[lease.number]
    lending = lease.version.service.lending
    if lending is not None:
        lending.ended(lease.served)
    error = lease.error if event.running else None
    if error is not None and event.since != lease.recorded:
        state.observers.failed(lease.version, min(event.since, now), error.code, error.text, FailureKind.BACKEND)
    if lease.client.gone:
        return
    if event.running and lease.error is None and not lease.instance.held:
        # The worker died while running these requests, which the client may send again: a worker that ends a lease by
        # itself runs nothing.
        state.lease_suspects[lease.client.number, event.running] = (event.last, lease.instance)
        if len(state.lease_suspects) > state.limits.leases:  # by now, clients no longer resend the older ones
            del state.lease_suspects[next(iter(state.lease_suspects))]
    state.send(lease.client.number, LeaseEnd(lease.number, error))


def queue_lease_suspect(state: State, version: Version, request: Request) -> bool:
    """Queues a request to run alone if it was running over a lease when the worker died. False: it was not."""
    client, number = request.client.number, request.client_number
    for key, (last, instance) in list(state.lease_suspects.items()):
        if key[0] == client and number >= last:
            del state.lease_suspects[key]  # a client sends them again in their order
        if key[0] == client and key[1] <= number <= last and instance in version.instances:
            break
    else:
        return False
    version.suspect(request, instance)
    return True


def count_logged(state: State, reading: LeaseRead) -> None:
    """Counts leased requests in the statistics of their version, those of each packet as a batch."""
    lease, batches = state.leases.get(reading.lease), reading.batches
    if lease is None:
        return
    if batches:
        served = sum(batch[-1] for batch in batches)
        lease.served += served
        lease.recorded = batches[-1][0]
        times = sorted([placed - start for _, start, _, _, placed, _, _, requests in batches if requests > 1])
        lease.slow = bool(times) and times[len(times) // 2] > SHORT_NS
        if state.memory.limited:
            lease.version.sleep_state.used_by(lease.payer.user, served)
        lease.payer.enter(served)
        lease.payer.leave(served, sum((placed - arrived) * n for arrived, _, _, _, placed, _, _, n in batches))
        reason = Reason.IDLE if lease.version.service.batch_rules is not None else Reason.SINGLE
        state.observers.leased(lease, batches, reason)
    if lease.instance.lease == lease.number:
        runs = reading.running and reading.since != lease.recorded
        lease.instance.leased_since = max(reading.since, lease.resumed) if runs else 0
