"""Translates a completed configuration into the core's policy and the specs of the model's worker processes.

No decisions are made here: a field of the policy is a field of the configuration in the core's units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from msgspec import Struct, structs

from shmserve.core.policy import (
    BatchPolicy,
    IdControl,
    InstanceSpec,
    MemoryEstimate,
    ModelPolicy,
    PaddingPolicy,
    QueuePolicy,
    Resource,
    ScaledGroup,
    ScalingPolicy,
    SequencePolicy,
    TensorSpec,
    TimeoutAction,
    thread_share,
)
from shmserve.core.traffic import Traffic
from shmserve.dtypes import FROM_CONFIG
from shmserve.repo import parameters
from shmserve.repo.backends import BACKENDS, ENVIRONMENT_FILE
from shmserve.repo.config.complete import SEQUENCE_IDLE_US, is_ensemble
from shmserve.repo.config.schema import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelQueuePolicy,
    ModelSequenceBatching,
    ModelSequenceBatchingStrategyDirect,
    ModelSequenceBatchingStrategyOldest,
    parameter,
)
from shmserve.repo.rules.ensemble_steps import compile_steps
from shmserve.repo.rules.padding import padding_of
from shmserve.repo.rules.parameter_rules import scaled_groups

_US = 1000
DEFAULT_SLOTS = {"llamacpp": 4, "vllm": 256}
"""Backend of language models -> the default of its parameter `slots`."""
PROMPT_INPUTS = ("text_input", "messages", "prompt_token_ids", "suffix")
"""Inputs of language models that contain the prompt."""
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
ON_DEVICE = frozenset({"tensorrt", "onnxruntime", "pytorch"})
"""Backends that can read and write tensors on their process's GPU."""
_ACTIONS = {"REJECT": TimeoutAction.REJECT, "DELAY": TimeoutAction.DELAY}


def compile_policy(config: ModelConfig, version: int, folder: Path | None = None) -> ModelPolicy:
    """The core's policy for one version of the model. `folder`: the directory of an ensemble's label files."""
    cache = config.response_cache
    ensemble, is_python = config.ensemble_scheduling, config.backend == "python"
    # A library may read and write on its GPU. For other backends of users, the worker copies what is there.
    in_place = config.backend in ON_DEVICE or (config.backend not in BACKENDS and _has_gpu(config))
    return ModelPolicy(
        name=config.name,
        version=version,
        max_batch=config.max_batch_size,
        inputs=tuple(_tensor(tensor, ensemble is not None, None) for tensor in config.input),
        outputs=tuple(_tensor(tensor, ensemble is not None, folder) for tensor in config.output),
        batching=_batching(config.dynamic_batching) if config.dynamic_batching is not None else None,
        execution_limit_ns=parameters.EXECUTION_LIMIT.read(config),
        idle_unload_ns=parameters.IDLE_UNLOAD.read(config),
        stays_loaded=parameters.STAY_LOADED.read(config),
        retry=parameters.RETRY.read(config),
        crash_limit=parameters.CRASH_LIMIT.read(config),
        prompt_inputs=PROMPT_INPUTS if config.backend in DEFAULT_SLOTS and config.decoupled else (),
        queue_tokens=parameters.QUEUE_TOKENS.read(config),
        streams=_stream_slots(config) if config.decoupled else 0,
        first_response_ms=_first_response_buckets(config),
        sequence=_sequence(config, config.sequence_batching) if config.sequence_batching is not None else None,
        decoupled=config.decoupled,
        cached=cache is not None and cache.enable,
        reads_device_memory=in_place or (is_python and not parameters.HOST_INPUTS.read(config)),
        leaves_on_device=in_place or (is_python and _has_gpu(config)),
        steps=compile_steps(config),
        padding=_padding(config),
        ahead=ensemble.max_inflight_requests if ensemble is not None else 0,
    )


def compile_traffic(config: ModelConfig) -> Traffic:
    return Traffic(parameters.TRAFFIC.read(config), parameters.ALIASES.read(config), parameters.SHADOW.read(config))


def _has_gpu(config: ModelConfig) -> bool:
    return any(group.kind == "KIND_GPU" for group in config.instance_group)


HOST_BASE = 40 << 20
"""A Python process with an engine, without a model: a guess."""
GPU_BASE = 400 << 20
"""A CUDA context and the libraries of an engine: a guess."""


def memory_estimate(config: ModelConfig, files: int) -> MemoryEstimate:
    """What an instance probably needs. `files`: the size of its files. Engines need about half as much again for the
    graph and for intermediate results."""
    host, gpu = parameters.MEMORY.read(config), parameters.GPU_MEMORY.read(config)
    guess = files * 3 // 2
    return MemoryEstimate(
        HOST_BASE + guess if host is None else host,
        (GPU_BASE + guess if gpu is None else gpu) if _has_gpu(config) else 0,
        host is not None and (gpu is not None or not _has_gpu(config)),
    )


def environment(config: ModelConfig, folder: str, backend_folder: Path | None = None) -> str:
    """Path of the interpreter for its workers; "": the server's. `folder` is the model's directory, `backend_folder`
    that of its backend, if that is in the backend directory."""
    own = parameters.ENVIRONMENT.read(config).replace(parameters.MODEL_DIRECTORY, folder, 1)
    if own or backend_folder is None:
        return own
    shared = backend_folder / ENVIRONMENT_FILE
    return str(shared) if shared.exists() else ""


class CoreSet(Struct, frozen=True):
    """The CPU cores that the server may use, as found by `broker.processes.cpus`.

    `nodes` are the usable cores of each NUMA node, `policies` those of each host policy, `gpus` those near a GPU if not
    all are. `quota` above 0 limits the total CPU time to that many cores, as in a container.
    """

    usable: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...] = ()
    policies: dict[str, tuple[int, ...]] = {}
    gpus: dict[int, tuple[int, ...]] = {}
    quota: int = 0


def compile_instances(config: ModelConfig, cores: CoreSet | None = None) -> tuple[InstanceSpec, ...]:
    """One spec per process: `<group>_0`, `<group>_1`, ... Groups with the same name are numbered consecutively.

    A group on GPUs has `count` instances on each of its devices. The default host policy of a group is `cpu` or
    `gpu_<device>`. If only `count` grows, existing specs keep their names and cores, except that a model with fewer
    instances than there are NUMA nodes is not bound to nodes; `threads` become fewer. A group that is scaled begins
    with `count` instances, or as many as it has at least.
    """
    return _compile(config, cores, [max(group.count, minimum) for group, minimum, _ in scaled_groups(config)])


def _compile(config: ModelConfig, cores: CoreSet | None, counts: Sequence[int]) -> tuple[InstanceSpec, ...]:
    specs: list[InstanceSpec] = []
    numbers: dict[str, int] = {}
    policies: list[str] = []
    for group, count in zip(config.instance_group, counts, strict=True):
        gpu = group.kind == "KIND_GPU"
        for device in group.gpus if gpu else (0,):
            for _ in range(count):
                number = numbers.get(group.name, 0)
                numbers[group.name] = number + 1
                name = f"{group.name}_{number}"
                resources, turn = _limiter(group)
                specs.append(
                    InstanceSpec(name, group.kind, device, passive=group.passive, resources=resources, turn=turn)
                )
                policies.append(group.host_policy or (f"gpu_{device}" if gpu else "cpu"))
    if cores is None:
        return tuple(specs)
    bound = [_bound(spec, cores, policy) for spec, policy in zip(specs, policies, strict=True)]
    bound = _dealt(specs, bound, cores)
    return _with_cores(specs, bound, cores)


def compile_scaling(config: ModelConfig, cores: CoreSet | None = None) -> ScalingPolicy | None:
    """How the number of instances follows the load; None: it does not."""
    bounds = scaled_groups(config)
    if is_ensemble(config) or not any(minimum < maximum for _, minimum, maximum in bounds):
        return None
    specs = iter(_compile(config, cores, [maximum for _, _, maximum in bounds]))
    groups = []
    for group, minimum, maximum in bounds:
        for _ in group.gpus if group.kind == "KIND_GPU" else (0,):
            of_group = tuple(islice(specs, maximum))
            if minimum < maximum:
                groups.append(ScaledGroup(group.name, minimum, maximum, of_group))
    return ScalingPolicy(
        tuple(groups),
        parameters.SCALE_UP_QUEUE.read(config),
        parameters.SCALE_DOWN.read(config),
        len(cores.usable) if cores is not None else 0,
        cores.quota if cores is not None else 0,
    )


def _stream_slots(config: ModelConfig) -> int:
    """How many texts an instance of a language model generates at once; 0 for other models."""
    if config.backend not in DEFAULT_SLOTS:
        return 0
    text = parameter(config, "slots") or ""
    return int(text) if text.isdecimal() else DEFAULT_SLOTS[config.backend]


def _bound(spec: InstanceSpec, cores: CoreSet, policy: str) -> tuple[int, ...]:
    """The cores that a host policy or a GPU assigns to an instance; empty: any of the server's."""
    policy_cores = cores.policies.get(policy, ())
    return policy_cores or (cores.gpus.get(spec.device, ()) if spec.kind == "KIND_GPU" else ())


def _dealt(specs: list[InstanceSpec], bound: list[tuple[int, ...]], cores: CoreSet) -> list[tuple[int, ...]]:
    """Distributes instances without assigned cores over the NUMA nodes, if their shares fit into a node."""
    free = [spec for spec, cpus in zip(specs, bound, strict=True) if not cpus and spec.kind != "KIND_GPU"]
    sharing = sum(not spec.passive for spec in free)
    if len(cores.nodes) < 2 or not sharing or len(cores.usable) // sharing > min(map(len, cores.nodes)):
        return bound
    # By group and number, so that more instances of one group do not move those of the next group.
    turns: dict[str, int] = {}
    dealt = []
    for spec, cpus in zip(specs, bound, strict=True):
        group, _, number = spec.name.rpartition("_")
        turn = (turns.setdefault(group, len(turns)) + int(number)) % len(cores.nodes)
        dealt.append(cpus or (cores.nodes[turn] if spec.kind != "KIND_GPU" else ()))
    return dealt


def _with_cores(specs: list[InstanceSpec], bound: list[tuple[int, ...]], cores: CoreSet) -> tuple[InstanceSpec, ...]:
    """`threads` is an instance's share: its cores divided by the number of the model's instances on the same cores."""
    sharing = Counter(cpus for spec, cpus in zip(specs, bound, strict=True) if not spec.passive)
    results = []
    for spec, cpus in zip(specs, bound, strict=True):
        threads = thread_share(len(cpus or cores.usable), cores.quota, sharing[cpus], sharing.total())
        results.append(structs.replace(spec, cpus=cpus, threads=threads))
    return tuple(results)


def _limiter(group: ModelInstanceGroup) -> tuple[tuple[Resource, ...], int]:
    limiter = group.rate_limiter
    if limiter is None:
        return (), 1
    return tuple(Resource(need.name, need.count, need.global_) for need in limiter.resources), limiter.priority or 1


def _tensor(tensor: ModelInput | ModelOutput, of_ensemble: bool, folder: Path | None) -> TensorSpec:
    dtype = FROM_CONFIG[tensor.data_type]
    reshape = tensor.reshape.shape if of_ensemble and tensor.reshape is not None else None
    if isinstance(tensor, ModelInput):
        return TensorSpec(tensor.name, dtype, tensor.dims, tensor.optional, tensor.allow_ragged_batch, reshape)
    has_labels = of_ensemble and folder is not None and tensor.label_filename
    labels = (str(folder), tensor.label_filename) if has_labels else None
    return TensorSpec(tensor.name, dtype, tensor.dims, reshape=reshape, labels=labels)


def _batching(dynamic: ModelDynamicBatching) -> BatchPolicy:
    return BatchPolicy(
        preferred=tuple(sorted(set(dynamic.preferred_batch_size))),
        delay_ns=dynamic.max_queue_delay_microseconds * _US,
        preserve_ordering=dynamic.preserve_ordering,
        levels=dynamic.priority_levels,
        default_level=dynamic.default_priority_level,
        default_policy=_queue(dynamic.default_queue_policy or ModelQueuePolicy()),
        level_policies={level: _queue(policy) for level, policy in sorted(dynamic.priority_queue_policy.items())},
    )


def _padding(config: ModelConfig) -> PaddingPolicy | None:
    padding = padding_of(config)
    if padding is None:
        return None
    inputs = tuple((entry.name, entry.axes) for entry in padding.inputs)
    return PaddingPolicy(inputs, padding.lookahead, padding.multiple, padding.batch_cost)


def _sequence(config: ModelConfig, sequence: ModelSequenceBatching) -> SequencePolicy:
    """The sequence policy; the default strategy is direct."""
    oldest = sequence.oldest
    direct = sequence.direct or ModelSequenceBatchingStrategyDirect()
    return SequencePolicy(
        direct=oldest is None,
        slots=max(1, config.max_batch_size if oldest is None else oldest.max_candidate_sequences),
        idle_ns=(sequence.max_sequence_idle_microseconds or SEQUENCE_IDLE_US) * _US,
        delay_ns=direct.max_queue_delay_microseconds * _US if oldest is None else 0,
        utilization=direct.minimum_slot_utilization if oldest is None else 0.0,
        batching=_oldest(config, oldest) if oldest is not None else BatchPolicy(),
        iterative=sequence.iterative_sequence,
        id_control=_id_control(sequence),
    )


def _oldest(config: ModelConfig, oldest: ModelSequenceBatchingStrategyOldest) -> BatchPolicy:
    """The batch policy of strategy oldest; preferred sizes have the same default as in dynamic batching."""
    sizes = oldest.preferred_batch_size or ((config.max_batch_size,) if config.max_batch_size else ())
    return BatchPolicy(
        preferred=tuple(sorted(set(sizes))),
        delay_ns=oldest.max_queue_delay_microseconds * _US,
        preserve_ordering=oldest.preserve_ordering,
    )


def _id_control(sequence: ModelSequenceBatching) -> IdControl | None:
    for tensor in sequence.control_input:
        for control in tensor.control:
            if control.kind == "CONTROL_SEQUENCE_CORRID":
                return IdControl(tensor.name, FROM_CONFIG[control.data_type])
    return None


def _queue(policy: ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        action=_ACTIONS[policy.timeout_action],
        timeout_ns=policy.default_timeout_microseconds * _US,
        allow_override=policy.allow_timeout_override,
        max_size=policy.max_queue_size,
    )


def _first_response_buckets(config: ModelConfig) -> tuple[float, ...]:
    """Buckets of the only metric family whose buckets a model can set, as in Triton."""
    for control in config.model_metrics.metric_control if config.model_metrics is not None else ():
        named, options = control.metric_identifier, control.histogram_options
        if named is not None and options is not None and named.family == FIRST_RESPONSE:
            return options.buckets
    return ()
