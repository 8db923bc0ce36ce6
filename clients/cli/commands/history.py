"""`shmserve stats --history`: shows curves of the last hour, which a gateway has recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shmserve.errors import ServeError
from shmserve.terminal.console import BAD, Column, Screen, nonzero
from shmserve.terminal.errors import Failed
from shmserve.terminal.tables import duration_text

if TYPE_CHECKING:
    from shmserve.clients.cli.commands.base import AnyClient
    from shmserve.clients.http_client import HttpClient

Curve = Sequence["float | None"]
HISTORY = (
    Column("model"),
    Column("version", right=True, rank=1),
    Column("requests/s, last hour"),
    Column("now", right=True),
    Column("highest", right=True),
    Column("failed/s", right=True, style=nonzero(BAD)),
    Column("p99", right=True),
    Column("highest p99", right=True, rank=1),
)
MINUTES = 60


def recorder_of(client: AnyClient) -> HttpClient:
    """The gateway of the server."""
    from shmserve.clients.http_client import HttpClient

    if isinstance(client, HttpClient):
        return client
    port = client.activity()["server"].get("ports", {}).get("http")
    if port is None:
        raise Failed("the gateway of the HTTP endpoint records the history, and the server has none (--allow-http)")
    return HttpClient(f"http://localhost:{port}")


def read(recorder: HttpClient, versions: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """The history of the server, and those of versions of models."""
    try:
        histories = [{"name": "all models", "version": "", **recorder.history()}]
        return histories + [
            {"name": name, "version": number, **recorder.history(name, number)} for name, number in versions
        ]
    except ServeError as error:
        raise Failed(f"{error}; the gateway records the history: name it by --url, with --token-file") from error


def text(histories: Sequence[Mapping[str, Any]], screen: Screen) -> str:
    """A column of the curve shows the highest value of a minute."""
    from shmserve.tools.top.panels import sparkline
    from shmserve.tools.top.texts import rate_text

    rows = []
    for one in histories:
        requests, slowest = (_minutes(one["coarse"][name]) for name in ("requests", "p99"))
        now = {name: values[-1] for name, values in one["fine"].items()}
        rows.append(
            [
                one["name"],
                one["version"],
                sparkline(requests, MINUTES),
                _shown(now["requests"], rate_text),
                _shown(_highest(requests), rate_text),
                _shown(now["failed"], rate_text),
                _shown(now["p99"], duration_text),
                _shown(_highest(slowest), duration_text),
            ]
        )
    return screen.table(HISTORY, rows)


def _minutes(values: Curve) -> list[float | None]:
    size = len(values) // MINUTES
    return [_highest(values[at : at + size]) for at in range(0, len(values), size)]


def _highest(values: Curve) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)
