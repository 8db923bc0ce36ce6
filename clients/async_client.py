"""The client for asyncio, on its default loop or on uvloop. Requests of one loop iteration are sent in one packet.

Invariant: everything runs in the loop's thread. The loop watches the link's descriptors; the client runs a task only
while it connects.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from shmserve.clients.client import Outputs, default_name
from shmserve.clients.queries import Queries
from shmserve.clients.streams import AsyncFlow, AsyncStream
from shmserve.clients.waiting import ReadyWait
from shmserve.errors import ConnectionLost, ServeError
from shmserve.protocol.messages import Reply
from shmserve.session import WINDOW, Result, RowReply, Ticket, inline_result
from shmserve.session.arguments import check_seconds, timeout_us_of
from shmserve.session.encode import TopK
from shmserve.session.uploads import Body
from shmserve.transport.address import address_of
from shmserve.transport.loop_link import LoopLink, monotonic

if TYPE_CHECKING:
    from shmserve.session.gpu.tensors import DeviceArray


class _Ticket(Ticket):
    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self.future: asyncio.Future[Any] | None = future
        """None once done: the future refers to its ticket, and results must be freed without waiting for the garbage
        collector.
        """

    def settle(self, answer: Any) -> None:
        future, self.future = self.future, None
        if future is None or future.done():
            return
        if type(answer) is RowReply or type(answer) is Reply:
            try:
                answer = inline_result(answer)
            except ServeError as error:
                future.set_exception(error)
                return
        future.set_result(answer)

    def fail(self, error: ServeError) -> None:
        future, self.future = self.future, None
        if future is not None and not future.done():
            future.set_exception(error)


class AsyncFuture(asyncio.Future[Any]):
    """The return value of `AsyncClient.submit`. Cancelling it, or the task that awaits it, cancels the request."""

    def __init__(self, link: LoopLink) -> None:
        super().__init__(loop=link.bind())
        self._link = link
        self.ticket = _Ticket(self)

    def cancel(self, msg: Any = None) -> bool:
        if not self.done():
            self._link.cancel(self.ticket)
        return super().cancel(msg)


class AsyncClient(Queries[Awaitable[dict[str, Any]], Awaitable[list[dict[str, Any]]], Awaitable[str]]):
    """Like `Client`, with the same arguments, for coroutines. A client belongs to the event loop of its first call."""

    def __init__(
        self,
        url: str | None = None,
        *,
        runtime_dir: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        reconnect_timeout: float = 10.0,
        memory: str | None = None,
        memory_bytes: int = 8 << 30,
        name: str | None = None,
        server_key: str | os.PathLike[str] | None = None,
        key_file: str | os.PathLike[str] | None = None,
    ) -> None:
        timeout_us_of(timeout)  # raises InvalidRequest here instead of in the first call
        address = address_of(url, runtime_dir, memory, server_key, key_file)
        self._link = LoopLink(address, name or default_name(), reconnect_timeout, memory_bytes)
        self._timeout = timeout

    @property
    def url(self) -> str:
        return self._link.address.url

    # ------------------------------------------------------------------------------------ inference

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Outputs | None = None,
        version: int | str | None = None,
        timeout: float | None = None,
        priority: int | None = None,
        sequence: int | str | None = None,
        sequence_start: bool = False,
        sequence_end: bool = False,
        parameters: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> Result:
        """Runs the model once and returns its outputs by name; the arguments are those of `Client.infer`."""
        future = self.submit(
            model,
            inputs,
            outputs=outputs,
            version=version,
            timeout=timeout,
            priority=priority,
            sequence=sequence,
            sequence_start=sequence_start,
            sequence_end=sequence_end,
            parameters=parameters,
            request_id=request_id,
        )
        result: Result = await future
        return result

    def submit(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Outputs | None = None,
        version: int | str | None = None,
        timeout: float | None = None,
        priority: int | None = None,
        sequence: int | str | None = None,
        sequence_start: bool = False,
        sequence_end: bool = False,
        parameters: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> AsyncFuture:
        """Like `infer`, but returns an awaitable future immediately. Must be called in a running loop."""
        link = self._link
        future = AsyncFuture(link)
        if timeout is None:
            timeout = self._timeout
        link.session.infer(
            future.ticket,
            model,
            inputs,
            0.0 if timeout is None else monotonic(),
            outputs,
            version,
            timeout,
            priority,
            sequence,
            sequence_start,
            sequence_end,
            parameters,
            request_id,
        )
        link.send_soon(timeout is not None)
        return future

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        window: int = WINDOW,
        outputs: Iterable[str] | Mapping[str, TopK | None] | None = None,
        version: int | str | None = None,
        timeout: float | None = None,
        priority: int | None = None,
        sequence: int | str | None = None,
        sequence_start: bool = False,
        sequence_end: bool = False,
        parameters: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> AsyncStream:
        """Like `Client.stream`, for `async for`. Must be called in a running loop."""
        link = self._link
        link.bind()
        flow = AsyncFlow(window)
        if timeout is None:
            timeout = self._timeout
        link.session.infer(
            flow,
            model,
            inputs,
            0.0 if timeout is None else monotonic(),
            outputs,
            version,
            timeout,
            priority,
            sequence,
            sequence_start,
            sequence_end,
            parameters,
            request_id,
            window,
        )
        link.send_soon(timeout is not None)
        return AsyncStream(link, flow)

    @overload
    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = "float32") -> np.ndarray[Any, Any]: ...

    @overload
    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = ..., *, device: str | int) -> DeviceArray: ...

    def empty(
        self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = "float32", *, device: str | int | None = None
    ) -> np.ndarray[Any, Any] | DeviceArray:
        """An uninitialised array in shared memory. As an input it is not copied, nor are its slices. `device`: allocate
        it in the memory of a GPU, e.g. "cuda:0".
        """
        return self._link.session.memory.empty_for(shape, dtype, device)

    def flush(self) -> None:
        """Sends buffered requests, and releases the memory of results that were dropped."""
        self._link.flush()

    # ------------------------------------------------------------------------------------ queries

    async def _ask(
        self, what: str, model: str = "", version: int | str | None = None, timeout: float | None = None
    ) -> Any:
        future = AsyncFuture(self._link)
        if timeout is None:
            timeout = self._timeout
        self._link.session.ask(future.ticket, what, monotonic(), model, version, timeout)
        self._link.send_soon(timeout is not None)
        return await future

    async def _operate(
        self, what: str, model: str, version: int | str | None, timeout: float | None, body: Body
    ) -> Any:
        future = AsyncFuture(self._link)
        self._link.session.ask(future.ticket, what, monotonic(), model, version, timeout, body)
        self._link.send_soon(timeout is not None)
        return await future

    async def live(self) -> bool:
        """Whether a server is running and not shutting down."""
        try:
            return bool((await self._ask("live"))["live"])
        except ConnectionLost:
            return False

    async def ready(self, model: str | None = None, version: int | str | None = None) -> bool:
        """Whether the server, or this model, accepts requests. False if there is no server; raises NotFound for an
        unknown model.
        """
        try:
            return bool((await self._ask("ready", model or "", version))["ready"])
        except ConnectionLost:
            return False

    async def wait_ready(self, model: str | None = None, timeout: float | None = None) -> None:
        """Waits until the server, or this model, accepts requests. Raises DeadlineExceeded after `timeout` seconds, or
        Unavailable as soon as loading has failed and waiting cannot help.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        wait = ReadyWait(self.url, model, timeout)
        while True:
            try:
                answer = await self._ask("ready", model or "", None, wait.remaining_time())
                if answer["ready"]:
                    return
                wait.not_yet(answer)
            except ServeError as error:
                wait.failed(error)
            if wait.is_over():
                raise wait.error(await self._index())
            await asyncio.sleep(wait.next_pause())

    async def _index(self) -> list[dict[str, Any]]:
        try:
            answer: list[dict[str, Any]] = await self._ask("models", timeout=1.0)
        except ServeError:
            return []
        return answer

    # ------------------------------------------------------------------------------------ closing

    async def close(self) -> None:
        """Closes the connection. Unanswered requests are cancelled; results stay valid."""
        await self._link.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<shmserve.AsyncClient {self.url}{' (closed)' if self._link.closed else ''}>"
