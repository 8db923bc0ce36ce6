"""Edits of config.pbtxt that leave everything else unchanged."""

from __future__ import annotations

from shmserve.repo.config.edit import Edit, edited
from shmserve.repo.load import parse
from tests.support.cases import cases

COUNT = ("instance_group", "count")
PREFERRED = ("dynamic_batching", "preferred_batch_size")
DELAY = ("dynamic_batching", "max_queue_delay_microseconds")


@cases(
    ("instance_group [ { count: 1 } ]", Edit(COUNT, "3"), "instance_group [ { count: 3 } ]"),
    ("instance_group { kind: KIND_CPU }\n", Edit(COUNT, "3"), "instance_group { kind: KIND_CPU count: 3 }\n"),
    ("instance_group [ ]\n", Edit(COUNT, "3"), "instance_group [ { count: 3 } ]\n"),
    ("instance_group [ { count: 1 } ]\ninstance_group { }\n", Edit(COUNT, "3", 1),
     "instance_group [ { count: 1 } ]\ninstance_group { count: 3 }\n"),
    ("# c", Edit(COUNT, "3"), "# c\ninstance_group [ { count: 3 } ]\n"),
    ("max_batch_size:4 # four", Edit(("max_batch_size",), "8"), "max_batch_size: 8 # four"),
    ("", Edit(("dynamic_batching",), "{ }"), "dynamic_batching { }\n"),
    ("dynamic_batching: {}", Edit(PREFERRED, "[ 8 ]"), "dynamic_batching: { preferred_batch_size: [ 8 ] }"),
    ("dynamic_batching {\n    # why\n    preferred_batch_size: 4, # a\n    preferred_batch_size: 8\n}\n",
     Edit(PREFERRED, "[ 16 ]"), "dynamic_batching {\n    # why\n    preferred_batch_size: [ 16 ], # a\n}\n"),
    ("dynamic_batching {\n    preserve_ordering: true  # needed\n}\n", Edit(DELAY, "500"),
     "dynamic_batching {\n    preserve_ordering: true  # needed\n    max_queue_delay_microseconds: 500\n}\n"),
    ("dynamic_batching {\n  max_queue_delay_microseconds: 500;\n  preserve_ordering: true\n}", Edit(DELAY, None),
     "dynamic_batching {\n  preserve_ordering: true\n}"),
    ("dynamic_batching { preferred_batch_size: [ 4, 8 ] }", Edit(PREFERRED, None), "dynamic_batching { }"),
    ("platform: 'x'\n", Edit(PREFERRED, None), "platform: 'x'\n"),
    ('parameters { key: "a" value { string_value: "}" \'"\' } } # {', Edit(("parameters", "a"), '"2"'),
     'parameters { key: "a" value { string_value: "2" } } # {'),
    ("parameters [ { key: 'a' }, { key: \"b\" value: { string_value: '1' } } ]\n", Edit(("parameters", "b"), '"2"'),
     'parameters [ { key: \'a\' }, { key: "b" value: { string_value: "2" } } ]\n'),
    ("name: 'n'\n", Edit(("parameters", "a"), '"2"'),
     'name: \'n\'\nparameters { key: "a" value: { string_value: "2" } }\n'),
)  # fmt: skip
def test_one_edit(before: str, edit: Edit, after: str) -> None:
    found = edited(before, [edit])
    assert found == after
    parse(found)


def test_several_edits() -> None:
    edits = [Edit(COUNT, "2"), Edit(("dynamic_batching",), "{ }"), Edit(PREFERRED, "[ 8 ]"), Edit(DELAY, "9")]
    assert parse(edited("", edits)) == parse(
        "instance_group { count: 2 } dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 9 }"
    )
