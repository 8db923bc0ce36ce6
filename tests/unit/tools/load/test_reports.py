"""Reports of a saved run: JSON, table, CSV, HTML."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from shmserve.errors import InvalidRequest
from shmserve.terminal.console import Screen
from shmserve.tools.load import record
from shmserve.tools.load.analysis.compare import compare
from shmserve.tools.load.plan import ClosedLoop, LatencyLimit, LoadPlan, OpenLoop, ReplayLoop
from shmserve.tools.load.report.csv import csv_text
from shmserve.tools.load.report.html import html_text
from shmserve.tools.load.report.table import comparison_text, run_text
from tests.support.cases import cases
from tests.unit.tools.load.points import point, run, steady, window

PERF_ANALYZER = (
    "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,"
    "Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency,"
    "Avg latency,request/response,response wait"
)
"""The first line that perf_analyzer 2.60 writes with -f FILE --verbose-csv."""
SCREEN = Screen(False, io.StringIO())
RUN = run(steady(1, [1000, 1010, 990]), steady(4, [3000, 3010, 2990], p50=1.2e6))


@pytest.mark.parametrize("load", [ClosedLoop(3), OpenLoop(2.5, "constant", 7), ReplayLoop((1, 2, 3), "name")])
def test_a_run_is_read_as_it_was_saved(load: object, tmp_path: Path) -> None:
    assert isinstance(load, ClosedLoop | OpenLoop | ReplayLoop)
    plan = LoadPlan(model="m", loads=(load,), limit=LatencyLimit(99.0, 20_000_000))
    saved = record.SavedRun(
        created="now", plan=plan, server={}, machine={}, points=(point(load, [window(0, 5)]),), best=2.0
    )
    path = tmp_path / "run.json"
    path.write_bytes(record.encode(saved))
    assert record.read(path) == saved


FORMAT_9 = record.encode(RUN).replace(b'"format": 1', b'"format": 9')


@cases(
    (b"{}", "is not a saved run"),
    (b"\xe4", "is not a saved run"),
    (b"no JSON", "is not a saved run"),
    (FORMAT_9, "format 9; this version reads format 1"),
    (None, "cannot read"),
)
def test_files_that_are_not_runs_are_refused(data: bytes | None, message: str, tmp_path: Path) -> None:
    if data is not None:
        (tmp_path / "run.json").write_bytes(data)
    with pytest.raises(InvalidRequest, match=message):
        record.read(tmp_path / "run.json")


def test_the_columns_are_those_of_perf_analyzer() -> None:
    text = csv_text(RUN)
    assert text.splitlines()[0].startswith(PERF_ANALYZER + ",")
    one, four = csv.DictReader(io.StringIO(text))
    assert (one["Concurrency"], four["Concurrency"]) == ("1", "4")
    assert float(one["Inferences/Second"]) == pytest.approx(2000)  # two rows per request
    assert (one["Server Queue"], one["Server Compute Infer"]) == ("100", "600")
    assert one["Network+Server Send/Recv"] == str(1020 - 100 - 5 - 600 - 4)  # the mean latency
    assert one["p50 latency"] == "1000"
    text = csv_text(run(point(OpenLoop(500.0), [window(0, 500)])))
    assert text.startswith("Request Rate,Inferences/Second,")
    assert text.splitlines()[1].startswith("500,")


def test_the_table_has_all_parts() -> None:
    text = run_text(RUN, SCREEN)
    assert re.search(r"^concurrency 4 +3,000 +[\d.]+% +6,000 +1\.20 ms", text, re.MULTILINE)
    assert re.search(r"^concurrency 1 +100 us +5 us +600 us +4 us +5\.0 +4 +full 75%, delay 25%$", text, re.MULTILINE)
    assert re.search(r"^cores used +machine +broker +GPU 0 +generator +generator/request$", text, re.MULTILINE)
    assert re.search(r"^concurrency 1 +1\.50 +0\.50 +25% +0\.20 +20 us$", text, re.MULTILINE)
    assert "10 us of CPU time per request, at most 100,000/s per process" in text


def test_a_comparison_as_text() -> None:
    other = run(steady(1, [2000, 2010, 1990]), steady(4, [3000, 3010, 2990], p50=1.2e6))
    text = comparison_text(compare(RUN, other), ("old", "new"), SCREEN)
    assert re.search(r"^concurrency 1 +throughput +1,000 +2,000 +\+100\.0% +.* better$", text, re.MULTILINE)
    assert "new is better than old" in text
    assert "confidence: 95 % for the whole verdict, which requires 99.1667 % for each interval" in text
    sure = comparison_text(compare(RUN, other, 0.7), ("old", "new"), SCREEN)
    assert "confidence: 70 % for the whole verdict, which requires 95 % for each interval" in sure
    mixed = run(steady(1, [2000, 2010, 1990]), steady(4, [3000, 3010, 2990], p50=1.5e6, failed=60))
    text = comparison_text(compare(RUN, mixed), ("old", "new"), SCREEN)
    assert "new is better than old in some metrics and worse in others: p50 of concurrency 4, failed of" in text
    assert re.search(r"^concurrency 4 +failed +0% +2\.91% +\+2\.9 points +- +worse$", text, re.MULTILINE)
    wild = run(steady(1, [100, 1900, 1000]))
    assert re.search(r"^concurrency 1 +1,000 +too few ", run_text(wild, SCREEN), re.MULTILINE)
    text = comparison_text(compare(wild, wild), ("old", "new"), SCREEN)
    assert re.search(r"^concurrency 1 +throughput +1,000 +1,000 +\+0\.0% +too few +unknown$", text, re.MULTILINE)


@cases(
    (8.0, None, "highest concurrency with p99.9 <= 5 ms: 8\n"),
    (1024.0, None, "<= 5 ms: 1,024, the upper bound of the search: --concurrency LOW:HIGH allows more\n"),
    (None, None, "no load kept p99.9 <= 5 ms; the lowest that was tried was 1\n"),
    (None, 1.0, "no load is known to keep the limit, as concurrency 1 had too few responses to judge p99.9 <="),
    (1.0, 2.0, "<= 5 ms: 1; the search ended there, as concurrency 2 had too few responses to judge p99.9"),
)
def test_the_result_of_a_search(best: float | None, undecided: float | None, text: str) -> None:
    found = replace(RUN, plan=replace(RUN.plan, limit=LatencyLimit(99.9, 5_000_000)), best=best, undecided=undecided)
    assert text in run_text(found, SCREEN)


def test_the_page_is_complete_escaped_and_links_to_nothing() -> None:
    text = html_text(replace(RUN, plan=LoadPlan(model="<m>")))
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(charts) == 2 + 2 * 4  # curve and split, and four charts for each load
    for chart in charts:
        ElementTree.fromstring(chart)
    assert not [word for word in ("<script", "href=", "src=", "<m>") if word in text]
    assert "&lt;m&gt;" in text


@cases(
    (None, False, r"<b>[\d,.]+ requests/s at concurrency 4, p50 .*, p99 .*, none failed\.</b>"),
    (1.0, True, r"<b>[\d,.]+ requests/s at concurrency 1, p50 "),
    (None, True, r"<b>No load met p99\.9 &lt;= 5 ms\.</b>"),
)
def test_the_page_begins_with_what_was_found(best: float | None, limited: bool, found: str) -> None:
    limit = LatencyLimit(99.9, 5_000_000) if limited else None
    text = html_text(replace(RUN, plan=replace(RUN.plan, limit=limit), best=best))
    assert re.search(found, text)
    assert text.index("<b>") < text.index("<svg") < text.index("<table>")
