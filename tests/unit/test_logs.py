"""The server's log: levels, forms, and that nothing can forge a record."""

from __future__ import annotations

import argparse
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.broker.logs import INDENT, Formatter, printable, say, set_up

log = logging.getLogger("shmserve.test")
pytestmark = pytest.mark.usefixtures("own_log")
LEVELS = ("debug", "info", "warning", "error", "critical")


def settings(**given: Any) -> argparse.Namespace:
    known = {"log_verbose": 0, "log_info": True, "log_warning": True, "log_error": True}
    return argparse.Namespace(**known | {"log_format": "default", "log_file": None} | given)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, "info warning error critical"),
        ({"log_verbose": 1}, "debug info warning error critical"),
        ({"log_info": False}, "warning error critical"),
        ({"log_verbose": 2, "log_info": False, "log_error": False}, "debug warning"),
        ({"log_info": False, "log_warning": False, "log_error": False}, ""),
    ],
)
def test_levels(given: dict[str, Any], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    set_up(settings(**given))
    for level in LEVELS:
        getattr(log, level)("said as %s", level)
        say(level, f"told as {level}")
    found = capsys.readouterr().err
    assert re.findall(r"said as (\w+)\n", found) == re.findall(r"told as (\w+)\n", found) == shown.split()
    assert log.isEnabledFor(logging.DEBUG) is ("debug" in shown)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ("default", r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING model 'm' is slow\n"),
        ("ISO8601", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING model 'm' is slow\n"),
    ],
)
def test_forms(form: str, pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    set_up(settings(log_format=form))
    log.warning("model '%s' is slow", "m")
    assert re.fullmatch(pattern, capsys.readouterr().err)


def test_a_file_is_appended_to_and_may_be_renamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log"
    file.write_text("before\n")
    set_up(settings(log_file=file))
    log.info("first")
    file.rename(tmp_path / "log.1")
    log.info("second \udc80")
    before, first = (tmp_path / "log.1").read_text().splitlines()
    assert before == "before"
    assert first.endswith(" INFO first")
    assert file.read_text().endswith(" INFO second \\udc80\n")
    assert capsys.readouterr().err == ""


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        set_up(settings(log_file=tmp_path / "no" / "log"))


def record(text: str, error: BaseException | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, None)
    return logging.LogRecord("x", logging.INFO, __file__, 1, "%s", (text,), info)


@given(st.text())
def test_a_record_is_one_line_and_nothing_in_it_steers_a_terminal(text: str) -> None:
    line = Formatter("default").format(record(text))
    assert len(line.splitlines()) == 1
    assert line.replace("\t", "").isprintable()


@given(st.text())
def test_a_traceback_is_indented(text: str) -> None:
    first, *lines = Formatter("ISO8601").format(record("failed", ValueError(text))).split("\n")
    assert first.endswith(" INFO failed")
    assert lines
    for line in lines:
        assert line.startswith(INDENT)
        assert line.replace("\t", "").isprintable()


def test_what_is_escaped() -> None:
    assert printable("plain text, é and 模型\t.") == "plain text, é and 模型\t."
    assert printable("a\nb\r\x1b[2J\u2028\u202e\x85") == "a\\nb\\r\\x1b[2J\\u2028\\u202e\\x85"


# ------------------------------------------------------------------------------------------ JSON, and fields

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
    """As the message, as a field, and as what a worker wrote last."""
    file = tmp_path / "log"
    set_up(settings(log_format=form, log_file=file))
    say("info", f"model '{text}' is unloaded", {"model": text, "client": 7, "last_words": f"{text}\n{text}"})
    say("warning", "the next one")
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
def test_a_record_as_json_is_one_line_that_says_it_all(text: str, fields: dict[str, Any]) -> None:
    made = record(text)
    made.fields = fields
    line = Formatter("json").format(made)
    assert line.isascii()
    assert line.isprintable()
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found["time"])
    assert (found["level"], found["message"]) == ("info", text)
    assert {name: found[name] for name in fields if name not in ("time", "level", "message")} == {
        name: value for name, value in fields.items() if name not in ("time", "level", "message")
    }


def test_a_traceback_in_json() -> None:
    found = json.loads(Formatter("json").format(record("failed", ValueError("why"))))
    assert found["message"] == "failed"
    assert "ValueError: why" in found["traceback"]
