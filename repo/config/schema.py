"""The configuration of a model as immutable structs: produced by `load`, read by all other code.

Invariant: structs and fields have the names, and fields the order, of model_config.proto (nested messages are prefixed
with their parents' names), so that structs, text format and JSON correspond. A message that is not set is None; all
other fields have proto defaults. Imports nothing from shmserve, because workers use it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct, field


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of all message structs."""


DataType = Literal[
    "TYPE_INVALID",
    "TYPE_BOOL",
    "TYPE_UINT8",
    "TYPE_UINT16",
    "TYPE_UINT32",
    "TYPE_UINT64",
    "TYPE_INT8",
    "TYPE_INT16",
    "TYPE_INT32",
    "TYPE_INT64",
    "TYPE_FP16",
    "TYPE_FP32",
    "TYPE_FP64",
    "TYPE_STRING",
    "TYPE_BF16",
]
ModelInstanceGroupKind = Literal["KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"]
ModelInstanceGroupSecondaryDeviceSecondaryDeviceKind = Literal["KIND_NVDLA"]
ModelInputFormat = Literal["FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW"]
BatchInputKind = Literal[
    "BATCH_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    "BATCH_ITEM_SHAPE",
    "BATCH_ITEM_SHAPE_FLATTEN",
]
BatchOutputKind = Literal["BATCH_SCATTER_WITH_INPUT_SHAPE"]
ModelOptimizationPolicyModelPriority = Literal["PRIORITY_DEFAULT", "PRIORITY_MAX", "PRIORITY_MIN"]
ModelQueuePolicyTimeoutAction = Literal["REJECT", "DELAY"]
ModelSequenceBatchingControlKind = Literal[
    "CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_READY", "CONTROL_SEQUENCE_END", "CONTROL_SEQUENCE_CORRID"
]


class ModelVersionPolicyLatest(Message, frozen=True):
    num_versions: int = 0


class ModelVersionPolicyAll(Message, frozen=True):
    pass


class ModelVersionPolicySpecific(Message, frozen=True):
    versions: tuple[int, ...] = ()


class ModelVersionPolicy(Message, frozen=True):
    latest: ModelVersionPolicyLatest | None = None
    all: ModelVersionPolicyAll | None = None
    specific: ModelVersionPolicySpecific | None = None


class ModelTensorReshape(Message, frozen=True):
    shape: tuple[int, ...] = ()


class ModelInput(Message, frozen=True):
    name: str = ""
    data_type: DataType = "TYPE_INVALID"
    format: ModelInputFormat = "FORMAT_NONE"
    dims: tuple[int, ...] = ()
    reshape: ModelTensorReshape | None = None
    is_shape_tensor: bool = False
    allow_ragged_batch: bool = False
    optional: bool = False
    is_non_linear_format_io: bool = False


class ModelOutput(Message, frozen=True):
    name: str = ""
    data_type: DataType = "TYPE_INVALID"
    dims: tuple[int, ...] = ()
    reshape: ModelTensorReshape | None = None
    label_filename: str = ""
    is_shape_tensor: bool = False
    is_non_linear_format_io: bool = False


class BatchInput(Message, frozen=True):
    kind: BatchInputKind = "BATCH_ELEMENT_COUNT"
    target_name: tuple[str, ...] = ()
    data_type: DataType = "TYPE_INVALID"
    source_input: tuple[str, ...] = ()


class BatchOutput(Message, frozen=True):
    target_name: tuple[str, ...] = ()
    kind: BatchOutputKind = "BATCH_SCATTER_WITH_INPUT_SHAPE"
    source_input: tuple[str, ...] = ()


class ModelOptimizationPolicyGraph(Message, frozen=True):
    level: int = 0


class ModelOptimizationPolicyCudaGraphSpecShape(Message, frozen=True):
    dim: tuple[int, ...] = ()


class ModelOptimizationPolicyCudaGraphSpecLowerBound(Message, frozen=True):
    batch_size: int = 0
    input: dict[str, ModelOptimizationPolicyCudaGraphSpecShape] = {}


class ModelOptimizationPolicyCudaGraphSpec(Message, frozen=True):
    batch_size: int = 0
    input: dict[str, ModelOptimizationPolicyCudaGraphSpecShape] = {}
    graph_lower_bound: ModelOptimizationPolicyCudaGraphSpecLowerBound | None = None


class ModelOptimizationPolicyCuda(Message, frozen=True):
    graphs: bool = False
    busy_wait_events: bool = False
    graph_spec: tuple[ModelOptimizationPolicyCudaGraphSpec, ...] = ()
    output_copy_stream: bool = False


class ModelOptimizationPolicyExecutionAcceleratorsAccelerator(Message, frozen=True):
    name: str = ""
    parameters: dict[str, str] = {}


class ModelOptimizationPolicyExecutionAccelerators(Message, frozen=True):
    gpu_execution_accelerator: tuple[ModelOptimizationPolicyExecutionAcceleratorsAccelerator, ...] = ()
    cpu_execution_accelerator: tuple[ModelOptimizationPolicyExecutionAcceleratorsAccelerator, ...] = ()


class ModelOptimizationPolicyPinnedMemoryBuffer(Message, frozen=True):
    enable: bool = False


class ModelOptimizationPolicy(Message, frozen=True):
    graph: ModelOptimizationPolicyGraph | None = None
    priority: ModelOptimizationPolicyModelPriority = "PRIORITY_DEFAULT"
    cuda: ModelOptimizationPolicyCuda | None = None
    execution_accelerators: ModelOptimizationPolicyExecutionAccelerators | None = None
    input_pinned_memory: ModelOptimizationPolicyPinnedMemoryBuffer | None = None
    output_pinned_memory: ModelOptimizationPolicyPinnedMemoryBuffer | None = None
    gather_kernel_buffer_threshold: int = 0
    eager_batching: bool = False


class ModelQueuePolicy(Message, frozen=True):
    timeout_action: ModelQueuePolicyTimeoutAction = "REJECT"
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


class ModelDynamicBatching(Message, frozen=True):
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: ModelQueuePolicy | None = None
    priority_queue_policy: dict[int, ModelQueuePolicy] = {}


class ModelSequenceBatchingStrategyDirect(Message, frozen=True):
    max_queue_delay_microseconds: int = 0
    minimum_slot_utilization: float = 0.0


class ModelSequenceBatchingStrategyOldest(Message, frozen=True):
    max_candidate_sequences: int = 0
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False


class ModelSequenceBatchingControl(Message, frozen=True):
    kind: ModelSequenceBatchingControlKind = "CONTROL_SEQUENCE_START"
    int32_false_true: tuple[int, ...] = ()
    fp32_false_true: tuple[float, ...] = ()
    bool_false_true: tuple[bool, ...] = ()
    data_type: DataType = "TYPE_INVALID"


class ModelSequenceBatchingControlInput(Message, frozen=True):
    name: str = ""
    control: tuple[ModelSequenceBatchingControl, ...] = ()


class ModelSequenceBatchingInitialState(Message, frozen=True):
    data_type: DataType = "TYPE_INVALID"
    dims: tuple[int, ...] = ()
    zero_data: bool | None = None
    data_file: str | None = None
    name: str = ""


class ModelSequenceBatchingState(Message, frozen=True):
    input_name: str = ""
    output_name: str = ""
    data_type: DataType = "TYPE_INVALID"
    dims: tuple[int, ...] = ()
    initial_state: tuple[ModelSequenceBatchingInitialState, ...] = ()
    use_same_buffer_for_input_output: bool = False
    use_growable_memory: bool = False


class ModelSequenceBatching(Message, frozen=True):
    direct: ModelSequenceBatchingStrategyDirect | None = None
    oldest: ModelSequenceBatchingStrategyOldest | None = None
    max_sequence_idle_microseconds: int = 0
    control_input: tuple[ModelSequenceBatchingControlInput, ...] = ()
    state: tuple[ModelSequenceBatchingState, ...] = ()
    iterative_sequence: bool = False


class ModelEnsemblingStep(Message, frozen=True):
    model_name: str = ""
    model_version: int = 0
    input_map: dict[str, str] = {}
    output_map: dict[str, str] = {}
    model_namespace: str = ""


class ModelEnsembling(Message, frozen=True):
    step: tuple[ModelEnsemblingStep, ...] = ()
    max_inflight_requests: int = 0


class ModelRateLimiterResource(Message, frozen=True):
    name: str = ""
    global_: bool = field(default=False, name="global")
    count: int = 0


class ModelRateLimiter(Message, frozen=True):
    resources: tuple[ModelRateLimiterResource, ...] = ()
    priority: int = 0


class ModelInstanceGroupSecondaryDevice(Message, frozen=True):
    kind: ModelInstanceGroupSecondaryDeviceSecondaryDeviceKind = "KIND_NVDLA"
    device_id: int = 0


class ModelInstanceGroup(Message, frozen=True):
    name: str = ""
    kind: ModelInstanceGroupKind = "KIND_AUTO"
    count: int = 0
    rate_limiter: ModelRateLimiter | None = None
    gpus: tuple[int, ...] = ()
    secondary_devices: tuple[ModelInstanceGroupSecondaryDevice, ...] = ()
    profile: tuple[str, ...] = ()
    passive: bool = False
    host_policy: str = ""


class ModelParameter(Message, frozen=True):
    string_value: str = ""


class ModelWarmupInput(Message, frozen=True):
    data_type: DataType = "TYPE_INVALID"
    dims: tuple[int, ...] = ()
    zero_data: bool | None = None
    random_data: bool | None = None
    input_data_file: str | None = None


class ModelWarmup(Message, frozen=True):
    name: str = ""
    batch_size: int = 0
    inputs: dict[str, ModelWarmupInput] = {}
    count: int = 0


class ModelOperations(Message, frozen=True):
    op_library_filename: tuple[str, ...] = ()


class ModelTransactionPolicy(Message, frozen=True):
    decoupled: bool = False


class ModelRepositoryAgentsAgent(Message, frozen=True):
    name: str = ""
    parameters: dict[str, str] = {}


class ModelRepositoryAgents(Message, frozen=True):
    agents: tuple[ModelRepositoryAgentsAgent, ...] = ()


class ModelResponseCache(Message, frozen=True):
    enable: bool = False


class ModelMetricsMetricControlMetricIdentifier(Message, frozen=True):
    family: str = ""


class ModelMetricsMetricControlHistogramOptions(Message, frozen=True):
    buckets: tuple[float, ...] = ()


class ModelMetricsMetricControl(Message, frozen=True):
    metric_identifier: ModelMetricsMetricControlMetricIdentifier | None = None
    histogram_options: ModelMetricsMetricControlHistogramOptions | None = None


class ModelMetrics(Message, frozen=True):
    metric_control: tuple[ModelMetricsMetricControl, ...] = ()


class ModelConfig(Message, frozen=True):
    name: str = ""
    platform: str = ""
    backend: str = ""
    runtime: str = ""
    version_policy: ModelVersionPolicy | None = None
    max_batch_size: int = 0
    input: tuple[ModelInput, ...] = ()
    output: tuple[ModelOutput, ...] = ()
    batch_input: tuple[BatchInput, ...] = ()
    batch_output: tuple[BatchOutput, ...] = ()
    optimization: ModelOptimizationPolicy | None = None
    dynamic_batching: ModelDynamicBatching | None = None
    sequence_batching: ModelSequenceBatching | None = None
    ensemble_scheduling: ModelEnsembling | None = None
    instance_group: tuple[ModelInstanceGroup, ...] = ()
    default_model_filename: str = ""
    cc_model_filenames: dict[str, str] = {}
    metric_tags: dict[str, str] = {}
    parameters: dict[str, ModelParameter] = {}
    model_warmup: tuple[ModelWarmup, ...] = ()
    model_operations: ModelOperations | None = None
    model_transaction_policy: ModelTransactionPolicy | None = None
    model_repository_agents: ModelRepositoryAgents | None = None
    response_cache: ModelResponseCache | None = None
    model_metrics: ModelMetrics | None = None

    @property
    def decoupled(self) -> bool:
        """True if a request may have any number of responses."""
        return self.model_transaction_policy is not None and self.model_transaction_policy.decoupled


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ModelConfig)


def parameter(config: ModelConfig, key: str) -> str:
    """The value of a model parameter; "" if it is not given."""
    value = config.parameters.get(key)
    return value.string_value if value is not None else ""


def encode_config(config: ModelConfig) -> bytes:
    """The encoding in which configurations are sent to workers and back."""
    return _encoder.encode(config)


def decode_config(data: bytes) -> ModelConfig:
    """The inverse of encode_config. Raises msgspec.DecodeError or ValidationError for invalid data."""
    return _decoder.decode(data)


def as_triton_json(config: ModelConfig) -> dict[str, Any]:
    """The JSON form for the config endpoint and Python models: proto names, all defaults, no unset messages.

    64-bit integers are numbers, enums are names, and map keys are strings, as JSON requires.
    """
    plain: dict[str, Any] = _without_none(msgspec.to_builtins(config, str_keys=True))
    return plain


def from_triton_json(plain: dict[str, Any]) -> ModelConfig:
    """The inverse of as_triton_json; numbers may be strings. Raises msgspec.ValidationError, which names the invalid
    field.
    """
    return msgspec.convert(plain, ModelConfig, strict=False)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value
