"""The source of a live view's documents, and the operations that it supports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlsplit

from shmserve.transport.http_link import HttpLink

Record = Mapping[str, Any]
"""A record of the log: `time`, `level`, `text` and others."""
Curves = Mapping[str, Sequence[float | None]]
Step = Mapping[str, Any]
"""A step of an ensemble, with the counters of its executions, as in the answer to the query `report`."""
OPERATIONS = ("load", "unload", "restart")
FIRST = 0.25
"""A live view reads a second time after this fraction of its interval, to show rates early."""
Result = TypeVar("Result")


class Source(Protocol):
    """A server. All methods may block, and raise ServeError. They are called from any thread, but only one read at a
    time."""

    @property
    def where(self) -> str:
        """The displayed address."""

    @property
    def operations(self) -> tuple[str, ...]:
        """Those of OPERATIONS that it supports."""

    def read(self) -> Mapping[str, Any]:
        """A document, as `view` describes it."""

    def operate(self, what: str, model: str, version: int | None, instance: str) -> list[str]:
        """Runs one of its operations until it is complete, and returns the warnings about it. Version and instance are
        for restarts: None and "" mean all."""

    def log(self, model: str) -> Sequence[Record]:
        """The latest records of the model's log."""

    def history(self, model: str, version: int | None) -> Curves:
        """What the gateway has recorded in the last five minutes, once a second; {} if nothing records it."""

    def recent(self) -> Sequence[Mapping[str, Any]]:
        """`requests`, per second, of the last minute, with `name` and `version`, as the gateway has recorded them."""

    def steps(self, model: str, version: int | None) -> Sequence[Step]:
        """The steps of an ensemble; none if it is not an ensemble."""

    def close(self) -> None:
        """Ends calls in progress."""


class Operator(Protocol):
    """The part of a client that a source needs."""

    @property
    def url(self) -> str: ...

    def activity(self) -> dict[str, Any]: ...

    def load(self, model: str) -> dict[str, Any]: ...

    def unload(self, model: str) -> dict[str, Any]: ...

    def restart(
        self, model: str, *, version: int | str | None = None, instance: str | None = None
    ) -> dict[str, Any]: ...

    def logs(self, model: str | None = None) -> dict[str, Any]: ...

    def report(self, model: str, version: int | str | None = None) -> dict[str, Any]: ...

    def close(self) -> None: ...


def recent_of(link: HttpLink, path: str) -> Sequence[Mapping[str, Any]]:
    document: dict[str, Any] = link.call("GET", f"{path}/page/history")
    trends: Sequence[Mapping[str, Any]] = document["trends"]
    return trends


def steps_of(report: Mapping[str, Any]) -> Sequence[Step]:
    steps: Sequence[Step] = (report.get("graph") or {}).get("steps", ())
    return steps


def curves_of(link: HttpLink, path: str, model: str, version: int | None) -> Curves:
    """`path`: of the gateway, before that of the history."""
    if version is None:
        return {}
    document: dict[str, Any] = link.call("GET", f"{path}/page/history/{quote(model, safe='')}/versions/{version}")
    curves: Curves = document["fine"]
    return curves


class ServerSource:
    """A server over the lane, ZeroMQ, or ZeroMQ over TCP."""

    operations = OPERATIONS

    def __init__(self, client: Operator) -> None:
        self._client = client

    @property
    def where(self) -> str:
        return self._client.url

    def read(self) -> Mapping[str, Any]:
        return self._client.activity()

    def operate(self, what: str, model: str, version: int | None, instance: str) -> list[str]:
        client = self._client
        if what == "load":
            answer = client.load(model)
        elif what == "unload":
            answer = client.unload(model)
        else:
            answer = client.restart(model, version=version, instance=instance or None)
        return list(answer.get("warnings", ()))

    def log(self, model: str) -> Sequence[Record]:
        records: Sequence[Record] = self._client.logs(model)["records"]
        return records

    def history(self, model: str, version: int | None) -> Curves:
        return self._of_gateway(lambda link: curves_of(link, "", model, version), {})

    def recent(self) -> Sequence[Mapping[str, Any]]:
        return self._of_gateway(lambda link: recent_of(link, ""), ())

    def _of_gateway(self, ask: Callable[[HttpLink], Result], without: Result) -> Result:
        """`without`: the result if the server has no gateway, which listens on the server's machine."""
        port = self._client.activity()["server"].get("ports", {}).get("http")
        if port is None:
            return without
        host = urlsplit(self.where).netloc.rpartition(":")[0] or "localhost"  # a URL of a socket has no host
        with closing(HttpLink("http", f"{host}:{port}", "")) as link:
            return ask(link)

    def steps(self, model: str, version: int | None) -> Sequence[Step]:
        return steps_of(self._client.report(model, version))

    def close(self) -> None:
        self._client.close()
