"""The rules that a configuration keeps, as Triton numbers none but enforces: each is broken once, in a file, and the
problem says file, line and column, the field, what was found, and what was expected.

The rule of the file: one row or more for each rule; what is broken stands in a line of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shmserve.repo.load import Setting, examine
from tests.support.repo.texts import BACKENDS

FILE = "m/config.pbtxt"
HEAD = 'backend: "identity"\nmax_batch_size: 8\n'
INPUT = 'input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] }\n'
OUTPUT = 'output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }\n'
MODEL = HEAD + INPUT + OUTPUT
"""Four lines, so that what a row adds is line 5."""

ENDS = """platform: "ensemble"
input { name: "RAW" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "LABEL" data_type: TYPE_FP32 dims: [ 10 ] }
"""


def step(model: str, reads: str, makes: str) -> str:
    maps = f'input_map {{ key: "IN" value: "{reads}" }} output_map {{ key: "OUT" value: "{makes}" }}'
    return f'  step {{ model_name: "{model}" {maps} }}\n'


def ensemble(*steps: str) -> str:
    return ENDS + "ensemble_scheduling {\n" + "".join(steps) + "}\n"


DECODE = step("decode", "RAW", "picture")
CLASSIFY = step("classify", "picture", "LABEL")


def problems(text: str, folder: Path | None = None, gpus: tuple[int, ...] = ()) -> list[str]:
    found = examine(text, FILE, Setting("m", BACKENDS, (), gpus, folder))
    assert (found.config is None) is bool(found.problems)
    return [str(problem) for problem in found.problems]


RULES = [
    # 1: the name
    (1, 'name: "n"\n' + MODEL, '1:1: name: unexpected directory name "m" for model "n"'),
    # 2: backend and platform
    (2, INPUT + OUTPUT, "backend: not given, and no file in the version directory determines it; set one of"),
    (2, 'backend: "pyhton"\n' + INPUT, '1:1: backend: found "pyhton", which this server does not have; did you mean'),
    (2, 'platform: "onnxruntime_onx"\n', '1:1: platform: found "onnxruntime_onx", not a platform; did you mean "onnx'),
    (2, 'platform: "onnxruntime_onnx"\nbackend: "python"', '2:1: backend: found "python", but platform "onnxruntime_o'),
    (2, 'backend: "python"\n' + ensemble(DECODE, CLASSIFY), '1:1: backend: found "python", but an ensemble has no'),
    # 3: max_batch_size
    (
        3,
        INPUT + OUTPUT + 'backend: "identity"\nmax_batch_size: -1',
        "4:1: max_batch_size: found -1, expected 0 or more",
    ),
    # 6, 7, 8: dynamic batching
    (
        6,
        MODEL + "dynamic_batching { preferred_batch_size: [ 4,\n0 ] }",
        "6:1: dynamic_batching.preferred_batch_size[1]",
    ),
    (
        6,
        MODEL + "dynamic_batching { preferred_batch_size: 16 }",
        "found 16, expected at most max_batch_size (8)",
    ),
    (
        7,
        MODEL + "dynamic_batching {\npriority_levels: 2 }",
        "5:1: dynamic_batching.default_priority_level: found 0, expe",
    ),
    (
        7,
        MODEL + "dynamic_batching { priority_levels: 2\ndefault_priority_level: 3 }",
        "6:1: dynamic_batching.default_priority_level: found 3, expected 1 to 2",
    ),
    (
        7,
        MODEL + "dynamic_batching { priority_levels: 2 default_priority_level: 1\npriority_queue_policy { key: 3 } }",
        "6:23: dynamic_batching.priority_queue_policy[3]: level 3 does not exist; expected 1 to 2",
    ),
    (
        8,
        MODEL + "dynamic_batching { priority_levels: 2 default_priority_level: 1\npreserve_ordering: true }",
        "6:1: dynamic_batching.preserve_ordering: cannot be combined with 2 priority_levels; expected at most 1",
    ),
    (
        8,
        MODEL
        + "dynamic_batching { preserve_ordering: true default_queue_policy {\n"
        + "timeout_action: DELAY default_timeout_microseconds: 5 } }",
        "6:1: dynamic_batching.default_queue_policy.timeout_action: DELAY with a timeout cannot be combined with",
    ),
    (
        8,
        MODEL
        + "dynamic_batching { preserve_ordering: true priority_levels: 1 default_priority_level: 1\n"
        + "priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 5 } } }",
        "6:40: dynamic_batching.priority_queue_policy[1].timeout_action: DELAY with a timeout",
    ),
    # 9 to 12: sequences
    (
        9,
        MODEL + "sequence_batching { }\nresponse_cache { enable: true }",
        "6:18: response_cache.enable: responses of a sequ",
    ),
    (
        10,
        MODEL + "sequence_batching { control_input {\ncontrol { int32_false_true: [ 0, 1 ] } } }",
        "sequence_batching.control_input[0].name: not given",
    ),
    (
        10,
        MODEL
        + 'sequence_batching { control_input { name: "C" control { int32_false_true: [ 0, 1 ] } }\n'
        + 'control_input { name: "C" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } } }',
        '6:17: sequence_batching.control_input[1].name: "C" is already the name of sequence_batching.control_input[0]',
    ),
    (
        10,
        MODEL
        + 'sequence_batching { control_input { name: "C" control { int32_false_true: [ 0, 1 ] } }\n'
        + 'control_input { name: "D" control { fp32_false_true: [ 0, 1 ] } } }',
        "control_input[1].control[0].kind: CONTROL_SEQUENCE_START is already given by sequence_batching.control_input",
    ),
    (
        10,
        MODEL + 'sequence_batching { control_input { name: "C" control {\nkind: CONTROL_SEQUENCE_END } } }',
        "control[0]: CONTROL_SEQUENCE_END needs exactly one of int32_false_true, fp32_false_true, bool_false_true",
    ),
    (
        10,
        MODEL + 'sequence_batching { control_input { name: "C" control {\nint32_false_true: [ 0, 1, 2 ] } } }',
        "6:1: sequence_batching.control_input[0].control[0].int32_false_true: found 3 values, expected 2",
    ),
    (
        10,
        MODEL + 'sequence_batching { control_input { name: "C" control {\nkind: CONTROL_SEQUENCE_CORRID } } }',
        "control[0].data_type: found TYPE_INVALID, expected one of TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32, ",
    ),
    (
        11,
        MODEL + "sequence_batching { oldest {\npreferred_batch_size: 9 } }",
        "6:23: sequence_batching.oldest.preferred_batch_size[0]: found 9, expected at most max_batch_size (8)",
    ),
    (
        11,
        MODEL + "sequence_batching { direct {\nminimum_slot_utilization: 1.5 } }",
        "6:1: sequence_batching.direct.minimum_slot_utilization: found 1.5, expected 0 to 1",
    ),
    (
        12,
        MODEL + "sequence_batching {" + 2 * '\nstate { input_name: "i" output_name: "o" }' + "}",
        '7:9: sequence_batching.state[1].input_name: "i" is already the input of sequence_batching.state[0]',
    ),
    (
        12,
        MODEL
        + 'sequence_batching { state { input_name: "i" output_name: "o" dims: [ 2, -1 ]\n'
        + 'initial_state { name: "n" zero_data: true\ndims: [ 3, -1 ] } } }',
        "7:9: sequence_batching.state[0].initial_state[0].dims[0]: found 3, expected 2, as for the state",
    ),
    (
        12,
        MODEL
        + 'sequence_batching { state { input_name: "i" output_name: "o" dims: [ 2, -1 ]\n'
        + 'initial_state { name: "n" zero_data: true\ndims: [ 2, -1 ] } } }',
        "7:12: sequence_batching.state[0].initial_state[0].dims[1]: found -1, expected 1 or more",
    ),
    (
        12,
        MODEL
        + 'sequence_batching { state { input_name: "i" output_name: "o" dims: 2\n'
        + 'initial_state { name: "n" dims: 2 } } }',
        "6:15: sequence_batching.state[0].initial_state[0]: expected zero_data or data_file",
    ),
    # 13 to 17: ensembles
    (13, ensemble(DECODE, CLASSIFY) + "instance_group { }", "instance_group: an ensemble has none; set it for the mod"),
    (13, ensemble(DECODE, CLASSIFY) + "optimization { eager_batching: true }", "optimization: an ensemble has none"),
    (13, ensemble(DECODE, CLASSIFY) + "model_warmup { }", "model_warmup: an ensemble has none"),
    (13, ensemble(DECODE, CLASSIFY).replace('platform: "ensemble"', ""), 'platform: found "", but ensemble_scheduling'),
    (14, ensemble(), "4:1: ensemble_scheduling.step: not given; expected at least one"),
    (14, ensemble(step("", "RAW", "LABEL")), "5:10: ensemble_scheduling.step[0].model_name: not given"),
    (
        14,
        ensemble(DECODE, CLASSIFY, '  step { model_name: "z" output_map { key: "O" value: "p" } }\n'),
        "7:8: ensemble_scheduling.step[2].input_map: not given",
    ),
    (
        15,
        ensemble(DECODE, CLASSIFY, step("again", "picture", "LABEL")),
        '7:82: ensemble_scheduling.step[2].output_map["OUT"]: ensemble tensor "LABEL" is already produced by ensemble',
    ),
    (
        15,
        ensemble(DECODE, CLASSIFY.replace("output_map", '\ninput_map { key: "IN" value: "RAW" } output_map')),
        '7:18: ensemble_scheduling.step[1].input_map["IN"]: mapped twice, first on line 6',
    ),
    (16, ensemble(step("a", "RAW", "LABEL"), step("b", "RAW", "z")), 'ensemble tensor "z" is not used by any step'),
    (16, ENDS + "ensemble_scheduling { step { } }", '2:7: input[0]: ensemble input "RAW" is not used by any step'),
    (16, ensemble(DECODE), '3:8: output[0]: ensemble output "LABEL" is not produced by any step'),
    (
        17,
        ensemble(DECODE, step("classify", "pictur", "LABEL"), step("rest", "picture", "z")),
        '[1].input_map["IN"]: ensemble tensor "pictur" is neither an input nor produced by a step; did you mean "pict',
    ),
    # 23 to 26: inputs and outputs
    (23, HEAD + OUTPUT + "input {\ndata_type: TYPE_FP32 dims: 3 }", "4:7: input[0].name: not given"),
    (
        23,
        HEAD + OUTPUT + 'input { name: "x"\ndims: 3 }',
        '4:7: input[0].data_type: "x" has none; expected one of TYPE_',
    ),
    (
        23,
        HEAD + OUTPUT + 'input { name: "x" data_type: TYPE_FP32 }',
        '4:7: input[0].dims: "x" needs at least',
    ),
    (
        23,
        HEAD + OUTPUT + 'input { name: "x" data_type: TYPE_FP32\ndims: [ 3, 0 ] }',
        "5:12: input[0].dims[1]: found 0, expected 1 or more, or -1 for any size",
    ),
    (
        23,
        HEAD + OUTPUT + 'input { name: "x" data_type: TYPE_FP32 dims: 3\nreshape { shape: [ -3 ] } }',
        "5:20: input[0].reshape.shape[0]: found -3, expected 1 or more, or -1 for any size",
    ),
    (
        24,
        HEAD + OUTPUT + 'input { name: "x" data_type: TYPE_FP32 dims: [ 2, 3 ]\nreshape { shape: [ 5 ] } }',
        "5:1: input[0].reshape: [5] does not have as many elements as dims [2, 3]",
    ),
    (
        24,
        HEAD + OUTPUT + 'input { name: "x" data_type: TYPE_FP32 dims: [ 2, -1, 4 ]\nreshape { shape: [ 4, -1, 2 ] } }',
        "5:1: input[0].reshape: [4, -1, 2] does not have as many elements as dims [2, -1, 4], between -1s as well",
    ),
    (
        24,
        HEAD + INPUT + 'output { name: "y" data_type: TYPE_FP32 dims: [ 3 ]\nreshape { } }',
        "5:1: output[0].reshape: empty; that requires dims of 1",
    ),
    (
        25,
        HEAD + OUTPUT + 'input { name: "x" data_type: TYPE_FP32 dims: [ 3, 4 ]\nformat: FORMAT_NHWC }',
        "5:1: input[0].format: FORMAT_NHWC needs 3 dims, found 2",
    ),
    (
        26,
        HEAD + OUTPUT + 'input { name: "x" data_type: TYPE_FP32 dims: 3\nis_shape_tensor: true }',
        "5:1: input[0].is_shape_tensor: not supported: only TensorRT has shape tensors",
    ),
    (
        26,
        HEAD + OUTPUT + 'input { name: "x" data_type: TYPE_FP32 dims: 3\nis_non_linear_format_io: true }',
        "5:1: input[0].is_non_linear_format_io: needs 3 dims, found 1",
    ),
    # 27: ragged batches
    (
        27,
        MODEL + 'batch_input { target_name: "t" data_type: TYPE_INT32\nsource_input: [ "x", "x" ] }',
        "6:1: batch_input[0].source_input: found 2, expected exactly one",
    ),
    (
        27,
        MODEL + 'batch_input { target_name: "t" data_type: TYPE_INT32\nsource_input: "xx" }',
        '6:15: batch_input[0].source_input[0]: "xx" is not an input; did you mean "x"?',
    ),
    (
        27,
        MODEL + 'batch_input { target_name: "t" source_input: "x"\ndata_type: TYPE_INT64 }',
        "6:1: batch_input[0].data_type: found TYPE_INT64, expected TYPE_INT32 or TYPE_FP32",
    ),
    (
        27,
        MODEL + 'batch_input { source_input: "x" data_type: TYPE_FP32 }',
        "5:13: batch_input[0].target_name: not given; expected at least one",
    ),
    (
        27,
        MODEL + 'batch_output { source_input: "x"\ntarget_name: "z" }',
        '6:14: batch_output[0].target_name[0]: "z" is not an output',
    ),
    (
        27,
        MODEL + 'batch_output { source_input: "x" target_name: [ "y",\n"y" ] }',
        '6:1: batch_output[0].target_name[1]: "y" is already used by batch_output[0].target_name[0]',
    ),
    # 28, 29: instance groups
    (
        28,
        MODEL + "instance_group { kind: KIND_CPU\ngpus: 0 }",
        "6:1: instance_group[0].gpus: KIND_CPU has no gpus, fou",
    ),
    (28, MODEL + "instance_group { kind: KIND_MODEL\ngpus: 0 }", "6:1: instance_group[0].gpus: KIND_MODEL has no gpus"),
    (28, MODEL + "instance_group {\nkind: KIND_GPU }", "6:1: instance_group[0].kind: KIND_GPU, but this server runs"),
    (
        29,
        MODEL + 'instance_group {\nprofile: [ "1" ] }',
        "6:1: instance_group[0].profile: not supported: only TensorRT has",
    ),
    (
        29,
        MODEL + 'instance_group {\nprofile: [ "one" ] }',
        '6:12: instance_group[0].profile[0]: found "one", expected a',
    ),
    # 30, 31
    (
        30,
        MODEL + "model_transaction_policy { decoupled: true }\nresponse_cache { enable: true }",
        "6:18: response_cache.enable: responses of a decoupled model cannot be cached",
    ),
    (
        31,
        MODEL + "model_metrics { metric_control { histogram_options { buckets: 1 } } }",
        "5:32: model_metrics.metric_control[0].metric_identifier.family: not given",
    ),
    (
        31,
        MODEL + 'model_metrics { metric_control { metric_identifier { family: "f" }\nhistogram_options { } } }',
        "6:1: model_metrics.metric_control[0].histogram_options.buckets: empty; expected at least one",
    ),
]


@pytest.mark.parametrize(
    ("text", "wanted"), [row[1:] for row in RULES], ids=[f"rule{row[0]}-{n}" for n, row in enumerate(RULES)]
)
def test_a_broken_rule_is_named_with_its_place(text: str, wanted: str) -> None:
    found = problems(text)
    assert all(problem.startswith(f"{FILE}:") for problem in found)
    assert any(wanted in problem for problem in found), found


def test_every_rule_of_one_configuration_has_a_row() -> None:
    """4 and 5 are filled in, 18 to 22 need other models, and 32 is no error."""
    assert {row[0] for row in RULES} == set(range(1, 32)) - {4, 5} - set(range(18, 23))


def test_what_is_filled_in_and_what_is_no_error() -> None:
    found = examine(MODEL + "response_cache { enable: true }", FILE, Setting("m", BACKENDS))
    assert found.config is not None
    assert found.config.version_policy is not None
    assert len(found.config.instance_group) == 1
    assert found.warnings == ()


def test_gpus_that_do_not_exist() -> None:
    text = MODEL + "instance_group { kind: KIND_GPU\ngpus: [ 0, 7 ] }"
    assert problems(text, gpus=(0, 1)) == [
        f"{FILE}:6:12: instance_group[0].gpus[1]: no GPU 7; this machine has [0, 1]",
    ]


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("execution_limit_secs", "soon", 'found "soon", expected seconds, such as "2.5", or "0" for no limit'),
        ("execution_limit_secs", "-1", 'found "-1", expected seconds'),
        ("execution_limit_secs", "nan", 'found "nan", expected seconds'),
        ("execution_limit_secs", "", 'found "", expected seconds'),
        ("execution_limit_secs", "9999999", 'found "9999999", expected seconds'),
        ("crash_limit", "-1", 'found "-1", expected a number of crashes, such as "5", or "0" for no limit'),
        ("crash_limit", "", 'found "", expected a number of crashes'),
        ("retry_alone", "no", 'found "no", expected "true" or "false"'),
        ("memory_limit_mb", "2 GiB", 'found "2 GiB", expected MiB, such as "2048", or "0" for no limit'),
        ("memory_limit_mb", "", 'found "", expected MiB'),
        ("gpu_memory_limit_mb", "-5", 'found "-5", expected MiB, such as "2048", or "0" for no limit'),
        ("EXECUTION_ENV_PATH", "env.tar.gz", 'found "env.tar.gz", expected an absolute path, or one that begins with'),
        ("EXECUTION_ENV_PATH", "", 'found "", expected an absolute path'),
    ],
)
def test_parameters_that_the_server_reads(key: str, value: str, wanted: str) -> None:
    (found,) = problems(MODEL + f'parameters {{ key: "{key}"\nvalue {{ string_value: "{value}" }} }}')
    assert f'parameters["{key}"]: {wanted}' in found
