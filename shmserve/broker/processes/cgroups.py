"""Control groups of our own, where a service manager lets us have some: one for each worker with a limit of memory.

The rule of the file: nothing is touched but what was delegated to us. Where that is not so, or the kernel cannot do
it, there are no groups, with the reason, and memory is watched instead.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path

log = logging.getLogger("shmserve")

PROC = Path("/proc/self/cgroup")
MOUNTS = Path("/proc/self/mounts")
SERVER = "server"
"""The group of the broker, and of workers without a limit: one with groups below it may have no processes itself."""
PREFIX = "instance-"
PROCESSES = "cgroup.procs"
_MARKS = ("user.delegate", "trusted.delegate")
"""What a service manager writes on the groups that it leaves to us."""


class CannotHave(Exception):
    """Why there are no groups here."""


class Group:
    """A worker puts itself in, by writing to the file `processes`, before it does anything else."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self.limit = limit
        path.mkdir()
        try:
            (path / "memory.max").write_text(str(limit))
            _write_if_there(path / "memory.swap.max", "0")  # else it would swap, and all with it, long before its end
            _write_if_there(path / "memory.oom.group", "1")  # the processes that it has started too
        except OSError:
            path.rmdir()
            raise
        self.processes = path / PROCESSES

    def used_up(self) -> bool:
        """Whether it needed more than its limit, and something in it was ended for that by the kernel."""
        events = self._events("memory.events.local") or self._events("memory.events")
        return events.get("oom", 0) > 0 and (self._events("memory.events") or events).get("oom_kill", 0) > 0

    def _events(self, name: str) -> dict[str, int]:
        try:
            lines = (self._path / name).read_text().splitlines()
        except OSError:
            return {}
        return {key: int(value) for key, _, value in (line.partition(" ") for line in lines) if value.isdecimal()}

    def remove(self) -> bool:
        """The worker has ended. What it has left running ends, too. False: not all of that is gone yet, ask again."""
        _write_if_there(self._path / "cgroup.kill", "1")
        try:
            self._path.rmdir()
        except OSError as error:
            if error.errno == errno.EBUSY:
                return False
            if error.errno != errno.ENOENT:
                log.warning("cannot remove control group %s: %s", self._path.name, error.strerror)
        return True


class Groups:
    def __init__(self, top: Path) -> None:
        """`top` is ours. We go into a group below it, so that it may have others beside."""
        self._top = top
        _check(top)
        try:
            for left in top.glob(PREFIX + "*"):  # by a server before us that was killed; those in use stay
                with contextlib.suppress(OSError):
                    left.rmdir()
            (top / SERVER).mkdir(exist_ok=True)
            for pid in (top / PROCESSES).read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (top / SERVER / PROCESSES).write_text(pid)
            (top / "cgroup.subtree_control").write_text("+memory")
        except OSError as error:
            raise CannotHave(f"cannot create control groups below that of this service: {error.strerror}") from None

    def make(self, peer: int, limit: int) -> Group | None:
        """None if it cannot be made, with the reason in the log."""
        try:
            return Group(self._top / f"{PREFIX}{peer}", limit)
        except OSError as error:
            log.warning(
                "cannot create a control group for worker %d (%s): polling its memory instead", peer, error.strerror
            )
            return None


def groups() -> Groups:
    """Those of this process, or CannotHave."""
    return Groups(own(PROC, MOUNTS))


def own(proc: Path, mounts: Path) -> Path:
    """The directory of the group that we are in. CannotHave where there is none of version 2."""
    try:
        name = next(line[3:] for line in proc.read_text().splitlines() if line.startswith("0::"))
        found = [line.split()[1] for line in mounts.read_text().splitlines() if line.split()[2] == "cgroup2"]
    except (OSError, StopIteration):
        raise CannotHave("no cgroup v2") from None
    if not found:
        raise CannotHave("cgroup v2 is not mounted")
    return Path(found[0]) / name.lstrip("/")


def _check(top: Path) -> None:
    try:
        controllers = (top / "cgroup.controllers").read_text().split()
    except OSError as error:
        raise CannotHave(f"cannot read the control group of this process: {error.strerror}") from None
    if not _is_delegated(top):
        raise CannotHave("the control group of this process is not delegated to it (Delegate=memory of its service)")
    if "memory" not in controllers:
        raise CannotHave("the control group of this process does not have the memory controller")


def _is_delegated(top: Path) -> bool:
    for mark in _MARKS:
        with contextlib.suppress(OSError):
            if os.getxattr(top, mark) == b"1":
                return True
    # Managers that leave no mark for users to read give the directory itself to the service's user.
    return 0 != os.geteuid() == top.stat().st_uid


def _write_if_there(path: Path, text: str) -> None:
    """What older kernels do not have is not needed."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
