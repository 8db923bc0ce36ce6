"""Builds the requests of steps: version, inputs, wanted outputs and options, and queues them.

Invariant: a step runs on the version that was found when the request began, except for sequences (`follow`).
"""

from __future__ import annotations

from msgspec.structs import replace

from shmserve.core.batching import sequence_scheduler
from shmserve.core.intake import enqueue
from shmserve.core.intake.intake import Intake
from shmserve.core.intake.quotas import Quotas
from shmserve.core.ledger import INTERNAL
from shmserve.core.models import memory
from shmserve.core.owners.run import FITTED, Run, StepPosition
from shmserve.core.records import Request, Version
from shmserve.core.service import graph
from shmserve.core.service.graph import FittedInputs, StepInput, StepPlan
from shmserve.core.state import State
from shmserve.dtypes import ITEM_BYTES
from shmserve.errors import ServeError, Unavailable, Unsupported
from shmserve.protocol.messages import FIELD_BYTES, Options, Tensor, Wanted
from shmserve.protocol.worker_messages import LabelFile, StepOptions

WINDOW = 16
"""Default number of responses that a source may be ahead of the caller."""


class Steps:
    def __init__(self, state: State, intake: Intake, quotas: Quotas) -> None:
        self._state = state
        self._intake = intake
        self._quotas = quotas

    def follow(self, run: Run, index: int, options: Options) -> None:
        """Continues a sequence in the generation where it started. That can differ from the current generation and from
        the one that this run holds."""
        step = run.graph.steps[index]
        name = self._state.resolve(step.model, run.request.version.model)
        member = sequence_scheduler.version_of(self._state, run.request.client, name, step.version, options)
        if member is not None and member is not run.members[index]:
            if member.service.decoupled and not run.members[index].service.decoupled:
                text = f"'{member.model}' of a step is decoupled, unlike its replacement"
                raise Unavailable(f"{text}; the request cannot continue")
            run.follow(index, member)

    def submit(
        self,
        run: Run,
        position: StepPosition,
        tensors: list[tuple[StepInput, Tensor]],
        in_shared_memory: bool,
        now: int,
    ) -> None:
        """Queues one request to the model of a step."""
        state, quotas = self._state, self._quotas
        index, _, iteration = position
        parent, member, plan = run.request, run.members[index], run.plans[index]
        step, client, options = run.graph.steps[index], parent.client, parent.options
        final = plan.final
        outputs = plan.outputs if not final or parent.outputs is None else _placed(run, index, plan)
        try:
            inputs, rows, signature, inline, length = _fitted(plan, member, tensors, outputs)
        except ServeError as error:
            if step.mapped:  # the caller adds the position
                raise
            raise type(error)(f"step {index}: {error.message}") from None
        source = run.is_source(iteration, index)
        if options is not None:
            options = _passed_on(options, _window(run) if source else 0)
        if member.service.graph is None and all(instance.over for instance in member.instances):
            raise Unavailable(f"{member.label} was unloaded meanwhile{member.reason and f': {member.reason}'}")
        busy = len(state.requests) >= quotas.busy
        if busy:
            quotas.check_queue(parent.payer, member, inline)
        level = 0
        service = member.service
        if not service.plain:
            passes_sequence = service.sequence_slots is not None or service.graph is not None
            step_options = options if passes_sequence else _without_sequence(options)
            level = enqueue.level(state, client, member, step.version, step_options, rows, now)
        segments = graph.check_parts(inputs)
        if segments:
            inline += graph.HANDLE_BYTES * len(segments)
        if outputs is not plan.outputs:
            segments += [wanted.place.segment for wanted in outputs if wanted.place is not None]
        used = tuple(segments)
        if used:
            state.ledger.use_present(used)
        near = _near(state, run, index, member) if plan.policy.leaves_on_device and not final else ()
        labels = _labels(run, index) if outputs is not plan.outputs else ()
        request = self._intake.step(
            run,
            parent,
            member,
            inputs,
            outputs,
            options,
            (rows, signature, inline, length),
            used,
            level,
            now,
            parent.audience if final else INTERNAL,
            in_shared_memory or (final and parent.in_shared_memory),
            None if final or step.mapped or service.cached else run.forwarded,
            StepOptions(near, labels) if near or labels else None,
        )
        run.entered(request, position)
        if source:
            run.sources[iteration.level] = request
        if busy:
            quotas.admitted(parent.payer, inline)
        enqueue.put(state, member, step.version, request, now)


def _fitted(
    plan: StepPlan, member: Version, tensors: list[tuple[StepInput, Tensor]], outputs: tuple[Wanted, ...]
) -> tuple[tuple[Tensor, ...], int, object, int, int]:
    """The inputs in the shapes of the model, and the results of their check: rows, signature, bytes inside messages and
    length. Raises if the model does not accept them or the outputs."""
    service = member.service
    key = tuple([(one.own, tensor.dtype, tensor.shape) for one, tensor in tensors])
    known = plan.fitted.get(key)
    if known is not None:
        inputs = tuple(
            [
                Tensor(one.own, tensor.dtype, shape, tensor.data)
                for (one, tensor), shape in zip(tensors, known.shapes, strict=True)
            ]
        )
        sizes = [_size(tensor) for _, tensor in tensors]
        inline = sum([len(tensor.data) for tensor in inputs if type(tensor.data) is bytes])
        if sizes == known.sizes and inline <= FIELD_BYTES:
            return inputs, known.rows, known.signature, inline, known.length
    batches = plan.policy.max_batch > 0
    inputs = tuple(
        [
            Tensor(own, t.dtype, graph.fit(t.shape, t.shape if dims is None else dims, batches), t.data)
            for (own, _, dims, _), t in tensors
        ]
    )
    assert member.policy is not None
    rows, signature, inline, _, length = service.checker.check(inputs, outputs)
    if all(ITEM_BYTES[tensor.dtype] for tensor in inputs):  # otherwise other tensors of these shapes may be invalid
        if len(plan.fitted) >= FITTED:
            plan.fitted.clear()
        shapes, sizes = [tensor.shape for tensor in inputs], [_size(tensor) for tensor in inputs]
        plan.fitted[key] = FittedInputs(shapes, sizes, rows, signature, length)
    return inputs, rows, signature, inline, length


def _size(tensor: Tensor) -> int:
    data = tensor.data
    return sum([part.size for part in data]) if type(data) is tuple else len(data)  # type: ignore[arg-type]


def _placed(run: Run, index: int, plan: StepPlan) -> tuple[Wanted, ...]:
    """The outputs of the plan, some of which the caller may want placed in its memory or as classes."""
    step = run.graph.steps[index]
    planned = {wanted.name: wanted for wanted in plan.outputs}
    outputs = []
    for own, name in step.outputs:
        wanted = run.wanted.get(name)
        if wanted is None or (wanted.place is None and not wanted.classes):
            if own in planned:
                outputs.append(planned[own])
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
        outputs.append(Wanted(own, wanted.place, wanted.classes))
    return tuple(outputs)


def _near(state: State, run: Run, index: int, member: Version) -> tuple[str, ...]:
    """Outputs whose readers all run on the GPU of the step's model and can read device memory. If that GPU has a memory
    budget, the readers must stay loaded: the step's model could not go to sleep to make room for a reader of its own
    outputs."""
    device = _gpu_of(member)
    if device is None or member.service.cached:
        return ()
    limited = memory.budget_of(state, device) > 0
    near = []
    for own, name in run.graph.steps[index].outputs:
        readers = [run.members[reader] for reader in run.graph.readers.get(name, ()) if reader in run.needed]
        if readers and all(
            _reads_on(reader, device) and (memory.stays_loaded(reader) or not limited) for reader in readers
        ):
            near.append(own)
    return tuple(near)


def _window(run: Run) -> int:
    """How many responses a source may be ahead of the caller."""
    options, policy = run.request.options, run.request.version.policy
    assert options is not None
    assert policy is not None
    return min(options.window, policy.ahead or WINDOW)


def _gpu_of(version: Version) -> int | None:
    """The GPU on which all instances run; None if they run on different ones."""
    places = {
        instance.spec.device if instance.spec.on_gpu else None for instance in version.instances if not instance.over
    }
    return places.pop() if len(places) == 1 else None


def _reads_on(version: Version, device: int) -> bool:
    return version.policy is not None and version.policy.reads_device_memory and _gpu_of(version) == device


def _passed_on(options: Options, window: int) -> Options:
    """The caller's options for a step, with the window that applies to it."""
    return options if options.window == window else replace(options, window=window)


def _without_sequence(options: Options | None) -> Options | None:
    """Options for the admission check of a model without sequences. The request keeps the id, which any model in an
    ensemble may read."""
    return options if options is None or not options.sequence else replace(options, sequence=0)


def _labels(run: Run, index: int) -> tuple[LabelFile, ...]:
    """Label files for the classification outputs of a step."""
    labels = []
    for own, name in run.graph.steps[index].outputs:
        wanted = run.wanted.get(name)
        if wanted is not None and wanted.classes and (file := _label_file(run.request, name)) is not None:
            labels.append(LabelFile(own, *file))
    return tuple(labels)


def _label_file(request: Request, output: str) -> tuple[str, str] | None:
    """The folder and file for an output of an ensemble: those of the outermost ensemble that has any."""
    for outer in request.step.labels if request.step is not None else ():
        if outer.output == output:
            return outer.folder, outer.file
    policy = request.version.policy
    assert policy is not None
    return next((spec.labels for spec in policy.outputs if spec.name == output), None)
