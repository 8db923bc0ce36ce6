"""The invariants that hold between two turns of the core, as assertions. Only for tests and simulations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shmserve.core.exit.exit import is_stream
from shmserve.core.exit.shadow import Comparison
from shmserve.core.intake.queries import QueryQueue
from shmserve.core.ledger import Place
from shmserve.core.owners.model import Model
from shmserve.core.owners.run import Run
from shmserve.core.records import CallingWorker, ClientState, Instance, Request, Version
from shmserve.core.service.graph import handles_of
from shmserve.core.service.prompts import Prompt, PromptBacklog
from shmserve.core.state import State
from shmserve.core.states import BatchState, InstanceState, RequestState, SequenceState, VersionState
from shmserve.core.stats.callers import Caller
from shmserve.protocol.messages import Handle, Reply

_I = InstanceState


def check(state: State, queries: QueryQueue) -> None:
    """Asserts all invariants that must hold between turns. Only for tests and simulations: visits every request."""
    instances = state.instances.items()
    callers = {peer: instance.caller for peer, (_, instance) in instances if instance.caller is not None}
    state.ledger.check({**state.clients, **callers})
    queries.check(state.clients.keys() | state.instances.keys())
    state.observers.check(state.requests)
    assert not state.to_dispatch
    assert not state.loading.blocked
    queues = _check_requests(state)
    _check_callers(state, callers)
    _check_sequences(state)
    _check_leases(state)
    state.cache.check()
    if state.limiter is not None:
        state.limiter.check()
    _check_shadows(state)
    _check_prompts(state)
    _check_memory(state)
    _check_client_bytes(state, (*state.clients.values(), *callers.values(), state.shadow_client))
    waiting = Counter(r.version for r in state.requests.values() if r.state is RequestState.QUEUED)
    for model in state.models.values():
        generations = model.generations()
        assert len(generations) == len(set(generations)), model.name
        for version in generations:
            assert version.waits == waiting[version], version.label
            _check_version(state, version, queues[version] if version in queues else version.service.queue.in_order())
        _check_operation(model)


def _check_prompts(state: State) -> None:
    """The backlogs contain the prompts of requests that wait or run, and no others."""
    prompts: dict[PromptBacklog, list[Prompt]] = {}
    for model in state.models.values():
        for version in model.generations():
            if version.service.prompts is not None:
                prompts.setdefault(version.service.prompts, [])
    for request in state.requests.values():
        if request.prompt is not None:
            assert request.state is not RequestState.LINGERING, request.details()
            prompts.setdefault(request.prompt.backlog, []).append(request.prompt)
    for backlog, waiting in prompts.items():
        backlog.check(waiting)


def _check_requests(state: State) -> dict[Version, list[Request]]:
    """Returns the queues of the versions for which requests are queued, in order."""
    queues: dict[Version, list[Request]] = {}
    for number, request in state.requests.items():
        assert request.number == number
        if request.state is RequestState.QUEUED:
            version = request.version
            if version not in queues:
                queues[version] = version.service.queue.in_order()
            waits: Iterable[Request] = version.suspects if request.suspect else queues[version]
            if request.unchecked is not None:
                assert version.state is VersionState.LOADING or version in state.loaded_versions, request.details()
                waits = version.unchecked.in_order()
            if request.sequence is not None:
                waits = request.sequence.requests
            assert request in waits, request.details()
        elif number in state.runs:
            _check_run(state, request)
        else:
            _check_started(request)
        if request.is_step:
            assert request in state.runs[request.parent].in_flight, request.details()
        elif request.state is not RequestState.LINGERING:
            assert request.client.requests.get(request.client_number) is request, request.details()
    abandoned = (r for r in state.requests.values() if r.state is RequestState.LINGERING and is_stream(r))
    assert state.abandoned == Counter(request.payer.user for request in abandoned)
    return queues


def _check_started(request: Request) -> None:
    """A request that a worker has, or whose response waits for those of earlier requests."""
    if request.state is RequestState.DONE:
        assert request.reply is not None, request.details()
        assert request.version.service.order, request.details()
        assert request in list(request.version.service.order)[1:], request.details()
    elif request.instance is not None and request.number in request.instance.streams:
        assert request.state in (RequestState.OPEN, RequestState.LINGERING), request.details()
        assert request.batch is None, request.details()
    else:
        assert request.state in (RequestState.SENT, RequestState.LINGERING), request.details()
        assert request.instance is not None, request.details()
        assert request.batch in request.instance.batches(), request.details()


def _check_callers(state: State, callers: dict[int, CallingWorker]) -> None:
    for peer, caller in callers.items():
        held = caller.blocking
        instance = state.instances[peer][1]
        assert held <= {request.number for request in caller.requests.values()}, instance.details()
        assert caller.number == peer
        assert caller.waits_for == len(held), instance.details()
        assert (instance in state.blocked_instances) == bool(held), instance.details()


def _check_client_bytes(state: State, clients: Iterable[ClientState]) -> None:
    steps: Counter[ClientState] = Counter()
    step_bytes: Counter[ClientState] = Counter()
    input_bytes: Counter[ClientState] = Counter()
    for request in state.requests.values():
        if request.state is not RequestState.DONE:
            input_bytes[request.client] += request.input_bytes
        if request.is_step:
            steps[request.client] += 1
            step_bytes[request.client] += request.inline
    for client in clients:
        assert client.gone == (client is state.shadow_client)
        own = sum(request.inline for request in client.requests.values())
        assert client.bytes == own + step_bytes[client]
        assert client.steps == steps[client]
        assert client.input_bytes == input_bytes[client]
    paid = Counter(request.payer for request in state.requests.values() if isinstance(request.payer, Caller))
    assert paid == {caller: caller.in_flight for caller in state.known_callers() if caller.in_flight}


def _check_version(state: State, version: Version, queue: list[Request]) -> None:
    """`queue`: the requests in the version's queue, in order."""
    service = version.service
    assert (version in state.changes.unloading_versions) == (version.state is VersionState.UNLOADING), version.label
    if version.trial is not None:
        assert version.trial.running is not None, version.label
        assert version.trial.running.count == 1, version.label
    assert service.queue.count == len(queue), version.label
    if service.padding is not None and version.policy is not None:
        assert all(request.passed <= version.policy.max_batch for request in queue), version.label
    for instance in version.instances:
        _check_instance(state, version.idle, instance)
    _check_alive(state, version)
    _check_sleep(state, version)


def _check_run(state: State, request: Request) -> None:
    run = state.runs[request.number]
    assert run.request is request, request.details()
    assert request.state in (RequestState.CHAINED, RequestState.LINGERING), request.details()
    assert run.over == (request.state is RequestState.LINGERING), request.details()
    assert run.in_flight or run.mapped or run.waits_for_room, f"nothing is in flight for it: {request.details()}"
    assert not run.results, request.details()
    assert not run.ready or run.over, request.details()
    assert not run.mapped or run.over or run in state.runs.with_rows.members(), request.details()
    for step in run.in_flight:
        assert state.requests[step.number] is step, request.details()
    for iteration in run.iterations():
        for name, kept in iteration.tensors.items():
            assert kept.readers > 0, f"'{name}' is kept without a reader: {request.details()}"


def _check_memory(state: State) -> None:
    """The books of the ledger balance: the pins of blocks and the uses of segments are those of requests in flight, of
    ensemble runs and of cache entries, and no others."""
    ledger = state.ledger
    for client in state.clients.values():  # a model that calls others may be given its own memory
        own = [place for place in client.holds if ledger.segments[place[0]].owner == client.number]
        assert not own, f"client {client.number} holds memory of its own: {own}"
    pins: Counter[Place] = Counter()
    uses: Counter[int] = Counter()

    def count(handles: Iterable[Handle]) -> None:
        for handle in handles:
            pins[ledger.block_of(handle) or (handle.segment, handle.offset)] += 1

    for request in state.requests.values():
        if request.state is not RequestState.DONE:  # otherwise its inputs have been released
            count(request.pins)
            uses.update(request.segments)
        elif request.is_step and isinstance(request.reply, Reply):
            count(_pinned(state.runs[request.parent], handles_of(request.reply.outputs)))
    for run in state.runs.values():
        for iteration in run.iterations():
            produced = [kept.tensor for kept in iteration.tensors.values() if kept.produced]
            rows = [tensor for rows in iteration.rows.values() for tensors in rows.values() for tensor in tensors]
            count(_pinned(run, handles_of((*produced, *rows))))
    for entry in state.cache.entries():
        count(entry.handles)
    pinned = Counter({place: hold.pins for place, hold in ledger.holds.items() if hold.pins})
    assert pins == pinned, f"pins without an owner: {dict(pinned - pins)}, owners without a pin: {dict(pins - pinned)}"
    used = Counter({number: segment.uses for number, segment in ledger.segments.items() if segment.uses})
    assert uses == used, f"uses of segments without a request: {dict(used - uses)}, the reverse: {dict(uses - used)}"


def _pinned(run: Run, handles: Iterable[Handle]) -> list[Handle]:
    return [handle for handle in run.request.client.of_others(handles) if handle not in run.forwarded]


def _check_leases(state: State) -> None:
    leases = (*state.leases.values(), *state.offers.values())
    lent = Counter((lease.client.number, lease.version.model) for lease in leases)
    assert not lent or max(lent.values()) == 1, f"two leases of one model and client: {lent}"
    for number, offer in state.offers.items():
        lending = offer.version.service.lending
        assert lending is not None, "the offer of a model that cannot be lent"
        assert lending.offered == offer.number == number, f"{offer.version.label} has two offers"
    for number, lease in state.leases.items():
        assert lease.number == number, lease.instance.details()
        if lease.instance.lease == number:
            assert lease.revoked or not lease.version.waits, f"{lease.version.label} is lent while requests wait"


def _check_shadows(state: State) -> None:
    assert state.shadowed.keys() <= state.requests.keys()
    compared = {r.number: r.requester for r in state.requests.values() if isinstance(r.requester, Comparison)}
    assert compared.keys() == state.shadow_client.requests.keys() | {
        number for number in compared if state.requests[number].state is RequestState.LINGERING
    }
    assert not state.shadow_client.holds, "a shadow holds outputs"
    assert state.compared_bytes == sum(comparison.size for comparison in compared.values())
    pending = Counter(id(comparison.shadow) for comparison in compared.values())
    for model, shadow in state.shadows.items():
        assert shadow.pending == pending[id(shadow)], model


def _check_sequences(state: State) -> None:
    for key, sequence in state.sequences.items():
        assert sequence.key == key
        assert sequence.broken is None, sequence.details()
        assert sequence in sequence.sequence_slots.all(), sequence.details()
    for instance, version in state.changes.retiring_instances.items():
        assert instance.retiring, instance.details()
        assert instance in version.instances, instance.details()
    versions = [version for model in state.models.values() for version in model.generations()]
    for slots in [version.service.sequence_slots for version in versions if version.service.sequence_slots is not None]:
        assert not slots.changed
        assert slots.bytes == sum(request.inline for sequence in slots.all() for request in sequence.requests)
        for sequence in slots.all():
            assert not (sequence.over and sequence.idle), sequence.details()
            assert (sequence.state is SequenceState.BOUND) == (sequence.instance is not None), sequence.details()
            assert sequence.broken is None or sequence.running is not None, sequence.details()
            for request in sequence.requests:
                assert request.sequence is sequence, sequence.details()
                assert request.state is RequestState.QUEUED, sequence.details()
            if sequence.running is not None:
                assert sequence.running.instance is sequence.instance, sequence.details()


def _check_operation(model: Model) -> None:
    operation = model.operation
    assert not model.coming or operation is not None, f"versions of '{model.name}' are coming without an operation"
    if operation is not None:
        assert operation.loading or operation.starting, f"an operation on '{model.name}' waits for nothing"
        for version in operation.loading:
            assert version.state is VersionState.LOADING, version.label
    for version in model.leaving:
        assert version.state is VersionState.UNLOADING or not version.gone, version.label


def _check_alive(state: State, version: Version) -> None:
    """A READY version has an instance that is alive, and no request waits for a version that cannot run it."""
    if version.state is VersionState.READY and version.instances and not state.draining:
        assert not all(instance.over for instance in version.instances), (
            f"{version.label} is READY without any instance"
        )
    serving = [instance for instance in version.instances if not (instance.over or instance.spec.passive)]
    lost = [instance for instance in serving if instance.lost]
    if version.state is VersionState.READY and lost:
        assert version.alive, f"{version.label} is READY: {version.degraded_reason}"
    if version.state is VersionState.UNAVAILABLE:
        assert not version.waits, f"{version.label}: no instance will run its queued requests"
        assert not any(instance.usable for instance in serving), f"{version.label}: {version.degraded_reason}"
    if version.state in (VersionState.READY, VersionState.UNAVAILABLE) and not state.draining:
        assert all(i.peer or i.state in (_I.BACKOFF, _I.WAITING, _I.ASLEEP) for i in serving), (
            f"{version.label} has an instance that is not restarted"
        )


def _check_sleep(state: State, version: Version) -> None:
    """A sleeping version has no work, unless a process has to end before it can wake. An awake version has no sleeping
    instance that could be woken."""
    before = version.asleep
    version.settle_sleep()
    assert version.asleep == before, f"{version.label} is asleep: {version.asleep}"
    ending = [one for one in version.instances if one.peer and (one.asleep_soon or one.state is _I.STOPPING)]
    if version.asleep:
        leaving = [instance for instance in version.instances if instance.usable]
        assert all(instance.retiring for instance in leaving), version.label
        assert not version.waits or ending or leaving, f"{version.label} sleeps although requests wait"
    elif version.state is VersionState.READY and not state.draining:
        for instance in version.instances:
            assert instance.state is not _I.ASLEEP or instance.reason, f"nobody wakes {instance.details()}"
    assert version.yielding == (version in state.memory.yielding), version.label
    for instance in version.instances:
        may_lack = instance.state is _I.WAITING or (instance.state is _I.BACKOFF and instance.lost)
        has_memory = bool(instance.peer) or instance.state is _I.BACKOFF
        assert (instance in state.memory.holders) == has_memory or may_lack, instance.details()
        assert not instance.asleep_soon or (instance.sleeping and instance.idle and not instance.streams), (
            instance.details()
        )
        assert not instance.sleeping or instance.state is not _I.READY, instance.details()


def _check_instance(state: State, idle: list[Instance], instance: Instance) -> None:
    known = state.instances.get(instance.peer)
    assert (known is not None and known[1] is instance) == bool(instance.peer), instance.details()
    assert not instance.lost or instance.state is not _I.READY, instance.details()
    assert not instance.held or instance.state not in (_I.WAITING, _I.STARTING, _I.READY), instance.details()
    if state.loading.forbids(instance.spec) and not state.draining:
        assert instance.held or instance.over or instance.state in (_I.KILLED, _I.GOING_TO_SLEEP), instance.details()
    if instance.quarantined and not instance.over:
        assert instance.waiting is None, instance.details()
        assert instance.running is None or instance.running.count == 1, instance.details()
    assert idle.count(instance) == int(instance.usable and instance.idle), instance.details()
    if instance.lease:
        lease = state.leases[instance.lease]
        assert lease.instance is instance, instance.details()
        assert instance.peer, instance.details()
        assert not instance.batches(), instance.details()
    if instance.running is not None:
        assert instance.running.state is BatchState.RUNNING, instance.details()
    if instance.waiting is not None:
        assert instance.waiting.state is BatchState.OPEN, instance.details()
    for batch in instance.batches():
        assert instance.peer, instance.details()
        remaining = batch.requests()
        assert batch.remaining == len(remaining), instance.details()
        assert batch.remaining or batch.state is BatchState.RUNNING, instance.details()
        assert batch.rows == sum(r.cost for _, piece in batch.pieces for r in piece if r.batch is batch), (
            instance.details()
        )
