"""Configurations that together set every field of the schema. They parse, but some are invalid or not supported."""

from __future__ import annotations

BACKENDS = ("identity", "onnxruntime", "python")

SMALL = """
backend: "identity"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""

DYNAMIC = """
# Everything but the other two schedulers.
name: "everything"
platform: "onnxruntime_onnx"
backend: "onnxruntime"
runtime: "libother.so"
version_policy: { latest { num_versions: 2 } }
max_batch_size: 16
input [
  {
    name: "image" data_type: TYPE_UINT8 format: FORMAT_NCHW dims: [ 3, 244, 244 ]
    reshape { shape: [ 3, 59536 ] } is_shape_tensor: true allow_ragged_batch: true optional: true
    is_non_linear_format_io: true
  },
  { name: "text" data_type: TYPE_STRING dims: -1 }
]
output {
  name: "class" data_type: TYPE_BF16 dims: 1 reshape { } label_filename: "labels.txt" is_shape_tensor: true
  is_non_linear_format_io: true
}
batch_input { kind: BATCH_ITEM_SHAPE target_name: [ "a", "b" ] data_type: TYPE_INT32 source_input: "image" }
batch_output { target_name: "class" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "image" }
optimization {
  graph { level: -1 }
  priority: PRIORITY_MAX
  cuda {
    graphs: true
    busy_wait_events: true
    graph_spec {
      batch_size: 4
      input { key: "image" value { dim: [ 3, 244, 244 ] } }
      graph_lower_bound { batch_size: 2 input { key: "image" value { dim: 1 } } }
    }
    output_copy_stream: true
  }
  execution_accelerators {
    gpu_execution_accelerator [ { name: "tensorrt" parameters { key: "precision_mode" value: "FP16" } } ]
    cpu_execution_accelerator [ { name: "openvino" } ]
  }
  input_pinned_memory { enable: false }
  output_pinned_memory { enable: true }
  gather_kernel_buffer_threshold: 3
  eager_batching: true
}
dynamic_batching {
  preferred_batch_size: [ 4, 8 ]
  max_queue_delay_microseconds: 18446744073709551615
  preserve_ordering: true
  priority_levels: 3
  default_priority_level: 2
  default_queue_policy {
    timeout_action: DELAY default_timeout_microseconds: 100 allow_timeout_override: true max_queue_size: 7
  }
  priority_queue_policy { key: 3 value { max_queue_size: 4 } }
}
instance_group [
  {
    name: "first" kind: KIND_GPU count: 2 gpus: [ 0, 1 ] passive: true host_policy: "p" profile: [ "0", "1" ]
    rate_limiter { resources [ { name: "R" global: true count: 10 } ] priority: 2 }
    secondary_devices { kind: KIND_NVDLA device_id: 9223372036854775807 }
  },
  { kind: KIND_CPU }
]
default_model_filename: 'weights' ".onnx"
cc_model_filenames { key: "7.5" value: "model.75" }
metric_tags { key: "team" value: "vision" }
parameters: { key: "intra_op_thread_count" value: { string_value: "1" } }
parameters { key: "umlaut" value { string_value: "\\303\\274\\n" } }
model_warmup [
  {
    name: "zeros" batch_size: 1 count: 2
    inputs { key: "image" value { data_type: TYPE_UINT8 dims: [ 3, 244, 244 ] zero_data: true } }
    inputs { key: "text" value { data_type: TYPE_STRING dims: 1 random_data: true } }
    inputs { key: "file" value { input_data_file: "raw" } }
  }
]
model_operations { op_library_filename: [ "libops.so" ] }
model_transaction_policy { decoupled: true }
model_repository_agents { agents [ { name: "checksum" parameters { key: "MD5" value: "0" } } ] }
response_cache { enable: true }
model_metrics {
  metric_control [
    {
      metric_identifier { family: "nv_inference_first_response_histogram_ms" }
      histogram_options { buckets: [ 1, 2.5, 1e3 ] }
    }
  ]
}
"""

DIRECT = """
version_policy { specific { versions: [ 1, 3 ] } }
sequence_batching {
  max_sequence_idle_microseconds: 5
  direct { max_queue_delay_microseconds: 3 minimum_slot_utilization: 0.5 }
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } ] },
    { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]
  state [
    {
      input_name: "in" output_name: "out" data_type: TYPE_FP32 dims: [ 2, -1 ]
      initial_state { name: "first" data_type: TYPE_FP32 dims: [ 2, 5 ] zero_data: true }
      use_same_buffer_for_input_output: true use_growable_memory: true
    },
    { input_name: "in2" output_name: "out2" initial_state { data_file: "first" } }
  ]
  iterative_sequence: true
}
"""

OLDEST = """
version_policy { all { } }
sequence_batching {
  oldest {
    max_candidate_sequences: 4 preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 3 preserve_ordering: true
  }
}
"""

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input { name: "RAW" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "LABEL" data_type: TYPE_FP32 dims: [ 10 ] }
ensemble_scheduling {
  step [
    {
      model_name: "decode" model_version: -1
      input_map { key: "IN" value: "RAW" } output_map { key: "OUT" value: "picture" }
    },
    {
      model_name: "classify" model_version: 2 model_namespace: "other"
      input_map { key: "IN" value: "picture" } output_map { key: "OUT" value: "LABEL" }
    }
  ]
  max_inflight_requests: 16
}
"""

ALL = (DYNAMIC, DIRECT, OLDEST, ENSEMBLE)
