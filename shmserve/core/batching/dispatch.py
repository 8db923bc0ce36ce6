"""Dispatch: sends batches to workers, extends them, and processes the workers' reports."""

from __future__ import annotations

from shmserve.core.batching import answers, recall
from shmserve.core.batching.form import BatchPlan, Reason
from shmserve.core.batching.planning import busy, place_for, plan_batch, plan_extension, planned, sends_ahead, take
from shmserve.core.batching.rate_limiter import Limiter
from shmserve.core.effects import Send
from shmserve.core.models.termination import kill, kill_for_protocol_error
from shmserve.core.records import Batch, Instance, Request, Version
from shmserve.core.requests import completion, responses
from shmserve.core.requests.client import ClientState
from shmserve.core.state import State, Timer
from shmserve.core.states import BatchState, InstanceState, RequestState, VersionState
from shmserve.protocol.messages import (
    CHUNK_BYTES,
    PACKET_MESSAGES,
    Columns,
    Done,
    Execute,
    Reply,
    ReplyBatch,
    Row,
    Rows,
    Started,
    Withdrawn,
    Work,
    rows_of,
    tensors_of,
)

_READY = VersionState.READY
_QUEUED, _SENT, _LINGERING, _DONE, _ENDED, _CHAINED, _OPEN = RequestState


# ------------------------------------------------------------------------------------ to workers


def refuse_stranded(state: State, version: Version, now: int) -> None:
    """Fails the requests queued for a version that no instance will run any more."""
    if version.state is not _READY and version.waits and not version.alive:
        what = f"'{version.model}' version {version.number} is not at ready state"
        empty_queue(state, version, f"Request for unknown model: {what}: {version.reason or version.trouble}", now)


def dispatch(state: State, version: Version, now: int) -> None:
    """Sends everything that may be sent now."""
    refuse_stranded(state, version, now)
    queue = version.queue
    version.wake = 0
    if state.blocked_instances:
        _call_back(state, version)
    if version.suspects or version.reserved is not None:
        _try_suspect(state, version, now)
    if state.limiter is not None:
        _dispatch_limited(state, version, state.limiter, now)
    while queue.count and state.limiter is None:
        if version.idle:
            if _start_batch(state, version, version.idle[-1], now):
                continue
        if not any(_send_ahead(state, version, instance, now) for instance in busy(version)):
            break
    if version.wake:
        state.wakes[version] = version.wake
    else:
        state.wakes.pop(version, None)


def _dispatch_limited(state: State, version: Version, limiter: Limiter, now: int) -> None:
    """Starts one batch; then the limiter chooses the next version. Nothing is sent ahead, because the worker would
    start it without the limiter."""
    if not version.queue.count:
        return
    for instance in sorted(version.idle, key=limiter.rank):
        if _start_batch(state, version, instance, now):
            state.to_dispatch[version] = None
            return


def _call_back(state: State, version: Version) -> None:
    """Recalls batches sent ahead to an instance that waits for other models: others can run them meanwhile."""
    for instance in version.instances:
        batch = instance.waiting
        if batch is not None and instance.waits:
            recall.recall(state, instance, batch)


def may_start(state: State, version: Version, instance: Instance) -> bool:
    """Acquires the resources of the instance, if the rate limiter is on. False: others hold them."""
    limiter = state.limiter
    return limiter is None or limiter.acquire(version, instance)


def stopped(state: State, instance: Instance) -> None:
    """The instance runs nothing any more: releases its resources to others."""
    if state.limiter is not None:
        for version in state.limiter.release(instance):
            state.to_dispatch[version] = None


def empty_queue(state: State, version: Version, text: str, now: int) -> None:
    """Fails all queued requests: no instance will run them."""
    waiting = [*version.queue.take(version.queue.count), *version.suspects]
    version.suspects.clear()
    for request in waiting:
        completion.end_early(state, request, "UNAVAILABLE", text, now)
    if version.places is not None:
        version.places.lose(None, text)
    state.to_dispatch[version] = None


def _try_suspect(state: State, version: Version, now: int) -> None:
    """Retries one suspect at a time, in a batch of its own, so that it cannot harm other requests."""
    version.reserved = None
    if version.trial is not None or not version.suspects:
        return
    instance = place_for(version, version.suspects[0])
    if instance is None or not instance.idle or not may_start(state, version, instance):
        version.reserved = instance
        return
    request = version.suspects.popleft()
    version.trial = instance
    batch = Batch([], request.cost, Reason.ALONE, request.signature, now)
    start(state, version, instance, batch, [request], now)


def _watch(state: State, version: Version, instance: Instance, now: int) -> None:
    """Sets the execution limit timer of an instance that starts a batch; there is at most one."""
    if version.limit_ns and not instance.watched:
        instance.watched = True
        state.set_timer(now + version.limit_ns, Timer.HANG, instance)


def check_hang(state: State, version: Version, instance: Instance, now: int) -> None:
    """The execution limit timer: kills the instance if the batch has exceeded the limit. Time spent waiting for
    other models does not count; the timer is set again when they have answered."""
    instance.watched = False
    running = instance.running
    if running is None or not version.limit_ns or instance.waits or instance.state is InstanceState.KILLED:
        return
    left = running.began + running.waited + version.limit_ns - now
    if left > 0:
        instance.watched = True
        state.set_timer(now + left, Timer.HANG, instance)
    else:
        limit = version.limit_ns / 1e9
        text = f"it has run one batch for more than {limit:g} s (--execution-limit-secs, execution_limit_secs)"
        instance.hung = True
        kill(state, version, instance, text)


def _send_ahead(state: State, version: Version, instance: Instance, now: int) -> bool:
    """Sends work to a busy instance: extends its waiting batch, or sends it one."""
    if instance.waiting is not None:
        return not instance.waiting.recalled and _extend(state, version, instance, instance.waiting, now)
    return sends_ahead(version, state.limits.prefetch_ns) and _start_batch(state, version, instance, now)


def _start_batch(state: State, version: Version, instance: Instance, now: int) -> bool:
    """Plans and sends a batch. False: nothing was sent; if requests should wait for more, `version.wake` is set."""
    plan = plan_batch(version, now, instance.quarantined)
    if not plan.count:
        version.wake = plan.wake
        return False
    version.wake = 0
    if version.queue.timed and _refuse_late(state, version, instance, plan, now):
        return True
    if instance.running is None and not may_start(state, version, instance):
        return False
    requests = take(version, plan)
    batch = Batch([], plan.rows, plan.reason, requests[0].signature, now)
    if instance.running is None:
        start(state, version, instance, batch, requests, now)
    else:
        instance.waiting = batch
        _send(state, instance, batch, requests, 0)
    return True


def _refuse_late(state: State, version: Version, instance: Instance, plan: BatchPlan, now: int) -> bool:
    """Rejects requests of the next batch that cannot be answered before their deadline: their callers get the error
    at once, and the time is used for others. Returns whether there were any."""
    done = now + version.service_ns
    if version.queue.count > plan.count:  # others could use its place: be pessimistic
        done += 4 * version.spread_ns
    running = instance.running
    if running is not None:
        done += max(0, running.began + version.service_ns - now)
    late = [request for request in planned(version, plan) if 0 < request.deadline < done]
    if late and running is None and len(late) == plan.count:
        # Nothing would run, so the estimate would never be updated: without this, a model that was slow once would
        # reject requests forever.
        version.service_ns -= version.service_ns >> 3
        version.spread_ns -= version.spread_ns >> 3
    for request in late:
        took = f"that takes about {(done - now) / 1e6:.1f} ms"
        text = f"Request timeout expired: it cannot be answered before its own timeout: {took}"
        version.queue.remove(request)
        completion.end_early(state, request, "DEADLINE_EXCEEDED", text, now)
    return bool(late)


def start(state: State, version: Version, instance: Instance, batch: Batch, requests: list[Request], now: int) -> None:
    """Runs the batch on an idle instance."""
    version.idle.remove(instance)
    instance.running = batch
    batch.move(BatchState.RUNNING)
    if not instance.watched:
        _watch(state, version, instance, now)
    _send(state, instance, batch, requests, 0)


def _extend(state: State, version: Version, instance: Instance, batch: Batch, now: int) -> bool:
    """False: the batch cannot grow."""
    plan = plan_extension(version, batch, now)
    if not plan.count:
        return False
    version.wake = 0
    if version.queue.timed and _refuse_late(state, version, instance, plan, now):
        return True
    batch.rows += plan.rows
    if plan.reason is not Reason.IDLE:
        batch.reason = plan.reason
    _send(state, instance, batch, take(version, plan), batch.pieces[0][0])
    return True


def _send(state: State, instance: Instance, batch: Batch, requests: list[Request], join: int) -> None:
    """Sends Execute, split into several messages if the inline bytes require it."""
    form = requests[0].form
    if (
        form is not None
        and 1 < len(requests) <= PACKET_MESSAGES
        and [request.form for request in requests].count(form) == len(requests)
        and sum([request.inline for request in requests]) <= CHUNK_BYTES
    ):
        _send_columns(state, instance, batch, requests, join)
        return
    peer = instance.peer
    is_open = batch.state is BatchState.OPEN
    works: list[Work] = []
    piece: list[Request] = []
    inline = 0
    for request in requests:
        if works and inline + request.inline > CHUNK_BYTES:
            number = state.next_number()
            state.send(peer, Execute(number, join, tuple(works), True, is_open))
            batch.pieces.append((number, piece))
            join = join or number
            works, piece, inline = [], [], 0
        inline += request.inline
        for segment in request.segments:
            state.ledger.show(segment, peer)
        works.append(
            Work(
                request.number, request.rows, request.tensors(), request.outputs, request.audience, request.options,
                request.slot, not request.in_shared_memory, request.near, request.aliases, request.labels,
            )
        )  # fmt: skip
        if request.state is not _QUEUED:  # else the transition is legal
            request.move(_SENT)
        request.state = _SENT
        request.instance = instance
        request.batch = batch
        piece.append(request)
    batch.left += len(requests)
    number = state.next_number()
    state.send(peer, Execute(number, join, tuple(works), False, is_open))
    batch.pieces.append((number, piece))


def _send_columns(state: State, instance: Instance, batch: Batch, requests: list[Request], join: int) -> None:
    """Sends requests of one form, of InferBatches."""
    form = requests[0].form
    assert form is not None
    for request in requests:
        if request.state is not _QUEUED:  # else the transition is legal
            request.move(_SENT)
        request.state = _SENT
        request.instance = instance
        request.batch = batch
    batch.left += len(requests)
    number = state.next_number()
    columns = Columns(
        form.forms,
        tuple([request.number for request in requests]),
        tuple([request.rows for request in requests]),
        tuple([request.data for request in requests]),
    )
    audiences = tuple([request.audience for request in requests])
    is_open = batch.state is BatchState.OPEN
    state.send(instance.peer, Execute(number, join, (), False, is_open, columns, audiences))
    batch.pieces.append((number, requests))


# ------------------------------------------------------------------------------------ workers' reports


def started(state: State, version: Version, instance: Instance, message: Started, now: int) -> None:
    _run_waiting(state, version, instance, message.batch, message.through, now)


def rows(state: State, version: Version, instance: Instance, message: Rows, now: int) -> None:
    batch = instance.running
    if batch is None or not batch.known_as(message.batch):
        kill_for_protocol_error(state, version, instance, f"Rows of batch {message.batch}")
        return
    for row in message.rows:
        _row(state, version, instance, batch, row, now, 0)


def done(state: State, version: Version, instance: Instance, message: Done, now: int) -> None:
    batch = instance.running
    if batch is None or not batch.known_as(message.batch):
        kill_for_protocol_error(state, version, instance, f"Done of batch {message.batch}")
        return
    times = message.times
    taken = times[0]
    batch.times = times
    statistics = version.statistics
    before = statistics.success_count
    traced = state.traces.active
    if traced:
        batch.number = message.batch
    columns = message.columns
    if columns is not None and not columns.regular:
        kill_for_protocol_error(state, version, instance, f"irregular columns of batch {message.batch}")
        return
    if columns is not None and version.plain and not traced:
        _usual_columns(state, version, instance, batch, columns, taken, now)
    elif columns is not None:
        for row in rows_of(columns):
            _row(state, version, instance, batch, row, now, taken)
    elif version.plain and not traced:
        _usual_rows(state, version, instance, batch, message, now)
    else:
        for row in message.rows:
            _row(state, version, instance, batch, row, now, taken)
    if state.tracing:
        count = len(message.rows if columns is None else columns.requests)
        state.log(
            "debug",
            f"{version.label} instance '{instance.spec.name}' ran batch {message.batch}: {batch.rows} rows in "
            f"{count} requests, formed because: {batch.reason.value}",
        )
    if message.again and version.places is not None:
        _again(state, version, batch, message.again)
    if batch.left and version.decoupled:
        responses.batch_done(state, version, instance, batch, taken)
    if batch.left:
        for request in batch.requests():
            completion.end_failed(
                state, request, "INTERNAL", f"{version.label} sent no response to this request of its batch", now
            )
    version.count_padding(batch)
    batch.end()
    instance.running = None
    stopped(state, instance)
    if instance.deaths or instance.quarantined:
        _recovered(state, version, instance)
    if version.trial is instance:
        version.trial = None
    version.served(times[3] - taken, now - batch.began)
    early = batch.early
    if early:
        statistics.queued(early, taken)
    answered = statistics.success_count - before + len(early)
    statistics.batch_done(max(batch.rows, batch.slots), answered, batch.reason, times, now)
    if message.next:
        _run_waiting(state, version, instance, message.next, message.through, now)
    elif instance.waiting is None and instance.usable:
        version.idle.append(instance)
    state.to_dispatch[version] = None


def _recovered(state: State, version: Version, instance: Instance) -> None:
    """Its batch succeeded: resets its crash counters."""
    instance.deaths = instance.crashes = 0
    if instance.quarantined:
        instance.quarantined = False
        text = f"instance '{instance.spec.name}' of {version.label} completed a batch and leaves quarantine"
        about = {"model": version.model, "version": version.number, "instance": instance.spec.name}
        state.log("info", text, **about)


def _again(state: State, version: Version, batch: Batch, numbers: tuple[int, ...]) -> None:
    """An iterative model wants to run these requests again. Those whose callers have left end here."""
    for number in numbers:
        request = state.requests.get(number)
        if request is not None and request.batch is batch:
            batch.left -= 1
            request.batch = None
            if request.state is _SENT:
                assert request.sequence is not None
                request.sequence.run_again(request)
            else:
                completion.released(state, request)
    state.to_dispatch[version] = None


def _run_waiting(state: State, version: Version, instance: Instance, number: int, through: int, now: int) -> None:
    if instance.revoked:
        kill(state, version, instance, "it started requests that it had to return for a restart")
        return
    batch = instance.waiting
    if batch is None or instance.running is not None or not batch.known_as(number):
        kill_for_protocol_error(state, version, instance, f"start of batch {number}")
        return
    instance.waiting = batch.split(through)
    instance.running = batch
    batch.began = now
    batch.move(BatchState.RUNNING)
    if not instance.watched:
        _watch(state, version, instance, now)
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
        recall.take_out(state, version, instance, batch, request)
    if instance.idle and instance.usable and instance not in version.idle:
        version.idle.append(instance)
    state.to_dispatch[version] = None


def _usual_rows(state: State, version: Version, instance: Instance, batch: Batch, done: Done, now: int) -> None:
    """`_row` for each row, with the common case inlined for speed: an answer without handles, to a waiting
    client."""
    requests, append = state.requests, state.effects.append
    taken, number = done.times[0], version.number
    rows = 0
    arrivals: list[int] = []
    for row in done.rows:
        request = requests.get(row.request)
        if request is not None and request.batch is batch and request.state is _SENT and row.error is None:
            for tensor in row.outputs:
                if not isinstance(tensor.data, bytes):
                    break
            else:
                if not request.special:
                    client = request.client
                    append(Send(client.number, Reply(request.client_number, number, row.outputs, row.parameters)))
                    del client.requests[request.client_number], requests[row.request]
                    client.bytes -= request.inline
                    request.state = _ENDED  # a legal transition from SENT
                    rows += request.cost
                    arrivals.append(request.arrived)
                    continue
        _row(state, version, instance, batch, row, now, taken)
    _count_answered(version, batch, arrivals, rows, taken, now)


def _count_answered(version: Version, batch: Batch, arrivals: list[int], rows: int, taken: int, now: int) -> None:
    batch.left -= len(arrivals)
    statistics = version.statistics
    statistics.answered(arrivals, rows, taken, now)
    if statistics.first is not None:
        for arrived in arrivals:
            statistics.first.add(now - arrived)


def _usual_columns(
    state: State, version: Version, instance: Instance, batch: Batch, columns: Columns, taken: int, now: int
) -> None:
    """As `_usual_rows`, for columns. Each client gets one message for all of its requests that came in columns."""
    requests, forms = state.requests, columns.forms
    rows = 0
    arrivals: list[int] = []
    replies: dict[ClientState, tuple[list[int], list[int], list[tuple[bytes, ...]]]] = {}
    for index, (own, axis, data) in enumerate(zip(columns.requests, columns.rows, columns.data, strict=True)):
        request = requests.get(own)
        if request is None or request.batch is not batch or request.state is not _SENT or request.special:
            _row(state, version, instance, batch, Row(own, columns.tensors(index)), now, taken)
            continue
        client, number = request.client, request.client_number
        if request.form is None:
            state.send(client.number, Reply(number, version.number, tensors_of(forms, axis, data)))
        else:
            reply = replies.get(client)
            if reply is None:
                reply = replies[client] = ([], [], [])
            reply[0].append(number)
            reply[1].append(axis)
            reply[2].append(data)
        del client.requests[number], requests[own]
        client.bytes -= request.inline
        request.state = _ENDED  # a legal transition from SENT
        rows += request.cost
        arrivals.append(request.arrived)
    for client, (numbers, axes, blobs) in replies.items():
        message = ReplyBatch(version.number, Columns(forms, tuple(numbers), tuple(axes), tuple(blobs)))
        state.send(client.number, message)
    _count_answered(version, batch, arrivals, rows, taken, now)


def _row(state: State, version: Version, instance: Instance, batch: Batch, row: Row, now: int, taken: int) -> None:
    request = state.requests.get(row.request)
    if request is None or request.batch is not batch or request.state is _DONE:
        kill_for_protocol_error(state, version, instance, f"row of request {row.request}")
        return
    batch.left -= 1
    if request.state is _LINGERING:
        answers.send_back(state, instance, row)
        completion.released(state, request)
    elif row.error is not None:
        answers.send_back(state, instance, row)
        completion.end_failed(state, request, row.error.code, row.error.text, now)
    elif not _reply(state, version, instance, request, row, now, taken):
        text = f"{version.label} sent a response with memory that it does not own"
        completion.end_failed(state, request, "INTERNAL", text, now)
        kill_for_protocol_error(state, version, instance, "memory in a response")


def _reply(
    state: State, version: Version, instance: Instance, request: Request, row: Row, now: int, taken: int
) -> bool:
    """Sends the answer. False, without any change: it refers to memory that the worker may not give."""
    if not answers.take(state, instance, request, row):
        return False
    if taken:
        version.statistics.answered([request.arrived], request.cost, taken, now)
    else:
        version.statistics.answered_early(request.arrived, request.cost, now)
        assert request.batch is not None
        request.batch.early.append(request.arrived)
    completion.answer(state, request, Reply(request.client_number, version.number, row.outputs, row.parameters))
    return True
