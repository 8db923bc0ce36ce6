"""The client for asyncio, on its own loop or on uvloop. The rule of the file: everything happens in the loop's thread;
the link is watched by the loop, and no task of ours exists but while connecting.

Requests of one turn of the loop go together in one packet.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from shmserve.clients.client import Outputs, default_name
from shmserve.clients.streams import AsyncFlow, AsyncStream
from shmserve.clients.transport.address import address_of
from shmserve.clients.transport.event_loop import LoopLink, monotonic
from shmserve.clients.waiting import POLL_S, not_ready, pause_after, will_not_be
from shmserve.errors import ConnectionLost, InvalidRequest, ServeError
from shmserve.protocol.messages import Reply
from shmserve.session import WINDOW, Result, Ticket, inline_result
from shmserve.session.encode import TopK
from shmserve.session.gpu.tensors import DeviceArray
from shmserve.session.uploads import ANSWER_S, Body, loading, of_json, of_unload


class _Ticket(Ticket):
    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self.future: asyncio.Future[Any] | None = future
        """Until it is done: the future knows its ticket, and results must not wait for the collector."""

    def settle(self, answer: Any) -> None:
        future, self.future = self.future, None
        if future is None or future.done():
            return
        if type(answer) is Reply:
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
    """What `AsyncClient.submit` returns. Cancelling it, or the task that awaits it, takes the request back."""

    _link: LoopLink
    _ticket: Ticket

    def cancel(self, msg: Any = None) -> bool:
        if not self.done():
            self._link.cancel(self._ticket)
        return super().cancel(msg)


class AsyncClient:
    """Like `Client`, with the same arguments, for coroutines. Its futures belong to the loop of the first call."""

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
        """Runs the model once and gives its outputs by name; the arguments are those of `Client.infer`."""
        future = self.submit(
            model, inputs, outputs=outputs, version=version, timeout=timeout, priority=priority, sequence=sequence,
            sequence_start=sequence_start, sequence_end=sequence_end, parameters=parameters, request_id=request_id,
        )  # fmt: skip
        found: Result = await future
        return found

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
        """Like `infer`, but gives an awaitable future at once. Must be called in a running loop."""
        link = self._link
        future, ticket = self._question()
        if timeout is None:
            timeout = self._timeout
        link.session.infer(
            ticket, model, inputs, 0.0 if timeout is None else monotonic(), outputs, version, timeout, priority,
            sequence, sequence_start, sequence_end, parameters, request_id,
        )  # fmt: skip
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
        """Like `Client.stream`, to be iterated over with `async for`. Must be called in a running loop."""
        link = self._link
        link.bind()
        flow = AsyncFlow(window)
        if timeout is None:
            timeout = self._timeout
        link.session.infer(
            flow, model, inputs, 0.0 if timeout is None else monotonic(), outputs, version, timeout, priority,
            sequence, sequence_start, sequence_end, parameters, request_id, window,
        )  # fmt: skip
        link.send_soon(timeout is not None)
        return AsyncStream(link, flow)

    def _question(self) -> tuple[AsyncFuture, _Ticket]:
        loop = self._link.bind()
        future = AsyncFuture(loop=loop)
        ticket = _Ticket(future)
        future._link = self._link
        future._ticket = ticket
        return future, ticket

    @overload
    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = "float32") -> np.ndarray[Any, Any]: ...

    @overload
    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = ..., *, device: str | int) -> DeviceArray: ...

    def empty(
        self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = "float32", *, device: str | int | None = None
    ) -> np.ndarray[Any, Any] | DeviceArray:
        """An array in shared memory, not initialised: as an input it is not copied, nor are slices of it. `device`:
        "cuda:0" or another GPU, in whose memory it is then."""
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise InvalidRequest(f"shape {list(sizes)} has a negative dim")
        memory = self._link.session.memory
        return memory.empty(sizes, np.dtype(dtype)) if device is None else memory.empty_on(device, sizes, dtype)

    def flush(self) -> None:
        """Sends what is still to be sent, and gives back the memory of results that were dropped."""
        self._link.flush()

    # ------------------------------------------------------------------------------------ questions

    async def _ask(
        self, what: str, model: str = "", version: int | str | None = None, timeout: float | None = None
    ) -> Any:
        future, ticket = self._question()
        if timeout is None:
            timeout = self._timeout
        self._link.session.ask(ticket, what, monotonic(), model, version, timeout)
        self._link.send_soon(timeout is not None)
        return await future

    async def _operate(
        self, what: str, model: str, version: int | str | None, timeout: float | None, body: Body
    ) -> Any:
        future, ticket = self._question()
        self._link.session.ask(ticket, what, monotonic(), model, version, timeout, body)
        self._link.send_soon(timeout is not None)
        return await future

    async def live(self) -> bool:
        """Whether a server is there and not about to stop."""
        try:
            return bool((await self._ask("live"))["live"])
        except ConnectionLost:
            return False

    async def ready(self, model: str | None = None, version: int | str | None = None) -> bool:
        """Whether the server, or this model, can take requests. No server: False. An unknown model: NotFound."""
        try:
            return bool((await self._ask("ready", model or "", version))["ready"])
        except ConnectionLost:
            return False

    async def wait_ready(self, model: str | None = None, timeout: float | None = None) -> None:
        """Returns when the server, or this model, can take requests; DeadlineExceeded after `timeout` seconds,
        Unavailable as soon as it is certain that it will not, as loading has failed."""
        end = None if timeout is None else monotonic() + timeout
        last: ServeError | None = None
        pause = POLL_S
        while True:
            left = None if end is None else max(0.001, end - monotonic())
            try:
                answer = await self._ask("ready", model or "", None, left)
                if answer["ready"]:
                    return
                settled = answer.get("settled", False)
                last = None
            except ServeError as error:
                last = pause_after(error, model, last)
                settled = False
            if settled:
                raise will_not_be(self.url, model, await self._index())
            if end is not None and monotonic() + pause >= end:
                raise not_ready(self.url, model, timeout or 0.0, last, await self._index())
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 10 * POLL_S)

    async def _index(self) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = await self._ask("models", timeout=1.0)
        except ServeError:
            return []
        return found

    async def models(self) -> list[dict[str, Any]]:
        """Every version of every model: name, version, state, reason, default, loading_seconds, reloading,
        changed_on_disk, last_failed_change, instances.

        A model that was never loaded has the version "" and the state "".
        """
        found: list[dict[str, Any]] = await self._ask("models")
        return found

    async def metadata(self, model: str | None = None, version: int | str | None = None) -> dict[str, Any]:
        """Inputs and outputs of a model; without a name, of the server: its name, version and extensions."""
        found: dict[str, Any] = await self._ask("metadata", model or "", version)
        return found

    async def config(self, model: str, version: int | str | None = None) -> dict[str, Any]:
        """The model's configuration, completed by the server."""
        found: dict[str, Any] = await self._ask("config", model, version)
        return found

    async def origins(self, model: str, version: int | str | None = None) -> dict[str, Any]:
        """The configuration ("config"), where each value is from ("origins": path -> file, override, model or default),
        and both as config.pbtxt with comments ("text")."""
        found: dict[str, Any] = await self._ask("origins", model, version)
        return found

    async def statistics(self, model: str | None = None, version: int | str | None = None) -> dict[str, Any]:
        """Counts and times of one model or of all, as Triton gives them: {"model_stats": [...]}."""
        found: dict[str, Any] = await self._ask("statistics", model or "", version)
        return found

    async def metrics(self) -> str:
        """All that the server counts, in the text form of Prometheus."""
        found: str = await self._ask("metrics")
        return found

    # ------------------------------------------------------------------------------------ operations

    async def load(
        self,
        model: str,
        *,
        config: Mapping[str, Any] | str | None = None,
        files: Mapping[str, bytes | os.PathLike[str]] | None = None,
        previous: bool = False,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Loads a model, or what has changed of one that is served, and returns when it is READY.

        `config` (a mapping, or its JSON) takes the place of the file's. With `files` (names such as "1/model.onnx", and
        bytes or paths) the model is not looked for in the repository at all. `previous` goes back to what was
        served before the last load, in every mode. Without `timeout` it takes its time.
        """
        operation, body = loading(config, files, previous)
        found: dict[str, Any] = await self._operate(operation, model, None, timeout, body)
        return found

    async def unload(
        self,
        model: str,
        *,
        unload_dependents: bool = False,
        wait: bool = True,
        force: bool = False,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Ends a model; what it was asked before is answered first. Without `wait` it returns at once.

        `unload_dependents`: also the models that were loaded only because this ensemble needs them. `force`: what it
        was asked before fails, and its processes are killed. DeadlineExceeded says what is waited for; the model goes
        on unloading.
        """
        body = of_unload(unload_dependents, wait, force, timeout)
        longer = None if timeout is None else timeout + ANSWER_S
        found: dict[str, Any] = await self._operate("unload", model, None, longer, body)
        return found

    async def restart(
        self,
        model: str,
        *,
        version: int | str | None = None,
        instance: str | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """New processes for a model, or for one version or one instance of it; returns when they serve."""
        body = of_json({"instance": instance or ""})
        found: dict[str, Any] = await self._operate("restart", model, version, timeout, body)
        return found

    # ------------------------------------------------------------------------------------ the end

    async def close(self) -> None:
        """Ends the connection. What is unanswered is cancelled; results stay valid."""
        await self._link.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<shmserve.AsyncClient {self.url}{' (closed)' if self._link.closed else ''}>"
