"""The event loop of a model whose methods are coroutines. It runs in its own thread, so that coroutines continue while
the worker waits for orders."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any


class Coroutines:
    """An event loop in its own thread, created when a model first needs it."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="coroutines", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # at the limit of threads
            self.loop.close()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @property
    def is_current_thread(self) -> bool:
        """Whether the calling code runs in this loop's thread."""
        return threading.current_thread() is self._thread

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Runs the coroutine in the loop; returns a future for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def start(self, coroutine: Coroutine[Any, Any, None], started: Callable[[asyncio.Task[None]], None]) -> None:
        """Runs the coroutine concurrently. `started` is called with its task, in the loop's thread, before it runs."""
        self.loop.call_soon_threadsafe(self._start, coroutine, started)

    def start_all(self, coroutines: list[Coroutine[Any, Any, None]]) -> None:
        """Runs the coroutines concurrently. All have a task before the first one runs."""
        self.loop.call_soon_threadsafe(self._start_all, coroutines)

    def _start_all(self, coroutines: list[Coroutine[Any, Any, None]]) -> None:
        for coroutine in coroutines:
            self._start(coroutine, lambda task: None)

    def _start(self, coroutine: Coroutine[Any, Any, None], started: Callable[[asyncio.Task[None]], None]) -> None:
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)  # the loop holds only weak references
        task.add_done_callback(self._tasks.discard)
        started(task)

    def close(self) -> None:
        """Cancels all tasks and waits until they have ended."""
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.loop.shutdown_asyncgens()


class _Sent:
    """An awaitable that is already complete."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


SENT = _Sent()


def settle_soon(future: asyncio.Future[None] | None) -> None:
    """Resolves a future from any thread."""
    if future is not None:
        future.get_loop().call_soon_threadsafe(_settle, future)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
