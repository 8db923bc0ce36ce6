"""Forwards requests from the network to the server's own endpoints on 127.0.0.1, so that both give the same
responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import aiohttp
import grpc
from yarl import URL

from shmserve.errors import ConnectionLost

HOP_BY_HOP = frozenset(
    ("connection", "expect", "host", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade")
)
"""Header fields that apply to one connection only."""
UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
"""The server has its own limits."""
LAST_CALLS_S = 5.0
"""Time for calls to a server that has ended to fail, before its channel is closed: that would cancel them."""
LOST = "the server ended before it responded"
NOT_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
Fields = list[tuple[str, str]]


def end_to_end(fields: Iterable[tuple[str, str]]) -> Fields:
    return [(name, value) for name, value in fields if name.lower() not in HOP_BY_HOP]


class Forwarder:
    """The connections to the server. A restarted server has other ports. Create it in the running loop."""

    def __init__(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(auto_decompress=False, timeout=timeout, connector=connector)
        self._channel: Any = None
        self._channel_port = 0
        self.closing: set[asyncio.Task[None]] = set()
        """Closes channels to servers that have been restarted since."""

    async def http(self, port: int, method: str, target: str, fields: Fields, body: bytes) -> tuple[int, Fields, bytes]:
        """Returns status, header fields and body of the response."""
        try:
            async with self._request(port, method, target, fields, body) as response:
                return response.status, _fields(response), await response.read()
        except aiohttp.ClientError as error:
            raise ConnectionLost(LOST) from error

    async def http_stream(
        self, port: int, method: str, target: str, fields: Fields, body: bytes
    ) -> AsyncIterator[tuple[int, Fields] | bytes]:
        """Yields the status and header fields of the response, then its body as it arrives."""
        try:
            async with self._request(port, method, target, fields, body) as response:
                yield response.status, _fields(response)
                async for piece, _ in response.content.iter_chunks():
                    if piece:
                        yield piece
        except aiohttp.ClientError as error:
            raise ConnectionLost(LOST) from error

    def _request(self, port: int, method: str, target: str, fields: Fields, body: bytes) -> Any:
        url = URL(f"http://127.0.0.1:{port}{target}", encoded=True)
        return self._session.request(
            method, url, headers=fields, data=body, allow_redirects=False, skip_auto_headers=NOT_ADDED
        )

    async def call(self, port: int, path: str, message: bytes, metadata: Mapping[str, str]) -> bytes:
        """A unary call. Raises grpc.aio.AioRpcError if the server has refused it."""
        channel = self._on(port)
        try:
            answer: bytes = await channel.unary_unary(path)(message, metadata=tuple(metadata.items()))
        except grpc.aio.AioRpcError as error:
            raise _lost(channel, error) from None
        return answer

    async def stream(
        self, port: int, path: str, messages: AsyncIterator[bytes], metadata: Mapping[str, str]
    ) -> AsyncIterator[bytes]:
        """Yields the messages of a call with streams in both directions. Raises the same errors as `call`."""
        channel = self._on(port)
        try:
            async for answer in channel.stream_stream(path)(messages, metadata=tuple(metadata.items())):
                yield answer
        except grpc.aio.AioRpcError as error:
            raise _lost(channel, error) from None

    def _on(self, port: int) -> Any:
        if port != self._channel_port:
            if self._channel is not None:
                task = asyncio.create_task(self._channel.close(LAST_CALLS_S))
                self.closing.add(task)
                task.add_done_callback(self.closing.discard)
            self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED)
            self._channel_port = port
        return self._channel

    async def close(self) -> None:
        await self._session.close()
        if self._channel is not None:
            await self._channel.close()
        await asyncio.gather(*self.closing)


def _lost(channel: Any, error: grpc.aio.AioRpcError) -> Exception:
    """Tells apart a server that refuses a call and one that cannot be reached: gRPC has one code for both."""
    reached = channel.get_state() is grpc.ChannelConnectivity.READY
    return error if reached or error.code() is not grpc.StatusCode.UNAVAILABLE else ConnectionLost(LOST)


def _fields(response: aiohttp.ClientResponse) -> Fields:
    return end_to_end((name.decode("latin-1"), value.decode("latin-1")) for name, value in response.raw_headers)
