"""Queues validated requests of clients and of ensemble steps.

Invariant: only `level`, which runs before the request exists, may reject it; `put` never does.
"""

from __future__ import annotations

from shmserve.core.batching import dispatch, leases, sequence_scheduler
from shmserve.core.exit import exit
from shmserve.core.intake.begin_run import begin
from shmserve.core.policy import TimeoutAction
from shmserve.core.records import ClientState, Miss, Payer, Request, Version
from shmserve.core.service.prompts import size_of
from shmserve.core.state import State, Timer
from shmserve.core.states import RequestState
from shmserve.errors import DeadlineExceeded, Unavailable, Unsupported
from shmserve.protocol.messages import Options, Reply, Tensor

SHORTEST_WAIT_NS = 20_000
"""A turn takes at least this long. A shorter queue timeout expires even if an instance is idle."""


def level(
    state: State, client: ClientState, version: Version, number: int, options: Options | None, rows: int, now: int
) -> int:
    """The priority level. Raises if the request is not acceptable or its queue is full. `number`: the requested
    version, 0 for the default."""
    service = version.service
    if service.sequence_slots is not None:
        sequence_scheduler.check(state, client, version, number, options, rows)
        return 0
    if options is not None and options.sequence and service.graph is None:
        raise Unsupported(
            f"model '{version.model}' does not use sequence batching; send the request without a sequence"
        )
    queue = service.queue
    priority = queue.level_of(options.priority) if options is not None else queue.default_level
    waiting = queue.level(priority)
    limit = waiting.policy.max_size
    if limit and len(waiting) >= limit:
        dispatch.dispatch(state, version, now)  # earlier requests of this turn may leave the queue
    if limit and len(waiting) >= limit:
        raise Unavailable(
            f"Exceeds maximum queue size: {limit} requests are queued for model '{version.model}'; raise "
            "max_queue_size or add instances"
        )
    return priority


def check_prompt(
    version: Version,
    payer: Payer,
    level: int,
    inputs: tuple[Tensor, ...],
    options: Options | None,
    timeout_us: int,
    now: int,
) -> None:
    """Raises if the prompt of a request would wait for too long behind those of others."""
    backlog = version.service.prompts
    assert backlog is not None
    tokens = backlog.estimate(size_of(inputs, backlog.inputs))
    if backlog.exceeds(payer, tokens):
        raise Unavailable(
            f"Exceeds maximum queue size: prompts of about {backlog.total} tokens wait for model '{version.model}', "
            f"this one has about {tokens}, and the limit is {backlog.limit} (max_queue_tokens); raise it, or add "
            "instances"
        )
    rate, ahead = backlog.rate(now), backlog.ahead(payer, level, tokens)
    if not rate or not ahead:
        return
    wait = (
        f"prompts of about {ahead} tokens are computed before this one, which takes about {ahead / rate:.3g} s at "
        f"{rate:.3g} tokens per second"
    )
    if timeout_us and (ahead + tokens) / rate * 1e6 > timeout_us:
        raise DeadlineExceeded(
            f"Request timeout expired: it cannot be answered before its own timeout of {timeout_us / 1e6:g} s: {wait}; "
            "raise the timeout or add instances"
        )
    limit_ns = _queue_limit_ns(version, level, options)
    if (
        limit_ns
        and ahead / rate * 1e9 > limit_ns
        and version.service.queue.policy(level).action is TimeoutAction.REJECT
    ):
        raise Unavailable(
            f"Request timeout expired: it would wait for longer than the queue's timeout of {limit_ns / 1e9:g} s: "
            f"{wait}; raise default_timeout_microseconds or add instances"
        )


def _add_prompt(request: Request, now: int) -> None:
    """Counts the prompt of a request that is about to be queued."""
    backlog = request.version.service.prompts
    if backlog is not None and request.prompt is None:
        size = size_of(request.tensors(), backlog.inputs)
        request.prompt = backlog.add(request.payer, request.level, size, now)


def put(state: State, version: Version, number: int, request: Request, now: int) -> None:
    """Queues an admitted request. `number`: the requested version, 0 for the default."""
    service = version.service
    if service.plain:
        if not (state.lease_suspects and leases.queue_lease_suspect(state, version, request)):
            service.queue.add(request)
        state.to_dispatch[version] = None
        return
    if service.cached and _cached(state, version, request, now):
        return
    if service.graph is not None:
        begin(state, request)
        return
    if request.is_step and (service.order is not None or service.sequence_slots is not None):
        state.deadlock_possible = True
    if service.sequence_slots is not None:
        sequence_scheduler.put(state, version, number, request, now)
        return
    _set_queue_timeout(state, version, request, now)
    if service.order is not None:
        service.order.append(request)
    _add_prompt(request, now)
    service.queue.add(request)
    if 0 < request.queue_expires < now + SHORTEST_WAIT_NS:
        expire(state, request)
    state.to_dispatch[version] = None


def queue_timeout(state: State, request: Request, now: int) -> None:
    """The queue timer. It has no effect on a request that is delayed or has been sent to a worker."""
    if request.state is RequestState.QUEUED and not request.delayed and not request.suspect:
        expire(state, request)
        state.to_dispatch[request.version] = None


def expire(state: State, request: Request) -> None:
    expired = request.unchecked is not None
    if expired:
        request.version.drop(request)
    if expired or request.version.service.queue.expire(request):
        # Triton's clients compare the whole text, so nothing is added.
        exit.fail_unsent(state, request, "QUEUE_TIMEOUT", "Request timeout expired")


def _cached(state: State, version: Version, request: Request, now: int) -> bool:
    """True: answered from the cache. Otherwise the response will be stored, if possible."""
    cache = state.cache
    began = cache.clock()
    key = cache.key(request)
    if key is None:
        return False
    entry = cache.find(key)
    if entry is None:
        if cache.use_private_copy(key, request):
            request.miss, request.special = Miss(key, cache.clock() - began), True
        return False
    state.observers.cache_hit(request, now - request.arrived + cache.clock() - began)
    state.outputs.pass_on(request, entry.handles)
    reply = Reply(request.client_number, version.number, entry.outputs, entry.parameters)
    exit.deliver(state, request, reply)
    return True


def _set_queue_timeout(state: State, version: Version, request: Request, now: int) -> None:
    limit = _queue_limit_ns(version, request.level, request.options)
    if limit:
        request.queue_expires = now + limit  # after its wait for the model to load, if any
        state.set_timer(request.queue_expires, Timer.QUEUE, request)


def _queue_limit_ns(version: Version, level: int, options: Options | None) -> int:
    """How long a request may be queued; 0: no limit."""
    policy = version.service.queue.policy(level)
    limit = policy.timeout_ns
    if limit and policy.allow_override and options is not None and options.queue_timeout_us:
        return min(limit, options.queue_timeout_us * 1000)
    return limit
