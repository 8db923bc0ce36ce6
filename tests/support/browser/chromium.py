"""Headless Chromium, controlled over two pipes by the DevTools protocol: JSON messages that end with NUL.

It needs no driver, port or library: the machine only needs the browser.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from tests.support.patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new --remote-debugging-pipe --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
    "--no-default-browser-check --disable-background-networking --disable-component-update --disable-extensions "
    "--disable-sync --disable-default-apps --disable-breakpad --disable-crash-reporter --mute-audio "
    "--force-color-profile=srgb --lang=en-US"
)
"""No sandbox, because tests may run as root; the browser loads only pages of the server under test."""


def find() -> str | None:
    """The browser of this machine. SHMSERVE_BROWSER names another one."""
    named = os.environ.get("SHMSERVE_BROWSER")
    if named:
        return shutil.which(named)
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors are neither 3 nor 4, to which its ends are moved for the browser."""
    ends = os.pipe()
    reader, writer = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return reader, writer


class ProtocolError(Exception):
    """The browser refused a command."""


class Chromium:
    """`names`: host names, besides localhost, that resolve to this machine. No other name resolves."""

    def __init__(self, executable: str, profile: Path, names: tuple[str, ...] = ()) -> None:
        to_browser, self._write = _pipe()
        self._read, from_browser = _pipe()
        rules = [f"MAP {name} 127.0.0.1" for name in names] + ["MAP * ~NOTFOUND", "EXCLUDE localhost", "EXCLUDE 127.*"]
        command = [executable, *FLAGS.split(), f"--user-data-dir={profile}", f"--host-resolver-rules={','.join(rules)}"]
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser} {to_browser}<&- {from_browser}>&-'
        self._folder = profile.parent
        self._log = (profile.parent / f"{profile.name}.log").open("wb")
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, "chromium", *command, "about:blank"],
            pass_fds=[to_browser, from_browser], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            start_new_session=True, env={**os.environ, "HOME": str(profile.parent)},
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self.listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}
        """Session -> the callback for its events."""

    def post(self, method: str, session: str = "", **parameters: Any) -> int:
        """Sends a command and returns its number."""
        self._number = number = self._number + 1
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return number

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Sends a command and waits for its result; events are passed on in the meantime."""
        number = self.post(method, session, **parameters)
        self.wait(lambda: number in self._answers, method)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise ProtocolError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def wait(self, happened: Callable[[], bool], what: str) -> None:
        """Processes messages until it has happened."""
        deadline = monotonic() + PATIENCE_S
        while not happened():
            readable, _, _ = select.select([self._read], [], [], max(0.0, deadline - monotonic()))
            if not readable:
                raise TimeoutError(f"the browser did nothing for {PATIENCE_S:g} s while waiting for {what}")
            self._receive()

    def _receive(self) -> None:
        data = os.read(self._read, 1 << 20)
        if not data:
            raise EOFError(f"the browser has ended; see {self._log.name}")
        *messages, self._rest = (self._rest + data).split(b"\0")
        for text in messages:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                listener = self.listeners.get(message.get("sessionId", ""))
                if listener is not None:
                    listener(message["method"], message["params"])

    def close(self) -> None:
        processes = [os.pidfd_open(pid) for pid in self._family()]
        with contextlib.suppress(EOFError, BrokenPipeError):
            self.call("Browser.close")
        self._process.wait(PATIENCE_S)
        os.close(self._read)
        os.close(self._write)
        self._log.close()
        for process in processes:
            ended, _, _ = select.select([process], [], [], PATIENCE_S)
            if not ended:
                raise TimeoutError(f"a process of the browser is left after {PATIENCE_S:g} s")
            with contextlib.suppress(ChildProcessError):  # an orphan, which a subreaper inherits
                os.waitid(os.P_PIDFD, process, os.WEXITED)
            os.close(process)

    def _family(self) -> list[int]:
        """The browser's other processes, including those that are not its descendants: their command lines name its
        folder."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in (os.getpid(), self._process.pid):
                with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                    if os.fsencode(self._folder) in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
        return found
