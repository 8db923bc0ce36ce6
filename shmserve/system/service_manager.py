"""Notifications to the service manager that started this process (sd_notify). Without one, all calls do nothing."""

from __future__ import annotations

import logging
import os
import select
import socket
from collections.abc import MutableMapping

log = logging.getLogger("shmserve")

SEND_TIMEOUT_MS = 1000
"""How long a message that is not repeated waits if the manager's queue is full."""
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class ServiceManager:
    """The service manager that started this process; false if there is none.

    The constructor removes VARIABLES from `environment`, so that children do not inherit them.
    """

    def __init__(self, environment: MutableMapping[str, str], pid: int) -> None:
        variables = {name: environment.pop(name, "") for name in VARIABLES}
        self._socket: socket.socket | None = None
        self._address = ""
        self.watchdog_s = 0.0
        """Time without a heartbeat after which the manager kills this process; 0: no watchdog."""
        address = variables["NOTIFY_SOCKET"]
        if not address:
            return
        if address[0] not in "@/":
            log.warning("NOTIFY_SOCKET is neither a path nor an abstract name: not notifying the service manager")
            return
        self._address = "\0" + address[1:] if address[0] == "@" else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        if variables["WATCHDOG_USEC"].isdecimal() and variables["WATCHDOG_PID"] in ("", str(pid)):
            self.watchdog_s = int(variables["WATCHDOG_USEC"]) / 1e6

    def __bool__(self) -> bool:
        return self._socket is not None

    def notify(self, *fields: str, once: bool = False) -> None:
        """Sends `NAME=VALUE` fields. `once`: the message is not repeated, so wait up to SEND_TIMEOUT_MS if the queue is
        full."""
        if self._socket is None:
            return
        message = "\n".join(fields).encode()
        try:
            self._send(self._socket, message, SEND_TIMEOUT_MS if once else 0)
        except OSError as error:
            log.warning("cannot notify the service manager of %s: %s", fields[0], error.strerror)

    def _send(self, sock: socket.socket, message: bytes, timeout_ms: int) -> None:
        try:
            sock.sendto(message, self._address)
        except BlockingIOError:
            # Connect first: poll reports an unconnected datagram socket as writable even if the peer's queue is full.
            sock.connect(self._address)
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            poll.poll(timeout_ms)
            sock.send(message)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def of_this_process() -> ServiceManager:
    return ServiceManager(os.environ, os.getpid())
