"""Sends and receives multipart messages on ZeroMQ sockets without blocking.

Flags are plain integers, because pyzmq's enums take longer than the socket operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import zmq

NOBLOCK = int(zmq.NOBLOCK)
IN, OUT = int(zmq.POLLIN), int(zmq.POLLOUT)
_MORE = NOBLOCK | int(zmq.SNDMORE)
_EVENTS = zmq.EVENTS


def receive(socket: Any) -> list[Any]:
    """Receives a message: the first part as bytes, the others, which may be large, as read-only views. Raises zmq.Again
    if there is none."""
    frame = socket.recv(NOBLOCK, False)
    parts = [frame.bytes]
    while frame.more:
        frame = socket.recv(NOBLOCK, False)
        parts.append(frame.buffer.toreadonly())
    return parts


def send(socket: Any, parts: Sequence[Any]) -> None:
    """Raises zmq.Again if the queue is full."""
    *first, last = parts
    for part in first:
        socket.send(part, _MORE)
    socket.send(last, NOBLOCK)


def send_to(socket: Any, identity: bytes, parts: Sequence[Any], gone: Callable[[], object]) -> bool:
    """Sends from a ROUTER. False if the queue of the peer is full; calls `gone` if there is no such peer any more."""
    try:
        send(socket, (identity, *parts))
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        gone()
    return True


def events(socket: Any) -> int:
    """The possible operations, IN and OUT. The query resets the edge-triggered signal of the socket's descriptor."""
    flags: int = socket.get(_EVENTS)
    return flags
