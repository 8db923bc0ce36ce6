"""The scheduling priority of a worker while its model loads: the server's requests take precedence.

Threads and processes that the model starts while loading inherit the priority; it is restored for all of them. The
kernel has two priorities. The worker lowers each one that it can restore:

- With autogroups, the kernel gives each session a share of the processors. A process may set the share of its own
  session.
- The nice value of a thread applies within the session if there are autogroups, otherwise within the control group.
  Lowering it again needs CAP_SYS_NICE or a resource limit (RLIMIT_NICE).

Invariant: a worker that serves has the priority with which it was started.
"""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress

from shmserve.workers.process.log import log_message

HIGHEST_NICE = 19
AUTOGROUP = "/proc/self/autogroup"
RETRY_S = 0.01
PATIENCE_S = 10.0
"""How long to retry. Without CAP_SYS_ADMIN, the kernel accepts one autogroup change per 100 ms on the whole machine."""


class LoadPriority:
    """`nice`: how much to lower the priority; 0: not at all. `normal`: the nice value to restore if the priority was
    lowered before this process changed its interpreter; else None."""

    def __init__(self, nice: int, normal: int | None) -> None:
        self.normal = os.getpriority(os.PRIO_PROCESS, 0) if normal is None else normal
        self._nice = nice
        self._in_autogroup = False
        self._in_process = False

    def lower(self) -> None:
        """Lowers each priority that can be restored. Does nothing if the session or process group contains other
        processes."""
        if not self._nice or os.getsid(0) != os.getpid() or os.getpgrp() != os.getpid():
            return
        self._in_autogroup = _set_autogroup(min(self._nice, HIGHEST_NICE))
        lowered = min(self.normal + self._nice, HIGHEST_NICE)
        if _can_restore(self.normal, lowered):
            os.setpriority(os.PRIO_PGRP, 0, lowered)
            self._in_process = True

    def restore(self) -> None:
        if self._in_autogroup and not _set_autogroup(0, PATIENCE_S):
            log_message(f"the worker keeps the low priority of loading: the kernel does not accept it in {AUTOGROUP}")
        if self._in_process:
            try:
                os.setpriority(os.PRIO_PGRP, 0, self.normal)  # all threads of all processes of the group
                _restore_descendants(self.normal)
            except OSError as error:
                log_message(f"a process of the model keeps the low priority of loading: {error.strerror}", "warning")
        self._in_autogroup = self._in_process = False


def _set_autogroup(nice: int, patience_s: float = 0.0) -> bool:
    until = time.monotonic() + patience_s
    while True:
        try:
            descriptor = os.open(AUTOGROUP, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, str(nice).encode())
            finally:
                os.close(descriptor)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            select.select((), (), (), RETRY_S)
        except OSError:  # the kernel has no autogroups, or this session has none
            return False


def _restore_descendants(nice: int) -> None:
    """Sets the nice value of processes that the model has started in other process groups."""
    todo, own = [os.getpid()], os.getpgrp()
    while todo:
        process = todo.pop()
        try:
            apart = os.getpgid(process) != own
            threads = os.listdir(f"/proc/{process}/task")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        for thread in threads:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended, or the kernel does not list children
                if apart:
                    os.setpriority(os.PRIO_PROCESS, int(thread), nice)
                with open(f"/proc/{process}/task/{thread}/children", encoding="ascii") as file:
                    todo += map(int, file.read().split())


def _can_restore(normal: int, lowered: int) -> bool:
    """Tries it in a short-lived thread, because nice values belong to threads."""
    succeeded = []

    def attempt() -> None:
        try:
            for nice in (lowered, normal):
                os.setpriority(os.PRIO_PROCESS, 0, nice)
        except OSError:
            return  # without the privilege: the common case
        succeeded.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(succeeded)
