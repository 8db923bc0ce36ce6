"""The queries and operations of both clients."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from shmserve.clients.waiting import ReadyWait
from shmserve.errors import ConnectionLost, ServeError
from shmserve.session.arguments import check_seconds
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

Document = TypeVar("Document")
Documents = TypeVar("Documents")
Text = TypeVar("Text")
Entered = TypeVar("Entered", bound="BlockingQueries")


class Queries(ABC, Generic[Document, Documents, Text]):
    """The type arguments are the types of the answers: documents for `Client`, awaitables of them for `AsyncClient`."""

    _timeout: float | None

    @abstractmethod
    def _ask(self, what: str, model: str = "", version: int | str | None = None, timeout: float | None = None) -> Any:
        """The answer to a query, or a coroutine that returns it."""

    @abstractmethod
    def _operate(self, what: str, model: str, version: int | str | None, timeout: float | None, body: Body) -> Any:
        """The outcome of an operation, or a coroutine that returns it."""

    def models(self) -> Documents:
        """Every version of every model: name, version, state, reason, default, loading_seconds, reloading,
        changed_on_disk, last_failed_change, instances.

        A model that was never loaded has the version "" and the state "".
        """
        return self._ask("models")

    def metadata(self, model: str | None = None, version: int | str | None = None) -> Document:
        """Inputs and outputs of a model; without a model, the server's name, version and extensions."""
        return self._ask("metadata", model or "", version)

    def config(self, model: str, version: int | str | None = None) -> Document:
        """The model's configuration, completed by the server."""
        return self._ask("config", model, version)

    def origins(self, model: str, version: int | str | None = None) -> Document:
        """The configuration ("config"), the source of each value ("origins": path -> file, override, model or default),
        and both as config.pbtxt with comments ("text").
        """
        return self._ask("origins", model, version)

    def statistics(self, model: str | None = None, version: int | str | None = None) -> Document:
        """Counts and times of one model or of all, in Triton's format: {"model_stats": [...]}."""
        return self._ask("statistics", model or "", version)

    def metrics(self) -> Text:
        """All metrics of the server, in the Prometheus text format."""
        return self._ask("metrics")

    def activity(self) -> Document:
        """What runs now: the server, every version of every model with its counters and instances, clients, GPUs."""
        return self._ask("activity")

    def report(self, model: str, version: int | str | None = None) -> Document:
        """What the page shows about one model: its recent errors and slow requests, and the steps of an ensemble."""
        return self._ask("report", model, version)

    def logs(self, model: str | None = None, after: int = 0) -> Document:
        """The latest records of the server's log, or of one model; with `after`, those after this number."""
        return self._ask("logs", model or "", after or None)

    # ------------------------------------------------------------------------------------ operations

    def record(self, do: str = "start", recording: int = 0, models: Sequence[str] = ()) -> Document:
        """Records all requests and batches of these models, or of all: starts, then reads every second, then stops
        until no `more` is left.

        The server drops a recording that is not read for 10 s. `shmserve trace` makes a timeline of it.
        """
        return self._operate("record", "", None, self._timeout, recorded(do, recording, models))

    def load(
        self,
        model: str,
        *,
        config: Mapping[str, Any] | str | None = None,
        files: Mapping[str, bytes | os.PathLike[str]] | None = None,
        previous: bool = False,
        versions: Sequence[int] = (),
        timeout: float | None = None,
    ) -> Document:
        """Loads a model, or applies the changes to a loaded one; returns when it is READY.

        `config` (a mapping, or its JSON) replaces the configuration file. With `files` (names such as "1/model.onnx"
        mapped to bytes or paths), the model is not read from the repository at all. `previous` rolls back to the state
        before the last load, in every control mode. `versions`: serve exactly these instead of those that the
        configuration selects. Without `timeout` there is no time limit.
        """
        operation, body = loading(config, files, previous, versions)
        return self._operate(operation, model, None, timeout, body)

    def unload(
        self,
        model: str,
        *,
        unload_dependents: bool = False,
        wait: bool = True,
        force: bool = False,
        timeout: float | None = None,
    ) -> Document:
        """Unloads a model; earlier requests are answered first. Without `wait`, returns immediately.

        `unload_dependents` also unloads the models that were loaded only because this ensemble needs them. `force`
        fails earlier requests and kills the model's processes. DeadlineExceeded names what is still pending; the model
        keeps unloading.
        """
        body = of_unload(unload_dependents, wait, force, timeout)
        longer = None if timeout is None else timeout + UNLOAD_MARGIN_S
        return self._operate("unload", model, None, longer, body)

    def traffic(
        self,
        model: str,
        *,
        shares: Mapping[int, int] | None = None,
        aliases: Mapping[str, int | None] | None = None,
        shadow: Mapping[int, int] | None = None,
    ) -> Document:
        """Applies the given changes, and returns how requests without a version are divided.

        `shares` maps versions to percent and replaces earlier shares; the rest goes to the highest version without a
        share. `aliases` maps names to versions: "MODEL@NAME" is then that version. None as version removes an alias.
        `shadow` maps a version to the percentage of these requests that are also sent to it, to compare the responses;
        {}: none.
        """
        if shares is None and not aliases and shadow is None:
            return self._ask("traffic", model)
        body = of_traffic(shares, aliases, shadow)
        return self._operate("set_traffic", model, None, None, body)

    def restart(
        self, model: str, *, version: int | str | None = None, instance: str | None = None, timeout: float | None = None
    ) -> Document:
        """Replaces the processes of a model, or of one version or instance of it; returns when the new ones serve."""
        body = of_json({"instance": instance or ""})
        return self._operate("restart", model, version, timeout, body)

    def service(self) -> Document:
        """Whether the server is out of service (`drain`), and its remaining work: requests, sequences, quiet_seconds.

        quiet_seconds: how long a server that is out of service has had no request and no sequence.
        """
        return self._ask("service")

    def drain(self) -> Document:
        """Takes the server out of service: it reports not ready, but still answers every request that arrives. Returns
        at once; `service` reports when it is empty.
        """
        return self._operate("set_service", "", None, self._timeout, of_service(True))

    def undrain(self) -> Document:
        """Puts the server back into service after `drain`."""
        return self._operate("set_service", "", None, self._timeout, of_service(False))


class BlockingQueries(Queries[dict[str, Any], list[dict[str, Any]], str]):
    """The queries and operations of a client whose calls return answers."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The address of the server."""

    @abstractmethod
    def _pause(self, seconds: float) -> None:
        """Waits, unless the client is closed meanwhile."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connection."""

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
        """Waits until the server, or this model, accepts requests. Raises DeadlineExceeded after `timeout` seconds, or
        Unavailable as soon as loading has failed and waiting cannot help.

        Also waits for a server that is not running yet, and for a model that does not exist yet.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        wait = ReadyWait(self.url, model, timeout)
        while True:
            try:
                answer = self._ask("ready", model or "", None, wait.remaining_time())
                if answer["ready"]:
                    return
                wait.not_yet(answer)
            except ServeError as error:
                wait.failed(error)
            if wait.is_over():
                raise wait.error(self._index())
            self._pause(wait.next_pause())

    def _index(self) -> list[dict[str, Any]]:
        """The models' states for an error text; empty if the server does not answer."""
        try:
            answer: list[dict[str, Any]] = self._ask("models", timeout=1.0)
        except ServeError:
            return []
        return answer

    def __enter__(self: Entered) -> Entered:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
