"""The client for ordinary code. The rule of the file: a request passes through few calls, and a lone `infer` through
one thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from shmserve.clients.future import Future
from shmserve.clients.streams import Flow, Stream
from shmserve.clients.transport.address import address_of
from shmserve.clients.transport.shared_reader import SharedLink
from shmserve.clients.transport.threaded import monotonic
from shmserve.clients.waiting import POLL_S, not_ready, pause_after, will_not_be
from shmserve.errors import ConnectionLost, InvalidRequest, ServeError
from shmserve.session import WINDOW, Result
from shmserve.session.encode import TopK
from shmserve.session.gpu.tensors import DeviceArray
from shmserve.session.uploads import ANSWER_S, Body, loading, of_json, of_unload

BUFFERED_MESSAGES = 32
BUFFERED_BYTES = 64 * 1024

Outputs = Iterable[str] | Mapping[str, np.ndarray[Any, Any] | DeviceArray | TopK | None]


class Client:
    """A connection to a server. May be used by any number of threads; a forked child's connects for itself.

    `url` is None for the server of this machine and user (or of `runtime_dir`), `unix:///path/lane.sock`,
    `ipc:///path/broker.sock`, or `tcp://host:port`. The connection is made by the first call that needs it, and again
    when it was lost: for `reconnect_timeout` seconds the server is given time to come back. `timeout` is the default
    for all calls. `memory` is how large tensors travel over ipc: posix (named shared memory) or frames (copies).
    `memory_bytes` bounds the shared memory that inputs and `empty` take. Over tcp `key_file` is the client's own
    NAME.key from `shmserve keygen`, and `server_key` the public key of the server, or its file; where they are not
    given, SHMSERVE_KEY_FILE and SHMSERVE_SERVER_KEY say which.
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
        address = address_of(url, runtime_dir, memory, server_key, key_file)
        self._link = SharedLink(address, name or default_name(), reconnect_timeout, memory_bytes)
        self._timeout = timeout

    @property
    def url(self) -> str:
        return self._link.address.url

    # ------------------------------------------------------------------------------------ inference

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
        """Runs the model once and gives its outputs by name.

        `outputs` is a list of names, or a mapping of names to arrays that they shall be written to (best those of
        `empty`). Arrays may be on a GPU: those of `empty`, CuPy's, PyTorch's. `timeout` is in seconds, from call to
        answer. `parameters={"timeout": us}` is the time in the queue.
        """
        link = self._link
        future = Future(link)
        if timeout is None:
            timeout = self._timeout
        with link.lock:
            link.session.infer(
                future, model, inputs, 0.0 if timeout is None else monotonic(), outputs, version, timeout, priority,
                sequence, sequence_start, sequence_end, parameters, request_id,
            )  # fmt: skip
            link.send_now(future)
        found: Result = future.result()
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
    ) -> Future:
        """Like `infer`, but gives a future at once.

        The request is sent at once, too, except in the loop that collects a result and submits the next request while
        more results are here already: then up to 32 requests go together, at the latest with the next call that waits.
        """
        link = self._link
        future = Future(link)
        if timeout is None:
            timeout = self._timeout
        with link.lock:
            link.session.infer(
                future, model, inputs, 0.0 if timeout is None else monotonic(), outputs, version, timeout, priority,
                sequence, sequence_start, sequence_end, parameters, request_id,
            )  # fmt: skip
            outbox = link.outbox
            if (
                link.collecting
                and link.uncollected > 0
                and outbox.size < BUFFERED_BYTES
                and len(outbox.messages) < BUFFERED_MESSAGES
                and link.reader is None
            ):
                link.collecting = False
            else:
                link.collecting = False
                link.send_now(future)
                if link.reader is not None and timeout is not None:
                    link.nudge()
        if link.after:
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
        """Runs the model once and iterates over its answers as they come; a model with one answer has one here, too.

        At most `window` answers are on their way or wait here: a model that is faster than its reader waits for it.
        `timeout` is for all of them together. To leave the loop early ends the request.
        """
        link = self._link
        flow = Flow(link, window)
        if timeout is None:
            timeout = self._timeout
        with link.lock:
            link.session.infer(
                flow, model, inputs, 0.0 if timeout is None else monotonic(), outputs, version, timeout, priority,
                sequence, sequence_start, sequence_end, parameters, request_id, window,
            )  # fmt: skip
            link.send_now(flow)
        return Stream(link, flow)

    @overload
    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = "float32") -> np.ndarray[Any, Any]: ...

    @overload
    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = ..., *, device: str | int) -> DeviceArray: ...

    def empty(
        self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = "float32", *, device: str | int | None = None
    ) -> np.ndarray[Any, Any] | DeviceArray:
        """An array in shared memory, not initialised: as an input it is not copied, nor are slices of it. `device`:
        "cuda:0" or another GPU, in whose memory it is then."""
        link = self._link
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise InvalidRequest(f"shape {list(sizes)} has a negative dim")
        with link.lock:
            memory = link.session.memory
            return memory.empty(sizes, np.dtype(dtype)) if device is None else memory.empty_on(device, sizes, dtype)

    def flush(self) -> None:
        """Sends what is still to be sent, and gives back the memory of results that were dropped."""
        self._link.flush()

    # ------------------------------------------------------------------------------------ questions

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
        """A question that changes something. Who is interrupted while it is sent takes it back."""
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

    def live(self) -> bool:
        """Whether a server is there and not about to stop."""
        try:
            return bool(self._ask("live")["live"])
        except ConnectionLost:
            return False

    def ready(self, model: str | None = None, version: int | str | None = None) -> bool:
        """Whether the server, or this model, can take requests. No server: False. An unknown model: NotFound."""
        try:
            return bool(self._ask("ready", model or "", version)["ready"])
        except ConnectionLost:
            return False

    def wait_ready(self, model: str | None = None, timeout: float | None = None) -> None:
        """Returns when the server, or this model, can take requests; DeadlineExceeded after `timeout` seconds,
        Unavailable as soon as it is certain that it will not, as loading has failed.

        A server that is not there yet is waited for, and so is a model that it does not know yet.
        """
        end = None if timeout is None else monotonic() + timeout
        last: ServeError | None = None
        pause = POLL_S
        while True:
            left = None if end is None else max(0.001, end - monotonic())
            try:
                answer = self._ask("ready", model or "", None, left)
                if answer["ready"]:
                    return
                settled = answer.get("settled", False)
                last = None
            except ServeError as error:
                last = pause_after(error, model, last)
                settled = False
            if settled:
                raise will_not_be(self.url, model, self._index())
            if end is not None and monotonic() + pause >= end:
                raise not_ready(self.url, model, timeout or 0.0, last, self._index())
            self._link.pause(pause)
            pause = min(pause * 1.5, 10 * POLL_S)

    def _index(self) -> list[dict[str, Any]]:
        """For an error text: what the server says of its models, if it says anything."""
        try:
            found: list[dict[str, Any]] = self._ask("models", timeout=1.0)
        except ServeError:
            return []
        return found

    def models(self) -> list[dict[str, Any]]:
        """Every version of every model: name, version, state, reason, default, loading_seconds, reloading,
        changed_on_disk, last_failed_change, instances.

        A model that was never loaded has the version "" and the state "".
        """
        found: list[dict[str, Any]] = self._ask("models")
        return found

    def metadata(self, model: str | None = None, version: int | str | None = None) -> dict[str, Any]:
        """Inputs and outputs of a model; without a name, of the server: its name, version and extensions."""
        found: dict[str, Any] = self._ask("metadata", model or "", version)
        return found

    def config(self, model: str, version: int | str | None = None) -> dict[str, Any]:
        """The model's configuration, completed by the server."""
        found: dict[str, Any] = self._ask("config", model, version)
        return found

    def origins(self, model: str, version: int | str | None = None) -> dict[str, Any]:
        """The configuration ("config"), where each value is from ("origins": path -> file, override, model or default),
        and both as config.pbtxt with comments ("text")."""
        found: dict[str, Any] = self._ask("origins", model, version)
        return found

    def statistics(self, model: str | None = None, version: int | str | None = None) -> dict[str, Any]:
        """Counts and times of one model or of all, as Triton gives them: {"model_stats": [...]}."""
        found: dict[str, Any] = self._ask("statistics", model or "", version)
        return found

    def metrics(self) -> str:
        """All that the server counts, in the text form of Prometheus."""
        found: str = self._ask("metrics")
        return found

    # ------------------------------------------------------------------------------------ operations

    def load(
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
        found: dict[str, Any] = self._operate(operation, model, None, timeout, body)
        return found

    def unload(
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
        found: dict[str, Any] = self._operate("unload", model, None, longer, body)
        return found

    def restart(
        self,
        model: str,
        *,
        version: int | str | None = None,
        instance: str | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """New processes for a model, or for one version or one instance of it; returns when they serve."""
        body = of_json({"instance": instance or ""})
        found: dict[str, Any] = self._operate("restart", model, version, timeout, body)
        return found

    # ------------------------------------------------------------------------------------ the end

    def close(self) -> None:
        """Ends the connection. What is unanswered is cancelled; results stay valid."""
        self._link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<shmserve.Client {self.url}{' (closed)' if self._link.closed else ''}>"


def default_name() -> str:
    """What the server calls this client in its log."""
    return os.path.basename(sys.argv[0] or "python")[:100]
