"""`shmserve run` in a terminal: breakpoints, the debugger where a model fails, and Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import re
import select
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import pytest

from tests.support.workers.models.run_models import END_S, command, environment

pytestmark = pytest.mark.process


class Conversation:
    """A command on a pseudo-terminal of the test, which is also the command's controlling terminal."""

    def __init__(self, *words: str, cwd: Path, before: Sequence[str] = ()) -> None:
        """`before`: a command that ends by running the words that follow it."""
        self.master, slave = os.openpty()
        self.process = subprocess.Popen(
            [*before, *command(words)],
            cwd=cwd,
            env=environment(),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.text = ""

    def until(self, text: str) -> str:
        """The output up to and including this text."""
        while text not in self.text:
            assert self._read(), f"never said {text!r}:\n{self.text}"
        shown, _, self.text = self.text.partition(text)
        return shown + text

    def say(self, line: str) -> None:
        os.write(self.master, f"{line}\n".encode())

    def end(self) -> tuple[str, int]:
        while self._read():
            pass
        return self.text, self.process.wait(END_S)

    def _read(self) -> bool:
        assert select.select([self.master], [], [], END_S)[0], f"nothing was said for {END_S} s:\n{self.text}"
        try:
            data = os.read(self.master, 65536)
        except OSError:  # the other end is closed
            return False
        self.text += data.decode().replace("\r", "")
        return bool(data)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


PROMPT = "(Pdb) "


def test_a_breakpoint_opens_the_debugger_which_continues_or_ends_the_run(models: Path) -> None:
    with Conversation("greeter", "-i", "x=1002,2", cwd=models) as terminal:
        assert "greeter/1/model.py(" in terminal.until(PROMPT)
        terminal.say("p first + 1")
        assert "1003.0" in terminal.until(PROMPT)
        terminal.say("c")
        text, code = terminal.end()
        assert code == 0
        assert "2004 4" in text
    with Conversation("greeter", "-i", "x=1002,2", "--pdb", cwd=models) as terminal:
        terminal.until(PROMPT)
        terminal.say("q")
        text, code = terminal.end()
    assert code == 1
    assert "Traceback" not in text
    assert text.splitlines()[-2:] == ["finalize", "shmserve run: the debugger was left in the middle of the model"]


def test_pdb_stops_where_the_model_raised_or_failed_to_load(models: Path) -> None:
    """With --json, which keeps standard output for the document."""
    with Conversation("greeter", "-i", "x=1001,2", "--pdb", "--json", cwd=models) as terminal:
        shown = terminal.until(PROMPT)
        assert "LookupError: no luck today" in shown
        assert re.search(r"> .*/greeter/1/model.py\(\d+\)one\(\)\n-> raise LookupError", shown)
        terminal.say("p secret")
        assert "42" in terminal.until(PROMPT)
        terminal.say("q")
        text, code = terminal.end()
    assert code == 1
    assert text.splitlines()[-1].endswith("message: LookupError: no luck today")
    with Conversation("broken", "--random", "--pdb", cwd=models) as terminal:
        assert re.search(r"> .*/broken/1/model.py\(\d+\)initialize\(\)", terminal.until(PROMPT))
        terminal.say("q")
        assert terminal.end()[1] == 1


def test_the_debugger_uses_the_terminal_if_standard_input_is_a_pipe(models: Path, tmp_path: Path) -> None:
    """Like `cat request.json | shmserve run greeter -`: there is a terminal, but standard input is a pipe."""
    request = tmp_path / "request.json"
    request.write_text('{"inputs": {"x": [1002, 2]}}')
    piped = f"import os, sys; os.dup2(os.open({str(request)!r}, os.O_RDONLY), 0); os.execv(sys.argv[1], sys.argv[1:])"
    with Conversation("greeter", "-", cwd=models, before=[sys.executable, "-c", piped]) as terminal:
        terminal.until(PROMPT)
        terminal.say("p first")
        assert "1002.0" in terminal.until(PROMPT)
        terminal.say("c")
        assert terminal.end()[1] == 0


def test_an_interrupt_finalizes_the_model(models: Path) -> None:
    with Conversation("greeter", "--random", "--repeat", "1000000000", cwd=models) as terminal:
        terminal.until("loaded in")
        os.write(terminal.master, b"\x03")
        text, code = terminal.end()
    assert code == 130
    assert text.endswith("finalize\nshmserve run: interrupted\n")
