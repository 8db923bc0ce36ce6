"""Versions and the worker processes that serve them: deployed, loaded, lost, started again, drained."""

from __future__ import annotations

from shmserve.core.dispatch import Dispatcher
from shmserve.core.effects import Drained, Spawn
from shmserve.core.events import Compiled, Deploy, Drain, Exited, Garbled, Refuse
from shmserve.core.instances import Instance
from shmserve.core.state import STOPPING, State, Timer
from shmserve.core.states import InstanceState, RequestState, VersionState
from shmserve.core.versions import Model, Version
from shmserve.errors import ServeError
from shmserve.messages import LoadFailed, Map, Return, Stop, Unmap

_I, _V = InstanceState, VersionState


class Lifecycle:
    def __init__(self, state: State, dispatcher: Dispatcher) -> None:
        self._state = state
        self._dispatcher = dispatcher

    # ------------------------------------------------------------------------------------ loading

    def deploy(self, peer: int, event: Deploy, now: int) -> None:
        model = self._state.models.setdefault(event.model, Model(event.model))
        version = Version(event.model, event.version, [Instance(spec) for spec in event.instances])
        model.versions[event.version] = version
        for instance in version.instances:
            self._spawn(version, instance)

    def refuse(self, peer: int, event: Refuse, now: int) -> None:
        model = self._state.models.setdefault(event.model, Model(event.model))
        if not event.version:
            model.reason = event.reason
            return
        version = Version(event.model, event.version, [])
        version.move(_V.UNAVAILABLE, event.reason)
        model.versions[event.version] = version

    def _spawn(self, version: Version, instance: Instance) -> None:
        instance.peer = self._state.next_worker()
        self._state.instances[instance.peer] = (version, instance)
        self._state.effects.append(Spawn(instance.peer, version.model, version.number, instance.spec))

    def compiled(self, peer: int, event: Compiled, now: int) -> None:
        """A worker has loaded its model."""
        version, instance = self._state.instances[peer]
        if instance.state is not _I.STARTING:
            return
        instance.move(_I.READY)
        if version.policy is None:
            version.adopt(event.policy)
        if instance.usable:
            version.idle.append(instance)
        if version.state is _V.LOADING and all(other.state is _I.READY for other in version.instances):
            version.move(_V.READY)
            self._state.refresh(version.model)
            self._state.log("debug", f"{version.label} is READY with {len(version.instances)} instance(s)")
        self._state.dirty[version] = None

    def load_failed(self, peer: int, message: LoadFailed, now: int) -> None:
        version, instance = self._state.instances[peer]
        if instance.state is _I.STARTING:
            self._give_up(version, instance, f"failed to load: {message.text}", now)

    def _give_up(self, version: Version, instance: Instance, reason: str, now: int) -> None:
        """This instance will not run. Its version goes with it, as it was promised with all its instances."""
        instance.reason = reason
        instance.move(_I.FAILED)
        if version.state in (_V.LOADING, _V.READY):
            version.move(_V.UNAVAILABLE, reason)
            self._state.refresh(version.model)
            self._state.log("error", f"{version.label} is UNAVAILABLE: {reason}")
        for other in version.instances:
            if other.peer and other.state in (_I.STARTING, _I.READY):
                other.move(_I.STOPPING)
                self._state.send(other.peer, Stop())
            elif other.state is _I.BACKOFF:
                other.move(_I.STOPPED)
        version.idle.clear()
        text = f"Request for unknown model: '{version.model}' version {version.number} is not at ready state: {reason}"
        self._empty_queue(version, text, now)

    def _empty_queue(self, version: Version, text: str, now: int) -> None:
        """Nobody will come to run what waits."""
        for request in version.queue.take(version.queue.count):
            self._dispatcher.end_early(request, "UNAVAILABLE", text, now)
        self._state.dirty[version] = None

    # ------------------------------------------------------------------------------------ deaths

    def exited(self, peer: int, event: Exited, now: int) -> None:
        found = self._state.instances.pop(event.peer, None)
        if found is None:
            return
        version, instance = found
        instance.peer = 0
        if instance in version.idle:
            version.idle.remove(instance)
        self._lose_batches(version, instance, event.reason, now)
        self._state.ledger.worker_died(event.peer)
        over = version.state not in (_V.LOADING, _V.READY)
        if instance.state in (_I.STOPPING, _I.FAILED) or over or self._state.draining:
            instance.move(_I.STOPPED)
            if self._state.draining:
                self._no_more(version, now)
        elif instance.state is _I.STARTING and version.state is _V.LOADING:
            text = event.loading_error or f"its worker process ended while loading: {event.reason}"
            self._give_up(version, instance, text, now)
            instance.move(_I.STOPPED)
        else:
            self._crashed(version, instance, event, now)
        self._state.dirty[version] = None

    def _lose_batches(self, version: Version, instance: Instance, reason: str, now: int) -> None:
        name = instance.spec.name
        text = f"{version.label}: the worker process of instance '{name}' ended while it had this request ({reason})"
        for batch in instance.batches():
            for request in batch.requests():
                self._dispatcher.end_failed(request, "MODEL_FAILED", text, now)
            batch.end()
        instance.running = instance.waiting = None
        if version.order is not None:
            self._dispatcher.answer_in_order(version)

    def _crashed(self, version: Version, instance: Instance, event: Exited, now: int) -> None:
        """Start again: at once, then with growing pauses, then not any more."""
        limits = self._state.limits
        instance.deaths += 1
        instance.reason = event.reason
        self._state.log("error", f"worker of {version.label} instance '{instance.spec.name}' ended: {event.reason}")
        if instance.deaths > limits.restarts:
            text = (
                f"instance '{instance.spec.name}' ended {instance.deaths} times in a row, the last time: {event.reason}"
            )
            self._give_up(version, instance, text, now)
            instance.move(_I.STOPPED)
            return
        instance.move(_I.BACKOFF)
        pause = 0 if instance.deaths == 1 else min(limits.backoff_ns << (instance.deaths - 2), limits.backoff_max_ns)
        instance.retry_at = now + pause
        self._state.set_timer(instance.retry_at, Timer.RETRY, instance)

    def retry(self, instance: Instance, version: Version) -> None:
        if instance.state is _I.BACKOFF and not self._state.draining:
            instance.move(_I.STARTING)
            self._spawn(version, instance)

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

    def give_back(self, peer: int, message: Return, now: int) -> None:
        """Workers hold nothing of others beyond their batches; nothing to do."""

    # ------------------------------------------------------------------------------------ the end

    def drain(self, peer: int, event: Drain, now: int) -> None:
        if self._state.draining:
            return
        self._state.draining = True
        for model in self._state.models.values():
            for version in model.versions.values():
                for instance in version.instances:
                    if instance.state is _I.BACKOFF:
                        instance.move(_I.STOPPED)
                self._no_more(version, now)
        self._state.set_timer(now + event.limit_ns, Timer.DRAIN, None)

    def drain_over(self, now: int) -> None:
        """Patience is over: whoever has not been answered is told, whatever still runs is ended."""
        for request in list(self._state.requests.values()):
            if request.state in (RequestState.QUEUED, RequestState.SENT, RequestState.DONE):
                text = "the server is stopping and did not finish this request in time (exit-timeout-secs)"
                self._dispatcher.fail_early(request, "UNAVAILABLE", text, now)
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
        if not state.requests:
            for peer, (version, instance) in state.instances.items():
                version.idle.clear()
                if instance.state in (_I.STARTING, _I.READY):
                    instance.move(_I.STOPPING)
                    state.send(peer, Stop())
        if not state.instances and not state.requests and not state.drained:
            state.drained = True
            state.effects.append(Drained())
