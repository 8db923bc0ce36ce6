"""The processes that the broker starts, workers and gateways: what of its environment they get, what they write, and
how they have ended.

The rule of the file: what a child writes is only words; whatever it is, it becomes lines that can be shown.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

from shmserve.broker.logs import printable

LINE_BYTES = 4096
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
    """What a child writes: it has the end `written`, which whoever starts it closes. `levels`: how a line begins that
    has a level, and what the log calls it."""

    def __init__(self, loop: Any, levels: Mapping[str, str]) -> None:
        self._loop = loop
        self._levels = levels
        self._partial = b""
        self.descriptor, self.written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.written, True)

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """Those that have come: the whole line, its level, and what it says apart from that."""
        try:
            data = os.read(self.descriptor, 65536)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self.descriptor)
            data = b"\n" if self._partial else b""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        for line in lines:
            text = printable(line[:LINE_BYTES].decode("utf-8", "backslashreplace"))
            word, colon, rest = text.partition(": ")
            level = self._levels.get(word, "") if colon else ""
            yield (text, level, rest) if level else (text, "info", text)

    def close(self) -> None:
        self._loop.remove_reader(self.descriptor)
        os.close(self.descriptor)
