"""The table of `bench.peers`: a row for each load, a column for each server."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench.lib import table
from bench.lib.wrk import WrkTurn

OURS = "shmserve"


@dataclass(frozen=True)
class Cell:
    """Medians of the turns of one server under one load. None: it failed."""

    model: str
    flight: int
    server: str
    per_s: float | None
    p50_us: float | None
    p99_us: float | None

    @staticmethod
    def of(model: str, flight: int, server: str, turns: Sequence[WrkTurn]) -> Cell:
        if not turns:
            return Cell(model, flight, server, None, None, None)
        rate, p50, p99 = (median(getattr(turn, name) for turn in turns) for name in ("per_s", "p50_us", "p99_us"))
        return Cell(model, flight, server, rate, p50, p99)

    def line(self) -> str:
        return f"{self.model}, {self.flight} in flight: {self.server} {self.text()}"

    def text(self) -> str:
        if self.per_s is None or self.p50_us is None or self.p99_us is None:
            return "failed"
        return f"{self.per_s:,.0f}, {milliseconds(self.p50_us)} ({milliseconds(self.p99_us)})"


RELAY = "relay"


def milliseconds(us: float) -> str:
    return f"{us / 1000:.3g}"


def markdown(cells: Sequence[Cell]) -> str:
    """Requests per second, and the median and 99th percentile of latency. The best server of each row is bold; the
    relay is a floor, not a server."""
    names = list(dict.fromkeys(cell.server for cell in cells))
    rows = []
    for model, flight in dict.fromkeys((cell.model, cell.flight) for cell in cells):
        results = {cell.server: cell for cell in cells if (cell.model, cell.flight) == (model, flight)}
        best = max((cell.per_s or 0 for name, cell in results.items() if name != RELAY), default=0)
        texts = [results[name].text() if name in results else "-" for name in names]
        bold = [bool(best) and name in results and results[name].per_s == best for name in names]
        marked = [f"**{text}**" if is_best else text for text, is_best in zip(texts, bold, strict=True)]
        rows.append([f"{model}, {flight} in flight", *marked])
    return table.markdown(["load", *names], rows)


def save(cells: Sequence[Cell], command: str, notes: dict[str, str]) -> Path:
    """Saves the results in bench/results, as a page and as JSON."""
    today = time.strftime("%Y-%m-%d", time.gmtime())
    facts = table.machine() | notes
    page = [
        f"# Beside other servers, {today}",
        "",
        f"Made by `{command}`: requests in a second, median and (99th percentile) of their time in ms. docs/compare.md",
        "",
        *(f"- {key}: {value}" for key, value in facts.items()),
        "",
        markdown(cells),
        "",
    ]
    path = table.RESULTS / f"{today}-{table.host_kind()}-peers.md"
    path.write_text("\n".join(page))
    record = {"date": today, "command": command, "machine": facts, "cells": [asdict(cell) for cell in cells]}
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    return path
