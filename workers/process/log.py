"""Log lines for the operator on stderr, and error texts for callers. Invariant: one message is one line."""

from __future__ import annotations

import os
import re
import sys
import traceback
from pathlib import Path

from shmserve.errors import ServeError

_HERE = Path(__file__).parents[1]
_IMPORTER = "repo/files/python_file.py"
_OURS = (
    *{f"{_HERE}/", f"{_HERE.resolve()}/", f"{_HERE.parent / _IMPORTER}", f"{_HERE.resolve().parent / _IMPORTER}"},
    "<frozen importlib",
)
"""Path prefixes of frames between the server and the model. The package may be reached through a symlink."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PATH = re.compile(r"(?<![\w.>])/(?:[\w.+ -]+/)+([\w.+-]+\.\w+)")
_PACKAGES = {"cv2": "opencv-python-headless", "joblib": "scikit-learn", "PIL": "pillow", "sklearn": "scikit-learn"}
"""Module -> the package that provides it, if the names differ."""
TRACE_LIMIT = 16384
"""Maximum length of a traceback sent to the broker, in characters."""
TEXT_LIMIT = 4096
"""Maximum length of an error text for callers, in characters."""


def log_message(text: str, level: str = "error") -> None:
    """Writes to descriptor 2 directly, because a model may have replaced sys.stderr."""
    line = f"{level}: {escaped(text)}\n".encode(errors="backslashreplace")
    try:
        os.write(2, line)
    except OSError:
        return  # stderr is closed: there is nowhere else to log


def log_traceback(what: str, error: BaseException) -> None:
    log_message(what)
    for line in trace_of(error):
        log_message(f"  {line}")


def trace_of(error: BaseException) -> list[str]:
    """Returns the lines of a traceback without this package's frames, so that those of the model and its libraries
    remain. If none remains and the error is neither a ServeError nor a SyntaxError, the bug is in this package: keeps
    all frames."""
    trace = traceback.TracebackException.from_exception(error)
    parts = trace.format()
    if not _cut(trace):
        if isinstance(error, (ServeError, SyntaxError)):
            parts = trace.format_exception_only()
        else:
            parts = traceback.TracebackException.from_exception(error).format()
    return [line for part in parts for line in part.rstrip("\n").split("\n")]


def _cut(trace: traceback.TracebackException) -> bool:
    """Removes this package's frames, also from chained exceptions. Returns whether a frame remains."""
    frames = [frame for frame in trace.stack if not frame.filename.startswith(_OURS)]
    trace.stack = traceback.StackSummary.from_list(frames)
    causes = [cause for cause in (trace.__cause__, trace.__context__) if cause is not None]
    remaining = [_cut(cause) for cause in causes]
    return bool(frames) or any(remaining)


def text_of(error: BaseException) -> str:
    """Returns the text of an error, whatever its class does to make it."""
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} without a readable text>"


def missing_module(error: ModuleNotFoundError) -> str:
    """Returns what to do about a module that a model or backend imports. The parts of an installed package are reported
    as such, because installing it again would not help. Without the name of a module, the text of the error remains:
    some libraries raise it themselves, with advice."""
    top = (error.name or "").partition(".")[0]
    if not top:
        return f"it imports a package that is not installed: {error}"
    if top in sys.modules:
        return f"the installed version of '{top}' lacks what it imports ({error}); install a version that fits it"
    package = f"the package {_PACKAGES[top]}" if top in _PACKAGES else f"the package that provides '{top}'"
    return (
        f"it imports a package that is not installed ({error}); install {package} for the server, or in an environment "
        "that EXECUTION_ENV_PATH names"
    )


def escaped(text: str) -> str:
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def public(text: str, model_dir: str = "") -> str:
    """Returns a text for callers: without paths, and shortened to TEXT_LIMIT characters."""
    if model_dir:
        text = text.replace(model_dir, "<model>")
    text = _PATH.sub(r"\1", text)
    return text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + f"... ({len(text)} characters in all)"
