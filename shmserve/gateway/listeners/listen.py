"""The listening sockets of one endpoint. Certificates are replaced without closing them, so that no client is refused
while it connects."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable

from shmserve.gateway.listeners.handshakes import Handshakes

BACKLOG = 1024
HANDSHAKE_S = 10.0
"""Maximum time for the TLS handshake; a slower client is disconnected."""
_GOODBYE_S = 5.0
"""Maximum time to wait for the client's TLS close_notify."""


class Listener:
    """`made` makes the protocol of a new connection. `room`: maximum number of connections in the TLS handshake.
    `patience_s`: for the handshake."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        made: Callable[[], asyncio.BaseProtocol],
        room: Callable[[], int],
        patience_s: float = HANDSHAKE_S,
    ) -> None:
        self._loop = loop
        self._made = made
        self._room = room
        self._patience_s = min(patience_s, HANDSHAKE_S)
        self._server: asyncio.Server | None = None
        self._handshakes: Handshakes | None = None

    @property
    def handshakes(self) -> int:
        """Connections whose handshake has not ended."""
        return self._handshakes.count if self._handshakes is not None else 0

    async def open(self, address: str, port: int, share: bool, tls: ssl.SSLContext | None = None) -> int:
        """Listens, and returns the port. `share`: other processes may listen on it too, and the kernel distributes
        clients."""
        server = await self._loop.create_server(
            self._made, address, port, reuse_port=share or None, backlog=BACKLOG, start_serving=tls is None
        )
        found: int = server.sockets[0].getsockname()[1]
        if tls is None:
            self._server = server
            return found
        handshakes = Handshakes(self._loop, self._made, tls, self._patience_s, _GOODBYE_S, self._room)
        for bound in server.sockets:
            listening = socket.socket(fileno=os.dup(bound.fileno()))
            listening.listen(BACKLOG)
            handshakes.listen(listening)
        server.close()
        self._handshakes = handshakes
        return found

    def renew(self, tls: ssl.SSLContext) -> None:
        """Sets the certificates for handshakes that start from now on."""
        assert self._handshakes is not None
        self._handshakes.tls = tls

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._handshakes is not None:
            self._handshakes.close()


def is_local(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
