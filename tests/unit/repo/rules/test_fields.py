"""Every rule that a configuration must keep: broken alone, it is reported alone, at its field."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from shmserve.repo.config.complete import complete
from shmserve.repo.config.problems import ConfigError
from shmserve.repo.load import parse
from shmserve.repo.rules.completed import verify
from shmserve.repo.rules.fields import HostFacts, validate
from tests.support.repo.texts import BACKENDS, DIRECT, ENSEMBLE, OLDEST, SMALL

HEAD = 'backend: "identity" max_batch_size: 8\n'
INPUT = 'input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] }\n'
OUTPUT = 'output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }\n'
REST = HEAD + OUTPUT


def broken(text: str, name: str = "m", gpus: tuple[int, ...] = (), backends: tuple[str, ...] = BACKENDS) -> list[str]:
    """The problems of a text, as `path: what`; rules only, whether or not the fields are supported."""
    found: list[str] = []
    config = complete(parse(text), name, (), backends, gpus)
    validate(config, HostFacts(backends, gpus), lambda path, text: found.append(f"{path}: {text}"))
    return found


def tensor(rest: str) -> str:
    return REST + 'input { name: "x" data_type: TYPE_FP32 ' + rest + "}"


def dynamic(rest: str) -> str:
    return SMALL + "dynamic_batching { " + rest + "}"


def sequence(rest: str) -> str:
    return SMALL + "sequence_batching { " + rest + "}"


def control(rest: str) -> str:
    return sequence('control_input { name: "C" control { ' + rest + "} }")


def state(rest: str, dims: str = "[ 2, -1 ]") -> str:
    return sequence(f'state {{ input_name: "i" output_name: "o" data_type: TYPE_FP32 dims: {dims} {rest} }}')


def steps(*given: str) -> str:
    head = ENSEMBLE[: ENSEMBLE.index("ensemble_scheduling")]
    return head + "ensemble_scheduling { " + "".join(f"step {{ {step} }} " for step in given) + "}"


DECODE = 'model_name: "decode" input_map { key: "IN" value: "RAW" } output_map { key: "OUT" value: "picture" }'
CLASSIFY = 'model_name: "classify" input_map { key: "IN" value: "picture" } output_map { key: "OUT" value: "LABEL" }'

RULES = [
    # general
    (HEAD.replace("8", "-1") + INPUT + OUTPUT, "max_batch_size: found -1, expected 0 or more"),
    ('backend: "" ' + INPUT + OUTPUT, "backend: not given, and no file in the version directory determines it"),
    ('backend: "tensorrt"' + INPUT + OUTPUT, 'backend: found "tensorrt", which this server does not have; it has iden'),
    ('backend: "onnxruntim"' + INPUT + OUTPUT, 'which this server does not have; did you mean "onnxruntime"?'),
    ('platform: "onnxruntime_onx"' + INPUT + OUTPUT, 'platform: found "onnxruntime_onx", not a platform; did you mean'),
    ('platform: "onnxruntime_onnx" backend: "python"', 'but platform "onnxruntime_onnx" is backend "onnxruntime"'),
    ('platform: "tensorrt_plan"', 'found "tensorrt", which this server does not have'),
    (HEAD + INPUT, 'output: not given, and backend "identity" cannot determine it'),
    (HEAD + OUTPUT, 'input: not given, and backend "identity" cannot determine it'),
    # inputs and outputs
    (REST + "input { data_type: TYPE_FP32 dims: 3 }", "input[0].name: not given"),
    (
        REST + 'input { name: "%s" data_type: TYPE_FP32 dims: 3 }' % ("x" * 129),
        "found 129 characters, expected at most",
    ),
    (REST + 'input { name: "a\\n" data_type: TYPE_FP32 dims: 3 }', "input[0].name: 'a\\n' has non-printable"),
    (REST + 2 * INPUT, 'input[1].name: "x" is already the name of input[0]'),
    (REST + 'input { name: "x" dims: 3 }', 'input[0].data_type: "x" has none; expected one of TYPE_BOOL,'),
    (tensor(""), 'input[0].dims: "x" needs at least'),
    (tensor("dims: [ 3, 0 ]"), "input[0].dims[1]: found 0, expected 1 or more, or -1"),
    (tensor("dims: -2"), "input[0].dims[0]: found -2"),
    (tensor("dims: 1 " * 32), "input[0].dims: found 32, expected at most 31"),
    (tensor("dims: [ 4294967296, 2147483648 ]"), "input[0].dims: the fixed dims alone take more than"),
    (tensor("dims: 3 reshape { shape: [ 1, 0 ] }"), "input[0].reshape.shape[1]: found 0"),
    (
        tensor("dims: 4 reshape { shape: [ 2, 3 ] }"),
        "input[0].reshape: [2, 3] does not have as many elements as dims [4]",
    ),
    (tensor("dims: [ 2, -1, 4 ] reshape { shape: [ 4, -1, 2 ] }"), "between -1s as well"),
    (tensor("dims: [ -1, 2 ] reshape { shape: 2 }"), "input[0].reshape"),
    (tensor("dims: 2 reshape { }"), "input[0].reshape: empty; that requires"),
    (tensor("dims: [ 3, 4 ] format: FORMAT_NHWC"), "input[0].format: FORMAT_NHWC needs 3 dims, found 2"),
    (tensor("dims: 3 allow_ragged_batch: true").replace("8", "0"), "input[0].allow_ragged_batch: needs max_batch"),
    (REST + "".join(INPUT.replace('"x"', f'"x{n}"') for n in range(257)), "input: found 257, expected at most 256"),
    (HEAD + INPUT + OUTPUT.replace("}", 'label_filename: "../x" }'), 'output[0].label_filename: found "../x"'),
    # ragged batches
    (SMALL + 'batch_input { target_name: "t" source_input: "x" }', "batch_input[0].data_type: found TYPE_INVALID"),
    (SMALL + 'batch_input { data_type: TYPE_FP32 source_input: "x" }', "batch_input[0].target_name: not given"),
    (
        SMALL + 'batch_input { data_type: TYPE_FP32 target_name: "t" }',
        "batch_input[0].source_input: found 0, expected ex",
    ),
    (
        SMALL + 'batch_input { data_type: TYPE_FP32 target_name: "t" source_input: "xx" }',
        'batch_input[0].source_input[0]: "xx" is not an input; did you mean "x"?',
    ),
    (
        SMALL + 'batch_output { target_name: "z" source_input: "x" }',
        'batch_output[0].target_name[0]: "z" is not an output',
    ),
    (
        SMALL + 'batch_output { target_name: "y" target_name: "y" source_input: "x" }',
        '"y" is already used by batch_out',
    ),
    # dynamic batching
    (
        dynamic("preferred_batch_size: [ 4, 0 ]"),
        "dynamic_batching.preferred_batch_size[1]: found 0, expected 1 or more",
    ),
    (dynamic("preferred_batch_size: 9"), "found 9, expected at most max_batch_size (8)"),
    (dynamic("priority_levels: 2"), "dynamic_batching.default_priority_level: found 0, expected 1 to 2"),
    (dynamic("priority_levels: 2 default_priority_level: 3"), "dynamic_batching.default_priority_level: found 3"),
    (
        dynamic("priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 }"),
        "dynamic_batching.priority_queue_policy[3]: level 3 does not exist; expected 1 to 2",
    ),
    (
        dynamic("preserve_ordering: true priority_levels: 2 default_priority_level: 1"),
        "dynamic_batching.preserve_ordering: cannot be combined with 2 priority_levels",
    ),
    (
        dynamic(
            "preserve_ordering: true default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 }"
        ),
        "dynamic_batching.default_queue_policy.timeout_action: DELAY with a timeout cannot be",
    ),
    (
        dynamic(
            "preserve_ordering: true priority_levels: 1 default_priority_level: 1 "
            "priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 1 } }"
        ),
        "dynamic_batching.priority_queue_policy[1].timeout_action: DELAY",
    ),
    # sequences
    (sequence("") + "response_cache { enable: true }", "response_cache.enable: responses of a sequence"),
    (sequence("oldest { preferred_batch_size: 0 }"), "sequence_batching.oldest.preferred_batch_size[0]: found 0"),
    (sequence("oldest { preferred_batch_size: 9 }"), "sequence_batching.oldest.preferred_batch_size[0]: found 9"),
    (sequence("oldest { max_candidate_sequences: -1 }"), "sequence_batching.oldest.max_candidate_sequences: found -1"),
    (sequence("direct { minimum_slot_utilization: 1.5 }"), "minimum_slot_utilization: found 1.5, expected 0 to 1"),
    (sequence("direct { minimum_slot_utilization: nan }"), "minimum_slot_utilization: found nan, expected 0 to 1"),
    (sequence("control_input { control { int32_false_true: [ 0, 1 ] } }"), "control_input[0].name: not given"),
    (sequence('control_input { name: "C" }'), "sequence_batching.control_input[0].control: not given"),
    (
        sequence(
            'control_input { name: "C" control { int32_false_true: [ 0, 1 ] } } '
            'control_input { name: "C" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }'
        ),
        'control_input[1].name: "C" is already the name of sequence_batching.control_input[0]',
    ),
    (
        sequence(
            'control_input { name: "C" control { int32_false_true: [ 0, 1 ] } control { int32_false_true: [ 0, 1 ] } }'
        ),
        "control_input[0].control[1].kind: CONTROL_SEQUENCE_START is already given by",
    ),
    (control(""), "control[0]: CONTROL_SEQUENCE_START needs exactly one of int32_false_true, fp32_false_true"),
    (
        control("int32_false_true: [ 0, 1 ] bool_false_true: [ false, true ]"),
        "found int32_false_true and bool_false_true",
    ),
    (control("int32_false_true: [ 0, 1, 2 ]"), "control[0].int32_false_true: found 3 values, expected 2"),
    (control("fp32_false_true: [ 0, inf ]"), "control[0].fp32_false_true: expected finite numbers"),
    (control("kind: CONTROL_SEQUENCE_CORRID"), "control[0].data_type: found TYPE_INVALID, expected one of TYPE_UINT64"),
    (
        control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING int32_false_true: [ 0, 1 ]"),
        "control[0].int32_false_true: CONTROL_SEQUENCE_CORRID takes no such values",
    ),
    (sequence('state { output_name: "o" }'), "sequence_batching.state[0].input_name: not given"),
    (sequence('state { input_name: "i" }'), "sequence_batching.state[0].output_name: not given"),
    (
        sequence(2 * 'state { input_name: "i" output_name: "o" }'),
        'state[1].input_name: "i" is already the input of',
    ),
    (state("initial_state { zero_data: true dims: [ 2, 1 ] }"), "state[0].initial_state[0].name: not given"),
    (state('initial_state { name: "n" dims: [ 2, 1 ] }'), "initial_state[0]: expected zero_data or data_file"),
    (state('initial_state { name: "n" zero_data: true dims: [ 2, -1 ] }'), "initial_state[0].dims[1]: found -1"),
    (state('initial_state { name: "n" zero_data: true dims: 2 }'), "initial_state[0].dims: found 1, expected 2"),
    (
        state('initial_state { name: "n" zero_data: true dims: [ 3, 1 ] }'),
        "initial_state[0].dims[0]: found 3, expected 2",
    ),
    (
        state(2 * 'initial_state { name: "n" zero_data: true dims: [ 2, 1 ] }'),
        "initial_state: found 2, expected at most",
    ),
    (state("use_growable_memory: true"), "state[0].use_growable_memory: needs use_same_buffer_for_input_output"),
    # ensembles
    (ENSEMBLE + 'backend: "python"', 'backend: found "python", but an ensemble has no backend'),
    (ENSEMBLE.replace('"ensemble"', '""'), 'platform: found "", but ensemble_scheduling needs "ensemble"'),
    ('platform: "ensemble"', "ensemble_scheduling: not given"),
    (ENSEMBLE + "instance_group { }", "instance_group: an ensemble has none"),
    (ENSEMBLE + "optimization { }", "optimization: an ensemble has none"),
    (ENSEMBLE + "model_warmup { }", "model_warmup: an ensemble has none"),
    (ENSEMBLE.replace("model_version: -1", "model_version: -2"), "step[0].model_version: found -2"),
    (steps(), "ensemble_scheduling.step: not given"),
    (steps(DECODE.replace('"decode"', '""'), CLASSIFY), "step[0].model_name: not given"),
    (
        steps(DECODE, CLASSIFY, CLASSIFY.replace("classify", "again")),
        'step[2].output_map["OUT"]: ensemble tensor "LABEL" is already produced by ensemble_scheduling.step[1]',
    ),
    (
        steps(DECODE, CLASSIFY.replace('"picture"', '"pictur"'), CLASSIFY.replace("LABEL", "picture2")),
        'step[1].input_map["IN"]: ensemble tensor "pictur" is neither an input nor produced by a step; did you',
    ),
    (steps(CLASSIFY.replace('"picture"', '"LABEL"')), 'input[0]: ensemble input "RAW" is not used by any step'),
    (
        steps(DECODE, CLASSIFY.replace('"picture"', '"RAW"')),
        'output_map["OUT"]: ensemble tensor "picture" is not used by',
    ),
    (steps(DECODE.replace('"picture"', '"RAW2"')), 'output[0]: ensemble output "LABEL" is not produced by any step'),
    # instance groups
    (SMALL + "instance_group { count: -1 }", "instance_group[0].count: found -1, expected 1 or more"),
    (
        SMALL + "instance_group { count: 1000 } instance_group { count: 25 }",
        "instance_group: 1025 instances, each a process",
    ),
    (SMALL + "instance_group { kind: KIND_CPU gpus: 0 }", "instance_group[0].gpus: KIND_CPU has no gpus, found [0]"),
    (SMALL + "instance_group { kind: KIND_MODEL gpus: 1 }", "instance_group[0].gpus: KIND_MODEL has no gpus"),
    (
        SMALL + "instance_group { kind: KIND_GPU }",
        "instance_group[0].kind: KIND_GPU, but this server runs models only on the CPU",
    ),
    (SMALL + 'instance_group { profile: "-1" }', 'instance_group[0].profile[0]: found "-1", expected an integer'),
    (SMALL + 'instance_group { name: "%s" }' % ("g" * 121), "instance_group[0].name: found 121 characters"),
    # others
    (
        SMALL + "model_transaction_policy { decoupled: true } response_cache { enable: true }",
        "response_cache.enable: responses of a decoupled model cannot be cached",
    ),
    (
        SMALL + "model_metrics { metric_control { histogram_options { buckets: 1 } } }",
        "metric_identifier.family: not given",
    ),
    (
        SMALL + 'model_metrics { metric_control { metric_identifier { family: "f" } histogram_options { } } }',
        "histogram_options.buckets: empty",
    ),
    (
        SMALL
        + 'model_metrics { metric_control { metric_identifier { family: "f" } histogram_options { buckets: inf } } }',
        "histogram_options.buckets: expected finite numbers",
    ),
    (
        SMALL + 'default_model_filename: "../other/model.onnx"',
        'default_model_filename: found "../other/model.onnx", expected',
    ),
    (
        SMALL + 'default_model_filename: "/etc/passwd"',
        'default_model_filename: found "/etc/passwd", expected a file in the',
    ),
    (
        SMALL.replace("identity", "onnxruntime") + 'model_operations { op_library_filename: [ "a.so", "/lib/b.so" ] }',
        'model_operations.op_library_filename[1]: found "/lib/b.so", expected a file in the model',
    ),
    (SMALL + 'cc_model_filenames { key: "7.5" value: "a/../../b" }', 'cc_model_filenames["7.5"]: found "a/../../b"'),
    (
        SMALL + 'model_warmup { inputs { key: "x" value { data_type: TYPE_FP32 dims: 3 input_data_file: "/x" } } }',
        'model_warmup[0].inputs["x"].input_data_file: found "/x"',
    ),
]


@pytest.mark.parametrize(("text", "wanted"), RULES, ids=[f"{n}-{rule[1][:40]}" for n, rule in enumerate(RULES)])
def test_a_broken_rule_is_reported(text: str, wanted: str) -> None:
    found = broken(text)
    assert any(wanted in problem for problem in found), found
    if "ensemble" not in wanted:
        assert len(found) == 1, found


@pytest.mark.parametrize(
    "text",
    [
        SMALL,
        ENSEMBLE,
        SMALL
        + DIRECT.replace("dims: [ 2, 5 ] zero_data: true", "dims: [ 2, 5 ] zero_data: false").replace(
            'initial_state { data_file: "first" }', 'initial_state { name: "f" data_file: "first" }'
        ),
        SMALL + OLDEST,
        dynamic("preferred_batch_size: [ 8, 4 ] preserve_ordering: true priority_levels: 1 default_priority_level: 1"),
        dynamic("priority_levels: 18446744073709551615 default_priority_level: 4294967296"),
        dynamic("preserve_ordering: true default_queue_policy { timeout_action: DELAY }"),
        tensor("dims: [ 3, -1, 4 ] reshape { shape: [ 1, 3, -1, 2, 2 ] } format: FORMAT_NCHW"),
        tensor("dims: 1 reshape { }"),
        tensor("dims: 1 reshape { }").replace("max_batch_size: 8", ""),
        tensor("dims: [ 3, 244, 244 ] reshape { shape: 178608 }"),
        SMALL + "instance_group { kind: KIND_MODEL } instance_group { kind: KIND_AUTO gpus: [ 0, 1 ] }",
        SMALL + 'default_model_filename: "weights/model..onnx"',
        'backend: "onnxruntime"',
        'backend: "onnxruntime" dynamic_batching { preferred_batch_size: [ 4 ] }',
        'platform: "onnxruntime_onnx"',
        'backend: "python" max_batch_size: 4',
        steps(
            DECODE,
            CLASSIFY,
            CLASSIFY.replace("LABEL", "more").replace("classify", "b"),
            DECODE.replace("RAW", "more").replace("picture", "LABEL2").replace("decode", "c"),
        ).replace("output {", 'output { name: "LABEL2" data_type: TYPE_FP32 dims: 1 } output {'),
    ],
)
def test_what_keeps_the_rules_is_left_in_peace(text: str) -> None:
    assert broken(text) == []


def test_problems_are_collected() -> None:
    text = 'backend: "nosuch" max_batch_size: -1 input { dims: 0 } output { name: "y" } instance_group { count: -2 }'
    paths = [problem.split(":")[0] for problem in broken(text)]
    assert paths == [
        "backend",
        "max_batch_size",
        "input[0].name",
        "input[0].data_type",
        "input[0].dims[0]",
        "output[0].data_type",
        "output[0].dims",
        "instance_group[0].count",
    ]


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", " a", "a ", "x" * 129, "\u00fc", "a\n", "a\x00"])
def test_names(name: str) -> None:
    assert any(problem.startswith("name: found ") for problem in broken(SMALL, name))


@pytest.mark.parametrize("name", ["m", "a.b-c_1", "x" * 128, "1", "-", "_"])
def test_good_names(name: str) -> None:
    assert broken(SMALL, name) == []


@pytest.mark.parametrize("character", ";|&$`<>()[]{}\"'*?~#!")
def test_names_of_python_models(character: str) -> None:
    text = 'backend: "python" ' + INPUT + OUTPUT
    name = f"a{character}b"
    (found,) = broken(text, name)
    assert found.startswith(f'name: found "{name}"; Invalid stub name: contains invalid characters: ')
    assert not broken(text, "a b,c-d_e.f@g+h=i^j%k:l")
    assert not broken(HEAD + INPUT + OUTPUT, name)


def test_gpus_of_the_server() -> None:
    assert broken(SMALL + "instance_group { kind: KIND_GPU gpus: [ 0, 1 ] }", gpus=(0, 1)) == []
    assert broken(SMALL + "instance_group { kind: KIND_GPU gpus: [ 0, 2 ] }", gpus=(0, 1)) == [
        "instance_group[0].gpus[1]: no GPU 2; this machine has [0, 1]"
    ]


def test_preferred_sizes_wait_for_a_model_that_is_still_to_be_asked() -> None:
    """Its max_batch_size may come from the model; then the rule is checked."""
    config = complete(parse('backend: "onnxruntime" dynamic_batching { preferred_batch_size: [ 4 ] }'), "m")
    verify(config, backends=BACKENDS)
    given = parse(INPUT + OUTPUT)
    with pytest.raises(ConfigError, match=r"preferred_batch_size\[0\]: found 4, expected at most max_batch_size"):
        verify(replace(config, input=given.input, output=given.output), backends=BACKENDS)
