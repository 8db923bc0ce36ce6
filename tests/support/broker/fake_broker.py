"""A fake broker for tests of clients: it speaks the protocol, and the test decides how it handles each request.

It runs in a thread of the test's process. It answers Hello, Ask and requests to the models below by itself; the model
`hold` leaves the request for the test to answer. It verifies and records every message.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import queue
import select
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from shmserve.errors import NotFound, ServeError
from shmserve.protocol import codec, messages
from shmserve.shm.arena import Arena
from shmserve.shm.extents import memfd, posix
from shmserve.shm.mapped import Mapped
from shmserve.transport.keys import make_pair, write_pair
from tests.support.patience import PATIENCE_S

_BYTE = np.dtype("uint8")
_INT = array.array("i").itemsize
NOTHING = object()
"""Marks a query that is never answered."""


class Parts:
    """A request that is answered with numbers: as many as it asks for, never more than its window allows."""

    def __init__(self, peer: Peer, infer: messages.Infer, frames: list[bytes]) -> None:
        assert infer.options is not None
        (x,) = infer.inputs
        self.peer = peer
        self.request = infer.request
        self.count = int(np.frombuffer(peer.bytes_of(x, frames), np.float32)[0])
        self.wish = infer.options.parameters
        self.room = infer.options.window
        self.sent = 0

    def proceed(self) -> None:
        """Sends as many parts as the window allows. An end without outputs needs no window."""
        send, frames = self.peer.send, list[bytes]()
        while self.room and self.sent < self.count:
            data = np.full(int(self.wish.get("size", 1)), self.sent, np.float32).tobytes()
            frames = []
            y = self.peer.tensor("y", "FP32", (len(data) // 4,), data, frames)
            self.sent += 1
            self.room -= 1
            last = self.sent == self.count and bool(self.wish.get("full_end"))
            send(messages.Part(self.request, 1, (y,), {"index": self.sent}, last), frames=tuple(frames))
            if last:
                self.peer.streams.pop(self.request)
                return
        if self.sent == self.count:
            del self.peer.streams[self.request]
            if self.wish.get("fail"):
                send(messages.Fail(self.request, "MODEL_FAILED", "no more of this"))
            else:
                send(messages.Part(self.request, 1, (), None, True))


class Peer:
    """One client's connection."""

    def __init__(self, broker: FakeBroker, owner: int, sock: socket.socket | None, identity: bytes) -> None:
        self.broker = broker
        self.owner = owner
        self.sock = sock
        self.identity = identity
        self.outputs = ""
        self.name = ""
        self.mapped = Mapped()
        self.announced: set[int] = set()
        self.held: list[messages.Handle] = []
        self.streams: dict[int, Parts] = {}
        """Request -> its stream, for requests answered in parts."""
        self.closed = False
        make = posix.create if sock is None else lambda size: memfd.create(size, seal_future_write=True)
        self.arena = Arena(owner + 1000, make, limit_bytes=1 << 30)

    def send(self, *sent: Any, descriptors: tuple[int, ...] = (), frames: tuple[bytes, ...] = ()) -> None:
        data = codec.encode(list(sent))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        if self.sock is None:
            self.broker.router.send_multipart([self.identity, data, *frames])
            return
        with contextlib.suppress(BrokenPipeError):  # the client has disconnected; reading reports that
            self.sock.sendmsg([data], rights)

    def bytes_of(self, tensor: messages.Tensor, frames: list[bytes]) -> bytes:
        if isinstance(tensor.data, bytes):
            return tensor.data
        if isinstance(tensor.data, int):
            return frames[tensor.data]
        return b"".join(
            self.mapped.memory(handle) if handle.segment in self.mapped else self.own(handle) for handle in tensor.data
        )

    def own(self, handle: messages.Handle) -> bytes:
        """The bytes of an output of this broker that the client passes on; the client must hold it."""
        assert any(
            held.segment == handle.segment
            and held.offset <= handle.offset
            and handle.offset + handle.size <= held.offset + held.size
            for held in self.held
        ), f"{handle} is not held"
        segment = next(found for found in self.arena.segments if found.id == handle.segment)
        return bytes(segment.memory[handle.offset : handle.offset + handle.size])

    def tensor(
        self, name: str, dtype: str, shape: tuple[int, ...], data: bytes, frames: list[bytes]
    ) -> messages.Tensor:
        """An output in the form that the client requests: inline, in a frame, or in shared memory, announced first."""
        if len(data) <= messages.INLINE_BYTES:
            return messages.Tensor(name, dtype, shape, data)
        if self.outputs == "frames":
            frames.append(data)
            return messages.Tensor(name, dtype, shape, len(frames) - 1)
        return messages.Tensor(name, dtype, shape, (self.give(data),))

    def give(self, data: bytes) -> messages.Handle:
        block = self.arena.allocate(len(data))
        block.memory()[:] = data
        if block.segment not in self.announced:
            self.announced.add(block.segment)
            self.send(block.home.map(), descriptors=() if block.home.name else (block.home.fd,))
        handle = block.handle()
        self.held.append(handle)
        return handle

    def close(self) -> None:
        self.closed = True
        self.arena.close()
        self.mapped.close()
        if self.sock is not None:
            self.sock.close()


Behaviour = Callable[["FakeBroker", Peer, messages.Infer, "list[bytes]"], None]


def echo(broker: FakeBroker, peer: Peer, infer: messages.Infer, frames: list[bytes]) -> None:
    """Outputs are the inputs, under the same names. Outputs with a place are written there."""
    places = {wanted.name: wanted.place for wanted in infer.outputs or ()}
    out_frames: list[bytes] = []
    outputs = []
    for tensor in infer.inputs:
        if infer.outputs is not None and tensor.name not in places:
            continue
        data = peer.bytes_of(tensor, frames)
        place = places.get(tensor.name)
        if place is not None and len(data) > messages.INLINE_BYTES:
            place = messages.Handle(place.segment, place.offset, len(data))
            peer.mapped.writable(place, _BYTE, (len(data),))[:] = np.frombuffer(data, _BYTE)
            outputs.append(messages.Tensor(tensor.name, tensor.dtype, tensor.shape, (place,)))
        else:
            outputs.append(peer.tensor(tensor.name, tensor.dtype, tensor.shape, data, out_frames))
    parameters = dict(infer.options.parameters) if infer.options is not None else None
    peer.send(messages.Reply(infer.request, infer.version or 1, tuple(outputs), parameters), frames=tuple(out_frames))


def rows(broker: FakeBroker, peer: Peer, infer: messages.Infer, frames: list[bytes]) -> None:
    """Like echo, but each output comes in two parts along axis 0."""
    outputs = []
    for tensor in infer.inputs:
        data = peer.bytes_of(tensor, frames)
        cut = len(data) // tensor.shape[0] * (tensor.shape[0] // 2)
        outputs.append(
            messages.Tensor(tensor.name, tensor.dtype, tensor.shape, (peer.give(data[:cut]), peer.give(data[cut:])))
        )
    peer.send(messages.Reply(infer.request, 1, tuple(outputs)))


def refuse(broker: FakeBroker, peer: Peer, infer: messages.Infer, frames: list[bytes]) -> None:
    peer.send(messages.Fail(infer.request, "NOT_FOUND", f"Request for unknown model: '{infer.model}' is not found"))


def hold(broker: FakeBroker, peer: Peer, infer: messages.Infer, frames: list[bytes]) -> None:
    broker.parked.put((peer, infer, frames))


def die(broker: FakeBroker, peer: Peer, infer: messages.Infer, frames: list[bytes]) -> None:
    """Ends the connection; the second attempt is answered."""
    if broker.deaths:
        echo(broker, peer, infer, frames)
        return
    broker.deaths += 1
    broker.drop(peer)


def garble(broker: FakeBroker, peer: Peer, infer: messages.Infer, frames: list[bytes]) -> None:
    """Sends an answer whose bytes do not fit its shape."""
    peer.send(messages.Reply(infer.request, 1, (messages.Tensor("x", "FP32", (1000,), b"abc"),)))


def parts(broker: FakeBroker, peer: Peer, infer: messages.Infer, frames: list[bytes]) -> None:
    peer.streams[infer.request] = Parts(peer, infer, frames)
    peer.streams[infer.request].proceed()


MODELS: dict[str, Behaviour] = {model.__name__: model for model in (echo, rows, hold, die, garble, parts)}


ECHOED = [
    {"name": name, "datatype": datatype, "shape": shape}
    for name, datatype, shape in (
        ("x", "INT64", []),
        ("float", "FP64", []),
        ("list", "INT64", [2, 2]),
        ("string", "BYTES", []),
    )
]
"""The inputs of `echo`, for clients that pass Python values. Others may have any name and type."""


class FakeBroker:
    """`path` is a directory for lane.sock, broker.sock. `start` may be called again after `stop`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parked: queue.SimpleQueue[tuple[Peer, messages.Infer, list[bytes]]] = queue.SimpleQueue()
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Every received message, except Infer."""
        self.requests: list[messages.Infer] = []
        self.packets: list[list[Any]] = []
        self.deaths = 0
        self.ready = True
        self.answers: dict[str, Any] = {}
        """Query -> the answer, or a function of model, version and body that returns or raises one."""
        self.bodies: dict[tuple[Any, int], list[messages.Ask]] = {}
        """Bodies that are not complete."""
        self.pongs = True
        self.pings: list[tuple[Peer, int]] = []
        """Pings not answered, because pongs are switched off."""
        self.peers: dict[Any, Peer] = {}
        self.owners = 0
        self.running = self.started = False
        self.failure: BaseException | None = None
        self.pair = make_pair()
        self.client_key, _ = write_pair(path, "client", make_pair(), "infer")

    @property
    def keys(self) -> dict[str, str]:
        return {"server_key": self.pair.public, "key_file": str(self.client_key)}

    @property
    def lane(self) -> str:
        return f"unix://{self.path}/lane.sock"

    @property
    def ipc(self) -> str:
        return f"ipc://{self.path}/broker.sock"

    # ------------------------------------------------------------------------------------ for the test

    def start(self) -> None:
        for name in ("lane.sock", "broker.sock"):
            (self.path / name).unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(self.path / "lane.sock"))
        self.listener.listen()
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.SNDHWM, 0)  # otherwise a ROUTER drops messages for a slow client
        self.router.bind(self.ipc)
        self.router.setsockopt(zmq.CURVE_SERVER, 1)  # applies to endpoints bound from here on
        self.router.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret.encode())
        self.tcp = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.running = self.started = True
        self.thread = threading.Thread(target=self._run, name="fake-broker")
        self.thread.start()

    def stop(self) -> None:
        if not self.started:
            return
        self.started = False
        if self.running:
            self.do(self._end)
        self.thread.join()
        for peer in list(self.peers.values()):
            self.drop(peer)
        self.listener.close()
        self.router.close(0)
        self.context.term()
        os.close(self.bell)
        if self.failure is not None:
            raise self.failure

    def _end(self) -> None:
        self.running = False

    def do(self, job: Callable[[], object]) -> None:
        """Runs `job` in the broker's thread, waits for its end, and raises what it raised."""
        done: Future[object] = Future()

        def run() -> None:
            try:
                done.set_result(job())
            except BaseException as error:
                done.set_exception(error)

        self.jobs.put(run)
        os.eventfd_write(self.bell, 1)
        done.result(PATIENCE_S)

    def wait_for(self, kind: type) -> Any:
        while True:
            message = self.told.get(timeout=PATIENCE_S)
            if isinstance(message, kind):
                return message

    def next_parked(self) -> tuple[Peer, messages.Infer, list[bytes]]:
        """Returns the longest held request, after waiting for one."""
        return self.parked.get(timeout=PATIENCE_S)

    def answer(self) -> messages.Infer:
        """Answers the longest held request."""
        peer, infer, frames = self.next_parked()
        self.do(lambda: echo(self, peer, infer, frames))
        return infer

    @property
    def held_handles(self) -> list[messages.Handle]:
        return [handle for peer in self.peers.values() for handle in peer.held]

    # ------------------------------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # kept for `stop`; a waiting client must not wait forever
            self.failure = error
            self.running = False
            for peer in list(self.peers.values()):
                self.drop(peer)
            self.listener.close()
            self.router.close(0)

    def _loop(self) -> None:
        poll = select.poll()
        self.poll = poll
        poll.register(self.listener, select.POLLIN)
        zmq_fd = int(self.router.getsockopt(zmq.FD))
        poll.register(zmq_fd, select.POLLIN)
        poll.register(self.bell, select.POLLIN)
        while self.running:
            if int(self.router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._take_zmq()
                continue
            for descriptor, _ in poll.poll():
                if descriptor == self.bell:
                    os.eventfd_read(self.bell)
                    while not self.jobs.empty():
                        self.jobs.get()()
                elif descriptor == self.listener.fileno():
                    sock, _ = self.listener.accept()
                    self.owners += 1
                    self.peers[sock.fileno()] = Peer(self, self.owners, sock, b"")
                    poll.register(sock, select.POLLIN)
                elif descriptor != zmq_fd and descriptor in self.peers:
                    self._take_lane(self.peers[descriptor])

    def drop(self, peer: Peer) -> None:
        """Ends the connection without a message."""
        key = peer.identity if peer.sock is None else peer.sock.fileno()
        if self.peers.pop(key, None) is not None:
            if peer.sock is not None and self.running:
                self.poll.unregister(peer.sock)
            peer.close()

    def _take_lane(self, peer: Peer) -> None:
        sock = peer.sock
        assert sock is not None
        try:
            data, ancillary, flags, _ = sock.recvmsg(
                messages.PACKET_BYTES + 1, socket.CMSG_SPACE(253 * _INT), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            data, ancillary, flags = b"", [], 0
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        numbers = array.array("i")
        for _, _, rights in ancillary:
            numbers.frombytes(rights)
        if not data:
            self.drop(peer)
            return
        self._take(peer, data, list(numbers), [])

    def _take_zmq(self) -> None:
        identity, data, *frames = self.router.recv_multipart()
        peer = self.peers.get(identity)
        if peer is None:
            self.owners += 1
            peer = self.peers[identity] = Peer(self, self.owners, None, identity)
        self._take(peer, data, [], frames)

    def _take(self, peer: Peer, data: bytes, descriptors: list[int], frames: list[bytes]) -> None:
        received = codec.Codec(messages.ClientMessage).decode(data)
        assert not any(isinstance(message, codec.Refused) for message in received), received
        self.packets.append(received)
        for message in received:
            if isinstance(message, messages.Infer):
                assert peer.outputs, "the first message must be Hello"
                self.requests.append(message)
                MODELS.get(message.model, refuse)(self, peer, message, frames)
                continue
            self._heed(peer, message, descriptors)
            self.told.put(message)
            if peer.closed:
                break
        assert not descriptors, "descriptors without a Map"

    def _heed(self, peer: Peer, message: Any, descriptors: list[int]) -> None:
        if isinstance(message, messages.Hello):
            assert message.protocol == messages.PROTOCOL
            assert not peer.outputs
            peer.outputs, peer.name = message.outputs, message.name
            peer.send(messages.Welcome(messages.PROTOCOL, peer.owner, "fake 1"))
        elif isinstance(message, messages.Map):
            assert message.segment >> messages.OWNER_SHIFT == peer.owner
            if message.name is None:
                peer.mapped.add(message.segment, message.size, fd=descriptors.pop(0))
            else:
                with contextlib.suppress(NotFound):  # the client has closed in the meantime, and removed the name
                    peer.mapped.add(message.segment, message.size, name=message.name)
        elif isinstance(message, messages.Unmap):
            if message.segment in peer.mapped:
                peer.mapped.remove(message.segment)
        elif isinstance(message, messages.Return):
            for handle in message.handles:
                peer.held.remove(handle)
                peer.arena.free(handle.segment, handle.offset, handle.size)
        elif isinstance(message, messages.Ask):
            self._gather(peer, message)
        elif isinstance(message, messages.Bye):
            self.drop(peer)
        elif isinstance(message, messages.Ping):
            self.pings.append((peer, message.number))
            if self.pongs:
                self.pong()
        elif isinstance(message, messages.More):
            if message.request in peer.streams:
                peer.streams[message.request].room += message.count
                peer.streams[message.request].proceed()
        else:
            assert isinstance(message, (messages.Cancel, messages.Pong)), message
            if isinstance(message, messages.Cancel):
                self.bodies.pop((peer.owner, message.request), None)
                if peer.streams.pop(message.request, None) is not None:
                    peer.send(messages.Fail(message.request, "CANCELLED", "it was cancelled"))

    def pong(self) -> None:
        """Sends pongs from now on, including for earlier pings."""
        self.pongs = True
        while self.pings:
            peer, number = self.pings.pop(0)
            peer.send(messages.Pong(number))

    def _gather(self, peer: Peer, ask: messages.Ask) -> None:
        """The pieces of a body arrive in order; only the first has its request."""
        asks = self.bodies.setdefault((peer.owner, ask.request), [])
        assert bool(ask.what) is not bool(asks), ask
        asks.append(ask)
        if not ask.more:
            del self.bodies[peer.owner, ask.request]
            self._answer(peer, messages.Ask(ask.request, asks[0].what, asks[0].model, asks[0].version, b""), asks)

    def _answer(self, peer: Peer, ask: messages.Ask, asks: list[messages.Ask]) -> None:
        known = {
            "live": {"live": True},
            "ready": {"ready": self.ready},
            "loaded": {"loaded": True},
            "models": [{"name": "echo", "version": "1", "state": "READY", "reason": ""}],
            "metadata": {"inputs": ECHOED} if ask.model == "echo" else None,
        }
        said = self.answers.get(ask.what, known.get(ask.what))
        if callable(said):
            try:
                said = said(ask.model, ask.version, b"".join([piece.body for piece in asks]))
            except ServeError as error:
                peer.send(messages.Fail(ask.request, error.code, str(error)))
                return
        if said is NOTHING:
            return
        if said is None:
            peer.send(messages.Fail(ask.request, "NOT_FOUND", f"Request for unknown model: '{ask.model}' is not found"))
            return
        body = json.dumps(said).encode()
        chunks = [body[start : start + 40_000] for start in range(0, len(body), 40_000)]
        for number, chunk in enumerate(chunks):
            peer.send(messages.Answer(ask.request, chunk, number + 1 < len(chunks)))
