"""Worker processes: loading, crashes, restarts, and the drain. deployment.py, loading.py, retirement.py and
room.py decide which ones should run."""

from __future__ import annotations

from shmserve.core.batching import dispatch, leases
from shmserve.core.effects import Drained
from shmserve.core.events import Compiled, Drain, Exited, Garbled
from shmserve.core.exit import exit, responses
from shmserve.core.intake import waiting
from shmserve.core.intake.queries import QueryQueue
from shmserve.core.limits import pause_ns
from shmserve.core.models import deployment, load_results, loading, retirement, sleep, unhealthy
from shmserve.core.records import Batch, Instance, Request, Version
from shmserve.core.state import STOPPING, State, Timer
from shmserve.core.states import InstanceState, RequestState, VersionState
from shmserve.core.termination import kill
from shmserve.errors import HandleLost, ServeError
from shmserve.protocol.messages import Failure, Map, Unmap
from shmserve.protocol.worker_messages import LoadFailed, Stop

_I, _V = InstanceState, VersionState


class Lifecycle:
    def __init__(self, state: State, queries: QueryQueue) -> None:
        self._state = state
        self._queries = queries

    # ------------------------------------------------------------------------------------ loading

    def compiled(self, version: Version, instance: Instance, event: Compiled, now: int) -> None:
        """A worker has loaded its model."""
        if instance.state is not _I.STARTING:
            return
        recovers = version.recovering
        instance.move(_I.READY)
        instance.loaded = True
        instance.ready_since = now
        version.sleep_state.loaded(now - instance.spawned)
        if instance.sleeping:
            sleep.has_woken(self._state, version, instance, now)
        if version.policy is None:
            version.apply_policy(event.policy, self._state.limits)
        if instance.usable:
            version.idle.append(instance)
        if self._state.limiter is not None:
            self._state.limiter.register(instance.spec)
        was_lost, instance.lost = instance.lost, False
        if version.state is _V.LOADING and version.loaded:
            load_results.version_loaded(self._state, version, now)
            unhealthy.load_over(self._state, version)
        elif was_lost:
            self._is_back(version, instance)
        if recovers and instance.usable:
            if version.took_ns:
                version.move(_V.READY)
                self._state.refresh(version.model)
            else:
                load_results.version_loaded(self._state, version, now)
        self._state.to_dispatch[version] = None
        version.settle_sleep()
        loading.load_over(self._state, instance)
        deployment.has_loaded(self._state, version, instance)
        sleep.serves(self._state, version, now)

    def _is_back(self, version: Version, instance: Instance) -> None:
        """Logs that an instance whose restarts had failed has recovered. A quarantined one recovers only with a
        completed batch."""
        if not instance.quarantined:
            ready, wanted = version.counts
            text = f"instance '{instance.spec.name}' of {version.label} serves again (READY {ready}/{wanted})"
            self._state.log_version("info", text, version, instance)

    def load_failed(self, version: Version, instance: Instance, message: LoadFailed, now: int) -> None:
        """Stores the error; it is handled when the process has ended."""
        instance.load_error = f"failed to load: {message.text}"
        version.traceback = message.trace

    # ------------------------------------------------------------------------------------ deaths

    def exited(self, peer: int, event: Exited, now: int) -> None:
        known = self._state.instances.pop(event.peer, None)
        if known is None:
            return
        version, instance = known
        instance.peer = 0
        instance.revoked = set()
        self._state.changes.retiring_instances.pop(instance, None)
        if instance in version.idle:
            version.idle.remove(instance)
        self._queries.gone(event.peer)
        caller, instance.caller = instance.caller, None
        if caller is not None:
            caller.gone = True
            self._state.blocked_instances.pop(instance, None)
        self._state.deadlock_possible = True
        self._count_uptime(instance, now)
        explained = self._lose_batches(version, instance, event.reason)
        if caller is not None:
            exit.cancel_all(self._state, caller)
            self._state.ledger.client_died(caller)
        lost = self._state.ledger.worker_died(event.peer)
        if lost:
            self._lose_tensors(lost, instance)
        self._state.memory.free(instance)
        self._handle_exit(version, instance, event, explained, now)
        version.settle_sleep()
        loading.load_over(self._state, instance)
        deployment.complete_departures(self._state, self._state.models[version.model])
        self._state.to_dispatch[version] = None

    def _handle_exit(self, version: Version, instance: Instance, event: Exited, explained: bool, now: int) -> None:
        """Decides whether the end of a process was expected, is final, or needs a restart. `explained`: the cause is a
        request that has already killed another worker."""
        load_error = reported_error = instance.load_error or event.loading_error
        if instance.state is _I.STARTING and not load_error:
            load_error = f"its worker process ended while loading: {event.reason}"
        instance.last_words = "\n".join(text for text in (event.detail, version.traceback) if text)
        finishes = version.state is _V.UNLOADING and not instance.sleeping
        if finishes:  # it ends, or its GPU has recovered and it may finish the version's work
            instance.held = False
        if instance.asleep_soon and not instance.retiring:
            sleep.fell_asleep(self._state, version, instance, event.reason)
        elif self._state.draining:
            instance.move(_I.STOPPED)
            self._no_more(version)
        elif instance.state is _I.STOPPING or instance.retiring:
            serves = instance.retiring and instance.state is _I.READY
            if serves or event.reason.startswith("signal "):  # not a signal that the server sent
                ended = "ended" if serves else "ended while stopping"
                text = f"worker of {version.label} instance '{instance.spec.name}' {ended}: {event.reason}"
                self._state.log("error", text, **load_results.log_fields(version, instance))
            instance.move(_I.STOPPED)
            retirement.remove_stopped(version, instance)
        elif not finishes and (instance.held or self._state.loading.forbids(instance.spec)):
            if instance.loaded and not instance.sleeping:
                self._state.observers.restarted(version, instance)
            unhealthy.ended(self._state, version, instance, now)
        elif instance.sleeping:
            fields = load_results.log_fields(version, instance)
            if reported_error or instance.deaths:
                sleep.wake_failed(self._state, version, instance, load_error or event.reason, now, fields)
            else:
                sleep.died_waking(self._state, version, instance, event.reason, fields)
        elif version.state is _V.UNLOADING:
            alone = not any(other.alive for other in version.instances if other is not instance)
            broken = load_error or instance.deaths or self._state.loading.forbids(instance.spec)
            if alone and (version.waits or version.users) and not broken:
                self._crashed(version, instance, event.reason, explained, now)
            else:
                version.explain(f"instance '{instance.spec.name}': {load_error or event.reason}")
                instance.move(_I.STOPPED)
        elif not instance.loaded or (load_error and version.state is _V.LOADING):
            load_results.failed_to_load(self._state, version, instance, load_error or event.reason, now)
        elif load_error:
            self._not_restarted(version, instance, load_error, now)
        else:
            self._crashed(version, instance, event.reason, explained, now)

    def _lose_batches(self, version: Version, instance: Instance, reason: str) -> bool:
        """Retries or fails the requests of a dead worker. True: the request that it ran alone has already killed
        another worker, which explains both deaths."""
        service = version.service
        running, waiting = instance.running, instance.waiting
        alone = _ran_alone(instance)
        instance.running = instance.waiting = None
        dispatch.release_resources(self._state, instance)
        if instance.lease:
            self._lose_lease(version, instance, reason)
        if version.trial is instance:
            version.trial = None
        if instance.held:
            self._run_elsewhere(version, running)
        again = not alone or (not instance.hung and self._may_run_again(version, instance))
        explained = False
        for request in running.requests() if running is not None else ():
            if again and self._may_retry(version, request):
                request.take_back()
                version.suspect(request, instance)
            else:
                first = request.suspect
                if first is not None:
                    explained, first.unexplained = first.unexplained, False
                exit.fail(self._state, request, "MODEL_FAILED", _lost(version, instance, request, alone, reason))
        for request in waiting.requests() if waiting is not None else ():  # not started yet
            if request.state is RequestState.SENT:
                dispatch.put_back(self._state, version, request)
            else:
                exit.released(self._state, request)
        for batch in (running, waiting):
            if batch is not None:
                batch.end()
        if instance.streams:
            responses.lost(self._state, version, instance, reason)
        if service.sequence_slots is not None:
            service.sequence_slots.lose(instance, f"the worker process with its state ended ({reason})")
        if service.order is not None:
            exit.respond_in_order(self._state, version)
        return explained

    def _run_elsewhere(self, version: Version, running: Batch | None) -> None:
        """Queues the requests of a batch again whose worker was killed because of its GPU. They are not to blame."""
        for request in running.requests() if running is not None else ():
            if request.suspect is not None and request.state is RequestState.SENT:
                request.take_back()
                version.suspects.append(request)
            elif self._may_retry(version, request):
                dispatch.put_back(self._state, version, request)

    def _lose_lease(self, version: Version, instance: Instance, reason: str) -> None:
        """Ends the lease of a dead worker. A request that it was running fails or is retried by its client, under the
        same rules as a request that the broker had sent."""
        retry = version.policy is not None and version.policy.retry
        if retry and not instance.hung and (instance.held or self._may_run_again(version, instance)):
            leases.detach(self._state, instance)
        else:
            text = _lost(version, instance, None, True, reason)
            leases.detach(self._state, instance, Failure("MODEL_FAILED", text))

    def _may_run_again(self, version: Version, instance: Instance) -> bool:
        """True if another instance, or the next process of this one, can run a request that was alone when its worker
        crashed. A request that hung is not retried: it would most likely block that one, too, for the whole execution
        limit."""
        restarts = not (self._state.draining or instance.over)
        return restarts or any(
            other.usable and not other.retiring and not other.quarantined
            for other in version.instances
            if other is not instance
        )

    def _lose_tensors(self, lost: set[int], instance: Instance) -> None:
        """Fails requests with these tensors as inputs: queued ones cannot read them, running ones may read anything."""
        text = f"a tensor was on the GPU of instance '{instance.spec.name}', whose worker process has ended"
        for request in list(self._state.requests.values()):
            if request.state in (RequestState.QUEUED, RequestState.SENT) and not lost.isdisjoint(request.segments):
                exit.fail_early(self._state, request, HandleLost.code, text)

    def _may_retry(self, version: Version, request: Request) -> bool:
        """True if the request may be retried: only if it has not killed a worker before, none of its responses were
        sent, no sequence state was lost, and the model allows retries."""
        if request.state is not RequestState.SENT or request.suspect is not None:
            return False
        if request.sequence is not None or request.parts:
            return False
        return version.policy is not None and version.policy.retry

    def _crashed(self, version: Version, instance: Instance, reason: str, explained: bool, now: int) -> None:
        """Schedules a restart: immediately, then with increasing back-off. After the crash limit the instance counts as
        broken."""
        self._state.observers.restarted(version, instance)
        if not explained:
            if not instance.crashes:
                instance.batches_at_first_crash = version.statistics.execution_count
            instance.crashes += 1
            instance.deaths += 1
        crashes, limit = instance.crashes, version.crash_limit
        text = f"worker of {version.label} instance '{instance.spec.name}' ended: {reason}"
        again = f", {crashes} times in a row" if crashes > 1 else ""
        instance.lost = 0 < limit <= crashes
        if instance.lost and version.state is _V.LOADING:
            load_results.give_up(
                self._state, version, instance, f"instance '{instance.spec.name}' ended{again}, the last time: {reason}"
            )
            return
        self._await_restart(version, instance, reason + again, now)
        others_answer = version.statistics.execution_count > instance.batches_at_first_crash
        if instance.lost and others_answer and not instance.quarantined:
            instance.quarantined = True
            ready, wanted = version.counts
            again += f"; it is quarantined (READY {ready}/{wanted}), as other instances complete batches"
            self._log_restart(version, instance, "critical", text + again)
        else:
            self._log_restart(version, instance, "error", text + again)

    def _not_restarted(self, version: Version, instance: Instance, reason: str, now: int) -> None:
        """Handles an instance that was READY before and could not load again."""
        self._state.observers.restarted(version, instance)
        instance.deaths += 1
        instance.lost = True
        self._await_restart(version, instance, reason, now)
        text = f"instance '{instance.spec.name}' of {version.label} could not be restarted: {reason}"
        self._log_restart(version, instance, "error", text)

    def _count_uptime(self, instance: Instance, now: int) -> None:
        """Resets the crash counters if the instance had been up long enough before the batch in which it died."""
        until = instance.running.began if instance.running is not None else now
        if instance.ready_since and until - instance.ready_since >= self._state.limits.backoff_max_ns:
            instance.forgive()

    def _await_restart(self, version: Version, instance: Instance, reason: str, now: int) -> None:
        limits = self._state.limits
        instance.explain(reason)
        load_results.back_off(
            self._state, version, instance, pause_ns(instance.deaths, limits.backoff_ns, limits.backoff_max_ns), now
        )

    def _log_restart(self, version: Version, instance: Instance, level: str, text: str) -> None:
        """Writes the log entry about this death and its effect on the version."""
        if retirement.settle_lost(self._state, version):
            text += f"; {version.label} is UNAVAILABLE"
        pause = instance.retry_at - self._state.now
        text += f"; next attempt in {pause / 1e9:g} s" if pause else ""
        self._state.log(level, text, **load_results.log_fields(version, instance))

    def retry(self, version: Version, instance: Instance, now: int) -> None:
        if instance.state is _I.ASLEEP and instance.retry_at <= now:
            sleep.may_wake_again(self._state, version, instance)
        elif instance.state is _I.BACKOFF and instance.retry_at <= now and not self._state.draining:
            loading.start_again(self._state, version, instance)

    def late(self, version: Version, instance: Instance, now: int) -> None:
        """The load timer. The instance may have a newer process than the one for which the timer was set."""
        limit = self._state.limits.load_ns
        if instance.state is _I.STARTING and instance.spawned + limit <= now:
            instance.load_error = f"it did not load within {limit / 1e9:g} s (--load-limit-secs)"
            kill(self._state, version, instance, instance.load_error)

    # ------------------------------------------------------------------------------------ workers' memory

    def map(self, version: Version, instance: Instance, message: Map, now: int) -> None:
        try:
            self._state.ledger.announce(instance.peer, message, message.audience)
        except ServeError as error:
            kill(self._state, version, instance, f"it violated the protocol: {error}")

    def unmap(self, version: Version, instance: Instance, message: Unmap, now: int) -> None:
        try:
            self._state.ledger.withdraw(instance.peer, message.segment)
        except ServeError as error:
            kill(self._state, version, instance, f"it violated the protocol: {error}")

    def garbled(self, version: Version, instance: Instance, event: Garbled, now: int) -> None:
        kill(self._state, version, instance, f"it violated the protocol: {event.text}")

    # ------------------------------------------------------------------------------------ drain

    def drain(self, peer: int, event: Drain, now: int) -> None:
        """Begins or shortens the drain: a later Drain can only end the grace period sooner."""
        if self._state.draining:
            self._state.set_timer(now + event.limit_ns, Timer.DRAIN, None)
            return
        self._state.draining = True
        for model in self._state.models.values():
            deployment.interrupt(self._state, model)
            for version in model.generations():
                for instance in version.instances:
                    if instance.state in (_I.BACKOFF, _I.WAITING) and not instance.sleeping:
                        instance.move(_I.STOPPED)
                        self._state.memory.free(instance)
                if version.state is _V.LOADING:
                    waiting.fail(self._state, version, STOPPING)
                self._no_more(version)
        self._state.set_timer(now + event.limit_ns * 3 // 4, Timer.LEAVE, None)
        self._state.set_timer(now + event.limit_ns, Timer.DRAIN, None)

    def drain_over(self, _: None, now: int) -> None:
        """The grace period is over: fails all remaining requests and kills all workers."""
        text = "the server stopped before this request completed (--exit-timeout-secs)"
        for request in list(self._state.requests.values()):
            exit.fail_early(self._state, request, "UNAVAILABLE", text)
        for version, instance in list(self._state.instances.values()):
            leases.fail(self._state, instance, "UNAVAILABLE", text)
            kill(self._state, version, instance, "it did not stop in time")

    def _no_more(self, version: Version) -> None:
        """Fails the queued requests of a version that has no worker left, since workers are not restarted during a
        drain."""
        if not any(instance.peer or (instance.sleeping and not instance.over) for instance in version.instances):
            text = f"{STOPPING}, and no worker of '{version.model}' is left to run this request"
            dispatch.empty_queue(self._state, version, text)

    def settle_drain(self) -> None:
        """After each turn of a drain: stops the workers when the last request is done, then reports Drained."""
        state = self._state
        if not (state.requests or state.sequences or state.leases):  # a leased request may call any model
            for peer, (version, instance) in state.instances.items():
                version.idle.clear()
                if instance.state in (_I.STARTING, _I.READY):
                    instance.move(_I.STOPPING)
                    state.send(peer, Stop())
        if not (state.instances or state.requests or state.leases or state.drained):
            state.drained = True
            state.effects.append(Drained())


def _ran_alone(instance: Instance) -> bool:
    """True if only one request can have ended the worker. On a GPU, the next batch may have begun, although its start
    is not reported yet; but a batch that hangs does not let the next one run."""
    if instance.running is None or instance.running.count != 1:
        return False
    return instance.waiting is None or instance.hung or not instance.spec.on_gpu


def _lost(version: Version, instance: Instance, request: Request | None, alone: bool, reason: str) -> str:
    text = f"{version.label}: the worker process of instance '{instance.spec.name}' ended while it"
    if not alone:
        return f"{text} had this request ({reason})"
    first = request.suspect if request is not None else None
    again = f"; so did that of instance '{first.spec.name}' before" if first is not None else ""
    return f"{text} ran this request alone ({reason}){again}"
