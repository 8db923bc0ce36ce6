"""The server's log: which levels, in which form, to stderr or to a file.

The rule of the file: a record is one line that begins with its time, whatever is in it; nothing can forge another.
Only a traceback of our own follows it, or what a worker wrote last, line by line and indented. As JSON there is
nothing but the line.
"""

from __future__ import annotations

import argparse
import json
import logging
import logging.handlers
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMATS = ("default", "ISO8601", "json")
INDENT = "    "
LAST_WORDS = "last_words"
"""The field with the lines that a worker wrote before it ended."""

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
_log = logging.getLogger("shmserve")


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


def say(level: str, text: str, fields: Mapping[str, Any] | None = None) -> None:
    """A record about what `fields` name: model, version, instance, client and more, for programs."""
    _log.log(_LEVELS[level], "%s", text, extra={"fields": fields} if fields else None)


def printable(text: str) -> str:
    """A line that cannot forge another: control characters are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


class Formatter(logging.Formatter):
    """`default`: local time, level, message. `ISO8601`: the same with the time in UTC. `json`: an object, for programs,
    with time (in UTC), level, message, and what the record is about."""

    def __init__(self, form: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._json = form == "json"
        if form != "default":
            self.converter = time.gmtime
            self.default_time_format = "%Y-%m-%dT%H:%M:%S"
            self.default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record)
        fields: Mapping[str, Any] = getattr(record, "fields", None) or {}
        traceback = self.formatException(record.exc_info) if record.exc_info else ""
        if record.stack_info:
            traceback += f"\n{record.stack_info}"
        if self._json:
            found = {"time": record.asctime, "level": record.levelname.lower(), "message": record.message}
            if traceback:
                found["traceback"] = traceback
            return json.dumps(found | {name: value for name, value in fields.items() if name not in found})
        lines = [printable(self.formatMessage(record))]
        for more in (traceback, fields.get(LAST_WORDS, "")):
            lines += [INDENT + printable(line) for line in more.splitlines()]
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
