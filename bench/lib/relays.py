"""Baseline without a server: a round trip through three processes, the middle one of which only forwards messages.

    client - relay - worker, over Unix SEQPACKET sockets or over ZeroMQ (DEALER - ROUTER | ROUTER - DEALER)

Several implementations of the relay are measured, and the fastest one is the baseline.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from bench.lib.child import Answer, Handler
from bench.lib.clock import durations, summary
from shmserve.system.process import PDEATHSIG, prctl

RECEIVE = 1 << 18


def forked(body: Callable[[], None], closed: tuple[socket.socket, ...] = ()) -> None:
    """Runs `body` in a forked child, which is killed when its parent exits. The child closes the sockets `closed`. The
    parent must not have started threads yet.
    """
    parent = os.getpid()
    if os.fork():
        return
    prctl(PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for end in closed:
        end.close()
    with suppress(ConnectionError):
        body()
    os._exit(0)


# `recv_into`, because `recv` allocates a buffer for the largest packet on each call, which costs several times as much
# as the call itself.
def _echo(end: socket.socket) -> None:
    room = memoryview(bytearray(RECEIVE))
    receive, send = end.recv_into, end.send
    while size := receive(room):
        send(room[:size])


def _relay_blocking(front: socket.socket, back: socket.socket) -> None:
    room = memoryview(bytearray(RECEIVE))
    while size := front.recv_into(room):
        back.send(room[:size])
        front.send(room[: back.recv_into(room)])


def _relay_epoll(front: socket.socket, back: socket.socket) -> None:
    room = memoryview(bytearray(RECEIVE))
    poll = select.epoll()
    other = {front.fileno(): (front.recv_into, back.send), back.fileno(): (back.recv_into, front.send)}
    for fd in other:
        poll.register(fd, select.EPOLLIN)
    while True:
        for fd, _ in poll.poll():
            receive, send = other[fd]
            size = receive(room)
            if not size:
                return
            send(room[:size])


def seqpacket(size: int, relay: str) -> Handler:
    client, front = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    back, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    forked(lambda: _echo(worker), (client, front, back))
    forward = {"blocking": _relay_blocking, "epoll": _relay_epoll}[relay]
    forked(lambda: forward(front, back), (client, worker))
    for end in (front, back, worker):
        end.close()
    message = os.urandom(size)
    room = bytearray(RECEIVE)

    def trip() -> None:
        client.send(message)
        client.recv_into(room)

    return lambda seconds: summary(durations(trip, seconds, warm=50))


def _zmq_socket(kind: str, address: str, bind: bool) -> Any:
    import zmq

    end: Any = zmq.Context.instance().socket(getattr(zmq, kind))
    end.linger = 0
    if bind:
        end.bind(address)
    else:
        end.connect(address)
    return end


def _zmq_echo(address: str) -> None:
    worker = _zmq_socket("DEALER", address, bind=False)
    worker.send(b"here")
    while True:
        worker.send_multipart(worker.recv_multipart())


def _zmq_relay(front_address: str, back_address: str, poll: bool) -> None:
    import zmq

    front = _zmq_socket("ROUTER", front_address, bind=True)
    back = _zmq_socket("ROUTER", back_address, bind=True)
    worker = back.recv_multipart()[0]
    if not poll:
        while True:
            back.send_multipart([worker, *front.recv_multipart()])
            front.send_multipart(back.recv_multipart()[1:])
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    poller.register(back, zmq.POLLIN)
    while True:
        for end, _ in poller.poll():
            if end is front:
                back.send_multipart([worker, *front.recv_multipart()])
            else:
                front.send_multipart(back.recv_multipart()[1:])


def zeromq(size: int, relay: str) -> Handler:
    place = tempfile.TemporaryDirectory(prefix="bench-")
    front, back = (f"ipc://{place.name}/{name}" for name in ("front", "back"))
    forked(lambda: _zmq_echo(back))
    forked(lambda: _zmq_relay(front, back, poll=relay == "poll"))
    client = _zmq_socket("DEALER", front, bind=False)
    message = os.urandom(size)

    def trip() -> None:
        client.send(message)
        client.recv()

    def handle(seconds: float, _kept: object = place) -> Answer:
        return summary(durations(trip, seconds, warm=50))

    return handle
