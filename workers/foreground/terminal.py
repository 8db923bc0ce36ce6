"""The terminal of a model in the foreground: its output, and the debugger.

Invariant: with JSON, standard output contains only the document; everything else goes to standard error.
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
QUIT = "the debugger was quit while the model was running"


class Terminal:
    def __init__(self, as_json: bool, debug: bool) -> None:
        self.quit = ""
        """Set if the user quit the debugger, which fails the run."""
        self._debug = debug
        self._json = as_json
        self._out = 1
        if as_json:
            self._out = os.dup(1)
            os.dup2(2, 1)
        if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(line_buffering=True)  # keeps the order of output lines, also in a file

    def print(self, text: str) -> None:
        """Prints text for users; not with JSON."""
        if not self._json:
            print(text)

    def document(self, value: Any) -> None:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        with open(self._out, "w", closefd=False) as file:
            print(text, file=file)

    def restore_stdout(self) -> None:
        """Restores standard output for the program that replaces this one."""
        os.dup2(self._out, 1)

    def print_failure(self, text: str, code: int) -> int:
        """Prints the last line of a failed run, and returns its exit code."""
        print(f"shmserve run: {text}", file=sys.stderr)
        return code

    def reopen_stdin(self) -> None:
        """Reopens standard input on the terminal, if there is one, for the debugger: it was read as a document."""
        try:
            terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return  # the debugger reads the end of input
        os.dup2(terminal, 0)
        os.close(terminal)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (for the life of the process)

    # ------------------------------------------------------------------------------------ failures

    def failure(self, error: Exception) -> str:
        """Prints the traceback of an exception, if it is the model's, and returns its text."""
        self.trace("", error)
        if self.quit:
            return self.quit
        return str(error) if isinstance(error, ServeError) else f"{type(error).__name__}: {error}"

    def trace(self, what: str, error: BaseException) -> None:
        """Prints the traceback from the model's first frame on, and starts the debugger there if requested."""
        if isinstance(error, bdb.BdbQuit):
            self.quit = QUIT
            return
        first_frame = _of_the_model(error.__traceback__)
        if first_frame is None and isinstance(error, ServeError):
            return  # its text is complete
        if first_frame is None and not isinstance(error, SyntaxError):  # its text has the location
            first_frame = error.__traceback__
        if sys.stdout is not None:
            sys.stdout.flush()
        traceback.print_exception(type(error), error, first_frame)
        if self._debug and first_frame is not None:
            import pdb  # slow to import and rarely needed

            print("debugger at the line that raised the error: w prints the stack, u and d move along it, q quits")
            pdb.post_mortem(first_frame)


def _of_the_model(trace: TracebackType | None) -> TracebackType | None:
    """Returns the traceback from the model's first frame on, or None if there is none."""
    while trace is not None and _is_ours(trace.tb_frame.f_globals.get("__name__", "")):
        trace = trace.tb_next
    return trace


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in _OURS
