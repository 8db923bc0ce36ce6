"""Where the values of a configuration come from, and its text, which says so and can be pasted into a file."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace

from shmserve.repo.config import protos
from shmserve.repo.config.complete import TensorFacts, complete, complete_from_model
from shmserve.repo.config.origins import as_text, origins
from shmserve.repo.config.schema import ModelConfig, ModelDynamicBatching, as_triton_json
from shmserve.repo.load import parse
from shmserve.repo.rules.completed import surprises
from tests.support.hypothesis_profiles import examples
from tests.support.repo.messages import messages
from tests.support.repo.texts import ALL, BACKENDS, SMALL

QUICK = settings(max_examples=examples(120), suppress_health_check=list(HealthCheck))
FACTS = [TensorFacts("x", "FP32", (-1, 3))], [TensorFacts("y", "FP32", (-1,))]


def completed(text: str) -> tuple[ModelConfig, ModelConfig]:
    given = parse(text)
    return given, complete(given, "m", (), BACKENDS, ())


def leaves(value: Any, path: str = "") -> set[str]:
    """The paths of a plain configuration, found without a schema; keys of maps are written in quotes."""
    if isinstance(value, dict) and value:
        return set().union(*(leaves(item, f"{path}.{key}" if path else key) for key, item in value.items()))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return set().union(*(leaves(item, f"{path}[{index}]") for index, item in enumerate(value)))
    return {path}


def unquoted(path: str) -> str:
    return path.replace('["', ".").replace('"]', "")


@pytest.mark.parametrize("text", [SMALL, *ALL], ids=["small", "dynamic", "direct", "oldest", "ensemble"])
def test_every_leaf_that_is_shown_has_an_origin(text: str) -> None:
    given, final = completed(text)
    found = origins(given, final, final, "file")
    assert {unquoted(path).replace("policy[3]", "policy.3") for path in found} == leaves(as_triton_json(final))
    assert set(found.values()) == {"file", "default"}


def test_file_default_and_model() -> None:
    text = 'backend: "onnxruntime" output { name: "y" data_type: TYPE_FP32 dims: 1 label_filename: "l" }'
    text += 'parameters { key: "k" value { string_value: "v" } } instance_group { kind: KIND_AUTO count: 3 }'
    given, filled = completed(text)
    final = complete_from_model(filled, *FACTS)
    found = origins(given, final, filled, "file")
    wanted = {
        "name": "default",
        "backend": "file",
        "platform": "default",
        "max_batch_size": "model",
        "input[0].name": "model",
        "input[0].dims": "model",
        "output[0].dims": "file",
        "output[0].label_filename": "file",
        'parameters["k"].string_value': "file",
        "instance_group[0].count": "file",
        "instance_group[0].kind": "default",
        "version_policy.latest.num_versions": "default",
        "dynamic_batching.preferred_batch_size": "model",
        "model_warmup": "default",
    }
    assert {path: found[path] for path in wanted} == wanted
    assert origins(given, final, filled, "override")["backend"] == "override"


def test_a_message_of_one_field_says_it_by_being_there() -> None:
    text = SMALL + "optimization { input_pinned_memory { } } version_policy { all { } } response_cache { }"
    given, final = completed(text + " dynamic_batching { }")
    found = origins(given, final, final, "file")
    assert found["optimization.input_pinned_memory.enable"] == "file"
    assert found["optimization.output_pinned_memory.enable"] == "default"
    assert found["version_policy.all"] == "file"
    assert found["response_cache.enable"] == "file"
    assert found["dynamic_batching.max_queue_delay_microseconds"] == "default"
    text = as_text(final, found)
    assert "all { }  # file\n" in text
    assert "    enable: false  # file\n" in text
    assert "max_queue_delay" not in text


def test_what_a_value_was_changed_to_is_not_the_files() -> None:
    given, final = completed(SMALL + "version_policy { latest { num_versions: 0 } } instance_group { gpus: 3 }")
    found = origins(given, final, final, "file")
    assert found["version_policy.latest.num_versions"] == "default"
    assert found["instance_group[0].gpus"] == "default"
    assert origins(given, replace(final, max_batch_size=9), final, "file")["max_batch_size"] == "model"


# ---------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("text", [SMALL, *ALL])
def test_the_text_is_the_same_configuration(text: str) -> None:
    given, final = completed(text)
    written = as_text(final, origins(given, final, final, "file"))
    assert shown(parse(written)) == shown(final)


@QUICK
@given(messages())
def test_the_text_of_any_configuration_is_the_same_configuration(message: Any) -> None:
    try:
        config = protos.to_config(message)
    except msgspec.ValidationError:
        return
    for said in (config, ModelConfig()):
        written = as_text(config, origins(said, config, config, "file"))
        assert shown(parse(written)) == shown(config)


def shown(config: ModelConfig) -> str:
    """Maps have no order: it varies with the process. The sign of a zero is not written, and means nothing."""
    return re.sub(r"-0\.0(?![0-9])", "0.0", json.dumps(msgspec.to_builtins(config), sort_keys=True))


def test_the_text_of_a_completed_model() -> None:
    given, filled = completed('backend: "onnxruntime" max_batch_size: 2')
    final = complete_from_model(filled, *FACTS)
    assert as_text(final, origins(given, final, filled, "file")) == (
        'name: "m"  # default\n'
        'platform: "onnxruntime_onnx"  # default\n'
        'backend: "onnxruntime"  # file\n'
        "version_policy {\n"
        "  latest {\n"
        "    num_versions: 1  # default\n"
        "  }\n"
        "}\n"
        "max_batch_size: 2  # file\n"
        "input {\n"
        '  name: "x"  # model\n'
        "  data_type: TYPE_FP32  # model\n"
        "  dims: [ 3 ]  # model\n"
        "}\n"
        "output {\n"
        '  name: "y"  # model\n'
        "  data_type: TYPE_FP32  # model\n"
        "  dims: [ 1 ]  # model\n"
        "  reshape { }  # model\n"
        "}\n"
        "optimization {\n"
        "  input_pinned_memory {\n"
        "    enable: true  # default\n"
        "  }\n"
        "  output_pinned_memory {\n"
        "    enable: true  # default\n"
        "  }\n"
        "}\n"
        "dynamic_batching {\n"
        "  preferred_batch_size: [ 2 ]  # model\n"
        "}\n"
        "instance_group {\n"
        '  name: "m_0"  # default\n'
        "  kind: KIND_CPU  # default\n"
        "  count: 2  # default\n"
        "}\n"
        'default_model_filename: "model.onnx"  # default\n'
    )


def test_what_a_terminal_would_obey_is_escaped() -> None:
    config = parse(
        SMALL + 'metric_tags { key: "\\033[31m" value: "\\302\\233" } metric_tags { key: "\u00fc" value: "" }'
    )
    text = as_text(config, {})
    assert text.replace("\n", "").isprintable()
    assert parse(text) == config


def test_numbers_are_written_short() -> None:
    config = parse("sequence_batching { direct { minimum_slot_utilization: 0.1 } }")
    assert "minimum_slot_utilization: 0.1  # file\n" in as_text(config, origins(config, config, config, "file"))


# ----------------------------------------------------------------------------------------------------- surprises


def test_a_batch_size_that_nobody_gave_is_told() -> None:
    given, filled = completed('backend: "onnxruntime"')
    (text,) = surprises(given, complete_from_model(filled, *FACTS))
    assert "it is set to 4, and requests are batched dynamically" in text
    assert "max_batch_size in config.pbtxt" in text
    assert "--backend-config=onnxruntime,default-max-batch-size=N" in text
    (text,) = surprises(given, complete_from_model(filled, *FACTS, default_max_batch=1))
    assert "it is set to 1. To change it" in text


def test_what_was_given_is_no_surprise() -> None:
    given, filled = completed('backend: "onnxruntime" max_batch_size: 8')
    assert surprises(given, complete_from_model(filled, *FACTS)) == []
    given, filled = completed('backend: "onnxruntime"')
    assert surprises(given, complete_from_model(filled, *FACTS, can_batch=False)) == []
    given, filled = completed('backend: "python"')
    assert surprises(given, replace(filled, max_batch_size=8, dynamic_batching=ModelDynamicBatching())) == []
