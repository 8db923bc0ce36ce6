"""Builds the requests of steps: version, inputs, wanted outputs and options, and queues them.

Invariant: a step runs on the version that was found when the request began, except for sequences (`follow`).
"""

from __future__ import annotations

from msgspec.structs import replace

from shmserve.core.ensembles import graph
from shmserve.core.ensembles.run import Run, Spot
from shmserve.core.ledger import INTERNAL
from shmserve.core.records import Request, Version
from shmserve.core.requests import enqueue
from shmserve.core.requests.quotas import Quotas
from shmserve.core.sequences import scheduler
from shmserve.core.state import State
from shmserve.errors import HandleLost, ServeError, Unavailable, Unsupported
from shmserve.protocol.messages import LabelFile, Options, Tensor, Wanted

WINDOW = 16
"""Default number of responses that a source may be ahead of the caller."""


def follow(state: State, run: Run, index: int) -> None:
    """Continues a sequence where it started, which may be another generation than the current one or than the one
    that this run has held since it began."""
    step, options = run.graph.steps[index], run.request.options
    if options is None or not options.sequence:
        return
    member = scheduler.version_of(state, run.request.client, step.model, step.version, options)
    if member is not None and member is not run.members[index]:
        if member.decoupled and not run.members[index].decoupled:
            text = f"'{member.model}' of a step is decoupled, unlike its replacement"
            raise Unavailable(f"{text}; the request cannot continue")
        run.members[index] = member
        if member not in run.held:  # in addition to those held by name
            run.held[member] = member
            member.users += 1


def submit(
    state: State,
    quotas: Quotas,
    run: Run,
    spot: Spot,
    given: list[tuple[str, Tensor]],
    in_shared_memory: bool,
    now: int,
) -> None:
    """Queues one request to the model of a step."""
    index, _, iteration = spot
    parent, member = run.request, run.members[index]
    step, policy, checker = run.graph.steps[index], member.policy, member.checker
    assert policy is not None
    assert checker is not None
    batches = policy.max_batch > 0
    dims = {spec.name: spec.dims for spec in policy.inputs}
    inputs = tuple(
        Tensor(own, tensor.dtype, graph.fit(tensor.shape, dims.get(own, tensor.shape), batches), tensor.data)
        for own, tensor in given
    )
    outputs, final = _wanted(run, index)
    labels = _labels(run, index) if any(wanted.classes for wanted in outputs) else ()
    in_shared_memory = in_shared_memory or (final and parent.in_shared_memory)
    try:
        rows, signature, inline, _, length = checker.check(inputs, outputs)
    except ServeError as error:
        if step.mapped:  # the caller adds the position
            raise
        raise type(error)(f"step {index}: {error.message}") from None
    source = run.is_source(iteration, index)
    options = _passed_on(parent.options, _window(run) if source else 0)
    client = parent.client
    if member.graph is None and all(instance.over for instance in member.instances):
        raise Unavailable(f"{member.label} was unloaded meanwhile{member.reason and f': {member.reason}'}")
    quotas.check_queue(client, member, inline, now)
    level = 0
    if not member.plain:
        step_options = _without_sequence(options) if member.places is None and member.graph is None else options
        level = enqueue.level(state, client, member, step.version, step_options, rows, now)
    segments = tuple(graph.check_parts(inputs))
    inline += graph.HANDLE_BYTES * len(segments)
    segments += tuple(wanted.place.segment for wanted in outputs if wanted.place is not None)
    if segments:
        if any(state.ledger.segments[segment].lost for segment in segments):
            raise HandleLost("a tensor was on the GPU of an instance whose worker process has ended")
        state.ledger.use(segments)
    number = state.next_number()
    request = Request(
        number, parent.client, 0, member, inputs, outputs, options, rows, rows or 1, inline,
        signature, segments, (), (), now, level, deadline=parent.deadline,
        audience=parent.audience if final else INTERNAL, step_of=parent.number, in_shared_memory=in_shared_memory,
        special=True, near=_near(run, index, member) if policy.leaves_there and not final else (),
        aliases=not (final or step.mapped or member.cached), length=length, labels=labels,
    )  # fmt: skip
    state.requests[number] = run.out[number] = request
    if state.traces.active:
        state.traces.sample_child(request, parent)
    run.spots[number] = spot
    if source:
        run.sources[iteration.level] = request
    client.steps += 1
    client.bytes += inline
    enqueue.put(state, member, step.version, request, now)


def _wanted(run: Run, index: int) -> tuple[tuple[Wanted, ...], bool]:
    """The outputs to request from the model of a step, and whether some of them are for the caller."""
    step = run.graph.steps[index]
    found, final = [], False
    for own, name in step.outputs:
        wanted = run.wanted.get(name)
        final = final or name in run.wanted
        if wanted is None or (wanted.place is None and not wanted.classes):
            readers = [reader for reader in run.graph.readers.get(name, ()) if reader in run.needed]
            if name in run.wanted or readers:
                needed = name in run.wanted or any(_needs(run, reader, name) for reader in readers)
                found.append(Wanted(own, optional=not needed))
            continue
        if wanted.classes and name in run.graph.readers:
            raise Unsupported(f"output '{name}' is read by other steps and cannot be returned as classes")
        if wanted.place is not None and step.mapped:
            raise Unsupported(
                f"output '{name}' is produced by a mapped step and cannot be written to memory of the caller"
            )
        if wanted.place is not None and run.levels.tensors[name]:
            raise Unsupported(
                f"output '{name}' may be produced several times and cannot be written to memory of the caller"
            )
        found.append(Wanted(own, wanted.place, wanted.classes))
    return tuple(found), final


def _near(run: Run, index: int, member: Version) -> tuple[str, ...]:
    """Outputs whose readers are all on the GPU of the step's model and can read device memory."""
    device = _gpu_of(member)
    if device is None or member.cached:
        return ()
    near = []
    for own, name in run.graph.steps[index].outputs:
        readers = [run.members[reader] for reader in run.graph.readers.get(name, ()) if reader in run.needed]
        if readers and all(_reads_on(reader, device) for reader in readers):
            near.append(own)
    return tuple(near)


def _window(run: Run) -> int:
    """How many responses a source may be ahead."""
    options, policy = run.request.options, run.request.version.policy
    assert options is not None
    assert policy is not None
    return min(options.window, policy.ahead or WINDOW)


def _needs(run: Run, index: int, name: str) -> bool:
    """Does the step need the tensor: as a required input of the model, or for its own mapping or condition?"""
    step, policy = run.graph.steps[index], run.members[index].policy
    assert policy is not None
    optional = {spec.name for spec in policy.inputs if spec.optional}
    return name in (step.mapped, step.condition) or any(
        tensor == name and own not in optional for own, tensor in step.inputs
    )


def _gpu_of(version: Version) -> int | None:
    """The GPU on which all instances run, if it is the same one."""
    places = {
        instance.spec.device if instance.spec.kind == "KIND_GPU" else None
        for instance in version.instances
        if not instance.over
    }
    return places.pop() if len(places) == 1 else None


def _reads_on(version: Version, device: int) -> bool:
    return version.policy is not None and version.policy.reads_there and _gpu_of(version) == device


def _passed_on(options: Options | None, window: int) -> Options | None:
    """The caller's options for a step, with the window that applies to it."""
    if options is None or options.window == window:
        return options
    return replace(options, window=window)


def _without_sequence(options: Options | None) -> Options | None:
    """Options for the admission check of a model without sequences. The request keeps the id, which any model in an
    ensemble may read."""
    return options if options is None or not options.sequence else replace(options, sequence=0)


def _labels(run: Run, index: int) -> tuple[LabelFile, ...]:
    """Label files for the classification outputs of a step; the outermost ensemble that has some decides."""
    policy = run.request.version.policy
    assert policy is not None
    files = {spec.name: spec.labels for spec in policy.outputs}
    files |= {given.output: (given.folder, given.file) for given in run.request.labels}
    labels = []
    for own, name in run.graph.steps[index].outputs:
        wanted, file = run.wanted.get(name), files.get(name)
        if wanted is not None and wanted.classes and file is not None:
            labels.append(LabelFile(own, *file))
    return tuple(labels)
