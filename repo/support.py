"""What is done with each field of a configuration: honoured, accepted without effect, or refused.

The rule of the file: a field whose absence could change an answer is refused until it is honoured. Every field of
every message has its row; `python -m shmserve.repo.support` prints the table that docs/repository.md shows.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Status(Enum):
    HONOURED = "honoured"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


class Support(NamedTuple):
    """`note` says what is done, or why it is not: the text of the warning or the problem.

    Nothing is said to a model of backend `only`: where that backend is, it decides.
    """

    status: Status
    note: str
    only: str = ""


NOT_SUPPORTED = "not supported: "
"""In front of the note in the problem of a refused field."""


TABLE: dict[str, Support] = {}
"""`Message.field` -> what is done with it. Nested messages are written `Outer.Inner.field`."""


def _rows(message: str, status: Status, note: str, *fields: str, only: str = "") -> None:
    for field in fields:
        TABLE[f"{message}.{field}"] = Support(status, note, only)


_Y, _N, _X = Status.HONOURED, Status.NO_EFFECT, Status.REFUSED
_TENSORRT = "tensorrt"
_ONNX = "onnxruntime"

_rows("ModelConfig", _Y, "must equal the directory; taken from it when empty", "name")
_rows("ModelConfig", _Y, "the older way to name the backend", "platform")
_rows("ModelConfig", _Y, "taken from the platform, the files or the model's name when empty", "backend")
_rows("ModelConfig", _X, "another library than the backend's own cannot be loaded", "runtime")
_rows("ModelConfig", _Y, "which versions are served; default latest 1", "version_policy")
_rows("ModelConfig", _Y, "0: tensors have no batch dimension", "max_batch_size")
_rows("ModelConfig", _Y, "the tensors that callers send and get", "input", "output")
_rows("ModelConfig", _Y, "inputs computed from the shapes in a batch", "batch_input")
_rows("ModelConfig", _Y, "outputs cut back by the shapes in a batch", "batch_output")
_rows("ModelConfig", _Y, "see its fields", "optimization")
_rows("ModelConfig", _Y, "requests are gathered into batches", "dynamic_batching")
_rows("ModelConfig", _Y, "requests of one id are run one after another by one instance", "sequence_batching")
_rows("ModelConfig", _Y, "see its fields; parameters step[i].map and step[i].if are ours", "ensemble_scheduling")
_rows("ModelConfig", _Y, "the worker processes of the model", "instance_group")
_rows("ModelConfig", _Y, "the model's file in its version directory", "default_model_filename")
_rows("ModelConfig", _N, "only TensorRT has files for each kind of GPU", "cc_model_filenames", only=_TENSORRT)
_rows("ModelConfig", _N, "metrics carry no labels of the model's own yet", "metric_tags")
_PARAMETERS = (
    "for the backend; execution_limit_secs, memory_limit_mb, gpu_memory_limit_mb, retry_alone, crash_limit, "
    "send_waits, stacked, strict_outputs and padding with its relatives are ours"
)
_rows("ModelConfig", _Y, _PARAMETERS, "parameters")
_rows("ModelConfig", _Y, "run by every instance before it takes requests", "model_warmup")
_rows("ModelConfig", _Y, "see its fields", "model_operations", "model_transaction_policy", "response_cache")
_rows(
    "ModelConfig",
    _X,
    "an agent may replace or refuse the model's files, and none can be run",
    "model_repository_agents",
)
_rows("ModelConfig", _Y, "see its fields", "model_metrics")

_LIMITER = "with --rate-limit execution_count"
_rows("ModelRateLimiter", _Y, _LIMITER, "resources", "priority")
_rows("ModelRateLimiter.Resource", _Y, _LIMITER, "name", "global", "count")

_rows("ModelInstanceGroup", _Y, "default the model's name, `_` and the group's number", "name")
_rows("ModelInstanceGroup", _Y, "KIND_AUTO is KIND_GPU where the server has these GPUs, else KIND_CPU", "kind")
_rows("ModelInstanceGroup", _Y, "default 1, or 2 for onnxruntime on the CPU", "count")
_rows("ModelInstanceGroup", _Y, _LIMITER, "rate_limiter")
_rows("ModelInstanceGroup", _Y, "default all of them; each instance sees its own only", "gpus")
_rows("ModelInstanceGroup", _N, "there is no backend that uses a secondary device", "secondary_devices")
_rows("ModelInstanceGroup", _X, "only TensorRT has optimisation profiles", "profile", only=_TENSORRT)
_rows("ModelInstanceGroup", _Y, "loaded, never scheduled", "passive")
_rows(
    "ModelInstanceGroup",
    _Y,
    "the CPU cores of the policy; those of the server if it has none of this name",
    "host_policy",
)
_SECONDARY = "with `ModelInstanceGroup.secondary_devices`"
_rows("ModelInstanceGroup.SecondaryDevice", _N, _SECONDARY, "kind", "device_id")

_RESHAPE = "callers see dims, the model sees this"
_rows("ModelTensorReshape", _Y, "as many elements as dims, and as many -1s", "shape")

_rows("ModelInput", _Y, "checked in every request", "name", "data_type", "dims")
_rows("ModelInput", _Y, "a hint: image formats need 3 dims", "format")
_rows("ModelInput", _Y, _RESHAPE, "reshape")
_rows("ModelInput", _X, "only TensorRT has shape tensors", "is_shape_tensor", only=_TENSORRT)
_rows("ModelInput", _Y, "requests of different shapes share a batch", "allow_ragged_batch")
_rows("ModelInput", _Y, "a request may leave it out", "optional")
_rows("ModelInput", _X, "only TensorRT has such layouts", "is_non_linear_format_io", only=_TENSORRT)

_rows("ModelOutput", _Y, "checked against what the model returns", "name", "data_type", "dims")
_rows("ModelOutput", _Y, _RESHAPE, "reshape")
_rows("ModelOutput", _Y, "one label a line, for classification results", "label_filename")
_rows("ModelOutput", _X, "only TensorRT has shape tensors", "is_shape_tensor", only=_TENSORRT)
_rows("ModelOutput", _X, "only TensorRT has such layouts", "is_non_linear_format_io", only=_TENSORRT)

_rows("BatchInput", _Y, "not for models that get requests one by one", "kind", "target_name", "data_type")
_rows("BatchInput", _Y, "exactly one", "source_input")
_rows("BatchOutput", _Y, "the shapes of the input, with the batch dimension", "target_name", "kind", "source_input")

_rows("ModelVersionPolicy", _Y, "the numerically highest versions", "latest")
_rows("ModelVersionPolicy", _Y, "every version directory", "all")
_rows("ModelVersionPolicy", _Y, "those listed that exist", "specific")
_rows("ModelVersionPolicy.Latest", _Y, "0 counts as 1", "num_versions")
_rows("ModelVersionPolicy.Specific", _Y, "a version without a directory is a warning", "versions")

_ON_GPU = "only TensorRT uses it"
_MEMORY = "tensors are read where they lie; there is no staging on the CPU"
_rows("ModelOptimizationPolicy", _Y, "see its fields", "graph", "cuda", "execution_accelerators")
_rows("ModelOptimizationPolicy", _N, _ON_GPU, "priority", "gather_kernel_buffer_threshold", only=_TENSORRT)
_rows("ModelOptimizationPolicy", _N, _MEMORY, "input_pinned_memory", "output_pinned_memory", only=_TENSORRT)
_rows("ModelOptimizationPolicy", _N, "the waiting batch stays open until it starts", "eager_batching")
_rows("ModelOptimizationPolicy.Graph", _Y, "ONNX Runtime: -1 basic, 0 all, 1 extended, 2 off", "level")
_CUDA = ("graphs", "busy_wait_events", "graph_spec", "output_copy_stream")
_rows("ModelOptimizationPolicy.Cuda", _N, _ON_GPU, *_CUDA, only=_TENSORRT)
_GRAPH = ("batch_size", "input", "graph_lower_bound")
_rows("ModelOptimizationPolicy.Cuda.GraphSpec", _N, _ON_GPU, *_GRAPH, only=_TENSORRT)
_rows("ModelOptimizationPolicy.Cuda.GraphSpec.Shape", _N, _ON_GPU, "dim", only=_TENSORRT)
_rows("ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound", _N, _ON_GPU, "batch_size", "input", only=_TENSORRT)
_ACCELERATORS = "ModelOptimizationPolicy.ExecutionAccelerators"
_PROVIDERS = "only ONNX Runtime has execution providers"
_rows(_ACCELERATORS, _N, _PROVIDERS, "gpu_execution_accelerator", "cpu_execution_accelerator", only=_ONNX)
_rows(_ACCELERATORS + ".Accelerator", _N, "with the list that it stands in", "name", "parameters")
_rows("ModelOptimizationPolicy.PinnedMemoryBuffer", _N, _MEMORY, "enable", only=_TENSORRT)

_rows("ModelQueuePolicy", _Y, "REJECT, or DELAY: served when nothing else waits", "timeout_action")
_rows("ModelQueuePolicy", _Y, "0: no limit", "default_timeout_microseconds", "max_queue_size")
_rows("ModelQueuePolicy", _Y, "a request may ask for a shorter time", "allow_timeout_override")

_rows("ModelDynamicBatching", _Y, "default the largest batch", "preferred_batch_size")
_rows("ModelDynamicBatching", _Y, "how long the oldest request waits for company", "max_queue_delay_microseconds")
_rows("ModelDynamicBatching", _Y, "answers leave in the order of arrival", "preserve_ordering")
_rows("ModelDynamicBatching", _Y, "0: no priorities; level 1 is the most urgent", "priority_levels")
_rows("ModelDynamicBatching", _Y, "for requests that name no level", "default_priority_level")
_rows("ModelDynamicBatching", _Y, "limits of the queue", "default_queue_policy", "priority_queue_policy")

_rows("ModelSequenceBatching", _Y, "neither given: direct", "direct", "oldest")
_rows("ModelSequenceBatching", _Y, "default 1 s; the model's worker is told", "max_sequence_idle_microseconds")
_rows("ModelSequenceBatching", _Y, "made by the worker, by the values or the type given", "control_input")
_rows("ModelSequenceBatching", _Y, "kept in the worker's memory", "state")
_rows("ModelSequenceBatching", _Y, "a request may be run many times", "iterative_sequence")
_CONTROL = ("kind", "int32_false_true", "fp32_false_true", "bool_false_true", "data_type")
_rows("ModelSequenceBatching.Control", _Y, "one control for each tensor", *_CONTROL)
_rows("ModelSequenceBatching.ControlInput", _Y, "an input of the model that callers do not give", "name", "control")
_INITIAL = ("data_type", "dims", "zero_data", "data_file", "name")
_rows("ModelSequenceBatching.InitialState", _Y, "what START begins with; default zeros", *_INITIAL)
_STATE = ("input_name", "output_name", "data_type", "dims", "initial_state")
_rows("ModelSequenceBatching.State", _Y, "an output that is the input of the next run", *_STATE)
_BUFFERS = ("use_same_buffer_for_input_output", "use_growable_memory")
_rows("ModelSequenceBatching.State", _N, "where a state lies is up to the worker", *_BUFFERS)
_DIRECT = ("max_queue_delay_microseconds", "minimum_slot_utilization")
_rows("ModelSequenceBatching.StrategyDirect", _Y, "when a batch with empty slots is run", *_DIRECT)
_OLDEST = ("preferred_batch_size", "max_queue_delay_microseconds")
_rows("ModelSequenceBatching.StrategyOldest", _Y, "default 1; of each instance", "max_candidate_sequences")
_rows("ModelSequenceBatching.StrategyOldest", _Y, "as dynamic batching", *_OLDEST)
_rows("ModelSequenceBatching.StrategyOldest", _N, "requests of a sequence are in order anyway", "preserve_ordering")

_rows("ModelEnsembling", _Y, "each is run when its inputs are there", "step")
_AHEAD = "answers of a step that answers many times which are under way to the caller; at most 16 if it is 0"
_rows("ModelEnsembling", _Y, _AHEAD, "max_inflight_requests")
_rows("ModelEnsembling.Step", _Y, "-1 or 0: the latest version", "model_version")
_rows("ModelEnsembling.Step", _Y, "who makes which tensor of what", "model_name", "input_map", "output_map")
_rows("ModelEnsembling.Step", _N, "a model's name is its own in all repositories", "model_namespace")

_rows("ModelParameter", _Y, "given to the backend as it is", "string_value")

_rows("ModelWarmup", _Y, "for the log", "name")
_rows("ModelWarmup", _Y, "rows of the sample, 1 for a model that does not batch; 0: not run", "batch_size")
_rows("ModelWarmup", _Y, "every input that is not optional", "inputs")
_rows("ModelWarmup", _Y, "how often it is run; 0 counts as 1", "count")
_rows("ModelWarmup.Input", _Y, "must agree with the input", "data_type", "dims")
_rows("ModelWarmup.Input", _Y, "zeros; empty strings", "zero_data")
_rows("ModelWarmup.Input", _Y, "random numbers; empty strings", "random_data")
_rows("ModelWarmup.Input", _Y, "raw bytes of the file in the model's directory warmup", "input_data_file")

_OPERATORS = "only ONNX Runtime has libraries of custom operators"
_rows("ModelOperations", _X, _OPERATORS, "op_library_filename", only=_ONNX)
_rows("ModelTransactionPolicy", _Y, "a request may be answered many times", "decoupled")
_rows("ModelRepositoryAgents", _X, "with `ModelConfig.model_repository_agents`", "agents")
_rows("ModelRepositoryAgents.Agent", _X, "with `ModelConfig.model_repository_agents`", "name", "parameters")
_rows("ModelResponseCache", _Y, "where the server has a cache (--cache-config)", "enable")

_METRICS = "for nv_inference_first_response_histogram_ms, with --metrics-config histogram_latencies=true"
_rows("ModelMetrics", _Y, _METRICS, "metric_control")
_rows("ModelMetrics.MetricControl", _Y, _METRICS, "metric_identifier", "histogram_options")
_rows("ModelMetrics.MetricControl.MetricIdentifier", _Y, _METRICS, "family")
_rows("ModelMetrics.MetricControl.HistogramOptions", _Y, _METRICS, "buckets")


def markdown() -> str:
    """The table as docs/repository.md has it."""
    lines = ["| Field | What is done | |", "| --- | --- | --- |"]
    lines += [f"| `{field}` | {entry.status.value} | {entry.note} |" for field, entry in TABLE.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
