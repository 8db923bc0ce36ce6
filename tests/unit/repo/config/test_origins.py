"""The origins of the values of a configuration, and its text with them, which is a valid config.pbtxt."""

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
from shmserve.repo.config.schema import ModelConfig, as_triton_json
from shmserve.repo.load import parse
from tests.support.hypothesis_profiles import examples
from tests.support.repo.messages import messages
from tests.support.repo.texts import ALL, BACKENDS, SMALL

QUICK = settings(max_examples=examples(50), suppress_health_check=list(HealthCheck))
FACTS = [TensorFacts("x", "FP32", (-1, 3))], [TensorFacts("y", "FP32", (-1,))]


def completed(text: str) -> tuple[ModelConfig, ModelConfig]:
    given = parse(text)
    return given, complete(given, "m", (), BACKENDS, ())


def leaves(value: Any, path: str = "") -> set[str]:
    """The paths of all values, found without the schema."""
    if isinstance(value, dict) and value:
        return set().union(*(leaves(item, f"{path}.{key}" if path else key) for key, item in value.items()))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return set().union(*(leaves(item, f"{path}[{index}]") for index, item in enumerate(value)))
    return {path}


def unquoted(path: str) -> str:
    return path.replace('["', ".").replace('"]', "")


@pytest.mark.parametrize("text", [SMALL, *ALL], ids=["small", "dynamic", "direct", "oldest", "ensemble"])
def test_every_shown_value_has_an_origin_and_a_line(text: str) -> None:
    given, final = completed(text)
    found = origins(given, final, final, "file")
    assert {unquoted(path).replace("policy[3]", "policy.3") for path in found} == leaves(as_triton_json(final))
    assert set(found.values()) == {"file", "default"}
    assert shown(parse(as_text(final, found))) == shown(final)


def test_origins_file_default_and_model() -> None:
    text = 'backend: "onnxruntime" output { name: "y" data_type: TYPE_FP32 dims: 1 label_filename: "l" }'
    text += 'parameters { key: "k" value { string_value: "v" } } instance_group { kind: KIND_AUTO count: 3 }'
    given, filled = completed(text)
    final = complete_from_model(filled, *FACTS)
    found = origins(given, final, filled, "file")
    expected = {
        "default": "name platform instance_group[0].kind version_policy.latest.num_versions model_warmup",
        "file": 'backend output[0].dims output[0].label_filename parameters["k"].string_value instance_group[0].count',
        "model": "max_batch_size input[0].name input[0].dims dynamic_batching.preferred_batch_size",
    }
    for origin, paths in expected.items():
        assert {path: found[path] for path in paths.split()} == dict.fromkeys(paths.split(), origin)
    assert origins(given, final, filled, "override")["backend"] == "override"
    given, final = completed(SMALL + "version_policy { latest { num_versions: 0 } } instance_group { gpus: 3 }")
    found = origins(given, replace(final, max_batch_size=9), final, "file")
    changed = ("version_policy.latest.num_versions", "instance_group[0].gpus", "max_batch_size")
    assert [found[path] for path in changed] == ["default", "default", "model"], "a changed value is not the file's"


@QUICK
@given(messages())
def test_the_text_of_any_configuration_is_equivalent(message: Any) -> None:
    try:
        config = protos.to_config(message)
    except msgspec.ValidationError:
        return
    for given_config in (config, ModelConfig()):
        written = as_text(config, origins(given_config, config, config, "file"))
        assert written.replace("\n", "").isprintable()
        assert shown(parse(written)) == shown(config)


def shown(config: ModelConfig) -> str:
    """The configuration with sorted maps, because their order varies, and without the sign of zero, which is not
    written."""
    return re.sub(r"-0\.0(?![0-9])", "0.0", json.dumps(msgspec.to_builtins(config), sort_keys=True))
