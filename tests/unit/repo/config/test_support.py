"""The support table has every field of the schema, and docs/repository.md has the table."""

from __future__ import annotations

from typing import Any

from shmserve.repo.config import protos
from shmserve.repo.config.support import TABLE, Status
from tests import ROOT

PAGE = (ROOT / "docs" / "repository.md").read_text()


def schema_fields() -> set[str]:
    found: set[str] = set()
    todo: list[Any] = list(protos.CONFIG.file.message_types_by_name.values())
    while todo:
        message = todo.pop()
        if message.GetOptions().map_entry:
            continue
        todo += message.nested_types
        found |= {f"{protos.local_name(message)}.{field.name}" for field in message.fields}
    return found


def test_every_field_has_its_row() -> None:
    assert set(TABLE) == schema_fields()


def test_the_page_has_the_table() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith(("| `Model", "| `Batch"))]
    assert len(rows) == len(TABLE)


def test_honoured_fields_are_in_honoured_messages() -> None:
    """A message that several fields share must be honoured in one of them."""
    honoured_below: dict[str, set[str]] = {}
    for name in schema_fields():
        message, _, field = name.rpartition(".")
        descriptor: Any = protos.POOL.FindMessageTypeByName(f"{protos.PACKAGE}.{message}").fields_by_name[field]
        inner = descriptor.message_type
        if inner is not None and protos.is_map(descriptor):
            inner = inner.fields_by_name["value"].message_type
        if inner is not None and TABLE[name].status is Status.HONOURED:
            honoured_below.setdefault(protos.local_name(inner), set()).add(name)
    for name, support in TABLE.items():
        message = name.rpartition(".")[0]
        if support.status is Status.HONOURED and message != "ModelConfig":
            assert honoured_below.get(message), name
