"""The ZeroMQ listener on TCP: a ROUTER with CURVE, whose clients are identified by their keys. A message is [packet,
frame, frame, ...], as on ipc.

Invariant: only libzmq handles a client before its handshake has succeeded with a permitted key. A client may choose its
identity, so the key and connection of each message come from libzmq.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import zmq

from shmserve.errors import Internal, ProtocolError, Unavailable
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.turns import SlicedWork
from shmserve.gateway.metrics import family
from shmserve.gateway.upstream.link import GatewayLink
from shmserve.gateway.zmq_tcp.keys import FULL, GOOD, UNKNOWN, KeyEntry, KeyFile, Zap
from shmserve.gateway.zmq_tcp.peer import Peer, ZmqLimits, decode
from shmserve.protocol import zmq_frames
from shmserve.protocol.messages import PACKET_BYTES, Hello
from shmserve.transport.address import TCP_FRAME_BYTES
from shmserve.transport.keys import Pair

log = logging.getLogger("shmserve.gateway")

QUEUE = 16
"""Number of messages that libzmq queues per client and direction."""
BACKLOG = 1024
HANDSHAKE_MS = 5000
HEARTBEAT_MS = 5000
"""A client that vanished without closing its connection is detected after three of these."""
LINGER_MS = 500
BURST = 64
BURST_S = 0.001
"""Number of ZeroMQ messages, or time, after which other work of the event loop gets its turn. The rest of a packet is
then processed in the next iteration, before anything else is read."""
CHECKED = 16
"""The time is checked after this many messages of a packet."""
FILE_S = 2.0
"""Interval at which the key file is checked for changes."""
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENT = struct.Struct("=hi")
LOG_INTERVAL_S = 1.0
NO_ENTRY = KeyEntry(0, "")

monotonic = time.monotonic


class ZmqTcpListener:
    """`pair`: the keys of the gateway. `key_file`: the keys of clients."""

    def __init__(self, link: GatewayLink, limits: ZmqLimits, pair: Pair, key_file: KeyFile) -> None:
        self.link = link
        self.limits = limits
        self.stopping = False
        self.messages = 0
        self.refused = 0
        """Number of refused handshakes."""
        self._loop = link.bind()
        self._key_file = key_file
        self._context: zmq.Context[Any] = zmq.Context()
        self._zap = Zap(self._context, self._decide)
        self._socket = self._make(pair)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._peers: dict[bytes, Peer] = {}
        self._by_connection: dict[int, Peer] = {}
        self._of_keys: Counter[str] = Counter()
        self._connections: set[int] = set()
        """Descriptors of connections, including those in the handshake."""
        self._max_connections = min(2 * limits.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._port = 0
        self._dropped: dict[bytes, int] = {}
        """Identities of disconnected clients whose connection still exists -> its descriptor."""
        self._dirty: dict[Peer, None] = {}
        self._stuck: dict[Peer, None] = {}
        self._scheduled = False
        self._packet: SlicedWork[None] = _nothing()
        """The rest of the packet that is being processed."""
        self._logged_at = -LOG_INTERVAL_S
        self._idle = asyncio.Event()
        self._watched = [self._zap.descriptor, self._descriptor(self._socket), self._descriptor(self._monitor)]
        for descriptor in self._watched:
            self._loop.add_reader(descriptor, self._receive)
        self._clock = self._loop.call_later(FILE_S, self._tick)

    def _make(self, pair: Pair) -> zmq.Socket[bytes]:
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        router.setsockopt(zmq.ZAP_DOMAIN, b"shmserve")
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # For a frame above this size, libzmq can only close the connection; a smaller one can be refused with a text.
        message_bytes = max(TCP_FRAME_BYTES, self.limits.input_bytes) + PACKET_BYTES
        router.setsockopt(zmq.MAXMSGSIZE, message_bytes)
        router.setsockopt(zmq.SNDHWM, QUEUE)
        router.setsockopt(zmq.RCVHWM, QUEUE)
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * HEARTBEAT_MS)
        router.setsockopt(zmq.LINGER, LINGER_MS)
        return router

    @staticmethod
    def _descriptor(of: zmq.Socket[bytes]) -> int:
        return int(of.getsockopt(zmq.FD))

    def open(self, address: str, share: bool = False) -> int:
        """Listens at tcp://HOST:PORT and returns the port. Raises OSError. `share`: other processes may also listen on
        the port. libzmq has no option for that, so the socket is created here."""
        host, port = host_of(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=share) as listening:
            listening.setblocking(False)
            bound_port: int = listening.getsockname()[1]
            self._socket.setsockopt(zmq.IPV6, family == socket.AF_INET6)
            self._socket.setsockopt(zmq.USE_FD, listening.fileno())
            self._socket.bind(f"tcp://{f'[{host}]' if ':' in host else '127.0.0.1'}:{bound_port}")
            listening.detach()
        self._port = bound_port
        return bound_port

    @property
    def keys(self) -> int:
        return len(self._key_file.entries)

    @property
    def peers(self) -> int:
        return len(self._peers)

    # ------------------------------------------------------------------------------------ input

    def _receive(self) -> None:
        """Reads until nothing is left, because the descriptors are edge-triggered."""
        self._scheduled = False
        if self._socket.closed:
            return
        self._zap.answer_requests()
        receive = self._socket.recv_multipart
        end = monotonic() + BURST_S
        for _ in range(BURST):
            if not self._go_on_with_packet(end):
                self._soon()
                break
            try:
                parts = receive(zmq_frames.NOBLOCK, copy=False)
            except zmq.Again:
                self._read_monitor()
                break
            self._read_monitor()  # the end of a connection precedes the first message of the next
            self._take(parts)
        else:
            self._soon()
        self._flush()

    def _go_on_with_packet(self, end: float) -> bool:
        """Processes the packet until this time. False: the time is over."""
        for count, _ in enumerate(self._packet):
            if count % CHECKED == 0 and monotonic() > end:
                return False
        return monotonic() <= end

    def _soon(self) -> None:
        """Schedules another check: sending may have consumed the edge that signals input."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._receive)

    def _read_monitor(self) -> None:
        while zmq_frames.events(self._monitor) & zmq_frames.IN:
            event, value = _EVENT.unpack(zmq_frames.receive(self._monitor)[0])
            if event == zmq.EVENT_ACCEPTED:
                self._connections.add(value)
                if len(self._connections) > self._max_connections:
                    self._cut(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._disconnected(value)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self.refused += 1

    def _cut(self, connection: int) -> None:
        """libzmq does not limit connections in the handshake, so the socket of an excess connection is shut down
        directly, and libzmq notices. The descriptor may have been reused: then its port differs, or it is itself an
        excess connection."""
        try:
            with socket.socket(fileno=os.dup(connection)) as excess:
                if excess.family in (socket.AF_INET, socket.AF_INET6) and excess.getsockname()[1] == self._port:
                    excess.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has already ended
        self.refused += 1

    def _disconnected(self, connection: int) -> None:
        self._connections.discard(connection)
        peer = self._by_connection.get(connection)
        if peer is not None:
            self.drop(peer, False)
        for identity in [one for one, its in self._dropped.items() if its == connection]:
            del self._dropped[identity]

    def _take(self, parts: Sequence[zmq.Frame]) -> None:
        first = parts[0]
        identity, key, connection = first.bytes, str(first.get("User-Id")), int(first.get(zmq.SRCFD))
        self.messages += 1
        peer = self._peers.get(identity)
        if peer is not None and (peer.connection != connection or peer.key != key):
            self.drop(peer, False)  # another connection uses the identity of one that has ended
            peer = None
        packet: Buffer = parts[1].buffer if len(parts) > 1 else b""
        if peer is None:
            if self._dropped.get(identity) == connection and not _is_hello(packet):
                return  # the client was disconnected and got the reason
            peer = self._enter(identity, connection, key, str(first.get("Peer-Address")))
            if peer is None:
                return
        self._packet = self._received(peer, packet, [part.buffer for part in parts[2:]])

    def _received(self, peer: Peer, packet: Buffer, frames: Sequence[Buffer]) -> SlicedWork[None]:
        try:
            yield from peer.receive(packet, frames)
        except Exception:  # an internal error must not affect other clients
            log.exception("cannot process a message of a ZeroMQ client")
            peer.goodbye(Internal("the gateway could not process a message of this client; see its log"))

    def _enter(self, identity: bytes, connection: int, key: str, address: str) -> Peer | None:
        self._dropped.pop(identity, None)
        entry = self._key_file.entries.get(key)
        peer = Peer(self, identity, connection, key, entry or NO_ENTRY, address)
        limits, of_key = self.limits, self._of_keys[key]
        count = len(self._peers)
        self._peers[identity] = self._by_connection[connection] = peer
        self._of_keys[key] += 1
        if entry is None:
            peer.revoked()
        elif count >= limits.connections:
            peer.goodbye(Unavailable(f"{count} clients are connected, the limit (connections); retry later"))
        elif of_key >= limits.key_connections:
            peer.goodbye(
                Unavailable(f"{of_key} clients are connected with this key, the limit (key_connections); close some")
            )
        return None if peer.gone else peer

    def _decide(self, key: str, address: str) -> bytes:
        """The answer to a ZAP request."""
        self.read_keys()
        status = GOOD
        if key not in self._key_file.entries:
            status = UNKNOWN
        elif self.stopping:
            status = FULL
        if status != GOOD:
            self.refused += 1
            now = monotonic()
            if now - self._logged_at >= LOG_INTERVAL_S:  # a client that retries must not fill the log
                self._logged_at = now
                why = "it is not in the file of --zmq-keys" if status == UNKNOWN else "the gateway is stopping"
                log.warning("ZeroMQ: key %s from %s refused: %s", key, address, why)
        return status

    # ------------------------------------------------------------------------------------ output

    def dirty(self, peer: Peer) -> None:
        self._dirty[peer] = None
        self._soon()

    def _flush(self) -> None:
        while self._dirty:
            dirty, self._dirty = self._dirty, {}
            for peer in dirty:
                peer.take_out()
        for peer in list(self._stuck):
            while peer.unsent and self._try(peer, peer.unsent[0]):
                peer.first_sent()
            if not peer.unsent:
                self._stuck.pop(peer, None)
        if self.stopping and not any(peer.tickets for peer in self._peers.values()):
            self._idle.set()

    def send(self, peer: Peer, packet: bytes, frames: Sequence[Buffer]) -> None:
        if peer.gone:
            return
        parts: list[Buffer] = [packet, *frames]
        if not peer.unsent and self._try(peer, parts):
            return
        peer.keep(parts)
        self._stuck[peer] = None
        behind, limit = peer.unsent_bytes, self.limits.unsent_bytes
        if behind > limit and len(peer.unsent) > 1:
            log.info("ZeroMQ: client disconnected: it does not read, and %d bytes are queued for it", behind)
            self.drop(peer, True)

    def _try(self, peer: Peer, parts: Sequence[Buffer]) -> bool:
        """Copies each part once: CURVE copies it again anyway, and pyzmq would release a buffer that libzmq borrows in
        another thread."""
        self._soon()
        gone = partial(self._loop.call_soon, self.drop, peer, False)
        return zmq_frames.send_to(self._socket, peer.identity, parts, gone)

    # ------------------------------------------------------------------------------------ disconnects

    def drop(self, peer: Peer, still_open: bool) -> None:
        if peer.gone:
            return
        peer.end()
        del self._peers[peer.identity]
        if self._by_connection.get(peer.connection) is peer:
            del self._by_connection[peer.connection]
        self._of_keys[peer.key] -= 1
        if not self._of_keys[peer.key]:
            del self._of_keys[peer.key]
        self._dirty.pop(peer, None)
        self._stuck.pop(peer, None)
        if still_open:
            self._dropped[peer.identity] = peer.connection
        if self.stopping:
            self._soon()

    def _tick(self) -> None:
        self._clock = self._loop.call_later(FILE_S, self._tick)
        self.read_keys()

    def read_keys(self) -> None:
        """Reloads changed keys, and applies them to connected clients."""
        if self._key_file.reload_if_changed():
            for peer in list(self._peers.values()):
                peer.key_changed(self._key_file.entries.get(peer.key))

    async def close(self) -> None:
        """Stops accepting requests and waits for those in flight. The socket keeps listening until then, because libzmq
        would close the connections together with it."""
        self.stopping = True
        self._soon()
        await self._idle.wait()
        self._clock.cancel()
        self._flush()
        for descriptor in self._watched:
            self._loop.remove_reader(descriptor)
        for peer in list(self._peers.values()):
            self.drop(peer, False)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._zap.close()
        self._context.term()

    def give_up(self) -> None:
        """Ends `close`. The clients get no error: they connect again, and send their requests to the next gateway."""
        for peer in list(self._peers.values()):
            self.drop(peer, False)
        self._idle.set()

    def metrics(self) -> str:
        about = "ZeroMQ connections over tcp whose handshake failed"
        return (
            family("zmq_connections", "gauge", "ZeroMQ clients over tcp", {"": self.peers})
            + family("zmq_messages_total", "counter", "Messages from ZeroMQ clients over tcp", {"": self.messages})
            + family("zmq_refused_total", "counter", about, {"": self.refused})
        )


def _nothing() -> SlicedWork[None]:
    yield from ()


def _is_hello(packet: Buffer) -> bool:
    try:
        return any(isinstance(message, Hello) for message in decode(packet))  # type: ignore[arg-type]
    except ProtocolError:
        return False


def host_of(address: str) -> tuple[str, int]:
    """`tcp://*:8790` -> `("0.0.0.0", 8790)`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    return "0.0.0.0" if host == "*" else host, int(port)
