"""The process that mirrors remote repositories: sends it requests, reads its events, and starts it again if it ends.

Invariant: the broker never waits for it. A request that was not answered is sent to the next process again.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from shmserve.broker.observability.log_throttle import Rate
from shmserve.broker.observability.logs import log_record
from shmserve.broker.processes import children
from shmserve.core.models.lifecycle import pause_ns
from shmserve.paths import python
from shmserve.repo.remote.credentials import ENVIRONMENT
from shmserve.repo.remote.main import Settings

MODULE = "shmserve.repo.remote.main"
PAUSES_NS = 1_000_000_000, 60_000_000_000
"""Pause before the second consecutive restart, and the longest pause."""
STEADY_S = 60.0
"""Uptime after which the restart counter is reset."""
READ_BYTES = 1 << 16
_LEVELS = {level: level for level in ("info", "warning", "error")}

Event = dict[str, Any]


class MirrorProcess:
    """`handle(event)` is called for each event. `started()`: a process has been started, which knows of no request.
    `pids`: gets the pid of the process, which is reaped here."""

    def __init__(self, loop: Any, settings: Settings, pids: set[int], rate: Rate) -> None:
        self.handle: Callable[[Event], None] = lambda event: None
        self.started: Callable[[], None] = lambda: None
        self._loop = loop
        self._settings = msgspec.json.encode(settings)
        self._pids = pids
        self._rate = rate
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._output: children.Output | None = None
        self._link: socket.socket | None = None
        self._unsent = bytearray()
        self._received = bytearray()
        self._start_timer: Any = None
        self._began = 0.0
        self._deaths = 0

    def start(self) -> None:
        self._start_timer = None
        ours, theirs = socket.socketpair()
        output = children.Output(self._loop, _LEVELS, self._log, self._rate)
        try:
            ours.setblocking(False)
            process = subprocess.Popen(
                [*python(), "-m", MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output.write_end,
                stderr=output.write_end,
                pass_fds=[theirs.fileno()],
                env=children.environment(*ENVIRONMENT),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            output.close()
            self._restart(f"cannot be started: {error.strerror}")
            return
        finally:
            theirs.close()
            os.close(output.write_end)
        self._process, self._link, self._output = process, ours, output
        self._pidfd = os.pidfd_open(process.pid)
        self._pids.add(process.pid)
        self._began = self._loop.time()
        self._loop.add_reader(self._pidfd, self._ended)
        self._loop.add_reader(ours.fileno(), self._read)
        self._write(self._settings)
        self.started()

    def send(self, request: Mapping[str, object]) -> None:
        """Without a process, nothing is sent: `started` is called for the next one."""
        if self._link is not None:
            self._write(msgspec.json.encode(request))

    def _write(self, line: bytes) -> None:
        assert self._link is not None
        if not self._unsent:
            self._loop.add_writer(self._link.fileno(), self._flush)
        self._unsent += line + b"\n"

    def _flush(self) -> None:
        assert self._link is not None
        try:
            del self._unsent[: self._link.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:  # it is about to end
            self._unsent.clear()
        if not self._unsent:
            self._loop.remove_writer(self._link.fileno())

    def _read(self) -> None:
        assert self._link is not None
        try:
            data = self._link.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # it is about to end
            self._loop.remove_reader(self._link.fileno())
            return
        *lines, rest = (self._received + data).split(b"\n")
        self._received = rest
        for line in lines:
            self.handle(msgspec.json.decode(line))

    def _log(self, level: str, text: str) -> None:
        log_record(level, f"[repositories] {text}", None)

    def _ended(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        self._drop()
        if self._loop.time() - self._began > STEADY_S:
            self._deaths = 0
        self._restart(f"ended ({children.ended_with(code)})")

    def _restart(self, why: str) -> None:
        self._deaths += 1
        pause = pause_ns(self._deaths, *PAUSES_NS) / 1e9
        text = f"the process that downloads models {why}; starting it again in {pause:g} s"
        log_record("error", text, None)
        self._start_timer = self._loop.call_later(pause, self.start)

    def _drop(self) -> None:
        assert self._process is not None
        assert self._link is not None
        assert self._output is not None
        self._output.finish()
        self._output.close()
        self._loop.remove_reader(self._link.fileno())
        self._loop.remove_writer(self._link.fileno())
        self._link.close()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pids.discard(self._process.pid)
        self._process = self._link = self._output = None
        self._unsent.clear()
        self._received.clear()

    def close(self) -> None:
        """Kills the process: it has no state that is not on disk."""
        if self._start_timer is not None:
            self._start_timer.cancel()
        if self._process is not None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._process.wait()
            self._drop()
