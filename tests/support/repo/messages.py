"""A hypothesis strategy for messages of the schema."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from hypothesis import strategies as st

from shmserve.repo.config import protos

_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_STRING: st.text(st.characters(exclude_categories=["Cs"])),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
}


@st.composite
def messages(draw: st.DrawFn) -> Any:
    """A ModelConfig with any fields set."""
    message = protos.new_config()
    _fill(draw, message, 0)
    return message


def _fill(draw: st.DrawFn, message: Any, level: int) -> None:
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        message.SetInParent()
        return
    for field in draw(st.lists(st.sampled_from(fields), max_size=4, unique_by=lambda found: found.name)):
        target = getattr(message, field.name)
        if protos.is_map(field):
            entry = field.message_type.fields_by_name
            key = draw(_SCALARS[entry["key"].cpp_type])
            if entry["value"].message_type is not None:
                _fill(draw, target[key], level + 1)
            else:
                target[key] = draw(_SCALARS[entry["value"].cpp_type])
        elif field.message_type is not None:
            inner = target.add() if protos.is_repeated(field) else target
            if not protos.is_repeated(field):
                inner.SetInParent()
            if level < 4:
                _fill(draw, inner, level + 1)
        else:
            numbers = [value.number for value in field.enum_type.values] if field.enum_type is not None else []
            value = draw(st.sampled_from(numbers) if numbers else _SCALARS[field.cpp_type])
            if protos.is_repeated(field):
                target.append(value)
            else:
                setattr(message, field.name, value)
