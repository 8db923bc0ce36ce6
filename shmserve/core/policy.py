"""Policies: immutable values that describe a model to the core, compiled from its configuration (`repo.compile`)."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


class TimeoutAction(Enum):
    REJECT = "reject"
    DELAY = "delay"


class TensorSpec(Struct, frozen=True):
    """An input or output as callers see it. `dims` excludes the batch dimension; -1 is any size. `reshape` (the shape
    that steps see) and `labels` (directory and file) are set only for ensembles; workers handle both for other
    models."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False
    ragged: bool = False
    reshape: tuple[int, ...] | None = None
    labels: tuple[str, str] | None = None


class QueuePolicy(Struct, frozen=True):
    """Timeout and size limit of the queue at one priority level. 0: no limit."""

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
    """Padding of inputs to the longest in the batch, so that requests of different lengths can share a batch.

    `inputs`: (name, axes without the batch dimension) of the padded inputs. `lookahead`: how many waiting requests the
    batcher chooses from. `multiple`: padded lengths are multiples of this. `batch_cost`: fixed cost of a batch in
    elements, in addition to its elements (rows x padded length).
    """

    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    lookahead: int = 64
    multiple: int = 1
    batch_cost: int = 128


class SequencePolicy(Struct, frozen=True):
    """Sequence batching: each sequence is bound to an instance from its START to its END.

    `direct`: each sequence has a fixed batch slot, `slots` per instance; a batch runs when at least `utilization` of
    the slots have a request, or the oldest request has waited for `delay_ns`. Otherwise (oldest) an instance has up to
    `slots` candidate sequences, whose oldest requests are batched dynamically (`batching`). `id_control`: the control
    input with the sequence id; None: ids may be integers or strings. `iterative`: a request may run several times.
    """

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

    `mapped`: the ensemble tensor of which each row becomes a request. `condition`: the ensemble tensor that decides
    whether the step runs.
    """

    model: str
    version: int
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    mapped: str = ""
    condition: str = ""


class Resource(Struct, frozen=True):
    """A resource that an instance needs while it runs a batch. `shared`: one total for all devices instead of one per
    device."""

    name: str
    count: int
    shared: bool = False


class InstanceSpec(Struct, frozen=True):
    """One worker process. `cpus` empty: the same CPUs as the broker. `threads`: limit for the engine; 0: the engine's
    default.

    `resources` and `turn` are for the rate limiter; among instances that wait for resources, one with turn 2 runs half
    as often as one with turn 1.
    """

    name: str
    kind: str = "KIND_CPU"
    device: int = 0
    cpus: tuple[int, ...] = ()
    passive: bool = False
    threads: int = 0
    resources: tuple[Resource, ...] = ()
    turn: int = 1

    @property
    def on_gpu(self) -> bool:
        return self.kind == "KIND_GPU"


class MemoryEstimate(Struct, frozen=True):
    """Estimated memory of an instance in bytes: on the host and, if it uses one, on its GPU. `configured`: by the
    model's parameters."""

    host: int = 0
    gpu: int = 0
    configured: bool = False


class ModelPolicy(Struct, frozen=True):
    """One version of a model. `max_batch` 0: tensors have no batch dimension. `batching` None: no dynamic batching, one
    request at a time."""

    name: str
    version: int
    max_batch: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batching: BatchPolicy | None = None
    execution_limit_ns: int | None = None
    """A longer batch counts as hung. None: the server's limit; 0: no limit."""
    retry: bool = True
    """Retry requests whose worker died, once and each alone."""
    sequence: SequencePolicy | None = None
    steps: tuple[StepPolicy, ...] | None = None
    """Set for an ensemble, which has no instances."""
    decoupled: bool = False
    """A request may have any number of responses."""
    cached: bool = False
    """Responses are cached and reused for identical requests."""
    reads_device_memory: bool = False
    """The model's GPU instances can read inputs from device memory."""
    leaves_on_device: bool = False
    """The model's GPU instances can leave outputs in device memory."""
    ahead: int = 0
    """For an ensemble: how many responses a step may be ahead of those delivered to the caller; 0: the default."""
    crash_limit: int | None = None
    """Consecutive crashes after which an instance counts as broken. None: the server's limit; 0: never."""
    padding: PaddingPolicy | None = None
    """Requires `batching` and a batch dimension."""
    idle_unload_ns: int | None = None
    """Time without requests after which the version goes to sleep. None: the server's limit; 0: never."""
    stays_loaded: bool = False
    """The version never goes to sleep, not even to free memory for others."""
    prompt_inputs: tuple[str, ...] = ()
    """For language models whose engines report the tokens of prompts: the inputs that may contain the prompt."""
    queue_tokens: int = 0
    """Maximum number of tokens of the prompts that wait; 0: no limit."""
    streams: int = 0
    """How many requests an instance answers at once, if its engine forms the batches itself; 0: the server does."""
    first_response_ms: tuple[float, ...] = ()
    """Upper bucket bounds of the histogram of first response times; empty: Triton's."""


def thread_share(cores: int, quota: int, sharing: int, instances: int) -> int:
    """The threads of an instance: its cores divided by the number of the model's instances on the same cores. With a
    CPU quota, at most the instance's share of it among all instances of the model."""
    threads = cores // max(1, sharing)
    if quota:
        threads = min(threads, quota // max(1, instances))
    return max(1, threads)


class ScaledGroup(Struct, frozen=True):
    """Instances of one group on one device, from `minimum` to `maximum` of them. `specs`: by number, for `maximum`
    instances; an instance with a higher number reuses the spec at its number modulo `maximum`."""

    group: str
    minimum: int
    maximum: int
    specs: tuple[InstanceSpec, ...]


class ScalingPolicy(Struct, frozen=True):
    """The number of instances follows the load. `up_ns`: mean time in the queue above which instances are added.
    `down_ns`: how long fewer instances must have been enough before one is removed. `cores`: the cores of the server, 0
    if unknown. `quota`: as in `thread_share`."""

    groups: tuple[ScaledGroup, ...]
    up_ns: int
    down_ns: int
    cores: int = 0
    quota: int = 0
