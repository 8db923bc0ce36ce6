"""The broker's side of the process that mirrors remote repositories: sends requests and reads events.

Invariant: the broker never waits for the process. Unanswered requests are sent again after a restart.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from shmserve.broker.processes.helper_process import HelperKind, HelperProcess
from shmserve.repo.remote.credentials import ENVIRONMENT
from shmserve.repo.remote.main import MirrorSettings

READ_BYTES = 1 << 16
_KIND = HelperKind("shmserve.repo.remote.main", "repositories", "downloads models", socket.SOCK_STREAM, ENVIRONMENT)

Event = dict[str, Any]


class MirrorProcess:
    """Calls `handle(event)` for each event, and `started()` after each start, when the new process has no requests.
    `pids`: see `HelperProcess`."""

    def __init__(
        self,
        loop: Any,
        settings: MirrorSettings,
        pids: set[int],
        handle: Callable[[Event], None],
        started: Callable[[], None],
    ) -> None:
        self._handle = handle
        self._has_started = started
        self._loop = loop
        self._settings = msgspec.json.encode(settings)
        self._process = HelperProcess(loop, _KIND, pids, (), self._started, self._read, self._ended)
        self.start = self._process.start
        self.close = self._process.close  # without grace, as its state is on disk
        self._unsent = bytearray()
        self._received = bytearray()

    def _started(self) -> None:
        self._write(self._settings)
        self._has_started()

    def send(self, request: Mapping[str, object]) -> None:
        """Sends a request. While no process is running, does nothing, as `started` is called for the next one."""
        if self._process.link is not None:
            self._write(msgspec.json.encode(request))

    def _write(self, line: bytes) -> None:
        assert self._process.link is not None
        if not self._unsent:
            self._loop.add_writer(self._process.link.fileno(), self._flush)
        self._unsent += line + b"\n"

    def _flush(self) -> None:
        assert self._process.link is not None
        try:
            del self._unsent[: self._process.link.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:  # the process is about to exit
            self._unsent.clear()
        if not self._unsent:
            self._loop.remove_writer(self._process.link.fileno())

    def _read(self) -> None:
        assert self._process.link is not None
        try:
            data = self._process.link.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._process.stop_reading()
            return
        *lines, rest = (self._received + data).split(b"\n")
        self._received = rest
        for line in lines:
            self._handle(msgspec.json.decode(line))

    def _ended(self) -> None:
        assert self._process.link is not None
        self._loop.remove_writer(self._process.link.fileno())
        self._unsent.clear()
        self._received.clear()
