"""The schema: .proto file, descriptor, structs and JSON are consistent; the origins of values, and a text with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import descriptor_pool, json_format, text_format
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace

from shmserve.repo.config import protos
from shmserve.repo.config.complete import TensorFacts, complete, complete_from_model
from shmserve.repo.config.origins import as_text, origins
from shmserve.repo.config.schema import ModelConfig, as_triton_json, decode_config, encode_config, from_triton_json
from shmserve.repo.config.support import TABLE
from shmserve.repo.load import parse
from tests.support.hypothesis_profiles import examples
from tests.support.repo.messages import messages
from tests.support.repo.texts import ALL, BACKENDS, SMALL

PROTO = (Path(protos.__file__).parent / "model_config.proto").read_text()


def descriptors() -> list[Any]:
    """Every message, including nested ones, except map entries."""
    found: list[Any] = list(protos.CONFIG.file.message_types_by_name.values())
    for message in found:
        found += message.nested_types
    return [message for message in found if not message.GetOptions().map_entry]


def test_descriptor_is_built_from_the_proto_file() -> None:
    enums = [
        *protos.CONFIG.file.enum_types_by_name.values(),
        *(e for message in descriptors() for e in message.enum_types),
    ]
    built = [(field.name, field.number) for message in descriptors() for field in message.fields]
    built += [(value.name, value.number) for enum in enums for value in enum.values]
    source = re.findall(r"^ *(?:[\w<>, .]+ )?(\w+) = (\d+);", PROTO, re.MULTILINE)
    assert sorted(built) == sorted((name, int(number)) for name, number in source)
    # The numbers of existing files.
    numbers = {
        field.full_name.rpartition("inference.")[2]: field.number for one in descriptors() for field in one.fields
    }
    known = {"ModelConfig.backend": 17, "ModelConfig.dynamic_batching": 11, "ModelConfig.runtime": 25}
    known |= {"ModelInstanceGroup.kind": 4, "ModelInput.dims": 4, "ModelOutput.dims": 3}
    assert known.items() <= numbers.items()
    assert ("TYPE_BF16", 14) in built
    assert protos.CONFIG.file.pool is not descriptor_pool.Default(), "others define an inference.ModelConfig in it"


def test_sample_texts_set_every_field() -> None:
    """This ensures that the comparisons below cover the whole schema."""
    given: set[str] = set()

    def walk(message: Any) -> None:
        for field, value in message.ListFields():
            given.add(field.full_name)
            if field.message_type is None:
                continue
            if protos.is_map(field):
                if field.message_type.fields_by_name["value"].message_type is not None:
                    for item in value.values():
                        walk(item)
            elif protos.is_repeated(field):
                for item in value:
                    walk(item)
            else:
                walk(value)

    for text in ALL:
        walk(text_format.Parse(text, protos.new_config(), descriptor_pool=protos.POOL))
    wanted = {
        field.full_name
        for message in descriptors()
        for field in message.fields
        # A field whose only value is its default cannot be seen.
        if field.enum_type is None or len(field.enum_type.values) > 1
    }
    assert given == wanted


@pytest.mark.parametrize("text", ["", *ALL])
def test_json_is_that_of_protobuf(text: str) -> None:
    message = text_format.Parse(text, protos.new_config(), descriptor_pool=protos.POOL)
    wanted = json_format.MessageToDict(
        message,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
        descriptor_pool=protos.POOL,
    )
    config = parse(text)
    found = as_triton_json(config)
    assert_same(found, wanted)
    assert from_triton_json(wanted) == config
    assert decode_config(encode_config(config)) == config
    assert from_triton_json(json.loads(json.dumps(found))) == config


def assert_same(found: Any, wanted: Any) -> None:
    """Equal, in the same order; a number may be a string in protobuf's form."""
    if isinstance(wanted, dict):
        assert sorted(found) == sorted(wanted)
        for key, item in wanted.items():
            assert_same(found[key], item)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for mine, item in zip(found, wanted, strict=True):
            assert_same(mine, item)
    elif isinstance(found, int) and isinstance(wanted, str):
        assert str(found) == wanted
    else:
        assert found == wanted
        assert type(found) is type(wanted) or isinstance(found, float)


def test_invalid_data_is_not_decoded() -> None:
    for plain, text in (
        ({"max_batch": 16}, "unknown field `max_batch`"),
        ({"input": [{"data_type": "TYPE_FP23"}]}, "data_type"),
    ):
        with pytest.raises(msgspec.ValidationError, match=text):
            from_triton_json(plain)
    for data in (b"", b"{", b"[]", b'{"name": 5}', b'{"nam": ""}'):
        with pytest.raises(msgspec.DecodeError):
            decode_config(data)


def test_every_field_has_its_row_in_the_table_of_support() -> None:
    assert set(TABLE) == {f"{protos.local_name(one)}.{field.name}" for one in descriptors() for field in one.fields}


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
