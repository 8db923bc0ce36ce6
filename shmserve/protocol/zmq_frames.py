"""Messages in and out of ZeroMQ's sockets. The rule: flags are plain numbers, and whether more is to come is asked of
the parts: what pyzmq does for that with enumerations takes longer than the sockets do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

NOBLOCK = int(zmq.NOBLOCK)
IN, OUT = int(zmq.POLLIN), int(zmq.POLLOUT)
_MORE = NOBLOCK | int(zmq.SNDMORE)
_EVENTS = zmq.EVENTS


def receive(socket: Any) -> list[Any]:
    """A message: its first part as bytes, and the others, which may be large, as read-only views. zmq.Again: none is
    there."""
    frame = socket.recv(NOBLOCK, False)
    parts = [frame.bytes]
    while frame.more:
        frame = socket.recv(NOBLOCK, False)
        parts.append(frame.buffer.toreadonly())
    return parts


def receive_from(socket: Any) -> list[Any]:
    """The same of a ROUTER: the identity, and the message."""
    identity = socket.recv(NOBLOCK)
    return [identity, *receive(socket)]


def send(socket: Any, parts: Sequence[Any]) -> None:
    """zmq.Again: there is no room."""
    *first, last = parts
    for part in first:
        socket.send(part, _MORE)
    socket.send(last, NOBLOCK)


def events(socket: Any) -> int:
    """IN and OUT: what can be done now. To ask swallows the signal on the socket's descriptor."""
    found: int = socket.get(_EVENTS)
    return found
