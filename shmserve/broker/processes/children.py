"""The processes that the broker starts, workers and gateways: what of its environment they get, what they write, and
how they have ended.

The rule of the file: what a child writes is only words; whatever it is, it becomes lines that can be shown.
"""

from __future__ import annotations

import os
import re
import signal
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shmserve.broker.observability.log_throttle import WINDOW_S, Rate, Throttle
from shmserve.broker.observability.logs import printable

LINE_BYTES = 4096
"""The longest line that is logged."""
READ_BYTES = 16384
"""So much is read at a time: clients are served in between."""
PIPE_BYTES = 65536
"""What a pipe holds."""
TAIL_LINES = 20
"""The last lines of a child's output, shown to operators when it has ended."""
FATAL = "Fatal Python error"
"""How the interpreter begins to report a signal such as SIGSEGV."""
_WORKERS = Path(__file__).parents[2] / "workers"
_PLACES = sorted({os.fsencode(place) for place in (_WORKERS, _WORKERS.resolve())})
_OUR_FRAME = re.compile(rb'  File "(?:<frozen runpy>|(?:%s)/[^"]*)", line \d+ in ' % b"|".join(map(re.escape, _PLACES)))
"""A line of such a report (not of a traceback) about a frame that is not the model's."""
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "TZ", "VIRTUAL_ENV")


def environment(*prefixes: str) -> dict[str, str]:
    """What of ours a child gets, variables that begin so among it. Not more: it may hold the server's secrets."""
    return {key: value for key, value in os.environ.items() if key in _PASSED_ON or key.startswith(prefixes)}


def ended_with(code: int) -> str:
    """`code` as Popen has it: below 0 is a signal."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name if -code in signal.valid_signals() else -code}"


class Output:
    """What a child writes, limited and logged by `say(level, text)`. The child has the end `written`, which its parent
    closes. `levels`: how a line begins that has a level, and what the log calls it; other lines are info.

    Invariant: the pipe is always drained, whatever the log takes, so that no child blocks on what it prints.
    """

    def __init__(
        self, loop: Any, levels: Mapping[str, str], say: Callable[[str, str], None], rate: Rate | None = None
    ) -> None:
        self._loop = loop
        self._levels = levels
        self._say = say
        self._throttle = Throttle(rate or Rate())
        self._timer: Any = None
        self._partial = b""
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self.descriptor, self.written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.written, True)
        loop.add_reader(self.descriptor, self.read)

    @property
    def tail(self) -> list[str]:
        """The last lines, logged or not."""
        return [_text(line) for line in self._tail]

    def last_words(self) -> str:
        """The last line that is not empty, without its level."""
        return next((self._parse(line)[1] for line in reversed(self.tail) if line.strip()), "")

    def read(self) -> None:
        """One piece of what has come."""
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self.descriptor)
        if self._throttle.is_full(self._loop.time()) and (count := data.count(b"\n")) > TAIL_LINES:
            # Nothing of it is logged: to split all of it would take the time of requests.
            head, *lines, partial = data.rsplit(b"\n", TAIL_LINES + 1)
            self._throttle.drop(count - TAIL_LINES, len(self._partial) + len(head) + 1)
            self._partial = partial[:LINE_BYTES]
            self._admit(lines)
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        if self._partial and (len(self._partial) > LINE_BYTES or not data):
            lines.append(self._partial)
            self._partial = b""
        self._admit(lines)

    def _admit(self, lines: list[bytes]) -> None:
        lines = [line for line in lines if not (line[:8] == b'  File "' and _OUR_FRAME.match(line))]
        self._tail.extend(line[:LINE_BYTES] for line in lines[-TAIL_LINES:])
        for found in self._throttle.admit(lines, self._loop.time()):
            self._log(found)
        if self._throttle.pending and self._timer is None:
            self._timer = self._loop.call_later(WINDOW_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for notice in self._throttle.flush():
            self._log(notice)

    def _log(self, found: bytes | str) -> None:
        level, text = ("warning", found) if isinstance(found, str) else self._parse(_text(found))
        self._say(level, text)

    def _parse(self, line: str) -> tuple[str, str]:
        """Its level, and what it says apart from that."""
        word, colon, rest = line.partition(": ")
        level = self._levels.get(word, "") if colon else ""
        return (level, rest) if level else ("error" if word == FATAL else "info", line)

    def finish(self) -> None:
        """The child has ended: what it wrote last is logged whatever the limit, as it may say why."""
        for _ in range(PIPE_BYTES // READ_BYTES):
            self.read()
        if self._partial:  # a process that it started keeps the pipe open
            partial, self._partial = self._partial, b""
            self._admit([partial])
        for notice in self._throttle.flush():
            self._log(notice)
        dropped = min(self._throttle.trailing, len(self._tail))
        for line in list(self._tail)[len(self._tail) - dropped :]:
            self._log(line)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self.descriptor)
        os.close(self.descriptor)


def _text(line: bytes) -> str:
    return printable(line[:LINE_BYTES].decode("utf-8", "backslashreplace"))
