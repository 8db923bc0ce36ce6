"""What a worker says to the operator, in lines on stderr. The rule: what is said as one line is one line."""

from __future__ import annotations

import os
import re
import traceback

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PATH = re.compile(r"(?<![\w.>])/(?:[\w.+ -]+/)+([\w.+-]+\.\w+)")
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
    for part in traceback.format_exception(error):
        for line in part.rstrip("\n").split("\n"):
            say(f"  {line}")


def escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def public(text: str, model_dir: str = "") -> str:
    """A text for callers: without the places of files, and not longer than they need."""
    if model_dir:
        text = text.replace(model_dir, "<model>")
    text = _PATH.sub(r"\1", text)
    return text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + f"... ({len(text)} characters in all)"
