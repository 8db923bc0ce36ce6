"""`shmserve run` in a terminal: breakpoints, the debugger where a model fails, and Ctrl-C."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.system.terminal import Terminal
from tests.support.workers.models.run_models import command, environment

pytestmark = pytest.mark.process


PROMPT = "(Pdb) "


def conversation(*words: str, cwd: Path, before: Sequence[str] = ()) -> Terminal:
    """`before`: a command that ends by running the words that follow it."""
    return Terminal([*before, *command(words)], 200, 50, environment(), cwd)


def test_a_breakpoint_opens_the_debugger_which_continues_or_ends_the_run(models: Path) -> None:
    with conversation("greeter", "-i", "x=1002,2", cwd=models) as terminal:
        assert "greeter/1/model.py(" in terminal.until(PROMPT)
        terminal.press("p first + 1\n")
        assert "1003.0" in terminal.until(PROMPT)
        terminal.press("c\n")
        text, code = terminal.rest()
        assert code == 0
        assert "2004 4" in text
    with conversation("greeter", "-i", "x=1002,2", "--pdb", cwd=models) as terminal:
        terminal.until(PROMPT)
        terminal.press("q\n")
        text, code = terminal.rest()
    assert code == 1
    assert "Traceback" not in text
    assert text.splitlines()[-2:] == ["finalize", "shmserve run: the debugger was left in the middle of the model"]


def test_pdb_stops_where_the_model_raised_or_failed_to_load(models: Path) -> None:
    """With --json, which keeps standard output for the document."""
    with conversation("greeter", "-i", "x=1001,2", "--pdb", "--json", cwd=models) as terminal:
        shown = terminal.until(PROMPT)
        assert "LookupError: no luck today" in shown
        assert re.search(r"> .*/greeter/1/model.py\(\d+\)one\(\)\n-> raise LookupError", shown)
        terminal.press("p secret\n")
        assert "42" in terminal.until(PROMPT)
        terminal.press("q\n")
        text, code = terminal.rest()
    assert code == 1
    assert text.splitlines()[-1].endswith("message: LookupError: no luck today")
    with conversation("broken", "--random", "--pdb", cwd=models) as terminal:
        assert re.search(r"> .*/broken/1/model.py\(\d+\)initialize\(\)", terminal.until(PROMPT))
        terminal.press("q\n")
        assert terminal.rest()[1] == 1


def test_the_debugger_uses_the_terminal_if_standard_input_is_a_pipe(models: Path, tmp_path: Path) -> None:
    """Like `cat request.json | shmserve run greeter -`: there is a terminal, but standard input is a pipe."""
    request = tmp_path / "request.json"
    request.write_text('{"inputs": {"x": [1002, 2]}}')
    piped = f"import os, sys; os.dup2(os.open({str(request)!r}, os.O_RDONLY), 0); os.execv(sys.argv[1], sys.argv[1:])"
    with conversation("greeter", "-", cwd=models, before=[sys.executable, "-c", piped]) as terminal:
        terminal.until(PROMPT)
        terminal.press("p first\n")
        assert "1002.0" in terminal.until(PROMPT)
        terminal.press("c\n")
        assert terminal.rest()[1] == 0


def test_an_interrupt_finalizes_the_model(models: Path) -> None:
    with conversation("greeter", "--random", "--repeat", "1000000000", cwd=models) as terminal:
        terminal.until("loaded in")
        terminal.press("\x03")
        text, code = terminal.rest()
    assert code == 130
    assert text.endswith("finalize\nshmserve run: interrupted\n")
