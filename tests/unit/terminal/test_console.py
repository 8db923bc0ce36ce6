"""Tables and colours on terminals of several widths, and neither in a pipe."""

from __future__ import annotations

import io
import re

import pytest

from shmserve.terminal import console
from shmserve.terminal.console import BAD, Column, Screen, is_colored, nonzero, state_style
from tests.support.cases import cases

COLUMNS = (
    Column("model"),
    Column("state", style=state_style),
    Column("failed", right=True, style=nonzero(BAD)),
    Column("pid", rank=2),
    Column("memory", right=True, rank=1),
    Column("reason", free=True),
)
ROWS = [
    ["mlp", "READY", "0", "4711", "12 MiB", ""],
    ["a-longer-name", "UNAVAILABLE", "3", "-", "-", "the file 1/model.onnx is missing, and no other version is there"],
]
ESCAPES = re.compile(r"\x1b\[[\d;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(monkeypatch: pytest.MonkeyPatch, width: int, color: bool | None = None, rows: int = 24) -> Screen:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("TERM", "xterm"), ("COLUMNS", str(width)), ("LINES", str(rows))):
        monkeypatch.setenv(name, value)
    return Screen(color, Terminal())


def plain(text: str) -> list[str]:
    return [line.rstrip() for line in ESCAPES.sub("", text).split("\n")]


def test_without_rich_a_terminal_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    found = screen(monkeypatch, 40, color=True)
    monkeypatch.setattr(console, "_has_rich", lambda: False)
    assert found.table(COLUMNS, ROWS) == Screen(False, io.StringIO()).table(COLUMNS, ROWS)
    assert found.styled("READY", BAD) == "READY"
    assert found.frame("READY", again=False).count("READY") == 1


def test_a_terminal_as_wide_as_the_table_shows_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No column is made narrower for a gap at the end of a line."""
    for columns, rows, more in ((COLUMNS, ROWS, 100), (COLUMNS[:5], [row[:5] for row in ROWS], 0)):
        whole = Screen(False, io.StringIO()).table(columns, rows).splitlines()
        assert plain(screen(monkeypatch, max(map(len, whole)) + more).table(columns, rows)) == whole
    lines = plain(screen(monkeypatch, 80).table(COLUMNS[:2], [["模型", "READY"], ["abcd", "READY"]]))
    assert lines[1].replace("模型", "....").index("READY") == lines[2].index("READY")


def test_free_text_is_wrapped_moved_below_its_row_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = plain(screen(monkeypatch, 80).table(COLUMNS, ROWS))
    assert lines[0].split() == ["model", "state", "failed", "pid", "memory", "reason"]
    assert " ".join(line[lines[0].index("reason") :].strip() for line in lines[2:]) == ROWS[1][-1]
    assert 4 <= len(lines) <= 6
    assert max(map(len, lines)) <= 80
    lines = plain(screen(monkeypatch, 56).table(COLUMNS, ROWS))
    assert lines[0].split() == ["model", "state", "failed", "pid", "memory"]
    assert lines[2].split() == ["a-longer-name", "UNAVAILABLE", "3", "-", "-"]
    assert all(line.startswith("    ") for line in lines[3:])
    assert " ".join(line.strip() for line in lines[3:]) == ROWS[1][-1]
    assert "reason" not in screen(monkeypatch, 80).table(COLUMNS, ROWS[:1])
    assert "reason" in Screen(None, io.StringIO()).table(COLUMNS, ROWS[:1]), "programs rely on the columns"


def test_columns_that_do_not_fit_are_left_out_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = ["model", "state", "failed", "memory"]
    for width, shown, left_out in ((45, heads, "pid"), (36, heads[:3], "pid, memory")):
        lines = plain(screen(monkeypatch, width).table(COLUMNS, ROWS))
        assert lines[0].split() == shown
        assert lines[-1] == f"not shown in {width} columns: {left_out}"
    for width in (1, 8, 30):
        lines = plain(screen(monkeypatch, width).table(COLUMNS, ROWS))
        assert max(map(len, lines[:-1])) <= max(width, 24)


def test_a_frame_is_cut_to_the_screen_and_needs_a_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(monkeypatch, 80, False, rows=5)
    text = shown.frame("\n".join(map(str, range(9))), again=False)
    assert plain(text.replace("\x1b[K", "").replace("\x1b[?7l", "").replace("\x1b[H\x1b[2J", ""))[:4] == [
        "0",
        "1",
        "2",
        "... 6 more lines",
    ]
    again = shown.frame("a", again=True)
    assert again.startswith("\x1b[H\x1b[?7la\x1b[K\n")
    assert again.endswith("\x1b[?7h\x1b[J")
    shown = screen(monkeypatch, 80)
    before = shown.can_redraw
    monkeypatch.setenv("TERM", "dumb")
    assert (before, shown.is_terminal, shown.can_redraw) == (True, True, False)
    assert not Screen(None, io.StringIO()).can_redraw


@cases(
    (None, True, {}, True),
    (None, False, {}, False),
    (None, True, {"TERM": "dumb"}, False),
    (None, False, {"TERM": "dumb", "FORCE_COLOR": "1"}, True),
    (None, True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    (True, False, {"NO_COLOR": "1"}, True),
    (False, True, {"FORCE_COLOR": "1"}, False),
)
def test_precedence_of_color_settings(
    wanted: bool | None, is_terminal: bool, variables: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    assert is_colored(wanted, Terminal() if is_terminal else io.StringIO()) is colored


@pytest.mark.parametrize("term", ["xterm-256color", "xterm", "linux", "dumb"])
def test_colors(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    shown = screen(monkeypatch, 120, True)
    monkeypatch.setenv("TERM", term)
    text = shown.table(COLUMNS, ROWS)
    assert re.search(r"\x1b\[32mREADY *\x1b\[0m", text)
    assert "\x1b[1;31mUNAVAILABLE\x1b[0m" in text
    assert re.search(r"\x1b\[1;31m *3\x1b\[0m", text)
    assert shown.styled("a\nb", "bold red") == "\x1b[1;31ma\x1b[0m\n\x1b[1;31mb\x1b[0m"


def test_without_color_there_is_no_escape_not_even_from_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (40, 80, 250):
        shown = screen(monkeypatch, width, False)
        assert "\x1b" not in shown.table(COLUMNS, ROWS) + shown.styled("x", BAD) + shown.state("READY")
    text = shown.table(COLUMNS, [["m", "READY", "0", "", "", "\x1b[2J\r\x07evil"]])
    assert r"\x1b[2J\r\x07evil" in text
    assert "\x1b" not in text
