"""Descriptors that travel with a packet (SCM_RIGHTS): what all three ends of SEQPACKET links need to receive them."""

from __future__ import annotations

import array
import socket
from collections.abc import Iterable
from typing import Any

DESCRIPTORS = 253
"""The most descriptors that the kernel passes with one packet (SCM_MAX_FD)."""

_INT = array.array("i").itemsize
ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS * _INT)
"""Room for that many beside a packet."""


LOST = (
    "descriptors were lost on the way, as this process has too many open files; close some, or raise its limit "
    "(RLIMIT_NOFILE; LimitNOFILE= of a systemd unit)"
)
"""What to say on MSG_CTRUNC: ANCILLARY_BYTES has room for all descriptors, so the process has run out of them."""


def received(ancillary: Iterable[tuple[int, int, Any]]) -> list[int]:
    """The descriptors in what recvmsg gave. They are the caller's to close."""
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % _INT])
    return list(found)
