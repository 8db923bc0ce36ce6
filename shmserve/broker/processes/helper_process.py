"""A process of the server other than workers and gateways. It is started with a socket, and restarted if it exits.

Invariant: the broker never waits for it, except in `close`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from shmserve.broker.observability.logs import log_record
from shmserve.broker.processes import children
from shmserve.core.limits import pause_ns
from shmserve.paths import python

PAUSES_NS = 1_000_000_000, 60_000_000_000
"""Pause before the second consecutive restart, and the longest pause."""
STEADY_S = 60.0
"""Uptime after which the restart counter is reset."""
_LEVELS = {level: level for level in ("info", "warning", "error")}


class HelperKind(NamedTuple):
    """`module` is run with `arguments` and the descriptor of its socket, which has the type `link`. `label` marks its
    output in the log. `purpose` follows "the process that" in messages. `environment`: prefixes of variables that it
    gets besides those of every child."""

    module: str
    label: str
    purpose: str
    link: socket.SocketKind
    environment: tuple[str, ...] = ()


class HelperProcess:
    """Calls `started()` when a process has been started, `readable()` when its socket can be read, and `ended()` when
    it has exited, before closing the socket. Adds the pid of the process, which this class reaps, to `pids`."""

    def __init__(
        self,
        loop: Any,
        kind: HelperKind,
        pids: set[int],
        arguments: Sequence[str],
        started: Callable[[], None],
        readable: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self._started = started
        self._readable = readable
        self._ended = ended
        self.link: socket.socket | None = None
        """The socket; None while no process is running."""
        self._loop = loop
        self._kind = kind
        self._arguments = arguments
        self._pids = pids
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._output: children.Output | None = None
        self._start_timer: Any = None
        self._began = 0.0
        self._consecutive_exits = 0

    def start(self) -> None:
        self._start_timer = None
        try:
            self._start_process()
        except OSError as error:
            self._restart(f"cannot be started: {error.strerror}")
        else:
            self._started()

    def _start_process(self) -> None:
        """Raises OSError without leaving anything behind, for example if no descriptors are left."""
        with ExitStack() as undo, ExitStack() as child_ends:
            ours, theirs = socket.socketpair(socket.AF_UNIX, self._kind.link)
            undo.callback(ours.close)
            child_ends.callback(theirs.close)
            output = children.Output(self._loop, _LEVELS, self._log)
            undo.callback(output.close)
            child_ends.callback(os.close, output.write_end)
            ours.setblocking(False)
            process = subprocess.Popen(
                [*python(), "-m", self._kind.module, str(theirs.fileno()), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=output.write_end,
                stderr=output.write_end,
                pass_fds=[theirs.fileno()],
                env=children.environment(*self._kind.environment),
                start_new_session=True,
            )
            undo.callback(process.wait)
            undo.callback(process.kill)
            self._pidfd = os.pidfd_open(process.pid)
            undo.pop_all()
        self._process, self.link, self._output = process, ours, output
        self._pids.add(process.pid)
        self._began = self._loop.time()
        self._loop.add_reader(self._pidfd, self._on_end)
        self._loop.add_reader(ours.fileno(), self._readable)

    def stop_reading(self) -> None:
        """Stops watching the socket. Call at its end of file, when the process is about to exit."""
        assert self.link is not None
        self._loop.remove_reader(self.link.fileno())

    def _log(self, level: str, text: str) -> None:
        log_record(level, f"[{self._kind.label}] {text}")

    def _on_end(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        self._release()
        if self._loop.time() - self._began > STEADY_S:
            self._consecutive_exits = 0
        self._restart(f"ended ({children.describe_exit(code)})")

    def _restart(self, why: str) -> None:
        self._consecutive_exits += 1
        pause = pause_ns(self._consecutive_exits, *PAUSES_NS) / 1e9
        log_record("error", f"the process that {self._kind.purpose} {why}; starting it again in {pause:g} s")
        self._start_timer = self._loop.call_later(pause, self.start)

    def _release(self) -> None:
        """Releases the resources of a process that has exited."""
        assert self._process is not None
        assert self._output is not None
        assert self.link is not None
        self._output.finish()
        self._output.close()
        self._ended()
        self.stop_reading()
        self.link.close()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pids.discard(self._process.pid)
        self._process = self.link = self._output = None

    def close(self, grace_s: float = 0.0) -> None:
        """Closes the input of the process, so that it exits, and kills it if it still runs after `grace_s`."""
        if self._start_timer is not None:
            self._start_timer.cancel()
        if self._process is None:
            return
        assert self.link is not None
        self.link.shutdown(socket.SHUT_WR)
        if not select.select([self._pidfd], [], [], grace_s)[0]:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._process.wait()
        self._release()
