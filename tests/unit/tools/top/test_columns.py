"""Texts of values, the choice of columns for a width, sorting and filtering."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.protocol.rates import Row
from shmserve.terminal.tables import text_width
from shmserve.tools.top import texts
from shmserve.tools.top.columns import CLIENTS, INSTANCES, MODELS, TABLES, cell, choose, heading, select, sort, spans
from shmserve.tools.top.texts import fit, line_text, pad, reasons_text
from shmserve.tools.top.view import make_view
from tests.support.clients.activity_documents import client, counters, document, instance, model
from tests.support.hypothesis_profiles import examples

WIDTHS = (1, 9, 20, 40, 79, 80, 120, 250, 400)


def rows(count: int = 3) -> list[Row]:
    models = [
        model(f"model-{number}", counted=counters(1000 * number), queued=number, instances=[instance(f"i{number}")])
        for number in range(count)
    ]
    before = [model(f"model-{number}") for number in range(count)]
    return make_view(document(1, *before), document(3, *models)).models


VALUES: dict[Any, dict[float, str]] = {
    texts.count_text: {0: "0", 99_999: "99,999", 123_456: "123k", 12_345_678: "12.3M"},
    texts.rate_text: {0: "0", 0.4: "0.40", 12.34: "12.3", 1234.5: "1,234"},
    texts.short_duration: {
        0.0000004: "0us", 0.000412: "412us", 0.00124: "1.24ms", 0.0999: "99.9ms", 0.2: "200ms", 9.0: "9.00s",
        99.9: "99.9s", 100: "1m40s", 7_205: "2h00m", 10**6: "11d",
    },
    texts.bytes_text: {0: "0B", 50 << 20: "50.0M", (3 << 30) + (1 << 29): "3.5G"},
}  # fmt: skip


@pytest.mark.parametrize("to_text", VALUES)
def test_texts_of_values(to_text: Any) -> None:
    assert {value: to_text(value) for value in VALUES[to_text]} == VALUES[to_text]
    assert reasons_text({"idle": 20, "full": 60}) == "full 75% idle 25%"


@settings(max_examples=examples(100))
@given(st.floats(0, 1e15), st.sampled_from(["count", "rate", "duration", "bytes"]))
def test_numbers_are_never_cut(value: float, kind: str) -> None:
    """A cut number would be another number."""
    for column in (column for table in TABLES for column in table.columns if column.kind == kind):
        if kind == "duration" and value >= 1e8:
            continue  # three years
        assert len(cell(column, {column.key: value})) <= column.width


def test_widths_of_texts() -> None:
    assert text_width("模型e\u0301") == 5
    assert pad("abc", 5) == "abc  "
    assert pad("abc", 5, right=True) == "  abc"
    assert pad("abcdef", 4) == "abc…"
    assert pad("模型模型", 4) == "模 …"
    assert pad("abc", 0) == ""
    assert line_text(fit([("abc", "dim"), ("模型", "plain")], 6)) == "abc模 "


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [0, 3])
def test_every_line_fits(table: Any, width: int, count: int) -> None:
    view = make_view(document(1), document(3, *[model(f"model-{number}" * 9) for number in range(count)]))
    shown = view.table(table.name)
    layout = choose(table, shown, width)
    assert layout.columns
    lines = [(" " * layout.gap).join(heading(layout)), *(line_text(spans(layout, row)) for row in shown)]
    assert {text_width(line) for line in lines} == {sum(layout.widths) + layout.gap * (len(layout.columns) - 1)}
    assert text_width(lines[0]) <= width


def test_cells_of_unknown_empty_and_untrusted_values() -> None:
    column = INSTANCES.column("batch_rows")
    assert cell(column, {"batch_rows": None}, frozenset({"batch_rows"})) == texts.UNKNOWN
    assert cell(column, {"batch_rows": None}) == texts.NOTHING
    assert cell(column, {"batch_rows": 0}) == "0"
    assert cell(MODELS.column("reasons"), {"reasons": {}}) == texts.NOTHING
    row = client(1, "x\x1b[2J\n\u202e")
    assert cell(CLIENTS.column("name"), row) == "x\\x1b[2J\\n\\u202e"


def test_the_tables_are_consistent() -> None:
    view = make_view(document(1, model("m")), document(2, model("m")))
    for table in TABLES:
        ranks = [column.rank for column in table.columns]
        assert len(set(ranks)) == len(ranks)
        assert {table.sort, *table.identity} <= {column.key for column in table.columns}
        for row in view.table(table.name):
            assert {column.key for column in table.columns} <= row.keys()


def names(found: list[Row]) -> list[str]:
    return [row["model"] for row in found]


def test_sorting_and_filters() -> None:
    some = rows()
    upward = ["model-0", "model-1", "model-2"]
    for key, wanted in (("model", upward), ("requests_per_s", upward[::-1])):
        assert names(sort(MODELS, some, key)) == wanted
        assert names(sort(MODELS, some, key, reverse=True)) == wanted[::-1]
    some[0]["p99"], some[1]["p99"], some[2]["p99"] = 0.5, None, 0.1
    for reverse, wanted in ((False, ["model-0", "model-2", "model-1"]), (True, ["model-2", "model-0", "model-1"])):
        assert names(sort(MODELS, some, "p99", reverse)) == wanted, "a row without a value is last"
    for column in (column.key for column in MODELS.columns):
        assert sorted(names(sort(MODELS, rows(), column))) == names(rows())
    equal = [row | {"queued": 5} for row in rows()]
    assert names(sort(MODELS, equal[::-1], "queued")) == names(equal), "equal rows keep the order of their names"
    models = [model("ocr_det"), model("ocr_rec", state="UNAVAILABLE", reason="No such file"), model("mlp", "12")]
    found = make_view(None, document(1, *models)).models
    for text, wanted in (
        ("", ["ocr_det", "ocr_rec", "mlp"]),
        ("OCR", ["ocr_det", "ocr_rec"]),
        ("ocr unavail", ["ocr_rec"]),
        ("such file", ["ocr_rec"]),
        ("12", ["mlp"]),
        ("nothing", []),
    ):
        assert names(select(MODELS, found, text)) == wanted
