"""Extents with a name in /dev/shm, through posix_ipc.

Invariant: a name contains the pid, start time and pid namespace of its creator, so that `sweep` only removes segments
of dead processes. It skips segments that another process has locked (`hold`).

The creator of a named segment can truncate it at any time; a process that then reads the missing pages dies by SIGBUS.
Therefore, map named segments of other processes only in workers, which may die.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from contextlib import suppress
from typing import Any

import posix_ipc

from shmserve.errors import Denied, Internal, InvalidRequest, NotFound
from shmserve.shm.extents.base import MappedExtent, failed, reserve
from shmserve.shm.pages import Pages, map_shared

PREFIX = "/shmserve-"
_NAME = re.compile(r"/?[A-Za-z0-9_.-]{1,250}")
_OURS = re.compile(re.escape(PREFIX[1:]) + r"(\d+)-(\d+)-(\d+)-[0-9a-f]{32}")
_DIRECTORY = "/dev/shm"


class PosixExtent(MappedExtent):
    kind = "posix"

    def __init__(self, pages: Pages, *, fd: int, name: str, owner_pid: int | None = None) -> None:
        """`owner_pid`: the creator, which removes the name. None: this object does not remove the name."""
        super().__init__(pages, fd=fd, name=name)
        self._owner_pid = owner_pid

    def unlink(self) -> None:
        """Removes the name; existing mappings stay valid. Idempotent. Does nothing in a process that attached to the
        segment or in a forked child, because other processes may still need the name."""
        owner_pid, self._owner_pid = self._owner_pid, None
        if self.name is None or owner_pid != os.getpid():
            return
        with suppress(posix_ipc.ExistentialError):  # already removed by hand
            posix_ipc.unlink_shared_memory(self.name)

    def keep_name(self) -> None:
        """Keeps the name after `close`, as other processes may not have opened it yet. The broker calls `remove`
        later."""
        self._owner_pid = None

    def close(self) -> None:
        self.unlink()
        super().close()


def create(size: int, mode: int = 0o600, group: int | None = None) -> PosixExtent:
    """Creates a named extent, with all pages allocated and mapped. `group`: gid of the segment, whose access `mode`
    defines (0o640, 0o660)."""
    if size <= 0:
        raise Internal(f"invalid extent size: {size} bytes")
    pid = os.getpid()
    name = f"{PREFIX}{pid}-{_start_time(pid)}-{_namespace()}-{secrets.token_hex(16)}"
    fd = _open(name, os.O_CREAT | os.O_EXCL, size)
    try:
        reserve(fd, size)
        if group is not None:
            os.fchown(fd, -1, group)
        os.fchmod(fd, mode)
        pages = map_shared(fd, size, writable=True)
        pages.warm()
    except BaseException as error:
        os.close(fd)
        posix_ipc.unlink_shared_memory(name)
        if isinstance(error, PermissionError):
            raise Denied(f"cannot give shared memory to group {group} with mode {mode:o}: {error.strerror}") from error
        if isinstance(error, OSError):
            raise failed("make", size, error) from error
        raise
    return PosixExtent(pages, fd=fd, name=name, owner_pid=pid)


def attach(name: str, size: int, writable: bool, *, uid: int | None = None) -> PosixExtent:
    """Maps `size` bytes of another process's segment. With `uid`, the segment must belong to that user; otherwise a
    client could use the server's rights to access a segment of another user."""
    if not _NAME.fullmatch(name) or name.strip("/") in (".", ".."):
        raise InvalidRequest("a shared memory name is a slash and up to 250 of the characters A-Z a-z 0-9 _ . -")
    name = "/" + name.lstrip("/")
    try:
        fd = _open(name, 0, 0)
    except Denied:
        if writable:
            raise
        fd = _open(name, 0, 0, read_only=True)
    try:
        status = os.fstat(fd)
        if uid is not None and status.st_uid != uid:
            raise Denied(f"the shared memory object of that name does not belong to user {uid}")
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequest("the object of that name is not shared memory")
        if size <= 0 or status.st_size < size:
            raise InvalidRequest(f"the segment was announced with {size} bytes, but its object has {status.st_size}")
        pages = map_shared(fd, size, writable)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise failed("map", size, error) from error
        raise
    return PosixExtent(pages, fd=fd, name=name)


def is_made_by(pid: int, name: str) -> bool:
    """Whether the process `pid` would create a segment of this name."""
    ours = _OURS.fullmatch(name.removeprefix("/"))
    return ours is not None and int(ours[1]) == pid


def remove(name: str) -> None:
    """Removes a name that its creator kept with `keep_name`, or left behind when it died."""
    with suppress(posix_ipc.ExistentialError):  # already removed by its creator
        posix_ipc.unlink_shared_memory(name)


def hold(name: str) -> int | None:
    """Prevents `sweep`, in any server, from removing the name after its creator has exited, until the returned
    descriptor is closed. None if the segment cannot be opened or locked."""
    try:
        return _locked(name.removeprefix("/"), fcntl.LOCK_SH)
    except OSError:
        return None


def sweep(pid: int = 0) -> int:
    """Removes named segments of dead processes that no process holds, and returns how many. `pid`: only those of this
    process; 0: of all.

    Skips segments that were created in another pid namespace, because their pids are meaningless here.
    """
    here, removed = _namespace(), 0
    for entry in os.listdir(_DIRECTORY):
        ours = _OURS.fullmatch(entry)
        if ours is None or int(ours[3]) != here or pid not in (0, int(ours[1])):
            continue
        if _is_alive(int(ours[1]), int(ours[2])):
            continue
        try:
            descriptor = _locked(entry, fcntl.LOCK_EX)
        except OSError:
            continue  # held, removed by another sweep, or owned by another user
        try:
            posix_ipc.unlink_shared_memory("/" + entry)
            removed += 1
        except (posix_ipc.ExistentialError, posix_ipc.PermissionsError):
            continue  # removed by its holder, or owned by another user
        finally:
            os.close(descriptor)
    return removed


def _locked(entry: str, lock: int) -> int:
    """Opens and locks a segment without blocking, as a worker could have replaced it with a FIFO, or locked it. Raises
    OSError."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(os.path.join(_DIRECTORY, entry), flags)
    try:
        fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _start_time(pid: int) -> int:
    """Returns the start time of a process in clock ticks since boot, which distinguishes processes with a reused
    pid."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        text = file.read()
    fields = text[text.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        raise ProcessLookupError(f"process {pid} is a zombie")
    return int(fields[19])


def _is_alive(pid: int, started: int) -> bool:
    try:
        return _start_time(pid) == started
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    except FileNotFoundError:
        return _pid_exists(pid)  # dead, or hidden by mount options of /proc


def _pid_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _open(name: str, flags: int, size: int, *, read_only: bool = False) -> int:
    options: dict[str, Any] = {"flags": flags, "mode": 0o600, "read_only": read_only}
    try:
        fd: int = posix_ipc.SharedMemory(name, **options).fd
    except posix_ipc.ExistentialError as error:
        raise NotFound(
            "no such shared memory object; a process in a container needs the same shm mount (--ipc)"
        ) from error
    except posix_ipc.PermissionsError as error:
        raise Denied(
            "permission denied for the shared memory object; make it accessible to the server's group (0660)"
        ) from error
    except OSError as error:
        raise failed("open", size, error) from error
    return fd
