"""The latest records of the log: which are kept, how they are numbered, and which a reader gets."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.broker.observability.log_settings import LogSettings
from shmserve.broker.observability.logs import TRACEBACK, flush, log_record, set_up
from shmserve.broker.observability.recent_records import PAGE, RECORD_BYTES, TEXT, RecentRecords
from tests.support.broker.log_settings import log_settings

START = 1_000_000


def put(recent: RecentRecords, text: str, traceback: str = "", **fields: Any) -> None:
    recent.put(logging.LogRecord("x", logging.INFO, "x.py", 1, text, (), None), text, traceback, fields)


def texts(answer: dict[str, Any]) -> list[str]:
    return [record["text"] for record in answer["records"]]


def test_a_reader_gets_each_record_once() -> None:
    recent = RecentRecords(1 << 20, START)
    assert recent.document("", 0) == {"records": [], "next": START - 1, "more": False, "lost": 0, "started": START}
    put(recent, "one", model="m", version=1)
    put(recent, "two")
    first = recent.document("", 0)
    assert texts(first) == ["one", "two"]
    assert first["next"] == START + 1
    assert {"number": START, "level": "info", "model": "m", "version": 1}.items() <= first["records"][0].items()
    assert texts(recent.document("", first["next"])) == []
    put(recent, "three", model="m")
    put(recent, "four", model="other")
    again = recent.document("m", first["next"])
    assert (texts(again), again["lost"]) == (["three"], 0)
    assert again["next"] == START + 3, "records about others are not looked at again"
    # A later server has larger numbers, so no record is skipped, and none counts as lost.
    after = RecentRecords(1 << 20)
    put(after, "new")
    answer = after.document("", first["next"])
    assert (texts(answer), answer["lost"]) == (["new"], 0)
    assert answer["started"] > 1_700_000_000_000_000, "by default, the time in us"


def test_pages_and_long_texts() -> None:
    recent = RecentRecords(10 << 20, START)
    for number in range(2 * PAGE + 5):
        put(recent, str(number))
    found, after, more = [], 0, True
    while more:
        answer = recent.document("", after)
        assert len(answer["records"]) <= PAGE
        found += texts(answer)
        after, more = answer["next"], answer["more"]
    assert found == [str(number) for number in range(2 * PAGE + 5)]
    put(recent, "x" * (TEXT + 1), "y" * (10 * TEXT))
    (record,) = recent.document("", after)["records"]
    assert record["text"] == "x" * TEXT + f"... ({TEXT + 1:,} characters in all)"
    assert len(record["traceback"]) < TEXT + 50


@given(
    st.integers(0, 20_000),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=40),
    st.integers(0, 45),
)
def test_memory_is_bounded(limit: int, sizes: list[tuple[int, int]], seen: int) -> None:
    """The last records that fit are kept, and the reader gets the number of records that it has missed."""
    recent = RecentRecords(limit, START)
    for number, (text, trace) in enumerate(sizes):
        put(recent, f"{number:04}" + "x" * text, "y" * trace)
    kept, remaining = 0, limit
    for text, trace in reversed(sizes):
        remaining -= RECORD_BYTES + 4 + text + trace
        if remaining < 0:
            break
        kept += 1
    answer = recent.document("", START + seen - 1)
    expected = [f"{number:04}" for number in range(max(seen, len(sizes) - kept), len(sizes))]
    assert [text[:4] for text in texts(answer)] == expected
    assert answer["lost"] == max(0, len(sizes) - kept - seen)


@pytest.mark.usefixtures("own_log")
def test_logged_records_are_kept_as_recent_records(tmp_path: Path) -> None:
    recent = RecentRecords(1 << 20)
    set_up(log_settings(log_file=tmp_path / "log", log_warning=False), recent)
    about = {"model": "m", "version": 1}
    log_record("info", "one\x1b[31m\nforged", about | {TRACEBACK: "line 1\n\x07line 2"})
    log_record("warning", "not logged")
    for _ in range(3):
        log_record("error", "again", about)
    flush()
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("shmserve").critical("two", exc_info=sys.exc_info())
    found = recent.document("", 0)["records"]
    assert [(record["level"], record["text"]) for record in found] == [
        ("info", r"one\x1b[31m\nforged"),
        ("error", "again"),
        ("error", "last message repeated 2 times: again"),
        ("critical", "two"),
    ]
    assert found[0]["traceback"] == "line 1\n" + r"\x07line 2"
    assert found[3]["traceback"].endswith("ValueError: no")
    assert [record.get("model") for record in found] == ["m", "m", "m", None], "also of repeats"
    tracebacks = "".join(record.get("traceback", "") + "\n" for record in found[::3])
    assert (tmp_path / "log").read_text().count("\n") == len(found) + tracebacks.count("\n")
    # A full disk and a change of the settings keep the records.
    settings = log_settings(log_file="/dev/full")
    set_up(settings, recent)
    LogSettings(settings, lambda tracing: None, recent).change(b'{"log_warning": false}')
    log_record("info", "after")
    log_record("warning", "not logged")
    assert texts(recent.document("", 0))[4:] == ["log settings changed: log_warning False", "after"]
