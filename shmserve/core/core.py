"""The core makes every scheduling decision. It receives events and the time from the shell, and returns effects, which
the shell executes.

    core.handle([(peer, message), (0, event), ...], now) -> effects     one turn: all events since the last one
    core.deadline() -> ns or None                                       when to call tick if no event arrives first
    core.tick(now) -> effects                                           a turn without events: expired timers

A turn first processes all its events, in order, and only then forms batches, so requests that arrive together can share
a batch. Times are CLOCK_MONOTONIC in ns, as in the workers' reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from shmserve.core import events, invariants
from shmserve.core.batching import dispatch, leases, reports, sequence_scheduler
from shmserve.core.calls.calls import ModelCalls
from shmserve.core.effects import Effect
from shmserve.core.ensembles.advance import Ensembles
from shmserve.core.events import Event
from shmserve.core.exit import exit, responses
from shmserve.core.intake import enqueue, waiting
from shmserve.core.intake.admission import Admission
from shmserve.core.intake.connections import Connections
from shmserve.core.intake.intake import Intake
from shmserve.core.intake.queries import QueryQueue
from shmserve.core.intake.quotas import Quotas
from shmserve.core.internal_errors import InternalErrors
from shmserve.core.limits import Limits
from shmserve.core.models import (
    deployment,
    ensemble_readiness,
    handover,
    load_results,
    memory,
    retirement,
    room,
    scaling,
    sleep,
    unhealthy,
)
from shmserve.core.models.lifecycle import Lifecycle
from shmserve.core.records import Instance, Request, Version
from shmserve.core.state import WORKERS_FROM, State, Timer
from shmserve.core.states import InstanceState
from shmserve.protocol.messages import Ask, Bye, Cancel, Hello, Infer, InferBatch, Map, More, Ping, Pong, Return, Unmap
from shmserve.protocol.roles import ALL_ROLES, NO_ROLES
from shmserve.protocol.worker_messages import (
    Call,
    Done,
    LeaseLogged,
    LeaseOver,
    LoadFailed,
    Prefilled,
    Rows,
    Started,
    Streamed,
    Unread,
    Withdrawn,
)

KILLED = InstanceState.KILLED
ROWS = 256
"""Limit, per turn, of requests created for rows of mapped steps: about 3 ms of work."""

Handler = Callable[[int, Any, int], None]
"""Called with the peer, the message or event, and the time."""
WorkerHandler = Callable[[Version, Instance, Any, int], None]
"""Called with the worker's version and instance, the message or event, and the time."""
TimerHandler = Callable[[Any, int], None]
"""Called with the subject of the timer, and the time."""


def _ignore(*_: object) -> None:
    """Handles Pong: any message proves that the peer is alive, and the shell has already recorded it."""


class Core:
    def __init__(
        self, server: str = "shmserve", limits: Limits | None = None, tracing: bool = False, survive: bool = False
    ) -> None:
        """`server`: name and version, for clients. `tracing`: log why each batch was formed, and each failed
        request. `survive`: log internal errors and continue; otherwise they are raised."""
        state = self.state = State(limits or Limits(), tracing)
        quotas = Quotas(state)
        queries = self._queries = QueryQueue(state)
        self._connections = Connections(state, quotas, queries, server)
        intake = Intake(state, quotas, self._connections)
        self._ensembles = Ensembles(state, intake, quotas)
        self._admission = Admission(state, intake, quotas, queries, self._connections)
        self._calls = ModelCalls(state, intake, queries, quotas)
        self._lifecycle = Lifecycle(state, queries)
        self._internal_errors = InternalErrors(state, self._connections, survive)
        self._of_clients = self._client_handlers()
        self._of_workers = self._worker_handlers()
        self._of_timers = self._timer_handlers()

    def _client_handlers(self) -> dict[type, Handler]:
        """Includes the events of the shell, which have no peer."""
        state, lifecycle = self.state, self._lifecycle
        connections, admission = self._connections, self._admission
        return {
            Infer: admission.infer,
            InferBatch: admission.infer_batch,
            events.Framed: admission.framed,
            Return: admission.give_back,
            Cancel: admission.cancel,
            Hello: connections.hello,
            Ask: admission.ask,
            Map: admission.map,
            Unmap: admission.unmap,
            Ping: connections.ping,
            Pong: _ignore,
            Bye: connections.bye,
            More: admission.more,
            events.Opened: connections.opened,
            events.Closed: connections.closed,
            events.Garbled: connections.garbled,
            events.Answered: self._queries.answered,
            events.Behind: self._queries.behind,
            events.OwnSegment: admission.own_segment,
            events.OwnSegmentGone: admission.own_segment_gone,
            events.Deploy: partial(deployment.deploy, state),
            events.Refuse: partial(deployment.refuse, state),
            events.Unload: partial(deployment.unload, state),
            events.Restart: partial(deployment.restart, state),
            events.SetTraffic: partial(deployment.set_traffic, state),
            events.SetService: partial(deployment.set_service, state),
            events.Exited: lifecycle.exited,
            events.DeviceHealth: partial(unhealthy.device_health, state),
            events.Measured: partial(memory.measured, state),
            events.Composed: partial(ensemble_readiness.composed, state),
            events.LeaseRead: partial(leases.on_log_read, state),
            events.Drain: lifecycle.drain,
        }

    def _worker_handlers(self) -> dict[type, WorkerHandler]:
        state, calls, lifecycle = self.state, self._calls, self._lifecycle
        return {
            Done: partial(reports.done, state),
            Rows: partial(reports.rows, state),
            Streamed: partial(responses.streamed, state),
            Unread: partial(responses.unread, state),
            Prefilled: partial(responses.prefilled, state),
            Started: partial(reports.started, state),
            Withdrawn: partial(reports.withdrawn, state),
            LeaseLogged: partial(leases.on_half_full, state),
            LeaseOver: partial(leases.on_over, state),
            Map: lifecycle.map,
            Unmap: lifecycle.unmap,
            Return: calls.give_back,
            Call: calls.call,
            Cancel: calls.cancel,
            More: calls.more,
            Ask: calls.ask,
            LoadFailed: lifecycle.load_failed,
            events.Compiled: lifecycle.compiled,
            events.Garbled: lifecycle.garbled,
            Pong: _ignore,
        }

    def _timer_handlers(self) -> dict[Timer, TimerHandler]:
        state, lifecycle = self.state, self._lifecycle

        def of_instance(handler: Callable[[Version, Instance, int], None]) -> TimerHandler:
            return partial(self._instance_timer, handler)

        return {
            Timer.DEADLINE: partial(exit.deadline_passed, state),
            Timer.QUEUE: partial(enqueue.queue_timeout, state),
            Timer.IDLE: partial(sequence_scheduler.idle, state),
            Timer.BACKLOG: partial(sequence_scheduler.backlog_timeout, state),
            Timer.RETRY: of_instance(lifecycle.retry),
            Timer.LATE: of_instance(lifecycle.late),
            Timer.HANG: of_instance(partial(dispatch.check_hang, state)),
            Timer.UNREAD: partial(responses.check_unread, state),
            Timer.RECALL: of_instance(partial(handover.recall_over, state)),
            Timer.OVERDUE: of_instance(partial(handover.overdue, state)),
            Timer.LEAVE: partial(retirement.end_grace_period, state),
            Timer.UNUSED: partial(sleep.check_idle, state),
            Timer.ROOM: _ignore,
            Timer.SCALE: partial(scaling.measure, state),
            Timer.DRAIN: lifecycle.drain_over,
        }

    # ------------------------------------------------------------------------------------ public interface

    def handle(self, turn: Iterable[Event], now: int) -> list[Effect]:
        state = self.state
        effects = state.begin()
        state.now = now
        if state.splits:
            state.choose_versions()
        of_clients, of_workers = self._of_clients, self._of_workers
        instances = state.instances
        remaining = iter(turn)
        peer, message = 0, None
        while True:
            try:
                for peer, message in remaining:
                    if peer < WORKERS_FROM:
                        of_clients[type(message)](peer, message, now)
                    else:
                        known = instances.get(peer)
                        if known is not None and known[1].state is not KILLED:  # killed: ignore late messages
                            of_workers[type(message)](*known, message, now)
                break
            except Exception:
                self._internal_errors.by_event(peer, message)
        self._process_work(now)
        return effects

    def deadline(self) -> int | None:
        if self._queries.waiting or self.state.ledger.departed or self.state.loaded_versions:
            return self.state.now
        return self.state.deadline()

    def tick(self, now: int) -> list[Effect]:
        effects = self.state.begin()
        self.state.now = now
        for kind, subject in self.state.due(now):
            try:
                self._of_timers[kind](subject, now)
            except Exception:
                self._internal_errors.report(f"timer {kind.name}")
        for version, wake in list(self.state.wakes.items()):
            if wake <= now:
                self.state.to_dispatch[version] = None
        self._process_work(now)
        return effects

    def count_leased(self, reading: events.LeaseRead) -> None:
        """Counts leased requests in the statistics at once, for a turn that reports the statistics."""
        leases.count_logged(self.state, reading)

    def log_batches(self, on: bool) -> None:
        """Logs each batch with the reason for which it was formed, and each failed request, from now on."""
        self.state.tracing = on

    def roles_of(self, peer: int) -> int:
        """The roles of a peer. Workers have all roles, because models may send any query and start any operation."""
        if peer >= WORKERS_FROM:
            return ALL_ROLES
        client = self.state.clients.get(peer)
        return client.roles if client is not None else NO_ROLES

    # ------------------------------------------------------------------------------------ the end of a turn

    def _process_work(self, now: int) -> None:
        """The second half of a turn: processes the work lists in `State` that the events have filled. Starts again
        after an internal error, since failed work has left its list."""
        state, changes = self.state, self.state.changes
        while True:
            try:
                if state.ledger.departed:
                    state.ledger.release_departed()
                if state.loading.blocked:
                    unhealthy.hold_blocked(state, now)
                if changes.replaced_versions or changes.replaced_instances or changes.forced_unloads:
                    handover.process(state, now)
                if changes.joined:
                    scaling.joined(state, now)
                if state.loaded_versions:
                    waiting.check(state, self._check, now)
                self._advance_and_dispatch(now)
                if state.memory.limited:
                    for version, reason in room.make_room(state, now):
                        load_results.cannot_fit(state, version, reason, now)
                    self._advance_and_dispatch(now)
                if state.deadlock_possible:
                    state.deadlock_possible = False
                    if state.blocked_instances or state.memory.yielding:
                        self._calls.check_deadlocks()
                        self._advance_and_dispatch(now)
                if changes.unloading_versions or changes.retiring_instances:
                    deployment.finish_unloads(state)
                if changes.to_sleep:
                    sleep.put_unused_to_sleep(state, now)
                if state.readiness_changed:
                    ensemble_readiness.update(state)
                    if state.loaded_versions:
                        waiting.check(state, self._check, now)
                        self._advance_and_dispatch(now)
                if state.leases:
                    leases.revoke_unfit(state)
                if state.offers:
                    leases.settle_offers(state)
                if state.ledger.returned:
                    state.ledger.flush()
                if self._queries.waiting:
                    self._queries.pass_on()
                if state.draining:
                    self._lifecycle.settle_drain()
                return
            except Exception:
                self._internal_errors.report("what follows from events")

    def _advance_and_dispatch(self, now: int) -> None:
        """Advances ensembles and dispatches versions in a loop, since each may cause more of the other, until no work
        is left. Rows of mapped steps beyond `ROWS` are left for the next turn."""
        state, runs = self.state, self.state.runs
        rows = ROWS
        while state.to_dispatch or runs.to_advance or state.answered_calls or (runs.with_rows.users and rows > 0):
            if state.answered_calls:
                self._calls.resume_answered()
            while runs.to_advance:
                run = next(iter(runs.to_advance))
                del runs.to_advance[run]
                self._ensembles.advance(run, now)
            if runs.with_rows.users and rows > 0:
                rows -= self._ensembles.ask_rows(rows, now)
            while state.to_dispatch:
                if state.limiter is None:
                    version, _ = state.to_dispatch.popitem()
                else:
                    version = state.limiter.first(state.to_dispatch)
                    del state.to_dispatch[version]
                if version.asleep and version.queued:
                    sleep.wake(state, version, now)
                if version.service.sequence_slots is None:
                    dispatch.dispatch(state, version, now)
                else:
                    dispatch.refuse_stranded(state, version)
                    sequence_scheduler.dispatch(state, version, now)
                scaler = version.scaler
                if scaler is not None and not scaler.watched:
                    scaling.notice(state, version, scaler, now)

    def _check(self, request: Request, now: int) -> None:
        """Admits a request that has waited for its model to load."""
        message = request.unchecked
        if isinstance(message, Call):
            self._calls.check(request, message, now)
        elif message is not None:
            self._admission.check(request, message, now)

    def _instance_timer(self, handler: Callable[[Version, Instance, int], None], instance: Instance, now: int) -> None:
        """Timers of removed instances are ignored."""
        for model in self.state.models.values():
            for version in model.generations():
                if instance in version.instances:
                    handler(version, instance, now)

    # ------------------------------------------------------------------------------------ for tests and simulations

    def check(self) -> None:
        """Asserts all invariants that must hold between turns. Visits every request."""
        invariants.check(self.state, self._queries)
