"""Configurations as they are served elsewhere today: all are read, and what cannot be served here fails only as the
backend, the GPU or the scheduler is not there.

The rule of the file: every example is a whole file, written as people write them.
"""

from __future__ import annotations

import json
import re

import pytest

from shmserve.repo.config.complete import complete
from shmserve.repo.config.origins import as_text, origins
from shmserve.repo.config.override import parse_override
from shmserve.repo.config.protos import to_config
from shmserve.repo.config.schema import as_triton_json
from shmserve.repo.load import Setting, examine, parse

HERE = ("identity", "onnxruntime", "python")
EVERYWHERE = (*HERE, "tensorrt", "tensorflow", "pytorch", "openvino", "dali", "paddle", "fil")
GPUS = (0, 1)

TWO_INPUTS = """
name: "scorer"
platform: "{platform}"
max_batch_size: 8
input [
  {{
    name: "picture"
    data_type: TYPE_FP32
    format: FORMAT_NCHW
    dims: [ 3, 244, 244 ]
  }},
  {{
    name: "mask"
    data_type: TYPE_FP32
    dims: [ 3, 244, 244 ]
  }}
]
output [
  {{
    name: "score"
    data_type: TYPE_FP32
    dims: [ 16 ]
  }}
]
"""

ONE = """
backend: "onnxruntime"
max_batch_size: 32
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 16 ] } ]
"""

SERVED = {
    "custom operators": ONE + 'model_operations { op_library_filename: [ "libcustom.so" ] }',
    "two inputs of one shape": TWO_INPUTS.format(platform="onnxruntime_onnx"),
    "a scalar for the model, one element for callers": """
backend: "python"
max_batch_size: 8
input [ { name: "t" data_type: TYPE_FP32 dims: [ 1 ] reshape: { shape: [ ] } } ]
output [ { name: "u" data_type: TYPE_FP32 dims: [ 1, 1 ] reshape { shape: [] } } ]
""",
    "reshape between fixed sizes": """
backend: "python"
max_batch_size: 8
input { name: "t" data_type: TYPE_FP32 dims: [ 2, 4, 3 ] reshape { shape: [ 8, 3 ] } }
output { name: "u" data_type: TYPE_FP32 dims: [ 24 ] reshape: { shape: [ 4, 6 ] } }
""",
    "reshape around any sizes": """
backend: "python"
max_batch_size: 8
input { name: "t" data_type: TYPE_FP32 dims: [ 4, -1, 6 ] reshape { shape: [ 2, 2, -1, 3, 2 ] } }
output { name: "u" data_type: TYPE_FP32 dims: [ -1, 1 ] reshape { shape: [ -1 ] } }
""",
    "no batches, sizes unknown": """
backend: "python"
input { name: "words" data_type: TYPE_STRING dims: [ -1 ] }
input { name: "limit" data_type: TYPE_INT32 dims: [ 1 ] optional: true }
output { name: "ids" data_type: TYPE_INT64 dims: [ -1, -1 ] }
""",
    "the newest three versions": ONE + "version_policy: { latest: { num_versions: 3 } }",
    "every version": ONE + "version_policy: { all { } }",
    "two versions by number": ONE + "version_policy: { specific: { versions: [ 1, 3 ] } }",
    "two instances on the CPU": ONE + "instance_group [ { count: 2 kind: KIND_CPU } ]",
    "instances wherever": ONE + "instance_group [\n  {\n    count: 4\n  }\n]",
    "a policy of the host": ONE + 'instance_group [ { kind: KIND_CPU count: 2 host_policy: "numa_0" } ]',
    "one that waits in reserve": ONE + "instance_group [ { kind: KIND_CPU }, { kind: KIND_CPU passive: true } ]",
    "dynamic batches as they come": ONE + "dynamic_batching { }",
    "dynamic batches of some sizes, with a delay": ONE
    + "dynamic_batching {\n  preferred_batch_size: [ 4, 8 ]\n  max_queue_delay_microseconds: 100\n}",
    "priorities": ONE
    + """dynamic_batching {
  preferred_batch_size: [ 8, 16, 32 ]
  max_queue_delay_microseconds: 500
  priority_levels: 3
  default_priority_level: 2
  default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 1000000 max_queue_size: 64 }
  priority_queue_policy [
    { key: 1 value { allow_timeout_override: true max_queue_size: 8 } },
    { key: 3 value: { timeout_action: DELAY default_timeout_microseconds: 10000 } }
  ]
}""",
    "answers in order": ONE + "dynamic_batching { preserve_ordering: true }",
    "warm-up": ONE
    + """model_warmup [
  {
    name: "one zero row"
    batch_size: 1
    inputs { key: "IN" value: { data_type: TYPE_FP32 dims: [ 16 ] zero_data: true } }
  },
  {
    name: "a full random batch, thrice"
    batch_size: 32
    count: 3
    inputs { key: "IN" value { data_type: TYPE_FP32 dims: 16 random_data: true } }
  }
]""",
    "level of the graph's optimisation": ONE + "optimization { graph : { level : 1 } }",
    "accelerators of the GPU": ONE
    + """optimization { execution_accelerators {
  gpu_execution_accelerator : [ {
    name : "tensorrt"
    parameters { key: "precision_mode" value: "FP16" }
    parameters { key: "max_workspace_size_bytes" value: "1073741824" }
  } ]
}}""",
    "accelerator of the CPU": ONE
    + 'optimization { execution_accelerators { cpu_execution_accelerator : [ { name : "openvino" } ] } }',
    "graphs of CUDA": ONE + "optimization { cuda { graphs: true busy_wait_events: true output_copy_stream: true } }",
    "pinned memory off, eager": ONE
    + "optimization { input_pinned_memory { enable: false } output_pinned_memory { enable: false }\n"
    + "eager_batching: true }",
    "threads": ONE
    + 'parameters { key: "intra_op_thread_count" value: { string_value: "2" } }\n'
    + 'parameters { key: "execution_mode" value: { string_value: "0" } }',
    "an environment for Python": """
backend: "python"
parameters: { key: "EXECUTION_ENV_PATH", value: { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }
input [ { name: "a", data_type: TYPE_FP32, dims: [ -1 ] } ]
output [ { name: "b", data_type: TYPE_FP32, dims: [ -1 ] } ]
""",
    "the least that there is": 'backend: "onnxruntime"',
    "a cache, although there is none": ONE + "response_cache { enable: true }",
    "labels of metrics": ONE + 'metric_tags { key: "team" value: "vision" }',
    "resources": ONE
    + 'instance_group [ { kind: KIND_CPU rate_limiter { resources [ { name: "R1" count: 4 } ] priority: 2 } } ]',
    "ragged batches": ONE
    + 'batch_input [ { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "INDEX" data_type: TYPE_FP32 '
    'source_input: "IN" } ]',
}

NOT_HERE = {
    "TensorRT": (TWO_INPUTS.format(platform="tensorrt_plan"), "tensorrt"),
    "TorchScript": (
        """
platform: "pytorch_libtorch"
max_batch_size: 8
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1000 ] label_filename: "classes.txt" } ]
parameters { key: "INFERENCE_MODE" value { string_value: "true" } }
""",
        "pytorch",
    ),
    "a saved model of TensorFlow": (TWO_INPUTS.format(platform="tensorflow_savedmodel"), "tensorflow"),
    "a frozen graph of TensorFlow": (
        TWO_INPUTS.format(platform="tensorflow_graphdef") + "optimization { graph { level: 1 } }",
        "tensorflow",
    ),
    "OpenVINO": (TWO_INPUTS.format(platform="").replace('platform: ""', 'backend: "openvino"'), "openvino"),
    "trees": (
        """
backend: "fil"
max_batch_size: 32768
input [ { name: "input__0" data_type: TYPE_FP32 dims: [ 28 ] } ]
output [ { name: "output__0" data_type: TYPE_FP32 dims: [ 2 ] } ]
parameters [
  { key: "model_type" value: { string_value: "xgboost" } },
  { key: "predict_proba" value: { string_value: "true" } }
]
""",
        "fil",
    ),
    "files by compute capability": (
        TWO_INPUTS.format(platform="tensorrt_plan")
        + 'default_model_filename: "model.plan"\ncc_model_filenames [ { key: "7.5" value: "model.75" } ]',
        "tensorrt",
    ),
    "shapes of TensorRT": (
        """
platform: "tensorrt_plan"
max_batch_size: 8
input [
  { name: "data" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] is_non_linear_format_io: true },
  { name: "size" data_type: TYPE_INT32 dims: [ 1 ] is_shape_tensor: true }
]
output [ { name: "made" data_type: TYPE_FP32 dims: [ -1, -1 ] } ]
instance_group [ { kind: KIND_CPU profile: [ "0", "2" ] } ]
optimization { priority: PRIORITY_MAX cuda { graphs: true graph_spec {
  batch_size: 4 input { key: "data" value { dim: [ 3, 8, 8 ] } } graph_lower_bound { batch_size: 2 }
} } }
""",
        "tensorrt",
    ),
}

ON_GPUS = {
    "one on each of two": ONE + "instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0, 1 ] } ]",
    "one here, two there": ONE
    + """instance_group [
  { count: 1 kind: KIND_GPU gpus: [ 0 ] },
  { count: 2 kind: KIND_GPU gpus: [ 1 ] }
]""",
    "some on the CPU too": ONE + "instance_group [ { count: 2 kind: KIND_GPU }, { count: 2 kind: KIND_CPU } ]",
}


def chained(model: str, reads: tuple[str, str], makes: tuple[str, str]) -> str:
    maps = (
        f'input_map {{ key: "{reads[0]}" value: "{reads[1]}" }} output_map {{ key: "{makes[0]}" value: "{makes[1]}" }}'
    )
    return f'{{ model_name: "{model}" model_version: -1 {maps} }}'


CHAIN = [
    chained("decode", ("bytes", "FILE"), ("picture", "pixels")),
    chained("detect", ("picture", "pixels"), ("scores", "raw")),
    chained("rank", ("scores", "raw"), ("best", "BEST")),
]
ENDS = """
name: "pipeline"
platform: "ensemble"
max_batch_size: 1
input [ { name: "FILE" data_type: TYPE_UINT8 dims: [ -1 ] } ]
output [ { name: "BEST" data_type: TYPE_FP32 dims: [ 5 ] } ]
"""
SEQUENCE = (
    ONE
    + """sequence_batching {
  max_sequence_idle_microseconds: 5000000
  %s
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] },
    { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]
}"""
)

ENSEMBLES = {
    "an ensemble of two": ENDS + f"ensemble_scheduling {{ step [ {CHAIN[0]}, {CHAIN[1].replace('raw', 'BEST')} ] }}",
    "an ensemble of three": ENDS + f"ensemble_scheduling {{ step [ {', '.join(CHAIN)} ] }}",
    "an ensemble that branches": """
platform: "ensemble"
input [ { name: "A" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "B" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "SUM" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "SIDE" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling {
  step { model_name: "left" input_map { key: "x" value: "A" } output_map { key: "y" value: "a" } }
  step {
    model_name: "right"
    input_map { key: "x" value: "B" }
    output_map [ { key: "y" value: "b" }, { key: "z" value: "SIDE" } ]
  }
  step {
    model_name: "add"
    input_map [ { key: "p" value: "a" }, { key: "q" value: "b" } ]
    output_map { key: "s" value: "SUM" }
  }
}
""",
}

SCHEDULED = {
    "sequences, direct": SEQUENCE % "direct { minimum_slot_utilization: 0.5 }",
    "sequences, oldest": SEQUENCE % "oldest { max_candidate_sequences: 4 preferred_batch_size: [ 2, 4 ] }",
    "many answers": ONE.replace("onnxruntime", "python") + "model_transaction_policy { decoupled: True }",
}

ALL = [
    *SERVED.values(),
    *(text for text, _ in NOT_HERE.values()),
    *ON_GPUS.values(),
    *ENSEMBLES.values(),
    *SCHEDULED.values(),
]


def named(text: str) -> str:
    """The name that the file gives, which is the directory's."""
    found = re.search(r'^name: "(\w+)"', text, re.MULTILINE)
    return found.group(1) if found else "model"


def problems(text: str, backends: tuple[str, ...] = HERE, gpus: tuple[int, ...] = ()) -> list[tuple[str, str]]:
    found = examine(text, "config.pbtxt", Setting(named(text), backends, (), gpus))
    return [(problem.path, problem.text) for problem in found.problems]


@pytest.mark.parametrize(
    "text", list((SERVED | ENSEMBLES | SCHEDULED).values()), ids=list(SERVED | ENSEMBLES | SCHEDULED)
)
def test_what_can_be_served(text: str) -> None:
    assert problems(text) == []


@pytest.mark.parametrize(("text", "backend"), NOT_HERE.values(), ids=NOT_HERE)
def test_only_the_backend_is_not_here(text: str, backend: str) -> None:
    found = problems(text)
    assert [path for path, _ in found] == ["backend"]
    assert found[0][1].startswith(f'found "{backend}", which this server does not have; ')
    assert problems(text, EVERYWHERE) == []


@pytest.mark.parametrize("text", ON_GPUS.values(), ids=ON_GPUS)
def test_only_the_gpu_is_not_here(text: str) -> None:
    found = problems(text)
    assert found
    for path, what in found:
        assert re.fullmatch(r"instance_group\[\d\]\.kind", path)
        assert what.startswith("KIND_GPU, but this server runs models only on the CPU")
    assert problems(text, gpus=GPUS) == []


@pytest.mark.parametrize("text", ALL)
def test_every_form_says_the_same(text: str) -> None:
    """As JSON of a load call, and as the text that is shown."""
    given = parse(text)
    assert to_config(parse_override(json.dumps(as_triton_json(given))).message) == given
    final = complete(given, named(text), (), EVERYWHERE, GPUS)
    assert parse(as_text(final, origins(given, final, final, "file"))) == final
