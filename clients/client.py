"""The client for threads. `infer` is the hot path: few calls deep, and in the caller's own thread."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from shmserve.clients.future import Future
from shmserve.clients.shared_link import SharedLink
from shmserve.clients.streams import Flow, Stream
from shmserve.clients.waiting import ReadyWait
from shmserve.errors import ConnectionLost, InvalidRequest, ServeError
from shmserve.session import WINDOW, Result
from shmserve.session.arguments import check_seconds, timeout_us_of
from shmserve.session.encode import TopK
from shmserve.session.uploads import (
    UNLOAD_MARGIN_S,
    Body,
    loading,
    of_json,
    of_service,
    of_traffic,
    of_unload,
    recorded,
)
from shmserve.transport.address import address_of

if TYPE_CHECKING:
    from shmserve.session.gpu.tensors import DeviceArray

BUFFERED_MESSAGES = 32
BUFFERED_BYTES = 64 * 1024

Outputs: TypeAlias = "Iterable[str] | Mapping[str, np.ndarray[Any, Any] | DeviceArray | TopK | None]"


class Client:
    """A connection to a server. It is thread-safe; after a fork, the child opens its own connection.

    `url` is None for the server of this machine and user (or of `runtime_dir`), `unix:///path/lane.sock`,
    `ipc:///path/broker.sock`, or `tcp://host:port`. The first call that needs the connection opens it; a lost
    connection is reopened, with retries for up to `reconnect_timeout` seconds. `timeout` is the default for `infer`,
    `submit`, `stream` and queries, in seconds. `memory` selects how large tensors are passed over ipc: posix (named
    shared memory) or frames (copies). `memory_bytes` limits the shared memory for inputs and `empty`. Over tcp,
    `key_file` is the client's own NAME.key from `shmserve keygen`, and `server_key` the server's public key or its
    file; the defaults are SHMSERVE_KEY_FILE and SHMSERVE_SERVER_KEY.
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
        """Run the model once and return its outputs by name.

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
                future, model, inputs, 0.0 if timeout is None else monotonic(), outputs, version, timeout, priority,
                sequence, sequence_start, sequence_end, parameters, request_id,
            )  # fmt: skip
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
        """Like `infer`, but return a future immediately.

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
                future, model, inputs, 0.0 if timeout is None else monotonic(), outputs, version, timeout, priority,
                sequence, sequence_start, sequence_end, parameters, request_id,
            )  # fmt: skip
            outbox = link.outbox
            if (
                link.result_collected
                and link.uncollected > 0
                and outbox.size < BUFFERED_BYTES
                and len(outbox.messages) < BUFFERED_MESSAGES
                and link.reader is None
            ):
                link.result_collected = False
            else:
                link.result_collected = False
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
        """Run the model once and iterate over its answers as they arrive. Also works for a model with a single answer.

        At most `window` answers are in flight or buffered: a model that is faster than its reader is held back.
        `timeout` covers all answers together. Leaving the loop early cancels the request.
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
        """An uninitialised array in shared memory. As an input it is not copied, nor are its slices. `device`: allocate
        it in the memory of a GPU, e.g. "cuda:0".
        """
        link = self._link
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise InvalidRequest(f"shape {list(sizes)} has a negative dim")
        with link.lock:
            memory = link.session.memory
            return memory.empty(sizes, np.dtype(dtype)) if device is None else memory.empty_on(device, sizes, dtype)

    def flush(self) -> None:
        """Send buffered requests, and release the memory of results that were dropped."""
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
        """Run an operation. An interrupt (KeyboardInterrupt, SystemExit) cancels it."""
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
        """Whether a server is running and not shutting down."""
        try:
            return bool(self._ask("live")["live"])
        except ConnectionLost:
            return False

    def ready(self, model: str | None = None, version: int | str | None = None) -> bool:
        """Whether the server, or this model, accepts requests. False if there is no server; raises NotFound for an
        unknown model.
        """
        try:
            return bool(self._ask("ready", model or "", version)["ready"])
        except ConnectionLost:
            return False

    def wait_ready(self, model: str | None = None, timeout: float | None = None) -> None:
        """Wait until the server, or this model, accepts requests. Raises DeadlineExceeded after `timeout` seconds, or
        Unavailable as soon as loading has failed and waiting cannot help.

        Also waits for a server that is not running yet, and for a model that does not exist yet.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        wait = ReadyWait(self.url, model, timeout)
        while True:
            try:
                answer = self._ask("ready", model or "", None, wait.time_left())
                if answer["ready"]:
                    return
                wait.not_yet(answer)
            except ServeError as error:
                wait.failed(error)
            if wait.is_over():
                raise wait.error(self._index())
            self._link.pause(wait.next_pause())

    def _index(self) -> list[dict[str, Any]]:
        """The models' states for an error text; empty if the server does not answer."""
        try:
            answer: list[dict[str, Any]] = self._ask("models", timeout=1.0)
        except ServeError:
            return []
        return answer

    def models(self) -> list[dict[str, Any]]:
        """Every version of every model: name, version, state, reason, default, loading_seconds, reloading,
        changed_on_disk, last_failed_change, instances.

        A model that was never loaded has the version "" and the state "".
        """
        answer: list[dict[str, Any]] = self._ask("models")
        return answer

    def metadata(self, model: str | None = None, version: int | str | None = None) -> dict[str, Any]:
        """Inputs and outputs of a model; without a model, the server's name, version and extensions."""
        answer: dict[str, Any] = self._ask("metadata", model or "", version)
        return answer

    def config(self, model: str, version: int | str | None = None) -> dict[str, Any]:
        """The model's configuration, completed by the server."""
        answer: dict[str, Any] = self._ask("config", model, version)
        return answer

    def origins(self, model: str, version: int | str | None = None) -> dict[str, Any]:
        """The configuration ("config"), the source of each value ("origins": path -> file, override, model or default),
        and both as config.pbtxt with comments ("text").
        """
        answer: dict[str, Any] = self._ask("origins", model, version)
        return answer

    def statistics(self, model: str | None = None, version: int | str | None = None) -> dict[str, Any]:
        """Counts and times of one model or of all, in Triton's format: {"model_stats": [...]}."""
        answer: dict[str, Any] = self._ask("statistics", model or "", version)
        return answer

    def metrics(self) -> str:
        """All metrics of the server, in the Prometheus text format."""
        answer: str = self._ask("metrics")
        return answer

    def activity(self) -> dict[str, Any]:
        """What runs now: the server, every version of every model with its counters and instances, clients, GPUs."""
        answer: dict[str, Any] = self._ask("activity")
        return answer

    def logs(self, model: str | None = None, after: int = 0) -> dict[str, Any]:
        """The latest records of the server's log, or of one model; with `after`, those after this number."""
        answer: dict[str, Any] = self._ask("logs", model or "", after or None)
        return answer

    # ------------------------------------------------------------------------------------ operations

    def record(self, do: str = "start", recording: int = 0, models: Sequence[str] = ()) -> dict[str, Any]:
        """Record all requests and batches of these models, or of all: start, then read every second, then stop until
        no `more` is left.

        The server drops a recording that is not read for 10 s. `shmserve trace` makes a timeline of it.
        """
        answer: dict[str, Any] = self._operate("record", "", None, self._timeout, recorded(do, recording, models))
        return answer

    def load(
        self,
        model: str,
        *,
        config: Mapping[str, Any] | str | None = None,
        files: Mapping[str, bytes | os.PathLike[str]] | None = None,
        previous: bool = False,
        versions: Sequence[int] = (),
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Load a model, or apply the changes to a loaded one; returns when it is READY.

        `config` (a mapping, or its JSON) replaces the configuration file. With `files` (names such as "1/model.onnx"
        mapped to bytes or paths), the model is not read from the repository at all. `previous` rolls back to the state
        before the last load, in every control mode. `versions`: serve exactly these instead of those that the
        configuration selects. Without `timeout` there is no time limit.
        """
        operation, body = loading(config, files, previous, versions)
        answer: dict[str, Any] = self._operate(operation, model, None, timeout, body)
        return answer

    def unload(
        self,
        model: str,
        *,
        unload_dependents: bool = False,
        wait: bool = True,
        force: bool = False,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Unload a model; earlier requests are answered first. Without `wait`, return immediately.

        `unload_dependents`: also unload the models that were loaded only because this ensemble needs them. `force`:
        fail earlier requests, and kill the model's processes. DeadlineExceeded names what is still pending; the model
        keeps unloading.
        """
        body = of_unload(unload_dependents, wait, force, timeout)
        longer = None if timeout is None else timeout + UNLOAD_MARGIN_S
        answer: dict[str, Any] = self._operate("unload", model, None, longer, body)
        return answer

    def traffic(
        self,
        model: str,
        *,
        shares: Mapping[int, int] | None = None,
        aliases: Mapping[str, int | None] | None = None,
        shadow: Mapping[int, int] | None = None,
    ) -> dict[str, Any]:
        """Apply the given changes, and return how requests without a version are divided.

        `shares` maps versions to percent and replaces earlier shares; the rest goes to the highest version without a
        share. `aliases` maps names to versions: "MODEL@NAME" is then that version. None as version removes an alias.
        `shadow` maps a version to the percentage of these requests that are also sent to it, to compare the responses;
        {}: none.
        """
        if shares is None and not aliases and shadow is None:
            found: dict[str, Any] = self._ask("traffic", model)
            return found
        body = of_traffic(shares, aliases, shadow)
        answer: dict[str, Any] = self._operate("set_traffic", model, None, None, body)
        return answer

    def restart(
        self,
        model: str,
        *,
        version: int | str | None = None,
        instance: str | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Replace the processes of a model, or of one version or instance of it; returns when the new ones serve."""
        body = of_json({"instance": instance or ""})
        answer: dict[str, Any] = self._operate("restart", model, version, timeout, body)
        return answer

    def service(self) -> dict[str, Any]:
        """Whether the server is out of service (`drain`), and its remaining work: requests, sequences, quiet_seconds.

        quiet_seconds: how long a server that is out of service has had no request and no sequence.
        """
        answer: dict[str, Any] = self._ask("service")
        return answer

    def drain(self) -> dict[str, Any]:
        """Take the server out of service: it reports not ready, but still answers every request that arrives. Returns
        at once; `service` tells when it is empty.
        """
        answer: dict[str, Any] = self._operate("set_service", "", None, self._timeout, of_service(True))
        return answer

    def undrain(self) -> dict[str, Any]:
        """Put the server back into service after `drain`."""
        answer: dict[str, Any] = self._operate("set_service", "", None, self._timeout, of_service(False))
        return answer

    # ------------------------------------------------------------------------------------ closing

    def close(self) -> None:
        """Close the connection. Unanswered requests are cancelled; results stay valid."""
        self._link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<shmserve.Client {self.url}{' (closed)' if self._link.closed else ''}>"


def default_name() -> str:
    """The client's default name in the server's log."""
    return os.path.basename(sys.argv[0] or "python")[:100]
