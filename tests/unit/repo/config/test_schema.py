"""The schema: .proto file, descriptor, structs and JSON are consistent."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import descriptor_pool, json_format, text_format

from shmserve.repo.config import protos
from shmserve.repo.config.schema import as_triton_json, decode_config, encode_config, from_triton_json
from shmserve.repo.config.support import TABLE
from shmserve.repo.load import parse
from tests.support.repo.texts import ALL

PROTO = (Path(protos.__file__).parent / "model_config.proto").read_text()


def proto_source() -> dict[str, dict[str, int]]:
    """message or enum -> name -> number, parsed from the .proto file."""
    found: dict[str, dict[str, int]] = {}
    stack: list[tuple[str, str]] = []
    for line in PROTO.splitlines():
        code = line.split("//")[0].strip()
        opened = re.match(r"(message|enum|oneof) (\w+) \{(\})?$", code)
        member = re.match(r"(?:[\w<>, .]+ )?(\w+) = (\d+);$", code)
        if opened:
            kind, name, closed = opened.groups()
            stack.append((kind, name))
            if kind != "oneof":
                found[".".join(part for outer, part in stack if outer != "oneof")] = {}
            if closed:
                stack.pop()
        elif code == "}":
            stack.pop()
        elif member and stack:
            path = ".".join(part for outer, part in stack if outer != "oneof")
            found[path][member.group(1)] = int(member.group(2))
    return found


def descriptors() -> list[Any]:
    """Every message, including nested ones, except map entries."""
    found: list[Any] = list(protos.CONFIG.file.message_types_by_name.values())
    for message in found:
        found += message.nested_types
    return [message for message in found if not message.GetOptions().map_entry]


def test_descriptor_is_built_from_the_proto_file() -> None:
    enums = {e.full_name: e for message in descriptors() for e in message.enum_types}
    enums |= {e.full_name: e for e in protos.CONFIG.file.enum_types_by_name.values()}
    built = {protos.local_name(message): {f.name: f.number for f in message.fields} for message in descriptors()}
    built |= {protos.local_name(enum): {v.name: v.number for v in enum.values} for enum in enums.values()}
    source = proto_source()
    assert built == source
    # The numbers of existing files.
    assert [source["ModelConfig"][name] for name in ("backend", "dynamic_batching", "runtime")] == [17, 11, 25]
    assert (source["ModelInstanceGroup"]["kind"], source["DataType"]["TYPE_BF16"]) == (4, 14)
    assert (source["ModelInput"]["dims"], source["ModelOutput"]["dims"]) == (4, 3)
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
