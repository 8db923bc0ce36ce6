"""The server's log: levels, formats, and that nothing can forge a record. Which of its latest records a reader gets."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.broker.observability.log_settings import LogSettings
from shmserve.broker.observability.logs import INDENT, TRACEBACK, Formatter, flush, log_record, printable, set_up
from shmserve.broker.observability.recent_records import PAGE, RECORD_BYTES, TEXT, RecentRecords
from tests.support.broker.log_settings import log_settings
from tests.support.cases import cases

log = logging.getLogger("shmserve.test")
pytestmark = pytest.mark.usefixtures("own_log")
LEVELS = ("debug", "info", "warning", "error", "critical")


@cases(
    ({}, "info warning error critical"),
    ({"log_verbose": 1}, "debug info warning error critical"),
    ({"log_info": False}, "warning error critical"),
    ({"log_verbose": 2, "log_info": False, "log_error": False}, "debug warning"),
    ({"log_info": False, "log_warning": False, "log_error": False}, ""),
)
def test_log_settings_select_levels(given: dict[str, Any], shown: str, capfd: pytest.CaptureFixture[str]) -> None:
    set_up(log_settings(**given))
    for level in LEVELS:
        getattr(log, level)("said as %s", level)
        log_record(level, f"told as {level}")
    found = capfd.readouterr().err
    assert re.findall(r"said as (\w+)\n", found) == re.findall(r"told as (\w+)\n", found) == shown.split()
    assert log.isEnabledFor(logging.DEBUG) is ("debug" in shown)


@pytest.mark.parametrize(
    ("form", "begin"),
    [("default", r"\w\d{4} \d\d:\d\d:\d\d\.\d{6}"), ("ISO8601", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \w")],
)
def test_log_formats_of_triton(form: str, begin: str, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    set_up(log_settings(log_format=form, triton_compatible=True, log_verbose=1))
    text = 'said "é"\n\x1b\udc80'
    for level in LEVELS:
        log_record(level, text)
    written = capfd.readouterr()
    assert len(written.out.splitlines()) == 2, "debug and info"
    lines = (written.out + written.err).splitlines()
    found = [re.fullmatch(rf"({begin}) (\d+) test_logs\.py:\d+\] (.*)", line) for line in lines]
    assert [(int(one[2]), json.loads(one[3])) for one in found if one] == [(os.getpid(), text)] * len(LEVELS)
    assert [one[1][0 if form == "default" else -1] for one in found if one] == list("IIWEE")
    monkeypatch.setenv("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "0")
    for kind, end in ((form, '] input "x\ny"\n'), ("json", '"message": "input \\"x\\ny\\""}\n')):
        set_up(log_settings(log_format=kind, triton_compatible=True))
        log.info('input "x\ny"')
        assert capfd.readouterr().out.endswith(end)


def test_a_file_is_appended_to_and_may_be_renamed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log"
    file.write_text("before\n")
    set_up(log_settings(log_file=file))
    log.info("first")
    file.rename(tmp_path / "log.1")
    log.info("second \udc80")
    before, first = (tmp_path / "log.1").read_text().splitlines()
    assert before == "before"
    assert first.endswith(" INFO first")
    assert file.read_text().endswith(" INFO second \\udc80\n")
    assert capfd.readouterr().err == ""


def record(text: str, error: BaseException | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, None)
    return logging.LogRecord("x", logging.INFO, __file__, 1, "%s", (text,), info)


BEGINS = {
    "default": re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO "),
    "ISO8601": re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO "),
}


@given(st.text(), st.sampled_from(sorted(BEGINS)))
def test_a_record_is_one_line_without_control_characters(text: str, form: str) -> None:
    line = Formatter(form).format(record(text))
    assert len(line.splitlines()) == 1
    assert line.replace("\t", "").isprintable()
    begin = BEGINS[form].match(line)
    assert begin is not None
    assert line[begin.end() :] == printable(text)


@given(st.text())
def test_a_traceback_is_indented(text: str) -> None:
    first, *lines = Formatter("ISO8601").format(record("failed", ValueError(text))).split("\n")
    assert first.endswith(" INFO failed")
    assert lines
    for line in lines:
        assert line.startswith(INDENT)
        assert line.replace("\t", "").isprintable()
    made = record("ended", ValueError("why"))
    made.fields = {"last_words": "the last\nlines"}
    assert "the last" not in Formatter("default").format(made), "it has been logged line by line"
    found = json.loads(Formatter("json").format(made))
    assert (found["message"], found["last_words"]) == ("ended", "the last\nlines")
    assert "ValueError: why" in found["traceback"]
    assert printable("é 模型\ta\nb\r\x1b[2J\u2028\u202e\x85") == "é 模型\ta\\nb\\r\\x1b[2J\\u2028\\u202e\\x85"


INJECTIONS = [
    "mlp\n2026-01-01 00:00:00,000 ERROR forged",
    "mlp\r\n2026-01-01T00:00:00.000Z ERROR forged",
    "mlp\x1b[2J\x1b[1;31mforged",
    'mlp\u2028{"level": "error"}\u2029',
    'mlp"}\n{"time": "x", "level": "error", "message": "forged"}',
    "mlp\x00\x07\x08\x7f\x85\x9b31m",
    "mlp\u202egnp.exe\u2066",
    "mlp\udcff\ud800",
    "mlp\v\f\x1c\x1d\x1e",
    "%s %d %(message)s {0}",
]


@pytest.mark.parametrize("text", INJECTIONS)
@pytest.mark.parametrize("form", ["default", "ISO8601", "json"])
def test_r11_injections(form: str, text: str, tmp_path: Path) -> None:
    """The text is injected as the message, as a field, and as a model's traceback."""
    file = tmp_path / "log"
    set_up(log_settings(log_format=form, log_file=file))
    log_record("info", f"model '{text}' is unloaded", {"model": text, "client": 7, "traceback": f"{text}\n{text}"})
    log_record("warning", "the next one")
    first, *between, last = file.read_text("utf-8").splitlines()
    assert file.read_text("utf-8").count("\n") == len(between) + 2
    for line in (first, *between, last):
        assert line.replace("\t", "").isprintable()
    if form == "json":
        assert not between
        assert first.isascii()
        found = json.loads(first)
        assert (found["level"], found["model"], found["client"]) == ("info", text, 7)
        assert found["message"] == f"model '{text}' is unloaded"
        assert json.loads(last)["message"] == "the next one"
    else:
        assert all(line.startswith(INDENT) for line in between)
        assert " INFO model 'mlp" in first or " INFO model '%s" in first
        assert last.endswith(" WARNING the next one")


@given(st.text(), st.dictionaries(st.text(), st.text() | st.integers()))
def test_a_json_record_is_one_line_with_all_fields(text: str, fields: dict[str, Any]) -> None:
    made = record(text)
    made.fields = fields
    line = Formatter("json").format(made)
    assert line.isascii()
    assert line.isprintable()
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found["time"])
    assert (found["level"], found["message"]) == ("info", text)
    own = {"time", "level", "message"}
    assert {name: found[name] for name in fields.keys() - own} == {name: fields[name] for name in fields.keys() - own}


def texts(file: Path) -> list[str]:
    return [line.split(" ", 2)[2] for line in file.read_text().splitlines()]


def test_repeats_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "log"
    set_up(log_settings(log_file=file))
    for _ in range(1000):
        log.warning("the same")
    log.error("the same")
    log.error("the same")
    flush()
    flush()
    log.error("the same")
    log.info("another")
    log.info("another")
    set_up(log_settings())  # ends this log
    assert texts(file) == [
        "WARNING the same",
        "WARNING last message repeated 999 times: the same",
        "ERROR the same",
        "ERROR last message repeated 1 time: the same",
        "ERROR last message repeated 1 time: the same",
        "INFO another",
        "INFO last message repeated 1 time: another",
    ]


@pytest.mark.parametrize("room", [0, 30], ids=["nothing fits", "a part of a record fits"])
def test_a_full_disk_and_its_end_are_reported(room: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log"
    set_up(log_settings(log_file=file))
    log.info("before%s", "x" * 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + room, hard))
    try:
        for number in range(1000):
            log.info("lost %d", number)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    text = "shmserve: cannot write the log: File too large; records are lost until it works again\n"
    assert capfd.readouterr().err == text
    log.info("after")
    log.info("and on")
    assert capfd.readouterr().err == ""
    lines = file.read_text().splitlines()
    assert " INFO beforex" in lines[0]
    notice, after, more = lines[-3:]
    assert re.search(r"WARNING could not write the log for \S+ s \(File too large\); 1,000 record", notice)
    assert (after.endswith(" INFO after"), more.endswith(" INFO and on")) == (True, True)


@contextlib.contextmanager
def console(descriptor: int) -> Iterator[None]:
    """The server's console, to which a new log writes."""
    kept = os.dup(2)
    try:
        os.dup2(descriptor, 2)
        os.close(descriptor)
        set_up(log_settings())
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_a_blocked_or_closed_pipe_does_not_block_the_server(capfd: pytest.CaptureFixture[str]) -> None:
    """A full pipe would block the server forever."""
    reader, writer = os.pipe()
    with console(writer):
        for number in range(4000):
            log.info("%d %s", number, "x" * 100)
        data = os.read(reader, 1 << 20)
        log.info("read again")
        more = os.read(reader, 1 << 20)
        os.close(reader)
        for number in range(10):
            log.info("lost %d", number)
    with console(os.open("/dev/full", os.O_WRONLY)):
        for number in range(1000):
            log.info("lost %d", number)
    assert b" INFO 0 x" in data.splitlines()[0]
    assert b"the reader does not read" in more
    assert more.endswith(b" INFO read again\n")
    log.info("after")
    notice, after = capfd.readouterr().err.splitlines()
    assert "(No space left on device); 1,000 record(s) were lost" in notice
    assert after.endswith(" INFO after")


def test_a_file_that_cannot_be_opened_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "logs"
    with pytest.raises(FileNotFoundError):
        set_up(log_settings(log_file=folder / "log"))
    folder.mkdir()
    set_up(log_settings(log_file=folder / "log"))
    log.info("first")
    folder.rename(tmp_path / "moved")
    log.info("lost")
    log.info("lost, too")
    folder.mkdir()
    log.info("after")
    assert capfd.readouterr().err.count("cannot write the log: No such file or directory") == 1
    assert [text.split(" ")[0] for text in texts(folder / "log")] == ["WARNING", "INFO"]


START = 1_000_000


def put(recent: RecentRecords, text: str, traceback: str = "", **fields: Any) -> None:
    recent.put(logging.LogRecord("x", logging.INFO, "x.py", 1, text, (), None), text, traceback, fields)


def shown(answer: dict[str, Any]) -> list[str]:
    return [record["text"] for record in answer["records"]]


def test_a_reader_gets_each_record_once() -> None:
    recent = RecentRecords(1 << 20, START)
    assert recent.document("", 0) == {"records": [], "next": START - 1, "more": False, "lost": 0, "started": START}
    put(recent, "one", model="m", version=1)
    put(recent, "two")
    first = recent.document("", 0)
    assert shown(first) == ["one", "two"]
    assert first["next"] == START + 1
    assert {"number": START, "level": "info", "model": "m", "version": 1}.items() <= first["records"][0].items()
    assert shown(recent.document("", first["next"])) == []
    put(recent, "three", model="m")
    put(recent, "four", model="other")
    again = recent.document("m", first["next"])
    assert (shown(again), again["lost"]) == (["three"], 0)
    assert again["next"] == START + 3, "records about others are not looked at again"
    # A later server has larger numbers, so no record is skipped, and none counts as lost.
    after = RecentRecords(1 << 20)
    put(after, "new")
    answer = after.document("", first["next"])
    assert (shown(answer), answer["lost"]) == (["new"], 0)
    assert answer["started"] > 1_700_000_000_000_000, "by default, the time in us"


def test_pages_and_long_texts() -> None:
    recent = RecentRecords(10 << 20, START)
    for number in range(2 * PAGE + 5):
        put(recent, str(number))
    found, after, more = [], 0, True
    while more:
        answer = recent.document("", after)
        assert len(answer["records"]) <= PAGE
        found += shown(answer)
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
    assert [text[:4] for text in shown(answer)] == expected
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
    assert shown(recent.document("", 0))[4:] == ["log settings changed: log_warning False", "after"]
