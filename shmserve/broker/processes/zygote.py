"""The broker's side of the prepared process, of which workers are made faster, and smaller, than as fresh interpreters.

The rule of the file: whatever does not go well with it, a worker can still be started the other way, and is.
"""

from __future__ import annotations

import array
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from typing import Any

from shmserve.paths import python
from shmserve.protocol.descriptors import ANCILLARY_BYTES, received
from shmserve.system.prctl import CHILD_SUBREAPER, prctl

ROOM = "-" * 1024
"""An argument that says nothing: the command lines of workers are shown in its place."""
TIMES = 3
"""How often it may end by itself, with no worker made meanwhile, before it is not started any more."""


class Prepared:
    """`done(ticket, pid, pidfd)` is called for each `start`, in their order. Pid 0: start it the other way."""

    def __init__(
        self,
        loop: Any,
        done: Callable[[int, int, int], None],
        say: Callable[[str, str, dict[str, Any]], None],
        environment: Callable[[], dict[str, str]],
    ) -> None:
        self._loop = loop
        self._done = done
        self._say = say
        self._environment = environment
        self._pending: deque[int] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._left = TIMES

    @property
    def pid(self) -> int:
        """0: there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def busy(self) -> bool:
        """A worker may have been made that nobody knows yet."""
        return bool(self._pending)

    def start(self, ticket: int, words: list[str], link: int, output: int) -> bool:
        """False: it cannot; start the worker the other way now."""
        if self._control is None and not self._open():
            return False
        assert self._control is not None
        rights = array.array("i", [link, output])
        try:
            self._control.sendmsg(["\0".join(words).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except OSError:  # too much waits, or it has just ended, which is seen soon
            return False
        self._pending.append(ticket)
        return True

    def _open(self) -> bool:
        if not self._left:
            return False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            try:
                _adopt()
                self._process = subprocess.Popen(
                    [*python(), "-m", "shmserve.workers.zygote", str(theirs.fileno()), ROOM],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=self._environment(),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                self._give_up(f"cannot start a process: {error.strerror}")
                return False
        self._control = ours
        self._loop.add_reader(ours.fileno(), self._read)
        return True

    def _read(self) -> None:
        assert self._control is not None
        while self._control is not None:
            try:
                said, ancillary, _, _ = self._control.recvmsg(4096, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                said, ancillary = b"", []
            what, _, reason = said.decode(errors="replace").partition(" ")
            descriptors = received(ancillary) if ancillary else []
            if what.isdecimal() and descriptors:
                self._left = TIMES
                self._done(self._pending.popleft(), int(what), descriptors[0])
            elif what == "failed":
                self._done(self._pending.popleft(), 0, -1)
            elif what == "cannot":
                self._give_up(reason)
            elif not said:
                self.replace("has exited")

    def replace(self, why: str) -> None:
        """Another one may do better."""
        self._left = max(0, self._left - 1)
        self._say("warning", f"the process that workers are forked from {why}", {})
        self._close()
        self._open()

    def _give_up(self, reason: str) -> None:
        """It cannot be done here. What has no parent stays ours: there may be workers among it."""
        self._left = 0
        self._say("info", f"starting workers as new interpreters: {reason}", {})
        self._close()

    def close(self) -> None:
        """For good."""
        self._left = 0
        self._close()

    def _close(self) -> None:
        """It ends; what it was asked for and has not done is done the other way."""
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


def _adopt() -> None:
    """Processes below us whose parent has ended become our children."""
    if error := prctl(CHILD_SUBREAPER, 1):
        raise OSError(error, os.strerror(error))


def reap(known: set[int]) -> None:
    """What models have left running, and has ended since, is ours to bury. Those that are known are waited for
    elsewhere."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in known:
            return
        os.waitpid(found.si_pid, os.WNOHANG)
