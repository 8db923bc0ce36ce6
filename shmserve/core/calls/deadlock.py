"""Deadlock detection among instances that wait for other models.

An instance can continue if all of its calls will be answered. A request will be answered if the instance that has it
can continue or, while it is queued, one of those that may run it. Instances for which this cannot be shown are
deadlocked.

Invariant: if there is no deadlock, a new call can only deadlock its own caller, so only that call is checked. All
instances are checked only if something else may have formed a deadlock (`State.deadlock_possible`).
"""

from __future__ import annotations

from shmserve.core.ensembles.run import Run
from shmserve.core.records import Instance, Request, Version
from shmserve.core.state import State
from shmserve.core.states import BatchState, InstanceState, RequestState

_ANSWERED = (RequestState.LINGERING, RequestState.ENDED, RequestState.DONE)

Stuck = dict[Instance, None]


class DeadlockDetector:
    def __init__(self, state: State) -> None:
        self._state = state

    def closes_circle(self, request: Request) -> str:
        """For a new call that blocks its instance: why it would wait forever, or ""."""
        version, waiting = request.version, self._state.waiting
        usual = version.graph is None and version.order is None and version.places is None
        if usual and any(instance.usable and instance not in waiting for instance in version.instances):
            return ""
        stuck = self._stuck()
        return self._story(self._path(request, stuck)[0], stuck) if self._blocked_by(request, stuck) is not None else ""

    def last_in_circle(self) -> tuple[Request | None, str]:
        """The newest call of a cycle of waiting instances, if there is one, and its error text."""
        stuck = self._stuck()
        for instance in stuck:
            calls, circle = self._path(self._blocked_call(instance, stuck), stuck)
            newest = max(calls[circle:], key=_number)
            return newest, self._story(self._path(newest, stuck)[0], stuck)
        return None, ""

    def _stuck(self) -> Stuck:
        """Instances that can never continue. Killed ones are left out, because their calls end with them."""
        stuck = {i: None for i in self._state.waiting if i.state is not InstanceState.KILLED}
        found = True
        while found:
            found = False
            for instance in list(stuck):
                if all(self._blocked_by(request, stuck) is None for request in self._held(instance)):
                    del stuck[instance]
                    found = True
        return stuck

    def _blocked_call(self, instance: Instance, stuck: Stuck) -> Request:
        return next(request for request in self._held(instance) if self._blocked_by(request, stuck) is not None)

    def _path(self, request: Request, stuck: Stuck) -> tuple[list[Request], int]:
        """The chain of calls that starts with this one, and the index where the cycle in it begins."""
        calls, seen = [request], {self._caller(request)[1]: 0}
        while True:
            blocker = self._blocked_by(calls[-1], stuck)
            assert blocker is not None
            if blocker in seen:
                return calls, seen[blocker]
            seen[blocker] = len(calls)
            calls.append(self._blocked_call(blocker, stuck))

    def _blocked_by(self, request: Request, stuck: Stuck) -> Instance | None:
        """A deadlocked instance without which this request is not answered."""
        order = request.version.order
        if order is not None:
            for before in order:
                if before is request:
                    break
                blocker = self._runs_at(before, stuck)
                if blocker is not None:
                    return blocker
        return self._runs_at(request, stuck)

    def _runs_at(self, request: Request, stuck: Stuck) -> Instance | None:
        run = self._state.runs.get(request.number)
        if request.state in _ANSWERED or (run is not None and run.failure is not None):
            return None
        if run is not None:
            return self._held_up_by(run, stuck)
        instance, batch = request.instance, request.batch
        if instance is None and request.suspect:  # suspects run one at a time
            instance = request.version.trial
        elif instance is None or (batch is not None and batch.state is BatchState.OPEN):  # it may still move
            sequence = request.sequence
            while sequence is not None and sequence.before is not None:
                sequence = sequence.before
            instance = sequence.instance if sequence is not None else None
        if instance is not None:
            return instance if instance in stuck else None
        return self._served_by(request.version, stuck)

    def _held_up_by(self, run: Run, stuck: Stuck) -> Instance | None:
        """For a request to an ensemble: checks its steps in flight and those that have not started."""
        blockers = [self._blocked_by(step, stuck) for step in run.out.values()]
        blockers += [self._served_by(member, stuck) for member in run.to_come()]
        return next((blocker for blocker in blockers if blocker is not None), None)

    def _served_by(self, version: Version, stuck: Stuck) -> Instance | None:
        """None: an instance will run what is queued there, or the requests will fail."""
        if version.graph is not None:
            blockers = [self._served_by(member, stuck) for member in version.members]
            return next((blocker for blocker in blockers if blocker is not None), None)
        able = [instance for instance in version.instances if not instance.over and not instance.spec.passive]
        return able[0] if able and all(instance in stuck for instance in able) else None

    def _story(self, calls: list[Request], stuck: Stuck) -> str:
        names = [self._caller(calls[0])[0].model]
        for call in calls:
            blocker = self._blocked_by(call, stuck)
            assert blocker is not None
            version, _ = self._state.instances[blocker.peer]
            names += [call.version.model]
            if version.model != names[-1]:  # a step of an ensemble, or an earlier request in order
                names.append(version.model)
        return (
            f"deadlock: model '{names[0]}' calls '{names[1]}', but all instances of {' -> '.join(names)} wait for the "
            "next model; raise instance_group.count of one of them, or call from a separate thread of a decoupled "
            "model, which blocks no instance"
        )

    def _caller(self, request: Request) -> tuple[Version, Instance]:
        """The caller of the request."""
        return self._state.instances[request.client.number]

    def _held(self, instance: Instance) -> list[Request]:
        """The calls that block the instance."""
        caller, requests = instance.caller, self._state.requests
        calls = [requests[number] for number in caller.requests.values()] if caller is not None else []
        return [request for request in calls if request.held]


def _number(request: Request) -> int:
    return request.number
