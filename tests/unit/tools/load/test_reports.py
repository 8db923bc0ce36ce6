"""Reports of a saved run: JSON, table, CSV, HTML."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from shmserve.errors import InvalidRequest
from shmserve.terminal.console import Screen
from shmserve.tools.load import record
from shmserve.tools.load.analysis.compare import compare
from shmserve.tools.load.plan import ClosedLoop, LatencyLimit, Load, LoadPlan, OpenLoop, ReplayLoop
from shmserve.tools.load.report.csv import csv_text
from shmserve.tools.load.report.html import html_text
from shmserve.tools.load.report.table import comparison_text, run_text
from tests.support.cases import cases
from tests.support.repo.golden import assert_golden
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
def test_a_run_is_read_as_it_was_saved(load: Load, tmp_path: Path) -> None:
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


def texts() -> Iterator[str]:
    better = run(steady(1, [2000, 2010, 1990]), steady(4, [3000, 3010, 2990], p50=1.2e6))
    mixed = run(steady(1, [2000, 2010, 1990]), steady(4, [3000, 3010, 2990], p50=1.5e6, failed=60))
    wild = run(steady(1, [100, 1900, 1000]))
    whole = run_text(RUN, SCREEN)
    yield whole
    yield run_text(wild, SCREEN)
    for found in (compare(RUN, better), compare(RUN, better, 0.7), compare(RUN, mixed), compare(wild, wild)):
        yield comparison_text(found, ("old", "new"), SCREEN)
    plan = replace(RUN.plan, limit=LatencyLimit(99.9, 5_000_000))
    for best, undecided in ((8.0, None), (1024.0, None), (None, None), (None, 1.0), (1.0, 2.0)):
        searched = run_text(replace(RUN, plan=plan, best=best, undecided=undecided), SCREEN)
        yield "\n".join(line for line in searched.splitlines() if line not in whole)


def test_runs_comparisons_and_searches_as_text() -> None:
    """SHMSERVE_REWRITE=1 writes the expected texts."""
    assert_golden(Path(__file__).with_name("reports.expected"), "\n\n".join(texts()).splitlines())


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
