"""Which requests of sequences run next: direct (each sequence has its place in the batch) and oldest (dynamic batches
of at most one request of each).

The rule of the file: what happens to a sequence is noted in it when it happens, and seen to here, when its version is
dispatched after all events of the turn.
"""

from __future__ import annotations

from shmserve.core.batcher import Plan, Reason, form
from shmserve.core.clients import Client
from shmserve.core.dispatch import Dispatcher
from shmserve.core.ends import Ends
from shmserve.core.instances import Batch, Instance
from shmserve.core.policy import SequencePolicy
from shmserve.core.request import Request
from shmserve.core.sequences import Places, Sequence
from shmserve.core.state import STOPPING, State, Timer
from shmserve.core.states import RequestState, SequenceState
from shmserve.core.versions import Version
from shmserve.errors import InvalidRequest, Unavailable
from shmserve.messages import EndSequences, Options

_S = SequenceState


class Sequencer:
    def __init__(self, state: State, ends: Ends, dispatcher: Dispatcher) -> None:
        self._state = state
        self._ends = ends
        self._dispatcher = dispatcher

    # ------------------------------------------------------------------------------------ in

    def version_of(self, model: str, number: int, options: Options) -> Version | None:
        """The generation where the sequence of this request lives, if it goes on. None: a new one begins, or none is
        known."""
        sequence = self._state.sequences.get((model, number, options.sequence))
        if sequence is None or options.sequence_start or sequence.broken is not None:
            return None
        return sequence.version

    def check(self, client: Client, version: Version, number: int, options: Options | None, rows: int) -> None:
        """Raises if the request cannot be one of a sequence's."""
        policy = version.policy
        assert policy is not None
        assert policy.sequence is not None
        model = version.model
        if options is None or not options.sequence:
            raise InvalidRequest(
                f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID"
            )
        strings = policy.sequence.strings
        if strings is not None and isinstance(options.sequence, str) is not strings:
            kind = "a string" if strings else "an integer"
            raise InvalidRequest(f"model '{model}' takes {kind} as correlation ID, found {options.sequence!r}")
        if rows > 1:
            raise InvalidRequest(
                f"inference request to model '{model}' must specify batch-size 1 due to requirements of sequence "
                f"batcher, found {rows}"
            )
        sequence = self._state.sequences.get((model, number, options.sequence))
        if sequence is not None and sequence.user != client.user:
            raise InvalidRequest(f"sequence {options.sequence} of model '{model}' is that of another user")
        if options.sequence_start:
            if self._state.draining:
                raise Unavailable(STOPPING)
        elif sequence is None or sequence.broken is not None:
            raise InvalidRequest(
                f"inference request for sequence {options.sequence} to model '{model}' must specify the START flag on "
                f"the first request of the sequence"
            )

    def put(self, version: Version, number: int, request: Request, now: int) -> None:
        """One that was found good, and is in the tables."""
        places, options = version.places, request.options
        assert places is not None
        assert options is not None
        key = (version.model, number, options.sequence)
        sequence = self._state.sequences.get(key)
        if sequence is not None and (sequence.version is not version or sequence.broken is not None):
            self._forget(sequence)  # a START where an older one lives elsewhere, or is being ended
            sequence.fail("CANCELLED", f"sequence {sequence.id!r} was started again")
            sequence.stirred()
            self._state.dirty[sequence.version] = None
            sequence = None
        if sequence is None:
            sequence = self._state.sequences[key] = Sequence(key, request.client.user, version, now)
            places.backlog.append(sequence)
            self._state.set_timer(now + places.policy.idle_ns, Timer.IDLE, sequence)
        request.sequence = sequence
        sequence.requests.append(request)
        sequence.over = options.sequence_end
        sequence.active = now
        self._state.dirty[version] = None

    def _forget(self, sequence: Sequence) -> None:
        if self._state.sequences.get(sequence.key) is sequence:
            del self._state.sequences[sequence.key]

    # ------------------------------------------------------------------------------------ out

    def dispatch(self, version: Version, now: int) -> None:
        places = version.places
        assert places is not None
        version.wake = 0
        while places.stirred:
            sequence, _ = places.stirred.popitem()
            self._look_at(places, sequence, now)
        waiting = list(places.backlog)
        for sequence in waiting:
            instance = places.free(version.instances) if version.state.value != "UNAVAILABLE" else None
            if instance is None:
                break
            places.backlog.remove(sequence)
            places.bind(sequence, instance)
            sequence.move(_S.BOUND)
        for instance in list(version.idle):
            if instance.idle:
                self._run(version, places, instance, now)
        if version.wake:
            self._state.wakes[version] = version.wake
        else:
            self._state.wakes.pop(version, None)

    def _look_at(self, places: Places, sequence: Sequence, now: int) -> None:
        """Something of it has ended."""
        if sequence.state is _S.ENDED:
            return
        sequence.active = now
        if sequence.broken is not None:
            self._end_broken(places, sequence, *sequence.broken, now)
        elif sequence.over and sequence.idle:
            self._end(places, sequence)

    def _end_broken(self, places: Places, sequence: Sequence, code: str, text: str, now: int) -> None:
        self._forget(sequence)
        while sequence.requests:
            self._ends.end_early(sequence.requests.popleft(), code, text, now)
        if sequence.running is None:  # else once its worker is done with that one, which is answered
            instance = sequence.instance
            if instance is not None and instance.peer and instance.usable:
                self._state.send(instance.peer, EndSequences((sequence.id,)))
            self._end(places, sequence)

    def _end(self, places: Places, sequence: Sequence) -> None:
        places.release(sequence)
        sequence.move(_S.ENDED)
        self._forget(sequence)

    def _run(self, version: Version, places: Places, instance: Instance, now: int) -> None:
        """The next batch of an instance with nothing to do, if there is one."""
        heads = [s for s in places.at(instance) if s.requests and s.running is None and s.broken is None]
        if not heads:
            return
        heads.sort(key=_arrival)
        plan = self._plan_direct(version, places.policy, heads, now)
        if not places.policy.direct:
            waiting = [sequence.requests[0] for sequence in heads]
            plan = form(waiting, version.shape, now) if version.shape is not None else plan
        if not plan.count:
            version.wake = min(version.wake, plan.wake) if version.wake else plan.wake
            return
        signature = heads[0].requests[0].signature
        if places.policy.direct:
            heads = [sequence for sequence in heads if sequence.requests[0].signature == signature]
        requests = []
        for sequence in heads[: plan.count]:
            request = sequence.running = sequence.requests.popleft()
            request.slot = sequence.slot if places.policy.direct and version.batches else -1
            requests.append(request)
        batch = Batch([], plan.rows, plan.reason, signature, now)
        self._dispatcher.start(version, instance, batch, requests, now)

    def _plan_direct(self, version: Version, policy: SequencePolicy, heads: list[Sequence], now: int) -> Plan:
        if not version.batches:
            return Plan(1, 1, Reason.SINGLE)
        count = len(heads)
        if count == policy.slots:
            return Plan(count, count, Reason.FULL)
        wake = heads[0].requests[0].arrived + policy.delay_ns
        if count < policy.utilization * policy.slots and now < wake:
            return Plan(0, 0, Reason.DELAY, wake)
        return Plan(count, count, Reason.DELAY if policy.delay_ns and now >= wake else Reason.IDLE)

    # ------------------------------------------------------------------------------------ what ends sequences

    def again(self, version: Version, requests: list[Request]) -> None:
        """Of an iterative model: it wants to run these once more."""
        for request in requests:
            request.move(RequestState.QUEUED)
            request.instance = request.batch = None
            if request.options is not None and request.options.sequence_start:
                request.options.sequence_start = False
            sequence = request.sequence
            assert sequence is not None
            sequence.requests.appendleft(request)
            sequence.left(request)
        self._state.dirty[version] = None

    def idle(self, sequence: Sequence, now: int) -> None:
        """The timer of a sequence: has nothing come for it for too long?"""
        places = sequence.version.places
        if sequence.state is _S.ENDED or places is None:
            return
        until = sequence.active + places.policy.idle_ns
        if not sequence.idle:
            until = now + places.policy.idle_ns
        elif until <= now:
            sequence.fail("UNAVAILABLE", "it was idle")
            sequence.stirred()
            self._state.dirty[sequence.version] = None
            return
        self._state.set_timer(until, Timer.IDLE, sequence)


def _arrival(sequence: Sequence) -> int:
    return sequence.requests[0].arrived
