"""The core: takes every scheduling decision. It gets events and the time from the shell, and returns effects, which the
shell executes.

    core.handle([(peer, message), (0, event), ...], now) -> effects     one turn: all events since the last one
    core.deadline() -> ns or None                                       when to call tick if no event arrives before
    core.tick(now) -> effects                                           a turn without events: expired timers

A turn first processes all its events, in order, and only then forms batches, so requests that arrive together can share
a batch. Times are CLOCK_MONOTONIC in ns, as in the workers' reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

from shmserve.core import events
from shmserve.core.batching.answers import ResponseMemory
from shmserve.core.batching.dispatch import Dispatcher
from shmserve.core.batching.recall import Recalls
from shmserve.core.calls.calls import ModelCalls
from shmserve.core.effects import Effect
from shmserve.core.ensembles.advance import Ensembles
from shmserve.core.ensembles.readiness import EnsembleReadiness
from shmserve.core.ensembles.steps import StepRequests
from shmserve.core.events import Event
from shmserve.core.internal_errors import InternalErrors
from shmserve.core.limits import Limits
from shmserve.core.models.deployment import Deployments
from shmserve.core.models.handover import Handover
from shmserve.core.models.lifecycle import Lifecycle
from shmserve.core.models.model import Model
from shmserve.core.records import Instance, Places, Request, Sequence, Version
from shmserve.core.requests.admission import Admission
from shmserve.core.requests.cache import Copies
from shmserve.core.requests.completion import Completion, is_stream
from shmserve.core.requests.enqueue import Enqueuer
from shmserve.core.requests.questions import Questions
from shmserve.core.requests.quotas import Quotas
from shmserve.core.requests.responses import ResponseStreams
from shmserve.core.sequences.scheduler import Sequencer
from shmserve.core.state import WORKERS_FROM, State, Subject, Timer
from shmserve.core.states import BatchState, InstanceState, RequestState, SequenceState, VersionState
from shmserve.protocol.messages import (
    Ask,
    Bye,
    Call,
    Cancel,
    Done,
    Hello,
    Infer,
    LoadFailed,
    Map,
    More,
    Ping,
    Pong,
    Return,
    Rows,
    Started,
    Streamed,
    Unmap,
    Withdrawn,
)
from shmserve.protocol.roles import EVERYTHING, NOBODY

_I = InstanceState
KILLED = InstanceState.KILLED
ROWS = 256
"""Limit, per turn, of requests created for rows of mapped steps: about 3 ms of work."""

Handler = Callable[[int, Any, int], None]
"""Called with the peer, the message or event, and the time."""


class Core:
    def __init__(
        self, server: str = "shmserve", limits: Limits | None = None, tracing: bool = False, survive: bool = False
    ) -> None:
        """`server`: name and version, for clients. `tracing`: log why each batch was formed. `survive`: log internal
        errors and continue; otherwise they are raised."""
        self.state = State(limits or Limits())
        self.state.tracing = tracing
        state = self.state
        self._completion = Completion(state)
        answers, recalls = ResponseMemory(state, self._completion), Recalls(state, self._completion)
        self._streams = ResponseStreams(state, self._completion, answers)
        dispatcher = self._dispatcher = Dispatcher(state, self._completion, recalls, answers, self._streams)
        self._sequencer = Sequencer(state, self._completion, dispatcher)
        quotas = Quotas(state)
        self._questions = Questions(state)
        enqueuer = self._enqueuer = Enqueuer(state, self._completion, dispatcher, self._sequencer, quotas)
        self._ensembles = Ensembles(state, self._completion, self._streams, StepRequests(state, enqueuer))
        admission = self._admission = Admission(
            state, self._completion, self._streams, enqueuer, quotas, self._questions, server
        )
        operations = self._operations = Deployments(state)
        self._readiness = EnsembleReadiness(state, operations)
        self._calls = ModelCalls(
            state, self._completion, dispatcher, self._streams, enqueuer, admission, operations, quotas
        )
        lifecycle = self._lifecycle = Lifecycle(
            state, dispatcher, recalls, self._completion, self._streams, operations, self._calls
        )
        self._handover = Handover(state, self._completion, recalls)
        self._internal_errors = InternalErrors(state, admission, survive)
        self._of_clients: dict[type, Handler] = {
            Infer: admission.infer,
            events.Framed: admission.framed,
            Return: admission.give_back,
            Cancel: admission.cancel,
            Hello: admission.hello,
            Ask: admission.ask,
            Map: admission.map,
            Unmap: admission.unmap,
            Ping: admission.ping,
            Pong: admission.pong,
            Bye: admission.bye,
            More: admission.more,
            events.Opened: admission.opened,
            events.Closed: admission.closed,
            events.Garbled: admission.garbled,
            events.Answered: self._questions.answered,
            events.Behind: self._questions.behind,
            events.OwnSegment: admission.own_segment,
            events.OwnSegmentGone: admission.own_segment_gone,
            events.Deploy: operations.deploy,
            events.Refuse: operations.refuse,
            events.Unload: operations.unload,
            events.Restart: operations.restart,
            events.Exited: lifecycle.exited,
            events.Composed: self._readiness.composed,
            events.Drain: lifecycle.drain,
        }
        self._of_workers = self._worker_handlers()

    def _worker_handlers(self) -> dict[type, Handler]:
        admission, calls, lifecycle = self._admission, self._calls, self._lifecycle
        return {
            Done: self._done,
            Rows: self._rows,
            Streamed: self._streamed,
            Started: self._started,
            Withdrawn: self._withdrawn,
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
            Pong: admission.pong,
        }

    def copy_with(self, copies: Copies, clock: Callable[[], int] | None = None) -> None:
        """Enables the response cache to copy tensors from and to shared memory. Call it before the first turn if there
        is a cache. `clock` returns ns, to measure cache lookups and insertions; without it they count as 0."""
        self.state.cache.copies = copies
        if clock is not None:
            self.state.cache.clock = clock

    # ------------------------------------------------------------------------------------ public interface

    def handle(self, turn: Iterable[Event], now: int) -> list[Effect]:
        effects = self.state.begin()
        self.state.now = now
        of_clients, of_workers, instances = self._of_clients, self._of_workers, self.state.instances
        left = iter(turn)
        peer, message = 0, None
        while True:
            try:
                for peer, message in left:
                    if peer < WORKERS_FROM:
                        of_clients[type(message)](peer, message, now)
                    else:
                        known = instances.get(peer)
                        if known is not None and known[1].state is not KILLED:  # killed: ignore late messages
                            of_workers[type(message)](peer, message, now)
                break
            except Exception:
                self._internal_errors.by_event(peer, message)
        self._settle(now)
        return effects

    def deadline(self) -> int | None:
        return self.state.now if self._questions.waiting else self.state.deadline()

    def tick(self, now: int) -> list[Effect]:
        effects = self.state.begin()
        self.state.now = now
        for kind, subject in self.state.due(now):
            try:
                self._timer(kind, subject, now)
            except Exception:
                self._internal_errors.report(f"timer {kind.name}")
        for version, wake in list(self.state.wakes.items()):
            if wake <= now:
                self.state.dirty[version] = None
        self._settle(now)
        return effects

    def _settle(self, now: int) -> None:
        """`_settle_all`, and again after each internal error: the work that failed is no longer in its list."""
        while True:
            try:
                self._settle_all(now)
                return
            except Exception:
                self._internal_errors.report("what follows from events")

    def _settle_all(self, now: int) -> None:
        """The second half of a turn: processes the work lists in `State` that its events have filled."""
        state = self.state
        if state.replaced or state.forced:
            self._handover.settle(now)
        self._go_on(now)
        if state.doubt:
            state.doubt = False
            if state.waiting:
                self._calls.regard(now)
                self._go_on(now)
        if state.leaving or state.parting:
            self._operations.settle_leaving()
        if state.regard:
            self._readiness.regard(now)
        state.ledger.flush()
        self._questions.pass_on()
        if state.draining:
            self._lifecycle.settle_drain()

    def _go_on(self, now: int) -> None:
        """Advances ensembles and dispatches versions until no work is left, as each may cause more of the other. Rows
        of mapped steps beyond `ROWS` are left for the next turn."""
        state = self.state
        rows = ROWS
        while state.dirty or state.changed_runs or state.answered_calls or (state.mapped.users and rows > 0):
            self._calls.settle_answered()
            while state.changed_runs:
                run = next(iter(state.changed_runs))
                del state.changed_runs[run]
                self._ensembles.advance(run, now)
            if state.mapped.users and rows > 0:
                rows -= self._ensembles.ask_rows(rows, now)
            while state.dirty:
                if state.limiter is None:
                    version, _ = state.dirty.popitem()
                else:
                    version = state.limiter.first(state.dirty)
                    del state.dirty[version]
                if version.places is None:
                    self._dispatcher.dispatch(version, now)
                else:
                    self._dispatcher.refuse_stranded(version, now)
                    self._sequencer.dispatch(version, now)

    def _timer(self, kind: Timer, subject: Subject, now: int) -> None:
        if kind is Timer.DRAIN:
            self._lifecycle.drain_over(now)
        elif kind is Timer.IDLE:
            self._sequencer.idle(cast(Sequence, subject), now)
        elif kind is Timer.BACKLOG:
            self._sequencer.backlog_timeout(cast(Sequence, subject))
        elif kind is Timer.LEAVE:
            self._operations.leave(cast("Version | Instance | None", subject))
        elif kind in (Timer.RETRY, Timer.HANG, Timer.LATE, Timer.RECALL, Timer.OVERDUE):
            self._look_at(kind, cast(Instance, subject), now)
        else:
            request = cast(Request, subject)
            if request.state in (RequestState.LINGERING, RequestState.ENDED):
                return  # ended by another timer that expired at the same time
            if kind is Timer.DEADLINE:
                text = "Request timeout expired: the request's own timeout passed before it was answered"
                self._completion.fail_early(request, "DEADLINE_EXCEEDED", text, now)
            elif request.state is RequestState.QUEUED and not request.delayed and not request.suspect:
                self._enqueuer.expire(request, now)
                self.state.dirty[request.version] = None

    def _look_at(self, kind: Timer, instance: Instance, now: int) -> None:
        """Handles a timer of an instance. Timers of removed instances are ignored."""
        for model in self.state.models.values():
            for version in model.generations():
                if instance in version.instances:
                    if kind is Timer.RETRY:
                        self._lifecycle.retry(instance, version)
                    elif kind is Timer.HANG:
                        self._dispatcher.look_at(version, instance, now)
                    elif kind is Timer.RECALL:
                        self._handover.recall_over(version, instance, now)
                    elif kind is Timer.OVERDUE:
                        self._handover.overdue(version, instance, now)
                    else:
                        self._lifecycle.late(instance, version, now)

    # ------------------------------------------------------------------------------------ workers' reports

    def _done(self, peer: int, message: Done, now: int) -> None:
        version, instance = self.state.instances[peer]
        self._dispatcher.done(version, instance, message, now)

    def _rows(self, peer: int, message: Rows, now: int) -> None:
        version, instance = self.state.instances[peer]
        self._dispatcher.rows(version, instance, message, now)

    def _streamed(self, peer: int, message: Streamed, now: int) -> None:
        version, instance = self.state.instances[peer]
        self._streams.streamed(version, instance, message, now)

    def _started(self, peer: int, message: Started, now: int) -> None:
        version, instance = self.state.instances[peer]
        self._dispatcher.started(version, instance, message, now)

    def _withdrawn(self, peer: int, message: Withdrawn, now: int) -> None:
        version, instance = self.state.instances[peer]
        self._dispatcher.withdrawn(version, instance, message, now)

    # ------------------------------------------------------------------------------------ invariants

    def roles_of(self, peer: int) -> int:
        """The roles of a peer. Workers have all, because models may ask all questions and start all operations."""
        if peer >= WORKERS_FROM:
            return EVERYTHING
        client = self.state.clients.get(peer)
        return client.roles if client is not None else NOBODY

    def check(self) -> None:
        """Asserts all invariants that must hold between turns. Only for tests and simulations: visits every request."""
        state = self.state
        instances = state.instances.items()
        callers = {peer: instance.caller for peer, (_, instance) in instances if instance.caller is not None}
        state.ledger.check(state.clients | callers)
        self._questions.check(state.clients.keys() | state.instances.keys())
        for peer, caller in callers.items():
            held = [number for number in caller.requests.values() if state.requests[number].held]
            instance = state.instances[peer][1]
            assert caller.number == peer
            assert caller.waits_for == len(held), instance.story()
            assert (instance in state.waiting) == bool(held), instance.story()
        assert not state.dirty
        queued: dict[object, int] = {}
        for number, request in state.requests.items():
            story = request.story()
            assert request.number == number
            if request.state is RequestState.QUEUED:
                queued[request.version] = queued.get(request.version, 0) + 1
                waits: Iterable[Request] = (
                    request.version.suspects if request.suspect else request.version.queue.in_order()
                )
                if request.sequence is not None:
                    waits = request.sequence.requests
                assert request in waits, story
            elif number in state.runs:
                self._check_run(request, story)
            elif request.state is RequestState.DONE:
                assert request.reply is not None, story
                assert request.version.order, story
                assert request in list(request.version.order)[1:], story
            elif request.instance is not None and number in request.instance.streams:
                assert request.state in (RequestState.OPEN, RequestState.LINGERING), story
                assert request.batch is None, story
            else:
                assert request.state in (RequestState.SENT, RequestState.LINGERING), story
                assert request.instance is not None, story
                assert request.batch in request.instance.batches(), story
            if request.step_of:
                assert state.runs[request.step_of].out.get(request.number) is request, story
            elif request.state is not RequestState.LINGERING:
                assert request.client.requests.get(request.client_number) == request.number, story
        abandoned = (r for r in state.requests.values() if r.state is RequestState.LINGERING and is_stream(r))
        assert state.abandoned == Counter(request.client.user for request in abandoned)
        self._check_sequences()
        state.cache.check()
        if state.limiter is not None:
            state.limiter.check()
        for client in (*state.clients.values(), *callers.values()):
            assert not client.gone
            steps = [request for request in state.requests.values() if request.client is client and request.step_of]
            own = [state.requests[number] for number in client.requests.values()]
            assert client.bytes == sum(request.inline for request in (*own, *steps))
        for model in state.models.values():
            generations = model.generations()
            assert len(generations) == len(set(generations)), model.name
            for version in generations:
                assert (version in state.leaving) == (version.state is VersionState.UNLOADING), version.label
                assert version.waits == queued.get(version, 0), version.label
                if version.trial is not None:
                    assert version.trial.running is not None, version.label
                    assert version.trial.running.count == 1, version.label
                assert version.queue.count == len(version.queue.in_order()), version.label
                if version.padding is not None and version.policy is not None:
                    assert all(r.passed <= version.policy.max_batch for r in version.queue.in_order()), version.label
                for instance in version.instances:
                    self._check_instance(version.idle, instance)
                self._check_alive(version)
            self._check_operation(model)

    def _check_run(self, request: Request, story: str) -> None:
        run = self.state.runs[request.number]
        assert run.request is request, story
        assert request.state in (RequestState.CHAINED, RequestState.LINGERING), story
        assert run.spots.keys() == run.out.keys(), story
        assert run.over == (request.state is RequestState.LINGERING), story
        assert run.out or run.mapped or run.waits_for_room, f"nothing is in flight for it: {story}"
        assert not run.results, story
        assert not run.ready or run.over, story
        assert not run.mapped or run.over or run in self.state.mapped.members(), story
        for number, step in run.out.items():
            assert self.state.requests[number] is step, story
        for iteration in run.iterations():
            for name, kept in iteration.tensors.items():
                assert kept.readers > 0, f"'{name}' is kept without a reader: {story}"

    def _check_sequences(self) -> None:
        for key, sequence in self.state.sequences.items():
            assert sequence.key == key
            assert sequence.broken is None, sequence.story()
            assert sequence in cast(Places, sequence.version.places).all(), sequence.story()
        for instance, version in self.state.parting.items():
            assert instance.leaving, instance.story()
            assert instance in version.instances, instance.story()
        versions = [version for model in self.state.models.values() for version in model.generations()]
        for places in [version.places for version in versions if version.places is not None]:
            assert not places.changed
            assert places.bytes == sum(request.inline for sequence in places.all() for request in sequence.requests)
            for sequence in places.all():
                assert not (sequence.over and sequence.idle), sequence.story()
                assert (sequence.state is SequenceState.BOUND) == (sequence.instance is not None), sequence.story()
                assert sequence.broken is None or sequence.running is not None, sequence.story()
                for request in sequence.requests:
                    assert request.sequence is sequence, sequence.story()
                    assert request.state is RequestState.QUEUED, sequence.story()
                if sequence.running is not None:
                    assert sequence.running.instance is sequence.instance, sequence.story()

    def _check_operation(self, model: Model) -> None:
        operation = model.operation
        assert not model.coming or operation is not None, f"versions of '{model.name}' are coming without an operation"
        if operation is not None:
            assert operation.loading or operation.starting, f"an operation on '{model.name}' waits for nothing"
            for version in operation.loading:
                assert version.state is VersionState.LOADING, version.label
        for version in model.leaving:
            assert version.state is VersionState.UNLOADING or not version.gone, version.label

    def _check_alive(self, version: Version) -> None:
        """A READY version has an instance that is alive, and no request waits for a version that cannot run it."""
        if version.state is VersionState.READY and version.instances and not self.state.draining:
            assert not all(instance.over for instance in version.instances), (
                f"{version.label} is READY without any instance"
            )
        serving = [instance for instance in version.instances if not (instance.over or instance.spec.passive)]
        lost = [instance for instance in serving if instance.lost]
        if version.state is VersionState.READY and lost:
            assert version.alive, f"{version.label} is READY: {version.trouble}"
        if version.state is VersionState.UNAVAILABLE:
            assert not version.waits, f"{version.label}: no instance will run its queued requests"
            assert not any(instance.usable for instance in serving), f"{version.label}: {version.trouble}"
        if version.state in (VersionState.READY, VersionState.UNAVAILABLE) and not self.state.draining:
            assert all(i.peer or i.state in (_I.BACKOFF, _I.WAITING) for i in serving), (
                f"{version.label} has an instance that is not restarted"
            )

    def _check_instance(self, idle: list[Instance], instance: Instance) -> None:
        story = instance.story()
        known = self.state.instances.get(instance.peer)
        assert (known is not None and known[1] is instance) == bool(instance.peer), story
        assert not instance.lost or instance.state is not _I.READY, story
        if instance.quarantined and not instance.over:
            assert instance.waiting is None, story
            assert instance.running is None or instance.running.count == 1, story
        assert idle.count(instance) == int(instance.usable and instance.idle), story
        if instance.running is not None:
            assert instance.running.state is BatchState.RUNNING, story
        if instance.waiting is not None:
            assert instance.waiting.state is BatchState.OPEN, story
        for batch in instance.batches():
            assert instance.peer, story
            left = batch.requests()
            assert batch.left == len(left), story
            assert batch.left or batch.state is BatchState.RUNNING, story
            assert batch.rows == sum(r.cost for _, piece in batch.pieces for r in piece if r.batch is batch), story
