"""Memory limits of workers by control groups (cgroup v2): one group for each worker that has a limit.

Requires a group that the service manager has delegated to the server. Without one, or if the kernel lacks a feature,
the memory of workers is polled instead. Invariant: only delegated groups are modified.
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
"""Child group of the broker and of workers without a limit. It is needed because a group whose children have
controllers enabled cannot contain processes."""
PREFIX = "instance-"
PROCESSES = "cgroup.procs"
_MARKS = ("user.delegate", "trusted.delegate")
"""Attributes that a service manager sets on groups that it delegates."""


class CgroupsUnavailable(Exception):
    """Control groups cannot be used. The message is the reason."""


class ControlGroup:
    """The group of one worker, which joins it by writing its pid to the file `processes` before anything else."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self.limit = limit
        self.processes = path / PROCESSES

    def create(self) -> None:
        self._path.mkdir()
        try:
            (self._path / "memory.max").write_text(str(self.limit))
            _write_if_there(self._path / "memory.swap.max", "0")  # otherwise a worker over its limit would swap
            _write_if_there(self._path / "memory.oom.group", "1")  # also kill processes that the worker started
        except OSError:
            self._path.rmdir()
            raise

    def used_up(self) -> bool:
        """Whether the kernel killed a process of the group for exceeding the group's limit."""
        events = self._events("memory.events")
        local = self._events("memory.events.local") or events  # Linux before 5.2 only has `events`
        return local.get("oom", 0) > 0 and events.get("oom_kill", 0) > 0

    def _events(self, name: str) -> dict[str, int]:
        try:
            lines = (self._path / name).read_text().splitlines()
        except OSError:
            return {}
        return {key: int(value) for key, _, value in (line.partition(" ") for line in lines) if value.isdecimal()}

    def remove(self) -> bool:
        """Kills processes that the exited worker left running, and removes the group. False: some have not exited yet;
        call this again later."""
        _write_if_there(self._path / "cgroup.kill", "1")
        try:
            self._path.rmdir()
        except OSError as error:
            if error.errno == errno.EBUSY:
                return False
            if error.errno != errno.ENOENT:
                log.warning("cannot remove control group %s: %s", self._path.name, error.strerror)
        return True


class ControlGroups:
    """Creates the groups of workers, as children of the delegated group `top`."""

    def __init__(self, top: Path) -> None:
        self._top = top

    @classmethod
    def take_over(cls, top: Path) -> ControlGroups:
        """Moves the processes of a delegated group to its child group SERVER. Raises CgroupsUnavailable."""
        _check(top)
        try:
            for remaining in top.glob(PREFIX + "*"):  # left by a killed server; removing a group in use fails
                with contextlib.suppress(OSError):
                    remaining.rmdir()
            (top / SERVER).mkdir(exist_ok=True)
            for pid in (top / PROCESSES).read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (top / SERVER / PROCESSES).write_text(pid)
            (top / "cgroup.subtree_control").write_text("+memory")
        except OSError as error:
            raise CgroupsUnavailable(
                f"cannot create control groups below that of this service: {error.strerror}"
            ) from None
        return cls(top)

    def make(self, peer: int, limit: int) -> ControlGroup | None:
        """Creates the group of a worker. Returns None and logs a warning if that fails."""
        group = ControlGroup(self._top / f"{PREFIX}{peer}", limit)
        try:
            group.create()
        except OSError as error:
            log.warning(
                "cannot create a control group for worker %d (%s): polling its memory instead", peer, error.strerror
            )
            return None
        return group


def take_over_own_group() -> ControlGroups | None:
    """Divides the group of this process. If that is not possible, logs the reason and returns None."""
    try:
        return ControlGroups.take_over(own(PROC, MOUNTS))
    except CgroupsUnavailable as reason:
        log.debug("memory limits are enforced by polling: %s", reason)
        return None


def own(proc: Path, mounts: Path) -> Path:
    """The directory of this process's group. Raises CgroupsUnavailable without cgroup v2."""
    try:
        name = next(line[3:] for line in proc.read_text().splitlines() if line.startswith("0::"))
        roots = [line.split()[1] for line in mounts.read_text().splitlines() if line.split()[2] == "cgroup2"]
    except (OSError, StopIteration):
        raise CgroupsUnavailable("no cgroup v2") from None
    if not roots:
        raise CgroupsUnavailable("cgroup v2 is not mounted")
    return Path(roots[0]) / name.lstrip("/")  # further mounts show the same groups


def check_own(proc: Path, mounts: Path) -> None:
    """Raises CgroupsUnavailable if the group of this process could not be divided. Changes nothing."""
    _check(own(proc, mounts))


def _check(top: Path) -> None:
    try:
        controllers = (top / "cgroup.controllers").read_text().split()
    except OSError as error:
        raise CgroupsUnavailable(f"cannot read the control group of this process: {error.strerror}") from None
    if not _is_delegated(top):
        raise CgroupsUnavailable(
            "the control group of this process is not delegated to it (Delegate=memory of its service)"
        )
    if "memory" not in controllers:
        raise CgroupsUnavailable("the control group of this process does not have the memory controller")


def _is_delegated(top: Path) -> bool:
    for mark in _MARKS:
        with contextlib.suppress(OSError):
            if os.getxattr(top, mark) == b"1":
                return True
    # Users other than root may be unable to read the marks, but they own a directory that is delegated to them.
    user = os.geteuid()
    return user != 0 and top.stat().st_uid == user


def _write_if_there(path: Path, text: str) -> None:
    """Writes to a file that older kernels lack. Opens it write-only, as users cannot read `cgroup.kill`, and without
    O_CREAT, which `write_text` uses."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
