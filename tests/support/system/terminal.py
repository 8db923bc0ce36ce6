"""A program on a pseudo-terminal: tests send keys and read the screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyte

from tests.support.patience import PATIENCE_S

_UNKNOWN_TO_PYTE = re.compile(rb"\x1b\[[<>=][\d;]*[a-zA-Z]|\x1b\[\?[\d;]*\$p|\x1b_[^\x1b]*\x1b\\")
"""Sequences that pyte would print: requests for the keyboard's protocol, and whether a mode is known."""


class Terminal:
    """The controlling terminal of the program. `environment`: variables of the program, in addition to those of this
    process that do not concern the terminal."""

    def __init__(
        self, command: Sequence[str], columns: int, rows: int, environment: dict[str, str], cwd: Path | None = None
    ) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._unread = ""
        self.raw = b""
        """The complete output."""
        self._stream = pyte.ByteStream(self.screen)
        self._rest = b""
        self._ours, theirs = os.openpty()
        _resize(theirs, columns, rows)
        drop = ("COLORTERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TERM_PROGRAM", "TEXTUAL")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
        variables = inherited | {"TERM": "xterm-256color"} | environment
        try:
            self.process = subprocess.Popen(
                command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, start_new_session=True, cwd=cwd,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )  # fmt: skip
        finally:
            os.close(theirs)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        _resize(self._ours, columns, rows)
        self.process.send_signal(signal.SIGWINCH)

    def wait_for(self, wanted: str | Callable[[str], object]) -> str:
        """Reads until the text is on the screen, or the function accepts it. Returns the screen."""
        accepts = (lambda text: wanted in text) if isinstance(wanted, str) else wanted
        end = time.monotonic() + PATIENCE_S
        while not accepts(self.text):
            left = end - time.monotonic()
            ready = left > 0 and select.select([self._ours], [], [], left)[0]
            assert ready, f"never shown: {wanted}\n{self.text}"
            assert self._read(), f"it ended, and never showed: {wanted}\n{self.text}"
        return self.text

    def until(self, text: str) -> str:
        """Reads the output, beginning after the last text, up to this one."""
        self.wait_for(lambda _: text in self._unread)
        shown, _, self._unread = self._unread.partition(text)
        return shown + text

    def rest(self) -> tuple[str, int]:
        """The output that is left, and the exit code."""
        code = self.ends()
        return self._unread, code

    def ends(self) -> int:
        """Waits for the end of the program and returns its exit code."""
        end = time.monotonic() + PATIENCE_S
        while select.select([self._ours], [], [], max(0.0, end - time.monotonic()))[0] and self._read():
            continue
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bytes:
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # EIO: the other end is closed
            return b""
        self.raw += data
        self._unread += data.decode(errors="replace").replace("\r", "")
        data = self._rest + data
        cut = data.rfind(b"\x1b")
        self._rest = data[cut:] if cut >= 0 and len(data) - cut < 24 and not _complete(data[cut:]) else b""
        self._stream.feed(_UNKNOWN_TO_PYTE.sub(b"", data[: len(data) - len(self._rest)]))
        return data

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(PATIENCE_S)
        os.close(self._ours)


def _complete(sequence: bytes) -> bool:
    return re.match(rb"\x1b(?:\[[<>=?]?[\d;]*[$]?[a-zA-Z@`]|[^\[_])", sequence) is not None


def _resize(descriptor: int, columns: int, rows: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
