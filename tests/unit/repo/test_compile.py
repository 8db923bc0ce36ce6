"""The policy and the instances that are compiled from a configuration."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from shmserve.core.policy import (
    BatchPolicy,
    IdControl,
    InstanceSpec,
    MemoryEstimate,
    ModelPolicy,
    PaddingPolicy,
    QueuePolicy,
    Resource,
    SequencePolicy,
    TensorSpec,
    TimeoutAction,
)
from shmserve.core.traffic import Traffic
from shmserve.protocol.messages import NAME_LENGTH
from shmserve.repo.compile import (
    GPU_BASE,
    HOST_BASE,
    PROMPT_INPUTS,
    CoreSet,
    compile_instances,
    compile_policy,
    compile_scaling,
    compile_traffic,
    memory_estimate,
)
from shmserve.repo.config.complete import complete
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.load import ModelContext, examine, parse
from shmserve.repo.rules.padding import Padded, padding_of
from tests.support.cases import cases
from tests.support.model_files import parameters
from tests.support.repo.texts import BACKENDS, SMALL


def loaded(text: str, name: str = "m", gpus: tuple[int, ...] = ()) -> ModelConfig:
    return examine(text, "config.pbtxt", ModelContext(name, BACKENDS, gpus=gpus)).require()


FIRST = """model_metrics { metric_control: [
    { metric_identifier: { family: "another" } histogram_options: { buckets: [ 9 ] } },
    { metric_identifier: { family: "nv_inference_first_response_histogram_ms" } %s }
] }"""


def test_models() -> None:
    policy = compile_policy(loaded(SMALL), 7)
    assert policy == ModelPolicy("m", 7, 8, (TensorSpec("x", "FP32", (3,)),), (TensorSpec("y", "FP32", (3,)),))
    text = """backend: "identity"
    input { name: "a" data_type: TYPE_STRING dims: [ -1, 2 ] optional: true }
    input { name: "b" data_type: TYPE_BF16 dims: 1 reshape { shape: [ 1, 1 ] } }
    output { name: "c" data_type: TYPE_BOOL dims: -1 }"""
    inputs = (TensorSpec("a", "BYTES", (-1, 2), optional=True), TensorSpec("b", "BF16", (1,)))
    assert compile_policy(loaded(text), 1) == ModelPolicy("m", 1, 0, inputs, (TensorSpec("c", "BOOL", (-1,)),))
    ragged = parse('input { name: "r" data_type: TYPE_INT8 dims: -1 allow_ragged_batch: true }')
    assert compile_policy(complete(ragged, "m"), 1).inputs[0].ragged


@cases(
    ("model_transaction_policy { decoupled: true }", {"decoupled": True}),
    ("response_cache { enable: true }", {"cached": True}),
    (FIRST % "", {}),
    (FIRST % "histogram_options: { buckets: [ 1, 2.5 ] }", {"first_response_ms": (1.0, 2.5)}),
    (parameters(execution_limit_secs="2.5"), {"execution_limit_ns": 2_500_000_000}),
    (parameters(crash_limit="0", retry_alone="False"), {"crash_limit": 0, "retry": False}),
    (parameters(idle_unload_secs="0.5", stay_loaded="true"), {"idle_unload_ns": 500_000_000, "stays_loaded": True}),
    ("dynamic_batching { }", {"batching": BatchPolicy(preferred=(8,))}),
    ("dynamic_batching { preserve_ordering: true }", {"batching": BatchPolicy((8,), preserve_ordering=True)}),
    (
        """dynamic_batching {
              preferred_batch_size: [ 6, 2, 6 ] max_queue_delay_microseconds: 1500
              priority_levels: 3 default_priority_level: 2
              default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 10 max_queue_size: 5 }
              priority_queue_policy { key: 1 value { allow_timeout_override: true } }
              priority_queue_policy { key: 3 value { default_timeout_microseconds: 7 } }
            }""",
        {
            "batching": BatchPolicy(
                preferred=(2, 6),
                delay_ns=1_500_000,
                levels=3,
                default_level=2,
                default_policy=QueuePolicy(TimeoutAction.DELAY, 10_000, False, 5),
                level_policies={1: QueuePolicy(allow_override=True), 3: QueuePolicy(timeout_ns=7_000)},
            )
        },
    ),
)
def test_settings_of_a_model(text: str, expected: dict[str, Any]) -> None:
    """All others keep their defaults."""
    assert compile_policy(loaded(SMALL + text), 1) == replace(compile_policy(loaded(SMALL), 1), **expected)


def test_traffic() -> None:
    text = parameters(traffic="1=60, 2=40%", aliases="prod=1, next=2", shadow="3=5")
    assert compile_traffic(loaded(SMALL + text)) == Traffic({1: 60, 2: 40}, {"prod": 1, "next": 2}, {3: 5})


def test_estimates_of_memory() -> None:
    """A guess from the files, unless the model's parameters say more."""

    def estimate(text: str, size: int) -> MemoryEstimate:
        return memory_estimate(loaded(SMALL + text, gpus=(0,)), size)

    cpu, gpu = "instance_group { kind: KIND_CPU }", "instance_group { kind: KIND_GPU gpus: 0 }"
    assert estimate(cpu, 100 << 20) == MemoryEstimate(HOST_BASE + (150 << 20))
    given = parameters(memory_mb="512")
    assert estimate(given + cpu, 1) == MemoryEstimate(512 << 20, 0, True)
    assert estimate(given + gpu, 2 << 20) == MemoryEstimate(512 << 20, GPU_BASE + (3 << 20)), (
        "only half of it was given"
    )
    given = parameters(memory_mb="512", gpu_memory_mb="1000")
    assert estimate(given + gpu, 1) == MemoryEstimate(512 << 20, 1000 << 20, True)


def scaled(groups: str, cores: CoreSet | None = None, **given: str) -> tuple[list[str], Any]:
    """The instances at the start, and how they are scaled."""
    config = loaded(SMALL + groups + parameters(**given), gpus=(0, 1))
    return [spec.name for spec in compile_instances(config, cores)], compile_scaling(config, cores)


def test_scaling() -> None:
    two, one = "instance_group { count: 2 kind: KIND_CPU }", "instance_group { kind: KIND_CPU }"
    assert scaled(two) == scaled(two, min_instances="2", max_instances="2") == (["m_0_0", "m_0_1"], None)
    names, policy = scaled(two, max_instances="3")
    (group,) = policy.groups
    assert (names, group.group, group.minimum, group.maximum) == (["m_0_0", "m_0_1"], "m_0", 1, 3)
    assert [spec.name for spec in group.specs] == ["m_0_0", "m_0_1", "m_0_2"]
    assert (policy.up_ns, policy.down_ns) == (50_000_000, 30_000_000_000)
    times = parameters(scale_up_queue_ms="2.5", scale_down_secs="0.1")
    names, policy = scaled(one + times, min_instances="2", max_instances="3")
    assert (names, policy.up_ns, policy.down_ns) == (["m_0_0", "m_0_1"], 2_500_000, 100_000_000)
    # Each group and device is scaled.
    groups = """instance_group [ { name: "a" count: 1 kind: KIND_CPU }, { name: "b" kind: KIND_GPU gpus: [ 0, 1 ] },
    { name: "c" count: 3 kind: KIND_CPU passive: true } ]"""
    names, policy = scaled(groups, CoreSet((0, 1, 2, 3), quota=3), max_instances="2")
    assert names == ["a_0", "b_0", "b_1", "c_0", "c_1", "c_2"]
    found = [(group.group, group.specs[0].kind, group.specs[0].device, len(group.specs)) for group in policy.groups]
    assert found == [("a", "KIND_CPU", 0, 2), ("b", "KIND_GPU", 0, 2), ("b", "KIND_GPU", 1, 2)]
    assert (policy.cores, policy.quota) == (4, 3)


@cases(
    ("llamacpp", {}, 4),
    ("llamacpp", {"slots": "16"}, 16),
    ("vllm", {}, 256),
    ("vllm", {"slots": "16"}, 16),
    ("python", {"slots": "16"}, 0),
)
def test_prompts_are_counted_for_engines_of_language_models(backend: str, given: dict[str, str], slots: int) -> None:
    text = f'name: "m" backend: "{backend}" model_transaction_policy {{ decoupled: true }}'
    found = compile_policy(parse(text + parameters(max_queue_tokens="5", **given)), 1)
    assert found.prompt_inputs == (PROMPT_INPUTS if slots else ())
    assert (found.queue_tokens, found.streams) == (5, slots)


CORRID = 'control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_%s } }'
START = 'control_input { name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }'
FULL, ORDERED = BatchPolicy((8,)), BatchPolicy((2, 4), delay_ns=30_000, preserve_ordering=True)


@cases(
    ("", SequencePolicy(True, 8, 10**9)),
    (START, SequencePolicy(True, 8, 10**9)),
    (
        "direct { max_queue_delay_microseconds: 30 minimum_slot_utilization: 0.75 } max_sequence_idle_microseconds: 5",
        SequencePolicy(True, 8, 5_000, delay_ns=30_000, utilization=0.75),
    ),
    (
        "oldest { max_candidate_sequences: 4 preferred_batch_size: [ 4, 2, 4 ] preserve_ordering: true"
        " max_queue_delay_microseconds: 30 }" + START + CORRID % "STRING",
        SequencePolicy(False, 4, 10**9, batching=ORDERED, id_control=IdControl("ID", "BYTES")),
    ),
    (
        "oldest { } iterative_sequence: true " + CORRID % "UINT32",
        SequencePolicy(False, 1, 10**9, batching=FULL, iterative=True, id_control=IdControl("ID", "UINT32")),
    ),
)
def test_sequences(text: str, expected: SequencePolicy) -> None:
    policy = compile_policy(complete(parse(f"{SMALL} sequence_batching {{ {text} }}"), "m"), 1)
    assert policy.sequence == expected
    assert policy.batching is None
    for kind in ("direct", "oldest"):
        alone = parse(f'backend: "identity" sequence_batching {{ {kind} {{ }} }}')
        assert compile_policy(complete(alone, "m"), 1).sequence == SequencePolicy(kind == "direct", 1, 10**9)


@cases(
    ("", [InstanceSpec("m_0_0")]),
    ("instance_group { count: 2 }", [InstanceSpec("m_0_0"), InstanceSpec("m_0_1")]),
    (
        'instance_group { } instance_group { name: "spare" count: 2 kind: KIND_MODEL passive: true }',
        [InstanceSpec("m_0_0"), *(InstanceSpec(f"spare_{n}", "KIND_MODEL", passive=True) for n in range(2))],
    ),
    (
        'instance_group { name: "a" count: 2 } instance_group { name: "a" }',
        [InstanceSpec("a_0"), InstanceSpec("a_1"), InstanceSpec("a_2")],
    ),
    (
        "instance_group { count: 2 kind: KIND_GPU gpus: [ 1, 0 ] }",
        [InstanceSpec(f"m_0_{number}", "KIND_GPU", device) for number, device in enumerate((1, 1, 0, 0))],
    ),
    (
        """instance_group { rate_limiter {
              resources { name: "R1" count: 4 } resources { name: "R2" global: true count: 2 } priority: 3 } }
            instance_group { rate_limiter { } }""",
        [
            InstanceSpec("m_0_0", resources=(Resource("R1", 4), Resource("R2", 2, shared=True)), turn=3),
            InstanceSpec("m_1_0"),
        ],
    ),
)
def test_instances(text: str, expected: list[InstanceSpec]) -> None:
    gpus = (0, 1) if "gpus" in text else ()
    assert list(compile_instances(loaded(SMALL + text, gpus=gpus))) == expected


def test_names_of_instances_are_unique_and_fit() -> None:
    groups = 'instance_group { count: 500 name: "%s" } instance_group { count: 500 } instance_group { }' % ("g" * 120)
    found = compile_instances(loaded(SMALL + groups, name="x" * 128))
    names = [spec.name for spec in found]
    assert len(names) == len(set(names)) == 1001
    assert max(map(len, names)) <= NAME_LENGTH


MODEL = """backend: "identity"
max_batch_size: 8
dynamic_batching { }
input [ { name: "ids" data_type: TYPE_INT8 dims: [ -1 ] }, { name: "fixed" data_type: TYPE_BOOL dims: [ 4 ] } ]
input { name: "pairs:0" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] }
input { name: "words" data_type: TYPE_STRING dims: [ -1 ] }
output [ { name: "tokens" data_type: TYPE_FP32 dims: [ -1, 64 ] }, { name: "text" data_type: TYPE_FP32 dims: [ 64 ] } ]
"""


def padded(**given: str) -> tuple[Any, Any]:
    config = examine(MODEL + parameters(**given), "config.pbtxt", ModelContext("m", BACKENDS)).require()
    return padding_of(config), compile_policy(config, 1).padding


def test_axes_values_and_defaults() -> None:
    padding, policy = padded(padding="ids pairs:0[1]=-1e3 pairs:0[2] words=[PAD]")
    assert padding.inputs == (Padded("ids", (0,)), Padded("pairs:0", (1, 2), "-1e3"), Padded("words", (0,), "[PAD]"))
    assert padding.outputs == (Padded("tokens", (0,)),), "those that have one dim of -1"
    assert policy == PaddingPolicy((("ids", (0,)), ("pairs:0", (1, 2)), ("words", (0,))), 64, 1, 128)
    numbers = {"padding_lookahead": "9", "padding_multiple": "8", "padding_batch_cost": "0"}
    padding, policy = padded(padding="ids=-7", padding_outputs="", **numbers)
    assert padding.outputs == ()
    assert policy == PaddingPolicy((("ids", (0,)),), 9, 8, 0)
    assert padded() == (None, None)
