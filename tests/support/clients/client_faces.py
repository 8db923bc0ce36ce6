"""Both clients behind one interface, so that one test covers both. Coroutines of the async client run in the test's own
thread, one call at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import uvloop

from shmserve import AsyncClient, Client
from shmserve.testing import Server

uvloop.new_event_loop().close()
"""The first loop of a process creates a pipe for signals that stays open. Creating it here keeps it from being reported
as a leak of a test."""


class SyncFace:
    def __init__(self, url: str, **options: Any) -> None:
        self.client = Client(url, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def __enter__(self) -> SyncFace:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


class AsyncFace:
    def __init__(self, url: str, make_loop: Callable[[], Any], **options: Any) -> None:
        self.loop = make_loop()
        self.client = AsyncClient(url, **options)

    def run(self, what: Any) -> Any:
        return self.loop.run_until_complete(what)

    def stream(self, *args: Any, **kwargs: Any) -> AsyncFaceStream:
        async def stream() -> Any:
            return self.client.stream(*args, **kwargs)

        made = AsyncFaceStream(self, self.run(stream()))
        self.turn()
        return made

    def turn(self) -> None:
        """Runs one iteration of the loop, including connecting."""

        async def due() -> None:
            for _ in range(3):
                await asyncio.sleep(0)
                connecting = self.client._link._connecting  # noqa: SLF001 - when it is connected, no call returns
                if connecting is not None:
                    await asyncio.wait([connecting])

        self.run(due())

    def submit(self, *args: Any, **kwargs: Any) -> AsyncFaceFuture:
        async def submit() -> Any:
            return self.client.submit(*args, **kwargs)

        future = AsyncFaceFuture(self, self.run(submit()))
        self.turn()
        return future

    def flush(self) -> None:
        self.client.flush()
        self.turn()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)
        if name == "empty":
            return method
        return lambda *args, **kwargs: self.run(method(*args, **kwargs))

    def __enter__(self) -> AsyncFace:
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.client.close())
        self.loop.close()


class AsyncFaceStream:
    def __init__(self, face: AsyncFace, stream: Any) -> None:
        self.face = face
        self.stream = stream

    def __iter__(self) -> AsyncFaceStream:
        return self

    def __next__(self) -> Any:
        try:
            return self.face.run(self.stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        self.face.run(self.stream.aclose())
        self.face.turn()

    def __enter__(self) -> AsyncFaceStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncFaceFuture:
    def __init__(self, face: AsyncFace, future: asyncio.Future[Any]) -> None:
        self.face = face
        self.future = future

    def result(self) -> Any:
        if self.future.done():
            return self.future.result()

        async def wait() -> Any:
            return await self.future

        return self.face.run(wait())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.future, name)

    def cancel(self) -> bool:
        cancelled = self.future.cancel()
        self.face.turn()
        return cancelled


FACES: dict[str, Callable[..., Any]] = {
    "sync": SyncFace,
    "asyncio": lambda url, **options: AsyncFace(url, asyncio.new_event_loop, **options),
    "uvloop": lambda url, **options: AsyncFace(url, uvloop.new_event_loop, **options),
}


def connect(server: Server, way: str, **options: Any) -> Any:
    """Opens a client. `way` names the client and its link: "sync lane", "asyncio ipc", "sync frames" (ZeroMQ)."""
    face, link = way.split()
    if link == "frames":
        options["memory"] = "frames"
    return FACES[face](server.url if link == "lane" else server.zmq_url, **options)


def await_leader(client: Client) -> None:
    """Returns once a thread of the client waits for packets, for all its threads."""
    while not client._link._leading:  # noqa: SLF001 - nothing public tells that a thread is about to sleep
        pass
