"""Rates and percentiles between two documents, computed by hand or by numpy; the columns and texts of their values; the
lines about the server and about one model, and a view as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.protocol.rates import Row, percentiles
from shmserve.terminal.tables import text_width
from shmserve.tools.top import plain, texts
from shmserve.tools.top.columns import CLIENTS, INSTANCES, MODELS, TABLES, cell, choose, heading, select, sort, spans
from shmserve.tools.top.panels import BLOCKS, KEPT, TrendHistory, bar, detail, sparkline, summary, wrapped
from shmserve.tools.top.texts import fit, line_text, line_width, pad, reasons_text
from shmserve.tools.top.view import View, make_view
from tests.support.cases import cases
from tests.support.clients.activity_documents import absent, client, counters, document, gpu, instance, model
from tests.support.hypothesis_profiles import examples
from tests.support.repo.golden import assert_golden


def test_rates_between_two_documents() -> None:
    more = {"rows": 900, "batches": 150, "reasons": {"idle": 120, "full": 30}, "cache_hits": 50, "cache_misses": 150}
    before = document(10, model("m", counted=counters(100, 4)))
    (row,) = make_view(before, document(12, model("m", counted=counters(300, 10, **more)))).models
    rates = {
        "requests_per_s": 103, "failed_per_s": 3, "rows_per_s": 400, "batches_per_s": 25, "mean_batch": 16,
        "queue_seconds": 0.001, "compute_seconds": 0.003, "busy": 200 * 0.003 / 2, "cache_hits": 0.25,
    }  # fmt: skip
    assert {key: row[key] for key in rates} == pytest.approx(rates)
    assert row["reasons"] == {"idle": 20, "full": 30}
    assert (row["requests"], row["failed"]) == (310, 10)
    assert all(0.002 < row[name] < 0.0042 for name in ("p50", "p95", "p99"))
    before = document(1, model("a", counted=counters(10)), model("b"))
    models = model("a", counted=counters(30, 2), queued=3), model("b", counted=counters(10), queued=4)
    after = document(3, *models, clients=[client(7, "x", in_flight=2)], gpus=[gpu(0), gpu(1, memory_used_bytes=None)])
    view = make_view(before, after)
    assert view.server["requests_per_s"] == pytest.approx(16)
    assert view.server["failed_per_s"] == pytest.approx(1)
    assert view.server["queued"] == 7
    assert view.server["cpu"] == pytest.approx(0.1)
    assert view.clients[0]["name"] == "x"
    assert [row["memory_share"] for row in view.gpus] == [0.25, None]
    assert view.interval == pytest.approx(2)


@cases(
    document(1, model("m", counted=counters(500))),  # it was unloaded and loaded again
    document(1, model("m", "2", counted=counters(1))),
    document(1, absent("m")),
    document(4, model("m", counted=counters(1))),  # of the same instant
    document(1, model("m", counted=counters(1)), server=document(1)["server"] | {"pid": 1}),
)
def test_documents_that_cannot_be_compared(before: dict[str, object]) -> None:
    (row,) = make_view(before, document(4, model("m", counted=counters(100)))).models
    assert row["requests_per_s"] is None
    assert row["reasons"] == {}


def states() -> View:
    models = (
        model("degraded", degraded=True, reason="degraded, 0 of 1 instances: signal SIGSEGV"),
        model("failed", state="UNAVAILABLE", reason="load failed", instances=[]),
        absent("new"),
        model("asleep", asleep=True, instances=[instance("asleep_0_0", state="asleep", pid=0, memory_bytes=0)]),
        model("reloading", reloading=True),
        model("unloaded", state="UNAVAILABLE", reason="unloaded", instances=[instance("x", state="stopped")]),
        model("unchanged", last_failed_change={"time": 1.0, "reason": "bad file"}, changed_on_disk=True),
    )
    return make_view(None, document(1, *models))


def instances() -> View:
    """Another process has the name of the second one."""
    before = document(1, model("m", instances=[instance("m_0_0", cpu_seconds=1.0), instance("m_0_1", pid=1)]))
    crash = {"state": "backoff", "reason": "signal SIGSEGV", "retry_seconds": 2.5}
    after = [
        instance("m_0_0", cpu_seconds=2.5, batch_rows=6, batch_seconds=0.25, waiting_rows=8, in_flight=3),
        instance("m_0_1", pid=2, cpu_seconds=0.5),
        instance("m_0_2", kind="KIND_GPU", device=3, **crash),
        instance("m_0_3", passive=True),
        instance("m_0_4", state="stopping", busy_seconds=20.0, batch_rows=1, batch_seconds=20.0),
    ]
    view = make_view(before, document(3, model("m", instances=after)))
    assert [row["slow"] for row in view.instances] == [False, False, False, False, True]
    return view


@settings(max_examples=examples(60))
@given(st.lists(st.integers(1, 10**11), min_size=1, max_size=200))
def test_percentiles_are_off_by_less_than_a_factor_of_two(times: list[int]) -> None:
    counts: dict[int, int] = {}
    for ns in times:
        counts[ns.bit_length()] = counts.get(ns.bit_length(), 0) + 1
    found = percentiles(counts)
    for name, share in (("p50", 50), ("p95", 95), ("p99", 99)):
        exact = float(np.percentile(times, share, method="inverted_cdf")) / 1e9
        assert exact / 2 <= found[name] <= exact * 2


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


def served() -> View:
    before = document(1, model("mlp"), model("cnn"))
    mlp = model(
        "mlp",
        counted=counters(4000, 20, reasons={"full": 30, "idle": 10}, batch_rows={"8": 30, "1": 10}),
        queued=5,
        in_flight=2,
        instances=[instance("mlp_0_0", batch_rows=8, batch_seconds=0.25), instance("mlp_0_1", state="backoff")],
    )
    server = document(3)["server"] | {"refused": {"model_queue": 7}, "held_bytes": 3 << 20, "connections": 14}
    return make_view(before, document(3, mlp, model("cnn"), server=server, gpus=[gpu(0), gpu(1, utilization=None)]))


def screens() -> Iterator[str]:
    """Texts of known documents, each below its name."""
    history, view = TrendHistory(), served()
    history.add(view)
    few = document(1, model("m"), server={"name": "triton", "version": "2.50", "ready": False}, notes=["no metrics"])
    gpus = [
        gpu(0, throttled=["sw_thermal"], sm_clock_hertz=99e7, sm_clock_max_hertz=198e7, temperature_celsius=91),
        gpu(1, out_of_service="GPU 1 is out of service: Xid 79"),
    ]
    hot = make_view(None, document(1, model("m"), gpus=gpus))
    reason = "load failed: " + "word " * 30 + "\x1b[31m" + "x" * 100
    failed = make_view(None, document(1, model("m", state="UNAVAILABLE", reason=reason, instances=[], counters={})))
    for width in (20, 80, 250):
        for name, lines in (
            ("a server", summary(view, "unix:///run/lane.sock", width)),
            ("a server with few fields", summary(make_view(None, few), "http://host:8000", width)),
            ("a GPU that is slow, and one that is out of service", summary(hot, "", width)),
            ("a model", detail(view, history, "mlp", 1, width, ())),
            ("a model that is not served", detail(failed, TrendHistory(), "m", 1, width, ())),
        ):
            assert all(line_width(line) <= width for line in lines)
            yield f"== {name}, {width} columns"
            yield from (line_text(line).rstrip() for line in lines)
    yield from map(line_text, detail(view, TrendHistory(), "other", 1, 80, ()))
    for limit in (80, None):
        yield f"== all tables, {limit} columns"
        yield from plain.text(view, "unix:///x", TABLES, "", None, limit).splitlines()
    for known, table in ((hot, "gpus"), (states(), "models"), (states(), "instances"), (instances(), "instances")):
        yield f"== {table}"
        yield from plain.text(known, "", plain.tables_of(table), "", None, None).splitlines()[4:]
    yield from plain.text(instances(), "", plain.tables_of("models"), "", None, None).splitlines()[4:]


def test_screens_of_known_documents() -> None:
    """SHMSERVE_REWRITE=1 writes the expected texts."""
    found = list(screens())
    assert all(line.isprintable() and line == line.rstrip() for line in found)
    assert_golden(Path(__file__).with_name("screens.expected"), found)


def test_recorded_values_come_before_the_samples() -> None:
    history = TrendHistory()
    history.add(served())
    (own,) = history.of("mlp", 1).requests_per_s
    recorded: dict[str, list[float | None]] = {"requests": [*map(float, range(10))], "p99": [None, 0.5], "queue": []}
    history.seed("mlp", 1, recorded, 2)
    samples = history.of("mlp", 1)
    assert list(samples.requests_per_s) == [1.0, 3.0, 5.0, 7.0, own], "the last recorded one is the sample's"
    assert [len(values) for values in (samples.p99, samples.queued)] == [1, 1]
    history.seed("mlp", 1, recorded, 1)
    assert len(samples.requests_per_s) == 5, "once"
    history.seed("gone", 1, recorded, 1)
    assert not history.of("gone", 1).requests_per_s


def test_bars_sparklines_and_wrapped_texts() -> None:
    assert line_text(bar(0.5, 12)) == "[||||||   50%]"
    assert line_text(bar(1.7, 12)) == "[||||||||170%]"
    assert line_text(bar(0.0, 5)) == "[   0%]"
    assert sparkline([], 10) == sparkline([1.0], 0) == ""
    assert sparkline([0.0, None, 3.5, 7.0], 10) == f"{BLOCKS[0]} {BLOCKS[4]}{BLOCKS[7]}"
    assert sparkline([9.0, 1.0, 2.0], 2) == f"{BLOCKS[4]}{BLOCKS[7]}", "only the last ones count"
    assert sparkline([0.0, 0.0], 2) == BLOCKS[0] * 2
    for text, width, lines in (
        ("one two  three\nfour", 9, ["one two", "three", "four"]),
        ("x" * 7, 3, ["xxx", "xxx", "x"]),
        ("", 10, []),
        ("\u6f22\u5b57 " * 3, 8, ["\u6f22\u5b57"] * 3),
        ("\u6f22" * 3, 5, ["\u6f22\u6f22", "\u6f22"]),
    ):
        assert [line_text(line) for line in wrapped(text, width, "plain")] == lines


def test_the_history_is_bounded_and_forgets_models_that_are_gone() -> None:
    history, view = TrendHistory(), served()
    for _ in range(KEPT + 10):
        history.add(view)
    assert len(history.of("mlp", 1).p99) == KEPT
    history.add(make_view(None, document(5, model("cnn"))))
    assert not history.of("mlp", 1).p99
    assert len(history.of("cnn", 1).p99) == KEPT, "a view without rates has no sample"


def test_filters_and_json() -> None:
    view = served()
    assert plain.text(view, "unix:///x", TABLES, "nope", None, 80).endswith("\n\nno row has the words of --filter nope")
    only = plain.text(view, "unix:///x", plain.tables_of("models"), "mlp", "requests_per_s", None)
    assert "cnn" not in only
    assert "mlp_0_0" not in only
    found = json.loads(json.dumps(plain.document(served(), "unix:///x", TABLES, "", "requests_per_s"), allow_nan=False))
    assert found["interval"] == 2
    assert [row["model"] for row in found["models"]] == ["mlp", "cnn"]
    assert found["models"][0]["requests_per_s"] == 2010
    assert found["models"][1]["p99"] is None
    assert found["server"]["failed_per_s"] == 10
    assert {"instances", "clients", "gpus", "unknown", "notes", "url"} <= found.keys()
    found = plain.document(served(), "", TABLES, "top", None)
    assert ([row["name"] for row in found["clients"]], found["models"]) == (["top"], [])
