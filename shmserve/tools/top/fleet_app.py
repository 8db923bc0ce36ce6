"""`shmserve top` of several servers on a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from textual import on

from shmserve.protocol.rates import Row
from shmserve.tools.top.fleet_poller import Pollers
from shmserve.tools.top.fleet_totals import BY_SERVER, FLEET_MODELS, FLEET_TABLES, FleetView, make_fleet_view
from shmserve.tools.top.panels import wrapped
from shmserve.tools.top.plain import fleet_summary
from shmserve.tools.top.screens import Lines
from shmserve.tools.top.table_view import TableView
from shmserve.tools.top.tables_app import KEYS_OF_TABLES, TablesApp, keys_line
from shmserve.tools.top.texts import Line

KEYS = {
    "servers": (("Enter", "this server"), ("/", "filter"), ("<>", "sort"), ("?", "help"), ("q", "quit")),
    "models": (("Enter", "by server"), ("/", "filter"), ("<>", "sort"), ("?", "help"), ("q", "quit")),
    "by-server": (("Enter", "its server"), ("Esc", "all models"), ("/", "filter"), ("?", "help"), ("q", "quit")),
}
HELP = (
    ("1 2 3, Tab", "servers, models over all servers, models by server"),
    ("Enter", "the server in detail, where q comes back; of a model: its servers"),
    *KEYS_OF_TABLES,
    ("q", "quit"),
)
DRAWN_S = 1.0
"""Maximum time until answers of servers are shown, however long the interval is."""


class FleetApp(TablesApp):
    """The result is the name of the server to show in detail."""

    def __init__(
        self,
        fleet: Pollers,
        interval: float,
        filter_text: str = "",
        sort_key: str | None = None,
        table: str = "servers",
        message: str = "",
    ) -> None:
        """`message`: why the server that was selected cannot be shown."""
        super().__init__(FLEET_TABLES, interval, filter_text, sort_key, table)
        self._fleet = fleet
        self._message = message
        self._model: str | None = None
        """The model to which the table by servers is limited."""
        self._view = self._now()

    # -------------------------------------------------------------------------------------- reading

    async def read(self) -> None:
        """Draws the latest answers of the servers, which are read in other threads."""
        if not self._paused:
            self._view = self._now()
        self.draw()

    def _now(self) -> FleetView:
        return make_fleet_view(self._fleet.snapshots, time.monotonic(), self.interval)

    def _pause_s(self) -> float:
        return min(self.interval, DRAWN_S)

    def action_refresh_now(self) -> None:
        self._fleet.set_interval(self.interval)
        self._fleet.refresh()
        super().action_refresh_now()

    # -------------------------------------------------------------------------------------- drawing

    def _rows(self, name: str) -> list[Row]:
        rows = self._view.table(name)
        if name == BY_SERVER.name and self._model is not None:
            return [row for row in rows if row["model"] == self._model]
        return rows

    def _unknown(self) -> frozenset[str]:
        return self._view.unknown

    def _summary(self, width: int) -> list[Line]:
        return fleet_summary(self._view, width)

    def _draw_bottom(self) -> None:
        if not self.is_running:
            return
        width = max(1, self.size.width)
        base = self._base
        base.query_one("#message", Lines).grow(self._reason(width))
        base.query_one("#keys", Lines).show([keys_line(KEYS[self._table.name], width)])

    def _reason(self, width: int) -> list[Line]:
        """Why the selected row is not READY."""
        if self._message:
            return wrapped(self._message, width, "bad")[:3]
        row = self._base.query_one(TableView).selected
        if row is None or not row.get("reason"):
            return []
        names = [row[key] for key in ("server", "model") if row.get(key) and not (key == "server" and "servers" in row)]
        return wrapped(f"{' '.join(names)}: {row['reason']}", width, "warn")[:3]

    def _help(self) -> Sequence[tuple[str, str]]:
        return HELP

    # -------------------------------------------------------------------------------------- keys

    @on(TableView.Opened)
    def open_row(self) -> None:
        row = self.query_one(TableView).selected
        if row is None:
            return
        if self._table is FLEET_MODELS:
            self._model = row["model"]
            self._show_table(BY_SERVER)
        else:
            self.exit(row["server"])

    def _forget(self) -> None:
        self._message, self._model = "", None
