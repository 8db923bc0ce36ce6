"""Two gRPC listeners in a separate process, because uvloop keeps its threads.

The first compresses responses, the second closes its connections early. Prints the ports, and then answers each line
of input with a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import uvloop

from shmserve.gateway.http2.codes import Code
from shmserve.gateway.http2.connection import Http2Connection
from shmserve.gateway.http2.interface import Awaits, ServiceCall, TransportStream
from shmserve.gateway.http2.limits import Http2Limits
from shmserve.gateway.http2.listener import RpcListener
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.upstream.receive import Room


class Unary:
    """Answers with the message, except to calls of /test/Wait."""

    awaits = Awaits.NOTHING

    def __init__(self, stream: TransportStream) -> None:
        self.stream = stream
        self.data = b""

    def message(self, data: Buffer) -> None:
        self.data = bytes(data)

    def room(self, size: int, first: Buffer) -> Room | None:
        return None

    def half_closed(self) -> None:
        if self.stream.path != "/test/Wait":
            self.stream.send([self.data])
            self.stream.finish(Code.OK)

    def resume(self) -> None: ...
    def cancelled(self) -> None: ...


async def serve() -> None:
    connections: set[Any] = set()

    def application(stream: TransportStream) -> ServiceCall:
        connections.add(stream.payer(""))
        return Unary(stream)

    loop = asyncio.get_running_loop()
    limits = Http2Limits(message_bytes=32 << 20, compression=1), Http2Limits(age_s=0.05)
    listeners = [RpcListener(Http2Connection, loop, application, each) for each in limits]
    print(json.dumps([await listener.open("127.0.0.1", 0, False) for listener in listeners]), flush=True)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while question := (await reader.readline()).decode().strip():
        held = sum(listener.budget.held for listener in listeners)
        print(held if question == "held" else len(connections), flush=True)
    for listener in listeners:
        await listener.close()


if __name__ == "__main__":
    uvloop.run(serve())
