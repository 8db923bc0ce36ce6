"""The client for threads. `infer` is the hot path: few calls deep, and in the caller's own thread."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from shmserve.clients.future import Future
from shmserve.clients.queries import BlockingQueries
from shmserve.clients.shared_link import SharedLink
from shmserve.clients.streams import Flow, Stream
from shmserve.session import WINDOW, Result
from shmserve.session.arguments import timeout_us_of
from shmserve.session.encode import TopK
from shmserve.session.uploads import Body
from shmserve.transport.address import address_of

if TYPE_CHECKING:
    from shmserve.session.gpu.tensors import DeviceArray

BUFFERED_MESSAGES = 32
BUFFERED_BYTES = 64 * 1024

Outputs: TypeAlias = "Iterable[str] | Mapping[str, np.ndarray[Any, Any] | DeviceArray | TopK | None]"


class Client(BlockingQueries):
    """A connection to a server. It is thread-safe; after a fork, the child opens its own connection.

    `url` is None for the server of this machine and user (or of `runtime_dir`), `unix:///path/lane.sock`,
    `ipc:///path/broker.sock`, or `tcp://host:port`. The first call that needs the connection opens it; a lost
    connection is reopened, with retries for up to `reconnect_timeout` seconds. `timeout` is the default for `infer`,
    `submit`, `stream` and queries, in seconds. `memory` selects how large tensors are passed over ipc: posix (named
    shared memory) or frames (copies). `memory_bytes` limits the shared memory for inputs and `empty`. `name` is shown
    in the server's log and statistics (default: that of the program). Over tcp, `key_file` is the client's own NAME.key
    from `shmserve keygen`, and `server_key` the server's public key or its file; the defaults are SHMSERVE_KEY_FILE and
    SHMSERVE_SERVER_KEY.
    """

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
        self._link = SharedLink(address, name or default_name(), reconnect_timeout, memory_bytes)
        self._timeout = timeout

    @property
    def url(self) -> str:
        return self._link.address.url

    # ------------------------------------------------------------------------------------ inference

    # `infer`, `submit` and `stream`, here and in AsyncClient, each write out the arguments of a request. With
    # `**options: Unpack[...]`, a call with a timeout would take 260 ns instead of 130 to reach the session, and with
    # five arguments 430 instead of 120; help() would not list the arguments, and a misspelt one would fail in the
    # session.
    def infer(
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
        """Runs the model once and returns its outputs by name.

        `outputs` is a list of names, or a mapping of names to arrays to write them into (preferably from `empty`).
        Arrays may be on a GPU: from `empty`, CuPy or PyTorch. `timeout` is in seconds, from call to answer.
        `parameters={"timeout": us}` limits the time in the queue, in microseconds.
        """
        link = self._link
        future = Future(link)
        if timeout is None:
            timeout = self._timeout
        with link.lock:
            link.session.infer(
                future,
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
            link.send_now(future)
        result: Result = future.result()
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
    ) -> Future:
        """Like `infer`, but returns a future immediately.

        The request is also sent immediately, with one exception: in a loop that collects a result and submits the next
        request while more results have already arrived, up to 32 requests are sent together, at the latest by the next
        call that waits.
        """
        link = self._link
        future = Future(link)
        if timeout is None:
            timeout = self._timeout
        with link.lock:
            link.session.infer(
                future,
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
            outbox = link.outbox
            waits = (
                link.result_collected
                and link.uncollected > 0
                and outbox.size < BUFFERED_BYTES
                and len(outbox.messages) < BUFFERED_MESSAGES
                and link.reader is None
            )
            link.result_collected = False
            if not waits:
                link.send_now(future)
                if link.reader is not None and timeout is not None:
                    link.wake_reader(link.reader)
        if link.to_call_back:
            link.call_back()
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
    ) -> Stream:
        """Runs the model once and iterates over its answers as they arrive. Also works for a model with a single
        answer.

        At most `window` answers are in flight or buffered: a model that is faster than its reader is held back.
        `timeout` covers all answers together. Leaving the loop early cancels the request.
        """
        link = self._link
        flow = Flow(link, window)
        if timeout is None:
            timeout = self._timeout
        with link.lock:
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
            link.send_now(flow)
        return Stream(link, flow)

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
        with self._link.lock:
            return self._link.session.memory.empty_for(shape, dtype, device)

    def flush(self) -> None:
        """Sends buffered requests, and releases the memory of results that were dropped."""
        self._link.flush()

    # ------------------------------------------------------------------------------------ queries

    def _ask(self, what: str, model: str = "", version: int | str | None = None, timeout: float | None = None) -> Any:
        link = self._link
        future = Future(link)
        if timeout is None:
            timeout = self._timeout
        with link.lock:
            link.session.ask(future, what, monotonic(), model, version, timeout)
            link.send_now(future)
        return future.result()

    def _operate(self, what: str, model: str, version: int | str | None, timeout: float | None, body: Body) -> Any:
        """Runs an operation. An interrupt (KeyboardInterrupt, SystemExit) cancels it."""
        link = self._link
        future = Future(link)
        with link.lock:
            link.session.ask(future, what, monotonic(), model, version, timeout, body)
        try:
            with link.lock:
                link.send_now(future)
            return future.result()
        except (KeyboardInterrupt, SystemExit):
            future.cancel()
            raise

    def _pause(self, seconds: float) -> None:
        self._link.pause(seconds)

    # ------------------------------------------------------------------------------------ closing

    def close(self) -> None:
        """Closes the connection. Unanswered requests are cancelled; results stay valid."""
        self._link.close()

    def __repr__(self) -> str:
        return f"<shmserve.Client {self.url}{' (closed)' if self._link.closed else ''}>"


def default_name() -> str:
    """The client's default name in the server's log."""
    return os.path.basename(sys.argv[0] or "python")[:100]
