"""What a worker says to the operator, in lines on stderr. The rule: what is said as one line is one line."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path

from shmserve.errors import ServeError

_HERE = Path(__file__).parents[1]
_OURS = (*{f"{_HERE}/", f"{_HERE.resolve()}/"}, "<frozen importlib")
"""How the file names of frames begin that lie between the server and the model. The package may be behind a link."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PATH = re.compile(r"(?<![\w.>])/(?:[\w.+ -]+/)+([\w.+-]+\.\w+)")
TRACE_LIMIT = 16384
"""The longest traceback that is sent to the broker."""
TEXT_LIMIT = 4096
"""The longest error text that goes to a caller."""


def say(text: str, level: str = "error") -> None:
    """Writes to the descriptor itself: a model may have put anything in the place of sys.stderr."""
    line = f"{level}: {escaped(text)}\n".encode(errors="backslashreplace")
    try:
        os.write(2, line)
    except OSError:
        return  # nobody reads what is said: there is nowhere left to say it


def say_trace(what: str, error: BaseException) -> None:
    """What went wrong and where, a line for each line of the trace."""
    say(what)
    for line in trace_of(error):
        say(f"  {line}")


def trace_of(error: BaseException) -> list[str]:
    """The lines of a traceback, without the frames of this package: those of the model and its libraries are left.
    Where none is left and the error does not say all in its text, the fault is ours, and all frames are kept."""
    found = traceback.TracebackException.from_exception(error)
    parts = found.format()
    if not _cut(found):
        if isinstance(error, (ServeError, SyntaxError)):
            parts = found.format_exception_only()
        else:
            parts = traceback.TracebackException.from_exception(error).format()
    return [line for part in parts for line in part.rstrip("\n").split("\n")]


def _cut(trace: traceback.TracebackException) -> bool:
    """Removes our frames, also from the exceptions that led to this one. True: a frame is left."""
    frames = [frame for frame in trace.stack if not frame.filename.startswith(_OURS)]
    trace.stack = traceback.StackSummary.from_list(frames)
    causes = [cause for cause in (trace.__cause__, trace.__context__) if cause is not None]
    left = [_cut(cause) for cause in causes]
    return bool(frames) or any(left)


def escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def public(text: str, model_dir: str = "") -> str:
    """A text for callers: without the places of files, and not longer than they need."""
    if model_dir:
        text = text.replace(model_dir, "<model>")
    text = _PATH.sub(r"\1", text)
    return text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + f"... ({len(text)} characters in all)"
