"""Dispatch: sends batches to workers, extends them, and recalls those that have not started. `reports` processes the
results."""

from __future__ import annotations

from typing import Any

from shmserve.core.batching import leases
from shmserve.core.effects import Send
from shmserve.core.exit import exit, shadow
from shmserve.core.owners.rate_limiter import Limiter
from shmserve.core.records import Batch, Instance, Request, Version
from shmserve.core.service.form import BatchPlan, Reason, form
from shmserve.core.service.padding import form_padded
from shmserve.core.service.validation import CheckedForm
from shmserve.core.state import State, Timer
from shmserve.core.states import BatchState, InstanceState, RequestState, VersionState, move, move_all
from shmserve.core.termination import kill_hung, watch
from shmserve.protocol.messages import CHUNK_BYTES, PACKET_MESSAGES, Columns
from shmserve.protocol.worker_messages import Execute, Withdraw, Work

MAX_STREAMS = 32
"""Maximum number of requests in a batch for an engine that forms its batches itself. If each generates several texts,
there may be no room for all, and those that wait in the worker can no longer be overtaken."""
_READY = VersionState.READY
_QUEUED, _SENT, _LINGERING = RequestState.QUEUED, RequestState.SENT, RequestState.LINGERING


# ------------------------------------------------------------------------------------ to workers


def refuse_stranded(state: State, version: Version) -> None:
    """Fails the requests queued for a version that no instance will run any more."""
    if version.state is not _READY and version.queued and not version.alive:
        what = f"'{version.model}' version {version.number} is not at ready state"
        empty_queue(state, version, f"Request for unknown model: {what}: {version.reason or version.degraded_reason}")


def dispatch(state: State, version: Version, now: int) -> None:
    """Sends everything that may be sent now."""
    if version.state is not _READY:
        refuse_stranded(state, version)
    service = version.service
    queue = service.queue
    version.wake = 0
    if state.blocked_instances or service.decoupled:
        _call_back(state, version)
    if version.yielding:
        state.wakes.pop(version, None)
        return
    if version.suspects or version.reserved is not None:
        _try_suspect(state, version, now)
    if state.limiter is not None:
        _dispatch_limited(state, version, state.limiter, now)
    else:
        ahead: list[Instance] | None = None
        while queue.count:
            if version.idle:
                instance = _fewest_streams(version) if service.decoupled else version.idle[-1]
                if _start_batch(state, version, instance, now):
                    ahead = None
                    continue
            if ahead is None:
                ahead = busy(version)
            for instance in ahead:
                if _send_ahead(state, version, instance, now):
                    break
            else:
                break
    if version.wake:
        state.wakes[version] = version.wake
    elif state.wakes:
        state.wakes.pop(version, None)


def _fewest_streams(version: Version) -> Instance:
    """The idle instance with the fewest streams; of several, the one that became idle last. An instance of a language
    model is idle while it generates texts, as long as it has room for others."""
    return min(reversed(version.idle), key=lambda instance: len(instance.streams))


def _dispatch_limited(state: State, version: Version, limiter: Limiter, now: int) -> None:
    """Starts one batch; then the limiter chooses the next version. Nothing is sent ahead, because the worker would
    start it without asking the limiter."""
    if not version.service.queue.count:
        return
    for instance in sorted(version.idle, key=limiter.rank):
        if _start_batch(state, version, instance, now):
            state.to_dispatch[version] = None
            return


def _call_back(state: State, version: Version) -> None:
    """Recalls batches sent ahead to an instance that waits for other models or callers: another instance may be able to
    run them, and requests of other callers may come first."""
    for instance in version.instances:
        batch, running = instance.waiting, instance.running
        if batch is not None and (instance.waits or (running is not None and running.unread)):
            recall(state, instance, batch)


def may_start(state: State, version: Version, instance: Instance) -> bool:
    """Acquires the instance's resources if the rate limiter is on. False: other instances hold them."""
    limiter = state.limiter
    return limiter is None or limiter.acquire(version, instance)


def release_resources(state: State, instance: Instance) -> None:
    """Releases the resources of an instance that is idle, or blocked by a call, to others."""
    if state.limiter is not None:
        for version in state.limiter.release(instance):
            state.to_dispatch[version] = None


def empty_queue(state: State, version: Version, text: str) -> None:
    """Fails all queued requests: no instance will run them. Those that wait for a load are not queued yet: `waiting`
    decides which version serves them."""
    service = version.service
    waiting = [*service.queue.take(service.queue.count), *version.suspects]
    version.suspects.clear()
    for request in waiting:
        exit.fail_unsent(state, request, "UNAVAILABLE", text)
    if service.sequence_slots is not None:
        service.sequence_slots.lose(None, text)
    state.to_dispatch[version] = None


def _try_suspect(state: State, version: Version, now: int) -> None:
    """Retries one suspect at a time, alone in its batch, so that it cannot harm other requests."""
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


def check_hang(state: State, version: Version, instance: Instance, now: int) -> None:
    """The execution limit timer: kills the instance if the batch has exceeded the limit. Time spent waiting for
    other models does not count; the timer is set again when they have answered. Neither does time spent waiting for
    callers to accept responses, or in which the instance responds to requests of earlier batches, which may take all
    places that this batch waits for."""
    instance.watched = False
    if instance.lease and instance.state is not InstanceState.KILLED:
        leases.ask_for_log(state, instance)  # which shows what it runs, and since when
        return
    running = instance.running
    if running is None or not version.limit_ns or instance.waits or instance.state is InstanceState.KILLED:
        return
    remaining = version.limit_ns - min(running.worked(now), now - instance.responded)
    if remaining > 0:
        instance.watched = True
        state.set_timer(now + remaining, Timer.HANG, instance)
    else:
        kill_hung(state, version, instance)


def _send_ahead(state: State, version: Version, instance: Instance, now: int) -> bool:
    """Sends work to a busy instance: extends its waiting batch, or sends it one."""
    if instance.waiting is not None:
        return not instance.waiting.recalled and _extend(state, version, instance, instance.waiting, now)
    if instance.running is not None and instance.running.unread:
        return False
    return sends_ahead(version, state.limits.prefetch_ns) and _start_batch(state, version, instance, now)


def _start_batch(state: State, version: Version, instance: Instance, now: int) -> bool:
    """Plans and sends a batch. False: nothing was sent; if requests should wait for more, `version.wake` is set."""
    plan = plan_batch(version, instance, now)
    if not plan.count:
        version.wake = plan.wake
        return False
    version.wake = 0
    if version.service.queue.timed and _refuse_late(state, version, instance, plan, now):
        return True
    if state.limiter is not None and instance.running is None and not may_start(state, version, instance):
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
    """Rejects requests of the next batch that cannot be answered before their deadline: their callers get the error at
    once, and the capacity goes to others. Returns whether there were any."""
    service = version.service
    done = now + version.service_ns
    if service.queue.count > plan.count:  # others could take the freed place: be pessimistic
        done += 4 * version.spread_ns
    running = instance.running
    if running is not None:
        done += max(0, running.began + running.stalled + version.service_ns - now)
    late = [request for request in planned(version, plan) if 0 < request.deadline < done]
    if late and running is None and len(late) == plan.count:
        # Decay the estimate, which is otherwise updated only by batches that run: a model that was slow once would
        # reject requests forever.
        version.service_ns -= version.service_ns >> 3
        version.spread_ns -= version.spread_ns >> 3
    for request in late:
        took = f"that takes about {(done - now) / 1e6:.1f} ms"
        text = f"Request timeout expired: it cannot be answered before its own timeout: {took}"
        service.queue.remove(request)
        exit.fail_unsent(state, request, "DEADLINE_EXCEEDED", text)
    return bool(late)


def start(state: State, version: Version, instance: Instance, batch: Batch, requests: list[Request], now: int) -> None:
    """Runs the batch on an idle instance."""
    service = version.service
    version.idle.remove(instance)
    instance.running = batch
    move(batch, BatchState.RUNNING)
    if service.lending is not None:
        leases.count(state, version, service.lending, requests)
    if not instance.watched:
        watch(state, version, instance, now)
    _send(state, instance, batch, requests, 0)


def _extend(state: State, version: Version, instance: Instance, batch: Batch, now: int) -> bool:
    """False: the batch cannot grow."""
    plan = plan_extension(version, batch, now)
    if not plan.count:
        return False
    version.wake = 0
    if version.service.queue.timed and _refuse_late(state, version, instance, plan, now):
        return True
    batch.rows += plan.rows
    if plan.reason is not Reason.IDLE:
        batch.reason = plan.reason
    _send(state, instance, batch, take(version, plan), batch.pieces[0][0])
    return True


def _send(state: State, instance: Instance, batch: Batch, requests: list[Request], join: int) -> None:
    """Sends Execute, split into several messages if the inline bytes require it."""
    if state.memory.limited and not join:
        requests[0].version.sleep_state.used_by(requests[0].payer.user, 1)
    if state.shadow_client.requests:
        shadow.send_expected(state, instance.peer, requests)
    move_all(requests, _QUEUED, _SENT)
    checked = requests[0].form or requests[-1].form
    if checked is not None and _send_columns(state, instance, batch, requests, join, checked):
        return
    peer, is_open = instance.peer, batch.state is BatchState.OPEN
    pieces = [requests] if len(requests) == 1 else _pieces(requests, requests[0].version.service.max_work_items)
    for piece in pieces:
        work_items = []
        for request in piece:
            for segment in request.segments:
                state.ledger.show(segment, peer)
            work_items.append(
                Work(
                    request.number,
                    request.rows,
                    request.inputs if request.form is None else request.tensors(),
                    request.outputs,
                    request.audience,
                    request.options,
                    request.slot,
                    not request.in_shared_memory,
                    request.forwarded is not None,
                    request.step,
                )
            )
            request.instance = instance
            request.batch = batch
        number = state.next_number()
        message = Execute(number, join, tuple(work_items), piece is not pieces[-1], is_open)
        state.effects.append(Send(peer, message))
        batch.pieces.append((number, piece))
        join = join or number
    batch.remaining += len(requests)


def _pieces(requests: list[Request], limit: int) -> list[list[Request]]:
    """Divides requests among messages, none of which has more than `limit` of them, or too many bytes."""
    if len(requests) <= limit and sum([request.inline for request in requests]) <= CHUNK_BYTES:
        return [requests]
    pieces: list[list[Request]] = [[]]
    inline = 0
    for request in requests:
        if pieces[-1] and (inline + request.inline > CHUNK_BYTES or len(pieces[-1]) >= limit):
            pieces.append([])
            inline = 0
        pieces[-1].append(request)
        inline += request.inline
    return pieces


def _data_of(request: Request, checked: CheckedForm) -> tuple[bytes, ...] | None:
    """The inputs of a request that did not come in columns, as data for a column message. None: another form."""
    special = request.options or request.segments or request.in_shared_memory or request.step or request.is_step
    if request.form is not None or request.outputs is not None or special or request.slot >= 0:
        return None
    inputs = request.inputs
    if len(inputs) != len(checked.forms):
        return None
    for tensor, one in zip(inputs, checked.forms, strict=True):
        if tensor.name != one.name or tensor.dtype != one.dtype or tensor.shape[1:] != one.dims:
            return None
    return tuple([tensor.data for tensor in inputs])  # type: ignore[misc]  # without segments they are inline


def _send_columns(
    state: State, instance: Instance, batch: Batch, requests: list[Request], join: int, checked: CheckedForm
) -> bool:
    """Sends requests of one form, most of which came in columns. False: they cannot be sent as columns."""
    count = len(requests)
    if not 1 < count <= PACKET_MESSAGES or 2 * [request.form for request in requests].count(checked) <= count:
        return False
    if sum([request.inline for request in requests]) > CHUNK_BYTES:
        return False
    data: list[Any] = [request.data if request.form is checked else _data_of(request, checked) for request in requests]
    if None in data:
        return False
    for request in requests:
        request.instance = instance
        request.batch = batch
    batch.remaining += count
    number = state.next_number()
    columns = Columns(
        checked.forms,
        tuple([request.number for request in requests]),
        tuple([request.rows for request in requests]),
        tuple(data),
    )
    audiences = tuple([request.audience for request in requests])
    is_open = batch.state is BatchState.OPEN
    state.send(instance.peer, Execute(number, join, (), False, is_open, columns, audiences))
    batch.pieces.append((number, requests))
    return True


# ------------------------------------------------------------------------------------ recalls


def recall(state: State, instance: Instance, batch: Batch) -> None:
    """Asks the worker to return its waiting batch."""
    if not batch.recalled:
        batch.recalled = True
        state.send(instance.peer, Withdraw(tuple(request.number for request in batch.requests()), True))


def take_out(state: State, version: Version, instance: Instance, batch: Batch, request: Request) -> None:
    """Removes a request from a batch that waits at a worker and will not run it."""
    batch.rows -= request.cost
    batch.leave(request)
    if request.state is _LINGERING:
        exit.released(state, request)
    else:
        put_back(state, version, request)
    if not batch.remaining:
        batch.end()
        instance.waiting = None


def put_back(state: State, version: Version, request: Request) -> None:
    """Queues a request that its worker does not have any more, in its version or, after a restart, in the next
    generation."""
    request.take_back()
    target = version.requeue_target
    if target is not version:
        request.taken_over(target)
        target.service.move_in_order(request, version.service)
        exit.respond_in_order(state, version)
    target.service.queue.put_back(request)
    state.to_dispatch[target] = None


# ------------------------------------------------------------------------------------ plans
# Only `take` changes the queue.


def plan_batch(version: Version, instance: Instance, now: int) -> BatchPlan:
    """Plans the next batch of an instance."""
    service = version.service
    rules = service.batch_rules
    if instance.quarantined:
        return BatchPlan(1, service.queue.first(1)[0].cost, Reason.ALONE)
    if service.streams:
        return _plan_streams(version, instance)
    if rules is None:
        return BatchPlan(1, service.queue.first(1)[0].cost, Reason.SINGLE)
    if service.padding is not None:
        waiting = service.queue.first(service.padding.lookahead)
        return form_padded(waiting, rules, service.padding, now, _urgent(version, now))
    return form(service.queue.first(rules.lookahead), rules, now)


def _plan_streams(version: Version, instance: Instance) -> BatchPlan:
    """Requests that an engine joins to its own batches travel in one message, as many as it has room for and as the
    other idle instances leave to this one. A single one waits there if there is no room."""
    service = version.service
    running = instance.running
    room = service.streams - len(instance.streams) - (0 if running is None else running.remaining)
    share = -(-service.queue.count // max(1, len(version.idle)))
    count = max(1, min(room, share, MAX_STREAMS))
    requests = service.queue.first(count)[:count]
    return BatchPlan(len(requests), sum([request.cost for request in requests]), Reason.IDLE)


def plan_extension(version: Version, batch: Batch, now: int) -> BatchPlan:
    service = version.service
    rules = service.batch_rules
    if rules is None or batch.rows in rules.preferred or batch.rows >= rules.max_batch:
        return BatchPlan(0, 0, batch.reason)
    if service.padding is not None:
        waiting = service.queue.first(service.padding.lookahead)
        base = batch.rows, batch.signature, *batch.lengths()
        return form_padded(waiting, rules, service.padding, now, _urgent(version, now), *base)
    return form(service.queue.first(rules.lookahead), rules, now, batch.rows, batch.signature)


def _urgent(version: Version, now: int) -> int:
    """Requests that expire before this time are urgent: they might be too late if another batch ran first."""
    return now + 2 * version.service_ns + 4 * version.spread_ns


def planned(version: Version, plan: BatchPlan) -> list[Request]:
    service = version.service
    if plan.chosen is None:
        return service.queue.first(plan.count)[: plan.count]
    waiting = service.queue.first(plan.chosen[-1] + 1)
    return [waiting[place] for place in plan.chosen]


def take(version: Version, plan: BatchPlan) -> list[Request]:
    """Removes the requests of the plan from the queue and returns them."""
    service = version.service
    return service.queue.take(plan.count) if plan.chosen is None else service.queue.pick(plan.chosen)


def sends_ahead(version: Version, prefetch_ns: int) -> bool:
    """True if a batch may wait at a busy instance."""
    service = version.service
    return (
        service.prefetch
        and not version.calls_others
        and (len(version.instances) == 1 or version.service_ns <= prefetch_ns)
    )


def busy(version: Version) -> list[Instance]:
    """Busy instances that may take more work, in the order in which they will probably finish."""
    for_suspects = (version.trial, version.reserved)
    able = [
        i
        for i in version.instances
        if not i.idle and i.usable and i not in for_suspects and not (i.waits or i.quarantined or i.lease)
    ]
    if len(able) > 1:
        able.sort(key=_began)
    return able


def place_for(version: Version, suspect: Request) -> Instance | None:
    """The instance for a retry: the one that can start it first, preferably not the one whose worker died."""
    able = [i for i in version.instances if i.usable and not i.retiring and not i.waits]
    return min(
        able,
        key=lambda i: (i.quarantined, i is suspect.suspect, not i.idle, i.waiting is not None, _began(i)),
        default=None,
    )


def _began(instance: Instance) -> int:
    return instance.running.began if instance.running is not None else 0
