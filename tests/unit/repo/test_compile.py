"""The policy and the instances that are compiled from a configuration."""

from __future__ import annotations

import pytest

from shmserve.core.policy import (
    BatchPolicy,
    IdControl,
    InstanceSpec,
    MemoryEstimate,
    QueuePolicy,
    Resource,
    ScalingPolicy,
    SequencePolicy,
    TensorSpec,
    TimeoutAction,
)
from shmserve.core.traffic import Traffic
from shmserve.protocol.messages import NAME_LENGTH
from shmserve.repo.compile import (
    GPU_BASE,
    HOST_BASE,
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
from tests.support.model_files import parameters
from tests.support.repo.texts import BACKENDS, SMALL


def loaded(text: str, name: str = "m", gpus: tuple[int, ...] = ()) -> ModelConfig:
    return examine(text, "config.pbtxt", ModelContext(name, BACKENDS, gpus=gpus)).require()


def test_a_small_model() -> None:
    policy = compile_policy(loaded(SMALL), 7)
    assert (policy.name, policy.version, policy.max_batch) == ("m", 7, 8)
    assert policy.inputs == (TensorSpec("x", "FP32", (3,)),)
    assert policy.outputs == (TensorSpec("y", "FP32", (3,)),)
    assert policy.batching is None


def test_types_and_optional_inputs() -> None:
    text = """backend: "identity"
    input { name: "a" data_type: TYPE_STRING dims: [ -1, 2 ] optional: true }
    input { name: "b" data_type: TYPE_BF16 dims: 1 reshape { shape: [ 1, 1 ] } }
    output { name: "c" data_type: TYPE_BOOL dims: -1 }"""
    policy = compile_policy(loaded(text), 1)
    assert policy.max_batch == 0
    assert policy.inputs == (TensorSpec("a", "BYTES", (-1, 2), optional=True), TensorSpec("b", "BF16", (1,)))
    assert policy.outputs == (TensorSpec("c", "BOOL", (-1,)),)


def test_default_batching() -> None:
    policy = compile_policy(loaded(SMALL + "dynamic_batching { }"), 1)
    assert policy.batching == BatchPolicy(preferred=(8,))


def test_all_fields_of_batching() -> None:
    text = """dynamic_batching {
      preferred_batch_size: [ 6, 2, 6 ] max_queue_delay_microseconds: 1500 priority_levels: 3 default_priority_level: 2
      default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 10 max_queue_size: 5 }
      priority_queue_policy { key: 1 value { allow_timeout_override: true } }
      priority_queue_policy { key: 3 value { default_timeout_microseconds: 7 } }
    }"""
    policy = compile_policy(loaded(SMALL + text), 1)
    assert policy.batching == BatchPolicy(
        preferred=(2, 6),
        delay_ns=1_500_000,
        levels=3,
        default_level=2,
        default_policy=QueuePolicy(TimeoutAction.DELAY, 10_000, False, 5),
        level_policies={1: QueuePolicy(allow_override=True), 3: QueuePolicy(timeout_ns=7_000)},
    )
    ordered = compile_policy(loaded(SMALL + "dynamic_batching { preserve_ordering: true }"), 1)
    assert ordered.batching is not None
    assert ordered.batching.preserve_ordering


def test_buckets_of_the_first_response() -> None:
    text = """model_metrics { metric_control: [
        { metric_identifier: { family: "another" } histogram_options: { buckets: [ 9 ] } },
        { metric_identifier: { family: "nv_inference_first_response_histogram_ms" } }
    ] }"""
    assert compile_policy(loaded(SMALL + text), 1).first_response_ms == ()
    text = text.replace('histogram_ms" }', 'histogram_ms" } histogram_options: { buckets: [ 1, 2.5 ] }')
    assert compile_policy(loaded(SMALL + text), 1).first_response_ms == (1.0, 2.5)


def test_parameters_of_the_policy() -> None:
    given = {
        "execution_limit_secs": "2.5",
        "crash_limit": "0",
        "retry_alone": "False",
        "idle_unload_secs": "0.5",
        "stay_loaded": "true",
    }
    policy = compile_policy(loaded(SMALL + parameters(**given)), 1)
    assert (policy.execution_limit_ns, policy.crash_limit, policy.retry) == (2_500_000_000, 0, False)
    assert (policy.idle_unload_ns, policy.stays_loaded) == (500_000_000, True)


def test_estimates_of_memory() -> None:
    """A guess from the files, unless the model's parameters say more."""
    guess = memory_estimate(loaded(SMALL), 100 << 20)
    assert guess == MemoryEstimate(HOST_BASE + (150 << 20))
    given = """parameters { key: "memory_mb" value { string_value: "512" } }"""
    assert memory_estimate(loaded(SMALL + given), 1) == MemoryEstimate(512 << 20, 0, True)
    group = "instance_group { kind: KIND_GPU gpus: 0 }"
    on_gpu = memory_estimate(loaded(SMALL + given + group, gpus=(0,)), 2 << 20)
    assert on_gpu == MemoryEstimate(512 << 20, GPU_BASE + (3 << 20)), "only half of it was given"
    given += """parameters { key: "gpu_memory_mb" value { string_value: "1000" } }"""
    assert memory_estimate(loaded(SMALL + given + group, gpus=(0,)), 1) == MemoryEstimate(512 << 20, 1000 << 20, True)


def scaled(groups: str, cores: CoreSet | None = None, **given: str) -> tuple[list[str], ScalingPolicy | None]:
    """The instances at the start, and how they are scaled."""
    text = SMALL + groups
    for key, value in given.items():
        text += f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }} '
    config = loaded(text, gpus=(0, 1))
    return [spec.name for spec in compile_instances(config, cores)], compile_scaling(config, cores)


def test_scaling() -> None:
    assert scaled("instance_group { count: 2 kind: KIND_CPU }") == (["m_0_0", "m_0_1"], None)
    assert scaled("instance_group { count: 2 kind: KIND_CPU }", min_instances="2", max_instances="2") == (
        ["m_0_0", "m_0_1"],
        None,
    )
    names, policy = scaled("instance_group { count: 2 kind: KIND_CPU }", max_instances="3")
    assert policy is not None
    (group,) = policy.groups
    assert (names, group.group, group.least, group.most) == (["m_0_0", "m_0_1"], "m_0", 1, 3)
    assert [spec.name for spec in group.specs] == ["m_0_0", "m_0_1", "m_0_2"]
    assert (policy.up_ns, policy.down_ns) == (50_000_000, 30_000_000_000)
    names, policy = scaled(
        "instance_group { kind: KIND_CPU }",
        min_instances="2",
        max_instances="3",
        scale_up_queue_ms="2.5",
        scale_down_secs="0.1",
    )
    assert policy is not None
    assert (names, policy.up_ns, policy.down_ns) == (["m_0_0", "m_0_1"], 2_500_000, 100_000_000)


def test_traffic() -> None:
    text = """parameters { key: "traffic" value { string_value: "1=60, 2=40%" } }
    parameters { key: "aliases" value { string_value: "prod=1, next=2" } }
    parameters { key: "shadow" value { string_value: "3=5" } }"""
    assert compile_traffic(loaded(SMALL + text)) == Traffic({1: 60, 2: 40}, {"prod": 1, "next": 2}, {3: 5})


def test_each_group_and_device_is_scaled() -> None:
    groups = """instance_group [ { name: "a" count: 1 kind: KIND_CPU }, { name: "b" kind: KIND_GPU gpus: [ 0, 1 ] },
    { name: "c" count: 3 kind: KIND_CPU passive: true } ]"""
    names, policy = scaled(groups, CoreSet((0, 1, 2, 3), quota=3), max_instances="2")
    assert names == ["a_0", "b_0", "b_1", "c_0", "c_1", "c_2"]
    assert policy is not None
    found = [(group.group, group.specs[0].kind, group.specs[0].device, len(group.specs)) for group in policy.groups]
    assert found == [("a", "KIND_CPU", 0, 2), ("b", "KIND_GPU", 0, 2), ("b", "KIND_GPU", 1, 2)]
    assert (policy.cores, policy.quota) == (4, 3)


def test_ragged() -> None:
    text = 'input { name: "r" data_type: TYPE_INT8 dims: -1 allow_ragged_batch: true }'
    assert compile_policy(complete(parse(text), "m"), 1).inputs[0].ragged


CORRID = 'control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_%s } }'
START = 'control_input { name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", SequencePolicy(direct=True, slots=8, idle_ns=10**9)),
        (START, SequencePolicy(direct=True, slots=8, idle_ns=10**9)),
        (
            "direct { max_queue_delay_microseconds: 30 minimum_slot_utilization: 0.75 }"
            " max_sequence_idle_microseconds: 5",
            SequencePolicy(direct=True, slots=8, idle_ns=5_000, delay_ns=30_000, utilization=0.75),
        ),
        (
            "oldest { max_candidate_sequences: 4 preferred_batch_size: [ 4, 2, 4 ] preserve_ordering: true"
            " max_queue_delay_microseconds: 30 }" + START + CORRID % "STRING",
            SequencePolicy(
                direct=False,
                slots=4,
                idle_ns=10**9,
                batching=BatchPolicy((2, 4), delay_ns=30_000, preserve_ordering=True),
                id_control=IdControl("ID", "BYTES"),
            ),
        ),
        (
            "oldest { } iterative_sequence: true " + CORRID % "UINT32",
            SequencePolicy(
                direct=False,
                slots=1,
                idle_ns=10**9,
                batching=BatchPolicy((8,)),
                iterative=True,
                id_control=IdControl("ID", "UINT32"),
            ),
        ),
    ],
)
def test_sequences(text: str, expected: SequencePolicy) -> None:
    policy = compile_policy(complete(parse(f"{SMALL} sequence_batching {{ {text} }}"), "m"), 1)
    assert policy.sequence == expected
    assert policy.batching is None


def test_a_sequence_without_a_batch_dimension_has_one_slot() -> None:
    policy = compile_policy(complete(parse('backend: "identity" sequence_batching { direct { } }'), "m"), 1)
    assert policy.sequence == SequencePolicy(direct=True, slots=1, idle_ns=10**9)
    policy = compile_policy(complete(parse('backend: "identity" sequence_batching { oldest { } }'), "m"), 1)
    assert policy.sequence == SequencePolicy(direct=False, slots=1, idle_ns=10**9)


def test_decoupled_and_cached_models() -> None:
    plain = compile_policy(loaded(SMALL), 1)
    assert (plain.sequence, plain.decoupled, plain.cached) == (None, False, False)
    text = "model_transaction_policy { decoupled: %s } response_cache { enable: %s }"
    for decoupled, cached in (("true", "false"), ("false", "true")):
        policy = compile_policy(complete(parse(SMALL + text % (decoupled, cached)), "m"), 1)
        assert (policy.decoupled, policy.cached) == (decoupled == "true", cached == "true")


def test_resources_of_instances() -> None:
    text = """instance_group { count: 2 rate_limiter {
      resources { name: "R1" count: 4 } resources { name: "R2" global: true count: 2 } priority: 3 } }
    instance_group { rate_limiter { } } instance_group { }"""
    two, more, other, last = compile_instances(loaded(SMALL + text))
    assert two.resources == more.resources == (Resource("R1", 4), Resource("R2", 2, shared=True))
    assert (two.turn, more.turn) == (3, 3)
    assert [(spec.resources, spec.turn) for spec in (other, last)] == [((), 1)] * 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [InstanceSpec("m_0_0")]),
        ("instance_group { count: 2 }", [InstanceSpec("m_0_0"), InstanceSpec("m_0_1")]),
        (
            'instance_group { } instance_group { name: "spare" count: 2 kind: KIND_MODEL passive: true }',
            [
                InstanceSpec("m_0_0"),
                InstanceSpec("spare_0", "KIND_MODEL", passive=True),
                InstanceSpec("spare_1", "KIND_MODEL", passive=True),
            ],
        ),
        (
            'instance_group { name: "a" count: 2 } instance_group { name: "a" }',
            [InstanceSpec("a_0"), InstanceSpec("a_1"), InstanceSpec("a_2")],
        ),
    ],
)
def test_instances(text: str, expected: list[InstanceSpec]) -> None:
    assert list(compile_instances(loaded(SMALL + text))) == expected


def test_instances_on_gpus() -> None:
    text = SMALL + "instance_group { count: 2 gpus: [ 1, 0 ] }"
    found = compile_instances(loaded(text, gpus=(0, 1)))
    assert [(spec.name, spec.kind, spec.device) for spec in found] == [
        ("m_0_0", "KIND_GPU", 1),
        ("m_0_1", "KIND_GPU", 1),
        ("m_0_2", "KIND_GPU", 0),
        ("m_0_3", "KIND_GPU", 0),
    ]


def test_names_of_instances_are_unique_and_fit() -> None:
    groups = 'instance_group { count: 500 name: "%s" } instance_group { count: 500 } instance_group { }' % ("g" * 120)
    found = compile_instances(loaded(SMALL + groups, name="x" * 128))
    names = [spec.name for spec in found]
    assert len(names) == len(set(names)) == 1001
    assert max(map(len, names)) <= NAME_LENGTH
