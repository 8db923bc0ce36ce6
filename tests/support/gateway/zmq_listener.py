"""The gateway's ZeroMQ listener in a thread, and a client of it that uses only zmq and msgpack."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgpack
import uvloop
import zmq

import shmserve
from shmserve.gateway.upstream.link import GatewayLink
from shmserve.gateway.zmq_tcp.keys import KeyFile
from shmserve.gateway.zmq_tcp.listener import ZmqTcpListener
from shmserve.gateway.zmq_tcp.peer import ZmqLimits
from shmserve.transport.keys import Pair, make_pair, read_pair, write_pair
from tests.support.patience import PATIENCE_S

# Makes what uvloop keeps for good, which the leak check would report.
uvloop.new_event_loop().close()

LIMITS = ZmqLimits(input_bytes=4 << 20, unsent_bytes=8 << 20, connections=8, key_connections=6)
HELLO = [6, 1, 0, "bare", "frames"]


class ListenerThread:
    """Clients with keys: `alice` has all roles, `bob` the role infer, `olga` observe, and `eve` is not in the key
    file."""

    def __init__(self, folder: Path, url: str, address: str = "tcp://127.0.0.1:0", exit_timeout_s: float = 5.0) -> None:
        self.folder = folder
        self.server_key, self.server_public = folder / "server.key", folder / "server.pub"
        if not self.server_key.exists():
            write_pair(folder, "server", make_pair(), "infer")
            roles = {"alice": "infer,observe,operate", "bob": "infer", "olga": "observe", "eve": "infer"}
            for name in roles:
                write_pair(folder, name, make_pair(), roles[name])
        self.write_keys("alice", "bob", "olga")
        self._url = url
        self._address = address
        self._exit_timeout_s = exit_timeout_s
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()), name="zmq-listener")
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)

    def write_keys(self, *names: str) -> None:
        lines = [(self.folder / f"{name}.pub").read_text() for name in names]
        new = self.folder / "keys.new"
        new.write_text("# name by name\n\n" + "".join(lines))
        new.rename(self.folder / "keys")

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        link = GatewayLink(self._url, None, "gateway", 1 << 28)
        link.bind()
        self.listener = ZmqTcpListener(link, LIMITS, read_pair(self.server_key), KeyFile(str(self.folder / "keys")))
        self.url = f"tcp://127.0.0.1:{self.listener.open(self._address)}"
        self._ready.set()
        await self._stop.wait()
        self.loop.call_later(self._exit_timeout_s, self.listener.give_up)
        await self.listener.close()
        await link.close()

    def do(self, what: Any) -> Any:
        async def call() -> Any:
            return what()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(PATIENCE_S)

    def keys(self, name: str) -> dict[str, Any]:
        return {"server_key": self.server_public, "key_file": self.folder / f"{name}.key"}

    def client(self, name: str = "alice", **keys: Any) -> shmserve.Client:
        return shmserve.Client(self.url, **self.keys(name) | keys, timeout=PATIENCE_S)

    def pair(self, name: str) -> Pair:
        return read_pair(self.folder / f"{name}.key")

    def begin_to_stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        self.begin_to_stop()
        self.join()


class Bare:
    """A DEALER with CURVE. `kept`: number of messages that libzmq reads ahead."""

    def __init__(
        self, listener: ListenerThread, name: str, identity: bytes = b"", greet: bool = True, kept: int = 1000
    ) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        pair = listener.pair(name)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, kept)
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, listener.server_public.read_bytes().split()[0])
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        if identity:
            self.socket.setsockopt(zmq.ROUTING_ID, identity)
        self.socket.connect(listener.url)
        self.coming: list[Any] = []
        if greet:
            self.send(HELLO)
            self.welcome = self.receive()
            assert self.welcome[0] == 32

    def send(self, *messages: Any, frames: tuple[bytes, ...] = ()) -> None:
        self.socket.send_multipart([msgpack.packb(list(messages)), *frames])

    def receive(self) -> Any:
        """Returns the next message; its frames are in `frames`."""
        while not self.coming:
            assert self.socket.poll(20_000), "no message was received"
            packet, *self.frames = self.socket.recv_multipart()
            self.coming += msgpack.unpackb(packet)
        return self.coming.pop(0)

    def quiet(self) -> bool:
        """Whether no other message precedes the answer to a ping: all messages have been received."""
        self.send([4, 77])
        return bool(self.receive() == [5, 77])

    def close(self) -> None:
        self.socket.close()
        self._context.term()

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
