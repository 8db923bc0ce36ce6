"""Leases: an idle instance is lent to a client that sends one request at a time, which then bypasses the broker.

    lent -> (revoked) -> ended by the worker -> log read, client notified

The core lends an instance after `Lending.needed` consecutive requests that were alone, and revokes the lease as soon as
it needs the instance. Client, worker and core can end a lease; it is over when the worker has reported LeaseOver or
died. Then its log is read for the last time, and only after that is the client notified (LeaseEnd), with the error of a
request that died with the worker.
"""

from __future__ import annotations

from shmserve.core.effects import ReadLease, StartLease
from shmserve.core.events import LeaseRead
from shmserve.core.records import ClientState, Instance, Lease, Lending, Request, Version
from shmserve.core.service.form import Reason
from shmserve.core.state import State
from shmserve.core.states import InstanceState, VersionState
from shmserve.core.stats.callers import Caller
from shmserve.core.stats.statistics import FailureKind
from shmserve.core.termination import kill_hung, watch
from shmserve.protocol import messages
from shmserve.protocol.messages import Failure, LeaseEnd
from shmserve.protocol.worker_messages import LeaseLogged, LeaseOver, Lend, Revoke

CLIENT_LEASES = 4
"""Limit of leases per client."""


def count_alone(state: State, version: Version, lending: Lending, requests: list[Request]) -> None:
    """Counts a client's consecutive requests that were each alone. Called with each batch that is sent to an idle
    instance."""
    request = requests[0]
    client, segments = request.client, request.segments
    if (
        len(requests) > 1
        or len(client.requests) > 1
        or version.service.queue.count > 0
        or not client.leases
        or request.outputs is not None
        or request.options is not None
        or request.suspect is not None
        or request.rows > lending.rows
        or (segments and not all(_is_lendable(state, client, number) for number in segments))
    ):
        if lending.client is not None:
            lending.was_not_alone()
    else:
        lending.was_alone(client, request.payer)


def _is_lendable(state: State, client: ClientState, segment: int) -> bool:
    """True if leased requests of the client may refer to this segment. Requests with named segments go through the
    broker, because a worker may fail to open them."""
    return segment in client.segments and state.ledger.segments[segment].announcement.name is None


def lend(state: State, version: Version, lending: Lending, instance: Instance) -> None:
    """Lends an instance that has become idle to the client whose requests were alone, if nothing forbids it.

    The execution limit timer of its last batch still runs, so the lease needs none of its own.
    """
    client, payer = lending.take_turn()
    if client is None or payer is None or client.gone or client.disconnecting or client.requests or client.steps:
        return
    if state.limiter is not None or version.suspects or instance.quarantined:
        return
    if len(state.leases) >= state.limits.leases:
        return
    known = [lease.version.model for lease in state.leases.values() if lease.client is client]
    if len(known) >= CLIENT_LEASES or version.model in known:  # a client identifies its leases by model
        return
    if version.model in state.splits or version.model in state.shadows:  # the next request may be for another version
        return
    default = state.ready.get(version.model) is version
    lease = Lease(state.next_number(), client, payer, version, instance, default)
    if _unfit(state, lease):
        return
    state.leases[lease.number] = lease
    instance.lease = lease.number
    version.idle.remove(instance)
    # The ledger need not track leased requests: the client keeps their inputs until it has the response or LeaseEnd,
    # and the memory that a worker reads stays mapped even if the client or its segment is gone.
    for number in sorted(client.segments):
        if _is_lendable(state, client, number):
            state.ledger.show(number, instance.peer)
    state.effects.append(
        StartLease(
            client.number,
            instance.peer,
            messages.Lease(
                lease.number,
                version.model,
                version.number,
                lending.rows,
                default,
                payer.name if type(payer) is Caller else "",
            ),
            Lend(
                lease.number,
                version.model,
                version.number,
                default,
                lending.inputs,
                lending.rows,
                client.number,
                state.limits.client_input_bytes,
            ),
        )
    )


def revoke_unfit(state: State) -> None:
    """At the end of each turn: revokes leases whose instance is needed or has to stop, or whose client is gone."""
    ended_by_others: set[Lending] = set()
    for lease in state.leases.values():
        version, instance = lease.version, lease.instance
        if lease.revoked or instance.lease != lease.number or not _unfit(state, lease):
            continue
        lease.revoked = True
        if version.service.lending is not None and _is_needed(version):
            ended_by_others.add(version.service.lending)
        if instance.state is not InstanceState.KILLED:
            state.send(instance.peer, Revoke(lease.number))
    for lending in ended_by_others:
        lending.ended_by_others()


def _unfit(state: State, lease: Lease) -> bool:
    version, instance = lease.version, lease.instance
    return (
        _is_needed(version)
        or lease.client.gone
        or lease.client.disconnecting
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
    """Would a lease hide requests from traces? The broker sees neither the tensors of a leased request nor its number,
    by which the model's calls refer to it."""
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
        # The worker died while running this request, which the client may send again: a worker that ends a lease by
        # itself runs nothing.
        state.lease_suspects[lease.client.number, event.running] = lease.instance
        if len(state.lease_suspects) > state.limits.leases:  # by now, clients no longer resend the older ones
            del state.lease_suspects[next(iter(state.lease_suspects))]
    state.send(lease.client.number, LeaseEnd(lease.number, error))


def queue_lease_suspect(state: State, version: Version, request: Request) -> bool:
    """Queues a request to run alone if it was running over a lease when the worker died. False: it was not."""
    instance = state.lease_suspects.pop((request.client.number, request.client_number), None)
    if instance is None or instance not in version.instances:
        return False
    version.suspect(request, instance)
    return True


def count_logged(state: State, reading: LeaseRead) -> None:
    """Counts leased requests in the statistics of their version, each as a separate batch."""
    lease, requests = state.leases.get(reading.lease), reading.requests
    if lease is None:
        return
    if requests:
        lease.served += len(requests)
        lease.recorded = requests[-1][0]
    if lease.instance.lease == lease.number:
        runs = reading.running and reading.since != lease.recorded
        lease.instance.leased_since = max(reading.since, lease.resumed) if runs else 0
    reason = Reason.IDLE if lease.version.service.batch_rules is not None else Reason.SINGLE
    if requests:
        if state.memory.limited:
            lease.version.sleep_state.used_by(lease.payer.user, len(requests))
        lease.payer.enter(len(requests))
        lease.payer.leave(len(requests), sum(placed - arrived for arrived, _, _, _, placed, _, _ in requests))
        state.observers.leased(lease, requests, reason)
