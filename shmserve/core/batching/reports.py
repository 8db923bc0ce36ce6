"""Workers' reports on batches: started, done, withdrawn, and the results of requests."""

from __future__ import annotations

from shmserve.core.batching import dispatch, leases
from shmserve.core.exit import exit, responses
from shmserve.core.records import Batch, Instance, Version
from shmserve.core.state import State
from shmserve.core.states import BatchState, RequestState, move
from shmserve.core.termination import kill, kill_for_protocol_error, watch
from shmserve.protocol.worker_messages import Done, Rows, Started, Withdrawn

_SENT, _LINGERING = RequestState.SENT, RequestState.LINGERING


def started(state: State, version: Version, instance: Instance, message: Started, now: int) -> None:
    _run_waiting(state, version, instance, message.batch, message.through, now)


def rows(state: State, version: Version, instance: Instance, message: Rows, now: int) -> None:
    batch = instance.running
    if batch is None or not batch.known_as(message.batch):
        kill_for_protocol_error(state, version, instance, f"Rows of batch {message.batch}")
        return
    for row in message.rows:
        exit.respond_row(state, version, instance, batch, row, 0)


def done(state: State, version: Version, instance: Instance, message: Done, now: int) -> None:
    service = version.service
    batch = instance.running
    if batch is None or not batch.known_as(message.batch):
        kill_for_protocol_error(state, version, instance, f"Done of batch {message.batch}")
        return
    times = message.times
    taken = times[0]
    batch.times = times
    columns = message.columns
    if columns is not None and not columns.regular:
        kill_for_protocol_error(state, version, instance, f"irregular columns of batch {message.batch}")
        return
    state.observers.batch_done(version, instance, batch, message.batch)
    if columns is None:
        exit.respond_rows(state, version, instance, batch, message.rows, taken)
    else:
        exit.respond_columns(state, version, instance, batch, columns, taken)
    if state.tracing:
        count = len(message.rows if columns is None else columns.requests)
        state.log(
            "debug",
            f"{version.label} instance '{instance.spec.name}' ran batch {message.batch}: {batch.rows} rows in "
            f"{count} requests, formed because: {batch.reason.value}",
        )
    if message.again and service.sequence_slots is not None:
        _again(state, version, batch, message.again)
    if batch.remaining and service.decoupled:
        responses.batch_done(state, instance, batch, taken)
    if batch.remaining:
        for request in batch.requests():
            exit.fail(state, request, "INTERNAL", f"{version.label} sent no response to this request of its batch")
    state.observers.batch_over(version, batch, times)
    stalled = batch.waited_for_callers(now) if batch.unread else batch.stalled
    batch.end()
    instance.running = None
    if state.limiter is not None:
        dispatch.release_resources(state, instance)
    if instance.deaths or instance.quarantined:
        _recovered(state, version, instance)
    if version.trial is instance:
        version.trial = None
    version.served(times[3] - taken, now - batch.began, stalled)
    if message.next:
        _run_waiting(state, version, instance, message.next, message.through, now)
    elif instance.waiting is None and instance.usable:
        version.idle.append(instance)
        lending = service.lending
        if lending is not None and lending.alone >= lending.needed:
            leases.lend(state, version, lending, instance)
    if service.queue.count or version.suspects or version.reserved is not None or service.sequence_slots is not None:
        state.to_dispatch[version] = None


def _recovered(state: State, version: Version, instance: Instance) -> None:
    """Resets the crash counters of an instance whose batch succeeded."""
    instance.forgive()
    if instance.quarantined:
        instance.quarantined = False
        text = f"instance '{instance.spec.name}' of {version.label} completed a batch and leaves quarantine"
        state.log_version("info", text, version, instance)


def _again(state: State, version: Version, batch: Batch, numbers: tuple[int, ...]) -> None:
    """An iterative model runs these requests again. Requests whose callers have disconnected end here."""
    for number in numbers:
        request = state.requests.get(number)
        if request is not None and request.batch is batch:
            batch.leave(request)
            if request.state is _SENT:
                assert request.sequence is not None
                request.sequence.run_again(request)
            else:
                exit.released(state, request)
    state.to_dispatch[version] = None


def _run_waiting(state: State, version: Version, instance: Instance, number: int, through: int, now: int) -> None:
    service = version.service
    if instance.revoked:
        kill(state, version, instance, "it started requests that it had to return for a restart")
        return
    batch = instance.waiting
    if batch is None or instance.running is not None or not batch.known_as(number):
        kill_for_protocol_error(state, version, instance, f"start of batch {number}")
        return
    instance.waiting = batch.split(through)
    instance.running = batch
    if service.lending is not None:
        leases.count_waiting(state, version, service.lending, batch)
    batch.began = now
    move(batch, BatchState.RUNNING)
    if not instance.watched:
        watch(state, version, instance, now)
    state.to_dispatch[version] = None


def withdrawn(state: State, version: Version, instance: Instance, message: Withdrawn, now: int) -> None:
    """These requests never ran: they had been answered before, or were recalled."""
    for number in message.requests:
        if number in instance.revoked:
            instance.revoked.remove(number)
            continue
        request = state.requests.get(number)
        batch = instance.waiting
        known = request is not None and batch is not None and request.batch is batch
        if request is None or batch is None or not (known and (batch.recalled or request.state is _LINGERING)):
            kill_for_protocol_error(state, version, instance, f"Withdrawn request {number}")
            return
        dispatch.take_out(state, version, instance, batch, request)
    if instance.idle and instance.usable and instance not in version.idle:
        version.idle.append(instance)
    state.to_dispatch[version] = None
