"""A ZeroMQ link: a DEALER socket over ipc, or over tcp with CURVE.

Invariant: the socket is only used while holding its guard, as libzmq sockets are not thread-safe; waiting happens
outside, on its descriptor. libzmq reconnects on its own, but the server has dropped the client's state by then, so the
first disconnect that the socket's monitor reports ends the link.
"""

from __future__ import annotations

import os
import select
import struct
import threading
import time
from typing import Any

import zmq

from shmserve.errors import ConnectionLost, Denied, ProtocolError, ServeError, Unavailable
from shmserve.protocol import zmq_frames
from shmserve.session import Incoming, Packet
from shmserve.transport.address import Address, no_server

LINGER_MS = 500
HEARTBEAT_MS = 2000
"""Over tcp, a peer that vanishes is detected after three of these."""
QUEUE = 4096
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
UNKNOWN_KEY = 400
"""ZAP status code for an unknown key."""
_EVENT = struct.Struct("=hi")


class ZmqLink:
    def __init__(self, address: Address) -> None:
        self._address = address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._guard = threading.Lock()
        self._established = False
        self._ended = False
        self._waiting = False
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        self._monitor_ready = True
        """Whether the monitor socket may have events."""
        try:
            self._configure(self._socket)
            self._socket.connect(address.url)
        except zmq.ZMQError as error:
            self.close()
            raise no_server(address, error.strerror or "invalid address") from error
        for descriptor in self.descriptors():
            self._poll.register(descriptor, select.POLLIN)
        self._poll.register(self._wakeup, select.POLLIN)

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        """Sets all options, which must happen before connect."""
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, QUEUE)
        socket.setsockopt(zmq.RCVHWM, 0)
        keys = self._address.keys
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())
            socket.setsockopt(zmq.IPV6, "[" in self._address.path)
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * HEARTBEAT_MS)

    # ------------------------------------------------------------------------------------ sending

    def send(self, packet: Packet) -> bool:
        with self._guard:
            if self._ended:
                raise ConnectionLost("the connection to the server ended")
            try:
                zmq_frames.send(self._socket, (packet.data, *packet.frames))
            except zmq.Again:
                return False
            # Sending may have consumed the edge-triggered signal for incoming packets, so wake up the receiver.
            if self._waiting and self._events() & zmq_frames.IN:
                os.eventfd_write(self._wakeup, 1)
        return True

    def in_use(self) -> bool:
        return self._guard.locked()

    def wait_writable(self, wait: float | None) -> None:
        """Waits until the socket is writable. libzmq's threads signal this on the same descriptor as all other
        events."""
        poll = select.poll()
        with self._guard:
            if self._ended or self._events() & zmq_frames.OUT:
                return
            poll.register(self.descriptors()[0], select.POLLIN)
        poll.poll(1 if wait is None else min(1.0, max(0.0, wait) * 1000))

    # ------------------------------------------------------------------------------------ receiving

    def receive_or_event(self, wait: float | None, to_send: bool = False) -> Incoming | None:
        end = None if wait is None else time.monotonic() + wait
        while True:
            with self._guard:
                parts = self._take()
                if parts is not None:
                    return parts[0], [], parts[1:]
                if self._monitor_ready or (wait is not None and wait <= 0):
                    self._process_monitor_events()
                if to_send:
                    events = self._events()
                    if events & zmq_frames.OUT:
                        return None
                    if events & zmq_frames.IN:
                        continue  # querying the events has consumed the signal for this one
                self._waiting = True
            remaining = None if end is None else end - time.monotonic()
            woken = False
            try:
                if remaining is not None and remaining <= 0:
                    return None
                for descriptor, _ in self._poll.poll(None if remaining is None else remaining * 1000 + 1):
                    woken |= descriptor == self._wakeup
                    self._monitor_ready |= descriptor == self._monitor_fd
            finally:
                self._waiting = False
            if woken:
                os.eventfd_read(self._wakeup)
                with self._guard:
                    parts = self._take()
                return None if parts is None else (parts[0], [], parts[1:])

    receive = receive_or_event

    def _take(self) -> list[Any] | None:
        if self._ended:
            raise ConnectionLost("the connection to the server ended")
        if not zmq_frames.events(self._socket) & zmq_frames.IN:  # cheaper than a failing receive
            return None
        return zmq_frames.receive(self._socket)

    def _process_monitor_events(self) -> None:
        self._monitor_ready = False
        while zmq_frames.events(self._monitor) & zmq_frames.IN:
            event, value = _EVENT.unpack(zmq_frames.receive(self._monitor)[0])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._established = True
            elif event == zmq.EVENT_CONNECT_RETRIED and not self._established:
                raise no_server(self._address, "connection refused")
            elif event == zmq.EVENT_DISCONNECTED:
                raise ConnectionLost("the connection to the server ended")
            elif event != zmq.EVENT_CONNECT_RETRIED:
                raise self._refused(event, value)

    def _refused(self, event: int, value: int) -> ServeError:
        """The error for a failed handshake, which libzmq would retry forever."""
        url, keys = self._address.url, self._address.keys
        if keys is None:
            return ConnectionLost(f"the server at {url} refused the connection")
        if event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return Denied(
                f"the server at {url} did not complete the handshake: it does not have the server key {keys.server}, "
                "or too many clients are connecting; check the url and server_key="
            )
        if value != UNKNOWN_KEY:
            return Unavailable(f"the server at {url} is stopping and accepts no new connections; try again later")
        return Denied(
            f"the server at {url} rejected the key {keys.own.public}: its operator must add the line in your NAME.pub "
            "to the file of --zmq-keys"
        )

    def wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    def descriptors(self) -> list[int]:
        return [int(self._socket.getsockopt(zmq.FD)), self._monitor_fd]

    def _events(self) -> int:
        return zmq_frames.events(self._socket)

    # ------------------------------------------------------------------------------------ closing

    awaits_lease = False

    def open_lease(self, lease: int, fd: int) -> None:
        raise ProtocolError("the server sent a lease over ZeroMQ, which passes no descriptors")

    def close_lease(self, lease: int) -> list[bytes]:
        return []

    def interrupt(self) -> None:
        self._ended = True
        os.eventfd_write(self._wakeup, 1)

    def close(self, linger: bool = False) -> None:
        with self._guard:
            self._ended = True
            if not self._socket.closed:
                self._socket.disable_monitor()
                self._monitor.close(0)
                self._socket.close(LINGER_MS if linger else 0)
            wakeup, self._wakeup = self._wakeup, -1
        if wakeup >= 0:
            os.close(wakeup)
            self._context.term()

    def abandon(self) -> None:
        """Keeps the link: libzmq must not be called at all in a forked child, not even to close."""
        _of_parents.append(self)


_of_parents: list[ZmqLink] = []
"""Links inherited by a fork, kept alive so that they are not finalised."""
