"""Ports for programs that are told where to listen."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, *addresses: str) -> list[int]:
    """Ports that are free at all of the addresses. No outgoing connection gets one of them before its program listens:
    the kernel takes those from another range."""
    first, last = map(int, RANGE.read_text().split())
    candidates = [*range(10_000, first), *range(last + 1, 65_536)]
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.sample(candidates, len(candidates)):
            if len(found) == count:
                return found
            with contextlib.suppress(OSError):
                for address in addresses or ("127.0.0.1",):
                    held.enter_context(socket.create_server((address, port)))
                found.append(port)
    raise OSError(f"{RANGE} leaves no {count} free ports")
