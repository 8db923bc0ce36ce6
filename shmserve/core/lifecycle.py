"""Worker processes: loaded, lost, started again, drained. What is to run at all is decided in operations.py."""

from __future__ import annotations

from typing import Any

from shmserve.core.calls import Calls
from shmserve.core.dispatch import Dispatcher
from shmserve.core.effects import Drained
from shmserve.core.ends import Ends
from shmserve.core.events import Compiled, Drain, Exited, Garbled
from shmserve.core.instances import Instance
from shmserve.core.operations import Operations
from shmserve.core.request import Request
from shmserve.core.state import STOPPING, State, Timer
from shmserve.core.states import InstanceState, RequestState, VersionState
from shmserve.core.streams import Streams
from shmserve.core.versions import Version
from shmserve.errors import HandleLost, ServeError
from shmserve.messages import LoadFailed, Map, Stop, Unmap

_I, _V = InstanceState, VersionState


def pause_ns(deaths: int, second: int, most: int) -> int:
    """Before what has ended so often in a row is started again: at once, then after `second`, doubled for each more."""
    return min(second << (deaths - 2), most) if deaths > 1 else 0


class Lifecycle:
    def __init__(
        self, state: State, dispatcher: Dispatcher, ends: Ends, streams: Streams, operations: Operations, calls: Calls
    ) -> None:
        self._state = state
        self._dispatcher = dispatcher
        self._ends = ends
        self._streams = streams
        self._operations = operations
        self._calls = calls

    # ------------------------------------------------------------------------------------ loading

    def compiled(self, peer: int, event: Compiled, now: int) -> None:
        """A worker has loaded its model."""
        version, instance = self._state.instances[peer]
        if instance.state is not _I.STARTING:
            return
        instance.move(_I.READY)
        instance.loaded = True
        if version.policy is None:
            version.adopt(event.policy, self._state.cache.limit > 0)
            own = event.policy.execution_limit_ns
            version.limit_ns = self._state.limits.execution_ns if own is None else own
        if instance.usable:
            version.idle.append(instance)
        if self._state.limiter is not None:
            self._state.limiter.know(instance.spec)
        if version.state is _V.LOADING and version.loaded:
            version.move(_V.READY)
            version.took_ns = max(now - version.began, 1)
            loads = self._state.models[version.model].loads
            loads.done += 1
            loads.done_ns += version.took_ns
            self._state.refresh(version.model)
            text = f"{version.label} is READY with {len(version.instances)} instance(s)"
            self._state.log("debug", text, model=version.model, version=version.number)
        self._state.dirty[version] = None
        self._operations.load_over(instance)
        self._operations.has_loaded(version, instance)

    def load_failed(self, peer: int, message: LoadFailed, now: int) -> None:
        """Its process ends now; what follows from that is decided then."""
        _, instance = self._state.instances[peer]
        instance.load_error = f"failed to load: {message.text}"

    def _failed_to_load(self, version: Version, instance: Instance, reason: str, now: int) -> None:
        instance.reason = reason
        if version.state is _V.READY:
            instance.move(_I.FAILED)
            version.instances.remove(instance)
            self._operations.has_failed(version, reason, instance)
        elif version.retries < self._state.limits.load_retries:
            version.retries += 1
            text = f"{version.label} is tried again (--model-load-retry-count): {reason}"
            self._state.log("warning", text, **_about(version, instance))
            self._back_off(instance, self._state.limits.backoff_ns, now)
        else:
            self._give_up(version, instance, reason, now)

    def _give_up(self, version: Version, instance: Instance, reason: str, now: int) -> None:
        """This instance will not run. Its version goes with it, as it was promised with all its instances."""
        instance.reason = reason
        instance.move(_I.FAILED)
        if version.state in (_V.LOADING, _V.READY):
            self._state.models[version.model].loads.failed += version.state is _V.LOADING
            version.move(_V.UNAVAILABLE, reason)
            self._state.cache.purge(version)
            self._state.refresh(version.model)
            if self._state.models[version.model].versions.get(version.number) is version:
                text = f"{version.label} is UNAVAILABLE: {reason}"
                self._state.log("error", text, **_about(version, instance, not instance.loaded))
        for other in list(version.instances):
            self._operations.stop(version, other)
        version.idle.clear()
        self._refuse_waiting(version, reason, now)
        self._operations.has_failed(version, reason)

    def _refuse_waiting(self, version: Version, reason: str, now: int) -> None:
        text = f"Request for unknown model: '{version.model}' version {version.number} is not at ready state: {reason}"
        self._empty_queue(version, text, now)

    def _empty_queue(self, version: Version, text: str, now: int) -> None:
        """Nobody will come to run what waits."""
        waiting = [*version.queue.take(version.queue.count), *version.suspects]
        version.suspects.clear()
        for request in waiting:
            self._ends.end_early(request, "UNAVAILABLE", text, now)
        if version.places is not None:
            version.places.lose(None, text)
        self._state.dirty[version] = None

    # ------------------------------------------------------------------------------------ deaths

    def exited(self, peer: int, event: Exited, now: int) -> None:
        found = self._state.instances.pop(event.peer, None)
        if found is None:
            return
        version, instance = found
        instance.peer = 0
        self._state.parting.pop(instance, None)
        if instance in version.idle:
            version.idle.remove(instance)
        caller = self._calls.ended(instance)
        self._state.doubt = True
        named = self._lose_batches(version, instance, event.reason, now)
        if caller is not None:
            self._calls.gone(caller, now)
        lost = self._state.ledger.worker_died(event.peer)
        if lost:
            self._lose_tensors(lost, instance, now)
        self._what_now(version, instance, event, named, now)
        self._operations.load_over(instance)
        self._operations.look_after(self._state.models[version.model])
        self._state.dirty[version] = None

    def _what_now(self, version: Version, instance: Instance, event: Exited, named: bool, now: int) -> None:
        """Its process has ended: was that expected, is it the end of it, or shall there be another? `named`: it is
        known which request has ended it."""
        load_error = instance.load_error or event.loading_error
        instance.last_words = event.detail
        if self._state.draining:
            instance.move(_I.STOPPED)
            self._no_more(version, now)
        elif instance.state is _I.STOPPING or instance.leaving or version.state is _V.UNAVAILABLE:
            if instance.leaving and instance.state is _I.READY:
                text = f"worker of {version.label} instance '{instance.spec.name}' ended: {event.reason}"
                self._state.log("error", text, **_about(version, instance))
            instance.move(_I.STOPPED)
            self._operations.remove_stopped(version, instance)
            if version.state is _V.UNAVAILABLE and version.waits:  # what it had is back in a queue that nobody serves
                self._refuse_waiting(version, version.reason, now)
        elif version.state is _V.UNLOADING and not self._is_missed(version):
            instance.move(_I.STOPPED)
        elif not instance.loaded:
            text = load_error or f"its worker process ended while loading: {event.reason}"
            self._failed_to_load(version, instance, text, now)
        elif load_error:
            self._give_up(version, instance, load_error, now)
        else:
            self._crashed(version, instance, event, named, now)

    def _is_missed(self, version: Version) -> bool:
        """Something waits, and no other instance will come to run it."""
        return version.waits > 0 and not any(
            other.peer or other.state is _I.BACKOFF
            for other in version.instances
            if not (other.spec.passive or other.over)
        )

    def _lose_batches(self, version: Version, instance: Instance, reason: str, now: int) -> bool:
        """What becomes of the requests that the worker had. True: it is known which of them has ended it."""
        running, waiting = instance.running, instance.waiting
        instance.running = instance.waiting = None
        self._dispatcher.stopped(instance)
        if version.trial is instance:
            version.trial = None
        alone = running is not None and running.count == 1
        for request in running.requests() if running is not None else ():
            if not alone and self._may_retry(version, request):
                self._suspect(version, instance, request)
            else:
                self._ends.end_failed(request, "MODEL_FAILED", _lost(version, instance, request, alone, reason), now)
        for request in waiting.requests() if waiting is not None else ():  # it had not been begun
            if request.state is RequestState.SENT:
                self._take_back(request)
                version.queue.put_back(request)
            else:
                self._ends.end_failed(request, "", "", now)
        for batch in (running, waiting):
            if batch is not None:
                batch.end()
        if instance.streams:
            self._streams.lost(version, instance, reason, now)
        if version.places is not None:
            version.places.lose(instance, f"the worker process that kept its state ended ({reason})")
        if version.order is not None:
            self._ends.answer_in_order(version)
        return alone

    def _lose_tensors(self, lost: set[int], instance: Instance, now: int) -> None:
        """Who was to read them cannot, and who reads them now may read anything."""
        text = f"a tensor was on the GPU of instance '{instance.spec.name}', whose worker process has ended"
        for request in list(self._state.requests.values()):
            if request.state in (RequestState.QUEUED, RequestState.SENT) and not lost.isdisjoint(request.segments):
                self._ends.fail_early(request, HandleLost.code, text, now)

    def _may_retry(self, version: Version, request: Request) -> bool:
        """Nobody has had a part of its answer, and no state was lost with the worker."""
        if request.state is not RequestState.SENT or request.sequence is not None or request.parts:
            return False
        return version.policy is not None and version.policy.retry

    def _take_back(self, request: Request) -> None:
        request.move(RequestState.QUEUED)
        request.instance = request.batch = None

    def _suspect(self, version: Version, instance: Instance, request: Request) -> None:
        self._take_back(request)
        request.suspect = True
        version.suspects.append(request)
        if version.quarantine is None or version.quarantine.over:
            version.quarantine = instance

    def _crashed(self, version: Version, instance: Instance, event: Exited, named: bool, now: int) -> None:
        """Start again: at once, then with growing pauses, then not any more. A death that one request is to blame for
        does not count: the model is as good as before."""
        limits = self._state.limits
        instance.deaths += not named
        instance.restarts += 1
        restarts, name = version.statistics.restarts, instance.spec.name
        restarts[name] = restarts.get(name, 0) + 1
        instance.reason = event.reason
        text = f"worker of {version.label} instance '{name}' ended: {event.reason}"
        self._state.log("error", text, **_about(version, instance))
        if instance.deaths > limits.restarts:
            text = (
                f"instance '{instance.spec.name}' ended {instance.deaths} times in a row, the last time: {event.reason}"
            )
            self._give_up(version, instance, text, now)
            return
        pause = 0 if named else pause_ns(instance.deaths, limits.backoff_ns, limits.backoff_max_ns)
        self._back_off(instance, pause, now)

    def _back_off(self, instance: Instance, pause: int, now: int) -> None:
        instance.move(_I.BACKOFF)
        instance.load_error = ""
        instance.retry_at = now + pause
        self._state.set_timer(instance.retry_at, Timer.RETRY, instance)

    def retry(self, instance: Instance, version: Version) -> None:
        if instance.state is _I.BACKOFF and not self._state.draining:
            self._operations.spawn(version, instance)

    def late(self, instance: Instance, version: Version, now: int) -> None:
        """A timer set when a process of this instance was started; it may be another one by now."""
        limit = self._state.limits.load_ns
        if instance.state is _I.STARTING and instance.spawned + limit <= now:
            instance.load_error = f"it did not load within {limit / 1e9:g} s (--load-limit-secs)"
            self._dispatcher.kill(version, instance, instance.load_error)

    # ------------------------------------------------------------------------------------ workers' memory

    def map(self, peer: int, message: Map, now: int) -> None:
        try:
            self._state.ledger.announce(peer, message, message.audience)
        except ServeError as error:
            self._kill(peer, f"it broke the protocol: {error}")

    def unmap(self, peer: int, message: Unmap, now: int) -> None:
        try:
            self._state.ledger.withdraw(peer, message.segment)
        except ServeError as error:
            self._kill(peer, f"it broke the protocol: {error}")

    def garbled(self, peer: int, event: Garbled, now: int) -> None:
        self._kill(peer, f"it broke the protocol: {event.text}")

    def _kill(self, peer: int, reason: str) -> None:
        version, instance = self._state.instances[peer]
        self._dispatcher.kill(version, instance, reason)

    # ------------------------------------------------------------------------------------ the end

    def drain(self, peer: int, event: Drain, now: int) -> None:
        if self._state.draining:
            return
        self._state.draining = True
        for model in self._state.models.values():
            self._operations.interrupt(model)
            for version in model.generations():
                for instance in version.instances:
                    if instance.state in (_I.BACKOFF, _I.WAITING):
                        instance.move(_I.STOPPED)
                self._no_more(version, now)
        self._state.set_timer(now + event.limit_ns * 3 // 4, Timer.LEAVE, None)
        self._state.set_timer(now + event.limit_ns, Timer.DRAIN, None)

    def drain_over(self, now: int) -> None:
        """Patience is over: whoever has not been answered is told, whatever still runs is ended."""
        for request in list(self._state.requests.values()):
            if request.state not in (RequestState.LINGERING, RequestState.ENDED):
                text = "the server is stopping and did not finish this request in time (exit-timeout-secs)"
                self._ends.fail_early(request, "UNAVAILABLE", text, now)
        for version, instance in list(self._state.instances.values()):
            self._dispatcher.kill(version, instance, "it did not stop in time")

    def _no_more(self, version: Version, now: int) -> None:
        """In a drain no worker is started again. Without one, what waits is answered now."""
        if not any(instance.peer for instance in version.instances):
            text = f"{STOPPING}, and no worker of '{version.model}' is left to run this request"
            self._empty_queue(version, text, now)

    def settle_drain(self) -> None:
        """At the end of each turn of a drain: stop the workers when the last request is done, then say so."""
        state = self._state
        if not state.requests and not state.sequences:
            for peer, (version, instance) in state.instances.items():
                version.idle.clear()
                if instance.state in (_I.STARTING, _I.READY):
                    instance.move(_I.STOPPING)
                    state.send(peer, Stop())
        if not state.instances and not state.requests and not state.drained:
            state.drained = True
            state.effects.append(Drained())


def _about(version: Version, instance: Instance, words: bool = True) -> dict[str, Any]:
    """For the log; with its last words if there are any, and they have not just been told."""
    found: dict[str, Any] = {"model": version.model, "version": version.number, "instance": instance.spec.name}
    return found | {"last_words": instance.last_words} if words and instance.last_words else found


def _lost(version: Version, instance: Instance, request: Request, alone: bool, reason: str) -> str:
    text = f"{version.label}: the worker process of instance '{instance.spec.name}' ended while it"
    if not alone:
        return f"{text} had this request ({reason})"
    again = ", as one did before that ran it with others" if request.suspect else ""
    return f"{text} ran this request alone ({reason}){again}"
