"""What the core knows of a model: frozen values, compiled from its configuration (`repo.compile`)."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


class TimeoutAction(Enum):
    REJECT = "reject"
    DELAY = "delay"


class TensorSpec(Struct, frozen=True):
    """An input or output as callers see it. `dims` has no batch dimension; -1 is any size. `reshape` and
    `labels` are of ensembles, those of other models are their workers' concern: the shape that steps see, and the
    directory and file of the labels."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False
    ragged: bool = False
    reshape: tuple[int, ...] | None = None
    labels: tuple[str, str] | None = None


class QueuePolicy(Struct, frozen=True):
    """How long and how many may wait at one priority level. 0: no limit."""

    action: TimeoutAction = TimeoutAction.REJECT
    timeout_ns: int = 0
    allow_override: bool = False
    max_size: int = 0


class BatchPolicy(Struct, frozen=True):
    """Dynamic batching. `levels` 0: no priorities. Level 1 is the most urgent."""

    preferred: tuple[int, ...] = ()
    delay_ns: int = 0
    preserve_ordering: bool = False
    levels: int = 0
    default_level: int = 0
    default_policy: QueuePolicy = QueuePolicy()
    level_policies: dict[int, QueuePolicy] = {}


class IdControl(Struct, frozen=True):
    """The control input that holds the id of a sequence."""

    name: str
    dtype: str


class PaddingPolicy(Struct, frozen=True):
    """Requests that differ in length share a batch: their inputs are padded to the longest, its length.

    `inputs`: (name, axes without the batch dimension) of those that are padded. `lookahead`: how many waiting requests
    the batcher chooses from. `multiple`: padded lengths are multiples of this. `batch_cost`: what a batch costs beside
    its elements (rows x padded length), in elements."""

    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    lookahead: int = 64
    multiple: int = 1
    batch_cost: int = 128


class SequencePolicy(Struct, frozen=True):
    """Requests belong to sequences, each of which is bound to an instance from its START to its END.

    `direct`: each has a place in the batch of its own, `slots` of them an instance; a batch is run when at least
    `utilization` of the slots have a request, or the oldest has waited for `delay_ns`. Otherwise an instance has
    `slots` candidates, whose oldest requests are put together as dynamic batching does (`batching`).
    `id_control`: the control in which the model gets the ids; None: they may be of either kind. `iterative`: a request
    may be run many times."""

    direct: bool
    slots: int
    idle_ns: int
    delay_ns: int = 0
    utilization: float = 0.0
    batching: BatchPolicy = BatchPolicy()
    iterative: bool = False
    id_control: IdControl | None = None


class StepPolicy(Struct, frozen=True):
    """A step of an ensemble. `inputs` and `outputs`: (tensor of the model, tensor of the ensemble), sorted.

    `mapped`: the ensemble's tensor whose rows are requests of their own. `condition`: the ensemble's tensor that says
    whether the step is run at all."""

    model: str
    version: int
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    mapped: str = ""
    condition: str = ""


class Resource(Struct, frozen=True):
    """What an instance needs while it runs a batch. Not `shared`: each device has its own."""

    name: str
    count: int
    shared: bool = False


class InstanceSpec(Struct, frozen=True):
    """One worker process. `cpus` empty: those of the broker. `threads`: how many an engine may use; 0: as it likes.

    `resources` and `turn` (of those that wait for resources, one of turn 2 gets half as many as one of turn 1) are for
    the rate limiter."""

    name: str
    kind: str = "KIND_CPU"
    device: int = 0
    cpus: tuple[int, ...] = ()
    passive: bool = False
    threads: int = 0
    resources: tuple[Resource, ...] = ()
    turn: int = 1


class ModelPolicy(Struct, frozen=True):
    """One version of one model. `max_batch` 0: tensors have no batch dimension. `batching` None: one at a time."""

    name: str
    version: int
    max_batch: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batching: BatchPolicy | None = None
    execution_limit_ns: int | None = None
    """A batch that takes longer hangs. None: the server's limit; 0: no limit."""
    retry: bool = True
    """Requests that lost their worker are run again, each alone, once."""
    sequence: SequencePolicy | None = None
    steps: tuple[StepPolicy, ...] | None = None
    """An ensemble has these, and no instances."""
    decoupled: bool = False
    """It answers a request as often as it likes."""
    cached: bool = False
    """Answers are kept, and given to whoever asks the same."""
    reads_there: bool = False
    """Its instances on GPUs can read tensors there."""
    leaves_there: bool = False
    """They can leave tensors there."""
    ahead: int = 0
    """How many answers a step of this ensemble may be ahead of what the caller has been given; 0: as usual."""
    crash_limit: int | None = None
    """Crashes in a row after which an instance counts as broken. None: the server's limit; 0: never."""
    padding: PaddingPolicy | None = None
    """Only with `batching` and a batch dimension."""
    first_response_ms: tuple[float, ...] = ()
    """Upper edges of the histogram of times to the first response; empty: Triton's."""
