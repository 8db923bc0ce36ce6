"""The broker's side of the zygote, from which workers are forked. Forked workers start faster and use less memory than
fresh interpreters.

Invariant: if anything fails here, the worker is started as a fresh interpreter instead.
"""

from __future__ import annotations

import array
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from typing import Any

from shmserve.paths import python
from shmserve.protocol.descriptors import ANCILLARY_BYTES, received
from shmserve.system.process import CHILD_SUBREAPER, prctl

ARGV_PLACEHOLDER = "-" * 1024
"""A placeholder argument: forked workers overwrite it with their own command line."""
MAX_EXITS = 3
"""Number of consecutive exits, without a forked worker in between, after which the zygote is not restarted."""


class Zygote:
    """`done(ticket, pid, pidfd)` is called for each `start`, in order. Pid 0: start a fresh interpreter instead."""

    def __init__(
        self,
        loop: Any,
        done: Callable[[int, int, int], None],
        log_record: Callable[[str, str, dict[str, Any]], None],
        environment: Callable[[], dict[str, str]],
    ) -> None:
        self._loop = loop
        self._done = done
        self._log_record = log_record
        self._environment = environment
        self._pending: deque[int] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._remaining_exits = MAX_EXITS

    @property
    def pid(self) -> int:
        """The pid of the zygote; 0 if it is not running."""
        return self._process.pid if self._process is not None else 0

    @property
    def busy(self) -> bool:
        """Whether workers may exist whose pids are not known yet."""
        return bool(self._pending)

    def start(self, ticket: int, arguments: list[str], link: int, output: int) -> bool:
        """Requests a fork. False: the worker must be started as a fresh interpreter."""
        if self._control is None and not self._open():
            return False
        assert self._control is not None
        rights = array.array("i", [link, output])
        try:
            self._control.sendmsg(["\0".join(arguments).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except OSError:  # the queue is full, or the zygote has exited, which `_read` detects
            return False
        self._pending.append(ticket)
        return True

    def _open(self) -> bool:
        if not self._remaining_exits:
            return False
        try:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._control.setblocking(False)
                _become_subreaper()
                self._process = subprocess.Popen(
                    [*python(), "-m", "shmserve.workers.zygote", str(theirs.fileno()), ARGV_PLACEHOLDER],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=self._environment(),
                    start_new_session=True,
                )
        except OSError as error:
            self._give_up(f"cannot start a process: {error.strerror}")
            return False
        self._loop.add_reader(self._control.fileno(), self._read)
        return True

    def _read(self) -> None:
        assert self._control is not None
        while self._control is not None:
            try:
                data, ancillary, _, _ = self._control.recvmsg(4096, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, ancillary = b"", []
            what, _, reason = data.decode(errors="replace").partition(" ")
            descriptors = received(ancillary) if ancillary else []
            if what.isdecimal() and descriptors:
                self._remaining_exits = MAX_EXITS
                self._done(self._pending.popleft(), int(what), descriptors[0])
            elif what.isdecimal():  # no descriptor was left for the pidfd, without which the worker cannot be watched
                os.kill(int(what), signal.SIGKILL)
                self._done(self._pending.popleft(), 0, -1)
            elif what == "failed":
                self._done(self._pending.popleft(), 0, -1)
            elif what == "cannot":
                self._give_up(reason)
            elif not data:
                self.replace("has exited")

    def replace(self, why: str) -> None:
        """Starts another zygote, up to MAX_EXITS in a row."""
        self._remaining_exits = max(0, self._remaining_exits - 1)
        self._log_record("warning", f"the process that workers are forked from {why}", {})
        self._close()
        self._open()

    def _give_up(self, reason: str) -> None:
        """Stops using the zygote. This process remains the subreaper, as orphans may be workers."""
        self._remaining_exits = 0
        self._log_record("info", f"starting workers as new interpreters: {reason}", {})
        self._close()

    def close(self) -> None:
        """Stops the zygote permanently."""
        self._remaining_exits = 0
        self._close()

    def _close(self) -> None:
        """Kills the zygote; pending workers are started as fresh interpreters."""
        if self._control is not None:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        while self._pending:
            self._done(self._pending.popleft(), 0, -1)


def _become_subreaper() -> None:
    """Makes this process the subreaper, so that orphaned descendants become its children."""
    if error := prctl(CHILD_SUBREAPER, 1):
        raise OSError(error, os.strerror(error))


def reap(known: set[int]) -> None:
    """Reaps exited orphans of processes that models started. Stops if the next exited child is in `known`, as those are
    reaped elsewhere."""
    while True:
        try:
            exited = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if exited is None or exited.si_pid in known:
            return
        os.waitpid(exited.si_pid, os.WNOHANG)
