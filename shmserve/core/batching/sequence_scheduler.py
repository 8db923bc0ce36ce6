"""The sequence scheduler, with the strategies direct (each sequence has a fixed batch slot) and oldest (dynamic batches
with at most one request per sequence).

Invariant: events only mark a sequence as changed; `dispatch` processes the change after all events of the turn.
"""

from __future__ import annotations

from msgspec.structs import replace

from shmserve.core.batching.dispatch import may_start, start
from shmserve.core.exit import exit
from shmserve.core.policy import SequencePolicy
from shmserve.core.records import Batch, ClientState, Instance, Key, Request, Sequence, SequenceSlots, Version
from shmserve.core.service.form import BatchPlan, Reason, form
from shmserve.core.state import STOPPING, State, Timer
from shmserve.core.states import SequenceState, VersionState
from shmserve.errors import InvalidRequest, Unavailable
from shmserve.protocol.messages import Options
from shmserve.protocol.worker_messages import EndSequences

_S = SequenceState

_REMEMBERED = 4096
"""Limit of remembered sequences that ended without END. Later requests to them get the reason."""

_OWN_IDS = 1 << 30
"""First id for requests without a sequence id: far above the ids that callers count up, and still an int32."""


# ------------------------------------------------------------------------------------ admission


def version_of(state: State, client: ClientState, model: str, number: int, options: Options) -> Version | None:
    """The generation of the sequence that this request continues. None: it starts a new one, or the sequence is
    unknown."""
    sequence = _find(state, model, number, options.sequence, _owner(client, options))
    if sequence is None or options.sequence_start or sequence.broken is not None:
        return None
    return sequence.version


def _find(state: State, model: str, number: int, key: int | str, user: str) -> Sequence | None:
    """The sequence for callers that request version `number`; 0 is the default version."""
    sequences = state.sequences
    sequence = sequences.get((model, number, key, user))
    if sequence is not None:
        return sequence
    if number:
        sequence = sequences.get((model, 0, key, user))
        return sequence if sequence is not None and sequence.version.number == number else None
    default = state.ready.get(model)
    return sequences.get((model, default.number, key, user)) if default is not None else None


def check(state: State, client: ClientState, version: Version, number: int, options: Options | None, rows: int) -> None:
    """Raises if the request is not valid as part of a sequence."""
    policy = version.policy
    assert policy is not None
    assert policy.sequence is not None
    model = version.model
    if rows > 1:
        raise InvalidRequest(
            f"inference request to model '{model}' must specify batch-size 1 due to requirements of sequence "
            f"batcher, found {rows}"
        )
    key = options.sequence if options is not None else 0
    if options is None or not key:
        if policy.sequence.iterative:
            return
        raise InvalidRequest(
            f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID"
        )
    control = policy.sequence.id_control
    if control is not None and isinstance(key, str) is not (control.dtype == "BYTES"):
        dtype = "BYTES" if isinstance(key, str) else "UINT64"
        raise InvalidRequest(
            f"sequence batching control '{control.name}' data-type is '{dtype}', but model '{model}' expects "
            f"'{control.dtype}': found correlation ID {key!r}"
        )
    if isinstance(key, int) and key < 0:
        raise InvalidRequest(f"correlation ID {key} is negative; model '{model}' needs one above 0")
    owner = _owner(client, options)
    sequence = _find(state, model, number, key, owner)
    if sequence is not None and sequence.broken is None and sequence.own:
        raise InvalidRequest(f"sequence {key} of model '{model}' belongs to a request without a correlation ID")
    if options.sequence_start:
        if state.draining:
            raise Unavailable(STOPPING)
    elif sequence is None or sequence.over or sequence.broken is not None or sequence.version is not version:
        _refuse(state, (model, number, key, owner), sequence)


def _refuse(state: State, key: Key, sequence: Sequence | None) -> None:
    """Raises: a request without START has no sequence to continue."""
    model, _, name, _ = key
    code, text = state.lost_sequences.get(key, ("", ""))
    if sequence is not None and sequence.broken is not None:
        code, text = sequence.broken
    if code == Unavailable.code:
        raise Unavailable(text)
    raise InvalidRequest(
        f"inference request for sequence {name} to model '{model}' must specify the START flag on the first "
        f"request of the sequence{f': {text}' if text else ''}"
    )


def put(state: State, version: Version, number: int, request: Request, now: int) -> None:
    """Appends a validated request that is already in the tables."""
    slots, sent = version.service.sequence_slots, request.options
    assert slots is not None
    own = sent is None or not sent.sequence
    options = _with_id(slots, request) if sent is None or own else sent
    user = _owner(request.client, options)
    sequence = _find(state, version.model, number, options.sequence, user)
    while sequence is not None and (sequence.version is not version or sequence.over or sequence.broken):
        _leave_behind(state, sequence)
        sequence = _find(state, version.model, number, options.sequence, user)
    if sequence is None:
        key = (version.model, number, options.sequence, user)
        worker_id = _worker_id(slots, options.sequence, user, request)
        sequence = state.sequences[key] = Sequence(key, worker_id, version, now, own=own)
        slots.enter(sequence)
        state.lost_sequences.pop(key, None)
        state.set_timer(now + slots.policy.idle_ns, Timer.IDLE, sequence)
        if options.queue_timeout_us:
            state.set_timer(now + options.queue_timeout_us * 1000, Timer.BACKLOG, sequence)
    same = sequence.worker_id == options.sequence
    request.options = options if same else replace(options, sequence=sequence.worker_id)
    request.sequence, request.special = sequence, True
    sequence.requests.append(request)
    slots.waiting(request)
    sequence.over = options.sequence_end
    sequence.active = now
    state.to_dispatch[version] = None


def _with_id(slots: SequenceSlots, request: Request) -> Options:
    """For iterative models: a request without a sequence id becomes an implicit sequence."""
    control = slots.policy.id_control
    key = _unused_id(slots, control is not None and control.dtype == "BYTES", request)
    options = Options() if request.options is None else replace(request.options)
    options.sequence, options.sequence_start, options.sequence_end = key, True, True
    return options


def _leave_behind(state: State, sequence: Sequence) -> None:
    """A START arrived for an id whose sequence has received END, is ending, or belongs to another generation: that
    sequence finishes its requests and gets no more."""
    _forget(state, sequence)
    sequence.cut = not sequence.over
    sequence.over = True
    _note_change(state, sequence)


def _forget(state: State, sequence: Sequence) -> None:
    if state.sequences.get(sequence.key) is sequence:
        del state.sequences[sequence.key]


# ------------------------------------------------------------------------------------ dispatch


def dispatch(state: State, version: Version, now: int) -> None:
    slots = version.service.sequence_slots
    assert slots is not None
    version.wake = 0
    while slots.changed:
        changed, slots.changed = slots.changed, {}
        for sequence in changed:
            _process_change(state, slots, sequence, now)
    if slots.backlog and version.state is not VersionState.UNAVAILABLE and not version.yielding:
        slots.bind_waiting(version.instances)
    for instance in list(version.idle):
        if instance.idle:
            _run(state, version, slots, instance, now)
    if version.wake:
        state.wakes[version] = version.wake
    else:
        state.wakes.pop(version, None)


def _process_change(state: State, slots: SequenceSlots, sequence: Sequence, now: int) -> None:
    if sequence.state is _S.ENDED:
        return
    sequence.active = now
    if sequence.broken is not None:
        _end_broken(state, slots, sequence, *sequence.broken)
    elif sequence.over and sequence.idle:
        if sequence.cut:
            _notify_worker(state, sequence)
        _end(state, slots, sequence)


def _end_broken(state: State, slots: SequenceSlots, sequence: Sequence, code: str, text: str) -> None:
    if state.sequences.get(sequence.key) is sequence and not sequence.own:
        _remember(state, sequence, code, text)
    _forget(state, sequence)
    while sequence.requests:
        request = sequence.requests.popleft()
        slots.gone(request)
        exit.fail_unsent(state, request, code, text)
    if sequence.running is None:  # otherwise once its worker is done with that request
        _notify_worker(state, sequence)
        _end(state, slots, sequence)


def _remember(state: State, sequence: Sequence, code: str, text: str) -> None:
    state.lost_sequences[sequence.key] = code, text
    if len(state.lost_sequences) > _REMEMBERED:
        del state.lost_sequences[next(iter(state.lost_sequences))]


def _notify_worker(state: State, sequence: Sequence) -> None:
    instance = sequence.instance
    if instance is not None and instance.peer and instance.usable:
        state.send(instance.peer, EndSequences((sequence.worker_id,)))


def _end(state: State, slots: SequenceSlots, sequence: Sequence) -> None:
    slots.end(sequence)
    _forget(state, sequence)


def _run(state: State, version: Version, slots: SequenceSlots, instance: Instance, now: int) -> None:
    """Starts the next batch of an idle instance, if there is one."""
    heads = [s for s in slots.at(instance) if s.requests and s.running is None and s.broken is None]
    if not heads:
        return
    heads.sort(key=lambda sequence: sequence.requests[0].arrived)
    if instance.quarantined:
        del heads[1:]
    signature = heads[0].requests[0].signature
    if slots.policy.direct:
        heads = [sequence for sequence in heads if sequence.requests[0].signature == signature]
        plan = _plan_direct(version, slots.policy, heads, now)
    else:
        plan = _plan_oldest(version, slots.policy, heads, now)
    if not plan.count:
        version.wake = min(version.wake, plan.wake) if version.wake else plan.wake
        return
    if not may_start(state, version, instance):
        return
    requests = []
    for sequence in heads[: plan.count]:
        request = sequence.running = sequence.requests.popleft()
        request.slot = sequence.slot if slots.policy.direct and version.batches else -1
        requests.append(request)
        slots.gone(request)
    batch = Batch([], plan.rows, plan.reason, signature, now)
    if slots.policy.direct and version.batches:
        batch.slots = 1 + max(sequence.slot for sequence in slots.at(instance))
    start(state, version, instance, batch, requests, now)


def _plan_direct(version: Version, policy: SequencePolicy, heads: list[Sequence], now: int) -> BatchPlan:
    if not version.batches:
        return BatchPlan(1, 1, Reason.SINGLE)
    count = len(heads)
    if count == policy.slots:
        return BatchPlan(count, count, Reason.FULL)
    wake = heads[0].requests[0].arrived + policy.delay_ns
    if count < policy.utilization * policy.slots and now < wake:
        return BatchPlan(0, 0, Reason.DELAY, wake)
    return BatchPlan(count, count, Reason.DELAY if policy.delay_ns and now >= wake else Reason.IDLE)


def _plan_oldest(version: Version, policy: SequencePolicy, heads: list[Sequence], now: int) -> BatchPlan:
    service = version.service
    if service.batch_rules is None:
        return BatchPlan(1, 1, Reason.SINGLE)
    plan = form([sequence.requests[0] for sequence in heads], service.batch_rules, now)
    if not plan.count and len(heads) == policy.slots:  # no other sequence can get a slot until then
        return BatchPlan(len(heads), len(heads), Reason.FULL)
    return plan


# ------------------------------------------------------------------------------------ timeouts


def backlog_timeout(state: State, sequence: Sequence, now: int) -> None:
    """The queue timeout of a sequence's first request. It covers only the time in the backlog."""
    if sequence.state is _S.WAITING:
        _fail(state, sequence, "QUEUE_TIMEOUT", "timeout of the corresponding sequence has been expired")


def idle(state: State, sequence: Sequence, now: int) -> None:
    """The idle timer: fails the sequence if it had no request for too long."""
    slots = sequence.version.service.sequence_slots
    if sequence.state is _S.ENDED or slots is None:
        return
    until = sequence.active + slots.policy.idle_ns
    if not sequence.idle:
        until = now + slots.policy.idle_ns
    elif until <= now:
        idle = f"{slots.policy.idle_ns / 1e9:g} s (max_sequence_idle_microseconds)"
        _fail(state, sequence, InvalidRequest.code, f"the last one ended because it had no request for {idle}")
        return
    state.set_timer(until, Timer.IDLE, sequence)


def _fail(state: State, sequence: Sequence, code: str, text: str) -> None:
    sequence.fail(code, text)
    _note_change(state, sequence)


def _note_change(state: State, sequence: Sequence) -> None:
    sequence.mark_changed()
    state.to_dispatch[sequence.version] = None


def _owner(client: ClientState, options: Options) -> str:
    """The owner of sequence ids: the user or, if the client acts for several callers, the caller."""
    return f"{client.user} {options.caller}" if options.caller else client.user


def _worker_id(slots: SequenceSlots, wanted: int | str, user: str, request: Request) -> int | str:
    """Returns an id that is unique across users, because workers and models keep state by this id."""
    other = slots.latest.get(wanted)
    if other is None or other.user == user:
        return wanted
    return _unused_id(slots, isinstance(wanted, str), request)


def _unused_id(slots: SequenceSlots, text: bool, request: Request) -> int | str:
    own = request.number
    while True:
        own = _OWN_IDS + own % _OWN_IDS
        key = f"request {own}" if text else own
        if key not in slots.latest:
            return key
        own += 1
