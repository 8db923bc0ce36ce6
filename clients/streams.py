"""The return value of `stream`: an iterator over the answers of one request, for threads or for asyncio.

Invariant: closing or dropping an iterator cancels its request. asyncio is imported only where it is used: `Client`
imports this module, and asyncio would be an eighth of its import time.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from shmserve.clients.future import FINISHED, PENDING, Future
from shmserve.clients.shared_link import SharedLink
from shmserve.session import Result, StreamTicket

if TYPE_CHECKING:
    import asyncio

    from shmserve.transport.loop_link import LoopLink


class Flow(StreamTicket, Future):
    """A stream as a future of its link: finished while a part can be handed out, or once the stream has ended."""

    def __init__(self, link: SharedLink, window: int) -> None:
        StreamTicket.__init__(self, window)
        Future.__init__(self, link)

    def on_part(self) -> None:
        self._state = FINISHED
        if self._watch is not None:
            self._reader.notify(self)

    def await_part(self) -> None:
        """Makes it unfinished until the next part arrives."""
        self._state = PENDING


class Stream:
    """The answers to one request, as they arrive. `close`, or the end of its `with` block, cancels the request."""

    def __init__(self, link: SharedLink, flow: Flow) -> None:
        self._link = link
        self._flow = flow

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Result:
        link, flow = self._link, self._flow
        while True:
            with link.lock:
                if flow.parts:
                    part = link.session.next_part(flow)
                    if link.outbox.messages and not link.closed:
                        link.send_now()
                    return part
                if flow.ended:
                    error, flow.error = flow.error, None
                    raise StopIteration if error is None else error
                flow.await_part()
            link.wait(flow, None)

    def close(self) -> None:
        """Cancels the request. Answers that were not handed out are dropped."""
        self._link.close_stream(self._flow)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        flow = self._flow
        if not flow.ended:
            self._link.session.cancel_later(flow)

    def __repr__(self) -> str:
        return f"<shmserve.Stream {'ended' if self._flow.ended else 'open'}>"


class AsyncFlow(StreamTicket):
    __slots__ = ("waiter",)

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self.waiter: asyncio.Future[None] | None = None

    def on_part(self) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class AsyncStream:
    """The answers to one request, as they arrive. `aclose`, or the end of its `async with` block, cancels the
    request.
    """

    def __init__(self, link: LoopLink, flow: AsyncFlow) -> None:
        self._link = link
        self._flow = flow

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Result:
        link, flow = self._link, self._flow
        while not flow.parts:
            if flow.ended:
                error, flow.error = flow.error, None
                raise StopAsyncIteration if error is None else error
            from asyncio import get_running_loop, shield

            if flow.waiter is None:
                flow.waiter = get_running_loop().create_future()
            await shield(flow.waiter)  # several tasks may wait for it
        part = link.session.next_part(flow)
        if link.session.outbox.messages:
            link.send_soon()
        return part

    async def aclose(self) -> None:
        """Cancels the request. Answers that were not handed out are dropped."""
        flow = self._flow
        if not flow.ended:
            self._link.cancel(flow)
        flow.close()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        flow = self._flow
        if not flow.ended:
            self._link.session.cancel_later(flow)

    def __repr__(self) -> str:
        return f"<shmserve.AsyncStream {'ended' if self._flow.ended else 'open'}>"
