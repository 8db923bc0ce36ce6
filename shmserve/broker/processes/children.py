"""Environment, output and exit codes of the broker's child processes: workers and gateways.

Invariant: output of children is untrusted and is escaped, so that each logged line is printable.
"""

from __future__ import annotations

import os
import re
import signal
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shmserve.broker.observability.log_throttle import WINDOW_S, Throttle
from shmserve.broker.observability.logs import printable

LINE_BYTES = 4096
"""Maximum length of a logged line."""
READ_BYTES = 16384
"""Maximum size of a read, so that a child with a lot of output does not block the event loop."""
PIPE_BYTES = 65536
"""Default capacity of a pipe, and thus the maximum that is unread when a child has exited."""
TAIL_LINES = 20
"""Number of last lines to keep, to report them when the child exits."""
FATAL = "Fatal Python error"
"""Start of the faulthandler report that the interpreter writes on a fatal signal such as SIGSEGV."""
_WORKERS = Path(__file__).parents[2] / "workers"
_PLACES = sorted({os.fsencode(place) for place in (_WORKERS, _WORKERS.resolve())})
_OUR_FRAME = re.compile(rb'  File "(?:<frozen runpy>|(?:%s)/[^"]*)", line \d+ in ' % b"|".join(map(re.escape, _PLACES)))
"""Matches a faulthandler frame in the server's own code. Frames of ordinary tracebacks have another format."""
_INHERITED = (
    "CACHE_DIRECTORY",
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHONPATH",
    "TMPDIR",
    "TZ",
    "VIRTUAL_ENV",
    "XDG_CACHE_HOME",
)


def environment(*prefixes: str) -> dict[str, str]:
    """The environment of a child: a fixed list of variables, and variables with one of the prefixes. Others are
    omitted, as they may contain secrets."""
    return {key: value for key, value in os.environ.items() if key in _INHERITED or key.startswith(prefixes)}


def describe_exit(code: int) -> str:
    """Describes a return code of Popen, which is negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name if -code in signal.valid_signals() else -code}"


class LineSplitter:
    """Splits output that arrives in pieces into lines. Keeps an incomplete last line, up to LINE_BYTES, for the next
    piece."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._partial = (self._partial + data).split(b"\n")
        return lines + self._overlong()

    def feed_tail(self, data: bytes, count: int) -> tuple[list[bytes], int, int]:
        """Like `feed`, but returns only about the last `count` lines, and the number and size of the lines before them.
        Splitting those too would take as long as a thousand requests."""
        skipped = data.count(b"\n") - count
        if skipped <= 0:
            return self.feed(data), 0, 0
        head, *lines, partial = data.rsplit(b"\n", count + 1)
        size = len(self._partial) + len(head) + 1
        self._partial = partial
        return lines + self._overlong(), skipped, size

    def end(self) -> list[bytes]:
        """The incomplete last line, if any."""
        partial, self._partial = self._partial, b""
        return [partial] if partial else []

    def _overlong(self) -> list[bytes]:
        return self.end() if len(self._partial) > LINE_BYTES else []


class Output:
    """A pipe for a child's output, which is rate-limited and logged with `log_record(level, text)`.

    `write_end` is the child's; the caller closes it in this process after starting the child. `levels` maps the
    prefix of a line to its log level; the default level is info. `folders` maps directories that the child uses to
    those that the log names instead.

    Invariant: the pipe is always read, even if lines exceed the rate limit, so that no child blocks on its output.
    """

    def __init__(
        self,
        loop: Any,
        levels: Mapping[str, str],
        log_record: Callable[[str, str], None],
        folders: Mapping[Path, Path] = MappingProxyType({}),
    ) -> None:
        self._loop = loop
        self._levels = levels
        self._log_record = log_record
        self._folders = [(os.fsencode(f"{used}/"), os.fsencode(f"{named}/")) for used, named in folders.items()]
        self._throttle = Throttle()
        self._timer: Any = None
        self._lines = LineSplitter()
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self.read_end, self.write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.write_end, True)
        loop.add_reader(self.read_end, self.read)

    @property
    def tail(self) -> list[str]:
        """The last lines, including those that the rate limit dropped."""
        return [_text(line) for line in self._tail]

    def last_line(self, start: str = "") -> str:
        """The last non-empty line, without its level prefix. Prefers the last line that begins with `start`."""
        lines = [self._parse(line)[1] for line in reversed(self.tail) if line.strip()]
        return next((line for line in lines if line.startswith(start)), lines[0] if lines else "")

    def read(self) -> None:
        """Reads up to READ_BYTES and logs the lines."""
        try:
            data = os.read(self.read_end, READ_BYTES)
        except BlockingIOError:
            return
        if self._throttle.is_full(self._loop.time()):  # all lines are dropped: split only those for the tail
            lines, skipped, size = self._lines.feed_tail(data, TAIL_LINES)
            if skipped:
                self._throttle.drop(skipped, size)
        else:
            lines = self._lines.feed(data)
        if not data:
            self._loop.remove_reader(self.read_end)
            lines += self._lines.end()
        self._admit(lines)

    def _admit(self, lines: list[bytes]) -> None:
        lines = [line for line in lines if not (line[:8] == b'  File "' and _OUR_FRAME.match(line))]
        for used, named in self._folders:
            lines = [line.replace(used, named) for line in lines]
        self._tail.extend(line[:LINE_BYTES] for line in lines[-TAIL_LINES:])
        for line_or_notice in self._throttle.admit(lines, self._loop.time()):
            self._log(line_or_notice)
        if self._throttle.pending and self._timer is None:
            self._timer = self._loop.call_later(WINDOW_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for notice in self._throttle.flush():
            self._log(notice)

    def _log(self, entry: bytes | str) -> None:
        """Logs a line, or a notice of the throttle (str)."""
        level, text = ("warning", entry) if isinstance(entry, str) else self._parse(_text(entry))
        self._log_record(level, text)

    def _parse(self, line: str) -> tuple[str, str]:
        """Splits a line into its log level and its text."""
        word, colon, rest = line.partition(": ")
        level = self._levels.get(word, "") if colon else ""
        return (level, rest) if level else ("error" if word == FATAL else "info", line)

    def finish(self) -> None:
        """Reads the remaining output; call when the child has exited. Logs the last lines even if they exceed the rate
        limit, as they may explain the exit."""
        for _ in range(PIPE_BYTES // READ_BYTES):
            self.read()
        self._admit(self._lines.end())  # `read` sees no end of file if a process of the child holds the pipe open
        for notice in self._throttle.flush():
            self._log(notice)
        dropped = min(self._throttle.trailing, len(self._tail))
        for line in list(self._tail)[len(self._tail) - dropped :]:
            self._log(line)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self.read_end)
        os.close(self.read_end)


def _text(line: bytes) -> str:
    return printable(line[:LINE_BYTES].decode("utf-8", "backslashreplace"))
