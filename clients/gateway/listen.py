"""The listening sockets of one door. The rule of the file: certificates are changed under them without closing them, so
that nobody who is connecting notices.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any

BACKLOG = 1024
HANDSHAKE_S = 10.0
"""At most, for the handshake of TLS; who has not done with it by then is let go."""
_GOODBYE_S = 5.0
"""For the caller's last word of TLS."""


class Listener:
    """`made` makes the protocol of a new connection. `patience_s`: for the handshake of TLS."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, made: Callable[[], asyncio.BaseProtocol], patience_s: float = HANDSHAKE_S
    ) -> None:
        self._loop = loop
        self._made = made
        self._patience_s = min(patience_s, HANDSHAKE_S)
        self._servers: list[asyncio.Server] = []

    async def open(self, address: str, port: int, share: bool, tls: ssl.SSLContext | None = None) -> int:
        """Listens, and says on which port. `share`: others may listen there as well, and the kernel spreads callers."""
        server = await self._loop.create_server(
            self._made, address, port, reuse_port=share or None, backlog=BACKLOG, **self._with(tls)
        )
        self._servers = [server]
        found: int = server.sockets[0].getsockname()[1]
        return found

    async def reopen(self, tls: ssl.SSLContext) -> None:
        """With other certificates for who comes from now on. On OSError the old ones stay."""
        made: list[asyncio.Server] = []
        try:
            for old in self._servers:
                for listening in old.sockets:
                    made.append(await self._again(listening.fileno(), tls))
        except OSError:
            for server in made:
                server.close()
            raise
        self.close()
        self._servers = made

    async def _again(self, descriptor: int, tls: ssl.SSLContext) -> asyncio.Server:
        same = socket.socket(fileno=os.dup(descriptor))
        try:
            return await self._loop.create_server(self._made, sock=same, backlog=BACKLOG, **self._with(tls))
        except OSError:
            same.close()
            raise

    def close(self) -> None:
        for server in self._servers:
            server.close()
        self._servers = []

    def _with(self, tls: ssl.SSLContext | None) -> dict[str, Any]:
        if tls is None:
            return {}
        return {"ssl": tls, "ssl_handshake_timeout": self._patience_s, "ssl_shutdown_timeout": _GOODBYE_S}


def is_local(host: str) -> bool:
    """Whether nobody but this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
