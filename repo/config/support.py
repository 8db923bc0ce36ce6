"""Support for each configuration field: honoured, accepted without effect, or refused.

Invariant: a field is refused if ignoring it could change an answer. Every field of every message has a row, from which
the table in docs/repository.md is made.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Status(Enum):
    HONOURED = "honoured"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


class Support(NamedTuple):
    """Support for a field. `note` describes it, and is the text of the warning or problem.

    Models of the backends `only` get no warning or problem, as these handle the field themselves.
    """

    status: Status
    note: str
    only: tuple[str, ...] = ()


NOT_SUPPORTED = "not supported: "
"""Prefix of the note in the problem of a refused field."""
TABLE: dict[str, Support] = {}
"""`Message.field` -> its support. Nested messages are written `Outer.Inner.field`."""


def _rows(message: str, status: Status, note: str, *fields: str, only: tuple[str, ...] = ()) -> None:
    for field in fields:
        TABLE[f"{message}.{field}"] = Support(status, note, only)


_Y, _N, _X = Status.HONOURED, Status.NO_EFFECT, Status.REFUSED
_TENSORRT = ("tensorrt",)
_ONNX = ("onnxruntime",)
WITH_OPERATORS = ("onnxruntime", "pytorch", "tensorflow")
_QUEUED = ("tensorrt", "pytorch")

_rows("ModelConfig", _Y, "must equal the directory name; default: that name", "name")
_rows("ModelConfig", _Y, "older form of `backend`", "platform")
_rows("ModelConfig", _Y, "default: derived from the platform, the files or the model's name", "backend")
_rows("ModelConfig", _Y, "only `model.py` or a library (`*.so`), for a backend that is not built in", "runtime")
_rows("ModelConfig", _Y, "versions to serve; default: latest 1", "version_policy")
_rows("ModelConfig", _Y, "0: tensors have no batch dimension", "max_batch_size")
_rows("ModelConfig", _Y, "tensors of requests and responses", "input", "output")
_rows("ModelConfig", _Y, "inputs computed from the shapes in the batch", "batch_input")
_rows("ModelConfig", _Y, "outputs split by the shapes in the batch", "batch_output")
_rows("ModelConfig", _Y, "see below", "optimization")
_rows("ModelConfig", _Y, "requests are combined into batches", "dynamic_batching")
_rows("ModelConfig", _Y, "requests with the same sequence id run in order on one instance", "sequence_batching")
_rows("ModelConfig", _Y, "see below; parameters step[i].map and step[i].if are not in Triton", "ensemble_scheduling")
_rows("ModelConfig", _Y, "worker processes of the model", "instance_group")
_rows("ModelConfig", _Y, "name of the model file in the version directory", "default_model_filename")
_rows("ModelConfig", _N, "only TensorRT has files per compute capability", "cc_model_filenames", only=_TENSORRT)
_rows("ModelConfig", _N, "metrics do not have model-specific labels yet", "metric_tags")
_rows("ModelConfig", _Y, "passed to the backend; the server itself reads [some](parameters.md)", "parameters")
_rows("ModelConfig", _Y, "run by every instance before it accepts requests", "model_warmup")
_rows("ModelConfig", _Y, "see below", "model_operations", "model_transaction_policy", "response_cache")
_rows("ModelConfig", _Y, "plug-ins that check or replace the model's files before it loads", "model_repository_agents")
_rows("ModelConfig", _Y, "see below", "model_metrics")

_LIMITER = "with --rate-limit execution_count"
_rows("ModelRateLimiter", _Y, _LIMITER, "resources", "priority")
_rows("ModelRateLimiter.Resource", _Y, _LIMITER, "name", "global", "count")

_rows("ModelInstanceGroup", _Y, "default: the model's name, `_` and the group's index", "name")
_rows("ModelInstanceGroup", _Y, "KIND_AUTO is KIND_GPU where the server has these GPUs, else KIND_CPU", "kind")
_rows("ModelInstanceGroup", _Y, "default: 1, or 2 for onnxruntime and tensorflow on the CPU", "count")
_rows("ModelInstanceGroup", _Y, _LIMITER, "rate_limiter")
_rows("ModelInstanceGroup", _Y, "default: all; each instance sees only its own", "gpus")
_rows("ModelInstanceGroup", _N, "no backend uses a secondary device", "secondary_devices")
_rows("ModelInstanceGroup", _X, "only TensorRT has optimization profiles", "profile", only=_TENSORRT)
_rows("ModelInstanceGroup", _Y, "loaded, never scheduled", "passive")
_rows(
    "ModelInstanceGroup", _Y, "CPU cores of the policy; if the server has no such policy, all its cores", "host_policy"
)
_SECONDARY = "with `ModelInstanceGroup.secondary_devices`"
_rows("ModelInstanceGroup.SecondaryDevice", _N, _SECONDARY, "kind", "device_id")

_RESHAPE = "clients see dims, the model sees this shape"
_rows("ModelTensorReshape", _Y, "must have as many elements and as many -1s as dims", "shape")

_rows("ModelInput", _Y, "checked in every request", "name", "data_type", "dims")
_rows("ModelInput", _Y, "informational; image formats need 3 dims", "format")
_rows("ModelInput", _Y, _RESHAPE, "reshape")
_rows("ModelInput", _X, "only TensorRT has shape tensors", "is_shape_tensor", only=_TENSORRT)
_rows("ModelInput", _Y, "requests of different shapes share a batch", "allow_ragged_batch")
_rows("ModelInput", _Y, "requests may omit it", "optional")
_rows("ModelInput", _X, "only TensorRT has non-linear formats", "is_non_linear_format_io", only=_TENSORRT)

_rows("ModelOutput", _Y, "checked against what the model returns", "name", "data_type", "dims")
_rows("ModelOutput", _Y, _RESHAPE, "reshape")
_rows("ModelOutput", _Y, "file with one label per line, for classification results", "label_filename")
_rows("ModelOutput", _X, "only TensorRT has shape tensors", "is_shape_tensor", only=_TENSORRT)
_rows("ModelOutput", _X, "only TensorRT has non-linear formats", "is_non_linear_format_io", only=_TENSORRT)

_rows("BatchInput", _Y, "not for models that receive requests one by one", "kind", "target_name", "data_type")
_rows("BatchInput", _Y, "exactly one input", "source_input")
_SHAPES = "uses the shapes of the input, including the batch dimension"
_rows("BatchOutput", _Y, _SHAPES, "target_name", "kind", "source_input")

_rows("ModelVersionPolicy", _Y, "the numerically highest versions", "latest")
_rows("ModelVersionPolicy", _Y, "every version directory", "all")
_rows("ModelVersionPolicy", _Y, "the listed versions that exist", "specific")
_rows("ModelVersionPolicy.Latest", _Y, "0 counts as 1", "num_versions")
_rows("ModelVersionPolicy.Specific", _Y, "a version without a directory causes a warning", "versions")

_ON_GPU = "only TensorRT and PyTorch on a GPU use it"
_MEMORY = "tensors are read in place, without staging buffers on the CPU"
_rows("ModelOptimizationPolicy", _Y, "see below", "graph", "cuda", "execution_accelerators")
_rows("ModelOptimizationPolicy", _N, _ON_GPU, "priority", "gather_kernel_buffer_threshold", only=_QUEUED)
_rows("ModelOptimizationPolicy", _N, _MEMORY, "input_pinned_memory", "output_pinned_memory", only=_QUEUED)
_rows("ModelOptimizationPolicy", _N, "a batch accepts requests until it starts", "eager_batching")
_LEVELS = "ONNX Runtime: -1 basic, 0 all, 1 extended, 2 off; TensorFlow: -1 none, 0 default, 1 and 2 XLA"
_rows("ModelOptimizationPolicy.Graph", _Y, _LEVELS, "level")
_CUDA = ("graphs", "busy_wait_events", "graph_spec", "output_copy_stream")
_rows("ModelOptimizationPolicy.Cuda", _N, _ON_GPU, *_CUDA, only=_QUEUED)
_GRAPH = ("batch_size", "input", "graph_lower_bound")
_rows("ModelOptimizationPolicy.Cuda.GraphSpec", _N, _ON_GPU, *_GRAPH, only=_QUEUED)
_rows("ModelOptimizationPolicy.Cuda.GraphSpec.Shape", _N, _ON_GPU, "dim", only=_QUEUED)
_rows("ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound", _N, _ON_GPU, "batch_size", "input", only=_QUEUED)
_ACCELERATORS = "ModelOptimizationPolicy.ExecutionAccelerators"
_rows(_ACCELERATORS, _N, "only ONNX Runtime uses it", "gpu_execution_accelerator", only=_ONNX)
_rows(
    _ACCELERATORS, _N, "only ONNX Runtime and PaddlePaddle use it", "cpu_execution_accelerator", only=(*_ONNX, "paddle")
)
_rows(_ACCELERATORS + ".Accelerator", _N, "see the list that contains it", "name", "parameters")
_rows("ModelOptimizationPolicy.PinnedMemoryBuffer", _N, _MEMORY, "enable", only=_QUEUED)

_rows("ModelQueuePolicy", _Y, "REJECT, or DELAY: run when no other request is queued", "timeout_action")
_rows("ModelQueuePolicy", _Y, "0: no limit", "default_timeout_microseconds", "max_queue_size")
_rows("ModelQueuePolicy", _Y, "a request may set a shorter timeout", "allow_timeout_override")

_rows("ModelDynamicBatching", _Y, "default: the largest batch", "preferred_batch_size")
_DELAY = "maximum time that the oldest request waits for a batch to fill"
_rows("ModelDynamicBatching", _Y, _DELAY, "max_queue_delay_microseconds")
_rows("ModelDynamicBatching", _Y, "responses are sent in the order of the requests", "preserve_ordering")
_rows("ModelDynamicBatching", _Y, "0: no priorities; level 1 is the highest", "priority_levels")
_rows("ModelDynamicBatching", _Y, "level of requests without a priority", "default_priority_level")
_rows("ModelDynamicBatching", _Y, "limits of the queue", "default_queue_policy", "priority_queue_policy")

_rows("ModelSequenceBatching", _Y, "default: direct", "direct", "oldest")
_IDLE = "default: 1 s; the worker is notified when a sequence expires"
_rows("ModelSequenceBatching", _Y, _IDLE, "max_sequence_idle_microseconds")
_rows("ModelSequenceBatching", _Y, "set by the worker, with the given values or type", "control_input")
_rows("ModelSequenceBatching", _Y, "kept in the worker's memory", "state")
_rows("ModelSequenceBatching", _Y, "a request may run many times", "iterative_sequence")
_CONTROL = ("kind", "int32_false_true", "fp32_false_true", "bool_false_true", "data_type")
_rows("ModelSequenceBatching.Control", _Y, "one control per tensor", *_CONTROL)
_rows("ModelSequenceBatching.ControlInput", _Y, "an input of the model that requests do not have", "name", "control")
_INITIAL = ("data_type", "dims", "zero_data", "data_file", "name")
_rows("ModelSequenceBatching.InitialState", _Y, "state at the start of a sequence; default: zeros", *_INITIAL)
_STATE = ("input_name", "output_name", "data_type", "dims", "initial_state")
_rows("ModelSequenceBatching.State", _Y, "output that is the input of the next run", *_STATE)
_SAME = "a backend in C or C++ finds the state in the memory of the new one"
_rows("ModelSequenceBatching.State", _Y, _SAME, "use_same_buffer_for_input_output")
_rows("ModelSequenceBatching.State", _N, "the worker decides where a state is stored", "use_growable_memory")
_DIRECT = ("max_queue_delay_microseconds", "minimum_slot_utilization")
_rows("ModelSequenceBatching.StrategyDirect", _Y, "when to run a batch with empty slots", *_DIRECT)
_OLDEST = ("preferred_batch_size", "max_queue_delay_microseconds")
_rows("ModelSequenceBatching.StrategyOldest", _Y, "default: 1; per instance", "max_candidate_sequences")
_rows("ModelSequenceBatching.StrategyOldest", _Y, "as in dynamic_batching", *_OLDEST)
_rows("ModelSequenceBatching.StrategyOldest", _N, "requests of a sequence always run in order", "preserve_ordering")

_rows("ModelEnsembling", _Y, "a step runs when its inputs are available", "step")
_AHEAD = "responses of a decoupled step in flight to the client; 0: at most 16"
_rows("ModelEnsembling", _Y, _AHEAD, "max_inflight_requests")
_rows("ModelEnsembling.Step", _Y, "-1 or 0: latest version", "model_version")
_MAPS = "the model, and the tensors that it reads and writes"
_rows("ModelEnsembling.Step", _Y, _MAPS, "model_name", "input_map", "output_map")
_rows("ModelEnsembling.Step", _N, "a step means the ensemble's own repository if that has the model", "model_namespace")

_rows("ModelParameter", _Y, "passed to the backend unchanged", "string_value")

_rows("ModelWarmup", _Y, "shown in the log", "name")
_rows("ModelWarmup", _Y, "rows of the sample; 1 for a model that does not batch; 0: sample not run", "batch_size")
_rows("ModelWarmup", _Y, "must have every input that is not optional", "inputs")
_rows("ModelWarmup", _Y, "number of runs; 0 counts as 1", "count")
_rows("ModelWarmup.Input", _Y, "must match the input", "data_type", "dims")
_rows("ModelWarmup.Input", _Y, "zeros, or empty strings", "zero_data")
_rows("ModelWarmup.Input", _Y, "random numbers, or empty strings", "random_data")
_rows("ModelWarmup.Input", _Y, "file with raw bytes in the model's directory warmup", "input_data_file")

_OPERATORS = "only ONNX Runtime, PyTorch and TensorFlow load libraries of operators"
_rows("ModelOperations", _X, _OPERATORS, "op_library_filename", only=WITH_OPERATORS)
_rows("ModelTransactionPolicy", _Y, "a request may have any number of responses", "decoupled")
_rows("ModelRepositoryAgents", _Y, "called in this order; at the end in reverse order", "agents")
_rows("ModelRepositoryAgents.Agent", _Y, "of checksum, signature, decrypt, convert or a plug-in", "name", "parameters")
_rows("ModelResponseCache", _Y, "needs a cache on the server (--cache-config)", "enable")

_METRICS = "for nv_inference_first_response_histogram_ms, with --metrics-config histogram_latencies=true"
_rows("ModelMetrics", _Y, _METRICS, "metric_control")
_rows("ModelMetrics.MetricControl", _Y, _METRICS, "metric_identifier", "histogram_options")
_rows("ModelMetrics.MetricControl.MetricIdentifier", _Y, _METRICS, "family")
_rows("ModelMetrics.MetricControl.HistogramOptions", _Y, _METRICS, "buckets")
