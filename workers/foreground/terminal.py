"""The terminal of a model that runs in the foreground: what it is shown, and the debugger.

The rule: with JSON, standard output is the document's alone, and everything else goes to standard error.
"""

from __future__ import annotations

import bdb
import json
import os
import sys
import traceback
from types import TracebackType
from typing import Any

from shmserve.errors import ServeError

_OURS = frozenset(
    {"shmserve", "__main__", "contextlib", "importlib", "_frozen_importlib", "_frozen_importlib_external"}
)
"""Packages whose frames lie between the command and the model."""
QUIT = "the debugger was left in the middle of the model"


class Terminal:
    def __init__(self, as_json: bool, debug: bool) -> None:
        self.quit = ""
        """Says so where somebody has left the debugger, which fails the run."""
        self._debug = debug
        self._json = as_json
        self._out = 1
        if as_json:
            self._out = os.dup(1)
            os.dup2(2, 1)
        if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(line_buffering=True)  # in the order in which it happens, also in a file

    def print(self, text: str) -> None:
        """For people, not for programs."""
        if not self._json:
            print(text)

    def document(self, value: Any) -> None:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        with open(self._out, "w", closefd=False) as file:
            print(text, file=file)

    def leave(self) -> None:
        """To another program in this process, which finds it as it was."""
        os.dup2(self._out, 1)

    def end(self, text: str, code: int) -> int:
        """The last line of a run that did not go well."""
        print(f"shmserve run: {text}", file=sys.stderr)
        return code

    def read_again(self) -> None:
        """Standard input was a document that is read now: a debugger reads from the terminal, if there is one."""
        try:
            terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return  # it finds the end of its input
        os.dup2(terminal, 0)
        os.close(terminal)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (for the life of the process)

    # ------------------------------------------------------------------------------------ what fails

    def failure(self, error: Exception) -> str:
        """Shows the trace of an exception, if it is the model's, and gives its text."""
        self.trace("", error)
        if self.quit:
            return self.quit
        return str(error) if isinstance(error, ServeError) else f"{type(error).__name__}: {error}"

    def trace(self, what: str, error: BaseException) -> None:
        """The trace of an exception from where the model begins, and the debugger there, if it is wished."""
        if isinstance(error, bdb.BdbQuit):
            self.quit = QUIT
            return
        found = _of_the_model(error.__traceback__)
        if found is None and isinstance(error, ServeError):
            return  # its text says all
        if found is None and not isinstance(error, SyntaxError):  # which has the place in its text
            found = error.__traceback__
        if sys.stdout is not None:
            sys.stdout.flush()
        traceback.print_exception(type(error), error, found)
        if self._debug and found is not None:
            import pdb  # slow to import, and rarely needed

            print("in the debugger, where it was raised: w shows the way there, u and d go along it, q goes on")
            pdb.post_mortem(found)


def _of_the_model(trace: TracebackType | None) -> TracebackType | None:
    """The trace from the model's first line on. None where all of it is ours."""
    while trace is not None and _is_ours(trace.tb_frame.f_globals.get("__name__", "")):
        trace = trace.tb_next
    return trace


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in _OURS
