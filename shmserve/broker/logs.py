"""The server's log: which levels, in which form, to stderr or to a file.

The rule of the file: a record is one line that begins with its time, whatever is in it; nothing can forge another.
Only the lines of a traceback of our own follow it, and they are indented.
"""

from __future__ import annotations

import argparse
import logging
import logging.handlers
import sys
import time
from pathlib import Path

FORMATS = ("default", "ISO8601")
INDENT = "    "


def set_up(settings: argparse.Namespace) -> None:
    """Replaces what was set up before. Raises OSError if the file cannot be written.

    A file is appended to, and opened anew when it has been renamed or removed, as log rotation does it.
    """
    handler: logging.Handler
    if settings.log_file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        path = Path(settings.log_file)
        handler = logging.handlers.WatchedFileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(Formatter(settings.log_format))
    levels = _levels(settings)
    handler.addFilter(lambda record: record.levelno in levels)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(min(levels, default=logging.CRITICAL + 1))


def printable(text: str) -> str:
    """A line that cannot forge another: control characters are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


class Formatter(logging.Formatter):
    """`default`: local time, level, message. `ISO8601`: the same with the time in UTC, for programs."""

    def __init__(self, form: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        if form == "ISO8601":
            self.converter = time.gmtime
            self.default_time_format = "%Y-%m-%dT%H:%M:%S"
            self.default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record)
        lines = [printable(self.formatMessage(record))]
        if record.exc_info:
            lines += [INDENT + printable(line) for line in self.formatException(record.exc_info).splitlines()]
        if record.stack_info:
            lines += [INDENT + printable(line) for line in record.stack_info.splitlines()]
        return "\n".join(lines)


def _levels(settings: argparse.Namespace) -> frozenset[int]:
    wanted = {
        logging.DEBUG: settings.log_verbose > 0,
        logging.INFO: settings.log_info,
        logging.WARNING: settings.log_warning,
        logging.ERROR: settings.log_error,
        logging.CRITICAL: settings.log_error,
    }
    return frozenset(level for level, shown in wanted.items() if shown)
