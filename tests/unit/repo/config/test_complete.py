"""Default values, and configurations that a model completes."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.repo.config.complete import TensorFacts, complete, complete_from_model, needs_completion
from shmserve.repo.config.problems import ConfigError
from shmserve.repo.config.schema import ModelConfig, ModelDynamicBatching, ModelInput, ModelOutput, ModelTensorReshape
from shmserve.repo.gpus import GpuNumbers
from shmserve.repo.load import ModelContext, examine, parse
from shmserve.repo.rules.fields import verify_completed
from tests.support.cases import cases
from tests.support.hypothesis_profiles import examples
from tests.support.repo.texts import BACKENDS, SMALL

ONNX = complete(ModelConfig(backend="onnxruntime"), "m")


def facts(name: str, *dims: int, dtype: str = "FP32") -> TensorFacts:
    return TensorFacts(name, dtype, dims)


TREES = 'backend: "fil" parameters {{ key: "model_type" value: {{ string_value: "{}" }} }}'


@cases(
    ('backend: "onnxruntime"', "m", (), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
    ('platform: "onnxruntime_onnx"', "m", (), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
    ('platform: "tensorrt_plan"', "m", (), "tensorrt", "tensorrt_plan", "model.plan"),
    ('platform: "pytorch_libtorch"', "m", (), "pytorch", "pytorch_libtorch", "model.pt"),
    ('platform: "torch_aoti"', "m", (), "pytorch", "torch_aoti", "model.pt2"),
    ('backend: "pytorch"', "m", (), "pytorch", "pytorch_libtorch", "model.pt"),
    ('backend: "pytorch"', "m", ("model.pt2",), "pytorch", "torch_aoti", "model.pt2"),
    ('platform: "tensorflow_savedmodel"', "m", (), "tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
    ('backend: "python"', "m", (), "python", "", "model.py"),
    ('backend: "identity"', "m", (), "identity", "", ""),
    ('backend: "nosuch"', "m", ("model.onnx",), "nosuch", "", ""),
    ("", "m", ("model.onnx",), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
    ("", "m", ("readme", "model.py"), "python", "", "model.py"),
    ("", "m", ("model.xml", "model.bin"), "openvino", "", "model.xml"),
    ("", "m", ("xgboost.json",), "fil", "", "xgboost.json"),
    ('backend: "fil"', "m", ("model.txt",), "fil", "", "model.txt"),
    (TREES.format("lightgbm"), "m", ("xgboost.json",), "fil", "", "model.txt"),
    (TREES.format("sklearn"), "m", (), "fil", "", "model.joblib"),
    (TREES.format("nosuch"), "m", ("checkpoint.tl",), "fil", "", "checkpoint.tl"),
    (TREES.format("lightgbm") + ' default_model_filename: "a"', "m", (), "fil", "", "a"),
    ("", "m", ("model.json", "model.pdiparams"), "paddle", "", "model.json"),
    ('backend: "paddle"', "m", (), "paddle", "", "model.pdmodel"),
    ("", "m.identity", (), "identity", "", ""),
    ("", "m.python", ("other",), "python", "", "model.py"),
    ("", "m.onnx", (), "", "", ""),
    ("", "m", (), "", "", ""),
    ('platform: "nosuch"', "m", ("model.onnx",), "", "nosuch", ""),
    ('backend: "onnxruntime" default_model_filename: "a.onnx"', "m", (), "onnxruntime", "onnxruntime_onnx", "a.onnx"),
)
def test_backend_platform_and_model_file(
    text: str, name: str, files: tuple[str, ...], backend: str, platform: str, file: str
) -> None:
    config = complete(parse(text), name, files, BACKENDS)
    assert (config.backend, config.platform, config.default_model_filename) == (backend, platform, file)


PREFERRED = "dynamic_batching.preferred_batch_size"


@cases(
    ("", "name", "m"),
    ('name: "other"', "name", "other"),
    ("", "version_policy.latest.num_versions", 1),
    ("version_policy { }", "version_policy.latest.num_versions", 1),
    ("version_policy { latest { } }", "version_policy.latest.num_versions", 1),
    ("version_policy { latest { num_versions: 3 } }", "version_policy.latest.num_versions", 3),
    ("version_policy { all { } }", "version_policy", parse("version_policy { all { } }").version_policy),
    ("max_batch_size: 8", "dynamic_batching", None),
    ("max_batch_size: 8 dynamic_batching { }", PREFERRED, (8,)),
    ("max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 2, 4 ] }", PREFERRED, (2, 4)),
    ("dynamic_batching { }", PREFERRED, ()),
    ("sequence_batching { }", "sequence_batching.max_sequence_idle_microseconds", 1_000_000),
    ("", "optimization.input_pinned_memory.enable", True),
    ("optimization { input_pinned_memory { } }", "optimization.input_pinned_memory.enable", False),
    ("optimization { eager_batching: true }", "optimization.eager_batching", True),
    ('platform: "ensemble"', "instance_group", ()),
    ('platform: "ensemble"', "optimization", None),
    ('platform: "ensemble"', "backend", ""),
)
def test_defaults(text: str, field: str, expected: object) -> None:
    assert attrgetter(field)(complete(parse(text), "m", ("model.onnx",))) == expected


NO_ONNX = GpuNumbers((0, 1), ("onnxruntime",))
"""Two GPUs that onnxruntime does not support."""


@cases(
    ('"python"', (), [("m_0", "KIND_CPU", 1, ())]),
    ('"onnxruntime"', (), [("m_0", "KIND_CPU", 2, ())]),
    ('"onnxruntime" instance_group { count: 1 }', (), [("m_0", "KIND_CPU", 1, ())]),
    ('"onnxruntime" instance_group { kind: KIND_MODEL }', (), [("m_0", "KIND_MODEL", 1, ())]),
    ('"python" instance_group { gpus: 0 }', (), [("m_0", "KIND_CPU", 1, ())]),
    ('"python"', (0, 1), [("m_0", "KIND_GPU", 1, (0, 1))]),
    ('"python" instance_group { gpus: 1 count: 2 }', (0, 1), [("m_0", "KIND_GPU", 2, (1,))]),
    ('"python" instance_group { gpus: 7 }', (0, 1), [("m_0", "KIND_CPU", 1, ())]),
    ('"onnxruntime"', NO_ONNX, [("m_0", "KIND_CPU", 2, ())]),
    ('"python"', NO_ONNX, [("m_0", "KIND_GPU", 1, (0, 1))]),
    # It is kept, and loading fails with the reason.
    ('"onnxruntime" instance_group { kind: KIND_GPU }', NO_ONNX, [("m_0", "KIND_GPU", 1, (0, 1))]),
    (
        '"python" instance_group { count: 3 } instance_group { name: "big" } instance_group { }',
        (),
        [("m_0", "KIND_CPU", 3, ()), ("big", "KIND_CPU", 1, ()), ("m_2", "KIND_CPU", 1, ())],
    ),
)
def test_instance_groups(text: str, gpus: tuple[int, ...], wanted: list[Any]) -> None:
    config = complete(parse(f"backend: {text}"), "m", (), BACKENDS, gpus)
    assert [(group.name, group.kind, group.count, group.gpus) for group in config.instance_group] == wanted
    long = examine(SMALL, "config.pbtxt", ModelContext("x" * 128, BACKENDS)).require()
    assert long.instance_group[0].name == "x" * 112 + "_0"


def test_a_model_that_can_batch() -> None:
    inputs, outputs = [facts("x", -1, 3, 244, 244)], [facts("y", -1, -1, dtype="BYTES"), facts("z", -1)]
    config = complete_from_model(ONNX, inputs, outputs)
    assert (config.max_batch_size, config.dynamic_batching) == (4, ModelDynamicBatching((4,)))
    tensors: list[ModelInput | ModelOutput] = [*config.input, *config.output]
    assert [(t.name, t.data_type, t.dims, t.reshape) for t in tensors] == [
        ("x", "TYPE_FP32", (3, 244, 244), None),
        ("y", "TYPE_STRING", (-1,), None),
        ("z", "TYPE_FP32", (1,), ModelTensorReshape()),
    ]
    verify_completed(config, backends=BACKENDS)
    assert complete_from_model(ONNX, inputs, outputs, default_max_batch=32).max_batch_size == 32
    for options in ({"default_max_batch": 0}, {"can_batch": False}):
        config = complete_from_model(ONNX, inputs, outputs, **options)
        assert (config.max_batch_size, config.dynamic_batching) == (0, None)
        assert config.input[0].dims == (-1, 3, 244, 244)
    with pytest.raises(Unsupported, match=r"tensor 'x' has the data type COMPLEX64"):
        complete_from_model(ONNX, [facts("x", -1, dtype="COMPLEX64")], [])


@cases(
    ("max_batch_size: 16", 16, ModelDynamicBatching((16,))),
    ("max_batch_size: 1", 1, None),
    ("max_batch_size: 1 dynamic_batching { }", 1, ModelDynamicBatching((1,))),
    ("dynamic_batching { max_queue_delay_microseconds: 5 }", 4, ModelDynamicBatching((4,), 5)),
    ("sequence_batching { }", 4, None),
)
def test_given_sizes_and_schedulers_are_kept(text: str, size: int, batching: ModelDynamicBatching | None) -> None:
    given = complete(parse('backend: "onnxruntime"' + text), "m")
    config = complete_from_model(given, [facts("x", -1, 3)], [facts("y", -1, 3)])
    assert (config.max_batch_size, config.dynamic_batching) == (size, batching)


@cases(
    ([facts("x", 1, 3)], [facts("y", -1, 3)], "first dimension of tensor 'x' is 1"),
    ([facts("x", -1, 3)], [facts("y", 3)], "first dimension of tensor 'y' is 3"),
    ([facts("x", -1, 3), facts("z")], [facts("y", -1, 3)], "first dimension of tensor 'z' does not exist"),
)
def test_a_model_that_cannot_batch(inputs: list[TensorFacts], outputs: list[TensorFacts], first: str) -> None:
    config = complete_from_model(ONNX, inputs, outputs)
    assert config.max_batch_size == 0
    assert config.dynamic_batching is None
    assert [tensor.dims for tensor in config.input] == [tensor.dims or (1,) for tensor in inputs]
    assert [tensor.dims for tensor in config.output] == [tensor.dims for tensor in outputs]
    given = complete(parse('backend: "onnxruntime" max_batch_size: 8'), "m")
    with pytest.raises(InvalidRequest, match="model does not support batching while non-zero max_batch_size") as caught:
        complete_from_model(given, inputs, outputs)
    assert "Set max_batch_size: 0 (it is 8)" in str(caught.value)
    assert first in str(caught.value)


def test_only_missing_tensors_are_completed() -> None:
    text = 'backend: "onnxruntime" max_batch_size: 2 input { name: "x" data_type: TYPE_FP32 dims: 7 }'
    given = complete(parse(text), "m")
    config = complete_from_model(given, [facts("x", -1, 3)], [facts("y", -1, 5)])
    assert config.input == given.input
    assert config.output[0].dims == (5,)
    both = complete(parse(text + 'output { name: "y" data_type: TYPE_FP32 dims: 5 }'), "m")
    assert complete_from_model(both, [facts("x", 1)], [facts("y", 1)]) == both


def test_settings_that_a_model_adds_get_defaults() -> None:
    given = examine('backend: "python"', "config.pbtxt", ModelContext("m", BACKENDS)).require()
    added = replace(given, max_batch_size=6, dynamic_batching=ModelDynamicBatching())
    config = verify_completed(added, backends=BACKENDS)
    assert config.dynamic_batching == ModelDynamicBatching(preferred_batch_size=(6,))
    assert verify_completed(config, backends=BACKENDS) == config
    with pytest.raises(ConfigError, match="m, as completed by the model: max_batch_size: found -1"):
        verify_completed(replace(given, max_batch_size=-1), backends=BACKENDS)


@settings(max_examples=examples(50))
@given(st.lists(st.lists(st.integers(1, 9) | st.just(-1), max_size=5), min_size=2, max_size=5), st.integers(0, 9))
def test_a_completed_configuration_is_valid_and_complete(shapes: list[list[int]], max_batch: int) -> None:
    tensors = [facts(f"t{index}", *shape) for index, shape in enumerate(shapes)]
    given_config = complete(ModelConfig(backend="onnxruntime", max_batch_size=max_batch), "m")
    try:
        config = complete_from_model(given_config, tensors[:1], tensors[1:])
    except InvalidRequest:
        assert max_batch
        assert not all(shape and shape[0] == -1 for shape in shapes)
        return
    skip = 1 if config.max_batch_size else 0
    dims = [tensor.dims for tensor in config.input] + [tensor.dims for tensor in config.output]
    assert dims == [tuple(shape[skip:]) or (1,) for shape in shapes]
    assert complete_from_model(config, [], []) == config
    verify_completed(config, backends=BACKENDS)


def test_models_that_complete_their_configuration() -> None:
    known = ('"onnxruntime"', '"onnxruntime" input { name: "x" }', '"python"', '"openvino"', '"linear"')
    for text in (*known, '"pytorch" default_model_filename: "model.pt2"'):
        assert needs_completion(complete(parse(f"backend: {text}"), "m"))
    for text in ('"onnxruntime" input { } output { }', '"identity"', '"pytorch"'):
        assert not needs_completion(complete(parse(f"backend: {text}"), "m"))
