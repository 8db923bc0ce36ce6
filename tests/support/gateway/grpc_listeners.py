"""Doors of gRPC with services for a test, in a process of its own: uvloop never lets go of its threads. The rule of the
file: the first line that is written has the ports; then every line that comes is answered by one line of JSON.

The arguments: a file with the certificate and the key of the door with TLS.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import sys

import uvloop

from shmserve.gateway.http2.codes import Code, RpcError
from shmserve.gateway.http2.connection import Http2Connection
from shmserve.gateway.http2.interface import Awaits, ServiceCall, TransportStream
from shmserve.gateway.http2.limits import Http2Limits
from shmserve.gateway.http2.listener import RpcListener
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.upstream.receive import Room


class Base:
    def __init__(self, stream: TransportStream, told: Told) -> None:
        self.stream = stream
        self.told = told
        self.data = b""

    def message(self, data: Buffer) -> None:
        self.data = bytes(data)

    def room(self, size: int, first: Buffer) -> Room | None:
        return None

    awaits = Awaits.NOTHING

    def half_closed(self) -> None: ...
    def resume(self) -> None: ...
    def cancelled(self) -> None:
        self.told.cancelled.release()


class Unary(Base):
    def half_closed(self) -> None:
        self.stream.send([self.data])
        self.stream.finish(Code.OK)


class Echo(Base):
    def message(self, data: Buffer) -> None:
        self.stream.send([bytes(data)])

    def half_closed(self) -> None:
        self.stream.finish(Code.OK)


class Many(Base):
    """So many messages of such a size, as fast as the caller takes them."""

    def half_closed(self) -> None:
        self.left, self.size = map(int, self.data.split())
        self.number = 0
        self.resume()

    def resume(self) -> None:
        while self.stream.writable and self.left:
            self.left -= 1
            self.stream.send([random.Random(self.number).randbytes(self.size)])
            self.number += 1
        if not self.left:
            self.stream.finish(Code.OK)
        else:
            self.told.waited += 1


class Fail(Base):
    def half_closed(self) -> None:
        code, text = json.loads(self.data)
        raise RpcError(code, text)


class Metadata(Base):
    def half_closed(self) -> None:
        self.stream.send([json.dumps(dict(self.stream.metadata)).encode()])
        self.stream.finish(Code.OK)


class Told:
    """What services were told."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Semaphore(0)
        self.waited = 0
        self.connections: set[str] = set()

    def application(self, stream: TransportStream) -> ServiceCall:
        self.connections.add(stream.peer)
        made = {"Unary": Unary, "Stream": Echo, "Wait": Base, "Many": Many, "Fail": Fail, "Metadata": Metadata}
        kind = made.get(stream.path.removeprefix("/test/"))
        if kind is None:
            raise RpcError(Code.UNIMPLEMENTED, f"no {stream.path}")
        return kind(stream, self)


async def answered(told: Told, listeners: list[RpcListener], question: str) -> int:
    if question == "cancelled":
        await told.cancelled.acquire()
        return 1
    if question == "held":
        return sum(listener.budget.held for listener in listeners)
    if question == "waited":
        return told.waited
    return len(told.connections)


async def serve() -> None:
    """A plain door, one with TLS, and one whose connections grow old quickly."""
    loop, told = asyncio.get_running_loop(), Told()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(sys.argv[1])
    tls.set_alpn_protocols(["h2"])
    limits = Http2Limits(message_bytes=32 << 20, compression=1), Http2Limits(), Http2Limits(age_s=0.05)
    listeners = [RpcListener(Http2Connection, loop, told.application, each) for each in limits]
    ports = [
        await listener.open("127.0.0.1", 0, False, tls if listener is listeners[1] else None) for listener in listeners
    ]
    print(json.dumps(ports), flush=True)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while question := (await reader.readline()).decode().strip():
        print(await answered(told, listeners, question), flush=True)
    for listener in listeners:
        await listener.close()


if __name__ == "__main__":
    uvloop.run(serve())
