"""The lane's listener: a SEQPACKET socket in the runtime directory. The kernel reports the user of each connection.

Invariant: no client can connect before the socket has its mode and group, regardless of the umask.
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import resource
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shmserve.broker.link import close_all
from shmserve.broker.listeners.access import AccessRules, Principal
from shmserve.errors import Denied, Unavailable
from shmserve.protocol import codec
from shmserve.protocol.messages import Goodbye

log = logging.getLogger("shmserve")

BACKLOG = 512
RETRY_S = 1.0
"""Delay before accepting again after the process ran out of descriptors or memory."""
SO_PEERGROUPS = 59  # missing from the socket module
_CREDENTIALS = struct.Struct("3i")
_GROUPS_BYTES = 1024
"""Size of the buffer for SO_PEERGROUPS: 256 groups."""
OWN_DESCRIPTORS = 1024
"""Descriptors of the broker besides those of clients and segments."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
SPARE = 4
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class LaneListener:
    """`opened(socket, uid, roles)` is called for each connection."""

    def __init__(
        self, path: Path, loop: Any, access: AccessRules, opened: Callable[[socket.socket, int, int], None]
    ) -> None:
        self._loop = loop
        self._access = access
        self._opened = opened
        self._retry_timer: Any = None
        self._spare = _spare()
        """Spare descriptors for refusing connections when the process has run out of them."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))
        set_group_access(path, access.socket_group, 0o600)
        self._socket.listen(BACKLOG)  # before this, connects are refused
        loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("cannot accept a connection: %s", error.strerror)
            if error.errno in _NO_DESCRIPTORS:
                self._refuse_waiting()
            if error.errno in _OUT_OF_RESOURCES:  # otherwise accept fails again at once and starves other callbacks
                self._loop.remove_reader(self._socket.fileno())
                self._retry_timer = self._loop.call_later(RETRY_S, self._resume)
            return
        principal = peer(sock)
        self._opened(sock, principal.uid, self._access.roles_of(principal))

    def _refuse_waiting(self) -> None:
        """Refuses pending connections with the reason. Otherwise their clients block until a descriptor is free."""
        close_all(self._spare)
        packet = codec.encode([Goodbye(Unavailable.code, "the server has too many open files; try again later")])
        with contextlib.suppress(OSError):  # none is pending, or another thread took the descriptor
            for _ in range(BACKLOG):
                sock, _ = self._socket.accept()
                with sock, contextlib.suppress(OSError):
                    sock.send(packet, socket.MSG_DONTWAIT)
                    sock.shutdown(socket.SHUT_RDWR)
        self._spare = _spare()

    def _resume(self) -> None:
        self._retry_timer = None
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        close_all(self._spare)


def _spare() -> list[int]:
    spare: list[int] = []
    with contextlib.suppress(OSError):  # keep fewer for now
        while len(spare) < SPARE:
            spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    return spare


def raise_descriptor_limit(descriptors: int) -> None:
    """Raises the soft limit, as the default of services is far below the sum of the limits on clients and segments."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = descriptors if hard == resource.RLIM_INFINITY else min(descriptors, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def peer(sock: socket.socket) -> Principal:
    """The user, groups and pid of the peer when it connected, as stored by the kernel."""
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    groups = array.array("I", (gid & 0xFFFFFFFF,))
    try:
        groups.frombytes(sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _GROUPS_BYTES))
    except OSError as error:
        log.warning("a user is in too many groups; only the first one counts: %s", error.strerror)
    return Principal(uid & 0xFFFFFFFF, frozenset(groups), pid)


def set_group_access(path: Path, group: int | None, mode: int) -> None:
    """Sets the mode; with a group, also gives its members the owner's read and write permission."""
    os.chmod(path, mode)
    if group is not None:
        try:
            os.chown(path, -1, group)
        except PermissionError:
            raise Denied(
                f"cannot give the sockets to group {group} (--socket-group): the server's user is not a member"
            ) from None
        os.chmod(path, mode | (mode & 0o600) >> 3)


def open_to_group(runtime_dir: Path, group: int | None) -> None:
    """Lets members of the group enter and list the runtime directory; only the owner may change it."""
    if group is not None:
        set_group_access(runtime_dir, group, 0o700)
        os.chmod(runtime_dir, 0o750)
