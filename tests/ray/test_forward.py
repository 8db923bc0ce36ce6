"""Calls that a replica passes on to the endpoints of its server. These tests need no Ray."""

from __future__ import annotations

import asyncio

import pytest

from shmserve.errors import ConnectionLost

grpc = pytest.importorskip("grpc", reason="grpcio is not installed: the extra ray has it")
pytest.importorskip("aiohttp", reason="aiohttp is not installed: the extra ray has it")

from shmserve.ray.forward import Forwarder  # noqa: E402

PATH = "/service/Method"
WAIT_S = 60.0


class EchoServer:
    """A gRPC server whose method answers with its name, or never if the message is "wait"."""

    def __init__(self, name: bytes) -> None:
        self._name = name
        self.waiting = asyncio.Event()
        self._server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(self._answer)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("service", {"Method": handler}),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    async def _answer(self, message: bytes, context: object) -> bytes:
        if message == b"wait":
            self.waiting.set()
            await asyncio.Event().wait()
        return self._name

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)


def test_the_channel_to_a_restarted_server_is_closed() -> None:
    """The new server has another port. A call on the old channel still gets the error of the server that ended."""

    async def run() -> None:
        old, new, forward = EchoServer(b"old"), EchoServer(b"new"), Forwarder()
        await old.start()
        await new.start()
        assert await forward.call(old.port, PATH, b"", {}) == b"old"
        pending = asyncio.ensure_future(forward.call(old.port, PATH, b"wait", {}))
        await old.waiting.wait()
        assert await forward.call(new.port, PATH, b"", {}) == b"new"
        closing = set(forward.closing)
        assert closing, "it waits for the call"
        await old.stop()
        with pytest.raises((ConnectionLost, grpc.aio.AioRpcError)):
            await pending
        await asyncio.gather(*closing)
        assert not forward.closing
        assert await forward.call(new.port, PATH, b"", {}) == b"new"
        await forward.close()
        await new.stop()

    asyncio.run(asyncio.wait_for(run(), 2 * WAIT_S))
