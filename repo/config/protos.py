"""The protobuf side of model_config.proto: descriptors, an empty message, and the conversion to structs.

Invariant: no field names occur here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from shmserve.protobuf_pools import pool_of
from shmserve.repo.config.outline import escaped
from shmserve.repo.config.schema import ModelConfig

Field = Any
"""A field's descriptor. Its class depends on protobuf's version and implementation."""

PACKAGE = "inference"
POOL = pool_of(Path(__file__).with_name("model_config.binpb"))
CONFIG: Descriptor = POOL.FindMessageTypeByName(f"{PACKAGE}.ModelConfig")
_CONFIG_CLASS = message_factory.GetMessageClass(CONFIG)


def new_config() -> Message:
    return _CONFIG_CLASS()


def is_repeated(field: Field) -> bool:
    """True for lists and maps. protobuf 7 deprecates `label`, but protobuf 5 needs it."""
    known = getattr(field, "is_repeated", None)
    return bool(field.label == field.LABEL_REPEATED if known is None else known)


def is_map(field: Field) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def local_name(descriptor: Any) -> str:
    """The name without the package, e.g. `ModelSequenceBatching.Control`."""
    return str(descriptor.full_name).removeprefix(PACKAGE + ".")


def path_of(trail: Sequence[tuple[str, int]]) -> str:
    """A field's path from names and indices, as far as the schema defines them."""
    message: Any = CONFIG
    names = []
    for name, index in trail:
        field = message.fields_by_name.get(name) if message is not None else None
        message = field.message_type if field is not None else None
        listed = message is not None and is_repeated(field) and not is_map(field)
        names.append(f"{name}[{index}]" if listed else name)
    return escaped(".".join(names), 200)


def to_config(message: Message) -> ModelConfig:
    """Converts the message to structs. Raises msgspec.ValidationError for an unknown enum number."""
    return msgspec.convert(_plain(message), ModelConfig)


def _plain(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    fields: list[Field] = list(message.DESCRIPTOR.fields)
    for field in fields:
        value = getattr(message, field.name)
        if is_map(field):
            item = field.message_type.fields_by_name["value"]
            plain[field.name] = {key: _value(item, value[key]) for key in value}
        elif is_repeated(field):
            plain[field.name] = [_value(field, item) for item in value]
        elif not field.has_presence or message.HasField(field.name):
            plain[field.name] = _value(field, value)
    return plain


def _value(field: Field, value: Any) -> Any:
    if field.message_type is not None:
        return _plain(value)
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return named.name if named else str(value)
    return value
