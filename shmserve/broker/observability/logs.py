"""The server's log: levels, formats, and the handler that writes to stderr or a file.

Invariant: regardless of its text, a record is one line that begins with its time, so that no record can be forged. Only
the indented lines of a traceback follow it; JSON has no further lines. If the log cannot be written (disk full, reader
gone), logging does not raise, print tracebacks or block: one notice reports the beginning and one the end.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import select
import stat
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from shmserve.broker.observability.log_throttle import repeated
from shmserve.broker.observability.recent_records import RecentRecords

FORMATS = ("default", "ISO8601", "json")
UNESCAPED = "TRITON_SERVER_ESCAPE_LOG_MESSAGES"
"""Triton's environment variable; 0 disables escaping of messages."""
INDENT = "    "
TRACEBACK = "traceback"
"""Name of the field that contains a model's traceback."""

_WAIT_S = 0.1
"""How long to wait for a pipe, socket or terminal to accept a record before the record is lost."""
_WAIT_SHARE = 0.1
"""Maximum share of the process's time spent on such waits."""
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
_log = logging.getLogger("shmserve")
_TRACEBACKS = logging.Formatter()


def set_up(settings: argparse.Namespace, recent: RecentRecords | None = None) -> None:
    """Replaces the previous setup. `recent` also gets the records. Raises OSError if the file cannot be opened."""
    path = Path(settings.log_file) if settings.log_file is not None else None
    triton = settings.triton_compatible and settings.log_format != "json"
    levels = _levels(settings)
    if settings.triton_compatible and path is None:  # Triton writes these to stdout
        low = frozenset({logging.DEBUG, logging.INFO})
        handlers = {LogFileHandler(None, recent, 1): levels & low, LogFileHandler(None, recent): levels - low}
    else:
        handlers = {LogFileHandler(path, recent): levels}
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    for handler, shown in handlers.items():
        handler.setFormatter((TritonFormatter if triton else Formatter)(settings.log_format))
        handler.addFilter(partial(_is_shown, shown))
        root.addHandler(handler)
    root.setLevel(min(levels, default=logging.CRITICAL + 1))


def _is_shown(levels: frozenset[int], record: logging.LogRecord) -> bool:
    return record.levelno in levels


def flush() -> None:
    """Logs the count of collapsed repeats. Call it periodically."""
    for handler in logging.getLogger().handlers:
        handler.flush()


class _Outage(Struct):
    """A period in which the log cannot be written."""

    began: float
    reason: str
    lost: int = 0


class LogFileHandler(logging.Handler):
    """Appends to a file, which it reopens after a rename or removal (log rotation), or writes to stderr or stdout.
    Consecutive identical records are counted instead of repeated."""

    def __init__(self, path: Path | None, recent: RecentRecords | None, descriptor: int = 2) -> None:
        """`descriptor`: where to write without a path."""
        super().__init__()
        self._recent = recent
        self._path = path.absolute() if path is not None else None
        self._descriptor = descriptor
        self._open()
        self._last: tuple[int, str] | None = None
        self._last_fields: Mapping[str, Any] = {}
        self._repeats = 0
        self._outage: _Outage | None = None
        self._no_wait_until = 0.0
        self._torn = False
        """The last record was written only partly."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            key = None if record.exc_info else (record.levelno, record.getMessage())
            if key is not None and key == self._last:
                self._repeats += 1
                return
            self.flush()
            self._last, self._last_fields = key, _fields(record)
            self._write(record)
        except Exception:  # a bug in formatting
            self.handleError(record)

    def flush(self) -> None:
        self.acquire()
        try:
            if self._repeats and self._last is not None:
                count, self._repeats = self._repeats, 0
                fields = {name: value for name, value in self._last_fields.items() if name != TRACEBACK}
                self._write(_record(self._last[0], f"{repeated(count)}: {self._last[1]}", fields))
        finally:
            self.release()

    def close(self) -> None:
        self.flush()
        if self._path is not None and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        super().close()

    # ------------------------------------------------------------------------------------ the target

    def _open(self) -> None:
        """Opens the target. Raises OSError."""
        if self._path is not None:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if self._descriptor > 2:
                os.close(self._descriptor)
            self._descriptor = descriptor
        self._poll: select.poll | None = None
        try:
            state = os.fstat(self._descriptor)
        except OSError:  # stderr is closed: writing to it fails
            return
        self._file_id = state.st_dev, state.st_ino
        if not stat.S_ISREG(state.st_mode):
            self._poll = select.poll()
            self._poll.register(self._descriptor, select.POLLOUT)

    def _follow(self) -> None:
        """Reopens the file if its path no longer refers to it."""
        if self._path is None:
            return
        try:
            state = os.stat(self._path)
            moved = (state.st_dev, state.st_ino) != self._file_id
        except FileNotFoundError:
            moved = True
        if moved:
            self._open()

    def _write(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        self._keep(record)
        try:
            self._follow()
            if self._outage is not None:
                text = f"{self.format(self._over(self._outage))}\n{text}"
            self._put(f"{text}\n")
        except OSError as error:
            self._failed(error)
        else:
            self._outage = None

    def _keep(self, record: logging.LogRecord) -> None:
        if self._recent is not None:
            lines = [printable(line) for line in traceback_of(record).splitlines()]
            fields = {name: value for name, value in _fields(record).items() if name != TRACEBACK}
            self._recent.put(record, printable(record.getMessage()), "\n".join(lines), fields)

    def _put(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        if self._torn:
            data = b"\n" + data
        while data:
            if self._poll is None:
                written = os.write(self._descriptor, data)
            elif self._is_writable(self._poll):
                # After poll, a write of up to PIPE_BUF bytes does not block.
                written = os.write(self._descriptor, data[: select.PIPE_BUF])
            else:
                raise BlockingIOError(errno.EAGAIN, "the reader does not read")
            data = data[written:]
            self._torn = bool(data)

    def _is_writable(self, poll: select.poll) -> bool:
        began = time.monotonic()
        if poll.poll(0):
            return True
        if began < self._no_wait_until:
            return False
        writable = bool(poll.poll(_WAIT_S * 1000))
        ended = time.monotonic()
        self._no_wait_until = ended + (ended - began) / _WAIT_SHARE
        return writable

    def _failed(self, error: OSError) -> None:
        if self._outage is None:
            self._outage = _Outage(time.monotonic(), error.strerror or type(error).__name__)
            if self._path is not None:
                text = f"shmserve: cannot write the log: {self._outage.reason}; records are lost until it works again\n"
                with contextlib.suppress(OSError):
                    if select.select([], [2], [], 0)[1]:
                        os.write(2, text.encode())
        self._outage.lost += 1

    def _over(self, outage: _Outage) -> logging.LogRecord:
        seconds = time.monotonic() - outage.began
        text = f"could not write the log for {seconds:.1f} s ({outage.reason}); {outage.lost:,} record(s) were lost"
        return _record(logging.WARNING, text)


def _record(level: int, text: str, fields: Mapping[str, Any] | None = None) -> logging.LogRecord:
    record = logging.LogRecord(_log.name, level, __file__, 0, "%s", (text,), None)
    record.fields = fields
    return record


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    return getattr(record, "fields", None) or {}


def traceback_of(record: logging.LogRecord) -> str:
    """The traceback of an exception in the server or a model; empty if the record has none."""
    own = _TRACEBACKS.formatException(record.exc_info) if record.exc_info else _fields(record).get(TRACEBACK, "")
    return f"{own}\n{record.stack_info}" if record.stack_info else own


def log_record(level: str, text: str, fields: Mapping[str, Any] | None = None) -> None:
    """Logs a record. `fields`: model, version, instance, client and other values for programs that read the log."""
    _log.log(_LEVELS[level], "%s", text, extra={"fields": fields} if fields else None, stacklevel=2)


def printable(text: str) -> str:
    """Escapes control characters, so that text cannot forge a line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


class Formatter(logging.Formatter):
    """`default`: local time, level, message. `ISO8601`: the same with the time in UTC. `json`: an object with the time
    (UTC), level, message and fields of the record."""

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
        fields, traceback = _fields(record), traceback_of(record)
        if self._json:
            entry = {"time": record.asctime, "level": record.levelname.lower(), "message": record.message}
            if traceback:
                entry["traceback"] = traceback
            return json.dumps(entry | {name: value for name, value in fields.items() if name not in entry})
        lines = [self._line(record)]
        lines += [INDENT + printable(line) for line in traceback.splitlines()]
        return "\n".join(lines)

    def _line(self, record: logging.LogRecord) -> str:
        return printable(self.formatMessage(record))


class TritonFormatter(Formatter):
    """`default` and `ISO8601` in Triton's format, with the pid, the source location and the message as a JSON string,
    for programs that parse Triton's logs. Escaping can be disabled as in Triton."""

    def __init__(self, form: str) -> None:
        super().__init__(form)
        self._default = form == "default"
        self._escape = os.environ.get(UNESCAPED) != "0"

    def _line(self, record: logging.LogRecord) -> str:
        letter = "E" if record.levelno >= logging.ERROR else "W" if record.levelno == logging.WARNING else "I"
        moment = self.converter(record.created)
        if self._default:
            begin = f"{letter}{time.strftime('%m%d %H:%M:%S', moment)}.{int(record.created % 1 * 1e6):06}"
        else:
            begin = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', moment)} {letter}"
        message = record.message
        if self._escape:
            message = json.dumps(message, ensure_ascii=not message.isprintable())
        return f"{begin} {record.process} {record.filename}:{record.lineno}] {message}"


def _levels(settings: argparse.Namespace) -> frozenset[int]:
    wanted = {
        logging.DEBUG: settings.log_verbose > 0,
        logging.INFO: settings.log_info,
        logging.WARNING: settings.log_warning,
        logging.ERROR: settings.log_error,
        logging.CRITICAL: settings.log_error,
    }
    return frozenset(level for level, shown in wanted.items() if shown)
