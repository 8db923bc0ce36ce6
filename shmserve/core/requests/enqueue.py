"""Queues validated requests of clients and of ensemble steps.

Invariant: only `level`, which runs before the request exists, may reject it; `put` may not.
"""

from __future__ import annotations

from shmserve.core.batching import dispatch
from shmserve.core.ensembles.begin import begin
from shmserve.core.records import Miss, Request, Version
from shmserve.core.requests import completion
from shmserve.core.requests.client import ClientState
from shmserve.core.sequences.scheduler import Sequencer
from shmserve.core.state import State, Timer
from shmserve.core.states import RequestState
from shmserve.errors import Unavailable, Unsupported
from shmserve.protocol.messages import Options, Reply

SHORTEST_WAIT_NS = 20_000
"""A turn takes at least this long. A shorter queue timeout expires even if an instance is idle."""


class Enqueuer:
    def __init__(self, state: State, sequencer: Sequencer) -> None:
        self._state = state
        self.sequencer = sequencer

    def level(
        self, client: ClientState, version: Version, number: int, options: Options | None, rows: int, now: int
    ) -> int:
        """The priority level. Raises if the request is not acceptable or its queue is full. `number`: the version that
        the caller named, 0 for the default one."""
        if version.places is not None:
            self.sequencer.check(client, version, number, options, rows)
            return 0
        if options is not None and options.sequence and version.graph is None:
            raise Unsupported(
                f"model '{version.model}' does not use sequence batching; send the request without a sequence"
            )
        queue = version.queue
        number = queue.level_of(options.priority) if options is not None else queue.default_level
        level = queue.level(number)
        limit = level.policy.max_size
        if limit and len(level) >= limit:
            dispatch.dispatch(self._state, version, now)  # earlier requests of this turn may leave the queue
        if limit and len(level) >= limit:
            raise Unavailable(
                f"Exceeds maximum queue size: {limit} requests are queued for model '{version.model}'; raise "
                "max_queue_size or add instances"
            )
        return number

    def put(self, version: Version, number: int, request: Request, now: int) -> None:
        if version.cached and not version.decoupled and self._cached(version, request, now):
            return
        if version.graph is not None:
            begin(self._state, request)
            return
        if request.step_of and (version.order is not None or version.places is not None):
            self._state.deadlock_possible = True
        if version.places is not None:
            self.sequencer.put(version, number, request, now)
            return
        if not version.plain:
            self._set_queue_timeout(version, request)
        version.queue.add(request)
        if 0 < request.queue_expires < request.arrived + SHORTEST_WAIT_NS:
            self.expire(request, now)
        self._state.dirty[version] = None

    def queue_timeout(self, request: Request, now: int) -> None:
        """The queue timer. It has no effect once the request is delayed, or has been sent to a worker."""
        if request.state is RequestState.QUEUED and not request.delayed and not request.suspect:
            self.expire(request, now)
            self._state.dirty[request.version] = None

    def expire(self, request: Request, now: int) -> None:
        """Handles the expired queue timeout of a queued request."""
        if request.version.queue.expire(request):
            # Triton's clients compare the whole text, so nothing is added.
            completion.end_early(self._state, request, "QUEUE_TIMEOUT", "Request timeout expired", now)

    def _cached(self, version: Version, request: Request, now: int) -> bool:
        """True: answered from the cache. Otherwise the response will be stored, if possible."""
        cache = self._state.cache
        began = cache.clock()
        key = cache.key(request)
        if key is None:
            return False
        entry = cache.find(key)
        if entry is None:
            if cache.hold_still(key, request):
                request.miss = Miss(key, cache.clock() - began)
            return False
        version.statistics.cache_hit(now - request.arrived + cache.clock() - began, now)
        completion.pass_on(self._state, request, entry.handles)
        reply = Reply(request.client_number, version.number, entry.outputs, entry.parameters)
        completion.deliver(self._state, request, reply)
        return True

    def _set_queue_timeout(self, version: Version, request: Request) -> None:
        policy, options = version.queue.level(request.level).policy, request.options
        if policy.timeout_ns:
            limit = policy.timeout_ns
            if policy.allow_override and options is not None and options.queue_timeout_us:
                limit = min(limit, options.queue_timeout_us * 1000)
            request.queue_expires = request.arrived + limit
            self._state.set_timer(request.queue_expires, Timer.QUEUE, request)
        if version.order is not None:
            version.order.append(request)
