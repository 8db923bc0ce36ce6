"""File descriptors attached to packets (SCM_RIGHTS): all ends of SEQPACKET links receive them in the same way."""

from __future__ import annotations

import array
import socket
from collections.abc import Iterable
from typing import Any

DESCRIPTORS = 253
"""Maximum number of descriptors that the kernel passes with one packet (SCM_MAX_FD)."""
_INT = array.array("i").itemsize
ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS * _INT)
"""Ancillary buffer size for that many descriptors."""
LOST = (
    "descriptors were lost because this process has too many open files; close some, or raise its limit "
    "(RLIMIT_NOFILE; LimitNOFILE= of a systemd unit)"
)
"""Error text for MSG_CTRUNC: ANCILLARY_BYTES suffices for all descriptors, so the process has run out of them."""


def received(ancillary: Iterable[tuple[int, int, Any]]) -> list[int]:
    """The descriptors in recvmsg's ancillary data; the caller closes them."""
    numbers = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % _INT])
    return list(numbers)
