"""A gRPC server on grpc.aio, one on h2, and a load generator for them.

`grpc_servers.py` runs this file in a separate environment. Each server answers every call with the same bytes, so that
only the cost of the protocol is measured.
"""

from __future__ import annotations

import asyncio
import base64
import struct
import sys
import time
from typing import Any

METHOD = "/inference.GRPCInferenceService/ModelInfer"
HEAD = struct.Struct(">BI")


async def serve_aio(answer: bytes) -> None:
    import grpc

    async def infer(request: bytes, context: Any) -> bytes:
        return answer

    service, method = METHOD[1:].split("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(infer)}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


class H2Server(asyncio.Protocol):
    """Follows h2's example for asyncio."""

    def __init__(self, answer: bytes) -> None:
        from h2.config import H2Configuration
        from h2.connection import H2Connection

        self.answer = HEAD.pack(0, len(answer)) + answer
        self.connection = H2Connection(H2Configuration(client_side=False, header_encoding=None))

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.connection.initiate_connection()
        self.connection.update_settings({3: 1024})  # MAX_CONCURRENT_STREAMS
        transport.write(self.connection.data_to_send())

    def data_received(self, data: bytes) -> None:
        from h2 import events

        for event in self.connection.receive_data(data):
            if isinstance(event, events.DataReceived):
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, events.StreamEnded):
                stream = event.stream_id
                self.connection.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
                self.connection.send_data(stream, self.answer)
                self.connection.send_headers(stream, [("grpc-status", "0")], end_stream=True)
        self.transport.write(self.connection.data_to_send())


async def serve_h2(answer: bytes) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: H2Server(answer), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def load(address: str, request: bytes, in_flight: int, seconds: float) -> None:
    """Generate load and print the number of responses."""
    import grpc

    count = 0
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(METHOD)
        end = time.monotonic() + seconds

        async def caller() -> None:
            nonlocal count
            while time.monotonic() < end:
                assert await call(request)
                count += 1

        await asyncio.gather(*(caller() for _ in range(in_flight)))
    print(count, flush=True)


def main(argv: list[str]) -> None:
    import uvloop

    what, message, *rest = argv
    data = base64.b64decode(message)
    if what == "load":
        asyncio.run(load(rest[0], data, int(rest[1]), float(rest[2])))
    elif what == "h2":
        uvloop.install()
        asyncio.run(serve_h2(data))
    else:
        asyncio.run(serve_aio(data))  # grpc.aio has its own event engine; uvloop made no difference


if __name__ == "__main__":
    main(sys.argv[1:])
