"""Classes with fields as inputs and outputs of a function: dataclasses, TypedDict, NamedTuple, and the models of
pydantic and msgspec."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import Any, NamedTuple

import msgspec


class RecordField(NamedTuple):
    hint: Any
    required: bool


def fields_of(hint: Any) -> dict[str, RecordField] | None:
    """Returns the fields of a record; None if the hint is not such a class. Raises NameError and others if the hints of
    its fields cannot be read."""
    if not inspect.isclass(hint) or typing.get_args(hint):  # Python 3.10 takes list[int] for a class
        return None
    required = _required(hint)
    if required is None:
        return None
    hints = typing.get_type_hints(hint, include_extras=True)
    return {name: RecordField(_bare(hints[name]), needed) for name, needed in required.items() if name in hints}


def build(kind: Any, values: dict[str, Any]) -> Any:
    """An object with these fields. Raises what the class raises."""
    if not is_pydantic(kind):
        return kind(**values)
    fields = kind.model_fields
    return kind.model_validate({fields[name].alias or name: value for name, value in values.items()})


def is_pydantic(kind: Any) -> bool:
    return hasattr(kind, "model_fields") and hasattr(kind, "model_validate")


def _required(hint: Any) -> dict[str, bool] | None:
    """Field -> whether it has no default."""
    if is_pydantic(hint):
        return {name: field.is_required() for name, field in hint.model_fields.items()}
    if dataclasses.is_dataclass(hint):
        missing = dataclasses.MISSING
        return {
            field.name: field.default is missing and field.default_factory is missing
            for field in dataclasses.fields(hint)
            if field.init
        }
    if typing.is_typeddict(hint):
        return {name: name in hint.__required_keys__ for name in hint.__annotations__}
    if issubclass(hint, msgspec.Struct):
        return {field.name: field.required for field in msgspec.structs.fields(hint)}
    if issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return {name: name not in hint._field_defaults for name in hint._fields}
    return None


def _bare(hint: Any) -> Any:
    """Without Required and NotRequired of a TypedDict."""
    return typing.get_args(hint)[0] if "Required" in str(typing.get_origin(hint)) else hint
