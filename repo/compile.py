"""From a completed configuration to what the core schedules by, and to the worker processes of the model.

The rule of the file: no decisions; a field of the policy is a field of the configuration in the core's units.
"""

from __future__ import annotations

from collections.abc import Mapping

from shmserve.core.policy import BatchPolicy, InstanceSpec, ModelPolicy, QueuePolicy, TensorSpec, TimeoutAction
from shmserve.dtypes import FROM_CONFIG
from shmserve.repo.schema import ModelConfig, ModelDynamicBatching, ModelInput, ModelOutput, ModelQueuePolicy

_US = 1000
_ACTIONS = {"REJECT": TimeoutAction.REJECT, "DELAY": TimeoutAction.DELAY}


def compile_policy(config: ModelConfig, version: int) -> ModelPolicy:
    """What the core knows of one version of the model."""
    return ModelPolicy(
        name=config.name,
        version=version,
        max_batch=config.max_batch_size,
        inputs=tuple(_tensor(tensor) for tensor in config.input),
        outputs=tuple(_tensor(tensor) for tensor in config.output),
        batching=_batching(config.dynamic_batching) if config.dynamic_batching is not None else None,
    )


def compile_instances(
    config: ModelConfig, policies: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[InstanceSpec, ...]:
    """One spec for each process: `<group>_0`, `<group>_1`, ... Groups of the same name count on.

    A group on GPUs has `count` instances on each of its devices. `policies` are the CPU cores of each host policy;
    a group that names none has the policy `cpu` or `gpu_<device>`. No such policy: all cores.
    """
    policies = policies or {}
    numbers: dict[str, int] = {}
    specs = []
    for group in config.instance_group:
        devices = group.gpus if group.kind == "KIND_GPU" else (0,)
        for device in devices:
            for _ in range(group.count):
                number = numbers.get(group.name, 0)
                numbers[group.name] = number + 1
                name = f"{group.name}_{number}"
                policy = group.host_policy or (f"gpu_{device}" if group.kind == "KIND_GPU" else "cpu")
                cpus = policies.get(policy, ())
                specs.append(InstanceSpec(name, kind=group.kind, device=device, cpus=cpus, passive=group.passive))
    return tuple(specs)


def _tensor(tensor: ModelInput | ModelOutput) -> TensorSpec:
    dtype = FROM_CONFIG[tensor.data_type]
    if isinstance(tensor, ModelInput):
        return TensorSpec(tensor.name, dtype, tensor.dims, tensor.optional, tensor.allow_ragged_batch)
    return TensorSpec(tensor.name, dtype, tensor.dims)


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


def _queue(policy: ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        action=_ACTIONS[policy.timeout_action],
        timeout_ns=policy.default_timeout_microseconds * _US,
        allow_override=policy.allow_timeout_override,
        max_size=policy.max_queue_size,
    )
