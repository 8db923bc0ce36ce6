"""The service manager that has started this process, if one has: how it is told something (sd_notify's protocol).

The rule of the file: without a manager nothing here costs anything.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from collections.abc import MutableMapping

log = logging.getLogger("shmserve")

PATIENCE_MS = 1000
"""How long a message that is sent only once waits for a manager that is busy."""
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Manager:
    """The service manager that has started us, if one has. Takes its variables out of the environment: they are
    meant for this process alone."""

    def __init__(self, environment: MutableMapping[str, str], pid: int) -> None:
        given = {name: environment.pop(name, "") for name in VARIABLES}
        self._socket: socket.socket | None = None
        self._address = ""
        self.watchdog_s = 0.0
        """The manager ends us if it has not heard for so long; 0: it does not mind."""
        address = given["NOTIFY_SOCKET"]
        if not address:
            return
        if address[0] not in "@/":
            log.warning("NOTIFY_SOCKET is neither a path nor an abstract name: the service manager hears nothing")
            return
        self._address = "\0" + address[1:] if address[0] == "@" else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        if given["WATCHDOG_USEC"].isdecimal() and given["WATCHDOG_PID"] in ("", str(pid)):
            self.watchdog_s = int(given["WATCHDOG_USEC"]) / 1e6

    def __bool__(self) -> bool:
        return self._socket is not None

    def tell(self, *fields: str, once: bool = False) -> None:
        """`once`: it is not said again soon, so a manager that is busy is waited for."""
        if self._socket is None:
            return
        message = "\n".join(fields).encode()
        try:
            self._send(self._socket, message, PATIENCE_MS if once else 0)
        except OSError as error:
            log.warning("cannot notify the service manager of %s: %s", fields[0], error.strerror)

    def _send(self, sock: socket.socket, message: bytes, patience_ms: int) -> None:
        try:
            sock.sendto(message, self._address)
        except BlockingIOError:
            # A datagram socket is writable when there is room for it here; only the peer's queue can be full there.
            sock.connect(self._address)
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            poll.poll(patience_ms)
            sock.send(message)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def of_this_process() -> Manager:
    return Manager(os.environ, os.getpid())
